"""A job of milliseconds a step, to be killed: it saves every step, and writes to a file each save that has returned.

python lagging_job.py POLICY LOG
"""

from __future__ import annotations

import os
import sys
import time

import torch

import tierstate as ts

if __name__ == "__main__":
    state = {"w": torch.zeros(20_000), "step": 0}
    log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with ts.Checkpointer(sys.argv[1], run="job") as ckpt:
        for info in ckpt.versions()[-1:]:
            state["step"] = info.step
        print("ready", flush=True)
        while True:
            state["w"] += 1
            state["step"] += 1
            called = time.time()
            ckpt.save(state, step=state["step"])
            os.write(log, f"{state['step']} {called!r}\n".encode())  # one write, so that a kill tears no line
