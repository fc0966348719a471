"""Every code block of the README and of all pages is run, or at least read by what would read it.

Python that is no file of a guide (`test_how_to.py`) runs here, in one process, with the names of `GIVEN`. YAML is a
policy or a part of one. Commands of ``tierstate`` are parsed as the command line parses them, those of the README run.
"""

from __future__ import annotations

import ast
import configparser
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import typer
import yaml
from support.doc_blocks import BLOCKS, GUIDES, PAGES, ROOT, Block

import tierstate as ts
from tierstate.cli import app, main
from tierstate.tiers.policy.policy import Policy

INDENTED = re.compile(r"```.*?```|^ *(?:[*\-]|\d+\.) .*\n(?:\n? {2,}.*\n)*", re.MULTILINE | re.DOTALL)
"""What may be indented: fenced blocks, and items of lists."""

COMMAND = typer.main.get_command(app)
VARIABLES = {"USER": "me", "PROJECT": "p", "BUCKET": "b", "CHECKPOINT_KEY": "ab" * 32}
MAKEFILE = ROOT / "Makefile"

GIVEN = """
import h5py
import numpy as np
import torch
import tierstate as ts

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
batches = [torch.randn(2, 4) for _ in range(3)]
loader = ts.Loader(torch.utils.data.DataLoader(range(8), batch_size=2, shuffle=True))
policy = ts.Policy.load("cluster.yaml")
step, steps, loss = 0, 3, 2.5
state = {"model": model, "optimizer": optimizer, "step": 0}

def train_one_step(state):
    state["step"] += 1
"""
"""What pages take for granted in an excerpt: the names that a training script has."""

CLUSTER = "tiers: {nvme: {type: nvme, path: nvme}, s3: {type: object, url: 'file://%s/s3'}}\narena: {size: 32MiB}\n"

BEFORE = {
    "docs/how-to/export-and-import.md": (
        "with ts.Checkpointer('cluster.yaml', run='gpt') as ckpt: ckpt.save(state, step=0)\n"
        "with h5py.File('other.h5', 'w') as file: file['w'] = np.ones(3)\n"
    ),
    "docs/how-to/hdf5-state.md": "with h5py.File('tables.h5', 'w') as file: file['rows'] = np.ones(3)\n",
    "docs/how-to/open-packs-with-other-tools.md": (
        "with ts.Checkpointer('cluster.yaml', run='my-run') as ckpt: ckpt.save(state, step=0)\n"
    ),
}
"""By page: what is there before its code runs."""


def named(*languages):
    """The blocks of languages, as parameters. Nothing of them is run, so it does not matter whether they are marked."""
    return [pytest.param(block, id=block.name) for block in BLOCKS if block.language in languages]


PYTHON = [block for block in BLOCKS if block.language == "python"]
EXCERPTS = [b for b in PYTHON if not b.reason and not b.file and b.page != "README.md"]


def test_every_block_has_a_check():
    languages = Counter(block.language for block in BLOCKS)
    assert languages.keys() <= {"python", "diff", "yaml", "sh", "console", "toml", "json", "ini", "text"}, languages
    fences = sum(len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(BLOCKS)
    for page in PAGES:  # a block that is only indented would be looked at by nothing
        text = INDENTED.sub("", page.read_text())
        assert not re.search(r"^\n {4}\S", text, re.MULTILINE), f"{page}: an indented block; fence it"
    for block in BLOCKS:
        if block.file and not block.reason:
            guide = GUIDES.get(Path(block.page).name)
            assert guide is not None, f"{block.name}: no test runs the files of this page"
            assert block.file in guide.files, f"{block.name}: {block.file} is run by no test"


def test_the_python_of_the_readme_is_run_by_its_own_test():
    assert sum(block.page == "README.md" for block in PYTHON) == 2


@pytest.mark.parametrize("block", [pytest.param(block, id=block.name) for block in PYTHON if block.reason])
def test_python_that_is_not_run_is_python(block: Block):
    ast.parse(block.text)


@pytest.mark.slow
@pytest.mark.xdist_group("excerpts")  # the first one imports what all of them need
@pytest.mark.parametrize("block", [pytest.param(block, id=block.name) for block in EXCERPTS])
def test_python_runs(block: Block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(CLUSTER % tmp_path)
    names: dict[str, object] = {"__name__": "excerpt"}
    exec(GIVEN, names)
    exec(f"torch.manual_seed(0)\n{BEFORE.get(block.page, '')}", names)
    exec(compile(block.text, block.name, "exec"), names)


@pytest.mark.parametrize("block", named("diff"))
def test_a_diff_adds_lines_that_are_python_after_it(block: Block):
    lines = block.text.splitlines()
    assert all(line[:1] in ("+", "-", " ", "") for line in lines)
    ast.parse("\n".join(line[1:] for line in lines if not line.startswith("-")))


@pytest.mark.parametrize("block", named("yaml"))
def test_yaml_is_a_policy_or_a_part_of_one(block: Block, monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    text = block.text
    if "tiers" not in yaml.safe_load(text):
        text += "\ntiers: {nvme: {type: nvme, path: /local/ckpt}}\n"
    Policy.parse(text, block.name)


@pytest.mark.parametrize("block", named("toml", "json"))
def test_toml_and_json_can_be_read(block: Block):
    assert {"toml": tomllib.loads, "json": json.loads}[block.language](block.text)


@pytest.mark.parametrize("block", named("ini"))
def test_ini_is_ini_and_its_commands_are_parsed(block: Block):
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str
    parser.read_string(block.text)
    for section in parser.values():
        for key, value in section.items():
            if key.startswith("Exec"):
                check_command(shlex.split(value))


@pytest.mark.parametrize("block", named("sh", "console"))
def test_commands_are_such_that_shell_and_tierstate_take_them(block: Block, monkeypatch):
    monkeypatch.setenv("TIERSTATE_POLICY", "policy.yaml")  # as the page on the command line says
    monkeypatch.setenv("TIERSTATE_RUN", "gpt")
    text = block.text
    if block.language == "console":
        text = "\n".join(line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ "))
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|\|\||[;|]", line) if "'" not in line else [line]:
            check_command(words_of(part))


def words_of(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a part of what is quoted
        return []


def check_command(words: list[str]) -> None:
    """A command of tierstate has the options that are given, and one of this repository is there."""
    while words and re.fullmatch(r"[A-Z_]+=.*|timeout|\d+|srun|runuser|-u|\$SLURM_JOB_USER|--", words[0]):
        words = words[1:]
    if not words:
        return
    program, *rest = words
    rest = [word for word in rest if word not in ("2>&1", "||", "true")]
    if program.rpartition("/")[2] == "tierstate":
        parse(rest)
    elif program == "make" and MAKEFILE.exists():
        wanted = [word for word in rest if "=" not in word]
        rules = MAKEFILE.read_text().replace("$(VENV)", ".venv")
        assert all(re.search(rf"^[^\t\n#]*{re.escape(word)}[^\n=]*:", rules, re.MULTILINE) for word in wanted), words
    elif re.search(r"python[\d.]*$", program) and rest[:1] == ["-m"]:
        assert is_module(rest[1]), words
    for word in rest:
        if word.startswith(("tests/", "examples/")):
            assert (ROOT / word.partition("::")[0]).exists(), f"{word} does not exist"


def is_module(name: str) -> bool:
    """Whether ``python -m`` finds it, in the checkout or where it is installed."""
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or path.is_dir() or find_spec(name) is not None


def parse(words: list[str]) -> None:
    """Parse a command of ``tierstate`` as the command line does, and do not run it."""
    command, words = COMMAND, list(words)
    while commands := getattr(command, "commands", None):
        name = words.pop(0)
        assert name in commands, f"tierstate {name}: there is no such command"
        command = commands[name]
    command.make_context(command.name, words)


@pytest.mark.slow
def test_the_commands_of_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("policy.yaml").write_text(
        "arena: {size: 32MiB}\ntiers:\n  nvme: {type: nvme, path: nvme}\n"
        f"  s3: {{type: object, url: 'file://{tmp_path}/s3', every: 2}}\n"
    )
    example = next(block.text for block in PYTHON if block.page == "README.md")
    exec(example.replace('ts.Policy.default("checkpoints")', '"policy.yaml"'), {})
    torch.save({"w": torch.ones(3)}, "old.pt")
    (block,) = [block for block in BLOCKS if block.page == "README.md" and "tierstate ls" in block.text]
    for line in block.text.splitlines():
        program, *words = words_of(line)
        assert program == "tierstate"
        if "--live" in words:  # it measures the disk; tests/cli/test_live.py runs it
            continue
        monkeypatch.setattr(sys, "argv", [program, *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == (1 if words[0] == "diff" else 0), line  # as of diff: 1, there are differences
    assert torch.load("model.pt").keys() == {"model"}
    assert Path("model.safetensors").exists()


MOVED = """
metrics: {{events: true}}
seal: {{file: key}}
arena: {{size: 32MiB}}
tiers: {{nvme: {{type: nvme, path: {}, encrypt: true}}}}
"""


@pytest.mark.slow
def test_a_repository_is_moved_by_the_commands_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("key").write_text("ab" * 32)
    Path("key").chmod(0o600)
    with ts.Checkpointer(Policy.parse(MOVED.format("nvme")), "gpt") as ckpt:
        for step in range(3):
            ckpt.save({"w": torch.full((9,), step)}, step=step).wait()
        ckpt.tag("best", 1)
        ckpt.fork("other", 1)
        ckpt.remove(step=0)
    here = {path.name for path in Path("nvme").iterdir()}
    (block,) = [block for block in BLOCKS if block.page == "docs/how-to/recover.md" and "cp -r" in block.text]
    commands = "".join(line for line in block.text.splitlines(keepends=True) if not line.startswith("tierstate"))
    subprocess.run(["bash", "-euc", commands], check=True)
    assert {path.name for path in Path("new/nvme").iterdir()} == here - {"index"}
    Path("nvme").rename("gone")
    with ts.Checkpointer(Policy.parse(MOVED.format("new/nvme")), "gpt") as ckpt:
        assert ckpt.verify(deep=True).ok
        assert ckpt.load(tag="best")["w"][0] == 1
        assert [event for event in ckpt.events() if event.kind == "committed"]
