"""``IncrementalSVM``: a support vector machine that learns and unlearns one sample, or many, exactly."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from torchlssvm.errors import ConvergenceError, NotFittedError
from torchlssvm.functional import checks, svm_gradients
from torchlssvm.functional.byte_tensors import bytes_to_tensor
from torchlssvm.functional.modes import all_or_nothing, atomically, exactly
from torchlssvm.functional.module_state import device_after, split_saved
from torchlssvm.kernels import Custom, Kernel, as_kernel, input_checks
from torchlssvm.kernels.gram_rows import GramRows, mostly_free
from torchlssvm.progress_bar import progress_bar
from torchlssvm.svm import checkpoint, device_paths, leave_one_out
from torchlssvm.svm.checkpoint import Content
from torchlssvm.svm.path import PathEvent
from torchlssvm.svm.samples import Batch, upper_bounds
from torchlssvm.svm.solver import MIN_SAMPLES_PIVOTED, PathSolver
from torchlssvm.svm.warm_start import MAX_SAMPLES_WHOLE_MATRIX

P = ParamSpec("P")
R = TypeVar("R")

MIN_C_JUMP, MAX_C_JUMP = 1e-9, 1e-4
"""Shares of C by which a tie that cannot be followed is skipped: the first share, raised up to the second if that fails."""

METHODS = ("auto", "path", "joint", "pivot")
"""Ways to add and remove samples."""


class Step(NamedTuple):
    """The state of the machine after one event, as an entry of ``trajectory``."""

    event: PathEvent
    ids: Tensor  # (n,)
    alpha: Tensor  # (n,)
    g: Tensor  # (n,)
    b: float


class Violation(float):
    """The largest violation of the Kuhn-Tucker conditions; ``bound`` is the effect of one rounding of every term."""

    bound: float


class OpenChange(NamedTuple):
    """A change that has been solved and can still be undone. Machines that share samples all change before any is finished."""

    ids: list[int]  # of the new samples
    put_back: Callable[[], None]
    finish: Callable[[], None]


class RegularizationPath(NamedTuple):
    """The solution for every C between two values. alpha and b are linear in C between neighbouring breakpoints."""

    C: Tensor  # (T,) of class 1, first to last
    ids: Tensor  # (n,)
    alpha: Tensor  # (T, n)
    b: Tensor  # (T,)
    C_per_class: Tensor  # (T, 2)


def operation(method: Callable[P, R]) -> Callable[P, R]:
    """Make a method one operation: it cannot be called inside a callback of another operation, and a failure changes nothing.

    If the kernel's parameters have changed, the machine first solves again. Ctrl-C waits until the state can be restored.
    """

    @functools.wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        machine: Any = args[0]
        if machine._reporting:
            raise RuntimeError(
                f"{method.__name__} was called by a callback: the machine is in the middle of an operation, it may only be read"
            )
        machine.notice_kernel()
        content, kernel, trajectory = machine._content(), machine.kernel, machine.trajectory
        events = len(trajectory)

        def put_back() -> None:
            if machine._solver is not content.solver:
                machine._set_content(content)
                machine.kernel = kernel
            machine.trajectory = trajectory
            del trajectory[events:]

        try:
            with all_or_nothing(machine, put_back):
                return method(*args, **kwargs)
        finally:
            machine._support.clear()

    return atomically(wrapped)


class IncrementalSVM(nn.Module):
    r"""Exact incremental and decremental SVM for two classes (Cauwenberghs and Poggio; Diehl and Cauwenberghs).

    f(x) = sum_j alpha_j y_j K(x_j, x) + b, where alpha minimizes 1/2 alpha^T Q alpha - sum alpha under 0 <= alpha_i <= C and
    sum y_i alpha_i = 0. Here Q_ij = y_i y_j K(x_i, x_j), y = -1 for class 0 and y = +1 for class 1. The value
    g_i = y_i f(x_i) - 1 puts every sample in one of three sets: margin (g = 0), error (g <= 0, alpha = C) or reserve (g >= 0,
    alpha = 0). To add or remove a sample, its coefficient moves in steps, each computed exactly, while all other samples keep
    these conditions.

    Every operation ends with a check of the result, the certificate: the conditions above for every sample, each within its
    own rounding error. If a result does not pass, a robust method solves the problem instead, and if that result does not pass
    either, ``ConvergenceError`` is raised and the machine does not change. For a kernel that is not positive semidefinite, a
    certified point is only a stationary point.

    Args:
        kernel: a kernel of :mod:`torchlssvm.kernels`, any callable (x1, x2) -> Gram, or ``"precomputed"``. The machine keeps a
            copy of the kernel. If you change the parameters of the copy, the next operation solves again. With
            ``"precomputed"``, pass to ``add`` the kernel values (B, n + B) between the new samples and all samples (in the
            order of ``ids``, new samples last), and to ``forward`` the values (B, n) with the samples in the machine.
        C: the bound of the coefficients, a number or one number per class (2,). The bound of a sample is C times its
            ``weight`` in ``add``.
        callback: a function that is called with a ``PathEvent`` after each event.
        record: keep alpha, g and b of every event in ``trajectory``.
        reserve_limit: the epsilon of section 2.6. Reserve vectors with g >= epsilon are forgotten, and ``inexact`` is then
            True. Default: no sample is forgotten.
        cache_bytes: the memory for kernel rows of samples outside the margin set.
        device: the device of the samples and of kernel computations. On a device other than the CPU, paths also run on the
            device (up to 8,192 samples). The certificate and the robust method run on the host.

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

    def __init__(
        self,
        kernel: Any,
        C: Any = 1.0,
        *,
        callback: Callable[[PathEvent], None] | None = None,
        record: bool = False,
        reserve_limit: float | None = None,
        cache_bytes: int = 2**26,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.kernel = copy.deepcopy(_kernel(kernel))
        self._C = _bounds(C)
        self.reserve_limit = None if reserve_limit is None else checks.positive(reserve_limit, "reserve_limit")
        if isinstance(cache_bytes, bool) or not isinstance(cache_bytes, int) or cache_bytes < 0:
            raise ValueError(f"cache_bytes must be a whole number >= 0, got {cache_bytes!r}")
        self._cache_bytes = cache_bytes
        self._callback, self.record = callback, bool(record)
        self._reporting = False  # True while the callback runs
        self.num_classes = 2
        self._reset_state(torch.device("cpu") if device is None else torch.empty(0, device=device).device)

    @exactly
    def _reset_state(self, device: torch.device) -> None:
        """Begin without samples."""
        self.trajectory: list[Step] = []
        self._set_content(Content(PathSolver(self.kernel, device, self._cache_bytes), self._C, False, set()))

    def _set_content(self, content: Content) -> None:
        """Take over a solver with its samples."""
        self._solver, self.device, self._C = content.solver, content.solver.rows.gram.device, content.C
        self.inexact, self._dropped = content.inexact, content.dropped
        self._support: dict[str, tuple[Any, Tensor]] = {}  # "rows" or "places" of support vectors, and their y alpha
        self._install_callback()

    def _content(self) -> Content:
        return Content(self._solver, self._C, self.inexact, self._dropped)

    @exactly
    def _load(self, state: dict[str, Any] | None, kernel: Kernel | None, device: torch.device) -> None:
        """Load a state of :mod:`~torchlssvm.svm.checkpoint` (None: the present one) with this kernel. Errors change nothing."""
        state = checkpoint.save(self._content()) if state is None else state
        self._set_content(checkpoint.load(state, kernel, device, self._cache_bytes))
        self.kernel = kernel

    def notice_kernel(self) -> None:
        """Solve again if the kernel, or one of its parameters, has changed since the samples were learned."""
        gram, kernel = self._solver.rows.gram, self.kernel
        if gram.kernel is not kernel or (kernel is not None and gram.version != kernel.version()):
            self._load(None, kernel, self.device)

    @operation
    def reset(self) -> None:
        """Forget all samples."""
        self._reset_state(self.device)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def n(self) -> int:
        """The number of samples in the machine."""
        return self._solver.samples.n

    def __len__(self) -> int:
        return self.n

    @property
    def C(self) -> Any:
        """The bound of the coefficients, a number or one number per class (2,)."""
        return self._C[0] if self._C[0] == self._C[1] else torch.tensor(self._C, dtype=torch.float64)

    @property
    def ids(self) -> Tensor:
        """The ids of the samples (n,), in the order in which they were added. Other vectors have the same order."""
        return self._ordered(self._solver.samples.ids)

    @property
    def alpha(self) -> Tensor:
        """The coefficients (n,)."""
        return self._ordered(self._solver.samples.alpha)

    @property
    def g(self) -> Tensor:
        """g_i = y_i f(x_i) - 1 (n,); zero for margin vectors."""
        s = self._solver.samples
        return self._ordered(np.where(s.side == 0, 0.0, s.g))

    @property
    def y(self) -> Tensor:
        """The labels (n,), 0 or 1."""
        return self._ordered((self._solver.samples.y > 0).astype(np.int64))

    @property
    def b(self) -> float:
        """The offset of f."""
        return self._solver.margin.b

    @property
    def b_interval(self) -> tuple[float, float]:
        """The interval of possible b, a single value unless the margin set is empty. b is its middle, or the finite end."""
        if len(self._solver.margin):
            return self.b, self.b
        low, high = self._solver.b_interval()
        return (self.b + low, self.b + high) if low <= high else (self.b, self.b)  # one value, and rounding

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
        """Return the sets S, E and R as ids: {"margin": ..., "error": ..., "reserve": ...}."""
        return {"margin": self.margin, "error": self.error, "reserve": self.reserve}

    @exactly
    def kkt_violation(self) -> Violation:
        """Return the largest violation of (2) and (3), with every g computed from its definition.

        This method computes a kernel row per support vector. Compare the returned number with its attribute ``bound``, which
        is the effect of rounding alone, the largest EPS (sum_j |Q_ij| alpha_j + |b| + 1).
        """
        s, violation, bound = self._solver.samples, 0.0, 0.0
        if self.n:
            found, bound = self._solver.check_from_kernel(self.kernel)
            box = max(float((-s.alpha).max()), float((s.alpha - s.u).max()), abs(float(s.y @ s.alpha)))
            violation = max(found.violation, box / max(1.0, float(s.u.max())))
        out = Violation(violation)
        out.bound = bound
        return out

    @property
    def events(self) -> int:
        """The number of events so far, which is the unit of work of the path."""
        return self._solver.path.events

    def decision(self, x: Any, samples: Any = None) -> Tensor:  # (B, J) -> (B,)
        """Compute f(x), positive for class 1; differentiable in x, in the kernel's parameters and in the machine's samples.

        To differentiate in the samples, pass them as ``samples`` (n, J), in the order of ``ids`` and with a graph. Derivatives
        in the samples and in the kernel's parameters include the change of alpha and b, as long as no sample changes its set.
        """
        self._require_samples()
        if samples is not None or self.kernel_has_gradient():
            s = self._solver.samples
            used = s.order()  # all of them where no margin vector fixes b
            used = used[(s.alpha[used] > 0) | (s.side[used] == 0)] if len(self._solver.margin) else used
            rows, known = self._differentiable(used, samples)
            assert self.kernel is not None
            alpha, b = svm_gradients.solution(self.kernel.tiled(rows, rows), *known)
            K = self.kernel.tiled(self.prepared(x), rows)
            return K @ (alpha * known[0]) + b
        if "rows" not in self._support:
            self._support["rows"] = self._find_support()
        used, coefficients = self._support["rows"]
        rows = self.prepared(x)
        K = rows[:, used] if self.kernel is None else self.kernel.tiled(rows, used)
        f: Tensor = K @ coefficients + self.b
        return f

    def span_margins(self, samples: Any = None) -> Tensor:  # -> (n,)
        """Compute the margins g_c of ``leave_one_out(method="span")``, differentiable in the kernel and in ``samples``.

        A loss of these margins can train the kernel's parameters, or a network that produces the samples (``samples`` as in
        :meth:`decision`). The margins cost n^2 kernel values.
        """
        self._require_samples()
        rows, known = self._differentiable(self._solver.samples.order(), samples)
        assert self.kernel is not None
        return svm_gradients.span_margins(self.kernel.tiled(rows, rows), *known)

    def kernel_has_gradient(self) -> bool:
        """Return True if kernel values depend on something that requires a gradient."""
        if self.kernel is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if any(p.requires_grad for p in self.kernel.parameters()):
            return True
        if not any(isinstance(part, Custom) for part in self.kernel.modules()):
            return False
        one = self._solver.rows.x(self._solver.samples.order()[:1])
        return self.kernel.tiled(one, one).requires_grad

    def _differentiable(self, at: Any, samples: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return the rows in these positions, from ``samples`` if given; and y, side, alpha and b."""
        if self.kernel is None:
            raise ValueError("a machine with a precomputed kernel has no rows to differentiate in")
        solver, s = self._solver, self._solver.samples
        rows = solver.rows.x(at)
        if samples is not None:
            given = self.prepared(samples)
            if len(given) != self.n:
                raise ValueError(f"samples must be the {self.n} current samples, in the order of ids; got {len(given)}")
            place = np.flatnonzero(np.isin(s.order(), at))
            given = given[torch.from_numpy(place).to(self.device)]
            if not torch.equal(given.detach(), rows):
                raise ValueError("samples must be the current samples in the order of ids, exactly as they were added")
            rows = given
        y, side, alpha = (torch.from_numpy(v).to(self.device) for v in (s.y[at], s.side[at], s.alpha[at]))
        b = torch.tensor(solver.margin.b, dtype=torch.float64, device=self.device)
        return rows, (y, side, alpha, b)

    def prepared(self, x: Any) -> Tensor:  # (B, J) -> (B, J')
        """Check samples and prepare them for the kernel, in float64."""
        if self.kernel is None:
            return checks.features(x, self.n, self.device).to(torch.float64)
        return input_checks.queries(x, self.kernel, self._solver.rows.gram.x.shape[1], self.device)

    @exactly
    def _find_support(self) -> tuple[Tensor, Tensor]:
        """Rows of the support vectors, or their columns among precomputed values, and y alpha."""
        s = self._solver.samples
        order = s.order()
        place = np.flatnonzero(s.alpha[order])
        at = order[place]
        coefficients = torch.from_numpy((s.alpha * s.y)[at]).to(self.device)
        support = torch.from_numpy(place).to(self.device) if self.kernel is None else self._solver.rows.x(at)
        return support, coefficients

    def forward(self, x: Any) -> Tensor:  # (B, J) -> (B, 2)
        """Return the scores (-f, f) of the two classes (B, 2)."""
        f = self.decision(x)
        return torch.stack([-f, f], 1)

    def predict(self, x: Any) -> Tensor:  # (B, J) -> (B,)
        """Return the class (B,), which is 1 if f > 0 and 0 otherwise. Raises ValueError if a row contains NaN."""
        return (checks.finite_scores(self(x))[:, 1] > 0).long()

    @exactly
    def expansion(self) -> tuple[Tensor, Tensor, float]:
        """Return rows (s, J) of the support vectors, their y alpha (s,) and b: f(x) = k(x, rows) y alpha + b."""
        if self.kernel is None:
            raise ValueError("a machine with a precomputed kernel has no rows")
        return (*self._find_support(), self.b)

    # -- changing ------------------------------------------------------------------------------------------------------

    def add(self, x: Any, y: Any, weight: Any = None, method: str = "auto") -> Tensor:
        """Learn samples and return their ids (B,).

        Args:
            x: (B, J) samples.
            y: (B,) labels 0 or 1.
            weight: (B,) factors of C.
            method: ``"path"`` adds one sample after the other, ``"joint"`` moves all samples along one parameter, ``"pivot"``
                uses block pivoting, and ``"auto"`` chooses one of them. All methods give the same solution.
        """
        return self.update(add=(x, y, weight), method=method)

    def remove(self, ids: Any, method: str = "auto") -> IncrementalSVM:
        """Unlearn samples by the ids that ``add`` returned. ``method`` is that of :meth:`add`."""
        self.update(remove=checks.id_list(ids), method=method)
        return self

    @operation
    def update(self, add: tuple[Any, ...] | None = None, remove: Any = None, method: str = "auto") -> Tensor:
        """Add (x, y) or (x, y, weight) and remove ids in one step, along one parameter. Returns the new ids."""
        checks.one_of(method, "method", METHODS)
        batch = None
        if add is not None:
            if not isinstance(add, tuple | list) or not 2 <= len(add) <= 3:
                raise ValueError("add must be (x, y) or (x, y, weight)")
            batch = self._check(*add)
        change = self._begin(batch, [] if remove is None else self._known_ids(remove), method)
        change.finish()
        ids = torch.from_numpy(np.array(change.ids, dtype=np.int64))
        return ids if self.device.type == "cpu" else ids.to(self.device)

    @operation
    def relabel(self, ids: Any, y: Any, method: str = "auto") -> IncrementalSVM:
        """Change the labels of samples, which keep their ids. Samples forgotten by ``reserve_limit`` cannot be relabelled."""
        wanted = self._known_ids(ids)
        labels = self._labels(y, self._solver.rows.gram.x.new_empty(len(wanted), 0))
        self._require_rows(wanted)
        at, s = self._positions(wanted), self._solver.samples
        other = np.flatnonzero(s.y[at] != labels)
        if len(other):
            at = at[other]
            x = self._solver.rows.x(at)
            if self.kernel is None:
                held, index = (torch.from_numpy(part).to(self.device) for part in (s.order(), at))
                x = torch.cat([x[:, held], x[:, index]], 1)
            self._exchange(at, self._batch(x, labels[other], s.weight[at]), method)
        return self

    @operation
    def replace(self, ids: Any, x: Any, y: Any, weight: Any = None, method: str = "auto") -> IncrementalSVM:
        """Replace the samples that have these ids with x (B, J). The ids stay the same."""
        wanted = self._known_ids(ids)
        if self.kernel is None:
            raise ValueError("replace needs a kernel; with precomputed values use update(add=..., remove=...)")
        batch = self._check(x, y, weight)
        if len(batch.y) != len(wanted):
            raise ValueError(f"replace got {len(wanted)} ids and {len(batch.y)} samples")
        self._require_rows(wanted)
        if wanted:
            self._exchange(self._positions(wanted), batch, method)
        return self

    @operation
    def fit(
        self, x: Any, y: Any, weight: Any = None, progress: bool | Callable[[float], None] | None = None
    ) -> IncrementalSVM:
        """Forget all samples and learn these, with ids 0, 1, .... An error leaves the machine unchanged.

        By default, a progress bar is shown on a terminal if tqdm is installed and the fit takes some seconds. Pass
        ``progress=True`` to always show it, ``progress=False`` to never show it, or a function that is called with the
        completed share (0 to 1).
        """
        if progress is not None and not isinstance(progress, bool) and not callable(progress):
            raise ValueError(f"progress must be True, False, None or a function of the share done, got {progress!r}")
        batch = self._check(x, y, weight, fresh=True)
        self.reset()
        if len(batch.y):
            with _progress(progress) as self._solver.report:
                self._begin(batch, []).finish()
            self._solver.report = None
        return self

    def planned_bytes(self, n: int, J: int, margin: int | None = None) -> int:
        """Estimate the peak memory, in bytes and to a factor of two, of a fit with n samples of width J.

        Pass the number of margin vectors as ``margin``. Default: a quarter of the samples, which is more than most data have.
        """
        positions, slots = n + n // 8, n // 4 if margin is None else margin
        cached = min(8 * positions**2, self._cache_bytes)
        start = 12 * n**2 if n <= MAX_SAMPLES_WHOLE_MATRIX else self._cache_bytes
        # Rows about the centre beside the rows; Q of the margin vectors, once more as it enters; A, R and a factor.
        return 16 * positions * J + cached + max(start, 16 * slots * positions + 24 * slots**2)

    @operation
    def set_C(self, C: Any, method: str = "auto") -> IncrementalSVM:
        """Change C, a number or one number per class (2,). ``method`` is "auto" (pivoting if possible) or "path"."""
        checks.one_of(method, "method", ("auto", "path"))
        bounds = _bounds(C)
        if self.n:
            s = self._solver.samples
            self._solver.set_bounds(upper_bounds(s.y, s.weight, bounds), method)
        self._C = bounds
        return self

    @operation
    def solutions(self, C: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return alpha (T, n), in the order of ``ids``, and b (T,) for T values of C, e.g. to choose C.

        Each value is a number, or one number per class (2,). The machine does not change. On a device other than the CPU, all
        solutions are computed together.
        """
        self._require_samples()
        if not len(C):
            raise ValueError("C must hold at least one value")
        solver, s = self._solver, self._solver.samples
        u = np.stack([upper_bounds(s.y, s.weight, _bounds(value)) for value in C])
        alpha, b = np.zeros(u.shape), np.full(len(u), np.nan)
        if device_paths.used_for(solver.rows):
            alpha, b = device_paths.solutions(solver.rows, u)
        with solver.trial():
            for k in np.flatnonzero(np.isnan(b)):
                solver.set_bounds(u[k])
                alpha[k], b[k] = s.alpha, solver.margin.b
        return torch.stack([self._ordered(row) for row in alpha]), torch.from_numpy(b).to(self.device)

    @operation
    def regularization_path(self, C: Any) -> RegularizationPath:
        """Change C along the path and return every breakpoint. Linear interpolation gives the solution for each C in between.

        alpha has kinks only where a sample changes sets. With one C per class, both values change in proportion.
        """
        end = np.array(_bounds(C))
        seen: list[tuple[Any, Tensor, float]] = [(np.array(self._C), self.alpha, self.b)]
        if self.n:
            with self._solver.snapshotted():
                self._follow(np.array(self._C), end, seen)
        else:
            seen.append((end, self.alpha, self.b))
        self._C = (float(end[0]), float(end[1]))
        along, alpha, b = zip(*seen, strict=True)
        per_class = torch.from_numpy(np.stack(along))
        return RegularizationPath(
            per_class[:, 1], self.ids, torch.stack(alpha), torch.tensor(b, dtype=torch.float64), per_class
        )

    def _follow(self, now: Any, end: Any, seen: list[Any]) -> None:  # (2,), (2,)
        """Follow the path from one C to another and append its breakpoints to ``seen``.

        The path is followed in parts, because p cannot resolve the small end of a long one. If events tie in a way that cannot
        be followed, both sides of the tie are solved.
        """
        solver, s, jump = self._solver, self._solver.samples, MIN_C_JUMP
        one = [int((s.y * label > 0).argmax()) for label in (-1, 1)]  # a sample of each class, if there is any

        def note(event: PathEvent) -> None:
            if event.to != "end":
                at = now + event.p * (target - now)
                for k, label in enumerate((-1, 1)):
                    if s.y[one[k]] == label:
                        at[k] = s.u[one[k]] / s.weight[one[k]]  # to the last bit the bound that alpha is at
                seen.append((at, self._ordered(np.where(s.side < 0, s.u, s.alpha)), self.b))

        target = end
        while True:
            factor = float(np.exp(np.abs(np.log(target / now)).max()))
            if factor > 101.0:
                target = now * (target / now) ** (np.log(100.0) / np.log(factor))
                continue
            known = len(seen)
            if solver.follow_bounds(upper_bounds(s.y, s.weight, tuple(target)), note):
                jump = MIN_C_JUMP
            else:
                del seen[known:]
                if factor > 1.0 + jump:
                    target = np.sqrt(now * target)
                    continue
                if jump > MAX_C_JUMP:
                    raise ConvergenceError(f"the path of C cannot be followed beyond {now}. Nothing was changed.")
                solver.set_bounds(upper_bounds(s.y, s.weight, tuple(target)))
                jump *= 8.0
            seen.append((target, self.alpha, self.b))
            if target is end:
                return
            now, target = target, end

    @operation
    def set_kernel(self, kernel: Any) -> IncrementalSVM:
        """Change the kernel or its parameters for the machine's samples, and correct the conditions that the change violates.

        With precomputed values, pass the new Gram matrix (n, n) in the order of ``ids``.
        """
        state = checkpoint.save(self._content())
        if self.kernel is None:
            state["x"] = gram = checks.features(kernel, self.n, self.device).to(torch.float64)
            _require_symmetric(gram)
            self._load(state, None, self.device)
            return self
        new = copy.deepcopy(_kernel(kernel))
        if new is None or new.deep or self.kernel.deep:
            raise ValueError("set_kernel cannot exchange a deep or precomputed kernel: its rows are not kept")
        state["kernel_name"] = bytes_to_tensor(checkpoint.name_of(new).encode())
        self._load(state, new, self.device)
        return self

    @operation
    def polish(self) -> IncrementalSVM:
        """Compute R and every g again and take Newton steps, which gives optimality to machine precision."""
        self._solver.polish()
        return self

    def on_event(self, callback: Callable[[PathEvent], None] | None) -> IncrementalSVM:
        """Call this function after each event from now on. Pass None to stop the calls."""
        self._callback = callback
        self._install_callback()
        return self

    # -- estimates -----------------------------------------------------------------------------------------------------

    @operation
    def leave_one_out(self, method: str = "exact", early_exit: bool = False) -> leave_one_out.LeaveOneOut:
        """Compute leave-one-out margins of all samples. The machine does not change.

        Args:
            method: ``"exact"`` (Algorithm 2) unlearns all support vectors, from one tableau. ``"span"`` is the rule of Vapnik
                and Chapelle, g_c - alpha_c gamma_c, where gamma_c is the squared distance to the span of the margin vectors.
                ``"linear"`` extrapolates the first segment of the exact path, which equals ``"span"``.
            early_exit: do not unlearn samples that are misclassified before they are left out, as they are then afterwards.
                The error rates are the same, but margins below -1 are not final.
        """
        checks.one_of(method, "method", ("exact", "span", "linear"))
        self._require_samples()
        if method == "exact":
            margin = leave_one_out.exact(self._solver, -1.0 if early_exit else -math.inf)
        else:
            margin = leave_one_out.span_rule(self._solver)
        found = self._ordered(margin)
        error = found < -1.0
        return leave_one_out.LeaveOneOut(self.ids, found, error, float(error[~found.isnan()].double().mean()))

    @exactly
    def distance_to_span(self) -> Tensor:
        """Return gamma_c (n,), the squared distance of each sample to the span of the (other) margin vectors (21)."""
        return self._ordered(leave_one_out.squared_distances(self._solver))

    @operation
    def k_fold(self, folds: Any) -> tuple[Tensor, float]:
        """Cross-validate exactly: return the decision value (n,) of each sample by the machine without its fold, and the error.

        Pass ``folds`` as a number k, to assign samples in turn in the order of ``ids``, or as the fold (n,) of each sample.
        """
        self._require_samples()
        if isinstance(folds, int) and not isinstance(folds, bool):
            if not 2 <= folds <= self.n:
                raise ValueError(f"folds must be between 2 and the number of samples {self.n}, got {folds}")
            fold = torch.arange(self.n, device=self.device) % folds
        else:
            fold = checks.as_tensor(folds, "folds", self.device)
            if fold.shape != (self.n,):
                raise ValueError(f"folds must be a number or have shape ({self.n},), got {tuple(fold.shape)}")
        number, of = torch.unique(fold, return_inverse=True)
        if len(number) == 1:
            raise ValueError("one fold holds every sample: nothing would be left to learn from")
        s, order = self._solver.samples, self._solver.samples.order()
        gone = np.zeros((len(number), s.capacity), dtype=bool)
        gone[of.cpu().numpy(), order] = True
        g = leave_one_out.margins_without(self._solver, gone)
        values = self._ordered((g + 1.0) * s.y)
        return values, float(((values > 0).long() != self.y).double().mean())

    # -- one of several machines that share samples ---------------------------------------------------------------------

    def new_gram(self) -> GramRows | None:
        """Return an empty store of samples for this machine and others; None if kernel values are precomputed."""
        return None if self.kernel is None else GramRows(self.kernel, self.device, self._cache_bytes)

    def shares(self, gram: GramRows) -> bool:
        """Return True if the machine's samples are in this store."""
        return self._solver.rows.gram is gram and self.kernel is gram.kernel

    def share(self, gram: GramRows, place_of: dict[int, int]) -> None:
        """Use the rows of a shared store. The sample of each id is in the given place."""
        s, rows = self._solver.samples, self._solver.rows
        places = np.zeros(s.capacity, dtype=np.int64)
        for i, at in s.where.items():
            places[at] = place_of[i]
        rows.gram, rows.places, self.kernel = gram, places, gram.kernel
        self._support.clear()

    @operation
    def begin_change(self, places: Any, y: Any, weight: Any, remove: list[int]) -> OpenChange:
        """Learn the samples in places (B,) of the shared store and unlearn others by id, in a change that can be undone.

        y, weight: (B,) arrays of labels 0, 1 and factors of C.
        """
        return self._begin(self._batch(places, 2.0 * y - 1.0, weight), remove)

    def _batch(self, x: Any, labels: Any, weight: Any) -> Batch:
        return Batch(x, labels, weight, upper_bounds(labels, weight, self._C))

    def _begin(self, batch: Batch | None, remove: list[int], method: str = "auto") -> OpenChange:
        """Add samples, and unlearn others, which ``finish`` erases."""
        solver, events, leaving = self._solver, len(self.trajectory), self._positions(remove)
        new = [] if batch is None else list(range(solver.next_id, solver.next_id + len(batch.y)))
        undo = solver.begin_change(batch, new, leaving, method)

        def put_back() -> None:
            undo()
            del self.trajectory[events:]
            self._support.clear()

        def finish() -> None:
            if len(leaving):
                solver.erase(leaving)
            self._dropped.difference_update(remove)
            solver.next_id += len(new)
            self._drop_far_reserve()
            self._shorten()

        return OpenChange(new, put_back, finish)

    @staticmethod
    @contextlib.contextmanager
    def moving_together(changes: list[tuple[IncrementalSVM, Any, Any, Any, list[int]]]) -> Iterator[None]:
        """On a device, follow the paths of changes to machines that share samples in one batch, for the changes in the block.

        changes: each machine, with the arguments of :meth:`begin_change`.
        """
        solvers = [machine._solver for machine, *_ in changes]
        few = all(len(places) + len(remove) < MIN_SAMPLES_PIVOTED for _, places, *_, remove in changes)
        if len(changes) > 1 and few and device_paths.used_for(solvers[0].rows):
            parts = []
            for (machine, places, y, weight, remove), solver in zip(changes, solvers, strict=True):
                new = machine._batch(places, 2.0 * y - 1.0, weight)
                parts.append(device_paths.Change(solver.rows, solver.margin, new, machine._positions(remove)))
            for solver, found in zip(solvers, device_paths.walk_together(parts), strict=True):
                solver.path.ahead = found
        try:
            yield
        finally:
            for solver in solvers:
                solver.path.ahead = None

    def shared_support(self) -> tuple[Any, Tensor]:
        """Return the places of the support vectors (s,) in the shared store and their y alpha (s,), the same until a change."""
        if "places" not in self._support:
            s, rows = self._solver.samples, self._solver.rows
            at = np.flatnonzero(s.alpha)
            self._support["places"] = rows.in_gram(at), torch.from_numpy(s.alpha[at] * s.y[at]).to(self.device)
        return self._support["places"]

    # -- input ---------------------------------------------------------------------------------------------------------

    def _check(self, x: Any, y: Any, weight: Any = None, fresh: bool = False) -> Batch:
        """Check samples and convert them to the solver's form; raises ValueError. fresh: as if the machine were empty."""
        kernel, held = self.kernel, 0 if fresh else self.n
        if kernel is None:
            given = checks.as_tensor(x, "x", self.device)
            rows = checks.features(given, held + (len(given) if given.ndim else 0), self.device).to(torch.float64)
            if checks.not_finite(rows):
                checks.raise_not_finite("x", rows)
            _require_symmetric(rows[:, held:])
        else:
            J = self._solver.rows.gram.x.shape[1] if held else None
            rows = input_checks.samples(x, kernel, J, self.device).detach()
        labels = self._labels(y, rows)
        w = np.ones(len(labels))
        if weight is not None:
            factors = checks.weights(weight, rows)
            assert factors is not None
            w = factors.cpu().numpy().copy()
            if not (np.isfinite(w) & (w > 0)).all():
                raise ValueError("weight must be finite and > 0: it multiplies C")
        return self._batch(rows, labels, w)

    def _labels(self, y: Any, x: Tensor) -> Any:
        """Check the labels 0 or 1 of rows x (B, J) and return them as an array of -1, +1."""
        return 2.0 * input_checks.labels(y, x, 2).cpu().numpy() - 1.0

    # -- inside --------------------------------------------------------------------------------------------------------

    def _shorten(self) -> None:
        """Make the arrays shorter, if few samples are left."""
        s, rows = self._solver.samples, self._solver.rows
        if mostly_free(s.capacity, self.n):
            place_of = {} if rows.places is None else {i: int(rows.places[at]) for i, at in s.where.items()}
            self._load(None, self.kernel, self.device)
            if rows.places is not None:
                self.share(rows.gram, place_of)

    def _exchange(self, at: Any, batch: Batch, method: str) -> None:
        """Exchange the samples in these positions for others, under the same ids."""
        s, first = self._solver.samples, self._solver.next_id
        ids, new = s.ids[at].tolist(), list(range(first, first + len(at)))  # new ids, until the old samples are removed
        self._solver.begin_change(batch, new, at, method)
        self._solver.erase(at)
        s.rename(np.array([s.where[i] for i in new]), ids)
        self._drop_far_reserve()

    def _known_ids(self, ids: Any) -> list[int]:
        """Return ids as a list. Raises RemovalError for an id that is neither in the machine nor forgotten."""
        where = self._solver.samples.where
        return input_checks.known_ids(ids, where.keys() | self._dropped if self._dropped else where)

    def _require_samples(self) -> None:
        """Raise NotFittedError if the machine is empty."""
        if not self.n:
            raise NotFittedError("no samples are held: add some first")

    def _require_rows(self, wanted: list[int]) -> None:
        """Raise ValueError if any of these samples has been forgotten."""
        lost = [i for i in wanted if i in self._dropped]
        if lost:
            raise ValueError(
                f"{len(lost)} sample(s) have been forgotten by reserve_limit, the first is {lost[0]!r}: their rows are gone; "
                "remove them and add them with the new labels"
            )

    def _positions(self, wanted: list[int]) -> Any:
        """Return the positions, int64, of those ids that are in the machine."""
        where = self._solver.samples.where
        return np.array([where[i] for i in wanted if i in where], dtype=np.int64)

    def _drop_far_reserve(self) -> None:
        """Forget reserve vectors beyond ``reserve_limit``: the epsilon rule of section 2.6."""
        if self.reserve_limit is None:
            return
        s = self._solver.samples
        far = np.flatnonzero((s.side > 0) & (s.g >= self.reserve_limit))
        if len(far):
            self._dropped |= set(s.ids[far].tolist())
            self._solver.erase(far)
            self.inexact = True

    def _install_callback(self) -> None:
        """Let the path call a function that records and reports events, if that is asked for."""

        def watch(event: PathEvent) -> None:
            if self.record:
                self.trajectory.append(Step(event, self.ids, self.alpha, self.g, self.b))
            if self._callback is not None:
                self._reporting = True
                try:
                    self._callback(event)
                finally:
                    self._reporting = False

        self._solver.path.callback = watch if self.record or self._callback is not None else None

    def _ordered(self, values: Any) -> Tensor:  # (capacity,) -> (n,)
        return torch.from_numpy(values[self._solver.samples.order()]).to(self.device)

    def _set(self, side: float) -> Tensor:
        s = self._solver.samples
        return torch.from_numpy(np.sort(s.ids[(s.side == side) & (s.ids >= 0)])).to(self.device)

    # -- saving, copying, moving ---------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: value for name, value in checkpoint.save(self._content()).items()})

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        own, others = split_saved(state_dict, prefix, checkpoint.SAVED_NAMES)
        options = [prefix + "kernel._extra_state"] if strict and self.kernel is not None else []
        if not own:
            missing.extend(prefix + name for name in checkpoint.SAVED_NAMES)
        elif lacking := sorted({*checkpoint.SAVED_NAMES, *options} - {*own, *state_dict}):
            errors.append(f"{prefix[:-1] or 'IncrementalSVM'}: the checkpoint lacks {lacking}")
        else:
            kernel = copy.deepcopy(self.kernel)
            if kernel is not None and not kernel.deep:
                start = prefix + "kernel."
                saved = {k.removeprefix(start): v for k, v in state_dict.items() if k.startswith(start)}
                kernel.load_state_dict(saved, strict=False)
            self._load(own, kernel, self.device)
            self.trajectory = []
        super()._load_from_state_dict(others, prefix, metadata, strict, missing, unexpected, errors)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_solver": checkpoint.save(self._content()), "_support": {}, "_reporting": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_solver")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._load(saved, self.kernel, self.device)

    def _apply(self, fn: Any, recurse: bool = True) -> IncrementalSVM:
        """Devices move, the precision stays."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = device_after(fn, self.device)
        if device != self.device:
            self._load(None, self.kernel, device)
        return self

    def extra_repr(self) -> str:
        """C and the sizes of the sets."""
        return f"C={self.C}, n={self.n}, margin={len(self._solver.margin)}"


@contextlib.contextmanager
def _progress(wanted: bool | Callable[[float], None] | None) -> Iterator[Callable[[float], None] | None]:
    """Yield a function that takes the completed share of a fit, or None. wanted: as in ``fit``."""
    furthest = 0.0  # a fit may need a second start

    def tell(share: float) -> None:
        nonlocal furthest
        before, furthest = furthest, max(furthest, share)
        wanted(furthest) if callable(wanted) else count(int(100 * furthest) - int(100 * before))

    if wanted is False or callable(wanted):
        yield None if wanted is False else tell
        return
    with progress_bar("fit", 100, forced=wanted is True, delay=0.0 if wanted else 2.0) as count:
        yield tell


def _kernel(kernel: Any) -> Kernel | None:
    return None if isinstance(kernel, str) and kernel == "precomputed" else as_kernel(kernel)


def _bounds(C: Any) -> tuple[float, float]:
    """Check C and return it for class 0 and class 1."""
    if isinstance(C, Tensor):
        C = C.tolist()
    if isinstance(C, list | tuple) and len(C) == 2:
        return checks.positive(C[0], "C"), checks.positive(C[1], "C")
    C = checks.positive(C, "C")
    return C, C


def _require_symmetric(K: Tensor) -> None:
    """Raise ValueError unless these precomputed values, among some samples, are symmetric."""
    if K.shape[0] != K.shape[1] or not bool(torch.allclose(K, K.T, rtol=1e-9, atol=1e-12)):
        raise ValueError(
            "precomputed values among samples must be symmetric (in add, the last B columns of (B, n + B)), got shape "
            f"{tuple(K.shape)}"
        )
