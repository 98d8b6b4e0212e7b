"""Memory: refuse allocations that do not fit, and make empty tensors that keep no rows alive."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from torchlssvm.errors import OutOfMemoryError

CHECKED_BYTES = 2**28
"""Smallest request in bytes (256 MiB) that is checked: for less, asking the system costs too much."""


def no_rows(x: Tensor) -> Tensor:
    """Return an empty tensor (0, ...) for rows like those of x. The slice ``x[:0]`` would keep, and pickle, all rows of x."""
    return x.new_empty((0, *x.shape[1:]))


def free_bytes(device: torch.device) -> int | None:
    """Bytes available on a device without swapping; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        names = getattr(os, "sysconf_names", {})
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if "SC_PHYS_PAGES" in names else None


def require_memory(needed: int, device: torch.device, what: str, remedy: str) -> None:
    """Raise OutOfMemoryError, before anything is allocated, unless ``needed`` bytes are free on the device."""
    free = free_bytes(device)
    if free is not None and needed > free:
        raise OutOfMemoryError(
            f"{what} needs {needed:,} bytes on {device}, where {free:,} are free. {remedy} Nothing was changed."
        )
