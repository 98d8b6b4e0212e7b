"""Exact leave-one-out and influence of a :class:`~torchlssvm.MarginHead`, whose active sets change with the samples.

Removals of single samples are fast, because all of them use the same inverse for each class, and each only solves a small
system made of products with this inverse (see :mod:`torchlssvm.functional.moving_active_set`). All other changes, and removals
that cannot be decided that way, are made on a copy of the head, one after the other. Standardised features keep the scale of
all samples of the head.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchlssvm.errors import RemovalError
from torchlssvm.functional import checks
from torchlssvm.functional.moving_active_set import LEAST_FREE_SHARE, NearSamples, Removals, removal_steps
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.functional.squared_hinge import scores
from torchlssvm.functional.whitened import WHITENED_ROWS
from torchlssvm.linear.active_sets import ActiveSetSolver
from torchlssvm.linear.diagnostics.influence import Measure, check_question, measure_of
from torchlssvm.linear.diagnostics.whitened_problems import SampleChange, check_changes, check_labels, counts_after
from torchlssvm.linear.normal_equations import class_weights
from torchlssvm.linear.solvers import code_labels
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.linear.margin_head import MarginHead

NEAR_SAMPLES = 2048
"""Number of samples of a class that are checked first: those with the least reach. Their products need 34 MB."""


class ClassSystem:
    """The solution of one class, whitened, and the samples that may change sides."""

    def __init__(self, solver: ActiveSetSolver, k: int):
        rows, self.scale = solver.rows, solver.scale
        self.q, self.white, self.y = rows.q, solver.whitened(k), solver.signs(k)
        margins, self.active = solver.margins(k), solver.active(k)
        self.f, self.weight = margins * self.y, solver.row_weights()
        blocks = self.q.split(WHITENED_ROWS)
        g = torch.cat([self.white.leverages(self.white.centred(self.scale.rows(block))) for block in blocks])
        reach = (1.0 - margins).abs() / g.sqrt().clamp(min=torch.finfo(g.dtype).tiny)
        order = reach.argsort()
        slots = order[:NEAR_SAMPLES]
        least = float(reach[order[NEAR_SAMPLES]]) if len(order) > NEAR_SAMPLES else float("inf")
        U = torch.cat([self.whitened(block) for block in self.q[slots].split(WHITENED_ROWS)])
        self.near = NearSamples(
            U, U @ U.mT, self.f[slots], self.y[slots], self.weight[slots], self.active[slots], least
        )
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

    def whitened(self, q: Tensor) -> Tensor:
        """Whitened rows (B, D). q: (B, J), in steps."""
        return self.white.rows(self.white.centred(self.scale.rows(q)))

    def removed(self, slots: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Changes of the weights (J, b), in grid units, and of the intercept (b,), and whether each is proven (b,).

        slots: (b,) places of active samples, each of which is removed alone; share: (b,) the removed share of its copies.
        """
        weight = self.weight[slots]
        gone = Removals(
            self.whitened(self.q[slots]), self.f[slots], self.y[slots], weight * share, self.place[slots],
            torch.where(share < 1.0, weight * (1.0 - share), 0.0),
        )  # fmt: skip
        steps = removal_steps(self.near, gone)
        w, b = self._weights(steps.p)
        right = steps.found & (steps.size < self.near.reach)
        far = torch.nonzero(steps.found & ~right)[:, 0]
        if len(far):  # all samples have to be checked
            margins = (scores(self.q, w[:, far].contiguous(), b[far]) + self.f[:, None]) * self.y[:, None]
            away = (margins < 1.0) != self.active[:, None]
            right[far] = ~(away & (self.place < 0)[:, None]).any(0)
        return w, b, right

    def _weights(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (J, b), in grid units, and intercepts (b,) of steps (b, D)."""
        white, scale, J = self.white, self.scale, self.q.shape[1]
        a = white.F.mT @ steps[:, : len(white.F)].mT  # (D, b), the change of w'
        b = torch.zeros_like(a[0])
        if white.n:
            b = steps[:, -1] * white.extra**0.5 - white.mu @ a
        if scale.intercept == "penalized":
            b = a[J] / scale.root
        if scale.offset is not None:
            b = b - scale.offset @ a[:J]
        return a[:J] * torch.as_tensor(scale.factor, dtype=a.dtype, device=a.device).reshape(-1, 1), b


def check_held(
    head: MarginHead, x: Any, y: Any, what: str, y_new: Any, weight: Any, groups: Any, gridded: bool = False
) -> SampleChange:
    """Changes of samples. Raises RemovalError, naming the first, if a sample to be removed or relabelled is not held."""
    head._fitted_weights()  # NotFittedError without samples
    change = check_changes(head, x, y, what, y_new, weight, groups, gridded)
    assert head.grid is not None
    change, times = replace(change, x=head.grid.quantize(change.x)), change.weight
    if change.old is not None:
        slots = head.samples.find(change.x, change.old)
        change = replace(change, slots=slots)
        _, same = torch.stack([change.number, slots]).unique(dim=1, return_inverse=True)
        wanted, held = torch.zeros_like(times).index_add_(0, same, times)[same], head.samples.copies[slots]
        short = torch.nonzero(wanted > held)[:, 0].tolist()
        if short:
            i = short[0]
            raise RemovalError(
                f"row {i} is held {counted(int(held[i]), 'time')}, and was to be left out {counted(int(wanted[i]), 'time')}"
            )
    change.check_rest(head.n)
    return change


def changed_weights(
    head: MarginHead, changes: SampleChange, some: Tensor
) -> Iterator[tuple[Tensor, int, Tensor, Tensor]]:
    """Weights after some changes (c,): the numbers of changes (b,), a class, its weights (J, b) or (J, 1) and intercepts.

    Weights are in grid units. Classes whose weights do not change may be omitted. A later result replaces an earlier one.
    """
    step, twin, made = head._solver.scale.step, None, None
    undecided = torch.ones(changes.count, dtype=torch.bool, device=head.device)
    if changes.members is None and changes.new is None:
        yield from _removals(head, changes, some, undecided)
    for i in some[undecided[some]].tolist():
        if twin is None:
            twin = copy.deepcopy(head)
            twin._solver.freeze_scale()
        if made is not None:
            _make(twin, changes, made, -1)
        _make(twin, changes, i, 1)
        made = i
        w, b = twin._solve()
        for k in range(head.num_classes):
            yield some.new_tensor([i]), k, w[:, k : k + 1] * step, b[k : k + 1]


def _removals(
    head: MarginHead, changes: SampleChange, some: Tensor, undecided: Tensor
) -> Iterator[tuple[Tensor, int, Tensor, Tensor]]:
    """Weights without each of some samples, as :func:`changed_weights`. ``undecided`` marks those that need a copy."""
    slots, old, step = changes.slots, changes.old, head._solver.scale.step
    assert slots is not None
    assert old is not None
    after = counts_after(changes, head.counts)
    some = some[after[some, old[some]] > 0]  # without its last sample a class has samples of one sign only
    undecided[some] = False
    share = changes.weight / head.samples.copies[slots]
    cases = [(head._solver, some)]
    if head._options.follows_counts:
        counts, kinds = after[some].unique(dim=0, return_inverse=True)
        options = [replace(head._options, class_weight=class_weights(head.class_weight, kind)) for kind in counts]
        cases = [(head._solver.restarted(o), some[kinds == i]) for i, o in enumerate(options)]
    for solver, mine in cases:
        w, b = solver.weights()
        for k in range(head.num_classes):
            w_k, b_k = w[:, k : k + 1] * step, b[k : k + 1]
            if solver is not head._solver:
                yield mine, k, w_k, b_k
            rows = mine[solver.active(k)[slots[mine]]]
            if not len(rows):
                continue
            system = ClassSystem(solver, k)
            if not system.trusted:
                undecided[rows] = True
                continue
            for part in rows.split(WHITENED_ROWS // 2):
                dw, db, right = system.removed(slots[part], share[part])
                undecided[part[~right]] = True
                yield part[right], k, w_k + dw[:, right], b_k + db[right]


def _make(head: MarginHead, changes: SampleChange, i: int, sign: int) -> None:
    """Make a change, or undo it (sign -1)."""
    assert head.grid is not None
    rows = changes.rows(i)
    x, out = head.grid.dequantize(changes.x[rows]), []
    for y, direction in ((changes.old, -1), (changes.new, 1)):
        if y is not None:
            out.append((head.statistics.check(x, y[rows], changes.weight[rows], gridded=True), sign * direction))
    head._apply_changes(out)


def leave_one_out(head: MarginHead, x: Any, y: Any, weight: Any, groups: Any, gridded: bool = False) -> Tensor:
    """Leave-one-out scores (B, K); see :meth:`torchlssvm.MarginHead.leave_one_out`.

    ``gridded``: the rows are already normalized and on the grid.
    """
    changes = check_held(head, x, y, "remove", None, weight, groups, gridded)
    w, b = head._solve()
    out = changes.x @ (w * head._solver.scale.step) + b
    every = torch.arange(changes.count, device=head.device)
    for numbers, k, w, b in changed_weights(head, changes, every):
        rows = numbers if changes.members is None else changes.members[int(numbers[0])]
        out[rows, k] = (changes.x[rows] * w.mT).sum(1) + b
    return out


def influence(
    head: MarginHead, x: Any, y: Any, x_val: Any, y_val: Any, what: str, on: str | Measure, y_new: Any, weight: Any, groups: Any
) -> Tensor:  # fmt: skip
    """Exact changes at x_val; see :meth:`torchlssvm.MarginHead.influence`."""
    check_question(what, on, y_val, y_new)
    changes = check_held(head, x, y, what, y_new, weight, groups)
    signs = before = head(x_val)  # (V, K)
    given = checks.features(x_val, head.in_features, head.device).to(torch.float64)
    points = normalized(given, head.normalize) / head._solver.scale.step  # (V, J), not rounded to the grid
    if on == "loss" and len(before):
        signs = code_labels(check_labels(head, y_val, len(before), "y_val"), head.num_classes)
    measure = measure_of(head, on, y_val, before, lambda scores: (1.0 - signs * scores).clamp(min=0.0).square())
    start = measure(before[None])[0]
    out = [start.new_zeros(0, *start.shape)]
    # 2**25: changed scores that are held at a time: 256 MB
    for some in torch.arange(changes.count, device=head.device).split(max(1, 2**25 // max(1, before.numel()))):
        after = before.repeat(len(some), 1, 1)
        for numbers, k, w, b in changed_weights(head, changes, some):
            after[numbers - some[0], :, k] = (points @ w + b).mT
        out.append(measure(after) - start)
    return torch.cat(out)
