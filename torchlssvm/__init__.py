"""Classifier heads that learn and unlearn exactly."""

import torchlssvm._interrupts  # noqa: F401  first: what follows takes seconds
from torchlssvm._version import __version__
from torchlssvm.audit.certificate import Certificate
from torchlssvm.audit.verification import verify
from torchlssvm.errors import (
    ConvergenceError,
    GridError,
    InexactDeviceError,
    InterruptedUpdateError,
    NotFittedError,
    NumericalWarning,
    OutOfMemoryError,
    RemovalError,
    StoreBusyError,
    StoreDiskError,
    StoreError,
    SuppressedError,
    TorchLSSVMError,
    VerificationError,
)
from torchlssvm.kernel_machines import KernelLSSVM, LagrangianSVM, OneVsOne, OneVsRest
from torchlssvm.linear import AttachedClassifier, LSSVMHead, MarginHead, attach
from torchlssvm.statistics import FixedPoint, Statistics
from torchlssvm.store.attached_samples import AttachedSamples
from torchlssvm.svm import IncrementalSVM

AttachedClassifier.open_store = AttachedSamples

__all__ = [
    "AttachedClassifier",
    "Certificate",
    "ConvergenceError",
    "FixedPoint",
    "GridError",
    "IncrementalSVM",
    "InexactDeviceError",
    "InterruptedUpdateError",
    "KernelLSSVM",
    "LSSVMHead",
    "LagrangianSVM",
    "MarginHead",
    "NotFittedError",
    "NumericalWarning",
    "OneVsOne",
    "OneVsRest",
    "OutOfMemoryError",
    "RemovalError",
    "Statistics",
    "StoreBusyError",
    "StoreDiskError",
    "StoreError",
    "SuppressedError",
    "TorchLSSVMError",
    "VerificationError",
    "__version__",
    "attach",
    "verify",
]
