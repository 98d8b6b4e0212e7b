"""Kernel machines that learn and unlearn samples by id, exactly."""

from torchlssvm.machines.lssvm import KernelLSSVM

__all__ = ["KernelLSSVM"]
