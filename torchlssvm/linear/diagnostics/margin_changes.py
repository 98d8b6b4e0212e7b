"""Leave-one-out and influence of a :class:`~torchlssvm.MarginHead`: exact, with active sets that move, and without refitting.

Each class has one inverse, and a change of samples is a small system on products with it (see
:mod:`torchlssvm.functional.moving_active_set`). Changes that cannot be decided that way (too far-reaching, or too
ill-conditioned) are made on a copy of the head, then undone. Class weights that follow the counts are derived again without the
sample; standardised features keep the scale of all samples held.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchlssvm.errors import RemovalError
from torchlssvm.functional import checks
from torchlssvm.functional.moving_active_set import (
    LEAST_FREE_SHARE,
    ActiveSetChange,
    ActiveSetStep,
    NearSamples,
    solve_change,
    solve_removals,
)
from torchlssvm.functional.squared_hinge import scores
from torchlssvm.functional.whitened import WHITENED_ROWS
from torchlssvm.linear.active_sets import ActiveSetSolver
from torchlssvm.linear.diagnostics.influence import Measure, check_question, measure_of
from torchlssvm.linear.diagnostics.whitened_problems import SampleChange, check_groups, check_labels, counts_after
from torchlssvm.linear.normal_equations import class_weights
from torchlssvm.linear.solvers import code_labels

if TYPE_CHECKING:
    from torchlssvm.linear.margin_head import MarginHead

NEAR_SAMPLES = 2048
"""Number of samples of a class that are checked first, those of the least reach. Their products take 34 MB."""


class ClassSystem:
    """The solution of one class, whitened, and the samples that may change sides."""

    def __init__(self, solver: ActiveSetSolver, k: int):
        rows, self.scale = solver.rows, solver.scale
        self.q = rows.q
        self.white = solver.whitened(k)
        margins, self.active = solver.margins(k), solver.active(k)
        g = torch.cat(
            [
                self.white.leverages(self.white.centred(self.scale.rows(rows.q[a : a + WHITENED_ROWS])))
                for a in range(0, rows.n, WHITENED_ROWS)
            ]
        )
        reach = (1.0 - margins).abs() / g.sqrt().clamp(min=torch.finfo(g.dtype).tiny)
        order = reach.argsort()
        slots = order[:NEAR_SAMPLES]
        least = float(reach[order[NEAR_SAMPLES]]) if len(order) > NEAR_SAMPLES else float("inf")
        y = solver.signs(k)
        U, weight, active = self.whitened(rows.q[slots]), solver.row_weights()[slots], self.active[slots]
        self.f, self.y = margins * y, y
        self.near = NearSamples(U, U @ U.mT, self.f[slots], y[slots], weight, active, least)
        self.place = torch.full((rows.n,), -1, dtype=torch.int64, device=rows.device)
        self.place[slots] = torch.arange(len(slots), device=rows.device)

    @property
    def trusted(self) -> bool:
        """True if float64 has digits left for products with the inverse, and for the sides of active samples."""
        pivots, near = self.white.F.diagonal(), self.near
        shares = 1.0 - near.weight * near.G.diagonal()
        pinned = bool((near.active & (shares < LEAST_FREE_SHARE)).any())
        # 1e8: largest ratio of pivots, the root of the condition, up to which products with an inverse have eight digits
        return not pinned and float(pivots.amax()) < 1e8 * float(pivots.amin())

    def holds(self, steps: Tensor) -> Tensor:
        """True for steps (b, D) after which all samples that are not near keep their sides."""
        white, scale = self.white, self.scale
        D, J = white.F.shape[0], self.q.shape[1]
        a = white.F.mT @ steps[:, :D].mT  # (D, b), the change of w'
        shift = -(white.mu @ a) if white.n else torch.zeros_like(a[0])
        if scale.offset is not None:
            shift = shift - scale.offset @ a[:J]
        if scale.intercept == "penalized":
            shift = shift + a[J] / scale.root
        if white.n:
            shift = shift + steps[:, D] * white.extra**0.5
        w = a[:J] * (scale.factor[:, None] if isinstance(scale.factor, Tensor) else scale.factor)
        margins = (scores(self.q, w, shift) + self.f[:, None]) * self.y[:, None]
        away = (margins < 1.0) != self.active[:, None]
        return ~(away & (self.place < 0)[:, None]).any(0)

    def whitened(self, q: Tensor) -> Tensor:
        """Whitened rows (B, D). q: (B, J), in steps."""
        parts = [self.white.rows(self.white.centred(self.scale.rows(part))) for part in q.split(WHITENED_ROWS)]
        return torch.cat(parts)


def check_changes(
    head: MarginHead, x: Any, y: Any, what: str, y_new: Any, weight: Any, groups: Any, gridded: bool = False
) -> SampleChange:
    """Changes of samples; RemovalError, naming the first, if a sample to be removed or relabelled is not held."""
    head._fitted_weights()  # NotFittedError without samples
    batch = head._check(x, y, weight, gridded=gridded)
    if len(batch) and batch.mult is not None and len(batch) != len(checks.as_tensor(x, "x", head.device)):
        raise ValueError("weight must be at least 1 for each sample")
    grid = batch.choices.grid
    assert batch.labels is not None
    q = batch.x.to(torch.float64) if grid is None else grid.quantize(batch.x)
    times = torch.ones(len(batch), dtype=torch.float64, device=head.device) if batch.mult is None else batch.mult
    times = times.to(torch.float64)
    if (what == "relabel") != (y_new is not None):
        raise ValueError(f'what="relabel" goes with y_new, the labels to be; got what={what!r} and y_new={y_new!r}')
    new = head._check(x, y_new).labels if y_new is not None else batch.labels if what == "add" else None
    slots = None if what == "add" else head.samples.find(batch)
    members = check_groups(groups, len(batch), head.device)
    if slots is not None:
        for rows in [torch.arange(len(batch), device=head.device)] if members is None else members:
            wanted = times[rows] if members is None else torch.zeros_like(head.samples.copies)
            if members is not None:
                wanted = wanted.index_add_(0, slots[rows], times[rows])[slots[rows]]
            short = torch.nonzero(wanted > head.samples.copies[slots[rows]])[:, 0]
            if len(short):
                first = int(short[0])
                held = int(head.samples.copies[slots[rows[first]]])
                raise RemovalError(
                    f"row {int(rows[first])} is held {held} time(s), and was to be left out {int(wanted[first])} time(s)"
                )
    return SampleChange(q, None if what == "add" else batch.labels, new, times, members=members, slots=slots)


class ChangedScores:
    """Scores of points after changes of samples, one class after the other."""

    def __init__(self, head: MarginHead, changes: SampleChange):
        self.head, self.changes = head, changes
        head._solve()
        self.after = counts_after(changes, head.counts, changes.old, changes.new)
        self.total = self.after.sum(1)
        if len(self.total) and float(self.total.min()) <= 0:
            raise ValueError(f"the head holds {head.n} samples: without the samples left out nothing is left")
        self._twin: MarginHead | None = None
        self._twin_at: int | None = None

    def cases(self) -> Iterator[tuple[ActiveSetSolver, list[int]]]:
        """Solvers with the class weights after each change, and the changes they belong to."""
        option = self.head.class_weight
        if not isinstance(option, str):
            yield self.head._solver, list(range(self.changes.count))
            return
        kinds: dict[tuple[float, ...], list[int]] = {}
        for i, counts in enumerate(self.after.tolist()):
            kinds.setdefault(tuple(counts), []).append(i)
        for counts, some in kinds.items():
            weights = class_weights(option, torch.tensor(counts, dtype=torch.float64, device=self.head.device))
            assert weights is not None
            yield self.head._solver.with_class_weights(weights), some

    def steps(
        self, solver: ActiveSetSolver, k: int, some: list[int]
    ) -> Iterator[tuple[list[int], ClassSystem, Tensor]]:
        """Steps p (b, D) of changes in a class; a change that leaves the class alone is in none of them."""
        one_sign = ((self.after[:, k] == 0) | (self.after[:, k] == self.total)).tolist()
        pending = [i for i in some if not one_sign[i]]
        if not pending or not solver.fitted(k):
            self.missing = pending
            return
        system, c, self.missing = ClassSystem(solver, k), self.changes, []
        if not system.trusted:
            unused = c.members is None and c.new is None and c.slots is not None
            self.missing = [i for i in pending if not unused or bool(system.active[c.slots[i]])]  # type: ignore[index]
            return
        groups = solver.groups
        weight = torch.tensor([groups.values[g] for g in groups.of_class], dtype=torch.float64, device=c.x.device)
        if c.members is None and c.new is None:
            assert c.slots is not None
            assert c.old is not None
            rows = torch.tensor(pending, device=c.x.device)
            rows = rows[system.active[c.slots[rows]]]
            for part in rows.split(WHITENED_ROWS // 2):
                slots, d = c.slots[part], weight[c.old[part]] * c.weight[part]
                change = ActiveSetChange(system.whitened(c.x[part]), system.f[slots], system.y[slots], -d)
                place = system.place[slots]
                left = torch.where(place >= 0, system.near.weight[place.clamp(min=0)], torch.inf) - d
                left = torch.where(c.weight[part] >= self.head.samples.copies[slots], 0.0, left)
                yield from self._decided(system, part.tolist(), solve_removals(system.near, change, place, left))
            return
        for i in pending:
            change_, left = self._joint(system, k, c.rows(i), weight)
            if not len(change_.f):
                continue
            yield from self._decided(system, [i], [solve_change(system.near, change_, left)])

    def _decided(
        self, system: ClassSystem, numbers: list[int], steps: list[ActiveSetStep | None]
    ) -> Iterator[tuple[list[int], ClassSystem, Tensor]]:
        """Steps that leave all samples on their sides, one at least; the others are noted as missing."""
        found = [(i, step) for i, step in zip(numbers, steps, strict=True) if step is not None]
        far = [j for j, (_, step) in enumerate(found) if step.size >= system.near.reach]
        wrong = set()
        if far:
            right = system.holds(torch.stack([found[j][1].p for j in far])).tolist()
            wrong = {j for j, ok in zip(far, right, strict=True) if not ok}
        done = [(i, step.p) for j, (i, step) in enumerate(found) if j not in wrong]
        self.missing += sorted(set(numbers) - {i for i, _ in done})
        if done:
            yield [i for i, _ in done], system, torch.stack([p for _, p in done])

    def _joint(self, system: ClassSystem, k: int, rows: Tensor, weight: Tensor) -> tuple[ActiveSetChange, Tensor]:
        """A change of several samples in a class, and the weights of the near samples that stay."""
        c, left = self.changes, system.near.weight.clone()
        U = system.whitened(c.x[rows])
        f = self._scores(system, rows)
        picks, signs, deltas = [], [], []
        old_d = None if c.old is None else weight[c.old[rows]] * c.weight[rows]
        new_d = None if c.new is None else weight[c.new[rows]] * c.weight[rows]
        same = torch.zeros(len(rows), dtype=torch.bool, device=U.device)
        if c.old is not None and c.new is not None:
            same = ((c.old[rows] == k) == (c.new[rows] == k)) & (old_d == new_d)
        if c.old is not None and c.slots is not None and old_d is not None:
            slots, place = c.slots[rows], system.place[c.slots[rows]]
            known = (place >= 0) & ~same
            left.index_add_(0, place[known], -old_d[known])
            whole = torch.zeros_like(self.head.samples.copies).index_add_(0, slots, c.weight[rows])
            gone = (whole[slots] >= self.head.samples.copies[slots]) & known
            left[place[gone]] = 0.0
            pick = torch.nonzero(system.active[slots] & ~same)[:, 0]
            picks.append(pick)
            signs.append(system.y[slots[pick]])
            deltas.append(-old_d[pick])
        if c.new is not None and new_d is not None:
            pick = torch.nonzero(~same)[:, 0]
            picks.append(pick)
            signs.append(torch.where(c.new[rows[pick]] == k, 1.0, -1.0).to(torch.float64))
            deltas.append(new_d[pick])
        at = torch.cat(picks)
        change = ActiveSetChange(U[at], f[at], torch.cat(signs), torch.cat(deltas))
        if c.old is None and not bool((change.y * change.f < 1.0).any()):
            at = at[:0]  # all that come are beyond their margins: the class is left alone
            change = ActiveSetChange(*(part[at] for part in change))
        return change, left

    def _scores(self, system: ClassSystem, rows: Tensor) -> Tensor:
        """Scores (b,) of rows before the change."""
        if self.changes.slots is not None:
            return system.f[self.changes.slots[rows]]
        white = system.white
        v = white.centred(system.scale.rows(self.changes.x[rows]))
        return white.scores(v)[:, 0]

    def others(self, k: int, some: list[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """w (J,) and b () of a class after the changes that :meth:`steps` left out: one sign only, or not decided there."""
        after, zeros = (
            self.after[some, k],
            torch.zeros(self.changes.x.shape[1], dtype=torch.float64, device=self.after.device),
        )
        for sign, mask in ((-1.0, after == 0), (1.0, after == self.total[some])):
            for j in torch.nonzero(mask)[:, 0].tolist():
                yield some[j], zeros, zeros.new_tensor(sign)
        for i in self.missing:
            yield i, *self.refitted(k, i)

    def refitted(self, k: int, i: int) -> tuple[Tensor, Tensor]:
        """w (J,) and b () of a class after a change, by a copy of the head in which it is made."""
        if self._twin is None:
            self._twin = copy.deepcopy(self.head)
            self._twin._solver.freeze_scale()
        if self._twin_at != i:
            if self._twin_at is not None:
                self._make(self._twin_at, -1)
            self._make(i, 1)
            self._twin_at = i
        w, b = self._twin._solve()
        return w[:, k], b[k]

    def _make(self, i: int, sign: int) -> None:
        c, twin = self.changes, self._twin
        assert twin is not None
        assert twin.grid is not None
        rows = c.rows(i)
        x, out = twin.grid.dequantize(c.x[rows]), []
        for y, direction in ((c.old, -1), (c.new, 1)):
            if y is not None:
                out.append((twin.statistics.check(x, y[rows], c.weight[rows], gridded=True), sign * direction))
        twin._apply_changes(out)


def leave_one_out(head: MarginHead, x: Any, y: Any, weight: Any, groups: Any, gridded: bool = False) -> Tensor:
    """Scores (B, K) of samples held without them; see :meth:`torchlssvm.MarginHead.leave_one_out`.

    ``gridded``: the rows are normalized and on the grid already.
    """
    changes = check_changes(head, x, y, "remove", None, weight, groups, gridded)
    w, b = head._solve()
    step = head._solver.scale.step
    out = changes.x @ (w * step) + b
    changed = ChangedScores(head, changes)
    for solver, some in changed.cases():
        for k in range(head.num_classes):
            if isinstance(head.class_weight, str):
                rows = torch.cat([changes.rows(i) for i in some])
                w, b = solver.weights()
                out[rows, k] = changes.x[rows] @ (w[:, k] * step) + b[k]
            for done, system, steps in changed.steps(solver, k, some):
                if changes.members is None:
                    rows = torch.tensor(done, device=out.device)
                    out[rows, k] += (system.whitened(changes.x[rows]) * steps).sum(1)
                else:
                    rows = changes.rows(done[0])
                    out[rows, k] += system.whitened(changes.x[rows]) @ steps[0]
            for i, w_k, b_k in changed.others(k, some):
                rows = changes.rows(i)
                out[rows, k] = changes.x[rows] @ (w_k * step) + b_k
    return out


def influence(
    head: MarginHead, x: Any, y: Any, x_val: Any, y_val: Any, what: str, on: str | Measure, y_new: Any, weight: Any, groups: Any
) -> Tensor:  # fmt: skip
    """Exact changes at x_val; see :meth:`torchlssvm.MarginHead.influence`."""
    check_question(what, on, y_val)
    changes = check_changes(head, x, y, what, y_new, weight, groups)
    before = head(x_val)  # (V, K)
    signs = before
    if on == "loss" and len(before):
        signs = code_labels(check_labels(head, y_val, len(before), "y_val"), head.num_classes)
    measure = measure_of(head, on, y_val, before, lambda scores: (1.0 - signs * scores).clamp(min=0.0).square())
    start = measure(before[None])[0]
    # 2**25: changed scores that are held at a time: 256 MB
    count, size = changes.count, max(1, 2**25 // max(1, before.numel()))
    if not count:
        return torch.zeros(count, *start.shape, dtype=torch.float64, device=head.device)
    points = head.points(x_val)  # (V, J), in steps
    changed, out = ChangedScores(head, changes), []
    for a in range(0, count, size):
        wanted = set(range(a, min(a + size, count)))
        after = before.repeat(len(wanted), 1, 1)
        for solver, some in changed.cases():
            mine = [i for i in some if i in wanted]
            if mine:
                _write(changed, solver, mine, points, after, a)
        out.append(measure(after))
    return torch.cat(out) - start


def _write(
    changed: ChangedScores, solver: ActiveSetSolver, some: list[int], points: Tensor, after: Tensor, first: int
) -> None:
    """Write scores (b, V, K) after some changes, the first of which is number ``first``. points: (V, J), in steps."""
    step = solver.scale.step
    w, b = solver.weights()
    at = torch.tensor(some, device=after.device) - first
    after[at] = points @ (w * step) + b
    for k in range(after.shape[2]):
        for done, system, steps in changed.steps(solver, k, some):
            where = torch.tensor(done, device=after.device) - first
            after[where, :, k] += steps @ system.whitened(points).mT
        for i, w_k, b_k in changed.others(k, some):
            after[i - first, :, k] = points @ (w_k * step) + b_k
