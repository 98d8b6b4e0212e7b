"""Leave-one-out and leave-group-out scores of a head: exact, without refitting."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchlssvm.errors import NumericalWarning
from torchlssvm.functional import checks
from torchlssvm.functional.discriminant import leave_group_out
from torchlssvm.functional.discriminant import leave_one_out as leave_each_out
from torchlssvm.functional.threads import share_out, threads_for
from torchlssvm.functional.votes import least_of_pairs, votes
from torchlssvm.functional.whitened import WHITENED_ROWS, Whitened, group_left_out, left_out
from torchlssvm.linear.diagnostics.whitened_problems import (
    WHOLE_SHARE,
    HeadView,
    Problem,
    SampleChange,
    check_samples,
    gridded,
    held_rows,
    problems,
    real_rows,
    sample_weights,
)
from torchlssvm.linear.discriminant_rule import within_class

PAIR_RULES = {"votes": votes, "least": least_of_pairs}
"""Functions from scores of pairs to scores of classes, by name."""


def leave_one_out(
    view: HeadView, x: Any, y: Any, weight: Any = None, groups: Any = None, pairs: str = "votes"
) -> Tensor:
    """Leave-one-out scores (B, K); see :meth:`torchlssvm.LSSVMHead.leave_one_out`."""
    with threads_for(0):
        samples = check_samples(view, x, y, weight)
        checks.one_of(pairs, "pairs", tuple(PAIR_RULES))
        members = None if groups is None else check_groups(groups, len(samples))
        check_samples_left(samples, members, float(view.n))
    J, whole = view.in_features, members is not None or view.multiclass == "ovo"  # else rows are shared out
    with threads_for(max(J**3, 2.0 * whole * len(samples) * J**2)):
        if view.rule == "lda":
            return _discriminant_scores(Problem(view), samples, members)
        parts = problems(view)
        if parts[0].pair is None:
            return _scores(parts[0], samples, members)
        scores = _pair_scores(parts, samples, members)
        return PAIR_RULES[pairs](scores, view.num_classes)


def _discriminant_scores(problem: Problem, samples: SampleChange, members: list[Tensor] | None) -> Tensor:
    """Scores (B, K) of the discriminant, each row without its sample or group, at the rho in use."""
    view, labels = problem.view, samples.labels
    assert labels is not None
    out = torch.zeros(len(samples), view.num_classes, dtype=torch.float64, device=view.device)

    def fill(rows: Tensor, weights: Tensor | None, together: bool) -> None:
        system, mean = within_class(view.statistics, view.units, weights, view.standard)
        leave_out = leave_group_out if together else leave_each_out
        t = sample_weights(labels, weights, samples.weight)
        for part in [rows] if together else rows.split(WHITENED_ROWS):
            x = real_rows(view, samples.x[part]) - mean
            out[part] = leave_out(system, x, labels[part], t[part])

    if members is None:
        for rows, weights in problem.kinds(labels, None, samples.weight):
            fill(torch.arange(len(samples), device=view.device) if rows is None else rows, weights, together=False)
        return out
    for rows in members:
        counts = problem.counts.clone()
        counts.index_add_(0, labels[rows], samples.weight[rows], alpha=-1.0)
        fill(rows.to(view.device), problem.class_weights(counts), together=True)
    return out


def _pair_scores(parts: list[Problem], samples: SampleChange, members: list[Tensor] | None) -> Tensor:
    """Scores (B, pairs). Leaving a sample out changes only the scores of the pairs with its class."""
    if members is not None or samples.labels is None:
        return torch.cat([_scores(problem, samples, members) for problem in parts], 1)
    view = parts[0].view
    blocks = [gridded(view, part) @ view.w + view.b for part in samples.x.split(WHITENED_ROWS)]
    out = torch.cat(blocks) if blocks else samples.x.new_zeros(0, len(parts), dtype=torch.float64)
    for i, problem in enumerate(parts):
        rows = (problem.local(samples.labels) >= 0).nonzero()[:, 0]
        mine = SampleChange(samples.x[rows], samples.labels[rows], None, samples.weight[rows], samples.weighted)
        out[rows, i] = _scores(problem, mine, None)[:, 0]
    return out


def check_groups(groups: Any, count: int) -> list[Tensor]:
    """The rows of each group. groups: (B,) numbers, or a list of names."""
    names = groups.tolist() if hasattr(groups, "tolist") else list(groups)
    if len(names) != count:
        raise ValueError(f"x and groups differ in length: {count} rows, {len(names)} groups")
    where: dict[Any, list[int]] = {}
    for i, name in enumerate(names):
        where.setdefault(name, []).append(i)
    return [torch.tensor(rows) for rows in where.values()]


def check_samples_left(samples: SampleChange, members: list[Tensor] | None, total: float) -> None:
    """ValueError if leaving out a sample or group would leave no samples: an empty model gives no scores."""
    if not len(samples):
        return
    if members is not None:
        largest = float(torch.stack([samples.weight[m].sum() for m in members]).max())
    else:
        largest = float(samples.weight.max()) if samples.weighted else 1.0
    if largest >= total * WHOLE_SHARE:
        what = "the only sample" if members is None else "a group that is all there is"
        raise ValueError(f"the head holds {total:g} samples: leaving out {what} leaves nothing to learn from")


def _scores(problem: Problem, samples: SampleChange, members: list[Tensor] | None) -> Tensor:
    """Scores (B, K) or (B, 1) of one problem, each row without its sample or group."""
    view = problem.view
    local = None if samples.labels is None else problem.local(samples.labels)
    y = samples.values if local is None else problem.targets(local)
    assert y is not None
    out = torch.zeros_like(y)
    if members is not None:
        return _group_scores(problem, samples, local, y, members, out)
    checked = _Leverages()
    for rows, system, weights in problem.cases(local, None, samples.weight):
        d = sample_weights(local, weights, samples.weight)
        count = len(samples) if rows is None else len(rows)
        # 256: rows that a thread of the host takes at a time: a megabyte at 512 features stays in its cache
        size = 256 if view.device.type == "cpu" else WHITENED_ROWS

        def fill(
            starts: Iterator[int], rows: Any = rows, system: Whitened = system, d: Tensor = d, size: int = size
        ) -> None:
            for start in starts:
                pick: Any = slice(start, start + size) if rows is None else rows[start : start + size]
                v = system.centred(held_rows(view, samples.x[pick]))
                h = system.leverages(v).mul_(d[pick])
                if problem.pair is not None:
                    h[_alone(problem, d[pick], samples.weight[pick])] = 0.0
                kept = checked.take(h, start if rows is None else pick)
                out[pick] = y[pick] - left_out(y[pick] - system.scores(v), kept)

        with threads_for(2.0 * count * view.in_features**2):
            share_out(fill, range(0, count, size), view.device)
    checked.finish()
    if problem.pair is not None:
        out[_alone(problem, sample_weights(local, None, samples.weight), samples.weight)] = 0.0
    return out


def _alone(problem: Problem, d: Tensor, times: Tensor) -> Tensor:
    """Mask (b,) of samples that are the only ones of a pair: without them its score is 0."""
    return (d > 0) & (times >= problem.total * WHOLE_SHARE)


class _Leverages:
    """Leverages of samples in blocks, checked together at the end: the device is read once."""

    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, Tensor, int | Tensor]] = []

    def take(self, h: Tensor, where: int | Tensor) -> Tensor:
        """Leverages (b,), cut to below 1; checked by :meth:`finish`. where: number of the first sample, or of all (b,)."""
        if len(h):
            self.parts.append((*h.max(0), where))
        return h.clamp(max=1.0 - torch.finfo(h.dtype).eps)

    def finish(self) -> None:
        """Refuse samples that cannot be held, and report lost digits."""
        largest = torch.stack([part[0] for part in self.parts]).tolist() if self.parts else [0.0]
        top = max(largest)
        # 1e-9: share 1 - h of a prediction that does not rest on the sample itself, below which most digits of the score are
        # lost
        if top < 1 - 1e-9:
            return
        _, row, where = self.parts[largest.index(top)]
        # 1e-6: rounding that the leverage of a sample held, at most 1, may have: beyond it the sample is another one
        if top > 1 + 1e-6:
            raise ValueError(
                f"sample {where + int(row) if isinstance(where, int) else int(where[row])} has a leverage of {top:.4g}, more "
                "than 1: it is not among those held. Leave-one-out takes the samples, labels and weights that were added."
            )
        warnings.warn(
            f"a sample determines its own prediction but for {1 - top:.1e}: its leave-one-out score has lost digits. A larger "
            "rho is advised.",
            NumericalWarning,
            stacklevel=2,
        )


def _group_scores(
    problem: Problem, samples: SampleChange, local: Tensor | None, y: Tensor, members: list[Tensor], out: Tensor
) -> Tensor:
    weights = problem.class_weights()
    system = None if problem.follows_counts else problem.main()
    by_size: dict[int, list[Tensor]] = {}
    for rows in members:
        rows = rows.to(samples.x.device)
        if problem.pair is not None and local is not None:
            size = float(samples.weight[rows][local[rows] >= 0].sum())
            if size >= problem.total * WHOLE_SHARE:
                continue  # all that the pair has: its score is 0
        if system is None:  # the group's own balance: a system of its own
            assert local is not None
            counts = problem.counts.clone()
            held = local[rows] >= 0
            counts.index_add_(0, local[rows][held], samples.weight[rows][held], alpha=-1.0)
            own = problem.class_weights(counts)
            d = sample_weights(local, own, samples.weight)
            _block(problem, problem.whitened(own), samples, d, y, rows[None], out)
        else:
            by_size.setdefault(len(rows), []).append(rows)
    if system is not None:
        d = sample_weights(local, weights, samples.weight)
        for size, groups in by_size.items():
            step = max(1, WHITENED_ROWS // size)
            for start in range(0, len(groups), step):
                _block(problem, system, samples, d, y, torch.stack(groups[start : start + step]), out)
    return out


def _block(
    problem: Problem, system: Whitened, samples: SampleChange, d: Tensor, y: Tensor, rows: Tensor, out: Tensor
) -> None:
    """Groups of one size, left out one at a time. rows: (groups, L)."""
    flat = rows.reshape(-1)
    v = system.centred(held_rows(problem.view, samples.x[flat]))
    U = system.rows(v).view(*rows.shape, -1)
    residual = (y[flat] - system.scores(v)).view(*rows.shape, -1)
    error = group_left_out(U, d[flat].view(rows.shape), residual)
    out[flat] = y[flat] - error.reshape(len(flat), -1)
