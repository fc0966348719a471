"""Every test for GPUs, run on fake ones, in a few processes: one that has the fake keeps it."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import fake_cuda

HERE = Path(__file__).parent
TESTS = HERE.parent
FILES = sorted(HERE.rglob("test_*.py"))
FILES.remove(Path(__file__))
EXAMPLE = HERE / "test_example.py"  # which trains three times
FILES.remove(EXAMPLE)
OTHERS = [
    TESTS / "providers/tensors/test_strided_scatter.py",
    TESTS / "providers/tensors/test_tensors.py",
    TESTS / "tiers/memory/test_pinning.py",
]
GROUPS = [*(FILES[number::4] for number in range(4)), OTHERS, pytest.param([EXAMPLE], marks=pytest.mark.soak)]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    if why := fake_cuda.unfit():
        pytest.skip(why)
    return fake_cuda.environment()


@pytest.mark.slow
@pytest.mark.skipif(fake_cuda.has_real(), reason="there is a real GPU here")
@pytest.mark.xdist_group("fake_cuda")
@pytest.mark.parametrize("files", GROUPS, ids=lambda files: ",".join(file.stem for file in files))
def test_on_fake_devices(files: list[Path], environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *map(str, files)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=TESTS.parent, check=False)
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-5_000:]
    assert " passed" in ran.stdout
