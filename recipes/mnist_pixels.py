"""Read the training pixels and labels of MNIST from the folder that TORCHLSSVM_DATA names."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def mnist(count: int) -> tuple[Tensor, Tensor]:
    """Pixels (n, 784) from 0 to 1, float32, and labels (n,): the first ``count``."""
    folder = os.environ.get("TORCHLSSVM_DATA")
    if not folder:
        raise SystemExit("TORCHLSSVM_DATA is not set: it names the folder with the data sets")
    raw = [
        gzip.decompress((Path(folder).expanduser() / "mnist" / f"train-{n}-ubyte.gz").read_bytes())
        for n in ("images-idx3", "labels-idx1")
    ]
    x = np.frombuffer(raw[0], np.uint8, offset=16).reshape(-1, 784)[:count] / np.float32(255)
    return torch.from_numpy(x), torch.from_numpy(np.frombuffer(raw[1], np.uint8, offset=8)[:count].astype(np.int64))
