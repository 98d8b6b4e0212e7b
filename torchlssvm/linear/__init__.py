"""Heads: nn.Modules that learn on features."""

from torchlssvm.linear.attach import AttachedClassifier, attach
from torchlssvm.linear.head import LSSVMHead
from torchlssvm.linear.kinds import HEAD_KINDS, LinearHead, head_class
from torchlssvm.linear.margin_head import MarginHead

__all__ = ["HEAD_KINDS", "AttachedClassifier", "LSSVMHead", "LinearHead", "MarginHead", "attach", "head_class"]
