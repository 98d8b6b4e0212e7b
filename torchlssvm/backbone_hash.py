"""One hash of network, preprocessing and feature map, which reveals features that were computed in another way."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from torchlssvm.canonical_json import canonical

__all__ = ["fingerprint"]


def fingerprint(
    backbone: nn.Module | None = None, preprocessing: Any = None, feature_map: nn.Module | None = None
) -> str:
    """SHA-256 of everything that determines the features: the weights, the preprocessing (its repr) and the feature map.

    >>> a, b = nn.Linear(4, 2), nn.Linear(4, 2)
    >>> fingerprint(a) == fingerprint(a), fingerprint(a) == fingerprint(b)
    (True, False)
    """
    parts: dict[str, Any] = {"preprocessing": None if preprocessing is None else repr(preprocessing)}
    for name, module in (("backbone", backbone), ("feature_map", feature_map)):
        parts[name] = None if module is None else module_hash(module)
    return hashlib.sha256(canonical(parts)).hexdigest()


def module_hash(module: nn.Module) -> str:
    """SHA-256 of a module's structure (its repr) and of every tensor of its state, in the order of their names."""
    total = hashlib.sha256(repr(module).encode())
    for name, value in sorted(module.state_dict().items()):
        if isinstance(value, Tensor):
            total.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(f"{name} {value!r};".encode())
    return total.hexdigest()
