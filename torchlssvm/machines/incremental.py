"""``IncrementalSVM``: the support vector machine that learns and unlearns one sample, or many, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError, RemovalError
from torchlssvm.functional import checks
from torchlssvm.functional.modes import exactly
from torchlssvm.machines.incremental_base import Step
from torchlssvm.machines.incremental_estimates import Estimates
from torchlssvm.machines.incremental_saving import Saving
from torchlssvm.machines.svm_drive import Event

HALVINGS = 6
"""How often the way from one C to another is halved where rounding keeps it from being followed, before giving up."""

__all__ = ["Event", "IncrementalSVM", "RegularizationPath", "Step"]


class RegularizationPath(NamedTuple):
    """The solution for every C between two: alpha and b are linear in C between neighbouring breakpoints."""

    C: Tensor  # (T,) of class 1, first to last
    ids: Tensor  # (n,)
    alpha: Tensor  # (T, n)
    b: Tensor  # (T,)


class IncrementalSVM(Estimates, Saving):
    r"""The exact incremental and decremental SVM (Cauwenberghs and Poggio; Diehl and Cauwenberghs).

    f(x) = sum_j alpha_j y_j K(x_j, x) + b, where alpha minimizes 1/2 alpha^T Q alpha - sum alpha under 0 <= alpha_i <= C and
    sum y_i alpha_i = 0, Q_ij = y_i y_j K(x_i, x_j), y = -1 for class 0 and +1 for class 1. Every sample is in one of three sets
    by its g_i = y_i f(x_i) - 1: margin (g = 0), error (g <= 0, alpha = C), reserve (g >= 0, alpha = 0). Adding or removing a
    sample moves its coefficient while all others keep these conditions, in a number of steps each computed exactly.

    Args:
        kernel: a kernel of :mod:`torchlssvm.kernels`, any callable (x1, x2) -> Gram, or ``"precomputed"``: then ``add`` takes
            the kernel values (B, n + B) between the new samples and all (in the order of ``ids``, new ones last), and
            ``forward`` those (B, n) with the samples held.
        C: the bound of the coefficients, a number or one per class (2,). Per sample it is C times the ``weight`` of ``add``.
        callback: called with an :class:`Event` after each event.
        record: keep alpha, g and b of every event in ``trajectory``.
        reserve_limit: the epsilon of section 2.6: reserve vectors with g >= epsilon are forgotten. ``inexact`` is then True
            once that has happened. None: nothing is forgotten.
        cache_bytes: memory for rows of the kernel of samples outside the margin set.
        device: where the state lives.

    Example:
        >>> import torch
        >>> from torchlssvm.kernels import RBF
        >>> x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
        >>> y = (x[:, 0] > 0).long()
        >>> svm = IncrementalSVM(RBF(sigma=1.0), C=10.0)
        >>> ids = svm.add(x, y)
        >>> other = IncrementalSVM(RBF(sigma=1.0), C=10.0)
        >>> _ = other.add(x[20:], y[20:])
        >>> bool((svm.remove(ids[:20])(x) - other(x)).abs().max() < 1e-9)
        True
        >>> svm.kkt_violation() < 1e-10
        True
    """

    # -- changing ------------------------------------------------------------------------------------------------------

    def add(self, x: Any, y: Any, weight: Any = None, method: str = "auto") -> Tensor:
        """Learn samples. x: (B, J); y: (B,) labels 0 or 1; weight: (B,) factors of C. Returns their ids (B,).

        method: "auto"; "path" one sample after the other; "joint" all along one parameter; "pivot" by block pivoting. The
        answer is the same.
        """
        return self.update(add=(x, y, weight), method=method)

    def remove(self, ids: Any, method: str = "auto") -> IncrementalSVM:
        """Unlearn samples by the ids that ``add`` returned."""
        self.update(remove=ids, method=method)
        return self

    @exactly
    def update(self, add: tuple[Any, ...] | None = None, remove: Any = None, method: str = "auto") -> Tensor:
        """Add (x, y) or (x, y, weight) and remove ids at once, along one parameter. Returns the new ids."""
        checks.one_of(method, "method", ("auto", "path", "joint", "pivot"))
        new: list[int] = []
        batch = None
        if add is not None:
            if not isinstance(add, tuple | list) or not 2 <= len(add) <= 3:
                raise ValueError("add must be (x, y) or (x, y, weight)")
            batch = (self._one(*add[:2]) if add[-1] is None else None) or self._check(*add)
            new = list(range(self._engine.next_id, self._engine.next_id + len(batch.x)))
        gone = self._positions(remove)
        if new or gone:
            self._change(batch, new, gone, method)
            self._engine.next_id += len(new)
        ids = torch.from_numpy(np.array(new, dtype=np.int64))  # a third of what torch.tensor takes
        return ids if self.device.type == "cpu" else ids.to(self.device)

    @exactly
    def relabel(self, ids: Any, y: Any, method: str = "auto") -> IncrementalSVM:
        """Give samples held other labels; their ids stay."""
        places = self._positions(ids)
        labels = self._labels(y, len(places))
        keep = [k for k, i in enumerate(places) if self._differs(i, labels, k)]
        if keep:
            self._exchange([places[k] for k in keep], None, labels[keep], method)
        return self

    @exactly
    def replace(self, ids: Any, x: Any, y: Any, weight: Any = None, method: str = "auto") -> IncrementalSVM:
        """Exchange samples held for others; their ids stay. x: (B, J), or (B, n) if precomputed, with the samples held."""
        places = self._positions(ids)
        if self._engine.samples.precomputed:
            raise ValueError("replace needs a kernel; with precomputed values use update(add=..., remove=...)")
        batch = self._check(x, y, weight)
        if len(batch.y) != len(places):
            raise ValueError(f"replace got {len(places)} ids and {len(batch.y)} samples")
        if places:
            self._exchange(places, batch, batch.y, method)
        return self

    @exactly
    def fit(self, x: Any, y: Any, weight: Any = None) -> IncrementalSVM:
        """Forget everything and learn these samples: ids 0, 1, .... Two at a time, pivoting, R built once."""
        batch = self._check(x, y, weight, fresh=True)
        self.reset()
        if len(batch.y):
            self._change(batch, list(range(len(batch.y))), [], "auto")
            self._engine.next_id = len(batch.x)
        return self

    @exactly
    def set_C(self, C: Any, method: str = "auto") -> IncrementalSVM:
        """Change C, a number or one per class (2,). method: "auto" (pivoting, if it can) or "path"."""
        checks.one_of(method, "method", ("auto", "path"))
        bounds = self._bounds(C)
        if self.n:
            s = self._engine.samples
            with self._threads():
                self._engine.set_bounds(self._upper(s.y, s.weight, bounds), method)
            self._changed()
        self._C = bounds
        return self

    @exactly
    def regularization_path(self, C: Any) -> RegularizationPath:
        """Change C along the path, with every breakpoint: the solution for each C in between, by linear interpolation.

        alpha has kinks only where a sample changes sets; two values of C per class move together, in proportion.
        """
        start, end = self._C, self._bounds(C)
        seen: list[tuple[float, Tensor, float]] = [(start[1], self.alpha, self.b)]
        try:
            with self._threads():
                self._follow(start, end, seen, HALVINGS)
        except ConvergenceError:
            self.set_C(start)
            raise
        self._changed()
        along, alpha, b = zip(*seen, strict=True)
        return RegularizationPath(
            torch.tensor(along, dtype=torch.float64), self.ids, torch.stack(alpha), torch.tensor(b, dtype=torch.float64)
        )

    def _follow(self, start: tuple[float, float], end: tuple[float, float], seen: list[Any], halvings: int) -> None:
        """From one C to another, every breakpoint added to ``seen``; in two parts where it cannot be followed in one."""
        engine, known = self._engine, len(seen)
        s = engine.samples
        one = int((s.y > 0).long().argmax()) if s.n else 0  # a sample of class 1, if there is any

        def watch(event: Event) -> None:
            if event.to != "end":
                at = start[1] + event.p * (end[1] - start[1])
                if s.hy[one] > 0:
                    at = float(s.hu[one] / s.hweight[one])  # to the last bit the bound that alpha is at
                seen.append((at, self._ordered(torch.where(s.sign < 0, s.u, s.alpha)), engine.b))

        try:
            engine.follow_bounds(self._upper(s.y, s.weight, end), watch)
        except ConvergenceError:
            if not halvings:
                raise
            del seen[known:]
            middle = (0.5 * (start[0] + end[0]), 0.5 * (start[1] + end[1]))
            self._follow(start, middle, seen, halvings - 1)
            engine.polish()
            self._follow(middle, end, seen, halvings - 1)
            return
        self._C = end
        seen.append((end[1], self.alpha, self.b))

    @exactly
    def set_kernel(self, kernel: Any) -> IncrementalSVM:
        """Change the kernel, or its parameter, on the samples held, and correct the violations that this makes.

        With precomputed values: the new Gram matrix (n, n) in the order of ``ids``.
        """
        s = self._engine.samples
        with self._threads():
            if s.precomputed:
                K = self._gram(kernel)
                self._engine.set_kernel(None, K)
            else:
                new = self._kernel(kernel)
                if new is None or new.deep or (self.kernel is not None and self.kernel.deep):
                    raise ValueError("set_kernel cannot exchange a deep or precomputed kernel: its rows are not kept")
                self._engine.set_kernel(new)
                self.kernel = new
        self._changed()
        return self

    # -- inside --------------------------------------------------------------------------------------------------------

    def _change(self, batch: Any, new: list[int], gone: list[int], method: str) -> None:
        x, vectors = None, {}
        if batch is not None:
            x, vectors = batch.x, {"y": batch.y, "weight": batch.weight, "u": batch.u}
        with self._threads():
            self._engine.change(x, new, vectors, gone, method)
            self._forget_far()
        self._changed()

    def _exchange(self, places: list[int], batch: Any, y: Tensor, method: str) -> None:
        """Samples in these positions for others, under the same ids, along one parameter."""
        s = self._engine.samples
        at = torch.tensor(places, dtype=torch.int64, device=self.device)
        if batch is not None:
            x, weight = batch.x, batch.weight
        else:
            x, weight = s.x[at], s.weight[at]
            if s.precomputed:
                x = torch.cat([s.x[at][:, : s.n], s.x[at][:, at]], 1)
        u = self._upper(y, weight)
        ids = [s.ids[i] for i in places]
        with self._threads():
            self._engine.change(x, [-1 - i for i in ids], {"y": y, "weight": weight, "u": u}, places, method)
            s.rename({-1 - i: i for i in ids})
            self._forget_far()
        self._changed()

    def _positions(self, ids: Any) -> list[int]:
        """Positions of ids held; RemovalError for any that is not."""
        if ids is None:
            return []
        if isinstance(ids, Tensor) and checks.is_fake(ids):
            return list(range(len(ids)))
        if isinstance(ids, int):
            ids = [ids]
        wanted = list(ids) if isinstance(ids, list | tuple | range) else torch.as_tensor(ids).reshape(-1).tolist()
        s = self._engine.samples
        unknown = [i for i in wanted if i not in s.where and i not in self._dropped]
        if unknown:
            raise RemovalError(
                f"{len(unknown)} id(s) are not held, the first is {unknown[0]!r}; ids come from add, and end with remove"
            )
        if len(set(wanted)) < len(wanted):
            raise RemovalError("an id is given twice: each sample can be removed once")
        self._dropped -= set(wanted)
        return [s.where[i] for i in wanted if i in s.where]

    def _forget_far(self) -> None:
        """The epsilon rule of section 2.6."""
        if self.reserve_limit is None or checks.is_fake(self._engine.samples.y):
            return
        s = self._engine.samples
        far = ((s.sign > 0) & (s.slack >= self.reserve_limit)).nonzero()[:, 0].tolist()
        if far:
            self._dropped |= {s.ids[i] for i in far}
            self._engine.margin.moved(s.delete(far))
            self.inexact = True

    def on_event(self, callback: Callable[[Event], None] | None) -> IncrementalSVM:
        """Call this after each event from now on; None: no longer."""
        self._callback = callback
        self._watch()
        return self
