"""The choice of rho: by GCV from statistics, by exact leave-one-out on given samples, or by k-fold from fold sums."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.sample_identity import fold_of
from torchlssvm.functional.spectrum import SCORED_ROWS, Spectrum, default_values, path_residuals, project, squared_error
from torchlssvm.functional.votes import votes
from torchlssvm.functional.whitened import WHITENED_ROWS
from torchlssvm.linear import normal_equations as normal
from torchlssvm.linear.diagnostics.whitened_problems import (
    HeadView,
    Problem,
    SampleChange,
    check_samples,
    gridded,
    problems,
    real_rows,
    warn_lost_digits,
)
from torchlssvm.linear.standardization import standardization
from torchlssvm.statistics import Statistics


@dataclass(frozen=True)
class RhoPath:
    """Result of a choice of rho.

    Attributes:
        rho: the value with the least error; the largest such value if errors are equal, which is common with accuracies.
        rhos, errors: all values (r,) and their errors (r,), as mean squared errors or shares of wrong predictions.
        dof: effective degrees of freedom (r,), for a head with one system.
        method: "gcv", "loo" or "kfold".
    """

    rho: float
    rhos: Tensor
    errors: Tensor
    dof: Tensor | None
    method: str

    def __float__(self) -> float:
        return self.rho


def rho_path(
    view: HeadView, rhos: Any = None, method: str = "gcv", x: Any = None, y: Any = None, weight: Any = None,
    ids: Any = None, score: str = "squared",
) -> RhoPath:  # fmt: skip
    """Errors for every value; see :meth:`torchlssvm.LSSVMHead.select_rho`."""
    checks.one_of(method, "method", ("gcv", "loo", "kfold"))
    checks.one_of(score, "score", ("squared", "accuracy"))
    parts = problems(view)
    samples = None if x is None else check_all(view, x, y, weight)
    check_question(view, method, samples, score)
    values = check_values(rhos, view)
    if view.by_label:
        labels = [None] * view.num_classes if samples is None else (samples.y < 0).long().unbind(1)
        each = [
            rho_path(view.of_label(k), values, method, x, labels[k], weight, ids).errors
            for k in range(view.num_classes)
        ]
        errors = torch.stack(each).mean(0)
        return RhoPath(best_of(values, errors), values, errors, None, method)
    if method == "gcv":
        errors, dof = gcv_errors(parts, values)
        return RhoPath(best_of(values, errors), values, errors, dof, method)
    main = parts[0].spectrum(parts[0].class_weights()) if len(parts) == 1 else None
    if method == "loo":
        assert samples is not None
        errors = leave_one_out_errors(parts, samples, values, main, score)
    else:
        errors = fold_errors(parts, values, samples, ids, score)
    return RhoPath(best_of(values, errors), values, errors, None if main is None else main.dof(values), method)


def gcv_errors(parts: list[Problem], rhos: Tensor) -> tuple[Tensor, Tensor | None]:
    """GCV (r,), the mean over pairs by their samples, and degrees of freedom (r,) if there is one system."""
    if len(parts) == 1:
        return parts[0].gcv(rhos)
    errors, total = torch.zeros_like(rhos), 0.0
    for part in (p for p in parts if p.total > 0):
        found, _ = part.gcv(rhos)
        if bool(found.isfinite().any()):  # else a pair too small to tell
            errors += part.total * found
            total += part.total
    return errors / total if total else errors + torch.inf, None


def check_question(view: HeadView, method: str, samples: SampleChange | None, score: str) -> None:
    """Refuse bad arguments before any eigendecomposition."""
    if score == "accuracy":
        if method == "gcv" or samples is None:
            raise ValueError('score="accuracy" needs method "loo" or "kfold" and the samples, x and y')
        if samples.y.ndim == 2:
            raise ValueError('score="accuracy" needs labels, this head holds float targets')
    if method == "loo":
        if samples is None:
            raise ValueError('method="loo" needs the current samples: select_rho(rhos, "loo", x=x, y=y)')
        samples.check_rest(view.n)


def decided(path: RhoPath) -> RhoPath:
    """Return the path. Raises ValueError if it decides nothing."""
    if math.isnan(path.rho):
        raise ValueError("no value of rho has a finite error: the current samples are too few to tell")
    return path


def best_of(values: Tensor, errors: Tensor) -> float:
    """The value with the least error, the largest value in a tie, or NaN if no error is finite."""
    finite = errors.isfinite()
    if not bool(finite.any()):
        return math.nan
    least = errors[finite].amin()
    return float(values[finite][errors[finite] == least].amax())


def check_values(rhos: Any, view: HeadView) -> Tensor:
    """rhos (r,): finite and > 0. None: 100 values around the scale of the data."""
    if rhos is None:
        stats = view.statistics
        m = normal.moments(stats, view.units, view.intercept, standard=view.standard)
        return default_values(m.G.diagonal(), len(m.G))
    return check_rhos(rhos, view.device)


def check_rhos(rhos: Any, device: torch.device) -> Tensor:
    """Values of rho (r,) as given: finite and > 0."""
    values = checks.as_tensor(rhos, "rhos", device).to(torch.float64).reshape(-1)
    if not len(values):
        raise ValueError("rhos is empty: give at least one value, or None for 100 around the scale of the data")
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        raise ValueError(f"rhos must be finite and > 0, got {values.tolist()}")
    return values


def check_all(view: HeadView, x: Any, y: Any, weight: Any) -> SampleChange:
    """The samples, whose number in each class must match the head's."""
    samples = check_samples(view, x, y, weight)
    given = samples.weight.sum().expand(view.num_classes)
    if samples.y.ndim == 1:
        given = torch.zeros(view.num_classes, dtype=torch.float64, device=view.device)
        given.index_add_(0, samples.y, samples.weight)
    held = view.counts
    if not torch.allclose(given, held, rtol=1e-9):
        raise ValueError(
            f"x and y must be all samples that the head holds: {held.tolist()} by class, got {given.tolist()}"
        )
    return samples


def leave_one_out_errors(
    parts: list[Problem], samples: SampleChange, rhos: Tensor, main: Spectrum | None, score: str
) -> Tensor:
    """Leave-one-out errors (r,). Exact: class weights that follow the counts are derived again for each left-out class."""
    lost = torch.zeros_like(rhos)
    errors = (_wrong_left_out if score == "accuracy" else _squares_left_out)(parts, samples, rhos, main, lost)
    warn_lost_digits(float(lost[rhos == best_of(rhos, errors)].sum()))
    return errors


def _squares_left_out(
    parts: list[Problem], samples: SampleChange, rhos: Tensor, main: Spectrum | None, lost: Tensor
) -> Tensor:
    """Mean squared errors (r,), and in ``lost`` (r,) an estimate of the relative error of the scores that they come from."""
    total, weight = torch.zeros_like(rhos), 0.0
    for problem in parts:
        y, judged = (
            problem.targets(samples.y),
            problem.sample_weights(samples.y, problem.class_weights(), samples.weight),
        )
        judged = judged * problem.stays(samples)  # a pair of which one sample is left has no leave-one-out error
        for own, projected, d, rows in _paths(problem, samples, rhos, main):
            for pick in rows.split(WHITENED_ROWS):
                blocks = path_residuals(own, projected, real_rows(problem.view, samples.x[pick]), y[pick], d[pick])
                for part, residual, left in blocks:
                    torch.maximum(lost, own.rounding(rhos) / left.amin(0), out=lost)
                    total += judged[pick][part] @ residual.square_().mean(1).div_(left.square_())
        weight += float(judged.sum())
    return total / weight


def _paths(problem: Problem, samples: SampleChange, rhos: Tensor, main: Spectrum | None) -> Iterator[tuple[Any, ...]]:
    """Spectrum, its projection, weights (B,) and rows (b,) of the samples for each of the class weights without one of them."""
    for weights, batches in problem.blocks(samples, torch.arange(len(samples), device=rhos.device)):
        for rows, _ in batches:
            own = main if main is not None and not problem.view.options.follows_counts else problem.spectrum(weights)
            yield own, project(own, rhos), problem.sample_weights(samples.y, weights, samples.weight), rows


def _wrong_left_out(
    parts: list[Problem], samples: SampleChange, rhos: Tensor, main: Spectrum | None, lost: Tensor
) -> Tensor:
    """Shares of wrong leave-one-out predictions (r,): all pairs are needed for each sample. lost: as above."""
    view, labels, total, judged = parts[0].view, samples.y, torch.zeros_like(rhos), samples.weight
    if parts[0].pair is None:
        judged = parts[0].sample_weights(labels, parts[0].class_weights(), judged)
    paths = [(problem.targets(labels), list(_paths(problem, samples, rhos, main))) for problem in parts]
    for pick in torch.arange(len(samples), device=labels.device).split(SCORED_ROWS):
        scores = []
        for y, kinds in paths:
            mine = torch.zeros(len(pick), y.shape[1], len(rhos), dtype=torch.float64, device=labels.device)
            for own, projected, d, rows in kinds:
                at = rows[torch.isin(rows, pick)]
                for part, residual, left in path_residuals(
                    own, projected, real_rows(view, samples.x[at]), y[at], d[at]
                ):
                    torch.maximum(lost, own.rounding(rhos) / left.amin(0), out=lost)
                    mine[at[part] - pick[0]] = y[at[part]][:, :, None] - residual / left[:, None, :]
            scores.append(mine)
        flat = torch.cat(scores, 1).permute(0, 2, 1).flatten(0, 1)
        flat = votes(flat, view.num_classes) if parts[0].pair is not None else flat
        wrong = flat.argmax(1).view(len(pick), -1) != labels[pick][:, None]
        total += judged[pick] @ wrong.to(torch.float64)
    return total / judged.sum()


def fold_errors(parts: list[Problem], rhos: Tensor, samples: SampleChange | None, ids: Any, score: str) -> Tensor:
    """k-fold errors (r,) from the statistics of the folds alone; shares of wrong predictions need the samples and their ids.

    No samples are needed for squared errors, because the error of w and b on a left-out fold of n samples depends only on sums
    over the fold. Let m and t be the means of its features and targets, and M, V and T the centred sums of products of
    features with features, features with targets, and targets with targets:

        error = T - 2 w . V + w . M w + n |t - m w - b|^2
    """
    view = parts[0].view
    stats = view.statistics
    if stats.folds < 2:
        raise ValueError(f'method="kfold" needs sums per fold: build the head with folds=5, it has folds={stats.folds}')
    fold = None
    if score == "accuracy":
        assert samples is not None
        if ids is None or len(ids) != len(samples):
            raise ValueError('score="accuracy" by k-fold needs ids, one for each sample, as given to add')
        fold = torch.tensor(fold_of(ids.tolist() if isinstance(ids, Tensor) else ids, stats.folds), device=view.device)
    total, weight, lost = torch.zeros_like(rhos), 0.0, torch.zeros_like(rhos)
    for f in range(stats.folds):
        kept, out = stats.of_folds([g for g in range(stats.folds) if g != f]), stats.of_folds([f])
        if out.empty:
            continue
        if kept.empty:
            raise ValueError("all samples are in one fold: there is nothing to learn from")
        if fold is not None and samples is not None:
            total += _wrong_in_fold(parts, kept, samples, (fold == f).nonzero()[:, 0], rhos, lost)
            continue
        for problem in parts:
            if problem.pair is not None and not (_present(problem, kept) and _present(problem, out)):
                continue
            own = problem.spectrum(problem.class_weights(kept.counts), kept)
            torch.maximum(lost, own.rounding(rhos, new=True), out=lost)
            m = normal.moments(out, view.units, "free", problem.class_weights(), problem.pair)
            for i, rho in enumerate(rhos):
                w, b = _real_weights(view, own, kept, rho)
                miss = m.beta - (m.mu @ w + b)
                total[i] += (squared_error(m.G, m.rhs, m.T, w) + m.weight * miss.square()).mean()
            weight += m.weight
    if fold is not None and samples is not None:
        weight = float(samples.weight.sum())
    errors = total.clamp(min=0.0) / weight
    warn_lost_digits(float(lost[rhos == best_of(rhos, errors)].sum()))
    return errors


def _real_weights(view: HeadView, own: Spectrum, kept: Statistics, rho: Tensor) -> tuple[Tensor, Tensor]:
    """w (J, K) and b (K,) for the original features, of the model that has learned ``kept`` and takes its scale from it."""
    (w, b), J, standard = own.weights(rho), view.in_features, standardization(kept)
    if view.intercept == "penalized":
        w, b = w[:J], b + w[J]
    return (w, b) if standard is None else standard.weights(w, b)


def _present(problem: Problem, stats: Any) -> bool:
    return bool(stats.counts[list(problem.pair or ())].sum() > 0)


def _wrong_in_fold(
    parts: list[Problem], kept: Any, samples: SampleChange, rows: Tensor, rhos: Tensor, lost: Tensor
) -> Tensor:
    """Summed weights (r,) of the samples of a fold that are misclassified by a model trained without the fold."""
    view, labels = parts[0].view, samples.y
    own = [
        p.spectrum(p.class_weights(kept.counts), kept) if p.pair is None or _present(p, kept) else None for p in parts
    ]
    for spectrum in filter(None, own):
        torch.maximum(lost, spectrum.rounding(rhos, new=True), out=lost)
    v, total = gridded(view, samples.x[rows]), torch.zeros_like(rhos)
    for i, rho in enumerate(rhos):
        weights = [None if s is None else _real_weights(view, s, kept, rho) for s in own]
        scores = torch.cat([v.new_zeros(len(v), 1) if pair is None else v @ pair[0] + pair[1] for pair in weights], 1)
        scores = votes(scores, view.num_classes) if parts[0].pair is not None else scores
        total[i] = samples.weight[rows] @ (scores.argmax(1) != labels[rows]).to(torch.float64)
    return total
