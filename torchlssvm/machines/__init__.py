"""Kernel machines that learn and unlearn samples by id, exactly."""

from torchlssvm.machines.lagrangian import LagrangianSVM
from torchlssvm.machines.lssvm import KernelLSSVM
from torchlssvm.machines.multiclass import OneVsOne, OneVsRest

__all__ = ["KernelLSSVM", "LagrangianSVM", "OneVsOne", "OneVsRest"]
