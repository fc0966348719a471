"""The device path: copies between a GPU and the host beside raw copies of pinned memory, and what a save costs a step.

python -m benchmarks.devices [--size 8GiB] [--rounds 7] [--only copies,pin,stalls] [--shapes large,small]
                             [--tiers host,gpu,nvme] [--graph] [--out FILE]

Two states of float32 tensors on the device: ``large`` has tensors of 64 MiB, ``small`` has 20,000 of 40 kB. Everything
takes turns in each round, and each ratio is made within a round. A first round warms up and does not count, except that
the first save, which faults the slabs in and pins them, has a row of its own. It needs a CUDA device with three times
the state free (the state, and two copies in a `gpu` tier), and twice the state of host memory (a `host` tier that keeps
one version while it gets the next).

``copies``: raw copies, saves until they are captured and until they are in the tier, restores.
``pin``: what it costs to make memory of the arena ready.
``stalls``: a step of training (matrix products, and a step of an optimizer that changes all of the state) without and
with a save before it, each until the device has done it all. With ``--graph`` the products are one replay: what a save
costs then is not the interpreter that the step waits for.
"""
