"""Leave-one-out and leave-group-out scores of a head: exact, without refitting."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.discriminant import leave_out
from torchlssvm.functional.threads import share_out, threads_for
from torchlssvm.functional.votes import least_of_pairs, votes
from torchlssvm.functional.whitened import WHITENED_ROWS, Whitened, moved_scores
from torchlssvm.linear.diagnostics.whitened_problems import (
    HeadView,
    Problem,
    SampleChange,
    check_leverages,
    check_samples,
    gridded,
    problems,
    real_rows,
)
from torchlssvm.linear.discriminant_rule import within_class

PAIR_RULES = {"votes": votes, "least": least_of_pairs}
"""Functions from scores of pairs to scores of classes, by name."""


def leave_one_out(
    view: HeadView, x: Any, y: Any, weight: Any = None, groups: Any = None, pairs: str = "votes"
) -> Tensor:
    """Leave-one-out scores (B, K); see :meth:`torchlssvm.LSSVMHead.leave_one_out`."""
    with threads_for(0):
        change = check_samples(view, x, y, weight, groups)
        checks.one_of(pairs, "pairs", tuple(PAIR_RULES))
        change.check_rest(view.n)
    if view.by_label:
        each = [
            leave_one_out(view.of_label(k), x, (change.y[:, k] < 0).long(), weight, groups, "least")[:, 0]
            for k in range(view.num_classes)
        ]
        return torch.stack(each, 1)
    J, whole = view.in_features, groups is not None or view.multiclass == "ovo"  # else rows are shared out
    with threads_for(max(J**3, 2.0 * whole * len(change) * J**2)):
        if view.rule == "lda":
            return _discriminant_scores(Problem(view), change)
        if view.multiclass == "ovr":
            out = torch.zeros(len(change), view.num_classes, dtype=torch.float64, device=view.device)
            _write(Problem(view), change, torch.arange(change.count, device=view.device), out)
            return out
        out = torch.cat([gridded(view, part) @ view.w + view.b for part in change.x.split(WHITENED_ROWS)])
        for i, problem in enumerate(problems(view)):
            touched = problem.touched(change)
            for _, rows in change.batches(touched[~problem.stays(change)[touched]]):
                out[rows, i] = 0.0  # all that the pair has
            _write(problem, change, touched, out[:, i : i + 1])
        return PAIR_RULES[pairs](out, view.num_classes)


def _discriminant_scores(problem: Problem, change: SampleChange) -> Tensor:
    """Scores (B, K) of the discriminant, each row without its sample or group, at the rho in use."""
    view, labels = problem.view, change.y
    out = torch.zeros(len(change), view.num_classes, dtype=torch.float64, device=view.device)
    leverage = out.new_zeros(change.count)
    for weights, batches in problem.blocks(change, torch.arange(change.count, device=view.device)):
        system, mean = within_class(view.statistics, view.units, weights, view.standard)
        t = problem.sample_weights(labels, weights, change.weight)
        for numbers, rows in batches:
            size = max(1, WHITENED_ROWS // rows.shape[1])
            for some, part in zip(numbers.split(size), rows.split(size), strict=True):
                x = real_rows(view, change.x[part.reshape(-1)]) - mean
                out[part], leverage[some] = leave_out(system, x.view(*part.shape, -1), labels[part], t[part])
        check_leverages(change, leverage, system.share)
    return out


def _write(problem: Problem, change: SampleChange, some: Tensor, out: Tensor) -> None:
    """Write scores (B, outputs) of one problem for the samples of some changes, each row without its sample or group."""
    view = problem.view
    leverage = torch.zeros(change.count, dtype=torch.float64, device=view.device)
    # 256: rows that a thread of the host takes at a time: a megabyte at 512 features stays in its cache
    most = 256 if view.device.type == "cpu" and change.members is None else WHITENED_ROWS

    def fill(parts: Iterator[tuple[Tensor, Tensor]], system: Whitened, weights: Tensor | None) -> None:
        for numbers, rows in parts:
            move = problem.moved(system, change, rows, weights)
            leverage[numbers] = move.leverage
            scores = move.f + moved_scores(move.U, move.U, move.T)
            out[rows.reshape(-1)] = scores.reshape(-1, out.shape[1])

    for weights, batches in problem.blocks(change, some):
        system = problem.whitened(weights)
        for numbers, rows in batches:
            size = max(1, most // rows.shape[1])
            with threads_for(2.0 * rows.numel() * view.in_features**2):
                parts = list(zip(numbers.split(size), rows.split(size), strict=True))
                share_out(partial(fill, system=system, weights=weights), parts, view.device)
        check_leverages(change, leverage, system.share)
