"""What changed since a mark: the state that several machines agreed on, and what each has changed since.

A mark costs nothing when it is made. After it the rows that change a class are kept while they are few, and a copy of its
sums when they are many (:mod:`torchlssvm.statistics.baseline_rows`); so pending changes take memory for the classes touched, at
most. What is pending and what was agreed on follow from either, exact in integers.

**What survives a save.** The difference of the agreed and the present sums is what changed, and after a removal it *is* the
sample removed. So where anything was removed since the mark, what was agreed on is not saved (nor pickled), only the present
sums: the statistics loaded are ``severed``. They hold the right samples, but what changed is no longer known; a new mark says
that the present state is the agreed one. Save after a sync, and nothing is lost. Copies within the process keep everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.functional.modes import exactly
from torchlssvm.statistics.baseline_rows import Before
from torchlssvm.statistics.batch import Choices
from torchlssvm.statistics.changing import Changing

if TYPE_CHECKING:
    from torchlssvm.statistics import Statistics


@dataclass
class Base:
    """The state at a mark: counts or moments, bounds, and groups that changed since, as they were before.

    ``shrunk``: whether anything was removed since, so that the sums may no longer be those of samples.
    """

    choices: Choices
    side: Tensor
    gross: float
    n: float
    sums: dict[int, Before]
    shrunk: bool = False


class Marking(Changing):
    """Marks of :class:`~torchlssvm.Statistics`."""

    _severed = False

    if TYPE_CHECKING:  # what Statistics adds

        def canonicalize(self) -> None: ...  # noqa: D102

        def zero(self) -> Statistics: ...  # noqa: D102

    @property
    def marked(self) -> bool:
        """Whether there is a mark."""
        return self._base is not None

    @property
    def severed(self) -> bool:
        """Whether these sums were saved with removals pending, so that what was agreed on is not known any more."""
        return self._severed

    @exactly
    def mark(self) -> None:
        """Everything up to now is agreed; what changes from here on is pending."""
        self.canonicalize()
        self.rebase(Base(self._choices, self._side, self._gross, self._n, {}))

    def rebase(self, base: Base) -> None:
        """Make a base, of this state or from :meth:`advanced`, the mark. Cannot fail."""
        self._base, self._severed = base, False
        if self._sums is not None:
            self._sums.keep(base.sums)

    @exactly
    def advanced(self, part: Statistics) -> Base:
        """The mark for which ``part`` of what is pending is agreed on, for :meth:`rebase`; changes nothing here."""
        self.canonicalize()
        agreed = self.agreed() + part
        agreed.canonicalize()
        here = {} if self._sums is None else self._sums.sums
        then = {} if agreed._sums is None else agreed._sums.sums
        before = {}
        for group in set(here) | set(then):
            if not _equal(here.get(group), then.get(group)):
                before[group] = Before(self.in_features)
                before[group].copied, before[group].copy = True, then.get(group)
        return Base(agreed._choices, agreed._side, agreed._gross, agreed._n, before, bool(before))

    def unmark(self) -> None:
        """Forget the mark: everything is pending."""
        self._base = None
        if self._sums is not None:
            self._sums.keep(None)

    @exactly
    def agreed(self) -> Statistics:
        """The state at the mark (empty without one). Shares memory with this one: for reading, until the next change."""
        out = self.zero()
        base = self._base
        if base is None or base.choices.kind is None:
            return out
        self.canonicalize()
        sums = out._decide(base.choices)
        here = {} if self._sums is None else self._sums.sums
        before = {g: b.value(here.get(g)) for g, b in base.sums.items()}
        both = {g: v for g, v in here.items() if g not in before} | before
        sums.sums = {g: v for g, v in both.items() if v is not None}
        sums.refresh_diagonals()
        out._side, out._gross, out._n = base.side, base.gross, base.n
        return out

    @exactly
    def pending(self) -> Statistics:
        """What changed since the mark, a signed delta (everything without a mark): only groups that were touched."""
        base = self._base
        out = self.zero()
        self.canonicalize()
        if base is None:
            out.merge(cast("Statistics", self))
            return out
        choices = base.choices if self._sums is None else self._choices
        if choices.kind is None:
            return out
        if base.choices.kind is not None and choices != base.choices:
            raise ValueError(f"what is held now is on {choices}, what was agreed on {base.choices}")
        sums = out._decide(choices)
        here = {} if self._sums is None else self._sums.sums
        for group, b in base.sums.items():
            now = here.get(group)
            if not b.copied:
                change = b.change()
            elif now is None:
                change = None if b.copy is None else -b.copy
            else:
                change = now.clone() if b.copy is None else now - b.copy
            if change is not None:
                sums.sums[group] = change
        sums.refresh_diagonals()
        side = torch.zeros_like(out._side)
        for part, sign in ((self._side, 1), (base.side, -1)):
            side = side + sign * part if part.ndim == side.ndim else side  # of another shape only while empty
        out._side, out._n = side, self._n - base.n
        out._gross = out._largest() if sums.sums else 0.0
        out.canonicalize()
        return out

    def _largest(self) -> float:
        """A bound on every sum, over all groups together, from the sums themselves."""
        assert self._sums is not None
        return _largest(list(self._sums.sums.values()), self._side)

    @exactly
    def adopt(self, agreed: Statistics) -> None:
        """Take over an agreed state (its tensors, not copies) and mark it; what was pending is part of it or dropped."""
        self._base, self._severed = None, False
        self._reset()
        if agreed._sums is not None:
            mine = self._decide(agreed._choices)
            mine.sums, mine.diag = agreed._sums.sums, agreed._sums.diag
            mine.touched.update(range(mine.groups))
            self._side, self._gross, self._n = agreed._side, agreed._gross, agreed._n
        self.mark()

    def _grow_base(self, K: int) -> None:
        """The same mark for K classes."""
        base = self._base
        if base is None:
            return
        old, k = self.num_classes, K - self.num_classes
        here = {} if self._sums is None else self._sums.sums
        if self.per_class:
            grown = {(g // old) * K + g % old: v for g, v in base.sums.items()}
        else:
            grown = {}
            for g, b in base.sums.items():
                b.make_copy(here.get(g))
                b.copy = None if b.copy is None else torch.nn.functional.pad(b.copy, (0, k * self.in_features))
                grown[g] = b
        side = torch.nn.functional.pad(base.side, (0, k) if base.side.ndim == 2 else (0, k, 0, k))
        self._base = Base(base.choices, side, base.gross, base.n, grown, base.shrunk)

    # -- saving --------------------------------------------------------------------------------------------------------

    def base_state(self, whole: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The mark as flat tensors and JSON; after removals only with ``whole``, for copies that stay in the process."""
        base = self._base
        if base is None:
            return {}, {"base": {"severed": True}} if self._severed else {}
        here = {} if self._sums is None else self._sums.sums
        before = {g: b.value(here.get(g)) for g, b in base.sums.items()}  # sums only: rows are never written out
        before = {g: v for g, v in before.items() if not _equal(v, here.get(g))}
        same = not before and _equal(base.side, self._side)
        if base.shrunk and not same and not whole:
            return {}, {"base": {"severed": True}}
        groups = sorted(g for g, v in before.items() if v is not None)
        out = {"base_counts": base.side.clone()}
        if groups:
            out["base_sums"] = torch.stack([cast(Tensor, before[g]) for g in groups])
        grids = [base.choices.grid, base.choices.target_grid]
        numbers = [None if g is None else [g.limit.hex(), g.bits, g.headroom] for g in grids]
        agreed = [v for g, v in here.items() if g not in before] + [v for v in before.values() if v is not None]
        gross = _largest(agreed, base.side)  # of the sums, not of what went through them
        meta = {"kind": base.choices.kind, "grids": numbers, "gross": gross, "n": base.n}
        absent = sorted(set(before) - set(groups))
        return out, {"base": meta | {"shrunk": base.shrunk and not same, "groups": groups, "absent": absent}}

    def load_base(self, state: dict[str, Tensor], meta: dict[str, Any] | None) -> None:
        """Put a saved mark beside sums just loaded. ValueError, KeyError or TypeError when it does not fit."""
        if meta is None:
            return
        if meta.get("severed"):
            self._severed = True
            return
        grids = [None if g is None else FixedPoint(float.fromhex(g[0]), g[1], g[2]) for g in meta["grids"]]
        base = Base(
            Choices(meta["kind"], *grids), state["base_counts"].to(self.device, copy=True), float(meta["gross"]),
            float(meta["n"]), {}, bool(meta["shrunk"]),
        )  # fmt: skip
        before: dict[int, Tensor | None] = dict.fromkeys(map(int, meta["absent"]))
        if meta["groups"]:
            saved = zip(meta["groups"], state["base_sums"], strict=True)
            before |= {int(g): v.to(self.device, copy=True) for g, v in saved}
        for group, value in before.items():
            base.sums[group] = Before(self.in_features)
            base.sums[group].copied, base.sums[group].copy = True, value
        mine = {v.shape for v in (self._sums.sums.values() if self._sums is not None else ())}
        if len(mine | {v.shape for v in before.values() if v is not None}) > 1:
            raise ValueError("the saved base does not have the shape of the saved sums")
        self._base = base
        if self._sums is not None:
            self._sums.keep(base.sums)


def _largest(sums: list[Tensor], side: Tensor) -> float:
    """A bound on every sum, over all groups together, from the sums themselves."""
    tops = [torch.maximum(v.amax(), -v.amin()) for v in sums]
    host = checks.to_host(*tops, side.abs().amax())
    if host is None:
        return float("inf")
    return float(max(h[0] for h in host)) * max(1, sum(h[0] > 0 for h in host[:-1]))


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether sums are the same; None is zero."""
    if checks.is_fake(a, b):
        return False
    if a is None or b is None:
        some = b if a is None else a
        return some is None or not bool(some.any())
    return a.shape == b.shape and torch.equal(a, b)
