"""The incremental SVM."""

from torchlssvm.machines.incremental import IncrementalSVM

__all__ = ["IncrementalSVM"]
