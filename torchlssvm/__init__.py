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
from torchlssvm.machines import KernelLSSVM, LagrangianSVM, OneVsOne, OneVsRest
from torchlssvm.statistics import FixedPoint, Statistics

__version__ = "0.1.0"

__all__ = [
    "AttachedClassifier",
    "ConvergenceError",
    "FixedPoint",
    "GridError",
    "KernelLSSVM",
    "LSSVMHead",
    "LagrangianSVM",
    "NotFittedError",
    "NumericalWarning",
    "OneVsOne",
    "OneVsRest",
    "RemovalError",
    "Statistics",
    "TorchLSSVMError",
    "VerificationError",
    "attach",
]
