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
        x: (n, J).
        y: (n,) labels or (n, K) targets.
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
    if _held(machine):
        raise ValueError("the machine holds samples: cross_validate starts from an empty one (it works on a copy)")
    where = torch.tensor(fold_of(names, folds), dtype=torch.int64)
    parts = [p for p in ((where == f).nonzero()[:, 0].to(x.device) for f in range(folds)) if len(p)]
    if len(parts) < 2:
        raise ValueError(f"all {len(x)} samples fall into one of the {folds} folds: there is nothing to learn from")
    runner = _Runner(copy.deepcopy(machine), x, y, names)
    runner.start(torch.cat(parts[1:]))
    out: Tensor | None = None
    for f, part in enumerate(parts):
        if f:
            runner.change(part, parts[f - 1])
        scores: Tensor = runner.machine(x[part])
        out = scores.new_zeros(len(x), *scores.shape[1:]) if out is None else out
        out[part] = scores
    assert out is not None
    return out


def _held(machine: Any) -> int:
    """How many samples a machine holds, as far as it says."""
    for name in ("ids", "n"):
        value = getattr(machine, name, None)
        if value is not None:
            return int(value) if isinstance(value, int | float) else len(value)
    return len(machine) if hasattr(machine, "__len__") else 0


class _Runner:
    """A machine whose samples are named by their rows, whether it removes by samples or by the ids that it gave."""

    def __init__(self, machine: Any, x: Tensor, y: Tensor, names: list[Any]):
        self.machine, self.x, self.y, self.names = machine, x, y, names
        self.own: dict[int, Any] = {}  # row -> the machine's id
        self.joint = callable(getattr(machine, "update", None))

    def _samples(self, rows: Tensor) -> tuple[Any, ...]:
        """(x, y), with ids where the machine keeps sums per fold."""
        stats = getattr(self.machine, "statistics", None)
        pair = (self.x[rows], self.y[rows])
        return (*pair, None, [self.names[i] for i in rows.tolist()]) if getattr(stats, "folds", 0) else pair

    def _gone(self, rows: Tensor) -> Any:
        """What ``remove`` takes: ids as a tensor, or, where they are no numbers, as a list."""
        ids = [self.own.pop(i) for i in rows.tolist()]
        if not all(isinstance(i, int) for i in ids):
            return ids
        return torch.tensor(ids, dtype=torch.int64, device=getattr(self.machine, "device", None))

    def _name(self, rows: Tensor, got: Any) -> None:
        """Remember the ids of rows, if the machine gave any."""
        if got is not None and got is not self.machine:
            self.own.update(zip(rows.tolist(), got.tolist() if hasattr(got, "tolist") else got, strict=True))

    def start(self, rows: Tensor) -> None:
        """Take samples in."""
        self._name(rows, self.machine.add(*self._samples(rows)))

    def change(self, remove: Tensor, add: Tensor) -> None:
        """Take samples in and others out, at once if the machine can."""
        by_ids = bool(self.own)
        if self.joint:
            gone = self._gone(remove) if by_ids else self._samples(remove)
            self._name(add, self.machine.update(add=self._samples(add), remove=gone))
            return
        self.start(add)
        if by_ids:
            self.machine.remove(self._gone(remove))
        else:
            self.machine.remove(*self._samples(remove))
