"""Runs that a report is made of, and a real browser."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from support.checkpointer_worlds import scratch
from support.cli_calls import call
from support.servers.packages import NotInstallable, install

import tierstate as ts
from tierstate.manifest.history import log

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

__all__ = ["call"]

POLICY = """
version: 1
chunk: 4KiB
arena: {{size: 256KiB}}
metrics: {{events: {events}}}
statistics: true
alarms: {{action: "off"}}
tiers:
  host: {{type: host, capacity: 64KiB, keep: {{last: 1}}}}
  nvme: {{type: nvme, path: {place}/nvme, keep: {{last: 4}}}}
  lustre: {{type: lustre, path: {place}/lustre, every: 20, codec: fast, keep: {{every: 40, tags: true}}}}
rules:
  - {{match: "optimizer.**", tiers: [host, nvme]}}
"""


def state(step: int) -> dict[str, object]:
    """One layer of two changes, and a frozen one."""
    layers = [torch.zeros(3000), torch.full((3000,), float(step))]
    return {"model": {"layers": layers}, "optimizer": {"m": torch.full((500,), float(step))}, "step": step}


@pytest.fixture(scope="module")
def world() -> Iterator[Path]:
    """A policy, and two runs of twelve steps; in the second one lustre fails for a while."""
    with scratch() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "clock_seq", lambda: 0)
        path = place / "policy.yaml"
        path.write_text(POLICY.format(place=place, events="true"))
        for run in ("gpt", "broken"):
            with ts.Checkpointer(path, run) as ckpt:
                for step in range(10, 130, 10):
                    _save(ckpt, place, step, fails=run == "broken" and step == 60)
        yield path


def _save(ckpt: ts.Checkpointer, place: Path, step: int, *, fails: bool) -> None:
    packs = place / "lustre" / "packs"
    if fails:
        packs.rename(place / "gone")
        packs.write_text("in the way")
    save = ckpt.save(state(step), step, metadata={"loss": 1 / step, "note": "<b>bold</b> & 'quoted'"})
    save.wait("nvme")
    if "lustre" in save.tiers:
        try:
            save.wait("lustre")
        except ts.TierstateError as error:
            logging.getLogger(__name__).info("as wanted: %s", error)
    if fails:
        packs.unlink()
        (place / "gone").rename(packs)
    if step == 40:
        ckpt.tag("best")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chrome]:
    """A browser without a window, started once. It may reach this host only: every other name leads nowhere."""
    try:
        install("Chromium", {"chromium": "chromium", "chromium-driver": "chromedriver"})
    except NotInstallable as reason:
        pytest.skip(str(reason))
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    yield browser
    browser.quit()
