"""The exact incremental support vector machine."""

from torchlssvm.svm.machine import IncrementalSVM, RegularizationPath, Step

__all__ = ["IncrementalSVM", "RegularizationPath", "Step"]
