"""Checkpoints of the incremental SVM: tensors only, for a machine of any size; the layout is that of version 0.1.0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional import checks

if TYPE_CHECKING:
    from torchlssvm.svm.machine import IncrementalSVM

VECTORS = ("y", "weight", "u", "alpha", "sign", "slack")
SAVED = ("x", *VECTORS, "ids", "margin", "R", "C", "numbers", "dropped")
"""Per sample, in the order of ids: row x (or Gram matrix), label -1 or +1, weight, upper bound, alpha, side (+1, -1, 0 for R,
E, S), side * g (infinite in S), id; indices of the margin vectors, R of slot 0 and of them; C per class; numbers: b, next id,
whether reserve vectors were forgotten, whether the kernel is precomputed, events; forgotten ids. Version 0.1.0 wrote samples
in any order. R is written for that version; it is not read."""


def save(machine: IncrementalSVM) -> dict[str, Tensor]:
    """The state as tensors on the machine's device."""
    state, margin = parts(machine), machine._solver.margin
    used = np.concatenate([[0], margin.slots()])
    state["R"] = margin.R[np.ix_(used, used)]
    return {k: v if isinstance(v, Tensor) else torch.from_numpy(v).to(machine.device) for k, v in state.items()}


def parts(machine: IncrementalSVM) -> dict[str, Any]:
    """The state as arrays on the host, without R, which is not read; x is a tensor."""
    solver = machine._solver
    s, margin = solver.samples, solver.margin
    order = s.order()
    place = np.zeros(s.capacity, dtype=np.int64)
    place[order] = np.arange(len(order))
    index = torch.from_numpy(order).to(machine.device)
    slots = margin.slots()
    slack = np.where(s.side == 0, np.inf, s.side * s.g)
    numbers = [margin.b, solver.next_id, machine.inexact, machine.kernel is None, solver.path.events]
    host: dict[str, Any] = {name: getattr(s, name)[order] for name in ("y", "weight", "u", "alpha")}
    host |= {"sign": s.side[order], "slack": slack[order], "ids": s.ids[order], "margin": place[margin.m.at[slots]]}
    host |= {"C": np.array(machine._C), "numbers": np.array(numbers, dtype=float)}
    host["dropped"] = np.array(sorted(machine._dropped), dtype=np.int64)
    x = solver.rows.x[index]
    host["x"] = x[:, index] if machine.kernel is None else x
    return host


def load(machine: IncrementalSVM, state: dict[str, Any], device: torch.device) -> None:
    """Take over a state of :func:`save` or :func:`parts`, whole; ValueError, and nothing changed, if it is not one."""
    if checks.is_fake(state["x"]):
        _load_fake(machine, state, device)
        return
    host = {k: v.detach().cpu().numpy() if isinstance(v, Tensor) else v for k, v in state.items() if k != "x"}
    _check(machine, state["x"], host)
    b, next_id, inexact, _, events = host["numbers"].tolist()
    before = machine.__dict__.copy()
    try:
        with torch.inference_mode(False), torch.no_grad():
            machine._reset_state(device)
            solver, n = machine._solver, len(host["ids"])
            s = solver.samples
            if n:
                s.grow(n)
                solver.margin.fit_capacity()
                at = s.place(host["ids"].tolist(), *(host[name].astype(float) for name in ("y", "weight", "u")))
                x = state["x"].detach().to(device, torch.float64)
                solver.rows.fit_capacity(x.shape[1])
                if machine.kernel is None:
                    x = torch.cat([x, x.new_zeros(n, s.capacity - n)], 1)
                solver.rows.put(at, x.clone())
                s.alpha[at], s.side[at] = host["alpha"], host["sign"]
                inside = at[host["margin"]]
                rows = solver.rows.block(inside) if len(inside) else np.zeros((0, s.capacity))
                solver.margin.set_members(inside, s.alpha[inside], b, rows)
                solver.resume()
        machine._C = (float(host["C"][0]), float(host["C"][1]))
        solver.next_id, solver.path.events = int(next_id), int(events)
        machine.inexact, machine._dropped = bool(inexact), set(host["dropped"].tolist())
        machine._support = None
    except BaseException:
        machine.__dict__.update(before)
        raise


def _check(machine: IncrementalSVM, x: Tensor, host: dict[str, Any]) -> None:
    """ValueError where the parts do not fit each other or the machine."""
    n = len(host["ids"])
    wrong = [name for name in VECTORS if host[name].shape != (n,)]
    if host["numbers"].shape != (5,) or host["C"].shape != (2,) or wrong or x.ndim != 2 or len(x) != n:
        raise ValueError(f"not the state of an IncrementalSVM: {wrong or 'its parts'} do not fit {n} ids")
    if bool(host["numbers"][3]) != (machine.kernel is None):
        raise ValueError("the checkpoint and the machine differ: one of them has precomputed kernel values")
    finite = [name for name in ("y", "weight", "u", "alpha", "numbers", "C") if not np.isfinite(host[name]).all()]
    if finite or not bool(torch.isfinite(x).all()):
        raise ValueError(f"the saved {finite[0] if finite else 'x'} holds NaN or inf: the state is damaged")
    if len(set(host["ids"].tolist())) < n or not np.isin(host["sign"], (-1.0, 0.0, 1.0)).all():
        raise ValueError("the saved ids or sets are not those of samples: the state is damaged")
    margin = host["margin"]
    if len(margin) and not (margin.min() >= 0 and margin.max() < n and (host["sign"][margin] == 0).all()):
        raise ValueError("the saved margin set is not one of samples held: the state is damaged")


def _load_fake(machine: IncrementalSVM, state: dict[str, Any], device: torch.device) -> None:
    """A state with no data in it: rows of its shape on the device."""
    machine._reset_state(device)
    solver, x = machine._solver, state["x"]
    if len(x):
        solver.samples.grow(len(x))
        solver.margin.fit_capacity()
        solver.samples.place(list(range(len(x))), *(np.ones(len(x)) for _ in range(3)))
        solver.rows.fit_capacity(x.shape[1])
        solver.next_id = len(x)
