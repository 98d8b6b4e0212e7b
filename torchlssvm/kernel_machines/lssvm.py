"""The kernel LS-SVM: exact adding and removing by the block inverse (Duan et al.)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional import checks, kernel_lssvm
from torchlssvm.functional.modes import atomically, exactly
from torchlssvm.kernel_machines import input_checks
from torchlssvm.kernel_machines.dual import DualForm
from torchlssvm.kernel_machines.kernel_machine import KernelMachine
from torchlssvm.kernel_machines.primal import PrimalForm
from torchlssvm.kernel_machines.sample_slots import SampleSlots
from torchlssvm.kernels import Kernel, Linear


class KernelLSSVM(KernelMachine):
    """f(x) = k(x, X) alpha + b with [[0, 1^T], [1, K + I/C]] [b; alpha] = [0; y]: least squares in feature space.

    Samples are learned and unlearned exactly, in batches of any size, by updating (K + I/C)^-1, which all classes share. Where
    that does not pay the system is factored anew; :func:`torchlssvm.functional.cost.block_update_pays` decides. A few
    equations are checked every 64 updates, and the system is factored anew when they no longer hold to 11 digits (with a
    ``NumericalWarning``, once, should it be less than 9). A linear kernel with more samples than features is solved in the
    primal, with the same answers.

    Args:
        kernel: from :mod:`torchlssvm.kernels`, or any callable ``(x1, x2) -> Gram``.
        C: the penalty of an error, > 0.
        num_classes: K; with 1 the targets are numbers (B,).
        bias: fit a b; without it this is kernel ridge regression with the ridge 1/C.
        budget: keep at most this many samples: whenever there are more, the one whose leaving out moves the scores at its
            own place the least is removed, exactly, one by one. What is kept then depends on the order of the samples.
        device: the device of the state.

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

    _solver: DualForm | PrimalForm

    def __init__(
        self,
        kernel: Kernel | Callable[[Tensor, Tensor], Tensor],
        C: float = 1.0,
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
        """True if there is a b."""
        return self._bias

    @property
    def budget(self) -> int | None:
        """The largest number of samples kept, or None."""
        return self._budget

    @property
    def alpha(self) -> Tensor:
        """The coefficients (n, K), in the order of ids."""
        return self._solver.alpha()

    @property
    def b(self) -> Tensor:
        """The bias (K,); zeros with ``bias=False``."""
        return self._solver.b

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """Scores k(x, X) alpha + b, float64; differentiable in x."""
        self._fitted()
        return self._solver.scores(input_checks.queries(x, self.kernel, self.in_features, self._device))

    def decision(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """Of two classes: the score of class 1, positive where it is predicted."""
        if self._outputs != 2:
            raise ValueError(f"decision is for two classes, there are {self._outputs}: use the scores")
        scores: Tensor = self(x)
        return scores[:, 1]

    def expansion(self) -> tuple[Tensor, Tensor, Tensor]:
        """Prepared rows (n, J), alpha (n, K) and b (K,), such that the scores are k(x, rows) alpha + b."""
        return self._slots.x[self._slots.order()], self.alpha, self.b

    @exactly
    def leave_one_out(self) -> Tensor:
        """Score (n, K) of each sample held by the machine without it, in the order of ids. Exact, and needs no refit.

        Scores as :meth:`torchlssvm.LSSVMHead.leave_one_out` returns them; no samples are given, as the machine keeps them.
        """
        alpha, H = self._left_out()
        return kernel_lssvm.leave_one_out(self._slots.y[self._slots.order_index()], alpha, H)

    @exactly
    def drift(self) -> float:
        """A bound of the relative error of the solution, from the residuals of all equations. Costs the kernel matrix once."""
        return float(self._solver.drift()) if len(self) else 0.0

    # -- changing ------------------------------------------------------------------------------------------------------

    @atomically
    def add(self, x: Any, y: Any) -> Tensor:
        """Learn samples. x: (B, J); y: (B,) labels or (B, K) targets. Returns their ids (B,), valid for life."""
        x, y = self._check(x, y)
        return self._names(self._change_within_budget([], x, y))

    @atomically
    def remove(self, ids: Any) -> KernelLSSVM:
        """Unlearn samples by id."""
        found = self._slots.find(ids)
        self._change(found, *self._slots.nothing)
        return self

    @atomically
    def update(self, add: tuple[Any, Any], remove: Any) -> Tensor:
        """Add samples (x, y) and remove others by id, jointly; returns the ids of those added."""
        x, y = self._check(*add)
        return self._names(self._change_within_budget(self._slots.find(remove), x, y))

    @atomically
    def replace(self, ids: Any, x: Any, y: Any) -> KernelLSSVM:
        """Exchange the samples behind these ids for others."""
        found = self._slots.find(ids)
        x, y = self._check(x, y)
        if x.shape[0] != len(found):
            raise ValueError(f"x has {x.shape[0]} rows for {len(found)} ids")
        before = self._slots.next_id
        new = self._change(found, x, y)
        self._slots.rename(new, found)
        self._slots.next_id = before
        return self

    @atomically
    def relabel(self, ids: Any, y: Any) -> KernelLSSVM:
        """Give samples other labels (or targets): the inverse is left alone."""
        found, y = self._check_relabel(ids, y)
        if found:
            self._solver.retarget(found, y)
        return self

    # -- inside --------------------------------------------------------------------------------------------------------

    def _clear(self, J: int, next_id: int = 0) -> None:
        self._solver = self._make_solver(self._new_slots(J, next_id))

    def _make_solver(self, slots: SampleSlots, settings: dict[str, Any] | None = None) -> DualForm | PrimalForm:
        primal = settings is not None and settings["form"] == "primal"
        if primal:
            return PrimalForm(slots, self._C, self._bias)
        return DualForm(self.kernel, slots, self._C, self._bias)

    def _change_within_budget(self, removed: list[int], x: Tensor, y: Tensor) -> list[int]:
        """Change samples in parts that exceed the budget by an eighth at most, and drop what is too much after each."""
        if self._budget is None or len(self) - len(removed) + x.shape[0] <= self._budget:
            return self._change(removed, x, y)
        part = max(1, self._budget // 8)
        before = self._solver.copy(self.kernel)
        try:
            ids = self._change(removed, x[:part], y[:part])
            self._keep_budget()
            for start in range(part, x.shape[0], part):
                ids += self._change([], x[start : start + part], y[start : start + part])
                self._keep_budget()
        except BaseException:
            self._solver = before
            raise
        return ids

    def _keep_budget(self) -> None:
        while self._budget is not None and len(self) > self._budget:
            self._change([self._least()], *self._slots.nothing)

    def _change(self, removed: list[int], x: Tensor, y: Tensor) -> list[int]:
        if not removed and not x.shape[0]:
            return []
        slots, J = self._slots, x.shape[1]
        if not slots.filled and slots.x.shape[1] != J:
            self._clear(J, slots.next_id)
        elif type(self.kernel) is Linear:
            left = len(slots) + x.shape[0] - len(removed)
            if isinstance(self._solver, DualForm) and left > J:
                self._solver = PrimalForm(slots, self._C, self._bias)
            elif isinstance(self._solver, PrimalForm) and 2 * left <= J:
                self._solver = DualForm(self.kernel, slots, self._C, self._bias)
                self._solver.solve()
        out = self._solver.change(removed, x, y)
        slots = self._slots
        if not slots.filled:
            self._clear(0, slots.next_id)
        return out

    def _left_out(self) -> tuple[Tensor, Tensor]:
        self._fitted()
        if len(self) < 2:
            raise ValueError("leaving one out needs two samples or more, one is held")
        return self._solver.alpha(), self._solver.left_out()

    def _least(self) -> int:
        """The id whose leaving out moves the scores at its own place the least."""
        alpha, H = self._left_out()
        host = checks.to_host(kernel_lssvm.own_effect(alpha, H, self._C).argmin())
        return list(self._slots.slot_of)[0 if host is None else int(host[0][0])]

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"bias": self._bias, "budget": self._budget, "form": self._solver.name}

    def _restore(self, settings: dict[str, Any]) -> None:
        if settings["bias"] != self._bias:
            raise ValueError(f"bias is {settings['bias']} in the saved machine and {self._bias} here")
        super()._restore(settings)
        self._budget = settings["budget"]

    def _solution(self) -> Tensor:
        if isinstance(self._solver, PrimalForm):
            self._solver.clean()
        return self._solver.state()

    def _resume(self, solution: Tensor) -> None:
        self._solver.resume(solution)

    def extra_repr(self) -> str:
        """Describe the machine: count, classes and options."""
        budget = "" if self._budget is None else f", budget={self._budget}"
        return f"{super().extra_repr()}, num_classes={self._outputs}, bias={self._bias}{budget}"
