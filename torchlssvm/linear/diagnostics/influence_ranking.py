"""The samples that help a model most, and those that harm it most, by their exact influence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.linear.diagnostics.influence import influence
from torchlssvm.linear.diagnostics.whitened_problems import HeadView

GOOD_SIGN = {
    ("remove", "loss"): 1.0, ("remove", "accuracy"): -1.0, ("relabel", "loss"): 1.0, ("relabel", "accuracy"): -1.0,
    ("add", "loss"): -1.0, ("add", "accuracy"): 1.0,
}  # fmt: skip
"""Sign that marks a sample as helpful, for each kind of change and measure: e.g. the loss rises when it is removed."""


@dataclass(frozen=True)
class Influential:
    """Samples (or groups) at both ends of the ranking, the strongest first.

    Attributes:
        helpful, harmful: row numbers (or numbers of groups, in the order in which they first appear), ``count`` at most:
            without the helpful ones the model would be worse, without the harmful ones better.
        help, harm: for each, how much: the change of loss or accuracy, as a number > 0.
        helpful_ids, harmful_ids: their ids (or the names of the groups), where these were given.
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
    """Both ends of the ranking. change: (n,); equal ones in the order of their rows."""
    good = GOOD_SIGN[what, on] * change
    ends, amounts = [], []
    for value in (good, -good):
        order = value.argsort(descending=True, stable=True)[:count]
        order = order[value[order] > 0]
        ends.append(order)
        amounts.append(value[order])
    called = [None if names is None else tuple(names[i] for i in end.tolist()) for end in ends]
    return Influential(ends[0], ends[1], amounts[0], amounts[1], called[0], called[1], change)


def most_influential(
    view: HeadView, x: Any, y: Any, x_val: Any, y_val: Any, count: int, what: str, on: str, ids: Any, y_new: Any,
    weight: Any, groups: Any,
) -> Influential:  # fmt: skip
    """Both ends of the ranking by exact influence; see :meth:`torchlssvm.LSSVMHead.most_influential`."""
    check_ranking(what, on, count)
    names = names_of(ids, groups, len(x))
    return rank(influence(view, x, y, x_val, y_val, what, on, y_new, weight, groups), what, on, count, names)
