"""Sliding windows: learn from a stream and unlearn the oldest samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchlssvm.sample_adapter import SampleAdapter


class SlidingWindow:
    """Keep a machine trained on the last ``size`` samples of a stream.

    The window stores its samples, and when a sample leaves the window, it removes the sample from the machine (by id if
    ``add`` of the machine returns ids). An exact machine therefore always equals a machine that only ever saw the samples in
    the window.

    Args:
        machine: any object with ``add(x, y)`` and ``remove(x, y)``, or ``remove(ids)`` if ``add`` returns ids, such as a head,
            ``Statistics``, a ``Delta`` or a kernel machine.
        size: the number of samples that the window keeps.

    Example:
        >>> from torchlssvm import FixedPoint, LSSVMHead
        >>> x, y = torch.randn(100, 4), torch.arange(100) % 2
        >>> window = SlidingWindow(LSSVMHead(4, 2, grid=FixedPoint(8.0)), size=30)
        >>> for start in range(0, 100, 8):
        ...     window = window.add(x[start : start + 8], y[start : start + 8])
        >>> len(window), window.machine.digest() == LSSVMHead(4, 2, grid=FixedPoint(8.0)).add(x[70:], y[70:]).digest()
        (30, True)
    """

    def __init__(self, machine: Any, size: int):
        if not all(callable(getattr(machine, verb, None)) for verb in ("add", "remove")):
            raise TypeError(f"the machine must have add and remove, got {type(machine).__name__}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size must be an int >= 1, got {size!r}")
        self.machine, self.size = machine, size
        self._samples = SampleAdapter(machine)
        self._parts: deque[tuple[Tensor, ...]] = deque()  # (places in the stream, x, y) or (places,), oldest first
        self._arrived = self._length = 0

    def __len__(self) -> int:
        """The number of samples in the window."""
        return self._length

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Iterate over the current samples, oldest first, in the batches in which they arrived: (x, y), or (ids,)."""
        if self._samples.by_ids:
            return iter([(self._samples.machine_ids(places),) for places, *_ in self._parts])
        return iter([part[1:] for part in self._parts])

    def add(self, x: Tensor, y: Tensor) -> SlidingWindow:
        """Add samples x (B, ...), y (B, ...), in the order of arrival, and remove the oldest samples beyond ``size``.

        If the machine raises an error, for the new samples or for those to be removed, the window does not change.
        """
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        if x.ndim == 0 or y.ndim == 0 or x.shape[0] != y.shape[0]:
            raise ValueError(f"x and y differ in length: x has shape {tuple(x.shape)}, y has shape {tuple(y.shape)}")
        x, y = x[-self.size :].detach().clone(), y[-self.size :].detach().clone()  # others would leave at once
        if not len(x):
            return self
        places = torch.arange(self._arrived, self._arrived + len(x))
        leaving, rest = self._split(max(0, self._length + len(x) - self.size))
        self._samples.exchange((places, x, y), leaving)
        self._parts = rest
        self._parts.append((places,) if self._samples.by_ids else (places, x, y))
        self._arrived += len(x)
        self._length = min(self.size, self._length + len(x))
        return self

    def _split(self, count: int) -> tuple[tuple[Tensor, ...] | None, deque[tuple[Tensor, ...]]]:
        """Split off the oldest ``count`` samples, joined (None for none); return them and the rest."""
        leaving: list[tuple[Tensor, ...]] = []
        rest = deque(self._parts)
        while count:
            part = rest.popleft()
            here = min(count, len(part[0]))
            leaving.append(tuple(t[:here] for t in part))
            if here < len(part[0]):
                rest.appendleft(tuple(t[here:].clone() for t in part))  # a view would keep the rows that leave
            count -= here
        return tuple(torch.cat(column) for column in zip(*leaving, strict=True)) or None, rest

    def clear(self) -> SlidingWindow:
        """Remove all samples of the window."""
        leaving, _ = self._split(self._length)
        self._samples.exchange(None, leaving)
        self._parts.clear()
        self._length = 0
        return self

    def __repr__(self) -> str:
        """Machine, size and number of samples."""
        return f"SlidingWindow({self.machine!r}, size={self.size}, held={len(self)})"
