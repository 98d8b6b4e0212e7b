"""Classifier heads that learn and unlearn exactly."""

from torchlssvm.errors import (
    ConvergenceError,
    GridError,
    NotFittedError,
    NumericalWarning,
    RemovalError,
    TorchLSSVMError,
    VerificationError,
)
from torchlssvm.heads import AttachedClassifier, LSSVMHead, attach
from torchlssvm.machines import IncrementalSVM
from torchlssvm.statistics import FixedPoint, Statistics

__version__ = "0.1.0"

__all__ = [
    "AttachedClassifier",
    "ConvergenceError",
    "FixedPoint",
    "GridError",
    "IncrementalSVM",
    "LSSVMHead",
    "NotFittedError",
    "NumericalWarning",
    "RemovalError",
    "Statistics",
    "TorchLSSVMError",
    "VerificationError",
    "attach",
]
