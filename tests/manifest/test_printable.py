"""What is logged: no filter and no handler of the program ends the work that it is about."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.checkpointer_worlds import policy, tier

import tierstate as ts


class Broken(logging.Handler):
    """A handler of the program that has a defect, as one that sends messages to a service that is away."""

    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("the service is away")


class BrokenFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return bool(record.rank >= 0)  # type: ignore[attr-defined]


@pytest.fixture(params=[Broken, BrokenFilter])
def logger(request: pytest.FixtureRequest) -> Iterator[logging.Logger]:
    logger, broken = logging.getLogger("tierstate"), request.param()
    before, add = logger.level, logger.addHandler if isinstance(broken, logging.Handler) else logger.addFilter
    add(broken)
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.setLevel(before)
    logger.removeHandler(broken)
    logger.removeFilter(broken)


def test_a_broken_handler_is_printed_and_raises_nothing(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logger.warning("step %d", 3)
    said = capsys.readouterr().err
    assert "--- Logging error ---" in said
    assert "the service is away" in said or "has no attribute 'rank'" in said


@pytest.mark.usefixtures("logger")
def test_saves_and_restores_go_on_with_a_broken_handler(place: Path) -> None:
    tiers = {"near": tier("nvme", place / "near"), "far": tier("nvme", place / "far")}
    state = {"w": torch.rand(5000)}
    ckpt = ts.Checkpointer(policy(tiers), "run")
    try:
        for step in (1, 2, 3):
            saved = ckpt.save(state, step=step)
        for name in tiers:
            saved.wait(name, timeout=60)
        assert torch.equal(ckpt.restore(into={"w": torch.zeros(5000)})["w"], state["w"])
    finally:
        ckpt.close(timeout=60)  # without the threads of the tiers it would wait for ever
