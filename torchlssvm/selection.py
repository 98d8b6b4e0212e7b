"""Choosing and trusting a model: helpers on scores, and k-fold cross-validation by replacing one fold at a time."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional.modes import exactly
from torchlssvm.functional.whitened import error_rate, margins
from torchlssvm.statistics.batch import fold_of

__all__ = ["cross_validate", "error_rate", "fold_of", "margins"]


@exactly
def cross_validate(machine: Any, x: Any, y: Any, folds: int = 5, ids: Any = None) -> Tensor:
    """Out-of-fold scores (n, K) from any machine with exact ``add`` and ``remove``: each sample by a model without its fold.

    The machine learns all folds but the first; then fold f - 1 goes in and fold f comes out, jointly where the machine has
    ``update`` (Lee et al., k-fold by incrementally replacing one fold). Two changes of n / folds samples stand for a training
    on all the others. A copy is used: the machine given must be empty, and stays so.

    Args:
        machine: an empty :class:`~torchlssvm.LSSVMHead`, kernel machine, or anything whose ``add(x, y)`` returns ids (or
            itself) and whose ``remove`` takes them (or the samples).
        x: (n, J). y: (n,) labels or (n, K) targets.
        folds: how many; the fold of a sample is a hash of its id, the same on every machine and after any removal.
        ids: of the samples; 0, 1, ... if not given.

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
    held = machine.ids if hasattr(machine, "ids") else machine.n
    if (len(held) if isinstance(held, Tensor) else held) != 0:
        raise ValueError("the machine holds samples: cross_validate starts from an empty one (it works on a copy)")
    where = torch.tensor(fold_of(names, folds), dtype=torch.int64)
    parts = [p for p in ((where == f).nonzero()[:, 0].to(x.device) for f in range(folds)) if len(p)]
    if len(parts) < 2:
        raise ValueError(f"all {len(x)} samples fall into one of the {folds} folds: there is nothing to learn from")
    runner = _Runner(copy.deepcopy(machine), x, y, names)
    runner.change([], parts[1:])
    out: Tensor | None = None
    for f, part in enumerate(parts):
        if f:
            runner.change([part], [parts[f - 1]])
        scores: Tensor = runner.machine(x[part])
        out = scores.new_zeros(len(x), *scores.shape[1:]) if out is None else out
        out[part] = scores
    assert out is not None
    return out


class _Runner:
    """A machine whose samples are named by their rows, whether it removes by samples or by ids."""

    def __init__(self, machine: Any, x: Tensor, y: Tensor, names: list[Any]):
        self.machine, self.x, self.y, self.names = machine, x, y, names
        self.by_ids = hasattr(machine, "ids")
        self.own: dict[int, int] = {}  # row -> the machine's id

    def _samples(self, rows: Tensor) -> tuple[Any, ...]:
        """(x, y), with ids where the machine keeps sums per fold."""
        stats = getattr(self.machine, "statistics", None)
        pair = (self.x[rows], self.y[rows])
        return (*pair, None, [self.names[i] for i in rows.tolist()]) if stats is not None and stats.folds else pair

    def change(self, remove: list[Tensor], add: list[Tensor]) -> None:
        """Take samples in and others out."""
        if self.by_ids:
            for rows in add:
                got = self.machine.add(self.x[rows], self.y[rows])
                self.own.update(zip(rows.tolist(), got.tolist(), strict=True))
            for rows in remove:
                gone = torch.tensor([self.own.pop(i) for i in rows.tolist()], dtype=torch.int64)
                self.machine.remove(gone.to(self.machine.ids.device))
            return
        pairs = {
            name: self._samples(torch.cat(rows)) for name, rows in (("add", add), ("remove", remove)) if rows
        }
        if callable(getattr(self.machine, "update", None)):
            self.machine.update(**pairs)
            return
        for name, samples in pairs.items():
            getattr(self.machine, name)(*samples)
