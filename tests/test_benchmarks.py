"""What the benchmarks of published work compute, where it can be checked without a measurement."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.field.end_to_end import lost_on_average
from benchmarks.field.shapes import LLAMAS, Shard, Tensor

PARAMETERS = {"llama3-8b": 8.03e9, "llama3-70b": 70e9, "llama3-405b": 406e9, "llama3-1t": 1.18e12}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_ranks_of_a_model_have_all_of_it(name: str) -> None:
    model = LLAMAS[name]
    assert model.parameters == pytest.approx(PARAMETERS[name], rel=0.01)
    stages = range(0, model.tensor * model.pipeline, model.tensor)  # ranks of one group differ only by stage
    one, other = (
        sum(t.length * t.dtype.itemsize for rank in stages for t in model.shard(start + rank, 1)) * model.tensor
        for start in (0, (model.replicas - 1) * model.tensor * model.pipeline)
    )
    # Weights in fp16, and weights and both moments in fp32. Norms are not cut, and each of few others is rounded down.
    assert one + other * (model.replicas - 1) == pytest.approx(14 * model.parameters, rel=0.001)


def test_no_chunk_of_a_shard_is_like_another() -> None:
    length = 3 << 20
    shard = Shard([Tensor("a", length, torch.int32), Tensor("b", length, torch.int32)])
    before = {name: tensor.clone() for name, tensor in shard.named.items()}
    parts = [part.numpy().tobytes() for tensor in before.values() for part in tensor.split(1 << 18)]
    assert len(set(parts)) == len(parts)
    shard.change()
    assert all(bool((tensor != before[name]).all()) for name, tensor in shard.named.items())


SAVES = st.lists(st.tuples(st.floats(0, 90), st.floats(0, 30)), max_size=6)


@given(SAVES)
def test_work_lost_is_the_mean_over_all_moments(saves: list[tuple[float, float]]) -> None:
    until = 100.0
    ends = [(start, start + seconds) for start, seconds in sorted(saves)]
    moments = np.linspace(0, until, 20_001)[:-1] + until / 40_000
    have = [max((start for start, end in ends if end <= at), default=0.0) for at in moments.tolist()]
    assert lost_on_average(ends, until) == pytest.approx(float(np.mean(moments - have)), rel=0.01, abs=0.02)
