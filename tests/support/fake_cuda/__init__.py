"""A fake of CUDA: devices whose tensors, streams, events, graphs and errors are torch's own, without a GPU.

`build` compiles it, once for each version of torch; `install` makes it the device "cuda" of a process that was started
with `environment`: the code under test runs there as it is. `FakeCuda` then chooses when the devices do their work, and
what fails. ``tests/gpu/test_under_fake.py`` runs the tests for GPUs in such processes.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

VARIABLE = "TIERSTATE_FAKE_CUDA"
"""The environment variable that asks for it."""


FOLDER = Path(__file__).parent


LATE, EAGER, RANDOM, PACED = range(4)
"""When devices work: only when something waits for it, at once, at random moments, or, for measurements alone, at the
rate of a bus: then a copy between host and device takes its time and moves nothing."""


MODES = {"global": 0, "thread_local": 1, "relaxed": 2}


def compiler() -> str | None:
    """A C++ compiler, if there is one."""
    return next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def build() -> tuple[Path, Path]:
    """Compile the library to preload, and the extension; kept in a folder of this user's for the next time.

    Raises:
        RuntimeError: they cannot be compiled.
    """
    root = Path(torch.__file__).parent
    include = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    options = [abi, "-DTORCH_EXTENSION_NAME=fake_cuda_device", *(f"-I{one}" for one in include)]
    return _compiled("preload.cpp", [], []), _compiled("device.cpp", options, libraries)


def _compiled(source: str, options: list[str], libraries: list[str]) -> Path:
    file = FOLDER / source
    text = file.read_bytes() + f"{torch.__version__} {sysconfig.get_platform()} {options}".encode()
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tierstate-tests"
    done = folder / f"{file.stem}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    # One of the processes that test side by side compiles it, and the others wait.
    with (folder / f"{file.stem}.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder) as making:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            return done
        made = Path(making) / done.name
        command = [compiler() or "c++", "-O1", "-std=c++20", "-fPIC", "-shared", "-w", *options, str(file)]
        ran = subprocess.run([*command, "-o", str(made), *libraries], capture_output=True, text=True, check=False)
        if ran.returncode:
            raise RuntimeError(f"the fake of CUDA cannot be compiled: {ran.stderr[-4000:]}")
        made.replace(done)
    return done


def environment() -> dict[str, str]:
    """The environment of a process that is to have the fake: `install` finds all it needs there."""
    preload, _ = build()
    return {**os.environ, VARIABLE: "1", "LD_PRELOAD": f"{preload} {os.environ.get('LD_PRELOAD', '')}".strip()}


def load(path: Path) -> Any:
    """Import the compiled extension."""
    spec = importlib.util.spec_from_file_location("fake_cuda_device", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Runtime:
    """What ``torch.cuda.cudart()`` gives, and the functions of libcudart that are called by ctypes."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return int(self._device.host_register(address, nbytes))

    def cudaHostUnregister(self, address: int) -> int:
        return int(self._device.host_unregister(address))

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        free, total = self._device.memory_info(device)
        return free, total

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"

    def cudaGetLastError(self) -> int:
        return int(self._device.take_last_error())

    def cudaPeekAtLastError(self) -> int:
        return int(self._device.peek_last_error())

    def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        """Takes a pointer to an int by ``ctypes.byref``, or the pointer itself, as the real one."""
        cell = mode._obj if hasattr(mode, "_obj") else mode.contents
        cell.value = self._device.exchange_capture_mode(cell.value)
        return 0


class StreamBase(torch.Stream):
    """The base of ``torch.cuda.Stream``."""

    def __new__(
        cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0, **_: Any
    ) -> StreamBase:
        if device_type:
            made = super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
        else:
            made = super().__new__(cls, torch.device("cuda", torch.cuda.current_device()), priority=priority)
        return made

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class EventBase(torch.Event):
    """The base of ``torch.cuda.Event``."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> EventBase:
        found = super().__new__(cls, torch.device("cuda"), enable_timing=enable_timing, blocking=blocking)
        found.asked_to_block = blocking
        return found

    def elapsed_time(self, end_event: EventBase) -> float:
        # torch.Event takes no event of a class that is derived from it.
        return float(fake().device.elapsed_time(self.event_id, end_event.event_id))


class GraphBase:
    """The base of ``torch.cuda.CUDAGraph``."""

    def __new__(cls, keep_graph: bool = False) -> GraphBase:
        return super().__new__(cls)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._graph = fake().device.begin_capture(MODES[capture_error_mode])

    def capture_end(self) -> None:
        fake().device.end_capture(self._graph)

    def instantiate(self) -> None:
        pass

    def replay(self) -> None:
        fake().device.replay(self._graph)

    def reset(self) -> None:
        pass

    def pool(self) -> tuple[int, int]:
        return (0, 1)


class FakeCuda:
    """Controls the fake devices.

    Attributes:
        device: the extension itself.
        runtime: what stands for libcudart.
    """

    def __init__(self, device: Any) -> None:
        self.device, self.runtime = device, Runtime(device)

    def reset(self) -> None:
        """Everything done, nothing fails, all limits gone; work is done late."""
        self.synchronize()
        for what in ("allocation", "launch", "register", "unregister"):
            self.device.fail(what, -1)
        for index in range(self.device.device_count()):
            self.device.set_limit(index, 1 << 62)
        self.device.set_pin_limit((1 << 63) - 1)
        self.device.take_last_error()
        self.device.set_timing(LATE, 0)
        self.device.set_device(0)
        self.device.empty_cache()
        self.device.clear_counts()

    def synchronize(self) -> None:
        """All devices do all their work."""
        for index in range(self.device.device_count()):
            torch.cuda.synchronize(index)

    def timing(self, when: int, seed: int = 0) -> None:
        """Choose when devices work: `LATE`, `EAGER` or `RANDOM`."""
        self.device.set_timing(when, seed)

    def pace(self, rate: float) -> None:
        """Let copies between the host and each device take as long as a bus takes with this rate, in GB/s each way."""
        self.device.set_rate(rate)
        self.timing(PACED)

    def fail(self, what: str, after: int = 0) -> None:
        """Make one later call fail: an ``allocation``, a ``launch``, a ``register`` or an ``unregister``."""
        self.device.fail(what, after)

    def limit(self, nbytes: int, index: int = 0) -> None:
        """Give a device this much memory."""
        self.device.set_limit(index, nbytes)

    def later(self, work: Callable[[], object]) -> None:
        """Queue a kernel: a function that the device calls in the order of the current stream."""
        self.device.run_later(work)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of a tensor of a device as they are now, without waiting; a kernel may write there."""
        found: torch.Tensor = self.device.on_host(tensor)
        return found

    def pinned(self) -> dict[int, int]:
        """Registered host memory: address and length."""
        return dict(self.device.pinned())

    def counts(self) -> dict[str, int]:
        """How often each call of CUDA that matters was made."""
        return dict(self.device.counts())

    def faults(self) -> list[str]:
        """What a real device would have crashed or corrupted memory with; forgotten by the call."""
        return list(self.device.take_faults())

    @contextmanager
    def one_context(self) -> Iterator[Callable[[], list[int]]]:
        """Forget which devices have been used; the block's value tells which were used since."""
        self.device.forget_contexts()
        yield lambda: list(self.device.contexts())


_installed: list[FakeCuda] = []


def fake() -> FakeCuda:
    """The fake of this process."""
    return _installed[0]


def is_installed() -> bool:
    """Whether this process has the fake."""
    return bool(_installed)


def install(devices: int = 4) -> FakeCuda:
    """Make the fake the device "cuda" of this process; it stays until the process ends.

    Raises:
        RuntimeError: it cannot be compiled, or torch has real CUDA.
    """
    if _installed:
        return fake()
    if why := unfit():
        raise RuntimeError(why)
    device = load(build()[1])
    device.set_device_count(devices)
    made = FakeCuda(device)
    _installed.append(made)
    _fill_in(device, made.runtime, devices)
    return made


def _fill_in(device: Any, runtime: Runtime, devices: int) -> None:
    """The functions that a torch with CUDA has in ``torch._C``."""
    type_number = torch.Stream(torch.device("cuda")).device_type
    core: Any = torch._C
    core._has_cuda = True
    core._CudaStreamBase, core._CudaEventBase, core._CUDAGraph = StreamBase, EventBase, GraphBase
    core._graph_pool_handle = lambda: (0, 1)
    core._cuda_isCurrentStreamCapturing = device.is_capturing
    core._cuda_getDeviceCount = device.device_count
    core._cuda_init = device.init
    core._cuda_isInBadFork = device.forked
    core._cuda_getDevice = device.device
    core._cuda_setDevice = device.set_device
    core._cuda_exchangeDevice = core._cuda_maybeExchangeDevice = device.exchange_device
    core._cuda_getCurrentStream = lambda index: _stream_data(device.stream(index), index, type_number)
    core._cuda_getDefaultStream = lambda index: _stream_data(0, index, type_number)
    core._cuda_setStream = lambda stream_id, device_index, device_type: device.set_stream(stream_id, device_index)
    core._cuda_getCurrentRawStream = device.stream
    core._cuda_hasPrimaryContext = lambda index: index in device.contexts()
    core._cuda_synchronize = lambda: torch.accelerator.synchronize(torch.device("cuda", device.device()))
    core._cuda_emptyCache = device.empty_cache
    core._cuda_memoryStats = lambda index: _memory_stats(device.memory_stats(index))
    core._cuda_resetPeakMemoryStats = device.reset_peak
    core._cuda_resetAccumulatedMemoryStats = lambda index: None
    core._cuda_setMemoryFraction = lambda fraction, index: device.set_limit(
        index, int(fraction * device.memory_info(index)[1]) if fraction < 1 else 1 << 62
    )
    core._cuda_cudaCachingAllocator_is_enabled = lambda: True
    core._cuda_getMemoryFraction = lambda index: 1.0
    core._host_emptyCache = lambda: None
    core._cuda_sleep = lambda cycles: device.run_later(lambda: None)
    for name in ("torch.cuda.streams", "torch.cuda.graphs"):
        importlib.reload(importlib.import_module(name))
    cuda: Any = torch.cuda
    cuda._is_in_bad_fork = device.forked
    cuda._cudart = runtime
    cuda._exchange_device = cuda._maybe_exchange_device = device.exchange_device
    for module, names in (
        (cuda.streams, ("Stream", "Event", "ExternalStream")),
        (cuda.graphs, ("CUDAGraph", "graph", "graph_pool_handle", "is_current_stream_capturing")),
    ):
        for name in names:
            setattr(cuda, name, getattr(module, name))
    cuda.make_graphed_callables = cuda.graphs.make_graphed_callables
    cuda.default_generators = tuple(torch.Generator() for _ in range(devices))
    cuda.get_device_properties = lambda index=None: _properties(device, torch.device("cuda", index or 0).index)
    torch.UntypedStorage.resize_ = _resizing(device, torch.UntypedStorage.resize_)
    # Functions of libcudart that torch does not bind are called through one module of ours; and there is no NVRTC here.
    _stand_in("cudart", "runtime", lambda: runtime)
    _stand_in("kernels", "CompiledKernels", HostKernels)


def _resizing(device: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """``UntypedStorage.resize_``, which a build of torch without CUDA has not for "cuda"."""

    def resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return own(storage, nbytes)
        device.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), nbytes)
        return storage

    return resize


def _stream_data(stream_id: int, index: int, type_number: int) -> tuple[int, int, int]:
    return stream_id, torch.cuda.current_device() if index < 0 else index, type_number


def _memory_stats(found: dict[str, int]) -> dict[str, Any]:
    def stat(current: int, peak: int = 0) -> dict[str, Any]:
        return {"all": {"current": current, "peak": max(peak, current), "allocated": 0, "freed": 0}}

    return {
        "allocated_bytes": stat(found["allocated"], found["peak"]),
        "active_bytes": stat(found["allocated"], found["peak"]),
        "reserved_bytes": stat(found["reserved"]),
        "inactive_split_bytes": stat(0),
        "num_ooms": found["ooms"],
        "num_alloc_retries": found["retries"],
    }


def _properties(device: Any, index: int) -> SimpleNamespace:
    total = device.memory_info(index)[1]
    place = {"pci_domain_id": 0, "pci_bus_id": index, "pci_device_id": 0}
    return SimpleNamespace(name="fake", total_memory=total, major=9, minor=0, multi_processor_count=1, **place)


def _stand_in(module: str, name: str, value: object) -> None:
    """Put this in the place of what a module of ours has under that name, if this checkout has the module."""
    try:
        setattr(importlib.import_module(f"tierstate.tiers.memory.{module}"), name, value)
    except ModuleNotFoundError:
        return


class HostKernels:
    """The kernels of tierstate, compiled for the host: as real ones, they do their work when the device does its."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._library = device, _kernels_library()

    def launch(self, name: str, blocks: int, threads: int, *args: int | torch.Tensor) -> None:
        tensors = {i: arg for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        here = {i: (fake().on_host(t) if t.is_cuda else t).data_ptr() for i, t in tensors.items()}
        offset = next(here[i] - t.data_ptr() for i, t in tensors.items() if t.is_cuda)
        cells = (ctypes.c_uint64 * 5)(*(here.get(i, arg) for i, arg in enumerate(args)))
        function = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)
        with torch.cuda.device(self._device):
            fake().later(lambda: self._library.run(function, blocks, threads, ctypes.c_longlong(offset), cells))


@lru_cache(maxsize=1)
def _kernels_library() -> ctypes.PyDLL:
    source: Path = importlib.import_module("tierstate.tiers.memory.kernels").SOURCE
    version = hashlib.sha256(source.read_bytes()).hexdigest()
    return ctypes.PyDLL(str(_compiled("kernels.cpp", [f"-I{source.parent}", f"-DVERSION_{version}"], [])))


def timing(when: int, seed: int = 0) -> None:
    """Choose when fake devices work, as `FakeCuda.timing`; real ones choose for themselves."""
    if is_installed():
        fake().timing(when, seed)


def unfit() -> str:
    """Why the fake cannot be built here, or this torch not take it; empty if it can."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "this torch has devices of its own; the fake is for the CPU build"
    return "" if compiler() is not None else "needs a C++ compiler, to build the fake"


def has_real() -> bool:
    """Whether this machine has a CUDA device that is not fake."""
    return not _installed and torch.cuda.is_available()
