"""Heads: nn.Modules that learn on features."""

from torchlssvm.linear.attach import AttachedClassifier, attach
from torchlssvm.linear.head import LSSVMHead

__all__ = ["AttachedClassifier", "LSSVMHead", "attach"]
