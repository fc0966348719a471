"""Errors of the command line: JSON where JSON was asked for, and options in place of Python's arguments."""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support.cli_calls import Call, damage

import tierstate as ts
from tierstate.cli.errors import in_options, run
from tierstate.manifest.format import table as col
from tierstate.manifest.format.record import decode_sections, encode_sections
from tierstate.run import Run


def test_attributes_that_are_nested_too_deeply_are_told_in_a_sentence(call: Call, policy: Path) -> None:
    path = policy.parent / "nvme/versions/gpt/000000000003"
    sections = {name: bytes(data) for name, data in decode_sections(memoryview(path.read_bytes())).items()}
    head, columns = col.decode_table(memoryview(sections["version"]), "version")
    attrs = ['{"a":' + 800 * "[" + 800 * "]" + "}" for _ in columns["leaf.attrs.end"]]
    sections["version"] = col.encode_table(head, columns | col.text_columns(attrs, "leaf.attrs"))
    path.write_bytes(encode_sections(sections))
    shown = call("show", "-p", policy, "-r", "gpt", "--json")
    if shown.status == 0:  # Python 3.14 writes JSON that is nested as deeply as the stack is long
        assert 800 * "[" in re.sub(r"\s", "", shown.out)
        return
    assert (shown.status, json.loads(shown.err)["error"]["message"]) == (
        2, "what was read is nested too deeply to be shown"
    )  # fmt: skip


WRONG: dict[str, tuple[list[str], str]] = {
    "no such step": (["show", "-r", "gpt", "--step", "99"], "NotFound"),
    "no such run": (["ls", "-r", "nobody"], "NotFound"),
    "no run's name": (["ls", "-r", "../../etc"], "ValueError"),
    "nothing to copy to": (["copy", "-r", "gpt"], "ValueError"),
    "no place": (["restore", "-r", "gpt", "/nowhere/at/all.pt"], "FileNotFoundError"),
    "no leaf": (["restore", "-r", "gpt", "/tmp/never-written.pt", "--only", "x.**"], "StateMismatch"),
    "not a number": (["show", "-r", "gpt", "--step", "x"], "UsageError"),
    "no run": (["show"], "UsageError"),
    "no such option": (["ls", "--bogus"], "UsageError"),
    "no such command": (["nonsense"], "UsageError"),
    "too many arguments": (["ls", "-r", "gpt", "more"], "UsageError"),
}


@pytest.mark.parametrize("name", WRONG)
def test_with_json_an_error_is_one_json_object_on_standard_error(
    call: Call, policy: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIERSTATE_RUN", raising=False)
    arguments, kind = WRONG[name]
    first = [] if kind == "UsageError" and arguments == ["nonsense"] else ["-p", str(policy)]
    plain = call(arguments[0], *first, *arguments[1:])
    answer = call(arguments[0], *first, *arguments[1:], "--json")
    assert (answer.status, answer.out) == (plain.status, "") == (2, "")
    error = json.loads(answer.err)["error"]
    assert (error["type"], error["status"]) == (kind, 2)
    assert error["message"] in " ".join(plain.err.split()) or kind == "UsageError"


def test_warnings_are_json_too(call: Call, policy: Path) -> None:
    damage(policy)
    answer = call("restore", "-p", policy, "-r", "gpt", policy.parent / "out.pt", "--json")
    *warnings, last = [json.loads(line) for line in answer.err.splitlines()]
    assert last["error"]["type"] == "Damaged"
    assert [list(each) for each in warnings] == [["warning"]] * len(warnings)
    assert warnings


def test_an_error_names_the_steps_that_are_there(call: Call, policy: Path) -> None:
    assert (
        "no version with step 99 in nvme, store; its steps: 1, 2, 3"
        in call("show", "-p", policy, "-r", "gpt", "--step", "99").err
    )
    with ts.Checkpointer(policy, "long") as ckpt:
        for step in range(0, 100, 5):
            ckpt.save({"a": step}, step=step)
    assert (
        "the nearest of its steps: 30, 35, 40, 45, 50, 55, 60, 65"
        in call("show", "-p", policy, "-r", "long", "--step", "47").err
    )


def test_messages_name_options(call: Call, policy: Path) -> None:
    told = call("copy", "-p", policy, "-r", "gpt").err
    assert ("(--to)" in told, "(--into)" in told, "to=" in told) == (True, True, False)
    record = policy.parent / "nvme/versions/gpt/000000000003"
    record.write_bytes(record.read_bytes()[:-1])
    told = call("restore", "-p", policy, "-r", "gpt", policy.parent / "out.pt").err
    assert ("say --older to go back" in told, "on_damage" in told) == (True, False)


OF_THE_NEWEST = {
    "copy": ["--to", "store"],
    "export": ["out.safetensors"],
    "fork": ["other"],
    "restore": ["out.pt"],
    "show": [],
    "tag": ["good"],
}


@pytest.mark.parametrize("command", OF_THE_NEWEST)
def test_messages_name_options_that_the_command_has(call: Call, policy: Path, command: str) -> None:
    """The newest version's record is damaged wherever there is one."""
    for tier in ("nvme", "object"):
        for record in sorted((policy.parent / tier / "versions/gpt").iterdir()):
            record.write_bytes(record.read_bytes()[:-1])
    told = call(command, "-p", policy, "-r", "gpt", *OF_THE_NEWEST[command])
    assert told.status == 2
    assert "name a step" in told.err
    named = set(re.findall(r"--[a-z][a-z-]*", re.sub("`tierstate [^`]*`", "", told.err)))
    assert named <= set(re.findall(r"--[a-z][a-z-]*", call(command, "--help").out))
    assert ("--older" in named) == (command == "restore")


def arguments_of_python() -> set[str]:
    """Keyword arguments of the public API."""
    kinds: list[Any] = [ts.Checkpointer, Run, ts.Policy]
    calls = [call for kind in kinds for name, call in vars(kind).items() if inspect.isfunction(call)]
    return {name for call in calls for name in inspect.signature(call).parameters} - {"self", "device"}


def messages() -> Iterator[tuple[str, str]]:
    """The text of every string in the library that is not documentation, and where it is."""
    top = Path(ts.__file__).parent
    # In a checkout the parts are links, which rglob does not follow.
    for path in sorted({path for part in (top, *top.iterdir()) if part.is_dir() for path in part.rglob("*.py")}):
        if {"cli", "dcp", "integrations"} & {*path.relative_to(top).parts}:
            continue  # the command line uses neither of the last two
        tree = ast.parse(path.read_text())
        plain = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
                yield "".join(map(str, parts)), f"{path.name}:{node.lineno}"
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in plain:
                yield node.value, f"{path.name}:{node.lineno}"


@pytest.mark.slow
def test_no_message_of_the_library_has_an_argument_that_is_no_option() -> None:
    """As the command line prints them. A string that is no sentence, such as a key, is no message, and no markup is."""
    names = arguments_of_python()
    assert {"on_damage", "allow_lossy", "into", "step"} <= names
    assigned = re.compile(rf"(?<![\w.\-])({'|'.join(sorted(names))})=(?!\s)")
    odd = re.compile(rf"\b({'|'.join(sorted(name for name in names if '_' in name))})\b")
    wrong = [
        (where, text)
        for text, where in messages()
        if " " in text and "restore(" not in text and not re.search(r"<\w+ ", text)
        for shown in [in_options(text)]
        if assigned.search(shown) or odd.search(shown)
    ]
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, tmp_path: Path) -> None:
    """Of the program itself, in a process with a home of its own."""
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(p for p in sys.path if p)}
    env["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"  # or it is the shell that runs the tests
    program = [sys.executable, "-m", "tierstate"]
    shown = subprocess.run([*program, "--show-completion", shell], capture_output=True, text=True, env=env, check=False)
    assert (shown.returncode, "_TIERSTATE_COMPLETE" in shown.stdout) == (0, True), shown
    words = {"COMP_WORDS": "tierstate do", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "tierstate do"}
    fish = {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_WORD_TO_COMPLETE": "do"}
    found = subprocess.run(
        program, capture_output=True, text=True, check=False,
        env={**env, **words, **fish, "_TIERSTATE_COMPLETE": f"complete_{shell}"},
    )  # fmt: skip
    assert "doctor" in found.stdout, found


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupt_is_told_by_the_exit_status(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    def interrupted() -> None:
        raise typer.Abort

    assert run(interrupted, as_json=as_json) == 130
    err = capsys.readouterr().err
    assert (json.loads(err)["error"]["type"] if as_json else err) == (
        "Aborted" if as_json else "tierstate: interrupted\n"
    )


def test_a_defect_is_json_where_json_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise AssertionError("never")

    with pytest.raises(AssertionError):
        run(broken, as_json=False)
    assert run(broken, as_json=True) == 2
    error = json.loads(capsys.readouterr().err)["error"]
    assert (error["type"], "never" in error["traceback"]) == ("AssertionError", True)


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
@pytest.mark.parametrize(
    "words", [["ls", "-r", "gpt"], ["policy", "check"], ["show", "-r", "gpt", "--step", "99", "--json"]]
)
def test_a_stream_that_is_closed_ends_no_command_and_gets_nothing(
    call: Call, policy: Path, words: list[str], closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["policy", "check", str(policy)] if words[0] == "policy" else [words[0], "-p", str(policy), *words[1:]]
    usual = call(*line)
    monkeypatch.setattr(sys, closed, None)
    other = call(*line)
    getattr(sys, closed).close()  # what took its place
    assert other.status == usual.status
    assert (other.out, other.err) == ("" if closed == "stdout" else usual.out, "" if closed == "stderr" else usual.err)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("as_json", [False, True])
def test_characters_that_the_encoding_of_the_stream_has_not_are_escaped(
    call: Call, policy: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, as_json: bool
) -> None:
    names = ["n\u00e9", "\u20ac", "\U0001f600"]
    with ts.Checkpointer(policy, "names") as ckpt:
        ckpt.save(dict.fromkeys(names, 1), step=1)
    for words, stream in ((["-r", "names"], "stdout"), (["-r", "names", "--only", names[2] * 2], "stderr")):
        written = io.BytesIO()
        with monkeypatch.context() as patched:
            patched.setattr(sys, stream, io.TextIOWrapper(written, encoding=encoding))
            status = call("show", "-p", policy, *words, *(["--json"] if as_json else [])).status
            getattr(sys, stream).flush()
            text = written.getvalue().decode(encoding)
        assert status == (0 if stream == "stdout" else 2)
        if as_json:
            told = json.loads(text)
            told = [leaf["path"] for leaf in told["leaves"]] if stream == "stdout" else told["error"]["message"]
            assert all(any(name in one for one in told) if stream == "stdout" else name in told for name in names)
        else:
            assert r"\u20ac" in text
            assert r"\U0001f600" in text
