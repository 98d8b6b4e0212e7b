"""Features and targets as bytes.

On a grid a feature is an integer, stored in as few bytes (1 to 4, little-endian) as its row needs; the length of a row says
how many. No row is wider because of another one it came with: that would tell of it after its erasure. Without a grid, and
for a head that makes rows ready before its grid (``normalize``), features are stored as the float32 or float64 numbers they
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.errors import StoreError
from torchlssvm.functional.grid import FixedPoint


@dataclass
class Codec:
    """Features and targets to bytes and back. Without a grid they are kept as they are, and features with ``plain`` too."""

    J: int
    K: int
    grid: FixedPoint | None = None
    target_grid: FixedPoint | None = None
    plain: bool = False

    @property
    def steps(self) -> FixedPoint | None:
        """Grid on which features are stored; None where they are stored as they are."""
        return None if self.plain else self.grid

    def encode(self, x: Tensor) -> list[memoryview]:
        """One piece of memory for each row. x: (B, J)."""
        if self.steps is None:
            wide = x.dtype == torch.float64
            array = x.to("cpu", torch.float64 if wide else torch.float32).contiguous().numpy()
            return split(array.astype("<f8" if wide else "<f4", copy=False))
        q = self.steps.integers(x).to("cpu").contiguous().numpy().astype("<i4", copy=False)
        if not q.size:
            return split(q)
        largest = np.maximum(q.max(1), -1 - q.min(1))  # (B,): -128 still fits one byte
        widths = 1 + (largest[:, None] >= (1 << 7, 1 << 15, 1 << 23)).sum(1)
        out = [memoryview(b"")] * len(q)
        for width in np.unique(widths).tolist():
            index = np.flatnonzero(widths == width)
            for i, row in zip(
                index.tolist(), split(narrowed(q if len(index) == len(q) else q[index], width)), strict=True
            ):
                out[i] = row
        return out

    def decode(self, blobs: Sequence[bytes]) -> Tensor:
        """The features (B, J) as the head takes them: float64 on a grid, else as stored."""
        sizes = {len(b) for b in blobs}
        if len(sizes) != 1:
            x = torch.empty(len(blobs), self.J, dtype=torch.float64)
            for size in sizes:
                index = [i for i, b in enumerate(blobs) if len(b) == size]
                x[index] = self.decode([blobs[i] for i in index]).to(torch.float64)
            return x
        size = sizes.pop()
        allowed = (4, 8) if self.steps is None else (1, 2, 3, 4)
        if self.J < 1 or size % self.J or size // self.J not in allowed:
            raise StoreError(f"a row of {size} bytes does not hold {self.J} features: the store is damaged")
        width, data = size // self.J, b"".join(blobs)
        if self.steps is None:
            floats = np.frombuffer(data, "<f8" if width == 8 else "<f4").reshape(-1, self.J)
            return torch.from_numpy(floats.astype(floats.dtype.newbyteorder("=")))
        if width == 3:
            padded, three = np.zeros((len(blobs), self.J, 4), np.uint8), np.frombuffer(data, np.uint8)
            for k in range(3):
                padded[:, :, k + 1] = three[k::3].reshape(-1, self.J)
            q = padded.view("<i4")[:, :, 0] >> 8  # an arithmetic shift: the sign comes along
        else:
            q = np.frombuffer(data, f"<i{width}").reshape(-1, self.J)
        return self.steps.dequantize(torch.from_numpy(q.astype(np.int32)))

    def labels_and_targets(self, y: Tensor) -> tuple[list[int] | None, list[bytes] | None]:
        """Encode y: labels as integers, targets as the float64 numbers the head summed."""
        if y.ndim == 1 and not y.is_floating_point() and self.K > 1:
            return y.to(torch.int64).tolist(), None
        values = y.reshape(len(y), -1)
        values = values.to(torch.float64) if self.target_grid is None else self.target_grid.snap(values)
        return None, [bytes(b) for b in split(values.cpu().contiguous().numpy().astype("<f8", copy=False))]

    def y(self, labels: Sequence[int | None], targets: Sequence[bytes | None]) -> Tensor:
        """Decode what :meth:`labels_and_targets` wrote."""
        if all(t is None for t in targets):
            if None in labels:
                raise StoreError("a row has neither a label nor targets: the store is damaged")
            return torch.tensor(labels, dtype=torch.int64)
        data = b"".join(t or b"" for t in targets)
        if len(data) != 8 * len(targets) * self.K:
            raise StoreError(f"a row does not hold {self.K} targets: the store is damaged")
        values = np.frombuffer(data, "<f8").reshape(-1, self.K)
        return torch.from_numpy(values.astype(np.float64))


def narrowed(q: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """The low bytes of little-endian 32-bit integers. q: (B, J) -> (B, J, width), or q itself for all four."""
    if width == 4:
        return q
    packed, four = np.empty((*q.shape, width), np.uint8), q.view(np.uint8).reshape(*q.shape, 4)
    for k in range(width):  # byte by byte: four times as fast as all at once
        packed[:, :, k] = four[:, :, k]
    return packed


def split(array: np.ndarray[Any, Any]) -> list[memoryview]:
    """The bytes of each row of a contiguous array, without copying them."""
    size = array.nbytes // max(1, len(array))
    view = array.reshape(-1).view(np.uint8).data
    return [view[i : i + size] for i in range(0, size * len(array), size)] if size else [view] * len(array)
