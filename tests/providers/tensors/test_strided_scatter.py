"""Scattering: boxes of a saved value into the memory of another, bit for bit, whatever its strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.equality import bits, difference
from support.manifest_strategies import cuts
from support.sharded_versions import mesh
from support.state_strategies import arrays, on_device, remake, scrambled, tensors
from support.transfer import stream

from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import StateMismatch
from tierstate.providers.tensors.arrays import ArrayProvider
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.providers.values.values import ValueProvider
from tierstate.tiers.testing import random_bytes


@st.composite
def scatterings(draw, shape):
    """Boxes that tile a shape, each to be taken out of one that is larger, and may reach beyond the shape."""
    found = []
    for part in draw(cuts(shape)):
        before = tuple(draw(st.integers(0, 2)) for _ in shape)
        behind = [draw(st.integers(0, 2)) for _ in shape]
        offset = tuple(o - b for o, b in zip(part.offset, before, strict=True))
        found.append((Box(offset, tuple(sum(n) for n in zip(part.shape, before, behind, strict=True))), part))
    return found


def bytes_at(whole, at, part, shift):
    """The bytes of a box of which only a part is of the value, at an address of any alignment."""
    cells = np.frombuffer(random_bytes(at.volume * whole.shape[-1] + shift).numpy().tobytes(), np.uint8).copy()
    view = cells[shift:].reshape(*at.shape, whole.shape[-1])
    view[part.slices(at.offset)] = whole[part.slices()]
    return as_buffer(cells)[shift:]


def scatter_all(provider, data, boxes, shift):
    spec = provider.spec
    whole = np.frombuffer(data, np.uint8).reshape(*spec.shape, spec.itemsize)
    for at, part in boxes:
        assert provider.scatter(at, bytes_at(whole, at, part, shift), part) is None
    return provider.done()


@given(tensors(), st.data(), st.sampled_from([0, 1, 2, 8]))
def test_tensors_of_any_strides_take_boxes(tensor, data, shift):
    raw, into = stream(TensorProvider(tensor)), scrambled({"x": tensor})["x"]
    out = scatter_all(TensorProvider(into), raw, data.draw(scatterings(tuple(tensor.shape))), shift)
    assert out is into
    assert difference({"x": tensor}, {"x": out}) == ""


@given(arrays(), st.data(), st.sampled_from([0, 1, 3]))
def test_arrays_of_any_strides_take_boxes(array, data, shift):
    raw, into = stream(ArrayProvider(array)), array.copy(order="K")
    into.view(f"V{array.dtype.itemsize}")[...] = np.zeros((), f"V{array.dtype.itemsize}")
    out = scatter_all(ArrayProvider(into), raw, data.draw(scatterings(array.shape)), shift)
    assert out is into
    assert stream(ArrayProvider(out)) == raw


def test_elements_beside_the_part_stay_as_they_are():
    base = torch.arange(48, dtype=torch.int16).view(6, 8)
    into = base.clone().t()[1:7:2]
    TensorProvider(into).scatter(Box((1, 2), (2, 2)), as_buffer(b"\1\2\3\4\5\6\7\10"), Box((2, 2), (1, 1)))
    changed = base.t()[1:7:2].clone()
    changed[2, 2] = 0x0605
    assert torch.equal(into, changed)


def test_shared_elements_must_agree():
    into = torch.zeros(3).expand(2, 3)
    for raw, fits in ((b"\0" * 12 + b"\1" * 12, False), (b"\1" * 24, True)):
        provider = TensorProvider(into)
        for row in range(2):
            box = Box((row, 0), (1, 3))
            provider.scatter(box, as_buffer(raw[12 * row : 12 * row + 12]), box)
        if fits:
            assert stream(TensorProvider(provider.done())) == raw
        else:
            with pytest.raises(StateMismatch, match="share memory"):
                provider.done()


def test_what_is_always_whole_says_so():
    with pytest.raises(StateMismatch, match="a value cannot be restored in parts"):
        ValueProvider(7).scatter(Box((0,), (2,)), random_bytes(2), Box((0,), (1,)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pinned", [False, True])
def test_tensors_on_a_device_take_boxes(pinned: bool) -> None:
    base = torch.randn(64, 48)
    for view in (base, base.T, base[::3, 1:], base.bfloat16()[:, ::2], base.to(torch.complex64).conj()):
        storage = on_device(view.untyped_storage())
        torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).fill_(7)  # queued: the bytes come after it
        there = remake(storage, view)
        whole = np.frombuffer(bits(view), np.uint8).reshape(*view.shape, view.element_size())
        provider, events = TensorProvider(there).receiver(TensorProvider(there).spec), []
        for part in mesh(view.shape, (3, 2)):
            at = Box(part.offset, (part.shape[0], part.shape[1] + 3))
            source = bytes_at(whole, at, part, 0)
            source = source.pin_memory() if pinned else source
            events.append((provider.scatter(at, source, part), source))
        for event, _source in events:
            if event is not None:
                event.synchronize()
        assert bits(provider.done().cpu()) == bits(view)
