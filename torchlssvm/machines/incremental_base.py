"""State, input checks, reading and saving of :class:`IncrementalSVM`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks, svm_path
from torchlssvm.functional.modes import exactly
from torchlssvm.kernels import Kernel, as_kernel
from torchlssvm.machines.svm_drive import Event
from torchlssvm.machines.svm_engine import Engine
from torchlssvm.machines.svm_samples import as_tensor
from torchlssvm.machines.threads import single_thread


class Batch(NamedTuple):
    """Checked samples."""

    x: Any  # (B, J) prepared rows, or (B, n + B): a tensor, or an array on the host
    y: Any  # (B,) -1, +1, or one for all
    weight: Any  # (B,), or 1.0 for all
    u: Any  # (B,), or one for all


class Step(NamedTuple):
    """What ``trajectory`` keeps of one event."""

    event: Event
    ids: Tensor  # (n,)
    alpha: Tensor  # (n,)
    g: Tensor  # (n,)
    b: float


class SVMBase(nn.Module):
    """What the machine holds, and how it is read, checked and saved."""

    def __init__(
        self,
        kernel: Any,
        C: Any = 1.0,
        *,
        callback: Callable[[Event], None] | None = None,
        record: bool = False,
        reserve_limit: float | None = None,
        cache_bytes: int = 2**26,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.kernel = self._kernel(kernel)
        self._C = self._bounds(C)
        self.reserve_limit = None if reserve_limit is None else checks.positive(reserve_limit, "reserve_limit")
        if isinstance(cache_bytes, bool) or not isinstance(cache_bytes, int) or cache_bytes < 0:
            raise ValueError(f"cache_bytes must be a whole number >= 0, got {cache_bytes!r}")
        self._cache_bytes = cache_bytes
        self._callback, self.record = callback, bool(record)
        self.num_classes = 2
        self._support: tuple[Tensor, Tensor] | None = None  # support vectors and y alpha, once they have been asked for
        self._start(torch.device("cpu") if device is None else torch.empty(0, device=device).device)

    @staticmethod
    def _kernel(kernel: Any) -> Kernel | None:
        return None if isinstance(kernel, str) and kernel == "precomputed" else as_kernel(kernel)

    @exactly
    def _start(self, device: torch.device) -> None:
        self.device = device
        self._engine = Engine(self.kernel, device, self._cache_bytes)
        self._dropped: set[int] = set()
        self.inexact = False
        self.trajectory: list[Step] = []
        self._watch()
        self._changed()

    @exactly
    def reset(self) -> None:
        """Forget everything."""
        self._start(self.device)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def n(self) -> int:
        """Samples held."""
        return self._engine.samples.n

    def __len__(self) -> int:
        return self.n

    @property
    def C(self) -> Any:
        """The bound of the coefficients: a number, or one per class (2,)."""
        return self._C[0] if self._C[0] == self._C[1] else torch.tensor(self._C, dtype=torch.float64)

    @property
    def ids(self) -> Tensor:
        """The ids of the samples held (n,), in the order in which they were added; what follows is in this order."""
        return self._id_tensor(sorted(self._engine.samples.ids))

    @property
    def alpha(self) -> Tensor:
        """The coefficients (n,)."""
        return self._ordered(self._engine.samples.alpha)

    @property
    def g(self) -> Tensor:
        """g_i = y_i f(x_i) - 1 (n,)."""
        return self._ordered(self._engine.samples.g)

    @property
    def y(self) -> Tensor:
        """The labels (n,), 0 or 1."""
        return (self._ordered(self._engine.samples.y) > 0).long()

    @property
    def b(self) -> float:
        """The offset of f."""
        return self._engine.b

    @property
    def b_interval(self) -> tuple[float, float]:
        """The values that b can have: one, but for an empty margin set; b is then the middle, or the finite end."""
        s = self._engine.samples
        if len(self._engine.margin):
            return self.b, self.b
        if not self.n:
            return -float("inf"), float("inf")
        low, high = svm_path.b_interval(s.g, s.y, s.sign)
        return self.b + float(low), self.b + float(high)

    @property
    def margin(self) -> Tensor:
        """The ids of the margin vectors, the set S."""
        return self._set(0.0)

    @property
    def error(self) -> Tensor:
        """The ids of the error vectors, the set E."""
        return self._set(-1.0)

    @property
    def reserve(self) -> Tensor:
        """The ids of the reserve vectors, the set R."""
        return self._set(1.0)

    def partition(self) -> dict[str, Tensor]:
        """The sets S, E and R as ids: {"margin": ..., "error": ..., "reserve": ...}."""
        return {"margin": self.margin, "error": self.error, "reserve": self.reserve}

    def kkt_violation(self) -> float:
        """The largest violation of (2) and (3), every g computed from its definition; costs a kernel row per support vector.

        Rounding alone makes it about 1e-16 times the largest sum of |Q_ij| alpha_j.
        """
        return self._engine.violation() if self.n else 0.0

    @property
    def events(self) -> int:
        """How many events there have been: the unit of work of the path."""
        return self._engine.walker.events

    @exactly
    def polish(self) -> SVMBase:
        """R and every g anew, and Newton corrections: optimality to machine precision."""
        self._engine.polish()
        self._changed()
        return self

    def decision(self, x: Any) -> Tensor:  # (B, J) -> (B,)
        """f(x), positive for class 1; differentiable in x."""
        if not self.n:
            raise NotFittedError("no samples are held: add some first")
        s = self._engine.samples
        if self._support is None:
            self._support = self._find_support()
        used, coefficients = self._support
        if self.kernel is None:
            x = checks.features(x, self.n, self.device).to(torch.float64)
            K = x[:, self._rank()][:, used]
        else:
            if not isinstance(x, Tensor) or x.device != self.device or (not self.kernel.deep and self._bad(x)):
                x = checks.features(x, s.x.shape[1], self.device)
            x = x if self.kernel.deep else x.to(torch.float64)
            K = self.kernel.tiled(self.kernel.prepare(x).to(torch.float64), s.x[used])
        f: Tensor = K @ coefficients + self.b
        return f

    @exactly
    def _find_support(self) -> tuple[Tensor, Tensor]:
        s = self._engine.samples
        used = s.alpha.nonzero()[:, 0] if not checks.is_fake(s.alpha) else torch.arange(self.n, device=self.device)
        return used, (s.alpha * s.y)[used]

    def _bad(self, x: Tensor) -> bool:
        return x.is_complex() or x.ndim != 2 or x.shape[1] != self._engine.samples.x.shape[1]

    def forward(self, x: Any) -> Tensor:  # (B, J) -> (B, 2)
        """Scores (-f, f) of the two classes."""
        f = self.decision(x)
        return torch.stack([-f, f], 1)

    def predict(self, x: Any) -> Tensor:  # (B, J) -> (B,)
        """The class: 1 where f > 0."""
        return (self.decision(x) > 0).long()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        def watch(event: Event) -> None:
            if self.record:
                s = self._engine.samples
                self.trajectory.append(
                    Step(event, self.ids, self._ordered(s.alpha), self._ordered(s.g), self._engine.b)
                )
            if self._callback is not None:
                self._callback(event)

        self._engine.walker.watch = watch if self.record or self._callback is not None else None

    def _threads(self) -> Any:
        s = self._engine.samples
        return single_thread(self.device.type == "cpu" and s.n * max(1, self._engine.margin.top) < 4_000_000)

    def _changed(self) -> None:
        if self._support is not None:
            self._support = None

    def _id_tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.device)

    def _rank(self) -> Tensor:
        """For each position the place of its id among the sorted ids."""
        return torch.argsort(torch.argsort(self._id_tensor(self._engine.samples.ids)))

    def _ordered(self, values: Tensor) -> Tensor:
        return values[torch.argsort(self._id_tensor(self._engine.samples.ids))]

    def _set(self, sign: float) -> Tensor:
        s = self._engine.samples
        return self._id_tensor(sorted(s.ids[i] for i in (s.sign == sign).nonzero()[:, 0].tolist()))

    @staticmethod
    def _bounds(C: Any) -> tuple[float, float]:
        """C of class 0 and of class 1."""
        if isinstance(C, Tensor):
            C = C.tolist()
        if isinstance(C, list | tuple) and len(C) == 2:
            return checks.positive(C[0], "C"), checks.positive(C[1], "C")
        C = checks.positive(C, "C")
        return C, C

    def _upper(self, y: Tensor, weight: Any, C: tuple[float, float] | None = None) -> Any:
        """The bounds u (n,) of samples with these labels -1, +1 and weights; a number if they have one weight and one C."""
        low, high = self._C if C is None else C
        return weight * low if low == high else weight * y.new_tensor([low, high])[(y > 0).long()]

    def _labels(self, y: Any, count: int) -> Tensor:
        """Labels 0 or 1 as -1, +1."""
        y = checks.as_tensor(y, "y", self.device)
        if y.shape != (count,):
            raise ValueError(f"x and y differ in length: {count} samples, y has shape {tuple(y.shape)}")
        if y.numel() and y.dtype not in checks.INTEGER_DTYPES and y.dtype != torch.bool:
            raise ValueError(f"labels must be integers 0 or 1, got dtype {y.dtype}; use y.long()")
        if not checks.is_fake(y) and (wrong := set(y.tolist()) - {0, 1}):
            label = min(wrong) if min(wrong) < 0 else max(wrong)
            raise ValueError(f"labels must be 0 or 1, got {label}; OneVsRest and OneVsOne take more classes")
        return as_tensor(self._engine.samples.host(y) * 2.0 - 1.0).to(torch.float64)

    def _one(self, x: Any, y: Any) -> Batch | None:
        """One sample as it usually comes, checked in a few operations; None: for :meth:`_check` to look at."""
        s = self._engine.samples
        if type(x) is not Tensor or type(y) is not Tensor or s.loops is None or not s.lifted:
            return None
        if x.dtype is not torch.float64 or y.dtype is not torch.int64 or x.device.type != "cpu" or x.is_neg():
            return None
        if x.shape != (1, s.hx.shape[1]) or y.shape != (1,) or x.layout is not torch.strided or y.device.type != "cpu":
            return None
        row, label = x.detach().numpy(), int(y)
        if label not in (0, 1) or not math.isfinite(row[0] @ row[0]):
            return None
        return Batch(row, 2.0 * label - 1.0, 1.0, self._C[label])

    def _check(self, x: Any, y: Any, weight: Any = None, fresh: bool = False) -> Batch:
        s, kernel = self._engine.samples, self.kernel
        held = 0 if fresh else s.n
        x = checks.as_tensor(x, "x", self.device)
        if kernel is None:
            x = checks.features(x, held + (len(x) if x.ndim else 0), self.device)
        elif not kernel.deep:
            J = s.x.shape[1] if held else (x.shape[1] if x.ndim == 2 else 0)
            x = checks.features(x, J, self.device)
        if x.ndim == 0:
            raise ValueError("x must have a row for each sample, got a number")
        labels = self._labels(y, len(x))
        rows = (x if kernel is None else kernel.prepare(x)).to(torch.float64)
        if checks.not_finite(rows):
            checks.raise_not_finite("x", x if x.is_floating_point() else rows)
        w: Any = 1.0 if weight is None else checks.weights(weight, x)
        if weight is not None and w.numel() and not bool((torch.isfinite(w) & (w > 0)).all()):
            raise ValueError("weight must be finite and > 0: it multiplies C")
        if kernel is None and len(x):
            rows = self._in_positions(rows, held)
        return Batch(rows, labels, w, self._upper(labels, w))

    def _in_positions(self, K: Tensor, held: int) -> Tensor:
        """Kernel values whose columns are in the order of ids, in the order of positions."""
        new = K[:, held:]
        if not checks.is_fake(K) and not bool(torch.allclose(new, new.T, rtol=1e-9, atol=1e-12)):
            raise ValueError(
                "precomputed values among the new samples must be symmetric: the last B columns of (B, n + B)"
            )
        return torch.cat([K[:, :held][:, self._rank()] if held else K[:, :0], (new + new.T) * 0.5], 1)

    def _gram(self, K: Any) -> Tensor:
        gram: Tensor = checks.features(K, self.n, self.device).to(torch.float64)
        rank = self._rank()
        return ((gram + gram.T) * 0.5)[rank][:, rank]

    def _differs(self, i: int, labels: Tensor, k: int) -> bool:
        return checks.is_fake(labels) or float(self._engine.samples.hy[i]) != float(labels[k])

    def extra_repr(self) -> str:
        """C and the sizes of the sets."""
        return f"C={self.C}, n={self.n}, margin={len(self._engine.margin)}"
