"""Checkpoints of the incremental SVM, made of tensors only, for a machine of any size."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional.byte_tensors import bytes_to_tensor
from torchlssvm.kernels import Kernel
from torchlssvm.svm.samples import Batch, upper_bounds
from torchlssvm.svm.solver import PathSolver

FORMAT = 1
"""Number of the format of a saved machine."""

SAVED_PER_SAMPLE = ("y", "weight", "alpha", "side")
SAVED_NAMES = ("format", "kernel_name", "x", *SAVED_PER_SAMPLE, "ids", "C", "numbers", "dropped")
"""The saved tensors. kernel_name: as bytes; x: rows, or the Gram matrix, in the order of ids; C: per class; numbers: b, next
id, whether reserve vectors were forgotten, and events; dropped: the forgotten ids."""


class Content(NamedTuple):
    """The content of a checkpoint, and of a machine."""

    solver: PathSolver
    C: tuple[float, float]
    inexact: bool
    dropped: set[int]  # ids of samples that ``reserve_limit`` has forgotten


def name_of(kernel: Kernel | None) -> str:
    """Return the name of a kernel's class; "precomputed" if there is no kernel."""
    return "precomputed" if kernel is None else type(kernel).__name__


def save(content: Content) -> dict[str, Tensor]:
    """Write the state as tensors on the solver's device."""
    solver = content.solver
    s, rows, order = solver.samples, solver.rows, solver.samples.order()
    device = rows.gram.device
    numbers = [solver.margin.b, solver.next_id, content.inexact, solver.path.events]
    state: dict[str, Any] = {name: getattr(s, name)[order] for name in (*SAVED_PER_SAMPLE, "ids")}
    state |= {"C": np.array(content.C), "numbers": np.array(numbers, dtype=float), "format": np.array(FORMAT)}
    state["dropped"] = np.array(sorted(content.dropped), dtype=np.int64)
    out = {name: torch.from_numpy(values).to(device) for name, values in state.items()}
    x = rows.x(order)
    out["x"] = x[:, torch.from_numpy(order).to(device)] if rows.gram.kernel is None else x
    out["kernel_name"] = bytes_to_tensor(name_of(rows.gram.kernel).encode()).to(device)
    return out


def load(state: dict[str, Any], kernel: Kernel | None, device: torch.device, cache_bytes: int) -> Content:
    """Load a state written by :func:`save`. If the state does not pass the certificate with this kernel, solve again.

    Raises ValueError if the input is not the state of a machine, or if the kernel does not match.
    """
    _check_parts(state, kernel)
    x = state["x"].detach()
    host = {k: v.detach().cpu().numpy() for k, v in state.items() if k != "x"}
    _check_values(x, host)
    solver, C = PathSolver(kernel, device, cache_bytes), (float(host["C"][0]), float(host["C"][1]))
    b, next_id, inexact, events = host["numbers"].tolist()
    if len(x):
        y, weight = host["y"].astype(float), host["weight"].astype(float)
        batch = Batch(x.to(device, torch.float64), y, weight, upper_bounds(y, weight, C))
        at = solver.place(batch, host["ids"].tolist())
        solver.samples.alpha[at], solver.samples.side[at] = host["alpha"], host["side"]
        solver.resume(at[host["side"] == 0], b)
    solver.next_id, solver.path.events = int(next_id), int(events)
    return Content(solver, C, bool(inexact), set(host["dropped"].tolist()))


def _check_parts(state: dict[str, Any], kernel: Kernel | None) -> None:
    """Raise ValueError if a part is missing or malformed, or if the kernel does not match."""
    odd = [name for name in SAVED_NAMES if not isinstance(state.get(name), Tensor)]
    if odd:
        raise ValueError(f"not the state of an IncrementalSVM: {odd[0]} is not a tensor")
    if state["format"].numel() != 1 or int(state["format"]) != FORMAT:
        raise ValueError(f"the state has the format {state['format'].tolist()}, this version reads {FORMAT}")
    name = state["kernel_name"].cpu().numpy().tobytes().decode(errors="replace")
    if name != name_of(kernel):
        raise ValueError(
            f"the checkpoint belongs to a machine with the kernel {name}, but this one has {name_of(kernel)}"
        )
    n = state["ids"].numel()
    shapes = dict.fromkeys((*SAVED_PER_SAMPLE, "ids"), (n,)) | {"C": (2,), "numbers": (4,)}
    wrong = [name for name, shape in shapes.items() if tuple(state[name].shape) != shape]
    integers = [name for name in ("ids", "dropped") if state[name].is_floating_point() or state[name].is_complex()]
    if wrong or integers or state["x"].ndim != 2 or len(state["x"]) != n:
        raise ValueError(f"not the state of an IncrementalSVM: {[*wrong, *integers, 'x'][0]} does not fit {n} ids")


def _check_values(x: Tensor, host: dict[str, Any]) -> None:
    """Raise ValueError if values are impossible for a machine."""
    finite = [name for name in ("y", "weight", "alpha", "numbers", "C") if not np.isfinite(host[name]).all()]
    if finite or not bool(torch.isfinite(x).all()):
        raise ValueError(f"the saved {finite[0] if finite else 'x'} holds NaN or inf: the state is damaged")
    if not (np.isin(host["side"], (-1.0, 0.0, 1.0)).all() and (np.abs(host["y"]) == 1).all()):
        raise ValueError("the saved labels are not -1 and +1, or the sets not -1, 0 and +1: the state is damaged")
    if not ((host["weight"] > 0).all() and (host["C"] > 0).all()):
        raise ValueError("the saved weights or C are not positive: the state is damaged")
    ids, next_id = [*host["ids"].tolist(), *host["dropped"].tolist()], host["numbers"][1]
    if len(set(ids)) < len(ids) or min(ids, default=0) < 0 or not max(ids, default=-1) < next_id < 2**62:
        raise ValueError("some saved ids are negative, occur twice, or would be used again: the state is damaged")
