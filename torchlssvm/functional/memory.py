"""Refuse allocations that do not fit into memory."""

from __future__ import annotations

import os

import torch

from torchlssvm.errors import OutOfMemoryError

CHECKED_BYTES = 2**28
"""Smaller allocations are not checked, because asking the system would cost too much."""


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes available on a device without swapping; None if unknown."""
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
    free = free_bytes(device) if needed >= CHECKED_BYTES else None
    if free is not None and needed > free:
        raise OutOfMemoryError(
            f"{what} needs {needed:,} bytes on {device}, where {free:,} are free. {remedy} Nothing was changed."
        )
