"""Heads on some columns of another head's statistics, and the choice among columns, scales and values of rho."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.group_elimination import eliminate
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.linear import normal_equations as normal
from torchlssvm.linear.diagnostics.rho_selection import RhoPath
from torchlssvm.linear.pending import Pending
from torchlssvm.linear.solvers import make_solver
from torchlssvm.linear.standardization import standardization
from torchlssvm.statistics.statistics import SCALES

if TYPE_CHECKING:
    from torchlssvm.linear.head import LSSVMHead

UNKNOWN_ROWS = "its sums are those of some columns of another head, which keeps no fingerprints of parts of rows"
"""Reason why removals from a restricted head are not checked against the rows held."""


@dataclass(frozen=True)
class Candidate:
    """One combination of columns and scale, with the best rho for it.

    Attributes:
        name: of the columns.
        columns: (k,), their numbers.
        scale: None or "std".
        rho: the value with the least error.
        error: that error, by the method of the choice.
        seconds: the time it took to judge the candidate.
        path: errors of all values of rho.
    """

    name: str
    columns: Tensor
    scale: str | None
    rho: float
    error: float
    seconds: float
    path: RhoPath


@dataclass(frozen=True)
class Selection:
    """Result of :func:`select` and :func:`select_groups`.

    Attributes:
        head: a new head with the columns, scale and rho chosen.
        best: the chosen candidate, which has the least error. Of candidates with equal errors it is the first.
        candidates: all candidates in the order given, with the candidates of one set of columns together.
        source: the head whose statistics were judged.
    """

    head: LSSVMHead
    best: Candidate
    candidates: tuple[Candidate, ...]
    source: LSSVMHead
    _again: Callable[..., Selection]
    _version: int

    @property
    def outdated(self) -> bool:
        """True if the samples of ``source`` have changed since the choice."""
        return self.source._state_version != self._version

    def refresh(self, **samples: Any) -> Selection:
        """Choose again from the samples that ``source`` holds now, so that removed samples no longer affect the choice.

        Returns itself if nothing has changed. ``samples``: x, y, weight and ids of the samples left, for ``method="loo"``.
        """
        return self._again(**samples) if self.outdated else self

    def __str__(self) -> str:
        lines = [f"{'columns':24} {'scale':6} {'rho':>10} {'error':>10} {'seconds':>8}"]
        for c in self.candidates:
            mark = " *" if c is self.best else ""
            lines.append(f"{c.name:24} {c.scale!s:6} {c.rho:10.4g} {c.error:10.6g} {c.seconds:8.3f}{mark}")
        return "\n".join(lines)


def check_columns(columns: Any, J: int, device: torch.device) -> Tensor:
    """Numbers (k,) of columns, each once, from numbers, a slice or a mask (J,)."""
    if isinstance(columns, slice):
        columns = range(J)[columns]
    given = checks.as_tensor(list(columns) if isinstance(columns, range) else columns, "columns", device)
    if given.dtype == torch.bool:
        if given.shape != (J,):
            raise ValueError(f"a mask of columns must have shape ({J},), got {tuple(given.shape)}")
        given = given.nonzero()[:, 0]
    if given.ndim != 1 or not len(given) or given.dtype not in checks.INTEGER_DTYPES:
        raise ValueError(f"columns must be one or more integers, a slice or a mask ({J},); got {columns!r}")
    numbers = given.tolist()
    bad = next((c for c in numbers if not 0 <= c < J), None)
    if bad is not None:
        raise ValueError(f"columns holds {bad}, outside 0..{J - 1} (in_features={J})")
    if len(set(numbers)) < len(numbers):
        raise ValueError("columns holds a column twice: name each once")
    return given.to(torch.int64)


def row_option(head: LSSVMHead, columns: Tensor) -> str | None:
    """``normalize`` of a head on these columns, given that the length of a row is taken over all columns."""
    whole = columns.tolist() == list(range(head.in_features))
    return head.normalize if whole or head.normalize != "l2" else None


def restrict(head: LSSVMHead, columns: Any) -> LSSVMHead:
    """Return a new head on some of the columns, from the same statistics, as if it had learned only those columns.

    Args:
        head: the head, which stays as it is.
        columns: (k,) numbers, each once; a slice; or a mask (J,).

    The new head accepts rows of k features, in the order given. With ``normalize="l2"`` rows were divided by the length of the
    full row, which the new head cannot know. It therefore has ``normalize=None`` and expects columns of normalized rows,
    ``torchlssvm.functional.row_normalization.normalized(x, "l2")[:, columns]`` (float64).

    >>> import torch
    >>> from torchlssvm import LSSVMHead
    >>> x, y = torch.randn(40, 6), torch.arange(40) % 2
    >>> head = LSSVMHead(6, 2).add(x, y)
    >>> part = restrict(head, [4, 1])
    >>> part.digest() == LSSVMHead(2, 2, grid=head.grid).add(x[:, [4, 1]], y).digest()
    True
    """
    with head._lock, torch.inference_mode(False), torch.no_grad():
        return with_columns(head, check_columns(columns, head.in_features, head.device), head.scale)


def with_columns(head: LSSVMHead, columns: Tensor, scale: str | None) -> LSSVMHead:
    """Return a new head on checked columns (k,), with a scale of its own."""
    stats = head.statistics
    normalize = row_option(head, columns)
    config = head.config() | {"in_features": len(columns), "normalize": normalize, "scale": scale}
    out = type(head).from_config(config, device=head.device)
    sums = stats.restricted(columns, normalize, scale)
    if not sums.empty:
        out._rows.drop(UNKNOWN_ROWS)
        solver = make_solver(sums, out._solver.options, out.multiclass)
        out._replace_parts(sums, solver, Pending(sums, out._rows), head.uncertifiable)
    if "rho" in head._choices.made:
        out._choices.made["rho"] = head._choices.made["rho"]
    return out


def restricted_rows(head: LSSVMHead, columns: Tensor, x: Any) -> Tensor:
    """Rows (B, k) in the form that the head on these columns accepts. x: (B, J), as added."""
    rows = checks.features(x, head.in_features, head.device)
    if row_option(head, columns) != head.normalize:
        rows = normalized(rows.to(torch.float64), head.normalize)
    return rows[:, columns]


def select(
    head: LSSVMHead, columns: Any = None, rho: Any = None, scale: Any = None, method: str = "gcv", x: Any = None,
    y: Any = None, *, weight: Any = None, ids: Any = None, score: str = "squared",
) -> Selection:  # fmt: skip
    """Choose columns, scale and rho from one set of statistics. The head does not change; the result has a new head.

    Args:
        head: the head whose statistics are judged.
        columns: the candidates: a list of columns in the form that :func:`restrict` accepts, or a dict by name (such as the
            layers of a network). None means all columns.
        rho: values > 0. None tries 100 values around the scale of the data for each candidate.
        scale: the candidates, out of None and ``"std"``. None uses the scale of the head.
        method: ``"gcv"``, ``"loo"`` or ``"kfold"``, as for :meth:`torchlssvm.LSSVMHead.select_rho`.
        x: (n, J), as added; for "loo", and for "kfold" by accuracy.
        y: (n,) or (n, K), as added.
        weight: (n,), as added.
        ids: (n,), as added.
        score: ``"squared"`` or ``"accuracy"``.

    >>> import torch
    >>> from torchlssvm import LSSVMHead
    >>> x, y = torch.randn(60, 6), torch.arange(60) % 2
    >>> x[:, 3] += 3 * y
    >>> found = select(LSSVMHead(6, 2).add(x, y), {"left": [0, 1, 2], "right": [3, 4, 5]}, scale=(None, "std"))
    >>> found.best.name, len(found.candidates), found.head.in_features
    ('right', 4, 3)
    """
    again = partial(select, head, columns, rho, scale, method, score=score)
    samples = {"x": x, "y": y, "weight": weight, "ids": ids}
    with head._lock, torch.inference_mode(False), torch.no_grad():
        return _select(head, columns, rho, scale, method, score, samples, again)


def _select(
    head: LSSVMHead, columns: Any, rho: Any, scale: Any, method: str, score: str, samples: dict[str, Any],
    again: Callable[..., Selection],
) -> Selection:  # fmt: skip
    parts = named_columns(columns, head.in_features, head.device)
    scales = [head.scale] if scale is None else [scale] if isinstance(scale, str) else list(scale)
    if not scales:
        raise ValueError("scale is empty: give one or more of None and 'std', or None for the head's own")
    for one in scales:
        checks.one_of(one, "scale", SCALES)
    if head.n == 0:
        head._view()  # raises if there is nothing to choose by
    judged = []
    for name, numbers in parts.items():
        for one in scales:
            judged.append(judge(head, name, numbers, one, rho, method, score, samples))
    best = min(judged, key=lambda c: c.error)
    out = chosen_head(head, best)
    if len(parts) > 1:
        out._choices.record("columns", method, len(parts), best.name)
    if len(scales) > 1:
        out._choices.record("scale", method, len(scales), str(best.scale))
    return Selection(out, best, tuple(judged), head, again, head._state_version)


def judge(
    head: LSSVMHead, name: str, columns: Tensor, scale: str | None, rho: Any, method: str, score: str,
    samples: dict[str, Any],
) -> Candidate:  # fmt: skip
    """The best rho for these columns (k,), by one eigendecomposition. samples: x, y, weight and ids, as added."""
    start = time.perf_counter()
    if samples.get("x") is not None:
        samples = samples | {"x": restricted_rows(head, columns, samples["x"])}
    part = with_columns(head, columns, scale)
    part._choices.made.pop("rho", None)  # otherwise an open rho would be chosen by another eigendecomposition
    path = part.select_rho(rho, method, **samples, score=score, apply=False)
    error = float(path.errors[path.rhos == path.rho].amin())
    return Candidate(name, columns, scale, path.rho, error, time.perf_counter() - start, path)


def chosen_head(head: LSSVMHead, best: Candidate) -> LSSVMHead:
    """A new head with the columns, scale and rho of a candidate."""
    out = with_columns(head, best.columns, best.scale)
    out.rho = best.rho
    out._choices.record("rho", best.path.method, len(best.path.rhos))
    return out


def select_groups(
    head: LSSVMHead, groups: Mapping[str, Any], rho: float | None = None, method: str = "gcv", *, score: str = "squared",
    **samples: Any,
) -> Selection:  # fmt: skip
    """Drop groups of columns, such as the layers of a network, one after the other; keep the set with the least GCV.

    All sets are compared at one rho, with one factor and its inverse (:mod:`torchlssvm.functional.group_elimination`). All
    steps together cost less than three times the factor and inverse, for any number of samples. Afterwards rho is chosen for
    the set that is kept.

    Args:
        head: the head whose statistics are judged, one-vs-rest or with float targets; it stays as it is.
        groups: columns by name, in the form that :func:`restrict` accepts, e.g. ``groups`` of
            :class:`~torchlssvm.features.LayerTaps`. A column may be in at most one group. Columns in no group are always kept.
        rho: the value at which sets are compared. None uses the rho of the head. A head with ``rho="gcv"`` that has not chosen
            yet first chooses rho by an eigendecomposition of all columns. Give a number if that takes too long.
        method: how rho is chosen for the set kept: ``"gcv"``, ``"loo"`` or ``"kfold"``.
        score: ``"squared"`` or ``"accuracy"``, for that choice.
        samples: x, y, weight and ids for that choice, as for :func:`select`.

    ``candidates`` are the sets from all groups down to one, each with its error at the common rho. The set that is kept has
    instead the rho that was chosen for it and the error at that rho.

    >>> import torch
    >>> from torchlssvm import LSSVMHead
    >>> _ = torch.manual_seed(0)
    >>> x, y = torch.randn(60, 6), torch.arange(60) % 2
    >>> x[:, 3] += 3 * y
    >>> head = LSSVMHead(6, 2).add(x, y)
    >>> found = select_groups(head, {"left": [0, 1, 2], "right": [3, 4, 5]})
    >>> found.best.name, found.head.in_features
    ('right', 3)
    >>> _ = head.remove(x[:5], y[:5])
    >>> found.refresh().head.n  # chosen again, without them
    55
    """
    again = partial(select_groups, head, groups, rho, method, score=score)
    with head._lock, torch.inference_mode(False), torch.no_grad():
        if head.multiclass == "ovo":
            raise ValueError("select_groups works on one shared system: use multiclass='ovr'")
        parts = named_columns(groups, head.in_features, head.device)
        every = torch.cat(list(parts.values()))
        if len(every.unique()) < len(every):
            raise ValueError("groups hold a column twice: each column may be in one group")
        start = time.perf_counter()
        if head.n == 0:
            head._view()  # raises if there is nothing to choose by
        value, stats = head.rho if rho is None else checks.positive(rho, "rho"), head.statistics
        weights = normal.class_weights(head.class_weight, stats.counts.to(torch.float64))
        standard = standardization(stats) if stats.scale else None
        units = normal.Units.of(stats.choices, value)
        m = normal.moments(stats, units, head.intercept, weights, standard=standard)
        steps = eliminate(m.G, m.rhs, float(m.T.mean()), list(parts.values()), value, float(stats.n), bool(m.weight))
        seconds, names, candidates = time.perf_counter() - start, list(parts), []
        for kept, error in steps:
            stays = torch.ones(head.in_features, dtype=torch.bool, device=head.device)
            for name in names:
                stays[parts[name]] = name in {names[i] for i in kept}
            path = RhoPath(value, torch.tensor([value]), torch.tensor([error]), None, "gcv")
            name = " ".join(names[i] for i in kept) if len(kept) < len(names) else "all"
            columns = stays.nonzero()[:, 0]
            candidates.append(Candidate(name, columns, head.scale, value, error, seconds / len(steps), path))
        at = min(range(len(candidates)), key=lambda i: candidates[i].error)
        best = judge(head, candidates[at].name, candidates[at].columns, head.scale, None, method, score, samples)
        candidates[at] = best
        out = chosen_head(head, best)
        out._choices.record("columns", "gcv", len(candidates), best.name)
        return Selection(out, best, tuple(candidates), head, again, head._state_version)


def named_columns(columns: Any, J: int, device: torch.device) -> dict[str, Tensor]:
    """Candidates by name, from a mapping or a list of columns; None in it, or instead of it, is all columns."""
    everything = range(J)
    if columns is None:
        return {"all": check_columns(everything, J, device)}
    if isinstance(columns, Mapping):
        named = {str(name): part for name, part in columns.items()}
    elif isinstance(columns, Sequence) and not isinstance(columns, str | range):
        if columns and all(isinstance(part, int) for part in columns):
            raise ValueError(f"columns is a list of candidates, each with columns of its own: [{list(columns)!r}, ...]")
        named = {"all" if part is None else f"columns[{i}]": part for i, part in enumerate(columns)}
    else:
        raise ValueError(f"columns must be a list of candidates, or a dict by name; got {type(columns).__name__}")
    if not named:
        raise ValueError("columns is empty: give at least one candidate, or None for all columns")
    return {name: check_columns(everything if part is None else part, J, device) for name, part in named.items()}
