"""The independent reader beside the format's description, which imports nothing of tierstate."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tierstate as ts

pytestmark = pytest.mark.slow

READER = Path(__file__).resolve().parents[2] / "examples" / "read_version.py"


@pytest.fixture
def place(tmp_path):
    state = {
        "weight": torch.randn(1000, 700),
        "half": torch.randn(7).bfloat16(),
        "array": np.arange(6, dtype=">i4").reshape(2, 3),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "step": 3,
    }
    policy = ts.Policy.parse(f"""
        version: 1
        chunk: 64KiB
        tiers: {{nvme: {{type: nvme, path: {tmp_path}}}}}
        arena: {{size: 16MiB}}
    """)
    with ts.Checkpointer(policy, "run") as ckpt:
        for step in (1, 2):
            state["scalar"] += step
            ckpt.save(state, step=step)
    return tmp_path, state


def test_it_reads_what_was_saved(place):
    folder, state = place
    script = (
        f"import json, runpy, sys; read = runpy.run_path({str(READER)!r})['read']\n"
        f"import xxhash; from pathlib import Path\n"
        f"found = read(Path({str(folder)!r}), 'run')\n"
        f"assert not any(name.startswith('tierstate') or name == 'torch' for name in sys.modules)\n"
        "print(json.dumps({k: [a.dtype.str, a.shape, a.tobytes().hex()] for k, a in found.items()}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found.keys() == {json.dumps([key]) for key in state if key != "step"}
    for key, (dtype, shape, data) in ((json.loads(k)[0], v) for k, v in found.items()):
        value = state[key]
        assert list(value.shape) == shape
        raw = value.tobytes() if isinstance(value, np.ndarray) else bytes(value.reshape(-1).view(torch.uint8).tolist())
        assert data == raw.hex()
        assert dtype == ("|V2" if key == "half" else np.asarray(value).dtype.str)


def test_it_notices_a_changed_byte(place):
    folder, _ = place
    for pack in (folder / "packs").rglob("*-0-*"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 3] ^= 1
        pack.chmod(0o644)
        pack.write_bytes(data)
    done = subprocess.run([sys.executable, READER, folder, "run"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "damaged" in done.stderr


def test_it_refuses_deltas(place, tmp_path_factory):
    folder, state = tmp_path_factory.mktemp("deltas"), place[1]
    policy = ts.Policy.parse(f"{{version: 1, tiers: {{nvme: {{type: nvme, path: {folder}, codec: delta}}}}}}")
    with ts.Checkpointer(policy, "run") as ckpt:
        for step in (1, 2):
            state["weight"][step] += 1
            ckpt.save(state, step=step)
    done = subprocess.run([sys.executable, READER, folder, "run"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "this reader knows nothing of ['delta']" in done.stderr
