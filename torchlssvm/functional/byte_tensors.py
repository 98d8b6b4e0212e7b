"""Conversion between bytes and uint8 tensors, the form in which checkpoints store text and packed records."""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_to_tensor(data: bytes) -> Tensor:
    """Copy bytes to a uint8 tensor on the host.

    >>> tensor_to_bytes(bytes_to_tensor(b"torch")), bytes_to_tensor(b"").shape
    (b'torch', torch.Size([0]))
    """
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def tensor_to_bytes(tensor: Tensor) -> bytes:
    """Undo :func:`bytes_to_tensor`. Raises TypeError or ValueError unless the tensor holds bytes."""
    return bytes(tensor.tolist())
