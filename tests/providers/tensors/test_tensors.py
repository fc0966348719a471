"""Tensors of any dtype and stride, bit for bit, and specs from anybody."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.equality import bits
from support.state_strategies import DTYPES, make, on_device, remake, tensors
from support.transfer import feed, stream

import tierstate as ts
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import CaptureError, FormatError, StateMismatch
from tierstate.manifest.format.leaf import Spec
from tierstate.providers.tensors.strided import storage_elements
from tierstate.providers.tensors.tensors import StorageProvider, TensorProvider


@given(tensors(), st.integers(1, 9))
@settings(deadline=None)
def test_chunks_are_the_bits_in_row_major_order(tensor: torch.Tensor, grains: int) -> None:
    assert stream(TensorProvider(tensor), 16 * grains) == bits(tensor)


@given(tensors(), st.integers(1, 70), st.integers(0, 9))
@settings(deadline=None)
def test_any_partition_loads_in_any_order(tensor: torch.Tensor, piece: int, seed: int) -> None:
    fresh = TensorProvider.fresh(TensorProvider(tensor).spec)
    feed(fresh, bits(tensor), piece, seed)
    made = fresh.done()
    assert (type(made), made.dtype, made.shape, made.requires_grad) == (
        (type(tensor), tensor.dtype, tensor.shape, tensor.requires_grad)
    )
    assert bits(made) == bits(tensor)
    clone = remake(torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage(), tensor)
    mine = TensorProvider(clone)
    assert mine.mismatch(TensorProvider(tensor).spec) == ""
    feed(mine, bits(tensor), piece, seed)
    assert mine.done() is clone
    assert bits(clone) == bits(tensor)


@given(tensors(), st.data())
@settings(deadline=None)
def test_any_range_fills_any_address(tensor: torch.Tensor, data: st.DataObject) -> None:
    whole = bits(tensor)
    for chunk in TensorProvider(tensor).chunks(max(16, len(whole) // 16 * 16)):
        room, shift = bytearray(chunk.nbytes + 8), data.draw(st.integers(0, 8))
        out = as_buffer(memoryview(room)[shift : shift + chunk.nbytes])
        chunk.fill(out)
        assert room[shift : shift + chunk.nbytes] == whole[chunk.start : chunk.start + chunk.nbytes]
        assert not any(room[:shift] + room[shift + chunk.nbytes :])


@pytest.mark.parametrize("shift", [0, 1])
def test_each_chunk_has_its_own_elements_at_an_aligned_and_an_odd_address(shift: int) -> None:
    tensor = torch.arange(32.0).view(4, 8).T
    for start, nbytes, fill in TensorProvider(tensor).chunks(48):
        out = torch.empty(nbytes + shift, dtype=torch.uint8)[shift:]
        fill(out)
        assert out.numpy().tobytes() == bits(tensor)[start : start + nbytes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    tensor = make(dtype, (5, 7), 1)
    for view in (tensor, tensor.T, tensor[1:, ::3], tensor[0, 0], tensor[:0], tensor[:, :1].expand(5, 3)):
        provider = TensorProvider(view)
        assert provider.spec.dtype == str(dtype).removeprefix("torch.")
        assert stream(provider, 16) == bits(view)
        fresh = TensorProvider.fresh(provider.spec)
        feed(fresh, bits(view), 7)
        assert fresh.done().dtype == dtype
        assert bits(fresh.value) == bits(view)


def test_what_was_filled_does_not_change_with_the_tensor() -> None:
    for tensor in (torch.arange(64.0), torch.arange(64.0).view(8, 8).T):
        before, out = bits(tensor), torch.empty(256, dtype=torch.uint8)
        (chunk,) = TensorProvider(tensor).chunks(256)
        chunk.fill(out)
        tensor.zero_()
        assert out.numpy().tobytes() == before


def test_nothing_is_copied_before_fill() -> None:
    tensor = torch.zeros(64)
    chunks = list(TensorProvider(tensor).chunks(64))
    tensor += 1
    out = torch.empty(64, dtype=torch.uint8)
    chunks[3].fill(out)
    assert out.view(torch.float32).tolist() == [1.0] * 16


def test_a_load_is_seen_by_autograd_and_does_not_disturb_it() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    provider = TensorProvider(weight)
    loss = (weight * weight).sum()
    feed(provider, bits(torch.full((4,), 2.0)))
    assert provider.done() is weight
    assert weight.is_leaf
    assert weight.grad is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (weight * weight).sum().backward()
    assert weight.grad.tolist() == [4.0] * 4


def test_a_fresh_tensor_can_be_trained_in_place() -> None:
    fresh = TensorProvider.fresh(Spec("tensor", "float32", 4, (3,)))
    feed(fresh, bits(torch.zeros(3)))
    made, weight = fresh.done(), torch.ones(3, requires_grad=True)
    made.add_(weight).sum().backward()
    assert weight.grad.tolist() == [1.0] * 3


def test_expanded_targets_take_only_what_agrees() -> None:
    for target in (torch.zeros(3, 1).expand(3, 4), torch.zeros(6).as_strided((3, 4), (1, 1))):
        values = torch.arange(3.0)[:, None].expand(3, 4) if 0 in target.stride() else torch.arange(6.0).unfold(0, 4, 1)
        provider = TensorProvider(target)
        feed(provider, bits(values), 5)
        assert torch.equal(provider.done(), values)
        provider = TensorProvider(target)
        feed(provider, bits(torch.arange(12.0).view(3, 4)), 5)
        with pytest.raises(StateMismatch, match="share memory"):
            provider.done()
        assert torch.equal(target, values)


@given(tensors())
@settings(deadline=None, max_examples=300)
def test_a_fresh_tensor_has_the_strides_that_torch_gives(tensor: torch.Tensor) -> None:
    provider = TensorProvider(tensor)
    fresh = TensorProvider.fresh(provider.spec)
    feed(fresh, stream(provider), 5)
    made = fresh.done()
    assert bits(made) == bits(tensor)
    compact = storage_elements(tensor.shape, tensor.stride()) <= tensor.numel()
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.uint8)  # torch.save has not every dtype
    oracle = _reloaded(twin) if compact else twin.clone()
    assert made.stride() == oracle.stride()
    assert made.untyped_storage().nbytes() <= tensor.numel() * tensor.itemsize


def _reloaded(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("how", ["codec: raw", "codec: small", "format: safetensors", "format: hdf5"])
def test_loaded_tensors_have_their_strides_in_every_format(tmp_path: Path, how: str) -> None:
    x = torch.arange(120.0)
    state = {
        "channels_last": x.view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "one_pixel": x.view(12, 10, 1, 1).clone(memory_format=torch.channels_last),
        "volume": x.view(1, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last_3d),
        "transposed": torch.nn.Parameter(x.view(10, 12).t()),
        "permuted": x.view(2, 3, 4, 5).permute(2, 0, 3, 1).clone(),
        "expanded": torch.ones(3, 1).expand(3, 4),
        "lossy": ts.Lossy(x.view(10, 12).clone().t(), "bf16"),
    }
    state["tied"] = state["channels_last"]
    policy = ts.Policy.parse(f"{{version: 1, chunk: 4KiB, tiers: {{t: {{type: nvme, path: '{tmp_path}', {how}}}}}}}")
    with ts.Checkpointer(policy, run="run") as ckpt:
        ckpt.save(state, step=1).wait()
        state["lossy"] = state["lossy"].value
        loaded = ckpt.load(allow_lossy=True)
        assert {k: v.stride() for k, v in loaded.items()} == {k: v.stride() for k, v in state.items()}
        assert all(torch.equal(loaded[name], state[name]) for name in state)
        assert loaded["tied"] is loaded["channels_last"]
        part = ckpt.load(only=["tied"])["tied"]
        assert part.is_contiguous(memory_format=torch.channels_last)
        given_state = {k: torch.zeros(v.shape) for k, v in state.items()}
        given_state["tied"] = given_state["channels_last"]
        ckpt.restore(into=given_state, allow_lossy=True)
        assert all(v.is_contiguous() and torch.equal(v, state[k]) for k, v in given_state.items())


class Odd(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.eye(2).to_sparse(), "layout"),
        (torch.zeros(2, device="meta"), "to_empty"),
        (torch.zeros(2).as_subclass(Odd), "Odd"),
        (torch.nn.UninitializedParameter(), "lazy module .* run the module once"),
    ],
)
def test_what_has_no_bytes_is_refused(tensor: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        TensorProvider(tensor)


LYING = (torch.ones(40), torch.ones(8, 5).t(), torch.ones(50)[10:], torch.ones(1).expand(40), torch.ones(97)[::3])


@given(st.sampled_from(LYING), st.integers(1, 400))
def test_a_tensor_whose_storage_is_too_short_is_refused(like: torch.Tensor, lost: int) -> None:
    storage = like.untyped_storage().clone()
    tensor = remake(storage, like)
    TensorProvider(tensor)
    storage.resize_(left := max(0, storage.nbytes() - lost))
    with pytest.raises(CaptureError, match=f"which has {left}, as after .* give it its memory back"):
        TensorProvider(tensor)
    assert storage.nbytes() == left


def test_memory_that_is_freed_after_a_save_fails_the_next_one_and_a_restore(tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "w": torch.ones(200_000)}
    with ts.Checkpointer(ts.Policy.default(tmp_path), "run") as ckpt:
        ckpt.save(state, step=1).wait()
        state["w"].untyped_storage().resize_(0)
        with pytest.raises(CaptureError, match="w: a tensor that needs 800000 bytes of its storage, which has 0"):
            ckpt.save(state, step=2)
        state["a"].zero_()
        with pytest.raises(StateMismatch, match="w: a tensor that needs 800000 bytes"):
            ckpt.restore(into=state)
        assert torch.equal(state["a"], torch.zeros(3))
        state["w"].untyped_storage().resize_(800_000)
        ckpt.restore(into=state)
        assert torch.equal(state["w"], torch.ones(200_000))


def test_tensors_of_transforms_are_refused() -> None:
    def save(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(CaptureError, match="inside a transform"):
            TensorProvider(x)
        return x.sum()

    torch.vmap(save)(torch.ones(2, 3))
    torch.func.grad(save)(torch.ones(3))
    for without in (torch._efficientzerotensor(3), torch._to_functional_tensor(torch.ones(3))):  # type: ignore[attr-defined]
        with pytest.raises(CaptureError, match="which has 0"):
            TensorProvider(without)


@pytest.mark.filterwarnings("ignore")
def test_nested_and_quantized_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    quantized = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
    for tensor in (nested, quantized):
        with pytest.raises(CaptureError, match="save"):
            TensorProvider(tensor)


@pytest.mark.parametrize(
    "spec",
    [
        Spec("tensor", "qint8", 1, (2,)),
        Spec("tensor", "Tensor", 1, (2,)),
        Spec("tensor", "__class__", 1, (2,)),
        Spec("tensor", "float32", 8, (2,)),
        Spec("tensor", "float32", 4, (-1,)),
        Spec("tensor", "float32", 4, (1 << 60,)),
        Spec("tensor", "float32", 4, (0, 1 << 62, 1 << 62)),
        Spec("tensor", "float32", 4, (1,) * 65),
        Spec("tensor", "int64", 8, (1,), {"requires_grad": True}),
        Spec("tensor", "float32", 4, (2, 2), {"strides": [1]}),
        Spec("tensor", "float32", 4, (2, 2), {"strides": None}),
        Spec("tensor", "float32", 4, (2, 2), {"strides": [1, True]}),
        Spec("tensor", "float32", 4, (2, 2), {"strides": [-1, 2]}),
        Spec("tensor", "float32", 4, (2, 2), {"strides": [1, 3]}),
        Spec("tensor", "float32", 4, (1, 2), {"strides": [1 << 63, 1]}),
        Spec("storage", "uint8", 1, (2,), {"strides": [1]}),
        Spec("storage", "float32", 4, (2,)),
        Spec("storage", "uint8", 1, (2, 2)),
    ],
)
def test_specs_from_anybody(spec: Spec) -> None:
    cls = StorageProvider if spec.kind == "storage" else TensorProvider
    with pytest.raises(FormatError):
        cls.fresh(spec)


def test_what_does_not_fit_says_why() -> None:
    provider = TensorProvider(torch.zeros(2, 3))
    assert provider.mismatch(Spec("tensor", "float32", 4, (2, 3))) == ""
    assert "shape (2, 3) here, (3, 2)" in provider.mismatch(Spec("tensor", "float32", 4, (3, 2)))
    assert "dtype float32 here, bfloat16" in provider.mismatch(Spec("tensor", "bfloat16", 2, (2, 3)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_of_any_stride() -> None:
    base = torch.randn(64, 48)
    for view in (base, base.T, base[::3, 1:], base[:, :1].expand(64, 5), base.to(torch.complex64).conj()):
        there = remake(on_device(view.untyped_storage()), view)
        out = torch.empty(view.numel() * view.element_size(), dtype=torch.uint8).pin_memory()
        for chunk in TensorProvider(there).chunks(4096):
            event = chunk.fill(out[chunk.start : chunk.start + chunk.nbytes])
            assert event is not None
            event.synchronize()
        assert out.numpy().tobytes() == bits(view)
        fresh = TensorProvider.fresh(TensorProvider(there).spec, torch.device("cuda"))
        feed(fresh, bits(view), 1000)
        assert bits(fresh.done().cpu()) == bits(view)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_uploads_run_beside_the_callers_stream_and_in_order_with_it() -> None:
    n, piece = 1 << 22, 1 << 20
    data = torch.randint(0, 256, (n,), dtype=torch.uint8).pin_memory()
    mine = torch.cuda.Stream()
    with torch.cuda.stream(mine):
        there = torch.zeros(n // 4, dtype=torch.int32, device="cuda")
        for _ in range(200):
            there += 1  # still running when the upload is asked for: it must not come behind it
        provider = TensorProvider(there)
        assert provider.memory() is None
        assert provider.receiver(provider.spec) is provider
        events = [provider.load(at, data[at : at + piece]) for at in range(0, n, piece)]
        assert all(event is not None for event in events)
        for event in events:
            event.synchronize()
        before = data.clone()
        data.zero_()  # the source may be used again once its event has come
        assert provider.done() is there
        doubled = there + there
    mine.synchronize()
    assert torch.equal(there.cpu(), before.view(torch.int32))
    assert torch.equal(doubled.cpu(), before.view(torch.int32) * 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_state_on_a_device_is_restored_through_pinned_slabs(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(1000, 700, device="cuda") for i in range(8)}
    state |= {"turned": state["w0"].T.clone().T, "small": torch.randn(3, device="cuda"), "host": torch.randn(5000)}
    with ts.Checkpointer(ts.Policy.default(tmp_path), "run") as ckpt:
        ckpt.save(state, step=1).wait()
        into = {name: torch.zeros_like(t) for name, t in state.items()}
        assert ckpt.restore(into=into) is into
        loaded = ckpt.load(device="cuda")
    for name, tensor in state.items():
        assert torch.equal(tensor, into[name])
        assert loaded[name].is_cuda
        assert torch.equal(tensor.cpu(), loaded[name].cpu())
