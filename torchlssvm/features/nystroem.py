"""The Nystroem map, which approximates a kernel by a few landmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks
from torchlssvm.functional.modes import exactly
from torchlssvm.functional.module_state import device_after
from torchlssvm.kernels import Kernel, as_kernel


class Nystroem(nn.Module):
    """Nystroem features of a kernel k: phi(x) = k(x, Z) K_ZZ^(-1/2) for m landmarks Z (m, J).

    The dot product phi(x) . phi(z) approximates k(x, z), and equals it if x and z are landmarks. ``fit(x)`` draws the landmarks
    from the rows of x. Because the landmarks determine all features, a head on these features cannot remove the influence of a
    landmark. Use public samples as landmarks, or fit again after an erasure. The last bit of the features may depend on the
    batch size, so keep the features that you add, and pass the same features to remove them.

    Args:
        kernel: a kernel of :mod:`torchlssvm.kernels`, or any callable ``(x1, x2) -> Gram``.
        landmarks: m, the number of landmarks and of features.
        seed: the seed with which the landmarks are drawn.
        device: the device of the landmarks.

    Example:
        >>> import torch
        >>> from torchlssvm.kernels import RBF
        >>> x = torch.randn(20, 3, dtype=torch.float64)
        >>> phi = Nystroem(RBF(sigma=1.0), 20).fit(x)(x)
        >>> torch.allclose(phi @ phi.T, RBF(sigma=1.0)(x, x))
        True
    """

    def __init__(
        self, kernel: Kernel | Callable[[Tensor, Tensor], Tensor], landmarks: int, *, seed: int = 0, device: Any = None
    ):
        super().__init__()
        if isinstance(landmarks, bool) or not isinstance(landmarks, int) or landmarks < 1:
            raise ValueError(f"landmarks must be a whole number >= 1, got {landmarks!r}")
        self.kernel, self.out_features, self.seed = as_kernel(kernel), landmarks, seed
        self.register_buffer("landmarks", torch.zeros(0, 0, dtype=torch.float64, device=device))
        self.register_buffer("root", torch.zeros(0, 0, dtype=torch.float64, device=device))

    landmarks: Tensor
    root: Tensor

    @exactly
    def fit(self, x: Tensor) -> Self:
        """Take landmarks from x (n, J), n >= m."""
        rows = self.kernel.prepare(checks.as_tensor(x, "x", self.landmarks.device)).to(torch.float64)
        if rows.ndim != 2 or len(rows) < self.out_features:
            raise ValueError(f"{self.out_features} landmarks need as many rows (n, J), got {tuple(rows.shape)}")
        if not bool(torch.isfinite(rows).all()):
            checks.raise_not_finite("x", rows)
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.seed))[: self.out_features]
        self.landmarks = rows[chosen.sort().values.to(rows.device)].clone()
        values, vectors = torch.linalg.eigh(self.kernel.tiled(self.landmarks, self.landmarks))
        least = torch.finfo(torch.float64).eps * len(values) * values[-1]
        inverse = torch.where(
            values > least, values.clamp(min=least), torch.inf
        ).rsqrt()  # zero where there is no direction
        self.root = (vectors * inverse) @ vectors.mT
        return self

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, m)
        """Return the features k(x, Z) K_ZZ^(-1/2) (B, m) in float64."""
        if not len(self.landmarks):
            raise NotFittedError("the map has no landmarks: call fit(x) first")
        rows = self.kernel.prepare(x).to(torch.float64)
        if rows.ndim != 2 or rows.shape[1] != self.landmarks.shape[1]:
            raise ValueError(f"x must have shape (B, {self.landmarks.shape[1]}), got {tuple(rows.shape)}")
        return self.kernel.tiled_product(rows, self.landmarks, self.root)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device. The state stays float64, even after ``.half()``."""
        del recurse
        device = device_after(fn, self.landmarks.device)
        self.kernel.to(device)
        self.landmarks, self.root = self.landmarks.to(device), self.root.to(device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("landmarks", "root"):  # buffers take the size of what is loaded
            saved = state_dict.get(prefix + name)
            if isinstance(saved, Tensor) and saved.ndim == 2 and len(saved) in (0, self.out_features):
                setattr(self, name, getattr(self, name).new_zeros(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """The number of landmarks and the seed."""
        return f"landmarks={self.out_features}, seed={self.seed}"
