"""What moves while a walk goes from p = 0 to 1, and what a walk reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchlssvm.machines.svm_samples import Samples, as_tensor, places


class Drive:
    """Coefficients move at the rate d to their target, upper bounds at the rate ``rise``, the gradient at the rate ``tilt``.

    Margin vectors are never driven. ``force`` is the rate of g with the margin vectors at rest, Q d + tilt.
    """

    def __init__(
        self,
        samples: Samples,
        d: Any,  # (n,) rate of alpha; zero where it does not move by itself
        target: Any,  # (n,) alpha at p = 1
        rise: Tensor | None = None,  # (n,) rate of the upper bounds u
        tilt: Tensor | None = None,  # (n,) rate of g that no coefficient causes
        force: Any = None,  # (n,) Q d, where it is known; it is changed
    ):
        host = samples.host
        self.hd, self.htarget, self.tilted = host(d), host(target), tilt is not None
        self.hforce = host(samples.product(as_tensor(d)) if force is None else force)
        if tilt is not None:
            self.hforce = self.hforce + host(tilt)
        self.hrise = None if rise is None else host(rise)
        self.size = 0.0
        self.measure(samples)

    @classmethod
    def single(cls, samples: Samples, i: int, target: float) -> Drive:
        """One coefficient moves, from where it is to its target."""
        d, end = samples.zeros(), samples.zeros()
        d[i], end[i] = target - samples.halpha[i], target
        return cls(samples, d, end, force=samples.host(samples.q(i)) * float(d[i]))

    def measure(self, samples: Samples) -> None:
        """Who is driven, the balance sum y_k d_k, and the largest sum |d_k| so far: the rounding of ``force`` goes with it."""
        self.driven = places(self.hd)
        if len(self.driven) == 1:
            i = int(self.driven[0])
            rate = float(self.hd[i])
            self.balance, self.size = float(samples.hy[i]) * rate, max(self.size, abs(rate))
            return
        d = self.hd[self.driven]
        self.balance = float((samples.hy[self.driven] * d).sum())
        self.size = max(self.size, float(abs(d).sum()))

    def place(self, samples: Samples, p: float) -> None:
        """The coefficients at p: only where they are asked for on the way."""
        samples.halpha[self.driven] = self.htarget[self.driven] - (1.0 - p) * self.hd[self.driven]


@dataclass
class Event:
    """One step of a walk: at ``p``, sample ``id`` went to ``to``: "margin", "error", "reserve"; "end" when p = 1."""

    p: float
    id: int | None
    to: str
    step: float
