"""k-fold cross-validation by replacing one fold at a time."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional.modes import exactly
from torchlssvm.functional.sample_identity import fold_of
from torchlssvm.functional.whitened import error_rate, margins
from torchlssvm.sample_adapter import SampleAdapter

__all__ = ["cross_validate", "error_rate", "fold_of", "margins"]


@exactly
def cross_validate(machine: Any, x: Any, y: Any, folds: int = 5, ids: Any = None) -> Tensor:
    """Compute out-of-fold scores (n, K) with any machine that has exact ``add`` and ``remove``.

    Each sample is scored by a model that was trained without its fold. This does not require a training per fold: a copy of
    the machine first learns all folds except the first one, and then moves from fold to fold. For fold f, it adds fold f - 1
    and removes fold f, in a single step if the machine has ``update`` (Lee et al., k-fold by incrementally replacing one
    fold).

    Args:
        machine: an empty :class:`~torchlssvm.LSSVMHead` or kernel machine, or any object whose ``add(x, y)`` returns ids (or
            the object) and whose ``remove`` accepts these ids (or the samples). It stays empty.
        x: (n, J) features.
        y: (n,) labels or (n, K) targets.
        folds: the number of folds. A hash of the id assigns each sample to a fold, on every machine and after any removal.
        ids: (n,) ids of the samples. Default: 0, 1, ...

    >>> import torch
    >>> from torchlssvm import LSSVMHead
    >>> x, y = torch.randn(60, 4), torch.arange(60) % 3
    >>> cross_validate(LSSVMHead(4, 3), x, y, folds=4).shape
    torch.Size([60, 3])
    """
    if isinstance(folds, bool) or not isinstance(folds, int) or folds < 2:
        raise ValueError(f"folds must be an int >= 2, got {folds!r}")
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    names = list(range(len(x))) if ids is None else ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if not len(x) == len(y) == len(names):
        raise ValueError(f"x, y and ids differ in length: {len(x)}, {len(y)}, {len(names)}")
    if SampleAdapter(machine).count:
        raise ValueError("the machine holds samples: cross_validate starts from an empty one (it works on a copy)")
    where = torch.tensor(fold_of(names, folds), dtype=torch.int64)
    parts = [p for p in ((where == f).nonzero()[:, 0].to(x.device) for f in range(folds)) if len(p)]
    if len(parts) < 2:
        raise ValueError(f"all {len(x)} samples fall into one of the {folds} folds: there is nothing to learn from")
    samples = SampleAdapter(copy.deepcopy(machine))

    def named(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rows, x[rows], y[rows]  # by their rows: ids may repeat

    samples.add(*named(torch.cat(parts[1:])))
    out: Tensor | None = None
    for f, part in enumerate(parts):
        if f:
            samples.exchange(named(parts[f - 1]), named(part))
        scores: Tensor = samples.machine(x[part])
        out = scores.new_zeros(len(x), *scores.shape[1:]) if out is None else out
        out[part] = scores
    assert out is not None
    return out
