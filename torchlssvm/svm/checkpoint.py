"""Checkpoints of the incremental SVM: tensors only, for a machine of any size; the layout is that of version 0.1.0."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.byte_tensors import bytes_to_tensor
from torchlssvm.kernels import Kernel
from torchlssvm.svm.samples import Batch
from torchlssvm.svm.solver import PathSolver

SAVED_PER_SAMPLE = ("y", "weight", "u", "alpha", "sign", "slack")
SAVED_NAMES = ("x", *SAVED_PER_SAMPLE, "ids", "margin", "R", "C", "numbers", "dropped")
"""Per sample, in the order of ids: row x (or Gram matrix), label -1 or +1, weight, upper bound, alpha, side (+1, -1, 0 for R,
E, S), side * g (infinite in S), id; indices of the margin vectors, R of slot 0 and of them; C per class; numbers: b, next id,
whether reserve vectors were forgotten, whether the kernel is precomputed, events; forgotten ids. Version 0.1.0 wrote samples
in any order. R is written for that version; it is not read."""

KERNEL_NAME = "kernel_name"
"""The name of the kernel's class, as bytes; version 0.1.0 did not write it."""


class Content(NamedTuple):
    """The content of a checkpoint, and of a machine."""

    solver: PathSolver
    C: tuple[float, float] | None  # None: the checkpoint has shapes and no data
    inexact: bool
    dropped: set[int]  # ids of samples that ``reserve_limit`` has forgotten


def save(content: Content) -> dict[str, Tensor]:
    """Write the state as tensors on the solver's device."""
    state, margin = parts(content), content.solver.margin
    used = np.concatenate([[0], margin.slots()])
    state["R"] = margin.R[np.ix_(used, used)]
    state[KERNEL_NAME] = bytes_to_tensor(name_of(content.solver.rows.kernel).encode())
    device = content.solver.rows.device
    return {k: v if isinstance(v, Tensor) else torch.from_numpy(v).to(device) for k, v in state.items()}


def name_of(kernel: Kernel | None) -> str:
    """Return the name of a kernel's class; "precomputed" without one."""
    return "precomputed" if kernel is None else type(kernel).__name__


def parts(content: Content) -> dict[str, Any]:
    """Write the state as arrays on the host, without R, which is not read; x is a tensor."""
    solver = content.solver
    s, margin, precomputed = solver.samples, solver.margin, solver.rows.kernel is None
    order = s.order()
    place = np.zeros(s.capacity, dtype=np.int64)
    place[order] = np.arange(len(order))
    index = torch.from_numpy(order).to(solver.rows.device)
    slack = np.where(s.side == 0, np.inf, s.side * s.g)
    numbers = [margin.b, solver.next_id, content.inexact, precomputed, solver.path.events]
    host: dict[str, Any] = {name: getattr(s, name)[order] for name in ("y", "weight", "u", "alpha")}
    host |= {"sign": s.side[order], "slack": slack[order], "ids": s.ids[order], "margin": place[margin.positions()]}
    host |= {"C": np.array(content.C), "numbers": np.array(numbers, dtype=float)}
    host["dropped"] = np.array(sorted(content.dropped), dtype=np.int64)
    x = solver.rows.x[index]
    host["x"] = x[:, index] if precomputed else x
    return host


def load(state: dict[str, Any], kernel: Kernel | None, device: torch.device, cache_bytes: int) -> Content:
    """Read a state of :func:`save` or :func:`parts`; ValueError if it is not one, or not for this kernel."""
    solver, x = PathSolver(kernel, device, cache_bytes), state["x"]
    if checks.is_fake(x):
        if n := len(x):
            solver.place(Batch(x.to(device), np.ones(n), np.ones(n), np.ones(n)), list(range(n)))
        solver.next_id = n
        return Content(solver, None, False, set())
    host = {k: v.detach().cpu().numpy() if isinstance(v, Tensor) else v for k, v in state.items() if k != "x"}
    _check(x, host, kernel)
    b, next_id, inexact, _, events = host["numbers"].tolist()
    if len(x):
        vectors = (host[name].astype(float) for name in ("y", "weight", "u"))
        at = solver.place(Batch(x.detach().to(device, torch.float64), *vectors), host["ids"].tolist())
        solver.samples.alpha[at], solver.samples.side[at] = host["alpha"], host["sign"]
        solver.resume(at[host["margin"]], b)
    solver.next_id, solver.path.events = int(next_id), int(events)
    C = float(host["C"][0]), float(host["C"][1])
    return Content(solver, C, bool(inexact), set(host["dropped"].tolist()))


def _check(x: Tensor, host: dict[str, Any], kernel: Kernel | None) -> None:
    """ValueError where the parts do not fit each other or the machine."""
    odd = [name for name, values in host.items() if not isinstance(values, np.ndarray)]
    odd += [name for name in ("ids", "margin", "dropped") if name not in odd and host[name].dtype.kind != "i"]
    if odd or not isinstance(x, Tensor):
        raise ValueError(f"not the state of an IncrementalSVM: {[*odd, 'x'][0]} is not a tensor of the right type")
    if KERNEL_NAME in host and (name := host[KERNEL_NAME].tobytes().decode(errors="replace")) != name_of(kernel):
        raise ValueError(f"the checkpoint is that of a machine with the kernel {name}, this one has {name_of(kernel)}")
    n = len(host["ids"])
    wrong = [name for name in SAVED_PER_SAMPLE if host[name].shape != (n,)]
    if host["numbers"].shape != (5,) or host["C"].shape != (2,) or wrong or x.ndim != 2 or len(x) != n:
        raise ValueError(f"not the state of an IncrementalSVM: {wrong or 'its parts'} do not fit {n} ids")
    if bool(host["numbers"][3]) != (kernel is None):
        raise ValueError("the checkpoint and the machine differ: one of them has precomputed kernel values")
    finite = [name for name in ("y", "weight", "u", "alpha", "numbers", "C") if not np.isfinite(host[name]).all()]
    if finite or not bool(torch.isfinite(x).all()):
        raise ValueError(f"the saved {finite[0] if finite else 'x'} holds NaN or inf: the state is damaged")
    if len(set(host["ids"].tolist())) < n or not np.isin(host["sign"], (-1.0, 0.0, 1.0)).all():
        raise ValueError("the saved ids or sets are not those of samples: the state is damaged")
    if sorted(host["margin"].tolist()) != np.flatnonzero(host["sign"] == 0).tolist():
        raise ValueError("the saved margin set is not that of the samples held: the state is damaged")
    names = [*host["ids"].tolist(), *host["dropped"].tolist()]
    if (
        min(names, default=0) < 0
        or len(set(names)) < len(names)
        or not max(names, default=-1) < host["numbers"][1] < 2**62
    ):
        raise ValueError("the saved ids are negative, there twice, or will be given out again: the state is damaged")
    y, weight, C = host["y"], host["weight"], host["C"]
    if not ((np.abs(y) == 1).all() and (weight > 0).all() and (C > 0).all()):
        raise ValueError("the saved labels are not -1 and +1, or weights and C not positive: the state is damaged")
    if not np.allclose(host["u"], weight * np.where(y > 0, C[1], C[0]), rtol=1e-9, atol=0.0):
        raise ValueError("the saved bounds are not C times the weights: the state is damaged")
