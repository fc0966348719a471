"""Kernels of this package on CUDA devices: compiled by NVRTC when a device is first used, launched by the driver.

Both libraries come with every build of torch for CUDA; nothing is compiled when the package is built or installed.
Where there is no NVRTC, as on ROCm, `kernels_of` is None, and the same is computed by torch or by the host.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.digest import DEFAULT_DIGEST, digest_function

from .cudart import relaxed_capture
from .device_room import SMALL, DeviceRoom

log = logging.getLogger("tierstate")


SOURCE = Path(__file__).with_name("kernels.cu")


ALIGN = 16
"""What a chunk's address and length must be multiples of: a thread of the kernel loads as many bytes at once."""


LANES = 8
"""Accumulators of the hash."""


WARP = 32
"""Threads that digest a chunk: a block of its own, so that chunks spread over the whole device."""


NAMES = ("xxh3_lanes", "xxh3_merge", "block_sums")


class Kernels(Protocol):
    """The kernels, for one device."""

    def launch(self, name: str, blocks: int, threads: int, *args: int | torch.Tensor) -> None:
        """Queue a kernel on this thread's current stream of the device.

        Args:
            name: one of `NAMES`.
            blocks, threads: how many blocks, of how many threads each.
            args: tensors of the device or in pinned memory, which must live until the kernel has ended, or numbers of
                64 bits.

        Raises:
            RuntimeError: the device has failed.
        """


class CompiledKernels:
    """The kernels, compiled for a device and loaded into the context that torch uses there.

    Raises:
        OSError, RuntimeError: there is no NVRTC, or it or the driver refused.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch's own library is linked to the NVRTC that belongs to it, and to the driver.
        self._library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
        binary, module = _compile(self._library, device), ctypes.c_void_p()
        with relaxed_capture(), torch.cuda.device(device):
            torch.cuda.current_stream(device).query()  # torch makes its context the current one of this thread
            self._call("cuModuleLoadData", ctypes.byref(module), binary)
            self._functions = {name: ctypes.c_void_p() for name in NAMES}
            for name, function in self._functions.items():
                self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())

    def launch(self, name: str, blocks: int, threads: int, *args: int | torch.Tensor) -> None:
        cells = [ctypes.c_uint64(arg if isinstance(arg, int) else arg.data_ptr()) for arg in args]
        pointers = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
        with torch.cuda.device(self._device):
            stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
            shape = (blocks, 1, 1, threads, 1, 1)
            self._call("cuLaunchKernel", self._functions[name], *shape, 0, stream, pointers, None)

    def _call(self, name: str, *args: Any) -> None:
        if code := getattr(self._library, name)(*args):
            raise RuntimeError(f"{name} failed with error {code} of CUDA's driver")


def _compile(library: ctypes.CDLL, device: torch.device) -> bytes:
    """The kernels as machine code of the device. Raises RuntimeError with NVRTC's own words."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    properties = torch.cuda.get_device_properties(device)
    options = [f"--gpu-architecture=sm_{properties.major}{properties.minor}".encode(), b"--std=c++17"]
    source = SOURCE.read_bytes()
    code = library.nvrtcCreateProgram(ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None)
    if code:
        raise RuntimeError(f"NVRTC failed with error {code}")
    try:
        if code := library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            told = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, told)
            raise RuntimeError(f"NVRTC failed with error {code}: {told.value.decode(errors='replace')}")
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _check(kernels: Kernels, device: torch.device) -> None:
    """Raises RuntimeError if a digest is not what the host makes of the same bytes."""
    data = torch.arange(1 << 16, dtype=torch.int32, device="cpu").view(torch.uint8)[: (1 << 18) - 48]
    there = data.to(device)
    digests = xxh3_digests(kernels, [there])
    torch.cuda.current_stream(device).synchronize()
    [found] = digests.numpy()
    if found.tobytes() != digest_function(DEFAULT_DIGEST)(data):
        raise RuntimeError("a digest that the device computed is not right")


def spare_kernels(device: torch.device) -> Kernels | None:
    """As `kernels_of`; None also where the memory that they need would be taken from training's cache."""
    return None if DeviceRoom(device).lack(SMALL) else kernels_of(device)


def fits_kernel(chunk: Buffer) -> bool:
    """Whether `xxh3_digests` can digest a chunk of a device's memory, of more than 240 bytes."""
    return chunk.is_cuda and chunk.data_ptr() % ALIGN == 0 and chunk.numel() % ALIGN == 0


def xxh3_digests(kernels: Kernels, chunks: Sequence[Buffer]) -> torch.Tensor:
    """Queue the digests (xxh3-128) of chunks in the device's memory on this thread's current stream.

    Args:
        chunks: one or more, each of more than 240 bytes, for which `fits_kernel`.

    Returns:
        ``(n, 2)`` of int64 in pinned host memory: 16 bytes for each chunk, once the stream has come so far. A copy from
        the device would wait there for copies of chunks, or they for it.

    Raises:
        RuntimeError: the device has failed, or has no memory.
    """
    device, n = chunks[0].device, len(chunks)
    table = torch.tensor([[c.data_ptr() for c in chunks], [c.numel() for c in chunks]], device="cpu").to(device)
    lanes = torch.empty((n, LANES), dtype=torch.int64, device=device)
    digests = torch.empty((n, 2), dtype=torch.int64, device="cpu", pin_memory=True)
    kernels.launch("xxh3_lanes", n, WARP, n, table[0], table[1], lanes)
    kernels.launch("xxh3_merge", -(-n // WARP), WARP, n, table[1], lanes, digests)
    return digests


_kernels: dict[torch.device, Kernels | None] = {}


_compiling = threading.Lock()


def _compiled(device: torch.device) -> Kernels | None:
    """The kernels for a device; None where there cannot be any."""
    if torch.version.hip is not None:
        return None
    try:
        made = CompiledKernels(device)
        _check(made, device)
        return made
    except Exception as error:
        # Any error: all that is computed by kernels can be computed without them, only slower.
        log.warning("%s: digests are computed by the host, since kernels cannot be compiled: %s", device, error)
        return None


def kernels_of(device: torch.device) -> Kernels | None:
    """The kernels for a CUDA device that this process uses; the first call compiles them, in a tenth of a second.

    None where there is no NVRTC, or it fails; that is logged once.

    Args:
        device: with its index.
    """
    with _compiling:
        if device not in _kernels:
            _kernels[device] = _compiled(device)
        return _kernels[device]
