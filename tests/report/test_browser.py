"""A report in a real Chromium: it opens without a network and without errors, and shows the numbers of ``--json``."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.checkpointer_worlds import policy, tier
from support.cli_calls import Call

import tierstate as ts
from tierstate.report import serve
from tierstate.report.collect import collect_runs
from tierstate.report.html import as_count, as_seconds, as_share, as_size, as_time
from tierstate.report.serve import ReportServer

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.xdist_group("chromium")]

FORMATS = (as_count, as_seconds, as_share, as_size, as_time, str, lambda value: f"{value:.4g}")


DRAWN = """
    return [...document.querySelectorAll('.chart')].map((one) => [one.dataset.chart, one.dataset.run,
        echarts.getInstanceByDom(one).getOption().series.map((series) => [series.name, series.data])])
"""

LEAST_CONTRAST = """
    const linear = (n) => (n <= 0.04045 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4);
    const light = (color) => {
        const [r, g, b] = color.match(/[0-9.]+/g).map((n) => linear(n / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const back = (one) => {
        for (; one; one = one.parentElement) {
            const color = getComputedStyle(one).backgroundColor;
            if (color !== 'rgba(0, 0, 0, 0)') return color;
        }
        return 'rgb(255, 255, 255)';
    };
    const texts = [...document.querySelectorAll('p, td, th, dt, dd, h2, summary, a, figcaption')];
    return Math.min(...texts.map((one) => {
        const [a, b] = [light(getComputedStyle(one).color), light(back(one))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
    }));
"""

NAMES = """
    return [...document.querySelectorAll('.chart')].map((one) => [one.role, one.ariaLabel])
"""

TABLES = """
    return [...document.querySelectorAll('table')].every((one) => one.caption && one.querySelector('th[scope=col]'))
"""


@pytest.fixture
def browser(chromium: Chrome) -> Iterator[Chrome]:
    """The browser, whose logs are of this test alone."""
    for kind in ("browser", "performance"):
        chromium.get_log(kind)
    yield chromium
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.get("about:blank")


def show(browser: Chrome, url: str, *, width: int = 1280, scheme: str = "light") -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(url)


def requests(browser: Chrome) -> list[str]:
    """The addresses that were asked for, by the page or anything in it."""
    said = [json.loads(one["message"])["message"] for one in browser.get_log("performance")]
    return [one["params"]["request"]["url"] for one in said if one["method"] == "Network.requestWillBeSent"]


def point(data: Any, pointer: str) -> Any:
    for key in pointer.split("/")[1:]:
        data = data[int(key)] if isinstance(data, list) else data[key]
    return data


@pytest.fixture
def page(call: Call, world: Path, tmp_path: Path) -> str:
    """A report of two runs, written by the command."""
    made = tmp_path / "report.html"
    answer = call("report", "-p", world, "-r", "gpt", "-r", "broken", "-o", made)
    assert (answer.status, answer.out) == (0, f"wrote {made}\n")
    return made.as_uri()


def test_it_opens_alone_and_every_number_is_that_of_json(browser: Chrome, call: Call, world: Path, page: str) -> None:
    show(browser, page)
    assert browser.get_log("browser") == []
    assert [url for url in requests(browser) if not url.startswith("data:")] == [page]
    data = call("report", "-p", world, "-r", "gpt", "-r", "broken", "--json").json
    shown = browser.execute_script("return JSON.parse(document.getElementById('report-data').textContent)")
    assert shown | {"made": 0} == data | {"made": 0}, "but for the time at which it was made"
    script = "return [...document.querySelectorAll('data')].map((one) => [one.dataset.at, one.value, one.textContent])"
    numbers = browser.execute_script(script)
    assert len(numbers) > 500
    for pointer, value, text in numbers:
        exact = point(shown, pointer)
        assert json.loads(value) == exact, pointer
        assert text in {how(exact) for how in FORMATS}, pointer
    charts = {(name, int(run)): dict(series) for name, run, series in browser.execute_script(DRAWN)}
    for number, run in enumerate(data["runs"]):
        tiers = {one["name"]: one for one in run["tiers"]}
        assert charts["exposure", number]["lustre"] == tiers["lustre"]["exposure"]
        assert charts["durations", number]["save blocked"] == run["blocked"]["longest"]
        assert charts["written", number]["nvme"] == tiers["nvme"]["written"]
        assert charts["bytes", number]["written"] == [tiers[name]["written_total"] for name in ("nvme", "lustre")]
        cells = [
            [x, y, v] for y, row in enumerate(run["layers"]["changed"]) for x, v in enumerate(row) if v is not None
        ]
        assert charts["changed", number]["layers"] == cells
        for x, y, state in charts["timeline", number]["state"]:
            counts = tiers[("nvme", "lustre")[y]]["states"]
            assert state == max(number for number, count in enumerate(counts) if count[x])


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1600, "dark")])
def test_it_fits_and_can_be_read(browser: Chrome, page: str, width: int, scheme: str) -> None:
    show(browser, page, width=width, scheme=scheme)
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= width, "nothing is cut off"
    contrast = browser.execute_script(LEAST_CONTRAST)
    assert contrast >= 4.5, "the least contrast of WCAG 2, AA"
    assert browser.get_log("browser") == []


def test_for_a_screen_reader_and_on_paper(browser: Chrome, page: str) -> None:
    show(browser, page, scheme="dark")
    assert all(role == "img" and label for role, label in browser.execute_script(NAMES))
    assert browser.execute_script(TABLES)
    tree = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = [one["role"]["value"] for one in tree if "role" in one]
    assert roles.count("image") >= 8
    assert "main" in roles
    assert "navigation" in roles
    printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert printed.startswith(b"%PDF")
    assert b"/Count" in printed


def test_a_plan_opens_alone_and_every_number_is_that_of_json(browser: Chrome, call: Call, tmp_path: Path) -> None:
    tiers = "nvme: {type: nvme, path: /nvme, every: 20}, lustre: {type: lustre, path: /lustre, every: 1h}"
    text = tmp_path / "policy.yaml"
    text.write_text(f"failures: {{mtbf: 6h, host_lost: 0.5}}\ntiers: {{{tiers}}}\n")
    made = tmp_path / "plan.html"
    options = ["-p", text, "--state", "7b", "--step", "5s", "--nodes", 4, "--slower", "5%", "--for", "1h"]
    options += ["--speed", "nvme=2GiB/s", "--speed", "lustre=4GiB/s", "--price", "lustre=0.02"]
    assert call("plan", *options, "-o", made).status == 0
    (plan,) = [call("plan", *options, "--json").json]
    for width, scheme in ((390, "light"), (1280, "dark")):
        show(browser, made.as_uri(), width=width, scheme=scheme)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.execute_script(LEAST_CONTRAST) >= 4.5
    assert browser.get_log("browser") == []
    assert {url for url in requests(browser) if not url.startswith("data:")} == {made.as_uri()}
    script = "return [...document.querySelectorAll('data')].map((one) => [one.dataset.at, one.value])"
    numbers = browser.execute_script(script)
    assert len(numbers) > 30
    for pointer, value in numbers:
        assert json.loads(value) == point({"runs": [plan]}, pointer), pointer
    ((name, _, series),) = browser.execute_script(DRAWN)
    assert name == "cadence"
    curves = {curve["tier"]: curve for curve in plan["curves"]}
    for shown, points in series:
        assert points == [list(one) for one in zip(curves[shown]["intervals"], curves[shown]["shares"], strict=True)]


def test_a_served_page_follows_the_run(browser: Chrome, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    monkeypatch.setattr(serve, "REFRESH", 0.2)
    spec = policy({"nvme": tier("nvme", place)}, metrics={"events": False})
    with ts.Checkpointer(spec, "run") as ckpt, ReportServer(lambda: collect_runs(spec, ["run"])) as server:
        ckpt.save({"w": torch.zeros(2000)}, 41).wait()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            show(browser, server.url)
            newest = "return document.querySelector('[data-at=\"/runs/0/newest\"]').value"
            assert browser.execute_script(newest) == "41"
            assert "metrics: {events: true}" in browser.find_element("css selector", "main").text
            ckpt.save({"w": torch.ones(2000)}, 42).wait()
            WebDriverWait(browser, 60).until(lambda one: one.execute_script(newest) == "42")
            assert browser.get_log("browser") == []
            assert {url.rpartition("/")[0] for url in requests(browser) if not url.startswith("data:")} == {
                server.url[:-1]
            }
        finally:
            browser.get("about:blank")
            server.shutdown()
            thread.join()
