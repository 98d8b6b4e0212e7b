"""The map from scores to probabilities that a head keeps."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.calibration import (
    fit_isotonic,
    fit_platt,
    fit_temperature,
    interpolate,
    normalized,
    strictly_inside,
)

CALIBRATION_METHODS = ("temperature", "platt", "isotonic")


@dataclass(frozen=True)
class Calibration:
    """A map from scores (B, K) to probabilities (B, K), and how it was fitted.

    Attributes:
        method: "temperature", "platt" or "isotonic".
        values: the parameters of the method, float64: t for a temperature, a and c of each Platt map, or knots and values of
            each isotonic map, one after the other.
        sizes: the number of parameters of each map.
        samples: the number of samples in the fit. grouped: True if the fit used leave-group-out scores.
        by_label: True if each column is a separate label (``targets="multilabel"``), so that rows do not sum to one.
    """

    method: str
    values: Tensor
    sizes: tuple[int, ...]
    samples: int
    grouped: bool = False
    by_label: bool = False

    def __call__(self, scores: Tensor) -> Tensor:
        """Probabilities. scores: (B, K)."""
        if self.method == "temperature":
            return torch.softmax(self.values[0] * scores, 1)
        maps = self.values.split(list(self.sizes))
        columns = [scores[:, 1]] if len(maps) == 1 and not self.by_label else list(scores.unbind(1))
        out = []
        for s, numbers in zip(columns, maps, strict=True):
            if self.method == "platt":
                out.append(torch.sigmoid(numbers[0] * s + numbers[1]))
            else:
                knots, values = numbers.view(2, -1)
                out.append(interpolate(s, knots, values))
        if self.by_label:
            return strictly_inside(torch.stack(out, 1))
        return normalized(torch.stack([1 - out[0], out[0]] if len(out) == 1 else out, 1), scores)

    def __str__(self) -> str:
        if self.method == "isotonic":
            what = hashlib.sha256(self.values.cpu().numpy().tobytes()).hexdigest()
            return f"isotonic, {len(self.values) // 2} knots, sha256 {what}"
        return f"{self.method} {', '.join(repr(v) for v in self.values.tolist())}"

    def describe(self) -> dict[str, Any]:
        """All but the numbers, as primitives."""
        return {
            "method": self.method,
            "sizes": list(self.sizes),
            "samples": self.samples,
            "grouped": self.grouped,
            "by_label": self.by_label,
        }

    @classmethod
    def restore(cls, description: dict[str, Any], values: Tensor) -> Calibration:
        """Restore a calibration from :meth:`describe` and values (m,). Raises ValueError if the length does not match."""
        checks.one_of(description["method"], "calibration", CALIBRATION_METHODS)
        sizes = tuple(int(s) for s in description["sizes"])
        if values.shape != (sum(sizes),):
            raise ValueError(f"the calibration has shape {tuple(values.shape)}, not ({sum(sizes)},)")
        samples, grouped, by_label = (
            int(description["samples"]),
            bool(description["grouped"]),
            bool(description["by_label"]),
        )
        return cls(description["method"], values.to(torch.float64), sizes, samples, grouped, by_label)


def fit(scores: Tensor, y: Tensor, weight: Tensor, method: str | None) -> Calibration:
    """Fit a map. scores: (n, K); y: (n,) labels, or (n, K), > 0 where a sample has a label; weight: (n,)."""
    K, by_label = scores.shape[1], y.ndim == 2
    method = method or ("platt" if K == 2 or by_label else "temperature")
    checks.one_of(method, "method", CALIBRATION_METHODS[1:] if by_label else CALIBRATION_METHODS)
    if method == "temperature":
        return Calibration(method, fit_temperature(scores, y, weight), (1,), len(y))
    maps = []
    for k in [1] if K == 2 and not by_label else range(K):
        hit = y[:, k] > 0 if by_label else y == k
        if method == "platt":
            maps.append(fit_platt(scores[:, k], hit, weight))
        else:
            maps.append(torch.cat(fit_isotonic(scores[:, k], hit, weight)))
    return Calibration(method, torch.cat(maps), tuple(len(m) for m in maps), len(y), by_label=by_label)
