"""Find labels that are probably wrong by their leave-one-out margins, and propose corrections as events.

A sample is suspicious if a model trained without it predicts another class. You need to choose neither a threshold nor folds
to get the ranking. To use cleanlab as well, pass it ``pred_probs``, the out-of-sample probabilities in the form that it
expects.

>>> import torch
>>> from torchlssvm import LSSVMHead
>>> _ = torch.manual_seed(0)
>>> y = torch.arange(200) % 3
>>> x = torch.randn(200, 8) + 6 * torch.nn.functional.one_hot(y, 8)
>>> given = y.clone()
>>> given[7] = (given[7] + 1) % 3  # a wrong label
>>> found = find_label_errors(LSSVMHead(8, 3).add(x, given), x, given, ids=[f"s{i}" for i in range(200)])
>>> int(found.order[0]), int(found.proposed[7]) == int(y[7])
(7, True)
>>> found.events(1)[0].ids
('s7',)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchlssvm.events import Relabel
from torchlssvm.features import RandomReLU
from torchlssvm.functional import checks
from torchlssvm.functional.modes import exactly
from torchlssvm.functional.whitened import margins
from torchlssvm.linear import LSSVMHead
from torchlssvm.linear.attach import AttachedClassifier
from torchlssvm.linear.diagnostics.calibration import fit
from torchlssvm.linear.linear_head import targets_of

__all__ = ["LabelErrors", "LabelPairErrors", "find_label_errors", "from_scores"]


@dataclass(frozen=True)
class LabelErrors:
    """Samples ranked by how strongly a model trained without them disagrees with their label.

    Attributes:
        labels: the given labels (n,). scores: leave-one-out scores (n, K). ids: ids of the samples, or None.
        margins: the score of the label minus the best other score (n,). A negative margin means that the model prefers another
            class.
        order: positions of all samples (n,), the most suspicious first; ``ids[i]`` is the id of position i.
        proposed: the class that the model prefers (n,).
        pred_probs: calibrated out-of-sample probabilities (n, K), as the numpy array that cleanlab expects.
        classes: the names of the classes, or None.
    """

    labels: Tensor
    scores: Tensor
    margins: Tensor
    order: Tensor
    proposed: Tensor
    pred_probs: NDArray[np.float64]
    ids: tuple[str, ...] | None = None
    classes: tuple[Any, ...] | None = None

    def __repr__(self) -> str:
        """The five most suspicious samples."""
        named = [(i if self.ids is None else self.ids[i], *rest) for i, *rest in self.names(5)]
        lines = [f"  {self._sentence(*row)}" for row in named]
        more = len(self.suspects) - len(named)
        lines += [f"  and {more} more"] if more > 0 else []
        title = f"{type(self).__name__}: {len(self.suspects)} of {len(self.order)} {self._ranked} are suspicious"
        return "\n".join([title, *lines])

    _ranked = "samples"

    def _sentence(self, name: Any, given: Any, better: Any) -> str:
        return f"{name}: labelled {given}, the model proposes {better}"

    @property
    def suspects(self) -> Tensor:
        """The samples whose label the model would change, the most suspicious first."""
        return self.order[self.margins[self.order] < 0]

    def names(self, count: int | None = None) -> list[tuple[int, Any, Any]]:
        """The most suspicious samples as (position, given label, proposed class), with class names if there are any."""
        classes = range(self.scores.shape[1]) if self.classes is None else self.classes
        rows = self.suspects[:count].tolist()
        return [(i, classes[int(self.labels[i])], classes[int(self.proposed[i])]) for i in rows]

    def events(self, count: int | None = None) -> list[Relabel]:
        """Propose new labels for the most suspicious samples, one event each. Review the events before you apply them.

        Returns at most ``count`` events, and fewer if fewer samples are suspicious. A store refuses an event if the label was
        changed since.
        """
        if self.ids is None:
            raise ValueError("events need ids: find_label_errors(head, x, y, ids=...)")
        return [
            Relabel(ids=[self.ids[i]], y=[int(self.proposed[i])], y_old=[int(self.labels[i])])
            for i in self.suspects[:count].tolist()
        ]


@dataclass(frozen=True, repr=False)
class LabelPairErrors(LabelErrors):
    """Pairs of a sample and a label (``targets="multilabel"``), ranked by how strongly a model without the sample disagrees.

    Attributes:
        labels: the given labels (n, K), bool. scores: leave-one-out scores (n, K). ids: ids of the samples, or None.
        margins: the score of each label (n, K), with the sign changed if the sample does not have the label.
        order: all pairs (n K, 2) of row and label, the most suspicious first. proposed: labels by the model (n, K), bool.
        pred_probs: calibrated out-of-sample probabilities (n, K).
        classes: the names of the labels, or None.
    """

    _ranked = "pairs of a sample and a label"

    def _sentence(self, name: Any, given: Any, better: Any) -> str:
        return f"{name}: the model would {'add' if better else 'drop'} the label {given}"

    @property
    def suspects(self) -> Tensor:
        """The pairs (m, 2) that the model would change, the most suspicious first."""
        return self.order[self.margins[self.order[:, 0], self.order[:, 1]] < 0]

    def names(self, count: int | None = None) -> list[tuple[int, Any, Any]]:
        """The most suspicious pairs as (row, label, whether the model gives the label to the sample)."""
        labels = range(self.scores.shape[1]) if self.classes is None else self.classes
        return [(i, labels[k], bool(self.proposed[i, k])) for i, k in self.suspects[:count].tolist()]

    def events(self, count: int | None = None) -> list[Relabel]:
        """Change the ``count`` most suspicious pairs, in one event for each sample. Review the events before you apply them."""
        if self.ids is None:
            raise ValueError("events need ids: find_label_errors(head, x, y, ids=...)")
        changed: dict[int, Tensor] = {}
        for i, k in self.suspects[:count].tolist():
            changed.setdefault(i, self.labels[i].clone())[k] = self.proposed[i, k]
        return [Relabel(ids=[self.ids[i]], y=y[None], y_old=self.labels[i][None]) for i, y in changed.items()]


@exactly
def find_label_errors(
    head: Any, x: Any, y: Any, ids: Sequence[Any] | None = None, *, weight: Any = None, groups: Any = None,
    lift: int | None = None,
) -> LabelErrors:  # fmt: skip
    """Rank the samples of a head by their leave-one-out margin, to find wrong labels in one pass without refitting.

    With ``targets="multilabel"``, pairs of a sample and a label are ranked; see :class:`LabelPairErrors`. With
    ``targets="regression"``, this function raises an error; rank the residuals ``y - head.leave_one_out(x, y)``.

    With ``multiclass="ovo"``, the score of a class is its lowest score against any other class. This takes longer, but finds
    more errors if a class lies between others (in pixels, for example), so that one linear score cannot separate it from the
    rest.

    Args:
        head: a linear head that holds the samples. A ``CompactLSSVMHead`` does not support ``groups``.
        x: (n, J), as added.
        y: (n,) labels, or (n, K) for ``targets="multilabel"``, as added.
        weight: (n,), as added.
        ids: (n,) ids of the samples, for ``events``.
        groups: (n,) group of each sample, e.g. users who may have mislabelled all of their samples. The scores are then
            leave-group-out scores.
        lift: number of random features (:class:`~torchlssvm.features.RandomReLU`) of x to rank on; x must then contain all
            samples. With many classes and few features, 2,000 random features find more errors.
    """
    if isinstance(head, AttachedClassifier):
        of_store = (
            "clf.store.label_errors()" if head.store is not None else "find_label_errors(clf.head, clf.features(X), y)"
        )
        raise TypeError(
            f"find_label_errors takes a head and its features, got a classifier of attach(): call {of_store}"
        )
    if lift is not None:
        x = checks.as_tensor(x, "x", head.device)
        lifted = RandomReLU(head.in_features, lift, device=head.device)(x)
        options = {name: getattr(head, name) for name in ("intercept", "class_weight", "targets", "device")}
        options["grid"] = None if head.grid is None else "auto"  # real weights need float64 sums
        head, x = LSSVMHead(lift, head.num_classes, rho="gcv", **options).add(lifted, y, weight=weight), lifted
    options = {} if groups is None else {"groups": groups}
    if getattr(head, "multiclass", "ovr") == "ovo":
        options["pairs"] = "least"
    scores = head.leave_one_out(x, y, weight=weight, **options)
    labels = torch.as_tensor(y, device=scores.device)
    return from_scores(scores, labels.bool() if targets_of(head) == "multilabel" else labels, ids)


@exactly
def from_scores(
    scores: Tensor, labels: Tensor, ids: Sequence[Any] | None = None, *, classes: Sequence[Any] | None = None
) -> LabelErrors:
    """Rank samples by leave-one-out scores (n, K) of any machine, K >= 2, and their labels (n,).

    Pass labels (n, K), bool, to rank pairs of a sample and a label.
    """
    pairs = labels.dtype == torch.bool and labels.shape == scores.shape
    if labels.ndim == 2 and not pairs:
        raise ValueError(
            'label errors need labels (n,), or targets="multilabel"; numbers have none: rank the residuals '
            "y - head.leave_one_out(x, y) instead"
        )
    fits = scores.ndim == 2 and scores.shape[1] >= 2 and labels.shape == scores.shape[:1]
    if not pairs and (not fits or labels.is_floating_point()):
        raise ValueError(
            f"needed: scores (n, K >= 2) and integer labels (n,); got {tuple(scores.shape)} and {tuple(labels.shape)}, "
            f"{labels.dtype}"
        )
    names = _names(ids, labels)
    labels = labels if pairs else labels.to(torch.int64)
    margin = torch.where(labels, scores, -scores) if pairs else margins(scores, labels)
    order, K = margin.flatten().argsort(stable=True), scores.shape[1]
    probabilities = scores
    if len(labels):
        probabilities = fit(scores, labels, torch.ones_like(scores[:, 0]), None)(scores)
    return (LabelPairErrors if pairs else LabelErrors)(
        labels=labels,
        scores=scores,
        margins=margin,
        order=torch.stack([order // K, order % K], 1) if pairs else order,
        proposed=scores > 0 if pairs else scores.argmax(1),
        pred_probs=probabilities.cpu().numpy(),
        ids=names,
        classes=None if classes is None else tuple(classes),
    )


def _names(ids: Sequence[Any] | None, labels: Tensor) -> tuple[str, ...] | None:
    if ids is not None and len(ids) != len(labels):
        raise ValueError(f"labels and ids differ in length: {len(labels)} labels, {len(ids)} ids")
    return None if ids is None else tuple(str(i) for i in ids)
