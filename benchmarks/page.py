"""The page: the text of page.md with the tables of a run, and the plot beside it."""

from __future__ import annotations

from pathlib import Path
from string import Template

from benchmarks.field import NAMES, Missing, find
from benchmarks.results import Results
from benchmarks.rounds import TRAINED
from benchmarks.tables import cold_table, import_table, save_table, title, training_table, unchanged_table
from benchmarks.targets import targets_table
from benchmarks.training import STEPS

_TEXT = Path(__file__).with_name("page.md")


def write_page(results: Results, folder: Path) -> None:
    """Write benchmarks.md and benchmarks.png; the same results always make the same files."""
    from benchmarks.plot import draw  # which needs matplotlib; who only measures does not

    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw(results, folder / "benchmarks.png")
    text = Template(_TEXT.read_text()).substitute(
        machine="\n".join(f"* **{name}**: {fact}" for name, fact in results.machine.items()),
        cold=", ".join(sorted({s["cold"] for s in results.samples if "cold" in s})) or "nothing was read",
        trained=f"{TRAINED >> 20} MiB of state",
        steps=STEPS,
        rounds=" and ".join(map(str, results.options["rounds"])),
        missing=_missing(results),
        field=_field(results),
        plot="![seconds of each competitor](benchmarks.png)" if drawn else "",
        sizes="\n\n".join(_size(results, size) for size in results.sizes("save")) or _NONE,
        targets=targets_table(results) or _NONE,
        unchanged=unchanged_table(results) or _NONE,
        training=training_table(results) or _NONE,
        imports=import_table(results) or _NONE,
    )
    (folder / "benchmarks.md").write_text(text)


_NONE = "Not measured in this run."


def _size(results: Results, size: int) -> str:
    sample = results.pick("save", size=size)[0]
    head = f"### {sample['nbytes'] / 2**30:.2f} GiB, {sample['tensors']:,} tensors"
    cold = [cold_table(results, phase, size) for phase in ("restore", "load")]
    return "\n\n".join(filter(None, (head, save_table(results, size), *cold)))


def _field(results: Results) -> str:
    rows = ["| competitor | version | to know |", "| --- | --- | --- |"]
    rows += [f"| {title(n)} | {results.versions[n]} | {_note(n)} |" for n in NAMES if n in results.versions]
    return "\n".join(rows)


def _note(name: str) -> str:
    try:
        return find(name).note
    except Missing:
        return ""


def _missing(results: Results) -> str:
    lines = [f"* **left out**: {reason}" for reason in results.left_out]
    lines += [f"* **failed**: {reason.strip().splitlines()[-1]}" for reason in results.failures]
    return "\n".join(lines) or "* Nothing was left out, nothing failed."
