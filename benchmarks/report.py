"""How long the report of a long run takes to make, and to open in Chromium: 10,000 versions in 8 tiers, with events.

python -m benchmarks.report [--versions 10000] [--tiers 8] [--path DIR]

The records are real, and so are their indexes and the logs of events; the versions are of one small leaf each, as
nothing but records is read. Every figure is a median of three. Without `chromium` and Selenium nothing is opened.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import yaml

from benchmarks.machine import facts_line
from benchmarks.rounds import say
from benchmarks.tables import table
from benchmarks.versions import record, version
from tierstate.checkpointer import open_quietly
from tierstate.manifest.history.log import Log
from tierstate.telemetry.event_log import PIECE_EVENTS
from tierstate.tiers.posix.directory import Nvme

TIMES = 3
START = 1.6e9


def long_run(root: Path, versions: int, tiers: int) -> Path:
    """A policy whose tiers all have so many versions of the run ``run``, with indexes and events; its path."""
    names = [f"tier{number}" for number in range(tiers)]
    logs = {name: Log(Nvme(path=root / name), "run") for name in names}
    for seq in range(1, versions + 1):
        made = record(version(seq), "packs/run/000000000001-0-0-abc")
        if seq == 1:  # makes the folders
            for log in logs.values():
                log.commit(made)
        else:
            data = made.encode()
            for name, log in logs.items():
                (root / name / log.key(seq)).write_bytes(data)
    for name in names:
        write_events(root / name / "events" / "run", list(events(name, versions)))
    keep = {"last": versions // 2, "every": 100}
    document = {name: {"type": "nvme", "path": str(root / name), "keep": keep} for name in names}
    path = root / "policy.yaml"
    path.write_text(yaml.safe_dump({"metrics": {"events": True}, "tiers": document}, sort_keys=False))
    with open_quietly(path, "run") as ckpt:
        for tier_run in ckpt._tier_runs:
            tier_run.summaries.look()
            tier_run.summaries.write()
    return path


def events(tier: str, versions: int) -> Iterator[dict[str, object]]:
    """What a saver logs in one tier."""
    for seq in range(1, versions + 1):
        about = {"run": "run", "step": seq, "seq": seq}
        at = START + seq
        yield {"kind": "captured", "time": at + 0.2, "seconds": 0.2, "nbytes": 64, **about}
        yield {"kind": "saved", "time": at + 0.21, "seconds": 0.21, **about}
        more = {"tier": tier, "seconds": 0.5, "nbytes": 30, "raw": 64, "saved": at}
        yield {"kind": "committed", "time": at + 0.5, **about, **more}


def write_events(folder: Path, lines: list[dict[str, object]]) -> None:
    """In pieces, as `EventLog` writes them."""
    folder.mkdir(parents=True)
    for at in range(0, len(lines), PIECE_EVENTS):
        piece = lines[at : at + PIECE_EVENTS]
        name = f"{int(1000 * float(str(piece[0]['time']))):013d}-{uuid.uuid4().hex[:8]}.jsonl"
        (folder / name).write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in piece))


def made(policy: Path, to: Path) -> float:
    """Seconds of the command, with the start of its process."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "tierstate", "report", "-p", str(policy), "-r", "run", "-o", str(to)]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def opened(page: Path) -> list[float]:
    """Seconds from the navigation until all charts are drawn."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        found = []
        for _ in range(TIMES):
            browser.get(page.as_uri())
            drawn = "return performance.getEntriesByName('drawn')[0].startTime"
            found.append(float(browser.execute_script(drawn)) / 1000)
        return found
    finally:
        browser.quit()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("--versions", type=int, default=10_000)
    parser.add_argument("--tiers", type=int, default=8)
    parser.add_argument("--path", help="a folder of the disk that is measured")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="tierstate-report-", dir=args.path))
    try:
        policy = long_run(root, args.versions, args.tiers)
        say(f"{args.versions} versions in {args.tiers} tiers are written")
        page = root / "report.html"
        seconds = [made(policy, page) for _ in range(TIMES)]
        rows = [["`tierstate report`", f"{statistics.median(seconds):.2f} s", "5 s"]]
        rows.append(["size of the file", f"{page.stat().st_size / (1 << 20):.2f} MiB", ""])
        if shutil.which("chromium") and shutil.which("chromedriver"):
            rows.append(["opens in Chromium, charts drawn", f"{statistics.median(opened(page)):.2f} s", "2 s"])
        print(facts_line(root), "", sep="\n")
        print(table("what | took | aimed at", rows))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
