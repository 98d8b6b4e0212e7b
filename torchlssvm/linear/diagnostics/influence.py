"""Influence of samples on scores, loss or accuracy elsewhere: the exact change if they were added, removed or relabelled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.memory import no_rows
from torchlssvm.functional.votes import votes
from torchlssvm.functional.whitened import WHITENED_ROWS, Whitened, joint_change, single_changes
from torchlssvm.linear.diagnostics.leave_one_out import check_groups
from torchlssvm.linear.diagnostics.whitened_problems import (
    WHOLE_SHARE,
    HeadView,
    Labelled,
    Problem,
    SampleChange,
    check_labels,
    check_samples,
    held_rows,
    other_rows,
    problems,
    sample_weights,
)
from torchlssvm.linear.solvers import code_labels

Measure = Callable[[Tensor], Tensor]
"""From scores (b, V, K) after a change to one number for each change (b,)."""


def check_question(what: str, on: str | Measure, y_val: Any) -> None:
    """ValueError for an unknown change or measure, or one without the labels that it needs."""
    checks.one_of(what, "what", ("remove", "add", "relabel"))
    if callable(on):
        return
    checks.one_of(on, "on (or a function)", ("scores", "loss", "accuracy"))
    if on != "scores" and y_val is None:
        raise ValueError('on="loss" and on="accuracy" need y_val, the labels of x_val')


def influence(
    view: HeadView, x: Any, y: Any, x_val: Any, y_val: Any, what: str, on: str | Measure, y_new: Any, weight: Any, groups: Any
) -> Tensor:  # fmt: skip
    """Exact changes at x_val; see :meth:`torchlssvm.LSSVMHead.influence`."""
    check_question(what, on, y_val)
    view.require_least_squares("influence")
    parts = problems(view)
    change = _change(view, x, y, what, y_new, weight)
    members = None if groups is None else check_groups(groups, len(change))
    gone = change.weight if members is None else _sizes(change, members)
    if what == "remove" and len(gone) and float(gone.max()) >= view.n * WHOLE_SHARE:
        raise ValueError(f"the head holds {view.n:g} samples: without the samples to remove nothing is left")
    z = other_rows(view, x_val)  # (V, D)
    before = view.scores(checks.features(x_val, view.in_features, view.device))  # (V, K)
    targets = _targets_of(view, y_val, len(z)) if on == "loss" else before
    measure = measure_of(view, on, y_val, before, lambda scores: (targets - scores).square())
    start = measure(before[None])[0]
    count = len(change) if members is None else len(members)
    pairs = parts[0].pair is not None
    if pairs and on == "loss":
        raise ValueError('on="loss" is the squared error of one shared system; with multiclass="ovo" use "accuracy"')
    if on == "loss" and members is None:
        return _losses(parts[0], change, z, targets) - start
    out: Tensor | None = None
    for rows, after in _after(parts, change, z, members):
        if pairs:
            after = votes(after.reshape(-1, len(parts)), view.num_classes).view(*after.shape[:2], -1)
        value = measure(after)
        out = torch.zeros(count, *value.shape[1:], dtype=torch.float64, device=view.device) if out is None else out
        out[rows] = value
    if out is None:
        shape = (len(z), view.num_classes) if on == "scores" else ()
        return torch.zeros(0, *shape, dtype=torch.float64, device=view.device)
    return out - start


def _change(view: HeadView, x: Any, y: Any, what: str, y_new: Any, weight: Any) -> SampleChange:
    samples = check_samples(view, x, y, weight)
    if (what == "relabel") != (y_new is not None):
        raise ValueError(f'what="relabel" goes with y_new, the labels to be; got what={what!r} and y_new={y_new!r}')
    if what == "relabel":
        if samples.labels is not None:
            return replace(samples, new=check_labels(view, y_new, len(samples), "y_new"))
        return replace(samples, new=check_samples(view, x, y_new).values)
    return samples if what == "remove" else replace(samples, old=None, new=samples.old)


def _sizes(samples: SampleChange, members: list[Tensor]) -> Tensor:
    return torch.stack([samples.weight[m].sum() for m in members]) if members else no_rows(samples.weight)


def _targets_of(view: HeadView, y_val: Any, count: int) -> Tensor:
    """Targets (V, K) of the samples that the loss is about."""
    y = checks.as_tensor(y_val, "y_val", view.device)
    if y.is_floating_point() or (y.ndim == 1 and view.num_classes == 1):
        y = y[:, None] if y.ndim == 1 else y
        if y.shape != (count, view.num_classes):
            raise ValueError(f"y_val must have shape ({count}, {view.num_classes}), got {tuple(y.shape)}")
        return y.to(torch.float64)
    return code_labels(check_labels(view, y, count, "y_val"), view.num_classes)


def measure_of(view: Labelled, on: str | Measure, y_val: Any, before: Tensor, loss: Measure) -> Measure:
    """The requested function of changed scores. before: (V, K); loss: from (b, V, K) to (b, V, K)."""
    if callable(on):
        return on
    if on == "scores":
        return lambda scores: scores
    if not len(before):
        raise ValueError(
            'x_val holds no samples: on="loss" and on="accuracy" are means over x_val. Give at least one, or use on="scores"'
        )
    if on == "loss":
        return lambda scores: loss(scores).mean((1, 2))
    labels = check_labels(view, y_val, len(before), "y_val")
    return lambda scores: (scores.argmax(2) == labels).to(torch.float64).mean(1)


def _local(problem: Problem, y: Tensor | None) -> Tensor | None:
    return None if y is None or y.ndim == 2 else problem.local(y)


def _moves(problem: Problem, change: SampleChange, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """delta (B,) and c (B, K): how weights and right-hand side change, for class weights of after."""
    times = change.weight
    delta, c = torch.zeros_like(times), None
    for y, sign in ((change.old, -1.0), (change.new, 1.0)):
        if y is None:
            continue
        local = _local(problem, y)
        d = sign * sample_weights(local, weights, times)
        target = y if local is None else problem.targets(local)
        delta = delta + d
        c = d[:, None] * target if c is None else c + d[:, None] * target
    assert c is not None
    return delta, c


def _after(
    parts: list[Problem], change: SampleChange, z: Tensor, members: list[Tensor] | None
) -> Iterator[tuple[Tensor | slice, Tensor]]:
    """Scores after each change: rows (of the samples, or of the groups) and scores (b, V, outputs)."""
    if members is not None:
        for i, rows in enumerate(members):
            rows = rows.to(z.device)
            yield slice(i, i + 1), torch.cat([_after_group(p, change, z, rows) for p in parts], 1)[None]
    elif parts[0].pair is None:
        old, new = (_local(parts[0], y) for y in (change.old, change.new))
        for some, system, weights in parts[0].cases(old, new, change.weight):
            yield from _tiles(parts[0], change, z, some, system, weights)
    else:  # all pairs are needed at a time
        plans = [_plan(p, change, z) for p in parts]
        step = _step(len(z), len(parts))
        for start in range(0, len(change), step):
            pick = torch.arange(start, min(start + step, len(change)), device=z.device)
            yield pick, torch.cat([plan(pick) for plan in plans], 2)


def _step(points: int, outputs: int) -> int:
    # 2**22: changed scores that are held at a time: 32 MB
    return max(1, min(WHITENED_ROWS, 2**22 // max(1, points * outputs)))


def _tiles(
    problem: Problem, change: SampleChange, z: Tensor, rows: Tensor | None, system: Whitened, weights: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores after the changes of some rows, tile by tile."""
    centred = system.centred(z.clone())
    Z, base = system.rows(centred), system.scores(centred)
    delta, c = _moves(problem, change, weights)
    chosen = torch.arange(len(change), device=z.device) if rows is None else rows
    for part in chosen.split(_step(len(z), base.shape[1])):
        v = system.centred(held_rows(problem.view, change.x[part]))
        U = system.rows(v)
        T = single_changes(torch.einsum("ij,ij->i", U, U), delta[part], c[part], system.scores(v))
        yield part, base + (U @ Z.mT)[:, :, None] * T[:, None, :]


def _plan(problem: Problem, change: SampleChange, z: Tensor) -> Callable[[Tensor], Tensor]:
    """A function from rows to scores (b, V, 1) of one pair after the change of each row."""
    old, new, times = _local(problem, change.old), _local(problem, change.new), change.weight
    lonely = torch.zeros_like(times, dtype=torch.bool)  # all that the pair has: without it its score is 0
    first = torch.zeros_like(lonely)  # the first that an empty pair gets: a free intercept alone fits it
    if old is not None and new is None:
        lonely = (old >= 0) & (times >= problem.total * WHOLE_SHARE)
    elif old is not None and new is not None:
        lonely = (old >= 0) & (new < 0) & (times >= problem.total * WHOLE_SHARE)
    if new is not None and problem.view.intercept == "free":
        stays = problem.total if old is None else problem.total - torch.where(old >= 0, times, torch.zeros_like(times))
        first = (new >= 0) & (torch.as_tensor(stays, device=z.device) <= 0)
    cases = list(problem.cases(old, new, times))

    def scores(pick: Tensor) -> Tensor:
        out = torch.zeros(len(pick), len(z), 1, dtype=torch.float64, device=z.device)
        for rows, system, weights in cases:
            mine = torch.ones_like(lonely) if rows is None else torch.zeros_like(lonely).index_fill_(0, rows, True)
            here = (mine & ~lonely & ~first)[pick].nonzero()[:, 0]
            for part, value in _tiles(problem, change, z, pick[here], system, weights):
                out[torch.searchsorted(pick, part)] = value
        alone = first[pick].nonzero()[:, 0]
        if len(alone) and new is not None:
            out[alone] = problem.targets(new[pick[alone]])[:, None, :]
        return out

    return scores


def _after_group(problem: Problem, change: SampleChange, z: Tensor, rows: Tensor) -> Tensor:
    """Scores (V, outputs) after all of a group's samples have changed."""
    counts, times = problem.counts.clone(), change.weight[rows]
    for y, sign in ((change.old, -1.0), (change.new, 1.0)):
        local = None if y is None else _local(problem, y[rows])
        if local is not None:
            counts.index_add_(0, local[local >= 0], times[local >= 0], alpha=sign)
    if problem.pair is not None and float(counts.sum()) <= 0:
        return torch.zeros(len(z), 1, dtype=torch.float64, device=z.device)
    weights = problem.class_weights(counts if problem.follows_counts else None)
    system = problem.whitened(weights) if problem.follows_counts else problem.main()
    centred, v = system.centred(z.clone()), system.centred(held_rows(problem.view, change.x[rows]))
    delta, c = _moves(problem, change, weights)
    U = system.rows(v)
    T = joint_change(U, delta[rows], c[rows], system.scores(v))
    return system.scores(centred) + system.rows(centred) @ (U.mT @ T)


def _losses(problem: Problem, change: SampleChange, z: Tensor, targets: Tensor) -> Tensor:
    """Mean squared errors (B,) after each single change, without any matrix of samples by points.

    sum_z |r_z - g_zi T_i|^2 = sum |r|^2 - 2 T_i . (u_i Z^T r) + |T_i|^2 u_i (Z^T Z) u_i, with r the residuals at the points.
    """
    out = torch.zeros_like(change.weight)
    for rows, system, weights in problem.cases(_local(problem, change.old), _local(problem, change.new), change.weight):
        centred = system.centred(z.clone())
        Z, residual = system.rows(centred), targets - system.scores(centred)
        first, second, zero = Z.mT @ residual, Z.mT @ Z, residual.square().sum()
        delta, c = _moves(problem, change, weights)
        for part in (torch.arange(len(change), device=z.device) if rows is None else rows).split(WHITENED_ROWS):
            v = system.centred(held_rows(problem.view, change.x[part]))
            U = system.rows(v)
            T = single_changes(torch.einsum("ij,ij->i", U, U), delta[part], c[part], system.scores(v))
            linear = (T * (U @ first)).sum(1)
            out[part] = zero - 2 * linear + T.square().sum(1) * torch.einsum("ij,ij->i", U @ second, U)
    return out / targets.numel()
