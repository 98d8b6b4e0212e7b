"""The map from scores to probabilities that a head keeps."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.calibration import fit_isotonic, fit_platt, fit_temperature, interpolate, normalized

CALIBRATION_METHODS = ("temperature", "platt", "isotonic")


@dataclass(frozen=True)
class Calibration:
    """A map from scores (B, K) to probabilities (B, K), and how it was fitted.

    Attributes:
        method: "temperature", "platt" or "isotonic".
        values: its numbers, float64: t; a and c of each map; or knots and values of each map, one after the other.
        sizes: how many numbers each map has.
        samples: the number of samples in the fit. grouped: True if it was fitted on leave-group-out scores.
    """

    method: str
    values: Tensor
    sizes: tuple[int, ...]
    samples: int
    grouped: bool = False

    def __call__(self, scores: Tensor) -> Tensor:
        """Probabilities. scores: (B, K)."""
        if self.method == "temperature":
            return torch.softmax(self.values[0] * scores, 1)
        maps = self.values.split(list(self.sizes))
        columns = [scores[:, 1]] if len(maps) == 1 else list(scores.unbind(1))
        out = []
        for s, numbers in zip(columns, maps, strict=True):
            if self.method == "platt":
                out.append(torch.sigmoid(numbers[0] * s + numbers[1]))
            else:
                knots, values = numbers.view(2, -1)
                out.append(interpolate(s, knots, values))
        return normalized(torch.stack([1 - out[0], out[0]] if len(out) == 1 else out, 1), scores)

    def __str__(self) -> str:
        if self.method == "isotonic":
            what = hashlib.sha256(self.values.cpu().numpy().tobytes()).hexdigest()
            return f"isotonic, {len(self.values) // 2} knots, sha256 {what}"
        return f"{self.method} {', '.join(repr(v) for v in self.values.tolist())}"

    def describe(self) -> dict[str, Any]:
        """All but the numbers, as primitives."""
        more = {"grouped": True} if self.grouped else {}
        return {"method": self.method, "sizes": list(self.sizes), "samples": self.samples, **more}

    @classmethod
    def restore(cls, description: dict[str, Any], values: Tensor) -> Calibration:
        """Undo :meth:`describe`; ValueError if the values have another length. values: (m,)."""
        checks.one_of(description["method"], "calibration", CALIBRATION_METHODS)
        sizes = tuple(int(s) for s in description["sizes"])
        if values.shape != (sum(sizes),):
            raise ValueError(f"the calibration has shape {tuple(values.shape)}, not ({sum(sizes)},)")
        grouped = bool(description.get("grouped", False))
        return cls(description["method"], values.to(torch.float64), sizes, int(description["samples"]), grouped)


def fit(scores: Tensor, y: Tensor, weight: Tensor, method: str | None) -> Calibration:
    """Fit a map. scores: (n, K); y: (n,) labels; weight: (n,)."""
    K = scores.shape[1]
    method = method or ("platt" if K == 2 else "temperature")
    checks.one_of(method, "method", CALIBRATION_METHODS)
    if method == "temperature":
        return Calibration(method, fit_temperature(scores, y, weight), (1,), len(y))
    maps = []
    for k in [1] if K == 2 else range(K):
        if method == "platt":
            maps.append(fit_platt(scores[:, k], y == k, weight))
        else:
            maps.append(torch.cat(fit_isotonic(scores[:, k], y == k, weight)))
    return Calibration(method, torch.cat(maps), tuple(len(m) for m in maps), len(y))
