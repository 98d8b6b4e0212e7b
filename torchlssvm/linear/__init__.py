"""Heads: nn.Modules that learn on features."""

from torchlssvm.linear.attach import AttachedClassifier, attach
from torchlssvm.linear.head import LSSVMHead
from torchlssvm.linear.margin_head import MarginHead

__all__ = ["AttachedClassifier", "LSSVMHead", "MarginHead", "attach"]
