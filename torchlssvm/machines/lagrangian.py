"""The Lagrangian SVM with exact adding and removing (Duan et al.)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError
from torchlssvm.functional import checks, lagrangian
from torchlssvm.functional.modes import exactly
from torchlssvm.kernels import Kernel
from torchlssvm.machines import batch
from torchlssvm.machines.base import KernelMachine
from torchlssvm.machines.inverse import Inverse
from torchlssvm.machines.rows import Rows
from torchlssvm.machines.support import support_solver


class LagrangianSVM(KernelMachine):
    """f(x) = sum_i y_i alpha_i (k(x, x_i) + 1), alpha = argmin over alpha >= 0 of 1/2 alpha^T Q alpha - 1^T alpha.

    Two classes, with squared slacks: Q = I/C + D (K + 1 1^T) D, D = diag(y). (K + 1 1^T + I/C)^-1 is kept up to date as
    samples come and go, by the block inverse; alpha is found when somebody looks, from where it was.

    Args:
        kernel: from :mod:`torchlssvm.kernels`, or any callable ``(x1, x2) -> Gram``.
        C: the penalty of an error, > 0.
        step: lambda of the iteration, 0 < step < 2/C; None means 1.9/C, as in the paper.
        tol: how far alpha may be from fulfilling 0 <= alpha _|_ Q alpha - 1 >= 0, and may still move.
        solver: ``"newton"``, a handful of steps at any C, exact to rounding; or ``"iteration"``, equation (3) of the paper,
            which at a large C takes thousands.
        bias: ``"added"`` adds one to the kernel, b = sum_i y_i alpha_i. ``"augmented"`` is the paper's model, which appends a
            constant to each row before the kernel is applied; for RBF that is the kernel itself, and hence no bias at all.
        max_iter: more steps than this are a ``ConvergenceError``; the samples are held all the same.
        device: where the state lives.

    Example:
        >>> import torch
        >>> from torchlssvm.kernels import RBF
        >>> x = torch.tensor([[0.0], [1.0], [3.0], [4.0]])
        >>> svm = LagrangianSVM(RBF(sigma=1.0), C=10.0)
        >>> ids = svm.add(x, torch.tensor([0, 0, 1, 1]))
        >>> svm.predict(torch.tensor([[0.5], [3.5]]))
        tensor([0, 1])
        >>> svm.remove(ids[:1]).alpha.shape, svm.kkt_violation() < 1e-12
        (torch.Size([3]), True)
    """

    num_classes = 2

    def __init__(
        self,
        kernel: Kernel | Callable[[Tensor, Tensor], Tensor],
        C: float = 1.0,
        step: float | None = None,
        tol: float = 1e-5,
        solver: str = "newton",
        bias: str = "added",
        *,
        max_iter: int = 10_000,
        device: torch.device | str | None = None,
    ):
        super().__init__(kernel, C, 1, device)
        self.solver: str = checks.one_of(solver, "solver", ("newton", "iteration"))
        self._bias: str = checks.one_of(bias, "bias", ("added", "augmented"))
        self.tol, self.max_iter = checks.positive(tol, "tol"), int(checks.positive(max_iter, "max_iter"))
        self._step = None if step is None else self._check_step(step, self._C)
        self.iterations = 0
        self._clear(0)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> float:
        """Lambda of the iteration."""
        return 1.9 / self._C if self._step is None else self._step

    @property
    def bias(self) -> str:
        """How a constant comes in: "added" or "augmented"."""
        return self._bias

    @property
    def in_features(self) -> int | None:
        """J, the width of the rows held; None while there are none."""
        J = super().in_features
        return J - 1 if J is not None and self._bias == "augmented" else J

    @property
    def alpha(self) -> Tensor:
        """The multipliers (n,), >= 0, in the order of ids."""
        self._solve()
        return self._alpha.clone()

    @property
    def b(self) -> Tensor:
        """The bias (): sum_i y_i alpha_i, or zero with ``bias="augmented"``, where the kernel has it."""
        self._solve()
        return self._offset * self._coefficients.sum()

    def decision(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """f(x), positive where class 1 is predicted; float64, differentiable in x."""
        self._fitted()
        if self._stale:
            self._solve()
        rows = self._augment(batch.queries(x, self.kernel, self.in_features, self._device))
        top = self._rows.capacity if torch.compiler.is_compiling() else self._rows.top
        K_beta = self.kernel.tiled_product(rows, self._rows.x[:top], self._coefficients[:top])
        return (K_beta + self._offset * self._coefficients.sum())[:, 0]

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, 2)
        """Scores -f(x) and f(x) of the two classes."""
        f = self.decision(x)
        return torch.stack([-f, f], 1)

    @exactly
    def kkt_violation(self) -> float:
        """max |min(alpha, Q alpha - 1)|, with Q from the kernel anew: zero at the solution."""
        self._fitted()
        self._solve()
        z = self._times_Q(self._alpha) - 1.0
        return float(lagrangian.violation(self._alpha, z))

    # -- changing ------------------------------------------------------------------------------------------------------

    @exactly
    def add(self, x: Any, y: Any) -> Tensor:
        """Learn samples. x: (B, J); y: (B,) labels 0 or 1. Returns their ids (B,), valid for life."""
        x, y = self._check(x, y)
        return self._names(self._change([], self._augment(x), y))

    @exactly
    def remove(self, ids: Any) -> LagrangianSVM:
        """Unlearn samples by id."""
        self._change(self._rows.find(ids), self._rows.x[:0], self._rows.y[:0])
        return self

    @exactly
    def update(self, add: tuple[Any, Any], remove: Any) -> Tensor:
        """Add samples (x, y) and remove others by id, jointly; returns the ids of those added."""
        x, y = self._check(*add)
        return self._names(self._change(self._rows.find(remove), self._augment(x), y))

    @exactly
    def relabel(self, ids: Any, y: Any) -> LagrangianSVM:
        """Give samples other labels: the inverse is left alone."""
        found, y = self._check_relabel(ids, y)
        if found:
            self._engine.retarget(found, y)
            self._stale = True
        return self

    def refresh(self) -> LagrangianSVM:
        """Compute the inverse anew from the samples held; alpha follows when it is read."""
        super().refresh()
        self._stale = bool(len(self))
        return self

    @KernelMachine.C.setter  # type: ignore[untyped-decorator, attr-defined]
    def C(self, value: float) -> None:
        """Change the penalty: one solve."""
        if self._step is not None:
            self._check_step(self._step, checks.positive(value, "C"))
        KernelMachine.C.fset(self, value)  # type: ignore[attr-defined]

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _offset(self) -> float:
        return 1.0 if self._bias == "added" else 0.0

    @staticmethod
    def _check_step(step: float, C: float) -> float:
        step = checks.positive(step, "step")
        if not step < 2.0 / C:
            raise ValueError(f"step must be below 2/C = {2.0 / C:g} for the iteration to converge, got {step!r}")
        return step

    def _augment(self, rows: Tensor) -> Tensor:
        """[x, -1], as H = [A -e] in the paper."""
        return torch.nn.functional.pad(rows, (0, 1), value=-1.0) if self._bias == "augmented" else rows

    def _targets(self, y: Any, rows: Tensor) -> Tensor:
        labels, kind = checks.targets(y, rows, 2)
        if kind != "labels":
            raise ValueError(f"y must be labels 0 or 1 of shape (B,), got float targets of shape {tuple(labels.shape)}")
        return batch.targets(labels, rows, 2)[:, 1:]

    def _clear(self, J: int) -> None:
        self._engine = self._make_engine(self._new_rows(J))
        self._seen = torch.zeros(0, dtype=torch.int64)  # the ids that alpha is for
        self._alpha = self._rows.x.new_zeros(0)
        self._coefficients, self._stale = torch.zeros_like(self._rows.y), False

    def _make_engine(self, rows: Rows, settings: dict[str, Any] | None = None) -> Inverse:
        return Inverse(self.kernel, rows, self._C, self._offset)

    def _change(self, removed: list[int], x: Tensor, y: Tensor) -> list[int]:
        if not removed and not len(x):
            return []
        if not len(self) and x.shape[1] != self._rows.x.shape[1]:
            self._clear(x.shape[1])
        out: list[int] = self._engine.change(removed, x, y)
        self._next_id, self._stale = self._rows.next_id, True
        if not len(self):
            self._clear(0)
        return out

    def _times_Q(self, alpha: Tensor) -> Tensor:
        """Q alpha (n,), by the kernel. alpha: (n,) in the order of ids."""
        order = self._rows.order()
        x, y = self._rows.x[order], self._rows.y[order, 0]
        v = (y * alpha)[:, None]
        return y * (self.kernel.tiled_product(x, x, v)[:, 0] + self._offset * v.sum()) + alpha / self._C

    def _warm(self) -> tuple[Tensor, Tensor]:
        """alpha of what was there before, zero for new samples; and which are new: (n,) each, in the order of ids."""
        ids, n = self._rows.ids, len(self)
        if checks.is_fake(ids, self._seen) or not len(self._seen):
            return self._alpha.new_zeros(n), torch.ones(n, dtype=torch.bool, device=self._device)
        at = torch.searchsorted(self._seen, ids).clamp(max=len(self._seen) - 1)
        old = self._seen[at] == ids
        alpha = torch.where(old.to(self._device), self._alpha[at.to(self._device)], 0.0)
        return alpha, ~old.to(self._device)

    @exactly
    def _solve(self) -> None:
        """alpha for the samples held, if they have changed."""
        if not self._stale:
            return
        alpha, new = self._warm()
        engine, order = self._engine, self._rows.order()
        if self.solver == "newton":
            solve = support_solver(engine, order)
            result = lagrangian.newton(solve, (alpha > 0) | new, self._C, self.max_iter)
        else:
            engine.settle()
            order = self._rows.order()
            y = self._rows.y[order, 0]

            def product(v: Tensor) -> Tensor:
                slots = v.new_zeros(1, self._rows.top)
                slots[0, order] = y * v
                out: Tensor = engine.product(slots)
                return y * out[0, order]

            # Cold, equation (3) starts from Q^-1 1, where z = 0; warm, (10) starts from what alpha was.
            cold = bool(new.all()) if not checks.is_fake(new) else True
            start = y * engine.h[order, 0] if cold else alpha
            z = torch.zeros_like(start) if cold else self._times_Q(start) - 1.0
            result = lagrangian.iterate(product, start, z, self.step, self.tol, self.max_iter)
        self.iterations = result.iterations
        if not result.converged:
            raise ConvergenceError(
                f"the {self.solver} solver did not reach tol={self.tol:g} in max_iter={self.max_iter} steps at C={self._C:g}: "
                "set max_iter or tol higher, C lower, or solver='newton', and read again. The samples are held."
            )
        self._alpha, self._seen, self._stale = result.alpha, self._rows.ids, False
        self._publish()

    def _moved(self) -> None:
        self._alpha, self._coefficients = self._alpha.to(self._device), self._coefficients.to(self._device)

    def _publish(self) -> None:
        order = self._rows.order()
        self._coefficients = torch.zeros_like(self._rows.y)
        self._coefficients[order, 0] = self._rows.y[order, 0] * self._alpha

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {
            "bias": self._bias,
            "step": self._step,
            "tol": self.tol,
            "iterations": self.iterations,
        }

    def _restore(self, settings: dict[str, Any]) -> None:
        if settings["bias"] != self._bias:
            raise ValueError(f"bias is {settings['bias']!r} in the saved machine and {self._bias!r} here")
        super()._restore(settings)
        self._step, self.tol, self.iterations = settings["step"], float(settings["tol"]), int(settings["iterations"])

    def _solution(self) -> Tensor:
        self._solve()
        if len(self):
            self._publish()
        return torch.cat([self._alpha[:, None], self._engine.h[self._rows.order()]], 1)

    def _resume(self, solution: Tensor) -> None:
        if solution.shape != (len(self), 3):
            raise ValueError(f"solution has shape {tuple(solution.shape)}, needed {(len(self), 3)}")
        self._alpha, self._seen, self._stale = solution[:, 0].clone(), self._rows.ids, False
        self._engine.h[self._rows.order()] = solution[:, 1:]
        self._publish()

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: solved, and nothing of a removed sample is in there."""
        self._solve()
        state = super().__getstate__()
        if len(self):
            self._publish()
        return state | {"_coefficients": self._coefficients}

    def extra_repr(self) -> str:
        """Count and options."""
        return f"{super().extra_repr()}, solver={self.solver!r}, bias={self._bias!r}"
