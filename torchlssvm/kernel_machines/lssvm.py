"""The kernel LS-SVM: exact adding and removing by the block inverse (Duan et al.)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional import checks, kernel_lssvm
from torchlssvm.functional.modes import all_or_nothing, exactly
from torchlssvm.kernel_machines.kernel_machine import KernelMachine
from torchlssvm.kernels import Kernel, input_checks


class KernelLSSVM(KernelMachine):
    """Kernel least-squares SVM that learns and unlearns samples exactly: f(x) = k(x, X) alpha + b.

    alpha and b solve [[0, 1^T], [1, K + I/C]] [b; alpha] = [0; y]. The machine updates (K + I/C)^-1, which all classes share,
    for batches of any size. If an update would cost more than a new factorization
    (:func:`torchlssvm.functional.cost.block_update_pays`), the system is factored again. Every 64 updates, the machine checks a
    few equations and factors again if they no longer hold to 11 digits (with one ``NumericalWarning`` if they hold to less than
    9). With a linear kernel and more samples than features, :class:`torchlssvm.LSSVMHead` solves the same problem (rho = 1/C)
    from sums and does not keep the samples.

    Args:
        kernel: a kernel of :mod:`torchlssvm.kernels`, or any callable ``(x1, x2) -> Gram``.
        C: the penalty of an error, > 0, or one penalty per class (K,) as class weights. With a penalty per class, relabelling
            needs a new solve.
        num_classes: K, the number of classes. Pass 1 for numeric targets (B,).
        bias: fit an intercept b. If False, the machine is kernel ridge regression with the ridge 1/C.
        budget: the largest number of samples to keep; None for no limit. While there are more, the machine removes the sample
            whose removal changes its own score least, one at a time and exactly. The kept samples then depend on the order in
            which samples were added.
        device: the device of the samples and the solution.

    Example:
        >>> import torch
        >>> from torchlssvm.kernels import RBF
        >>> x = torch.tensor([[0.0], [1.0], [3.0], [4.0]])
        >>> svm = KernelLSSVM(RBF(sigma=1.0), C=10.0)
        >>> ids = svm.add(x, torch.tensor([0, 0, 1, 1]))
        >>> svm.predict(torch.tensor([[0.5], [3.5]]))
        tensor([0, 1])
        >>> svm.remove(ids[:1]).ids
        tensor([1, 2, 3])
    """

    _bias: bool

    def __init__(
        self,
        kernel: Kernel | Callable[[Tensor, Tensor], Tensor],
        C: float | Sequence[float] = 1.0,
        num_classes: int = 2,
        bias: bool = True,
        *,
        budget: int | None = None,
        device: torch.device | str | None = None,
    ):
        for name, value, least in (("num_classes", num_classes, 1), ("budget", budget, 2)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
        if not isinstance(bias, bool):
            raise ValueError(f"bias must be True or False, got {bias!r}")
        super().__init__(kernel, C, num_classes, device)
        self._bias, self._budget = bias, budget
        self._clear(0)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def num_classes(self) -> int:
        """K, the number of outputs."""
        return self._outputs

    @property
    def bias(self) -> bool:
        """True if the machine fits an intercept b."""
        return self._bias

    @property
    def budget(self) -> int | None:
        """The largest number of samples kept, or None."""
        return self._budget

    @property
    def targets(self) -> Tensor:
        """The targets (n, K) of the machine's samples, labels coded -1 and +1, in the order of ids."""
        return self._slots.y[self._slots.order()]

    @property
    def alpha(self) -> Tensor:
        """The coefficients (n, K), in the order of ids."""
        return self._solved(self._slots.order())[0]

    @property
    def b(self) -> Tensor:
        """The bias (K,); zeros with ``bias=False``."""
        return self._solved(self._slots.order_index())[1]

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """Compute scores k(x, X) alpha + b, float64; differentiable in x."""
        self._fitted()
        rows = input_checks.queries(x, self.kernel, self.in_features, self._device)
        # A compiled call uses the whole capacity, so that the shape fits the next call too.
        at = slice(0, self._slots.capacity) if torch.compiler.is_compiling() else self._slots.order_index()
        alpha, b = self._solved(at)
        return self.kernel.tiled_product(rows, self._slots.x[at], alpha) + b

    def predict(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """Return the class with the highest score (B,). Raises ValueError if the machine holds float targets."""
        predicted = super().predict(x)
        if not torch.compiler.is_compiling() and not checks.is_fake(predicted):
            y = self.targets
            if not bool(((y > 0).sum(1) == 1).all() & (y.abs() == 1.0).all()):
                raise ValueError(
                    "this machine has learned float targets (B, K), not classes: use its scores, machine(x). "
                    'LSSVMHead has targets="multilabel" and targets="regression"'
                )
        return predicted

    def decision(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """Compute the score of class 1, for two classes. It is positive if class 1 is predicted."""
        if self._outputs != 2:
            raise ValueError(f"decision is for two classes, there are {self._outputs}: use the scores")
        scores: Tensor = self(x)
        return scores[:, 1]

    def expansion(self) -> tuple[Tensor, Tensor, Tensor]:
        """Prepared rows (n, J), alpha (n, K) and b (K,), such that the scores are k(x, rows) alpha + b."""
        return self._slots.x[self._slots.order()], self.alpha, self.b

    @exactly
    def leave_one_out(self) -> Tensor:
        """Return exact leave-one-out scores (n, K) of all samples, in the order of ids, without refitting.

        Unlike :meth:`torchlssvm.LSSVMHead.leave_one_out`, this method needs no arguments: the machine keeps its samples.
        """
        alpha, H = self._left_out()
        return kernel_lssvm.leave_one_out(self._slots.y[self._slots.order_index()], alpha, H)

    @exactly
    def drift(self) -> float:
        """Return a bound on the relative error of the solution. Computes the kernel matrix once."""
        return float(self._solver.drift(self._slots.order())) if len(self) else 0.0

    # -- inside --------------------------------------------------------------------------------------------------------

    def _solved(self, at: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha (k, K) of the samples in these slots, which must be all samples, and b (K,)."""
        h = self._solver.h[at]
        if not self._slots.filled:
            return h[:, :-1], h.new_zeros(self._outputs)
        return kernel_lssvm.solve(h[:, :-1], h[:, -1], self._bias)

    def _change(self, removed: list[int], x: Tensor, y: Tensor) -> list[int]:
        """Change samples in parts that exceed the budget by at most an eighth, and drop the excess after each part."""
        if self._budget is None or len(self) - len(removed) + x.shape[0] <= self._budget:
            return super()._change(removed, x, y)
        part = max(1, self._budget // 8)
        ids: list[int] = []
        with all_or_nothing(self):
            self._solver = self._solver.copy(self.kernel)
            for start in range(0, x.shape[0], part):
                ids += super()._change(removed, x[start : start + part], y[start : start + part])
                removed = []
                while len(self) > self._budget:
                    super()._change([self._least()], *self._slots.nothing)
        return ids

    def _left_out(self) -> tuple[Tensor, Tensor]:
        self._fitted()
        if len(self) < 2:
            raise ValueError("leaving one out needs two samples or more, one is held")
        at = self._slots.order_index()
        e = self._solver.h[at, -1]
        return self.alpha, kernel_lssvm.left_out_diagonal(self._solver.diagonal()[at], e, self._bias)

    def _least(self) -> int:
        """Return the id of the sample whose removal changes its own score least."""
        alpha, H = self._left_out()
        ridge = self._solver.ridge(self._slots.y[self._slots.order()])
        return list(self._slots.slot_of)[int(kernel_lssvm.own_effect(alpha, H, ridge).argmin())]

    def _check_C(self, C: Any) -> float | Tensor:
        if isinstance(C, int | float):
            return checks.positive(C, "C")
        values = checks.as_tensor(C, "C", self._device).to(torch.float64)
        if values.shape != (self._outputs,) or self._outputs < 2 or not bool((values.isfinite() & (values > 0)).all()):
            raise ValueError(f"C must be a number > 0, or one for each of the {self._outputs} classes, got {C!r}")
        return values

    def _targets(self, y: Any, rows: Tensor) -> Tensor:
        if isinstance(self._C, float):
            return super()._targets(y, rows)
        input_checks.labels(y, rows, self._outputs)  # a C for each class needs classes
        return super()._targets(y, rows)

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"budget": self._budget}

    def _restore(self, settings: dict[str, Any]) -> None:
        super()._restore(settings)
        self._budget = settings["budget"]

    def extra_repr(self) -> str:
        """Describe the machine: count, classes and options."""
        budget = "" if self._budget is None else f", budget={self._budget}"
        return f"{super().extra_repr()}, num_classes={self._outputs}, bias={self._bias}{budget}"
