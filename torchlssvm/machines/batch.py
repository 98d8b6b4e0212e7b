"""Checking what a kernel machine is given, before anything changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.kernels import Kernel


def samples(x: Any, kernel: Kernel, J: int | None, device: torch.device) -> Tensor:
    """x as float64 rows (B, J) that the kernel takes, and finite. J: the width of the rows held, None for the first ones."""
    rows = queries(x, kernel, J, device)
    finite = checks.to_host(torch.isfinite(rows).all())
    if finite is not None and not finite[0][0]:
        checks.raise_not_finite("x", rows)
    return rows


def queries(x: Any, kernel: Kernel, J: int | None, device: torch.device) -> Tensor:
    """As :func:`samples`, NaN allowed (the scores are NaN then), and differentiable in x."""
    if kernel.deep:
        tensor = x if isinstance(x, Tensor) and x.device == device else checks.as_tensor(x, "x", device)
        if tensor.ndim < 2:
            raise ValueError(f"x must be a batch (B, ...), got shape {tuple(tensor.shape)}; a single sample is x[None]")
        rows = kernel.prepare(tensor)
        if rows.ndim != 2 or J not in (None, rows.shape[1]):
            raise ValueError(f"the kernel's network gave {tuple(rows.shape)}, the rows held are {J} wide")
        return rows.to(torch.float64)
    if (
        isinstance(x, Tensor)
        and x.ndim == 2
        and x.device == device
        and x.dtype in checks.FLOATS
        and J in (None, x.shape[1])
    ):
        return x.to(torch.float64)
    tensor = checks.as_tensor(x, "x", device)
    if tensor.ndim != 2 and J is None:
        hint = "; a single sample is x[None]" if tensor.ndim == 1 else ""
        raise ValueError(f"x must have shape (B, J), got {tuple(tensor.shape)}{hint}")
    return checks.features(tensor, tensor.shape[1] if J is None else J, device).to(torch.float64)


def targets(y: Any, x: Tensor, K: int) -> Tensor:
    """y as float64 targets (B, K): labels are coded -1/+1, one column a class; float targets are taken as they are."""
    y, kind = checks.targets(y, x, K)
    assert isinstance(y, Tensor)
    if kind == "labels":
        host = checks.to_host(y)
        wrong = [] if host is None else [int(v) for v in host[0] if not 0 <= v < K]
        if wrong:
            raise ValueError(f"labels must be in 0..{K - 1}, got {wrong[0]}")
        coded = torch.full((len(y), K), -1.0, dtype=torch.float64, device=x.device)
        return coded.scatter_(1, y.clamp(0, K - 1)[:, None], 1.0)
    finite = checks.to_host(torch.isfinite(y).all())
    if finite is not None and not finite[0][0]:
        checks.raise_not_finite("y", y)
    return y.to(torch.float64, copy=True)
