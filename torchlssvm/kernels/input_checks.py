"""Input checks of machines with a kernel, which run before any state changes."""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from torchlssvm.errors import RemovalError
from torchlssvm.functional import checks
from torchlssvm.kernels.base import Kernel


def samples(x: Any, kernel: Kernel, J: int | None, device: torch.device) -> Tensor:
    """Return x as finite float64 rows (B, J) for the kernel. J: the width of the machine's rows, None if it has no rows yet."""
    rows = queries(x, kernel, J, device).resolve_neg()
    if checks.not_finite(rows):
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
            raise ValueError(f"the kernel's network returned {tuple(rows.shape)}, but the stored rows have {J} columns")
        return rows.to(torch.float64)
    if (
        isinstance(x, Tensor)
        and x.layout is torch.strided
        and x.ndim == 2
        and x.device == device
        and x.dtype in checks.FLOAT_DTYPES
        and J in (None, x.shape[1])
    ):
        return x.to(torch.float64)
    tensor = checks.as_tensor(x, "x", device)
    if tensor.ndim != 2 and J is None:
        hint = "; a single sample is x[None]" if tensor.ndim == 1 else ""
        raise ValueError(f"x must have shape (B, J), got {tuple(tensor.shape)}{hint}")
    return checks.features(tensor, tensor.shape[1] if J is None else J, device).to(torch.float64)


def known_ids(ids: Any, held: Container[int]) -> list[int]:
    """Return ids as a list. Raises RemovalError if an id is unknown or given twice."""
    wanted: list[int] = checks.id_list(ids)
    unknown = [i for i in wanted if i not in held]
    if unknown:
        raise RemovalError(
            f"unknown id(s) {unknown[:5]}: give ids that add returned and that are still held. Nothing was changed."
        )
    if len(set(wanted)) < len(wanted):
        twice = next(i for i in wanted if wanted.count(i) > 1)
        raise RemovalError(f"id {twice} is given twice. Nothing was changed.")
    return wanted


def labels(y: Any, x: Tensor, K: int) -> Tensor:
    """y as labels (B,) in 0..K-1, int64, for the rows x (B, J)."""
    values, kind = checks.targets(y, x, K)
    if kind != "labels":
        raise ValueError(
            f"y must be labels in 0..{K - 1} of shape (B,), got float targets of shape {tuple(values.shape)}"
        )
    return _in_range(values, K)


def targets(y: Any, x: Tensor, K: int) -> Tensor:
    """Return y as float64 targets (B, K). Labels become -1/+1, one column for each class; float targets do not change."""
    values, kind = checks.targets(y, x, K)
    if kind == "labels":
        labels = _in_range(values, K)
        if x.device.type == "cpu":
            return _codes(K).index_select(0, labels)
        coded = torch.full((values.shape[0], K), -1.0, dtype=torch.float64, device=x.device)
        return coded.scatter_(1, labels[:, None], 1.0)
    if checks.not_finite(values):
        checks.raise_not_finite("y", values)
    return values.to(torch.float64, copy=True)


@functools.cache
def _codes(K: int) -> Tensor:
    """Return the targets of each class (K, K) on the host: +1 in its own column, -1 elsewhere. They are made once."""
    return 2.0 * torch.eye(K, dtype=torch.float64, device="cpu") - 1.0


def _in_range(labels: Tensor, K: int) -> Tensor:
    wrong = [v for v in labels.tolist() if not 0 <= v < K]
    if wrong:
        more = "; KernelLSSVM(num_classes=), OneVsRest and OneVsOne take more classes" if wrong[0] >= K == 2 else ""
        raise ValueError(f"labels must be in 0..{K - 1}, got {wrong[0]}{more}")
    return labels
