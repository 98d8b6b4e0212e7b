"""Influence of samples: the exact change of scores, loss or accuracy if they were added, removed or relabelled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.votes import votes
from torchlssvm.functional.whitened import WHITENED_ROWS, Whitened, moved_scores
from torchlssvm.linear.diagnostics.whitened_problems import (
    HeadView,
    Move,
    Problem,
    SampleChange,
    check_changes,
    check_labels,
    check_leverages,
    counts_after,
    held_rows,
    other_features,
    problems,
    system_rows,
)
from torchlssvm.linear.solution import Solution
from torchlssvm.linear.solvers import code_labels

if TYPE_CHECKING:
    from torchlssvm.linear.linear_head import LinearHead

Measure = Callable[[Tensor], Tensor]
"""From scores (b, V, K) after a change to one number for each change (b,)."""


def check_question(what: str, on: str | Measure, y_val: Any, y_new: Any) -> None:
    """Raise ValueError for an unknown change or measure, or one without the labels that it needs."""
    checks.one_of(what, "what", ("remove", "add", "relabel"))
    if (what == "relabel") != (y_new is not None):
        raise ValueError(f'what="relabel" goes with y_new, the new labels; got what={what!r} and y_new={y_new!r}')
    if callable(on):
        return
    checks.one_of(on, "on (or a function)", ("scores", "loss", "accuracy"))
    if on != "scores" and y_val is None:
        raise ValueError('on="loss" and on="accuracy" need y_val, the labels of x_val')


def influence(
    view: HeadView, x: Any, y: Any, x_val: Any, y_val: Any, what: str, on: str | Measure, y_new: Any, weight: Any, groups: Any
) -> Tensor:  # fmt: skip
    """Exact changes at x_val; see :meth:`torchlssvm.LSSVMHead.influence`."""
    check_question(what, on, y_val, y_new)
    view.require_least_squares("influence")
    view.require_shared("influence")
    change = check_changes(view, x, y, what, y_new, weight, groups)
    change.check_rest(view.n)
    features = other_features(view, x_val)
    z, linear = system_rows(view, features, 1.0), features @ view.w + view.b  # (V, D), (V, outputs)
    pairs = view.multiclass == "ovo"
    if pairs and on == "loss":
        raise ValueError('on="loss" is the squared error of one shared system; with multiclass="ovo" use "accuracy"')
    before = votes(linear, view.num_classes) if pairs else linear  # (V, K)
    targets = _targets_of(view, y_val, len(z)) if on == "loss" else before
    measure = measure_of(view, on, y_val, before, lambda scores: (targets - scores).square())
    start = measure(before[None])[0]
    out = torch.zeros(change.count, *start.shape, dtype=torch.float64, device=view.device)
    if on == "loss":
        for numbers, losses in _losses(Problem(view), change, z, targets):
            out[numbers] = losses
        return out - start
    for numbers, after in _after(problems(view), change, z, linear):
        if pairs:
            after = votes(after.reshape(-1, after.shape[2]), view.num_classes).view(*after.shape[:2], -1)
        out[numbers] = measure(after)
    return out - start


def _targets_of(view: HeadView, y_val: Any, count: int) -> Tensor:
    """Targets (V, K) of the samples that the loss is about."""
    y = checks.as_tensor(y_val, "y_val", view.device)
    mode = view.statistics.targets
    if mode is not None:
        y = checks.targets(y, y.new_empty(count, 0), view.num_classes, mode)[0].to(torch.float64)
        y = checks.truth(y, y, mode)
        return checks.label_signs(y) if mode == "multilabel" else y
    if y.is_floating_point() or (y.ndim == 1 and view.num_classes == 1):
        y = y[:, None] if y.ndim == 1 else y
        if y.shape != (count, view.num_classes):
            raise ValueError(f"y_val must have shape ({count}, {view.num_classes}), got {tuple(y.shape)}")
        return y.to(torch.float64)
    return code_labels(check_labels(view, y, count, "y_val"), view.num_classes)


def measure_of(view: HeadView | LinearHead, on: str | Measure, y_val: Any, before: Tensor, loss: Measure) -> Measure:
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
    if view.statistics.targets is not None:
        raise ValueError(f'on="accuracy" needs classes; with targets={view.statistics.targets!r} use on="loss"')
    labels = check_labels(view, y_val, len(before), "y_val")
    return lambda scores: (scores.argmax(2) == labels).to(torch.float64).mean(1)


def _after(parts: list[Problem], change: SampleChange, z: Tensor, before: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores after each change: numbers of changes (b,) and scores (b, V, outputs) of all pairs together."""
    # 2**22: changed scores that are held at a time: 32 MB
    step = max(1, min(WHITENED_ROWS, 2**22 // max(1, before.numel())))
    width = before.shape[1] // len(parts)
    solved = [functools.cache(_solver_of(problem)) for problem in parts]
    touched = [torch.isin(torch.arange(change.count, device=z.device), problem.touched(change)) for problem in parts]
    for tile in torch.arange(change.count, device=z.device).split(step):
        out = before.repeat(len(tile), 1, 1)
        for i, problem in enumerate(parts):
            columns = slice(i * width, (i + 1) * width)
            some = tile[touched[i][tile]]
            for number in some[~problem.stays(change)[some]].tolist():
                out[number - int(tile[0]), :, columns] = _from_nothing(problem, change, number, z)
            for weights, batches in problem.blocks(change, some):
                system = solved[i](None if weights is None else tuple(weights.tolist()))
                centred = system.centred(z.clone())
                Z, start = system.rows(centred), system.scores(centred)
                for numbers, move in _moves(problem, system, change, weights, batches):
                    out[numbers - tile[0], :, columns] = start + moved_scores(Z, move.U, move.T)
        yield tile, out


def _solver_of(problem: Problem) -> Callable[[tuple[float, ...] | None], Whitened]:
    def solve(weights: tuple[float, ...] | None) -> Whitened:
        given = None if weights is None else torch.tensor(weights, dtype=torch.float64, device=problem.view.device)
        return problem.whitened(given)

    return solve


def _moves(
    problem: Problem,
    system: Whitened,
    change: SampleChange,
    weights: Tensor | None,
    batches: list[tuple[Tensor, Tensor]],
) -> Iterator[tuple[Tensor, Move]]:
    """Moves by some changes, a block of rows at a time, with the numbers of the changes (b,)."""
    leverage = torch.zeros(change.count, dtype=torch.float64, device=change.x.device)
    for numbers, rows in batches:
        size = max(1, WHITENED_ROWS // rows.shape[1])
        for part, some in zip(numbers.split(size), rows.split(size), strict=True):
            move = problem.moved(system, change, some, weights)
            leverage[part] = move.leverage
            yield part, move
    check_leverages(change, leverage, system.share)


def _from_nothing(problem: Problem, change: SampleChange, number: int, z: Tensor) -> Tensor:
    """Scores (V, outputs), by a new solve, after a change that leaves none of a problem's present samples as it was."""
    rows, view = change.rows(number), problem.view
    outputs = 1 if problem.pair is not None else view.num_classes
    weights = problem.class_weights(counts_after(change, view.counts)[number])
    d = problem.sample_weights(None if change.new is None else change.new[rows], weights, change.weight[rows])
    if change.new is None or not bool((d > 0).any()):
        return z.new_zeros(len(z), outputs)
    v, y = held_rows(view, change.x[rows]), problem.targets(change.new[rows])
    solution = Solution(z.shape[1], outputs, view.intercept == "free", z.device)
    solution.train(v, y, d)
    return (z - solution.mu) @ solution.w + solution.beta


def _losses(problem: Problem, change: SampleChange, z: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Numbers of changes (b,) and mean squared errors (b,) after each of them, without any matrix of samples by points.

    sum_z |r_z - G_zI T|^2 = sum |r|^2 - 2 T . (U Z^T r) + T . (U Z^T Z U^T T), with r the residuals at the points.
    """
    every = torch.arange(change.count, device=z.device)
    for number in every[~problem.stays(change)].tolist():
        yield every[number : number + 1], (targets - _from_nothing(problem, change, number, z)).square().mean()[None]
    for weights, batches in problem.blocks(change, every):
        system = problem.whitened(weights)
        centred = system.centred(z.clone())
        Z, residual = system.rows(centred), targets - system.scores(centred)
        first, second, zero = Z.mT @ residual, Z.mT @ Z, residual.square().sum()
        for numbers, (U, T, _, _) in _moves(problem, system, change, weights, batches):
            linear, square = (T * (U @ first)).sum((1, 2)), (T * moved_scores(U @ second, U, T)).sum((1, 2))
            yield numbers, (zero - 2 * linear + square) / targets.numel()


GOOD_SIGN = {
    ("remove", "loss"): 1.0, ("remove", "accuracy"): -1.0, ("relabel", "loss"): 1.0, ("relabel", "accuracy"): -1.0,
    ("add", "loss"): -1.0, ("add", "accuracy"): 1.0,
}  # fmt: skip
"""Sign that marks a sample as helpful, by kind of change and measure. Removing a helpful sample raises the loss."""


@dataclass(frozen=True)
class Influential:
    """The most helpful and the most harmful samples (or groups), the strongest first.

    Attributes:
        helpful, harmful: row indices of at most ``count`` samples, or indices of groups in order of first appearance. The model
            would be worse without the helpful samples, and better without the harmful ones.
        help, harm: the size of each effect, the change of loss or accuracy as a number > 0.
        helpful_ids, harmful_ids: the ids of these samples (or the names of the groups), if you passed them.
        change: the change for every sample or group (n,), as ``head.influence`` returns it.
    """

    helpful: Tensor
    harmful: Tensor
    help: Tensor
    harm: Tensor
    helpful_ids: tuple[Any, ...] | None
    harmful_ids: tuple[Any, ...] | None
    change: Tensor


def check_ranking(what: str, on: Any, count: int) -> None:
    """Refuse bad arguments before anything is computed."""
    checks.one_of(what, "what", ("remove", "add", "relabel"))
    checks.one_of(on, "on", ("loss", "accuracy"))
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count must be an integer >= 1, got {count!r}")


def names_of(ids: Any, groups: Any, samples: int) -> list[Any] | None:
    """Names of the entries of the ranking: the groups, or the ids of the samples."""
    if groups is not None:
        return list(dict.fromkeys(groups.tolist() if hasattr(groups, "tolist") else groups))
    if ids is None:
        return None
    names = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if len(names) != samples:
        raise ValueError(f"x and ids differ in length: {samples} rows, {len(names)} ids")
    return names


def rank(change: Tensor, what: str, on: str, count: int, names: list[Any] | None) -> Influential:
    """Both ends of the ranking. Equal changes are in the order of their rows. change: (n,)."""
    good = GOOD_SIGN[what, on] * change
    ends, amounts = [], []
    for value in (good, -good):
        order = value.argsort(descending=True, stable=True)[:count]
        order = order[value[order] > 0]
        ends.append(order)
        amounts.append(value[order])
    called = [None if names is None else tuple(names[i] for i in end.tolist()) for end in ends]
    return Influential(ends[0], ends[1], amounts[0], amounts[1], called[0], called[1], change)
