"""Create heads on some columns of another head's statistics, and choose among columns, scales and values of rho."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks
from torchlssvm.functional.group_elimination import eliminate
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.linear import normal_equations as normal
from torchlssvm.linear.data_choices import ChoiceState
from torchlssvm.linear.diagnostics.rho_selection import RhoPath
from torchlssvm.linear.head import LSSVMHead
from torchlssvm.linear.locking import catch_up, exclusive
from torchlssvm.linear.standardization import standardization


@dataclass(frozen=True)
class Candidate:
    """One combination of columns and scale, with the best rho for it.

    Attributes:
        name: the name of the set of columns.
        columns: (k,) indices of the columns.
        scale: None or "std".
        rho: the value with the least error.
        error: the error at this rho, by the method of the choice.
        seconds: the time it took to judge the candidate.
        path: the errors of all values of rho.
    """

    name: str
    columns: Tensor
    scale: str | None
    rho: float
    error: float
    seconds: float
    path: RhoPath


Chosen = tuple[LSSVMHead, Candidate, list[Candidate]]
"""The chosen head, its candidate, and all candidates."""


class Selection:
    """Result of :func:`select` and :func:`select_groups`: a choice made from the samples that ``source`` holds.

    After the samples of ``source`` have changed, the next read chooses again, so a removed sample affects neither the choice
    nor the chosen head. Change samples in ``source``, not in ``head``.

    Attributes:
        source: the head whose statistics are judged.
    """

    def __init__(self, source: LSSVMHead, choose: Callable[..., Chosen], samples: Mapping[str, Any]):
        self.source, self._choose, self._version = source, choose, -1
        self._made: Chosen
        self.refresh(**samples)

    @property
    def head(self) -> LSSVMHead:
        """A new head with the columns, scale and rho chosen."""
        return self.refresh()._made[0]

    @property
    def best(self) -> Candidate:
        """The candidate with the least error; the first one if errors are equal."""
        return self.refresh()._made[1]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All candidates in the order given, with the candidates of one set of columns together."""
        return tuple(self.refresh()._made[2])

    def refresh(self, **samples: Any) -> Self:
        """Choose again if the samples of ``source`` have changed since. Reading ``head`` does so unless samples are required.

        Pass x, y, weight and ids of the remaining samples if the choice uses ``method="loo"``, or ``"kfold"`` by accuracy.
        """
        catch_up(self.source)
        with self.source._lock, torch.inference_mode(False), torch.no_grad():
            if self._version == self.source._state_version:
                return self
            if self._version >= 0:
                rho = self._made[0].choices.get("rho")
                if rho is not None and rho.state is ChoiceState.STALE:
                    raise ValueError(
                        "the samples of the chosen head were changed: change those of source, which it follows"
                    )
            self._made = self._choose(self.source, **samples)
            self._version = self.source._state_version
        return self

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


def check_head(head: Any) -> None:
    """Raise ValueError for a head whose sums do not hold those of some of its columns."""
    if not isinstance(head, LSSVMHead):
        raise ValueError(f"columns are chosen from the sums of an LSSVMHead, got a {type(head).__name__}")


def row_option(head: LSSVMHead, columns: Tensor) -> str | None:
    """``normalize`` of a head on these columns, given that the length of a row is taken over all columns."""
    whole = columns.tolist() == list(range(head.in_features))
    return head.normalize if whole or head.normalize != "l2" else None


def restrict(head: LSSVMHead, columns: Any) -> LSSVMHead:
    """Return a new head on some of the columns, from the same statistics, as if it had learned only those columns.

    Args:
        head: the head, which does not change.
        columns: (k,) distinct indices, a slice, or a mask (J,). The new head accepts rows of k features in this order.

    With ``normalize="l2"``, rows are divided by the length of the full row, which the new head cannot compute from its
    columns. The new head therefore has ``normalize=None`` and expects columns of rows that you have normalized (float64):
    ``torchlssvm.functional.row_normalization.normalized(x, "l2")[:, columns]``.

    >>> import torch
    >>> from torchlssvm import LSSVMHead
    >>> x, y = torch.randn(40, 6), torch.arange(40) % 2
    >>> head = LSSVMHead(6, 2).add(x, y)
    >>> part = restrict(head, [4, 1])
    >>> part.digest() == LSSVMHead(2, 2, grid=head.grid).add(x[:, [4, 1]], y).digest()
    True
    """
    check_head(head)
    out = with_columns(head, check_columns(columns, head.in_features, head.device), head.scale)
    out._choices.made |= {name: choice for name, choice in head._choices.made.items() if name == "rho"}
    return out


@exclusive
def with_columns(head: LSSVMHead, /, columns: Tensor, scale: str | None, rho: float | None = None) -> LSSVMHead:
    """Return a new head on checked columns (k,), with a scale and, if given, a rho of its own."""
    normalize = row_option(head, columns)
    config = head.config() | {"in_features": len(columns), "normalize": normalize, "scale": scale}
    out = type(head).from_config(config if rho is None else config | {"rho": rho}, device=head.device)
    sums = head.statistics.restricted(columns, normalize, scale)
    if not sums.empty:
        out._hold(sums, None, None)
        out._mark_uncertifiable(head.uncertifiable)
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
    """Choose columns, scale and rho from one set of statistics, and create a new head with them.

    Args:
        head: the head whose statistics are used. It does not change.
        columns: a list of candidates, each in the form that :func:`restrict` accepts, or a dict of candidates by name, such as
            the layers of a network. Default: all columns.
        rho: values > 0 to try for each candidate. Default: 100 values around the scale of the data.
        scale: a list of candidates out of None and ``"std"``. Default: the scale of the head.
        method: ``"gcv"``, ``"loo"`` or ``"kfold"``, as for :meth:`torchlssvm.LSSVMHead.select_rho`.
        x: (n, J), as added. Required for ``"loo"``, and for ``"kfold"`` by accuracy.
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
    check_head(head)
    parts = named_columns(columns, head.in_features, head.device)
    scales: list[str | None] = [head.scale] if scale is None else [scale] if isinstance(scale, str) else list(scale)
    if not scales:
        raise ValueError("scale is empty: give one or more of None and 'std', or None for the head's own")
    for one in scales:
        checks.one_of(one, "scale", (None, "std"))
    choose = partial(best_of_all, parts=parts, scales=scales, rho=rho, method=method, score=score)
    return Selection(head, choose, {"x": x, "y": y, "weight": weight, "ids": ids})


def best_of_all(
    head: LSSVMHead, parts: dict[str, Tensor], scales: list[str | None], rho: Any, method: str, score: str, **samples: Any
) -> Chosen:  # fmt: skip
    """The choice of :func:`select`."""
    judged = []
    for name, numbers in parts.items():
        for one in scales:
            judged.append(judge(head, name, numbers, one, rho, method, score, samples))
    best = min(judged, key=lambda c: c.error)
    return chosen_head(head, best, method, len(parts), len(scales)), best, judged


def judge(
    head: LSSVMHead, name: str, columns: Tensor, scale: str | None, rho: Any, method: str, score: str,
    samples: dict[str, Any],
) -> Candidate:  # fmt: skip
    """The best rho for these columns (k,). samples: x, y, weight and ids, as added."""
    start = time.perf_counter()
    if samples.get("x") is not None:
        samples = samples | {"x": restricted_rows(head, columns, samples["x"])}
    path = with_columns(head, columns, scale).select_rho(rho, method, **samples, score=score, apply=False)
    error = float(path.errors[path.rhos == path.rho].amin())
    return Candidate(name, columns, scale, path.rho, error, time.perf_counter() - start, path)


def chosen_head(head: LSSVMHead, best: Candidate, method: str, sets: int, scales: int = 1) -> LSSVMHead:
    """A new head with the columns, scale and rho of a candidate, chosen among this number of sets and scales."""
    out = with_columns(head, best.columns, best.scale, best.rho)
    choices = out._choices
    choices.record("rho", best.path.method, len(best.path.rhos))
    for name, count, value in (("columns", sets, best.name), ("scale", scales, str(best.scale))):
        if count > 1:
            choices.record(name, method, count, value)
    return out


def select_groups(
    head: LSSVMHead, groups: Mapping[str, Any], rho: float | None = None, method: str = "gcv", *, score: str = "squared",
    **samples: Any,
) -> Selection:  # fmt: skip
    """Drop groups of columns, such as the layers of a network, one after the other; keep the set with the least GCV.

    All sets are compared at one rho, with one factor and its inverse (:mod:`torchlssvm.functional.group_elimination`). The
    comparison is therefore fast: all steps together take less than three times as long as the factor and inverse, for any
    number of samples. Afterwards rho is chosen for the set that is kept.

    Args:
        head: the head whose statistics are used, one-vs-rest or with float targets. It does not change.
        groups: columns by name, in the form that :func:`restrict` accepts, e.g. ``groups`` of
            :class:`~torchlssvm.features.LayerTaps`. A column may be in at most one group. Columns in no group are always kept.
        rho: the value at which sets are compared. Default: the rho of the head. A head with ``rho="gcv"`` that has not chosen
            yet first chooses rho for all columns. Pass a number if that takes too long.
        method: how to choose rho for the set that is kept: ``"gcv"``, ``"loo"`` or ``"kfold"``.
        score: ``"squared"`` or ``"accuracy"``, for the choice of rho.
        samples: x, y, weight and ids for the choice of rho, as for :func:`select`.

    ``candidates`` of the result are the sets from all groups down to one, each with the error at the common rho. Only the set
    that is kept has its own rho and the error at that rho.

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
    >>> found.head.n  # chosen again, without them
    55
    """
    check_head(head)
    if head.multiclass == "ovo" or (head.targets == "multilabel" and head.class_weight is not None):
        raise ValueError(
            "select_groups works on one shared system: use multiclass='ovr', and no class_weight for several labels"
        )
    parts = named_columns(groups, head.in_features, head.device)
    every = torch.cat(list(parts.values()))
    if len(every.unique()) < len(every):
        raise ValueError("groups hold a column twice: each column may be in one group")
    value = None if rho is None else checks.positive(rho, "rho")
    choose = partial(best_by_elimination, parts=parts, rho=value, method=method, score=score)
    return Selection(head, choose, samples)


def best_by_elimination(
    head: LSSVMHead, parts: dict[str, Tensor], rho: float | None, method: str, score: str, **samples: Any
) -> Chosen:  # fmt: skip
    """The choice of :func:`select_groups`."""
    start, stats = time.perf_counter(), head.statistics
    if stats.empty:
        raise NotFittedError("the head holds no samples: call add(x, y) first")
    value = current_rho(head) if rho is None else rho
    weights = normal.class_weights(head.class_weight, stats.counts.to(torch.float64))
    units = normal.Units.of(stats.choices, value)
    m = normal.moments(stats, units, head.intercept, weights, standard=standardization(stats))
    steps = eliminate(m.G, m.rhs, float(m.T.mean()), list(parts.values()), value, float(stats.n), bool(m.weight))
    seconds, names, candidates = (time.perf_counter() - start) / len(steps), list(parts), []
    for kept, error in steps:
        stays = torch.ones(head.in_features, dtype=torch.bool, device=head.device)
        for i, name in enumerate(names):
            stays[parts[name]] = i in kept
        path = RhoPath(value, torch.tensor([value]), torch.tensor([error]), None, "gcv")
        name = " ".join(names[i] for i in kept) if len(kept) < len(names) else "all"
        candidates.append(Candidate(name, stays.nonzero()[:, 0], head.scale, value, error, seconds, path))
    at = min(range(len(candidates)), key=lambda i: candidates[i].error)
    best = judge(head, candidates[at].name, candidates[at].columns, head.scale, None, method, score, samples)
    candidates[at] = best
    return chosen_head(head, best, "gcv", len(candidates)), best, candidates


def current_rho(head: LSSVMHead) -> float:
    """Return the rho of a head. If a rule chose rho for other samples, choose it for the current samples."""
    chosen = head.choices.get("rho")
    stale = chosen is not None and chosen.rule and chosen.state is ChoiceState.STALE
    return head._best_rho() or 1.0 if stale else head.rho


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
