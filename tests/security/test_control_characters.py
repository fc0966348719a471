"""Names, metadata and messages with characters that a terminal obeys: no command prints one, and JSON keeps them."""

import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tierstate as ts
from tierstate.cli import main
from tierstate.cli.output.lines import say, table
from tierstate.manifest.errors import TierError
from tierstate.manifest.printable import escape_controls, escape_json
from tierstate.tiers.object.filesystem import store_errors_translated

EVIL = "a\x1b[2J\x1b]0;owned\x07\r\nFORGED\x9b31m\x7f\u202egnp.exe\u2066\u200b\ue000\U000e0041[red]z"
"""Clears the screen, sets a title, forges a line; C1, DEL, bidirectional overrides, invisible and private ones."""

POLICY = """
version: 1
chunk: 4KiB
arena: {{size: 64KiB}}
tiers:
  nvme: {{type: nvme, path: "${{ODD}}"}}
  store: {{type: object, url: "file://{other}"}}
rules:
  - {{match: "**.p", pickle: true}}
"""


def is_safe(text: str) -> bool:
    return all(one.isprintable() or one == "\n" for one in text) and "\nFORGED" not in text


@given(st.text(st.characters(exclude_categories=())))
def test_what_is_escaped_is_printable_and_what_is_printable_stays(text: str) -> None:
    escaped = escape_controls(text)
    assert escaped.isprintable()
    assert (escaped == text) is text.isprintable()


@given(
    st.recursive(st.text(st.characters(codec="utf-8")), lambda inner: st.dictionaries(st.text(), inner), max_leaves=4)
)
def test_json_says_the_same(value: object) -> None:
    for indent in (None, 2):
        text = escape_json(json.dumps(value, ensure_ascii=False, indent=indent))
        assert is_safe(text)
        assert json.loads(text) == value


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in which every text that a user chooses is evil."""
    folder = tmp_path / EVIL.replace("/", "_")
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY.format(other=tmp_path / "object"))
    monkeypatch.setenv("ODD", str(folder))
    for step in (1, 2):
        with ts.Checkpointer(file, "run") as ckpt:
            state = {EVIL: {"w": torch.full((2000,), step), "text": f"{EVIL}{step}"}, f"{EVIL}{step}": 1}
            ckpt.save(state, step=step, metadata={EVIL: EVIL, "loss": 1.0})
    return file


VERBS = [
    "ls",
    "ls -r run",
    "show -r run",
    "show -r run --depth 1",
    "diff -r run 1 2",
    "diff -r run 1 2 --values",
    "verify -r run --deep",
    "doctor -r run",
    "tag -r run best",
    "tag -r run",
    "fork -r run other",
    "rm -r run --step 1 --dry-run",
    "prune -r run --dry-run",
    "rebuild -r run nvme --dry-run",
    "copy -r run --to store",
    "init",
    "restore -r run {out}/state.pt",
    "export -r run {out}/state.safetensors --skip-values",
    "export -r run {out}/state.h5",
    "import -r new {out}/state.safetensors",
    "show -r run --only {evil}",
    "show -r {evil}",
    "tag -r run {evil}",
    "show -r run --tag {evil}",
    "restore -r run {out}/{evil}/x.pt",
    "import -r new {out}/{evil}",
    "peer status",
]
"""All commands, those that fail too, with what they are told in their own arguments."""


def run(
    policy: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", ["tierstate", *words])
    monkeypatch.setenv("TIERSTATE_POLICY", str(policy))
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr()


@pytest.mark.slow
def test_no_command_prints_what_a_terminal_obeys(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    evil = EVIL.replace("/", "_")
    hits = 0
    for verb in VERBS:
        words = [word.format(out=out, evil=evil) for word in verb.split()]
        for more in ([], ["--json"]):
            said = run(policy, [*words, *more], monkeypatch, capsys)
            assert said[0] + said[1], verb
            assert is_safe(said[0] + said[1]), f"{verb} {more}: {said!r}"
            hits += "FORGED" in said[0] + said[1]
            if more and said[0]:
                json.loads(said[0])
    assert hits > len(VERBS) // 2, "the texts are there, as escapes"


@pytest.mark.slow
def test_damage_and_warnings_are_told_without_them(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / EVIL.replace("/", "_")
    for pack in (folder / "packs" / "run").iterdir():
        pack.chmod(0o600)
        pack.write_bytes(b"x")
    for verb in (
        ["verify", "-r", "run", "--deep"],
        ["doctor", "-r", "run"],
        ["restore", "-r", "run", str(tmp_path / "x")],
    ):
        for more in ([], ["--json"]):
            said = run(policy, [*verb, *more], monkeypatch, capsys)
            assert is_safe(said[0] + said[1]), said


def test_policies_are_checked_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.yaml"
    for text in (
        f"tiers: {{{json.dumps(EVIL)}: 1}}",
        f"tiers: {{n: {{type: {json.dumps(EVIL)}}}}}",
        f"durable: {json.dumps(EVIL)}",
    ):
        file.write_text(text)
        for more in ([], ["--json"]):
            assert is_safe("".join(run(file, ["policy", "check", str(file), *more], monkeypatch, capsys)))


def test_tables_of_any_length_are_safe(capsys: pytest.CaptureFixture[str]) -> None:
    for count in (3, 1001):
        table(["a", ">b"], [(EVIL, EVIL)] * count)
        out = capsys.readouterr().out
        assert is_safe(out)
        assert "[red]" in out, "no markup either"
    say(EVIL)
    assert capsys.readouterr().out.count("\n") == 1


def test_records_of_logs_cannot_be_forged(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("tierstate").warning("met %s", EVIL)
    assert is_safe(caplog.messages[0])
    assert "met a\\x1b[2J" in caplog.messages[0]


def test_messages_of_servers_are_one_line_and_plain() -> None:
    with pytest.raises(TierError) as caught, store_errors_translated("read", "s3", "a", "s3://b/a", frozenset()):
        raise RuntimeError(EVIL)
    assert str(caught.value).isprintable()
