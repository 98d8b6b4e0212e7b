"""The Lagrangian SVM with exact adding and removing (Duan et al.)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError
from torchlssvm.functional import checks, lagrangian
from torchlssvm.functional.modes import atomically, exactly
from torchlssvm.kernel_machines.inverse import KernelInverse
from torchlssvm.kernel_machines.kernel_machine import KernelMachine
from torchlssvm.kernels import Kernel, input_checks


class LagrangianSVM(KernelMachine):
    """Lagrangian SVM for two classes with exact adding and removing: f(x) = sum_i y_i alpha_i (k(x, x_i) + 1).

    alpha >= 0 minimizes 1/2 alpha^T Q alpha - 1^T alpha with Q = I/C + D (K + 1 1^T) D, D = diag(y) (squared slacks). The block
    inverse keeps (K + 1 1^T + I/C)^-1 up to date as samples are added and removed. alpha is computed when you read it, starting
    from the last value.

    Args:
        kernel: a kernel of :mod:`torchlssvm.kernels`, or any callable ``(x1, x2) -> Gram``.
        C: the penalty of an error, > 0.
        step: lambda of the iteration, 0 < step < 2/C. Default: 1.9/C, as in the paper.
        tol: the iteration stops when the largest violation of 0 <= alpha _|_ Q alpha - 1 >= 0 and the largest move of alpha
            are at most ``tol``. alpha is never negative.
        solver: ``"newton"`` takes a handful of steps at any C and is exact to rounding: the error of alpha, relative to its
            largest entry, is at most eps n C max (K(x, x) + 1) (1e-13 at C = 1 and 1e-7 at C = 1e6 for 200 samples).
            ``"iteration"`` is equation (3) of the paper, which takes thousands of steps at a large C.
        bias: ``"added"`` adds one to the kernel, so that b = sum_i y_i alpha_i. ``"augmented"``, as in the paper, appends a
            constant to each row before the kernel is applied. An RBF kernel then has no bias, because the constant does not
            change its values.
        max_iter: the largest number of steps. If they do not suffice, ``ConvergenceError`` is raised, and the machine keeps its
            samples.
        device: the device of the samples and the solution.

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
    _C: float
    _step: float | None = None
    _carried = 1  # alpha, infinite for a sample that is new

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
        self._offset = 1.0 if bias == "added" else 0.0
        self.tol, self.max_iter = checks.positive(tol, "tol"), int(checks.positive(max_iter, "max_iter"))
        self._step = None if step is None else checks.positive(step, "step")
        self._check_C(C)
        self.iterations = 0
        self._clear(0)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> float:
        """Lambda of the iteration."""
        return 1.9 / self._C if self._step is None else self._step

    @property
    def bias(self) -> str:
        """How the bias is modelled: "added" or "augmented"."""
        return self._bias

    @property
    def in_features(self) -> int | None:
        """J, the width of the machine's rows; None while it has no samples."""
        J = super().in_features
        return J - 1 if J is not None and self._bias == "augmented" else J

    @property
    def alpha(self) -> Tensor:
        """The multipliers (n,), >= 0, in the order of ids."""
        self._solve()
        return self._slots.carried[self._slots.order_index(), 0].clone()

    @property
    def b(self) -> Tensor:
        """The bias (): sum_i y_i alpha_i, or zero with ``bias="augmented"``, where it is part of the kernel."""
        self._solve()
        return self._offset * self._coefficients(self._slots.order_index()).sum()

    def decision(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """Compute f(x), which is positive if class 1 is predicted; float64, differentiable in x."""
        self._fitted()
        if self._stale:
            self._solve()
        rows = self._prepare(input_checks.queries(x, self.kernel, self.in_features, self._device))
        at = slice(0, self._slots.capacity) if torch.compiler.is_compiling() else self._slots.order_index()
        beta = self._coefficients(at)
        return (self.kernel.tiled_product(rows, self._slots.x[at], beta) + self._offset * beta.sum())[:, 0]

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, 2)
        """Scores -f(x) and f(x) of the two classes."""
        f = self.decision(x)
        return torch.stack([-f, f], 1)

    @exactly
    def expansion(self) -> tuple[Tensor, Tensor, Tensor]:
        """Prepared rows (n, J), coefficients (n, 2) and b (2,), such that the scores are k(x, rows) coefficients + b."""
        self._solve()
        at, b = self._slots.order(), self.b.reshape(1)
        beta = self._coefficients(at)
        return self._slots.x[at], torch.cat([-beta, beta], 1), torch.cat([-b, b])

    @exactly
    def kkt_violation(self) -> float:
        """Return max |min(alpha, Q alpha - 1)|, with Q computed from the kernel. It is zero at the solution."""
        self._fitted()
        self._solve()
        alpha = self.alpha
        return float(lagrangian.violation(alpha, self._times_Q(alpha) - 1.0))

    # -- changing ------------------------------------------------------------------------------------------------------

    @atomically
    def relabel(self, ids: Any, y: Any) -> Self:
        """Change the labels of samples. The inverse does not change."""
        super().relabel(ids, y)
        self._stale = bool(len(self))
        return self

    def refresh(self) -> Self:
        """Compute the inverse again from the machine's samples. alpha is computed when you next read it."""
        super().refresh()
        self._stale = bool(len(self))
        return self

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check_C(self, C: Any) -> float:
        value: float = checks.positive(C, "C")
        if self._step is not None and not self._step < 2.0 / value:
            raise ValueError(
                f"step must be below 2/C = {2.0 / value:g} for the iteration to converge, got {self._step!r}"
            )
        return value

    def _prepare(self, rows: Tensor) -> Tensor:
        """[x, -1], as H = [A -e] in the paper."""
        return torch.nn.functional.pad(rows, (0, 1), value=-1.0) if self._bias == "augmented" else rows

    def _targets(self, y: Any, rows: Tensor) -> Tensor:
        return (2 * input_checks.labels(y, rows, 2) - 1).to(torch.float64)[:, None]

    def _clear(self, J: int, next_id: int = 0) -> None:
        super()._clear(J, next_id)
        self._stale = False

    def _coefficients(self, at: slice | Tensor) -> Tensor:
        """y alpha (k, 1) of these slots."""
        return self._slots.y[at] * self._slots.carried[at]

    def _change(self, removed: list[int], x: Tensor, y: Tensor) -> list[int]:
        out = super()._change(removed, x, y)
        self._stale = self._slots.filled
        return out

    def _times_Q(self, alpha: Tensor) -> Tensor:
        """Compute Q alpha (n,) by the kernel. alpha: (n,) in the order of ids."""
        order = self._slots.order()
        x, y = self._slots.x[order], self._slots.y[order, 0]
        v = (y * alpha)[:, None]
        return y * (self.kernel.tiled_product(x, x, v)[:, 0] + self._offset * v.sum()) + alpha / self._C

    @atomically
    def _solve(self) -> None:
        """Compute alpha if the machine's samples have changed."""
        if not self._stale:
            return
        slots, at = self._slots, self._slots.order_index()
        if self.solver == "iteration":
            result = self._iterate()
        else:
            result = self._all_support(at) or lagrangian.newton(
                self._support_solver(),
                slots.carried[at, 0] > 0.0,
                self._C,
                self.max_iter,  # new samples too
            )
        self.iterations = result.iterations
        if not result.converged:
            raise ConvergenceError(
                f"the {self.solver} solver did not reach tol={self.tol:g} in max_iter={self.max_iter} steps at C={self._C:g}: "
                "set max_iter or tol higher, C lower, or solver='newton', and read again. The samples are held."
            )
        slots.carried[at, 0] = result.alpha
        self._stale = False

    def _all_support(self, at: slice | Tensor) -> lagrangian.LagrangianResult | None:
        """Return Q^-1 1 if it is positive (at a small C), as it then is the solution; else None. at: slots by id."""
        alpha = self._slots.columns[at, 0] * self._solver.h[at, 0]
        positive = float(alpha.min()) > 0.0
        return lagrangian.LagrangianResult(alpha, torch.zeros_like(alpha), 1, True) if positive else None

    def _iterate(self) -> lagrangian.LagrangianResult:
        """Iterate equation (3). A cold start is Q^-1 1, where z = 0; a warm start, by (10), is the last alpha."""
        slots, inverse = self._slots, self._solver
        order = slots.order()
        y, start = slots.y[order, 0], slots.carried[order, 0]

        def product(v: Tensor) -> Tensor:
            in_slots = v.new_zeros(1, slots.top)
            in_slots[0, order] = y * v
            return y * inverse.product(in_slots)[0, order]

        new = torch.isinf(start)
        if bool(new.all()):
            start = y * inverse.h[order, 0]
            z = torch.zeros_like(start)
        else:
            start = torch.where(new, 0.0, start)
            z = self._times_Q(start) - 1.0
        largest = inverse.matrix_diagonal(slots.x[order], slots.y[order]).max()
        return lagrangian.iterate(product, start, z, self.step, self.tol, self.max_iter, largest)

    def _support_solver(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return a Newton step, a function from the support (n,) bool to alpha (n,) and z = Q alpha - 1 (n,)."""
        inverse, slots = self._solver, self._slots
        order, J = slots.order_index(), slots.x.shape[1]
        n, y = len(slots), slots.y[order, 0]
        # Flops of the kernel of a pair of rows: besides the 2 J of their product, an exponential and passes over memory.
        pair = inverse.kernel.floats(J) + 2 * J + 60

        def solve(support: Tensor) -> tuple[Tensor, Tensor]:
            outside = (~support).nonzero()[:, 0]
            if not len(outside):
                return y * inverse.h[order, 0], torch.zeros_like(y)
            inside = support.nonzero()[:, 0]
            i, a = len(inside), len(outside)
            by_kernel = i**3 / 3 + n * i * pair
            by_inverse = a**3 / 3 + 2 * n * a + (0 if inverse.U is not None else 2 * n**2 * a)
            if by_kernel < by_inverse:
                return step_by_kernel(inverse, y, inside, outside)
            return step_by_inverse(inverse, y, outside)

        return solve

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"step": self._step, "tol": self.tol, "iterations": self.iterations}

    def _restore(self, settings: dict[str, Any]) -> None:
        self._step, self.tol, self.iterations = settings["step"], float(settings["tol"]), int(settings["iterations"])
        super()._restore(settings)

    def _solution(self) -> Tensor:
        return torch.cat([self.alpha[:, None], super()._solution()], 1)

    def _resume(self, solution: Tensor) -> None:
        self._slots.carried[self._slots.order(), 0] = solution[:, 0]
        super()._resume(solution[:, 1:])
        self._stale = False

    def extra_repr(self) -> str:
        """Describe the machine: count and options."""
        return f"{super().extra_repr()}, solver={self.solver!r}, bias={self._bias!r}"


def step_by_kernel(inverse: KernelInverse, y: Tensor, inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Q_II alpha_I = 1, z_A = Q_AI alpha_I - 1."""
    alpha, z = torch.zeros_like(y), torch.zeros_like(y)
    if len(inside):
        order, rows = inverse.slots.order(), inverse.slots.x
        x, y_in = rows[order[inside]], y[inside]
        factor = inverse.factor_of(x, 1.0 / inverse.largest_C)
        beta = factor.solve(y_in[None])[0]  # Q_II = D (K + offset + I/C)_II D
        alpha[inside] = y_in * beta
        f = inverse.kernel.tiled_product(rows[order[outside]], x, beta[:, None])[:, 0]
        z[outside] = y[outside] * (f + inverse.offset * beta.sum()) - 1.0
    else:
        z[outside] = -1.0
    return alpha, z


def step_by_inverse(inverse: KernelInverse, y: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """U_AA z_A = -(U 1)_A, alpha = U 1 + U_:A z_A, with U in the signs of D."""
    order = inverse.slots.order()
    R = inverse.inverse_rows(order[outside])[:, order] * y * y[outside, None]  # (|A|, n)
    alpha, z = y * inverse.h[order, 0], torch.zeros_like(y)
    L, info = torch.linalg.cholesky_ex(R[:, outside])
    if int(info):  # rounding, at a large C
        inside = torch.ones_like(y, dtype=torch.bool)
        inside[outside] = False
        return step_by_kernel(inverse, y, inside.nonzero()[:, 0], outside)
    z[outside] = -torch.cholesky_solve(alpha[outside, None], L)[:, 0]
    alpha = alpha + z[outside] @ R
    alpha[outside] = 0.0
    return alpha, z
