"""Classifier heads that learn and unlearn exactly.

Each name below is imported at its first use, so ``import torchlssvm`` alone loads almost nothing. Import other public names
from their modules, e.g. ``torchlssvm.kernels`` or ``torchlssvm.errors``.
"""

from typing import TYPE_CHECKING

from torchlssvm._lazy import lazy_names
from torchlssvm._version import __version__

if TYPE_CHECKING:  # the same names for type checkers and editors; a test compares
    from torchlssvm.audit.certificate import Certificate
    from torchlssvm.audit.verification import verify
    from torchlssvm.errors import (
        GridError,
        NotFittedError,
        NumericalWarning,
        RemovalError,
        TorchLSSVMError,
        VerificationError,
    )
    from torchlssvm.events import Add, Relabel, Remove, Replace
    from torchlssvm.functional.grid import FixedPoint
    from torchlssvm.kernel_machines.lagrangian import LagrangianSVM
    from torchlssvm.kernel_machines.lssvm import KernelLSSVM
    from torchlssvm.kernel_machines.multiclass import OneVsOne, OneVsRest
    from torchlssvm.linear.attach import AttachedClassifier, attach
    from torchlssvm.linear.compact_head import CompactLSSVMHead
    from torchlssvm.linear.head import LSSVMHead
    from torchlssvm.linear.margin_head import MarginHead
    from torchlssvm.statistics.statistics import Statistics
    from torchlssvm.store.sample_store import SampleStore
    from torchlssvm.svm.machine import IncrementalSVM

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "torchlssvm.linear.head": ["LSSVMHead"],
        "torchlssvm.linear.compact_head": ["CompactLSSVMHead"],
        "torchlssvm.linear.margin_head": ["MarginHead"],
        "torchlssvm.linear.attach": ["AttachedClassifier", "attach"],
        "torchlssvm.kernel_machines.lssvm": ["KernelLSSVM"],
        "torchlssvm.kernel_machines.lagrangian": ["LagrangianSVM"],
        "torchlssvm.kernel_machines.multiclass": ["OneVsOne", "OneVsRest"],
        "torchlssvm.svm.machine": ["IncrementalSVM"],
        "torchlssvm.functional.grid": ["FixedPoint"],
        "torchlssvm.statistics.statistics": ["Statistics"],
        "torchlssvm.events": ["Add", "Relabel", "Remove", "Replace"],
        "torchlssvm.store.sample_store": ["SampleStore"],
        "torchlssvm.audit.certificate": ["Certificate"],
        "torchlssvm.audit.verification": ["verify"],
        "torchlssvm.errors": [
            "GridError",
            "NotFittedError",
            "NumericalWarning",
            "RemovalError",
            "TorchLSSVMError",
            "VerificationError",
        ],
    },
    modules=["analysis", "audit", "distributed", "errors", "events", "export", "features", "kernels", "store"],
)

__all__ = [
    "Add",
    "AttachedClassifier",
    "Certificate",
    "CompactLSSVMHead",
    "FixedPoint",
    "GridError",
    "IncrementalSVM",
    "KernelLSSVM",
    "LSSVMHead",
    "LagrangianSVM",
    "MarginHead",
    "NotFittedError",
    "NumericalWarning",
    "OneVsOne",
    "OneVsRest",
    "Relabel",
    "RemovalError",
    "Remove",
    "Replace",
    "SampleStore",
    "Statistics",
    "TorchLSSVMError",
    "VerificationError",
    "__version__",
    "attach",
    "verify",
]
