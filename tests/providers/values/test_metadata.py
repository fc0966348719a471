"""The metadata of a save: JSON values, and an error that says what to write for all else."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import pathlib
import sys
import uuid
from collections import OrderedDict, deque
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from support.manifest_strategies import json_objects

from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf_path import MAX_INT_BITS
from tierstate.providers.values.metadata import json_metadata


class Split(enum.Enum):
    TRAIN = "train"


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Score:
    loss: Any
    at: Any = None


@given(json_objects)
def test_json_values_stay_as_they_are(metadata: dict[str, Any]) -> None:
    assert json.dumps(json_metadata(metadata)) == json.dumps(metadata)


def test_what_has_one_form_in_json_gets_it() -> None:
    name = uuid.UUID(int=5)
    found = json_metadata(
        MappingProxyType(
            {
                "numbers": [
                    np.float32(0.5),
                    np.int64(3),
                    torch.tensor(2.25),
                    np.array(True),
                    torch.tensor(7),
                    Level.LOW,
                ],
                "text": (np.str_("a"), Split.TRAIN, pathlib.Path("x/y"), name, torch.bfloat16, np.dtype("<f4")),
                "times": deque([datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC)], 2),
                "nested": OrderedDict(score=Score(np.float64(1), {Split.TRAIN: None, 2: True})),
            }
        )
    )
    assert found == {
        "numbers": [0.5, 3, 2.25, True, 7, 1],
        "text": ["a", "train", "x/y", str(name), "torch.bfloat16", "float32"],
        "times": ["2026-01-02", "2026-01-02T03:00:00+00:00"],
        "nested": {"score": {"loss": 1.0, "at": {"train": None, "2": True}}},
    }
    assert json.loads(json.dumps(found)) == found
    assert {type(number) for number in found["numbers"]} == {float, int, bool}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.ones(2), r"a torch\.Tensor is not a JSON value; write value\.tolist\(\)"),
        (np.ones(2), r"write value\.tolist\(\)"),
        (torch.tensor(1j), r"write value\.tolist"),
        (np.datetime64("2026-01-01"), r"write float\(value\) for a number, or str\(value\)"),
        (Decimal("1.5"), r"a decimal\.Decimal is not .* write float\(value\)"),
        ({1, 2}, r"write sorted\(value\)"),
        (b"x", r"write value\.hex\(\)"),
        (datetime.timedelta(1), r"write value\.total_seconds\(\)"),
        (Score, r"a builtins\.type is not"),
        pytest.param(10**5000, r"an int of 16610 bits is too long for JSON; write hex\(value\)", id="long"),
    ],
)
def test_what_has_none_says_where_it_is_and_what_to_write(value: Any, says: str) -> None:
    with pytest.raises(
        CaptureError, match=rf"^metadata\['x'\]\[1\]\['y'\]: {says if says[0] == 'a' else 'a .*' + says}"
    ):
        json_metadata({"x": [0, {"y": value}]})


def test_keys_that_json_cannot_tell_apart_and_cycles_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"metadata\['a'\]: two keys are '1' in JSON"):
        json_metadata({"a": {1: 2, "1": 3}})
    with pytest.raises(CaptureError, match=r"the key b'x': a builtins\.bytes is not"):
        json_metadata({b"x": 1})
    with pytest.raises(CaptureError, match=r"metadata: the key <int of 16610 bits>: an int of 16610 bits is too long"):
        json_metadata({10**5000: 1})
    with pytest.raises(CaptureError, match=r"metadata\['a'\]: JSON makes one character of two surrogates"):
        json_metadata({"a": "x\ud83d\ude00"})
    assert json.loads(json.dumps(json_metadata({"\ude00": "\ude00\ud83d"}))) == {"\ude00": "\ude00\ud83d"}
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(CaptureError, match="hold themselves"):
        json_metadata({"a": cycle})


@pytest.mark.parametrize("metadata", ["loss", 5, [("loss", 1)], {"loss"}], ids=repr)
def test_metadata_are_a_mapping(metadata: Any) -> None:
    with pytest.raises(CaptureError, match=r"^metadata: .* is no mapping; write names and values, as in a dict"):
        json_metadata(metadata)


def test_the_longest_int_is_read_back() -> None:
    """Also by a process that reads no more digits than Python does by default."""
    longest = (1 << MAX_INT_BITS) - 1
    assert len(str(longest)) <= sys.int_info.default_max_str_digits
    assert json.loads(json.dumps(json_metadata({"n": [longest, -longest]}))) == {"n": [longest, -longest]}
