"""The fixed-point grid that turns features into integers.

A grid of resolution r maps a feature x to the integer q = round(x / r) (ties to even). Sums of products of such integers are
exact, so they do not depend on the order of the samples, the batch size, the device or the number of machines.

Rounding changes x by at most r / 2, which adds about n r^2 / 12 to each diagonal entry of the Gram matrix of n samples. This
acts like an additional ridge of the same size, so it is negligible as long as n r^2 / 12 is small compared with the
regularization rho.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchlssvm.errors import GridError

MAX_STEPS_BITS = 26
"""The largest value, in steps of the grid. Its square is 2^52, so the products of one row are exact in float64."""


@dataclass(frozen=True)
class FixedPoint:
    """A grid with resolution ``limit / 2**bits`` for values in ``[-limit, limit]``.

    ``headroom`` extends the range to ``limit * 2**headroom`` at the same resolution. ``grid="auto"`` chooses the limit from the
    first batch, and headroom lets it accept larger values later. Resolutions that are powers of two are the fastest.

    >>> grid = FixedPoint(limit=4.0, bits=20)
    >>> grid.resolution == 2.0**-18, grid.max_value
    (True, 4.0)
    """

    limit: float
    bits: int = 20
    headroom: int = 0

    def __post_init__(self) -> None:
        """Refuse grids that cannot be exact."""
        if isinstance(self.limit, bool) or not isinstance(self.limit, int | float) or not 0 < self.limit < math.inf:
            raise ValueError(f"FixedPoint limit must be a finite number > 0, got {self.limit!r}")
        for name in ("bits", "headroom"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"FixedPoint {name} must be an int, got {getattr(self, name)!r}")
        if self.bits < 1 or self.headroom < 0 or self.bits + self.headroom > MAX_STEPS_BITS:
            raise ValueError(
                f"FixedPoint needs bits >= 1, headroom >= 0 and bits + headroom <= {MAX_STEPS_BITS}, "
                f"got bits={self.bits}, headroom={self.headroom}"
            )
        if not 2.0**-1000 < self.resolution < 2.0**500:  # so that its square is a finite number
            size = "small" if self.resolution < 1 else "large"
            raise ValueError(f"FixedPoint limit={self.limit!r} is too {size} for {self.bits} bits")
        object.__setattr__(self, "limit", float(self.limit))

    @property
    def resolution(self) -> float:
        """The size of one step."""
        return float(self.limit / 2**self.bits)

    @property
    def max_value(self) -> float:
        """The largest absolute value that the grid can represent."""
        return float(self.limit * 2**self.headroom)

    @property
    def binary(self) -> bool:
        """True if the resolution is a power of two, so that scaling by it is exact in any float type."""
        return math.frexp(self.resolution)[0] == 0.5

    @classmethod
    def auto(cls, largest: float, bits: int = 20) -> FixedPoint:
        """Return the smallest grid with a power-of-two limit that covers ``largest``, with headroom up to 2^26 steps.

        >>> FixedPoint.auto(3.0, bits=16)
        FixedPoint(limit=4.0, bits=16, headroom=10)
        """
        exponent = 0 if largest == 0 else math.ceil(math.log2(largest))
        if not -900 < exponent < 500:
            raise GridError(f"no grid fits values as large as {largest!r}: rescale the features")
        return cls(limit=2.0**exponent, bits=bits, headroom=MAX_STEPS_BITS - bits)

    def check(self, largest: float, name: str) -> None:
        """Raise GridError if a value exceeds the grid."""
        if largest > self.max_value:
            raise GridError(
                f"{name} holds a value of magnitude {largest!r}, beyond the grid's limit {self.max_value!r} "
                f"(resolution {self.resolution!r}). Choose a wider grid, e.g. FixedPoint(limit={_next_power(largest)!r}), "
                "or rescale; a head's grid is fixed once it has data."
            )

    def quantize(self, x: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        """Return the integers round(x / resolution) as float64.

        x: (B, J); out: (B, J) float64; scratch: (>= B, J) float32, saves a temporary.
        """
        if out is None:
            out = torch.empty(x.shape, dtype=torch.float64, device=x.device)
        resolution = self.resolution
        if self.binary and x.dtype != torch.float64 and 2.0**-100 < resolution < 2.0**100:
            # Exact in float32: a product with a power of two, then rounding to an integer, changes no bit of the result.
            if scratch is not None and x.dtype == torch.float32:
                return out.copy_(torch.mul(x, 1.0 / resolution, out=scratch[: len(x)]).round_())
            return out.copy_(x.float().mul(1.0 / resolution).round_())
        if self.binary and x.dtype == torch.float64 and 2.0**-1000 < resolution < 2.0**1000:
            return torch.mul(x, 1.0 / resolution, out=out).round_()  # exact, and one pass less
        return out.copy_(x).div_(resolution).round_()

    def integers(self, x: Tensor) -> Tensor:
        """Return the integers round(x / resolution) as int32. x: (B, J), within the grid."""
        if self.binary and x.dtype == torch.float32 and 2.0**-100 < self.resolution < 2.0**100:
            return x.mul(1.0 / self.resolution).round_().to(torch.int32)
        return self.quantize(x).to(torch.int32)

    def dequantize(self, q: Tensor) -> Tensor:
        """Return the float64 features that the integers represent. q: (..., J)."""
        return q.to(torch.float64) * self.resolution

    def snap(self, x: Tensor) -> Tensor:
        """Round features to the grid, in float64. A head with this grid learns from the rounded features."""
        return self.quantize(x).mul_(self.resolution)


GridOption: TypeAlias = FixedPoint | float | str | None
"""The accepted forms of the option ``grid``; see :func:`as_grid`."""


def as_grid(option: Any, name: str = "grid") -> FixedPoint | str | None:
    """Read the option ``grid``. A number is the limit of a :class:`FixedPoint`. A FixedPoint, "auto" and None do not change.

    Text, as on a command line, is "none", "auto", "LIMIT", "LIMIT:BITS" or "LIMIT:BITS:HEADROOM" (see :func:`grid_to_text`).

    >>> as_grid(8.0) == as_grid("8") == as_grid(FixedPoint(8.0)) == FixedPoint(8.0), as_grid("auto"), as_grid(None)
    (True, 'auto', None)
    """
    if not isinstance(option, bool) and isinstance(option, numbers.Real):
        return FixedPoint(float(option))
    if option is None or isinstance(option, FixedPoint):
        return option
    if isinstance(option, str):
        if option in ("auto", "none"):
            return None if option == "none" else option
        limit, *counts = option.split(":", 2)
        numbers_given: list[Any] = []
        with contextlib.suppress(ValueError):
            numbers_given = [float(limit), *(int(c) for c in counts)]
        if numbers_given:
            return FixedPoint(*numbers_given)
    raise ValueError(
        f"{name} must be a number (the largest feature), a FixedPoint, 'auto' or None (float64 sums), or as text a limit with "
        f"bits, '8:20'; got {option!r}"
    )


def grid_to_text(option: GridOption) -> str | None:
    """Write the option ``grid`` as text that :func:`as_grid` reads; None stays None."""
    grid = as_grid(option)
    return f"{grid.limit!r}:{grid.bits}:{grid.headroom}" if isinstance(grid, FixedPoint) else grid


def grid_to_json(grid: FixedPoint | None) -> list[Any] | None:
    """Write a grid as [limit in hex, bits, headroom]; None stays None.

    >>> grid_to_json(FixedPoint(8.0)), grid_from_json(grid_to_json(FixedPoint(8.0))) == FixedPoint(8.0)
    (['0x1.0000000000000p+3', 20, 0], True)
    """
    return None if grid is None else [grid.limit.hex(), grid.bits, grid.headroom]


def grid_from_json(saved: Sequence[Any] | None) -> FixedPoint | None:
    """Read a grid that :func:`grid_to_json` wrote."""
    return None if saved is None else FixedPoint(float.fromhex(saved[0]), saved[1], saved[2])


def grid_to_fields(grid: FixedPoint | None, target_grid: FixedPoint | None = None) -> dict[str, Any]:
    """Write grids as the JSON fields limit, bits and headroom, with the prefix "target_" for targets; no field for None."""
    saved = {"": grid_to_json(grid), "target_": grid_to_json(target_grid)}
    return {
        prefix + name: v
        for prefix, values in saved.items()
        if values
        for name, v in zip(("limit", "bits", "headroom"), values, strict=True)
    }


def grid_from_fields(fields: Mapping[str, Any], prefix: str = "") -> FixedPoint | None:
    """Read a grid that :func:`grid_to_fields` wrote; None if the limit is not among the fields."""
    if prefix + "limit" not in fields:
        return None
    return grid_from_json([fields[prefix + name] for name in ("limit", "bits", "headroom")])


def _next_power(largest: float) -> float:
    return 2.0 ** math.ceil(math.log2(largest))
