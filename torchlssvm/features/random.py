"""Random feature maps whose weights are drawn once from a seed, with the same bits on every machine."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchlssvm.functional import checks, projection


class RandomProjection(nn.Module):
    """The base of random maps: integer weights (J, M), drawn from a seed and saved. ``.half()`` does not change them."""

    weight: Tensor

    def __init__(self, in_features: int, out_features: int, seed: int, device: Any):
        super().__init__()
        for name, value, most in (
            ("in_features", in_features, projection.MOST_FEATURES),
            ("out_features", out_features, 2**31),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name} must be a whole number in 1..{most}, got {value!r}")
        self.in_features, self.out_features, self.seed = in_features, out_features, seed
        self.register_buffer("weight", projection.weights((in_features, out_features), seed).to(device))

    def project(self, x: Tensor) -> Tensor:
        """x W (B, M)."""
        if x.ndim != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"x must have shape (B, {self.in_features}), got {tuple(x.shape)}")
        return projection.project(x, self.weight) / projection.WEIGHT_SCALE

    def extra_repr(self) -> str:
        """The widths and the seed."""
        return f"{self.in_features}, {self.out_features}, seed={self.seed}"


class RandomReLU(RandomProjection):
    """Lift J features to M random features: phi(x) = relu(x W) / s.

    W (J, M) is standard normal, and s is a power of two near sqrt(J). The features of a sample do not depend on the batch
    (:mod:`torchlssvm.functional.projection`). A head that learns these features class by class therefore has the same digest
    as a head that learns all classes at once. RanPAC, a method for continual learning, uses such a lift as its second stage.

    Example:
        >>> import torch
        >>> from torchlssvm import attach
        >>> clf = attach(RandomReLU(64, 500), num_classes=2, in_features=500)
        >>> x, y = torch.randn(50, 64), torch.arange(50) % 2
        >>> clf.add(x, y).head.n
        50
    """

    def __init__(self, in_features: int, out_features: int, *, seed: int = 0, device: Any = None):
        super().__init__(in_features, out_features, seed, device)
        self.scale = 2.0 ** -round(math.log2(in_features) / 2)

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, M)
        """Return the features relu(x W) / s (B, M) in float64."""
        return self.project(x).relu() * self.scale


class RandomFourier(RandomProjection):
    """Random Fourier features of the RBF kernel: phi(x) = sqrt(2/M) cos(x W sqrt(2 gamma) + t) (Rahimi and Recht).

    The dot product phi(x) . phi(z) approximates exp(-gamma |x - z|^2), with an error that decreases as 1/sqrt(M). Pass sigma or
    gamma, as for :class:`torchlssvm.kernels.RBF`. The projection is exact, but the last bit of the cosine depends on the
    device.

    Example:
        >>> import torch
        >>> from torchlssvm.kernels import RBF
        >>> x = torch.randn(5, 3, dtype=torch.float64)
        >>> phi = RandomFourier(3, 4000, sigma=2.0)(x)
        >>> bool((phi @ phi.T - RBF(sigma=2.0)(x, x)).abs().max() < 0.1)
        True
    """

    phase: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sigma: float | None = None,
        *,
        gamma: float | None = None,
        seed: int = 0,
        device: Any = None,
    ):
        super().__init__(in_features, out_features, seed, device)
        if (sigma is None) == (gamma is None):
            raise ValueError(f"give either sigma or gamma, got sigma={sigma!r}, gamma={gamma!r}")
        self.gamma = checks.positive(gamma, "gamma") if sigma is None else 0.5 / checks.positive(sigma, "sigma") ** 2
        turns = torch.randint(2**15, (out_features,), generator=torch.Generator().manual_seed(seed + 1))
        self.register_buffer("phase", turns.to(torch.int16).to(device))  # in 2^-15 turns

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, M)
        """Return the features sqrt(2/M) cos(x W sqrt(2 gamma) + t) (B, M) in float64."""
        angle = self.project(x) * math.sqrt(2.0 * self.gamma) + self.phase.to(torch.float64) * (2.0 * math.pi / 2**15)
        return torch.cos(angle) * math.sqrt(2.0 / self.out_features)

    def get_extra_state(self) -> Tensor:
        """The width gamma, saved with the module."""
        return torch.tensor([self.gamma], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore a saved gamma."""
        self.gamma = float(state[0])
