"""Kernel machines: samples by id, exact adding and removing."""

from torchlssvm.machines.incremental import IncrementalSVM

__all__ = ["IncrementalSVM"]
