"""Classifier heads that learn and unlearn exactly."""

from torchlssvm._version import __version__
from torchlssvm.audit import verify
from torchlssvm.certificate import Certificate
from torchlssvm.errors import (
    ConvergenceError,
    GridError,
    NotFittedError,
    NumericalWarning,
    RemovalError,
    StoreBusyError,
    StoreError,
    TorchLSSVMError,
    VerificationError,
)
from torchlssvm.heads import AttachedClassifier, LSSVMHead, attach
from torchlssvm.machines import KernelLSSVM, LagrangianSVM, OneVsOne, OneVsRest
from torchlssvm.statistics import FixedPoint, Statistics
from torchlssvm.svm import IncrementalSVM

__all__ = [
    "AttachedClassifier",
    "Certificate",
    "ConvergenceError",
    "FixedPoint",
    "GridError",
    "IncrementalSVM",
    "KernelLSSVM",
    "LSSVMHead",
    "LagrangianSVM",
    "NotFittedError",
    "NumericalWarning",
    "OneVsOne",
    "OneVsRest",
    "RemovalError",
    "Statistics",
    "StoreBusyError",
    "StoreError",
    "TorchLSSVMError",
    "VerificationError",
    "__version__",
    "attach",
    "verify",
]
