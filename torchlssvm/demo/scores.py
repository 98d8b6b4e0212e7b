"""The head of the demo, and its leave-one-out scores."""

from __future__ import annotations

from torch import Tensor

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.analysis.cross_validation import margins
from torchlssvm.demo.data import DIGIT_CLASSES, RELU_FEATURES

__all__ = ["leave_one_out", "margins", "new_head"]


def new_head() -> LSSVMHead:
    """Make an empty head. Its grid is fixed beforehand, so that it does not depend on any sample."""
    return LSSVMHead(RELU_FEATURES, DIGIT_CLASSES, grid=FixedPoint(limit=64.0))


def leave_one_out(head: LSSVMHead, x: Tensor, y: Tensor) -> Tensor:
    """Scores (n, K) of each sample by the head that never saw that sample, without retraining. x: (n, J); y: (n,)."""
    return head.leave_one_out(x, y)
