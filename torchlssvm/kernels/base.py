"""The base of all kernels: evaluation in tiles, saving, and the arithmetic of kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

TILE_BYTES = 2**23
"""Working memory of a kernel in bytes, in addition to its inputs and its result."""


class Kernel(nn.Module):
    """The base class of all kernels. A subclass defines :meth:`gram` and lists the numbers to save in ``options``.

    >>> import torch
    >>> from torchlssvm.kernels import RBF, Linear
    >>> x = torch.tensor([[0.0], [2.0]], dtype=torch.float64)
    >>> (0.5 * RBF(sigma=2.0) + Linear())(x, x)
    tensor([[0.5000, 0.3033],
            [0.3033, 4.5000]], dtype=torch.float64)
    """

    options: tuple[str, ...] = ()
    deep = False  # True if prepare() is more than the identity

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Compute K (n1, n2) of prepared rows, in one piece. x1: (n1, J), x2: (n2, J)."""
        raise TypeError(f"{type(self).__name__} must define gram(x1, x2)")

    def prepare(self, x: Tensor) -> Tensor:
        """Return the rows (n, J) that :meth:`gram` takes and machines keep: the samples x, or the features of a network."""
        return x

    def version(self) -> tuple[Any, ...]:
        """Return a value that changes whenever an option or parameter of the kernel changes."""
        if (
            not self._modules and not self._parameters and not self._buffers
        ):  # the usual case, asked for in every operation
            return tuple(getattr(self, name) for name in self.options)
        options = [
            getattr(part, name)
            for part in self.modules()
            if isinstance(part, Kernel)
            for name in part.options
            if name != "split"
        ]  # which follows from the rows
        tensors = [p for p in (*self.parameters(), *self.buffers()) if not p.is_inference()]
        return (*options, *((p.data_ptr(), p._version) for p in tensors))

    def equals(self, other: Kernel) -> bool:
        """Return True if another kernel has the same parts, options and parameters, and therefore the same values."""

        def parts(kernel: Kernel) -> list[Any]:
            return [
                (
                    type(part),
                    getattr(part, "function", None),
                    *(getattr(part, name) for name in getattr(part, "options", ())),
                )
                for part in kernel.modules()
            ]

        mine, others = (list(kernel.state_dict().values()) for kernel in (self, other))
        return (
            parts(self) == parts(other)
            and len(mine) == len(others)
            and all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(mine, others, strict=True))
        )

    def floats(self, J: int) -> int:
        """Count the numbers that :meth:`gram` holds at once for each pair of rows of width J."""
        return 3

    def diag(self, x: Tensor) -> Tensor:
        """Return K(x_i, x_i) for each row (n,)."""
        rows = self.prepare(x)
        if len(rows) == 0:
            return rows.new_empty(0)
        return torch.cat([self.gram(part, part).diagonal() for part in rows.split(64)])

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Return the Gram matrix K (n1, n2)."""
        p1 = self.prepare(x1)
        return self.tiled(p1, p1 if x2 is x1 else self.prepare(x2))

    def tiled(self, p1: Tensor, p2: Tensor) -> Tensor:
        """K (n1, n2) of prepared rows, tile by tile."""
        p1, p2 = _pair(p1, p2)
        if torch.compiler.is_compiling() or _fits(p1, p2, self.floats(p1.shape[1])):
            return self.gram(p1, p2)
        bands: dict[int, list[Tensor]] = {}
        graph = torch.is_grad_enabled() and (p1.requires_grad or p2.requires_grad)
        out = None if graph else p1.new_empty(p1.shape[0], p2.shape[0])
        for rows, columns in _tiles(p1.shape[0], p2.shape[0], p1, self.floats(p1.shape[1])):
            tile = self.gram(p1[rows], p2[columns])
            if out is None:
                bands.setdefault(rows.start, []).append(tile)
            else:
                out[rows, columns] = tile
        return torch.cat([torch.cat(band, 1) for band in bands.values()]) if out is None else out

    def product(self, x1: Tensor, x2: Tensor, v: Tensor) -> Tensor:
        """Compute K(x1, x2) v (n1, K) without the Gram matrix. v: (n2, K)."""
        p1 = self.prepare(x1)
        return self.tiled_product(p1, p1 if x2 is x1 else self.prepare(x2), v)

    def tiled_product(self, p1: Tensor, p2: Tensor, v: Tensor) -> Tensor:
        """Compute K v (n1, K) of prepared rows, tile by tile. v: (n2, K)."""
        p1, p2 = _pair(p1, p2)
        if torch.compiler.is_compiling() or _fits(p1, p2, self.floats(p1.shape[1])):
            return self.gram(p1, p2) @ v
        bands: dict[int, Tensor] = {}
        for rows, columns in _tiles(p1.shape[0], p2.shape[0], p1, self.floats(p1.shape[1])):
            part = self.gram(p1[rows], p2[columns]) @ v[columns]
            bands[rows.start] = bands[rows.start] + part if rows.start in bands else part
        return torch.cat(list(bands.values()))

    def __add__(self, other: Any) -> Kernel:
        return self._compose("Sum", self, other)

    def __radd__(self, other: Any) -> Kernel:
        return self._compose("Sum", other, self)

    def __mul__(self, other: Any) -> Kernel:
        return self._compose("Product" if callable(other) else "Scaled", self, other)

    def __rmul__(self, other: Any) -> Kernel:
        return self._compose("Product", other, self) if callable(other) else self._compose("Scaled", self, other)

    @staticmethod
    def _compose(name: str, first: Any, second: Any) -> Kernel:
        from torchlssvm.kernels import composed  # composed kernels are kernels, and kernels compose

        kernel: Kernel = getattr(composed, name)(first, second)
        return kernel

    def extra_repr(self) -> str:
        """The options, as they were given."""
        return ", ".join(f"{name}={getattr(self, name):g}" for name in self.options)

    def get_extra_state(self) -> Tensor:
        """The options, saved with the machine."""
        return torch.tensor([float(getattr(self, name)) for name in self.options], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore saved options."""
        if tuple(state.shape) != (len(self.options),):
            raise ValueError(f"{type(self).__name__} has {len(self.options)} options, the saved kernel {state.numel()}")
        saved = dict(zip(self.options, state.tolist(), strict=True))
        for name, value in saved.items():
            if not 0.0 <= value < math.inf or (value == 0.0 and name in ("gamma", "degree")):
                raise ValueError(f"the saved {name} of {type(self).__name__} is {value}: the state is damaged")
        for name, value in saved.items():
            setattr(self, name, type(getattr(self, name))(value))


def _pair(x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    if x1.ndim != 2 or x2.ndim != 2 or x1.shape[1] != x2.shape[1]:
        raise ValueError(
            f"a kernel takes rows of one width (n1, J) and (n2, J), got {tuple(x1.shape)}, {tuple(x2.shape)}"
        )
    dtype = torch.promote_types(x1.dtype, x2.dtype)
    return x1.to(dtype), x2.to(dtype)


def _fits(x1: Tensor, x2: Tensor, floats: int) -> bool:
    return x1.shape[0] * x2.shape[0] * floats * x1.element_size() <= TILE_BYTES


def _tiles(n1: int, n2: int, like: Tensor, floats: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of rows and columns whose tile fits into TILE_BYTES: as many whole rows as fit, or parts of one row."""
    pairs = max(1, TILE_BYTES // (floats * like.element_size()))
    high, wide = max(1, pairs // n2), min(n2, pairs)
    for a in range(0, n1, high):
        for b in range(0, n2, wide):
            yield slice(a, min(a + high, n1)), slice(b, min(b + wide, n2))
