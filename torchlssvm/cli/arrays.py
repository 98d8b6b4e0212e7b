"""Arrays and tensors from .npy and .pt files. A file that cannot be read is a ValueError that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.backbones import load_pt


def load_npy(path: Path, mapped: bool) -> np.ndarray[Any, Any]:
    """Load an array; ``mapped``: read from the disk as it is needed."""
    path.stat()  # a missing file is an OSError that says so
    try:
        if mapped:
            return np.lib.format.open_memmap(path, mode="r")
        with open(path, "rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy's parser of the header raises errors of many kinds
        raise ValueError(f"{path} is no .npy file, or not all of one: {error}") from None


def to_features(part: np.ndarray[Any, Any] | Tensor) -> Tensor:
    """Convert rows of an array or a tensor to a tensor of floats."""
    if isinstance(part, Tensor):
        return part
    usual = part.dtype.kind == "f" and part.dtype.itemsize in (2, 4, 8)
    return torch.from_numpy(np.array(part, dtype=part.dtype.newbyteorder("=") if usual else np.float64))


def load_matrix(path: Path) -> np.ndarray[Any, Any] | Tensor:
    """Load features (n, J) from a .npy file, which stays on the disk, or a .pt file."""
    values: Any = load_npy(path, True) if path.suffix == ".npy" else load_pt(path)
    if isinstance(values, Tensor):
        real = values.layout == torch.strided and not values.is_complex() and not values.is_quantized
    else:
        real = isinstance(values, np.ndarray) and values.dtype.kind in "fiub"
    if not real:
        kind = getattr(values, "dtype", type(values).__name__)
        raise ValueError(f"{path} must hold one array of real numbers, it holds {kind}")
    if values.ndim != 2:
        raise ValueError(f"{path} must hold features of shape (n, J), it has shape {tuple(values.shape)}")
    return values  # type: ignore[no-any-return]
