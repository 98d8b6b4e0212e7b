"""The kernel LS-SVM: exact adding and removing by the block inverse (Duan et al.)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional import checks, kernel_lssvm
from torchlssvm.functional.modes import exactly
from torchlssvm.kernels import Kernel, Linear
from torchlssvm.machines import batch
from torchlssvm.machines.base import KernelMachine
from torchlssvm.machines.dual import Dual
from torchlssvm.machines.primal import Primal
from torchlssvm.machines.rows import Rows


class KernelLSSVM(KernelMachine):
    """f(x) = k(x, X) alpha + b with [[0, 1^T], [1, K + I/C]] [b; alpha] = [0; y]: least squares in feature space.

    Samples are learned and unlearned exactly, in batches of any size, by updating (K + I/C)^-1, which all classes share. Where
    that does not pay the system is factored anew; :func:`torchlssvm.functional.cost.block_update_pays` decides. A few
    equations are checked as updates are folded in, and the inverse is computed anew when they no longer hold to 11 digits (with
    a ``NumericalWarning``, once, should it be less than 9). A linear kernel with more samples than features is solved in the
    primal, with the same answers.

    Args:
        kernel: from :mod:`torchlssvm.kernels`, or any callable ``(x1, x2) -> Gram``.
        C: the penalty of an error, > 0.
        num_classes: K; with 1 the targets are numbers (B,).
        bias: whether there is a b; without it this is kernel ridge regression with the ridge 1/C.
        budget: keep at most this many samples: whenever there are more, the one whose leaving out moves the scores at its
            own place the least is removed, exactly, one by one. What is kept then depends on the order of the samples.
        device: where the state lives.

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
        """K."""
        return self._outputs

    @property
    def bias(self) -> bool:
        """Whether there is a b."""
        return self._bias

    @property
    def budget(self) -> int | None:
        """The largest number of samples kept, or None."""
        return self._budget

    @property
    def alpha(self) -> Tensor:
        """The coefficients (n, K), in the order of ids."""
        alpha: Tensor = self._engine.alpha()[self._rows.order()]
        return alpha

    @property
    def b(self) -> Tensor:
        """The bias (K,); zeros with ``bias=False``."""
        b: Tensor = self._engine.b.clone()
        return b

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """Scores k(x, X) alpha + b, float64; differentiable in x."""
        self._fitted()
        scores: Tensor = self._engine.scores(batch.queries(x, self.kernel, self.in_features, self._device))
        return scores

    def decision(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """Of two classes: the score of class 1, positive where it is predicted."""
        if self._outputs != 2:
            raise ValueError(f"decision is for two classes, there are {self._outputs}: use the scores")
        scores: Tensor = self(x)
        return scores[:, 1]

    @exactly
    def leave_one_out(self) -> Tensor:
        """The score (n, K) of each sample by the machine without it, in the order of ids. Exact, and needs no refit."""
        alpha, H = self._left_out()
        return kernel_lssvm.leave_one_out(self._rows.y, alpha, H)[self._rows.order()]

    @exactly
    def drift(self) -> float:
        """A bound of the relative error of the solution, from the residuals of all equations. Costs the kernel matrix once."""
        return float(self._engine.drift(self._rows.order())) if len(self) else 0.0

    # -- changing ------------------------------------------------------------------------------------------------------

    @exactly
    def add(self, x: Any, y: Any) -> Tensor:
        """Learn samples. x: (B, J); y: (B,) labels or (B, K) targets. Returns their ids (B,), valid for life."""
        x, y = self._check(x, y)
        if self._budget is None or len(self) + len(x) <= self._budget:
            return self._names(self._change([], x, y))
        ids: list[int] = []
        for part in range(0, len(x), max(1, self._budget // 8)):
            rows = slice(part, part + max(1, self._budget // 8))
            ids += self._change([], x[rows], y[rows])
            while len(self) > self._budget:
                self._change([self._least()], x[:0], y[:0])
        return self._names(ids)

    @exactly
    def remove(self, ids: Any) -> KernelLSSVM:
        """Unlearn samples by id."""
        found = self._rows.find(ids)
        self._change(found, self._rows.x[:0], self._rows.y[:0])
        return self

    @exactly
    def update(self, add: tuple[Any, Any], remove: Any) -> Tensor:
        """Add samples (x, y) and remove others by id, jointly; returns the ids of those added."""
        x, y = self._check(*add)
        return self._names(self._change(self._rows.find(remove), x, y))

    @exactly
    def replace(self, ids: Any, x: Any, y: Any) -> KernelLSSVM:
        """Exchange the samples behind these ids for others."""
        found = self._rows.find(ids)
        x, y = self._check(x, y)
        if len(x) != len(found):
            raise ValueError(f"x has {len(x)} rows for {len(found)} ids")
        before = self._rows.next_id
        new = self._change(found, x, y)
        self._rows.rename(new, found)
        self._rows.next_id = before
        return self

    @exactly
    def relabel(self, ids: Any, y: Any) -> KernelLSSVM:
        """Give samples other labels (or targets): the inverse is left alone."""
        found, y = self._check_relabel(ids, y)
        if found:
            self._engine.retarget(found, y)
        return self

    # -- inside --------------------------------------------------------------------------------------------------------

    def _clear(self, J: int) -> None:
        self._engine = self._make_engine(self._new_rows(J))

    def _make_engine(self, rows: Rows, settings: dict[str, Any] | None = None) -> Dual | Primal:
        primal = settings is not None and settings["form"] == "primal"
        return Primal(rows, self._C, self._bias) if primal else Dual(self.kernel, rows, self._C, self._bias)

    def _change(self, removed: list[int], x: Tensor, y: Tensor) -> list[int]:
        if not removed and not len(x):
            return []
        left = len(self) + len(x) - len(removed)
        if not len(self) and x.shape[1] != self._rows.x.shape[1]:
            self._clear(x.shape[1])
        elif type(self.kernel) is Linear:
            J = x.shape[1]
            if isinstance(self._engine, Dual) and left > J:
                self._engine = Primal(self._rows, self._C, self._bias)
            elif isinstance(self._engine, Primal) and 2 * left <= J:
                self._engine = Dual(self.kernel, self._rows, self._C, self._bias)
        out: list[int] = self._engine.change(removed, x, y)
        self._next_id = self._rows.next_id
        if not len(self):
            self._clear(0)
        return out

    def _left_out(self) -> tuple[Tensor, Tensor]:
        self._fitted()
        if len(self) < 2:
            raise ValueError("leaving one out needs two samples or more, one is held")
        H = self._engine.left_out()
        return self._engine.alpha(), H

    def _least(self) -> int:
        """The id whose leaving out moves the scores at its own place the least."""
        alpha, H = self._left_out()
        order = self._rows.order()
        effect = kernel_lssvm.own_effect(alpha, H, self._C)[order]
        host = checks.to_host(effect.argmin())
        return list(self._rows.slot_of)[0 if host is None else int(host[0][0])]

    def _settings(self) -> dict[str, Any]:
        form = "primal" if isinstance(self._engine, Primal) else "dual"
        return super()._settings() | {"bias": self._bias, "budget": self._budget, "form": form}

    def _restore(self, settings: dict[str, Any]) -> None:
        if settings["bias"] != self._bias:
            raise ValueError(f"bias is {settings['bias']} in the saved machine and {self._bias} here")
        super()._restore(settings)
        self._budget = settings["budget"]

    def _solution(self) -> Tensor:
        return self._engine.state()  # type: ignore[no-any-return]

    def _resume(self, solution: Tensor) -> None:
        self._engine.resume(solution)

    def extra_repr(self) -> str:
        """Count, classes and options."""
        budget = "" if self._budget is None else f", budget={self._budget}"
        return f"{super().extra_repr()}, num_classes={self._outputs}, bias={self._bias}{budget}"
