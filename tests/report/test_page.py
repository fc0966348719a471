"""The page of a report: no text of a run becomes markup, and every number of it stands in the data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstate.report.collect import collect_runs
from tierstate.report.data import Happening, LayerMap, PolicyLine, ReasonCount, ReportData, VersionRow
from tierstate.report.html import as_seconds, as_size
from tierstate.report.page import render_body, render_page

HOSTILE = ("</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "<!--", "]]>", "&lt;b&gt;", "{}[]%s")


class Page(HTMLParser):
    """What a browser would make of a page: elements with their attributes, numbers, and the data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.numbers: list[tuple[str, str]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._in = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(sorted(name for name, _ in attrs))))
        found = dict(attrs)
        if tag == "data":
            self.numbers.append((found["data-at"] or "", found["value"] or ""))
        self._in = tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self._in == "script" else self.words).append(data)

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    @property
    def data(self) -> Any:
        return json.loads(next(text for text in self.scripts if text.startswith('{"made"')))


def at(data: Any, pointer: str) -> Any:
    for key in pointer.split("/")[1:]:
        data = data[int(key)] if isinstance(data, list) else data[key]
    return data


@pytest.fixture(scope="module")
def data(world: Path) -> ReportData:
    return collect_runs(world, ["gpt", "broken"])


def with_texts(data: ReportData, text: str) -> ReportData:
    """The same numbers, with this text wherever a run or a file could bring one in."""
    run = data.runs[0]
    layers = LayerMap([text, text], [1, 2], [[0.5, 1.0]] * 2, [[0, 1]] * 2, [[None, 1.0]] * 2, [[None, 2.0]] * 2)
    retention = [
        dataclasses.replace(one, keep=text, problem=text if i else "", reasons=[ReasonCount(text, 1)])
        for i, one in enumerate(run.retention)
    ]
    hostile = dataclasses.replace(
        run,
        run=text,
        problems=[text],
        tiers=[
            dataclasses.replace(tier, name=text, type=text, trouble=text, counts={"failed": 1}) for tier in run.tiers
        ],
        durable=text,
        retention=retention,
        happenings=[Happening(1.0, text, text, 1, 1, None, text, None)],
        layers=layers,
        policy=[PolicyLine(1, text, text)],
        newest_versions=[VersionRow(1, 1, text, 1.0, 1, [text], [text], [text], text, [text])],
    )
    return dataclasses.replace(data, runs=[hostile])


@pytest.mark.slow
@settings(max_examples=20)
@given(text=st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)))
def test_no_text_becomes_markup(data: ReportData, text: str) -> None:
    plain, hostile = Page(render_body(with_texts(data, "plain"))), Page(render_body(with_texts(data, text)))
    assert hostile.elements == plain.elements
    assert hostile.data["runs"][0]["run"] == text
    assert len(hostile.scripts) == 1


def test_every_number_stands_in_the_data(data: ReportData) -> None:
    page = Page(render_page(data))
    assert page.data == json.loads(json.dumps(data.encode()))
    assert len(page.numbers) > 500
    for pointer, value in page.numbers:
        assert at(page.data, pointer) == json.loads(value), pointer
    assert {"/runs/0/tiers/1/versions", "/runs/1/tiers/2/counts/failed", "/runs/0/blocked/longest/0"} <= {
        p for p, _ in page.numbers
    }


@pytest.mark.slow
def test_the_page_needs_nothing_from_elsewhere(data: ReportData) -> None:
    page = Page(render_page(data))
    sources = [(tag, names) for tag, names in page.elements if {"src", "srcset", "action", "ping"} & set(names)]
    assert sources == []
    assert [tag for tag, names in page.elements if "href" in names and tag != "a"] == ["link"]


def test_the_library_is_the_one_that_was_chosen() -> None:
    text = resources.files("tierstate.report").joinpath("echarts/echarts.min.js").read_bytes()
    assert len(text) < 4 << 20
    # As in docs/decisions/0045-the-report.md, which says where it comes from.
    assert hashlib.sha256(text).hexdigest() == "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"


@given(st.floats(0, 1e9), st.integers(0, 1 << 60))
def test_numbers_are_short(seconds: float, nbytes: int) -> None:
    assert len(as_seconds(seconds)) <= 12
    assert len(as_size(nbytes)) <= 12
