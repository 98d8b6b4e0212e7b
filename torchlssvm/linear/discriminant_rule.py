"""``rule="lda"``: the linear discriminant of a head's samples, from the statistics that the head keeps anyway.

The discriminant needs only the within-class scatter and the class means, which the sums of a least-squares head already
contain. Adding, removing, merging and the digest are therefore the same as for least squares, and only the solve differs. See
:mod:`torchlssvm.functional.discriminant`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchlssvm.functional import checks, discriminant
from torchlssvm.functional.discriminant import WithinClass
from torchlssvm.functional.modes import all_or_nothing
from torchlssvm.functional.system import Centre
from torchlssvm.linear import normal_equations as normal
from torchlssvm.linear.data_choices import ChoiceState
from torchlssvm.linear.standardization import Standardization
from torchlssvm.statistics import Statistics

if TYPE_CHECKING:
    from torchlssvm.linear.linear_head import LinearHead

RULES = ("least_squares", "lda", "auto")

COLUMNS_PER_CLASS = 100
"""Features per class up to which ``rule="auto"`` uses the discriminant. The accuracy of the discriminant minus that of least
squares was measured with rho by GCV, in points: Banking77 (5 features per class) +2.2, digits (6) +1.3, CIFAR-100 (13) +1.0,
MNIST pixels (78) +1.6, CIFAR-10 (128) -0.2."""

JUDGED_ROWS, LEAST_ROWS = 2000, 10
"""Number of evenly spread samples that are left out to choose the rule, and the fewest samples a head must hold for the choice.
With 2,000 samples the difference of two accuracies is known to about half a point."""


MANY_CLASSES, FEATURES_PER_CLASS = 20, 10
"""With this many classes and fewer than this many features per class, least squares against the rest can mask classes, which
means that it rarely predicts them. See docs/benchmarks/random_features.md."""

LIFTED_FEATURES = 2000
"""The number of random features that the warning suggests, and that are used to find label errors."""


def is_masked(classes: int, features: int) -> bool:
    """True if least squares of one class against the rest is likely to lose accuracy."""
    return classes >= MANY_CLASSES and features < FEATURES_PER_CLASS * classes


def check_rule(rule: str, multiclass: str, intercept: str) -> str:
    """A rule that goes with these options of a head."""
    checks.one_of(rule, "rule", RULES)
    if rule != "least_squares" and (multiclass == "ovo" or intercept != "free"):
        raise ValueError(f"rule={rule!r} needs multiclass='ovr' and intercept='free'")
    return rule


def resolve_rule(rule: str, stats: Statistics) -> str:
    """The rule in use: ``"auto"`` is ``"lda"`` for labels of three or more classes and at most 100 features per class."""
    if rule != "auto":
        return rule
    K, J = stats.num_classes, stats.in_features
    few = K >= 3 and J <= COLUMNS_PER_CLASS * K
    return "lda" if few and stats.kind != "values" and stats.targets is None else "least_squares"


class ClassMeans(NamedTuple):
    """Class means and the diagonal of the within-class scatter, in real units or, where asked for, standardised.

    Attributes:
        M: class means minus the mean of all (K, J).
        m: the mean of all (J,).
        counts: samples by class times their class weight (K,).
        diagonal: of S_w (J,).
    """

    M: Tensor
    m: Tensor
    counts: Tensor
    diagonal: Tensor


def class_means(stats: Statistics, weights: Tensor | None) -> ClassMeans:
    """Class means of the current samples, in real units. weights: (K,) by class, for statistics per class.

    All sums are taken about the integer c nearest to the mean, which avoids cancellation.
    """
    V, n = stats.class_sums()  # (K, J), (K,), in steps
    c = Centre.of(V.sum(0), n.sum()).c
    s = (V - n[:, None] * c).to(torch.float64)  # sums of q - c by class
    per_class = weights if weights is not None else torch.ones_like(n, dtype=torch.float64)
    count = n.to(torch.float64)
    held = count > (0.0 if stats.exact else 1e-9 * float(count.sum()))  # float sums of an emptied class may not be zero
    counts = torch.where(held, per_class * count, torch.zeros_like(count))
    offset = torch.where(
        held[:, None], s / torch.where(held, count, torch.ones_like(count))[:, None], torch.zeros_like(s)
    )
    mean = counts @ offset / counts.sum()
    if weights is None:
        squares = (stats.diagonal().sum(0) - c * (2 * V.sum(0) - n.sum() * c)).to(torch.float64)
    else:
        by_class = stats.diagonal().view(-1, len(n), V.shape[1]).sum(0)  # folds are added up
        squares = weights @ (by_class - c * (2 * V - n[:, None] * c)).to(torch.float64)
    diagonal = squares - (counts[:, None] * offset.square()).sum(0)
    unit = stats.grid.resolution if stats.grid else 1.0
    return ClassMeans((offset - mean) * unit, (c + mean) * unit, counts, diagonal.clamp(min=0.0) * unit**2)


def discriminant_weights(
    stats: Statistics, rho: float, weights: Tensor | None, standard: Standardization | None, W: Tensor
) -> tuple[Tensor, Tensor]:
    """w (J, K) and b (K,) of the discriminant, from the weights W (J, K) of least squares for features as they come."""
    means = class_means(stats, weights)
    diagonal = means.diagonal
    if standard is not None:
        diagonal = diagonal / (standard.deviation * standard.resolution).square()
    w, b, error = discriminant.discriminant(W, means.M, means.m, means.counts, diagonal.sum(), rho)
    if not float(error) < 1e-6:  # the scatter within classes has fewer directions than features, beside a tiny rho
        normal.warn_small_rho(rho, float(error))
    return w, b


def within_class(
    stats: Statistics, units: normal.Units, weights: Tensor | None, standard: Standardization | None
) -> tuple[WithinClass, Tensor]:
    """The system from which samples are left out, and the mean (J,) on which its rows are centred."""
    moments = normal.moments(stats, units, "free", weights, standard=standard)
    means = class_means(stats, weights)
    M = means.M if standard is None else means.M / (standard.deviation * standard.resolution)
    S = moments.G - (M.mT * means.counts) @ M
    return discriminant.within_class(S, M, means.counts, units.rho), moments.mu


def has_open_rule(head: LinearHead) -> bool:
    """True if the rule is ``"auto"`` and not yet chosen for the current samples."""
    made = head._choices.made.get("rule")
    return head.config().get("rule") == "auto" if made is None else made.rule and made.state is not ChoiceState.CURRENT


def choose_rule(head: LinearHead, batches: Callable[[], Iterable[tuple[Any, Any, Any]]]) -> str:
    """Choose the rule of a head with ``rule="auto"`` by leave-one-out accuracy, and return it. A tie selects the discriminant.

    The rule in use stays if the samples have not changed, if there are fewer than three classes or more than 100 features per
    class, if class weights depend on the class counts, or if there are fewer than 10 samples.

    Args:
        head: the head. Afterwards ``choices["rule"]`` reports the choice.
        batches: function that yields all current samples: x (B, J), y (B,) and weight (B,) or None.
    """
    stats = head.statistics
    judged = stats.n >= LEAST_ROWS and not isinstance(head.class_weight, str) and resolve_rule("auto", stats) == "lda"
    if not judged or not has_open_rule(head):
        return head.rule
    before, step, right = head.config()["rule"], max(1, int(stats.n) // JUDGED_ROWS), dict[str, float]()
    with all_or_nothing(head, lambda: head._set_rule(before)):
        for rule in ("lda", "least_squares"):
            head._set_rule(rule)
            right[rule] = 0.0
            for x, y, weight in batches():
                x, y, weight = x[::step], y[::step], None if weight is None else weight[::step]
                hits = (head.leave_one_out(x, y, weight).argmax(1) == torch.as_tensor(y, device=head.device)).double()
                right[rule] += float(hits.sum() if weight is None else hits @ torch.as_tensor(weight).to(hits))
    best = max(right, key=lambda rule: right[rule])  # the first of equal ones
    head._set_rule(best)
    head._choices.record("rule", "loo", len(right), best, rule=True)
    return best
