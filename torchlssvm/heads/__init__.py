"""Heads: nn.Modules that learn on features."""

from torchlssvm.heads.attach import AttachedClassifier, attach
from torchlssvm.heads.linear import LSSVMHead

__all__ = ["AttachedClassifier", "LSSVMHead", "attach"]
