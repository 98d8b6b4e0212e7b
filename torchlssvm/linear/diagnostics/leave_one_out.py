"""Leave-one-out and leave-group-out scores of a head: exact, without refitting."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchlssvm.errors import NumericalWarning
from torchlssvm.functional import checks
from torchlssvm.functional.discriminant import leave_out
from torchlssvm.functional.threads import share_out, threads_for
from torchlssvm.functional.votes import least_of_pairs, votes
from torchlssvm.functional.whitened import WHITENED_ROWS, Whitened, moved_scores
from torchlssvm.linear.diagnostics.whitened_problems import (
    HeadView,
    Problem,
    SampleChange,
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
    condition = out.new_zeros(())
    for weights, batches in problem.blocks(change, torch.arange(change.count, device=view.device)):
        system, mean = within_class(view.statistics, view.units, weights, view.standard)
        condition = torch.maximum(condition, 1.0 + system.trace / system.rho)
        t = problem.sample_weights(labels, weights, change.weight)
        for numbers, rows in batches:
            size = max(1, WHITENED_ROWS // rows.shape[1])
            for some, part in zip(numbers.split(size), rows.split(size), strict=True):
                x = real_rows(view, change.x[part.reshape(-1)]) - mean
                out[part], leverage[some] = leave_out(system, x.view(*part.shape, -1), labels[part], t[part])
    lost = (
        float(condition / (1.0 - leverage.max()).clamp(min=1e-30)) * torch.finfo(torch.float64).eps if len(out) else 0.0
    )
    if lost > 1e-4:  # a bound on the relative error; real errors are far lower
        warnings.warn(
            f"rho = {view.options.rho:g} is small for these features: the relative error of leave-one-out scores may be "
            f"{lost:.1e}. Use a larger rho.",
            NumericalWarning,
            stacklevel=2,
        )
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
            leverage[numbers] = _joint_leverage(move.U, -move.delta)
            scores = move.f + moved_scores(move.U, move.U, move.T)
            out[rows.reshape(-1)] = scores.reshape(-1, out.shape[1])

    for weights, batches in problem.blocks(change, some):
        system = problem.whitened(weights)
        for numbers, rows in batches:
            size = max(1, most // rows.shape[1])
            with threads_for(2.0 * rows.numel() * view.in_features**2):
                parts = list(zip(numbers.split(size), rows.split(size), strict=True))
                share_out(partial(fill, system=system, weights=weights), parts, view.device)
    _check_leverages(change, leverage)


def _joint_leverage(U: Tensor, d: Tensor) -> Tensor:
    """The largest eigenvalue (b,) of D^(1/2) G D^(1/2), which is the leverage of one sample; or the trace, if that is low.

    The trace is an upper bound of the eigenvalue. U: (b, L, D); d: (b, L).
    """
    V = U * d.sqrt()[..., None]
    bound = V.square().sum((1, 2))
    if U.shape[1] > 1:
        high = (bound > 0.5).nonzero()[:, 0]
        V = V[high]
        bound[high] = torch.linalg.eigvalsh(V @ V.mT if V.shape[1] <= V.shape[2] else V.mT @ V)[:, -1]
    return bound


def _check_leverages(change: SampleChange, leverage: Tensor) -> None:
    """Refuse samples or groups that cannot be held, and report lost digits. leverage: (changes,)."""
    if not len(leverage):
        return
    top, at = torch.stack([value.to(leverage.dtype) for value in leverage.max(0)]).tolist()  # one read of the device
    # 1e-6: the leverage of samples held is at most 1 plus this rounding; beyond it, the samples are not held
    if top > 1 + 1e-6:
        what = "sample" if change.members is None else "the group of sample"
        raise ValueError(
            f"{what} {int(change.rows(int(at))[0])} has a leverage of {top:.4g}, more than 1: it is not among those held. "
            "Leave-one-out takes the samples, labels and weights that were added."
        )
    # 1e-9: share 1 - h of a prediction that does not rest on the sample itself, below which most digits are lost
    if top >= 1 - 1e-9:
        warnings.warn(
            f"a sample determines its own prediction but for {1 - top:.1e}: its leave-one-out score has lost digits. A larger "
            "rho is advised.",
            NumericalWarning,
            stacklevel=2,
        )
