"""The state that several machines agreed on, kept beside statistics that have changed since.

A mark costs nothing when it is made. After it the rows that change a class are kept while they are few, and a copy of its
sums when they are many (:mod:`torchlssvm.statistics.undo_log`); so pending changes take memory for the classes touched, at
most. What is pending and what was agreed on follow from either, exact in integers.

**What survives a save.** The difference of the agreed and the present sums is what changed, and after a removal it *is* the
sample removed. So where anything was removed since the mark, what was agreed on is not saved (nor pickled), only the present
sums: the statistics loaded are ``severed``. They hold the right samples, but what changed is no longer known; a new mark says
that the present state is the agreed one. Save after a sync, and nothing is lost. Copies within the process keep everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.grid import grid_from_json, grid_to_json
from torchlssvm.statistics.accumulator import bound_sums
from torchlssvm.statistics.batch import GridChoices
from torchlssvm.statistics.undo_log import UndoLog

PackedSums = dict[int, Tensor]
"""The packed sums of each group that has any."""

OMITTED_BASELINE: dict[str, Any] = {"base": {"severed": True}}
"""The saved form of a baseline that is left out, since removals are pending."""


@dataclass
class Baseline:
    """The state at a mark.

    ``moments``, ``bound`` and ``weight`` as in :class:`~torchlssvm.Statistics`; ``undo``: groups that changed since, as they
    were before. ``shrunk``: something was removed since, so that the sums may no longer be those of samples.
    """

    choices: GridChoices
    moments: Tensor
    bound: float
    weight: float
    undo: dict[int, UndoLog] = field(default_factory=dict)
    shrunk: bool = False

    def beside(self, agreed: PackedSums, present: PackedSums, J: int) -> Baseline:
        """Return this baseline with the groups in which agreed and present sums differ."""
        undo = {
            group: UndoLog.of_copy(J, agreed.get(group))
            for group in set(present) | set(agreed)
            if not _equal(present.get(group), agreed.get(group))
        }
        return replace(self, undo=undo, shrunk=bool(undo))

    def agreed_sums(self, present: PackedSums) -> PackedSums:
        """Return the packed sums at the mark, given those of now; groups that did not change share their memory."""
        before = {g: log.value(present.get(g)) for g, log in self.undo.items()}
        both = {g: v for g, v in present.items() if g not in before} | before
        return {g: v for g, v in both.items() if v is not None}

    def pending_sums(self, present: PackedSums) -> PackedSums:
        """Return the packed sums of what changed since the mark, for the groups that were touched."""
        changes = {g: log.change(present.get(g)) for g, log in self.undo.items()}
        return {g: v for g, v in changes.items() if v is not None}

    def same_moments(self, moments: Tensor) -> bool:
        """Tell if counts or moments are those at the mark."""
        return self.moments.shape == moments.shape and torch.equal(self.moments, moments)

    def grow(self, old: int, k: int, J: int, per_class: bool, present: PackedSums) -> Baseline:
        """Return the same baseline for ``old`` + k classes of J features."""
        if per_class:
            grown = {(g // old) * (old + k) + g % old: log for g, log in self.undo.items()}
        else:
            grown = {}
            for g, log in self.undo.items():
                log.make_copy(present.get(g))
                copy = None if log.copy is None else torch.nn.functional.pad(log.copy, (0, k * J))
                grown[g] = UndoLog.of_copy(J, copy)
        moments = torch.nn.functional.pad(self.moments, (0, k) if self.moments.ndim == 2 else (0, k, 0, k))
        return replace(self, moments=moments, undo=grown)

    # -- saving --------------------------------------------------------------------------------------------------------

    def state(self, present: PackedSums, moments: Tensor, whole: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Write the baseline as flat tensors and JSON, given the present sums and moments.

        After removals it is left out but with ``whole``, for copies that stay in the process.
        """
        before = {g: log.value(present.get(g)) for g, log in self.undo.items()}  # sums only: rows are never written out
        before = {g: v for g, v in before.items() if not _equal(v, present.get(g))}
        same = not before and _equal(self.moments, moments)
        if self.shrunk and not same and not whole:
            return {}, OMITTED_BASELINE
        groups = sorted(g for g, v in before.items() if v is not None)
        out = {"base_counts": self.moments.clone()}
        if groups:
            out["base_sums"] = torch.stack([cast(Tensor, before[g]) for g in groups])
        agreed = [v for g, v in present.items() if g not in before] + [v for v in before.values() if v is not None]
        return out, {
            "base": {
                "kind": self.choices.kind,
                "grids": [grid_to_json(self.choices.grid), grid_to_json(self.choices.target_grid)],
                "gross": bound_sums(agreed, self.moments),  # of the sums, not of what went through them
                "n": self.weight,
                "shrunk": self.shrunk and not same,
                "groups": groups,
                "absent": sorted(set(before) - set(groups)),
            }
        }

    @classmethod
    def from_state(
        cls, state: dict[str, Tensor], meta: dict[str, Any], present: PackedSums, J: int, device: torch.device
    ) -> Baseline:
        """Undo :meth:`state`, beside sums just loaded. ValueError, KeyError or TypeError when it does not fit."""
        before: dict[int, Tensor | None] = dict.fromkeys(map(int, meta["absent"]))
        if meta["groups"]:
            saved = zip(meta["groups"], state["base_sums"], strict=True)
            before |= {int(g): v.to(device, copy=True) for g, v in saved}
        shapes = {v.shape for v in (*present.values(), *before.values()) if v is not None}
        if len(shapes) > 1:
            raise ValueError("the saved base does not have the shape of the saved sums")
        return cls(
            GridChoices(meta["kind"], *map(grid_from_json, meta["grids"])),
            state["base_counts"].to(device, copy=True),
            float(meta["gross"]),
            float(meta["n"]),
            {group: UndoLog.of_copy(J, value) for group, value in before.items()},
            bool(meta["shrunk"]),
        )


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Compare sums; None is zero."""
    if checks.is_fake(a, b):
        return False
    if a is None or b is None:
        some = b if a is None else a
        return some is None or not bool(some.any())
    return a.shape == b.shape and torch.equal(a, b)
