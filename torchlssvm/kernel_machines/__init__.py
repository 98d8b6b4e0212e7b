"""Kernel machines that learn and unlearn samples by id, exactly."""

from torchlssvm.kernel_machines.lagrangian import LagrangianSVM
from torchlssvm.kernel_machines.lssvm import KernelLSSVM
from torchlssvm.kernel_machines.multiclass import OneVsOne, OneVsRest

__all__ = ["KernelLSSVM", "LagrangianSVM", "OneVsOne", "OneVsRest"]
