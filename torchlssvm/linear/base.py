"""What a head is made of: its options and state, how they are read, and how they are saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.linear import checkpoint as persistence
from torchlssvm.linear.compact_solver import Compact
from torchlssvm.linear.locking import exclusive, give_lock
from torchlssvm.linear.membership import Membership, RowChange
from torchlssvm.linear.merge_history import Ledger
from torchlssvm.linear.solvers import Options, Pairwise, engine_for
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.integrity import Integrity

if TYPE_CHECKING:
    from typing_extensions import Self


class HeadBase(nn.Module):
    """State and read access of :class:`~torchlssvm.LSSVMHead`."""

    _lock: Any  # a threading.RLock, which has no type of its own
    _integrity: Integrity

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        rho: float = 1.0,
        intercept: str = "free",
        class_weight: str | Tensor | None = None,
        multiclass: str = "ovr",
        grid: FixedPoint | str | None = "auto",
        target_grid: FixedPoint | str | None = "auto",
        statistics: bool = True,
        per_class: bool | None = None,
        folds: int = 0,
        membership: bool = True,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        give_lock(self)
        checks.one_of(intercept, "intercept", ("free", "penalized", "none"))
        checks.one_of(multiclass, "multiclass", ("ovr", "ovo"))
        device = torch.empty(0, device=device).device
        weight = check_class_weight(class_weight, num_classes, device)
        needs_classes = weight is not None or multiclass == "ovo"
        if per_class is False and needs_classes and statistics:
            raise ValueError(
                "per_class=False does not go with class_weight or multiclass='ovo', which need sums per class"
            )
        self._options = Options(checks.positive(rho, "rho"), intercept, weight)
        self._multiclass = multiclass
        # The arguments are checked by Statistics, in either form.
        sums = Statistics(
            in_features, num_classes, grid=grid, target_grid=target_grid, folds=folds, device=device,
            per_class=needs_classes if per_class is None else per_class,
        )  # fmt: skip
        if not statistics:
            for name, on in (
                ("class_weight='balanced' or 'complement'", self._options.follows_counts),
                ("multiclass='ovo'", multiclass == "ovo"),
                ("per_class", bool(per_class)),
                ("folds", folds > 0),
            ):
                if on:
                    raise ValueError(f"{name} needs statistics=True: the compact form keeps only w and P")
        self.statistics: Statistics | None = sums if statistics else None
        self._grid = grid if isinstance(grid, FixedPoint) else None
        self._target_grid = target_grid if isinstance(target_grid, FixedPoint) else None
        self._engine: Any
        if statistics:
            self._engine = engine_for(sums, self._options, multiclass)
        else:
            self._engine = Compact(in_features, num_classes, self._options, device)
        self._in_features, self._num_classes = in_features, num_classes
        self._membership = bool(membership)
        self._rows = self._no_rows()
        self._agreed_rows: Membership | None = Membership(())  # at the last agreement: none; None: not known
        self._vouched = False
        self._integrity = Integrity()
        self._solving = False  # set while caches are computed: what was interrupted is computed again
        self._published: tuple[Tensor, Tensor] | None = (
            None  # w and b of the present state, for readers without the lock
        )
        self._uncertifiable: str | None = None
        self._version = 0
        self._ledger = Ledger()
        self._whitened: Any = None  # a cache: the solved system, for leave-one-out and the like
        self._made: dict[str, tuple[int, str]] = {}  # what was chosen from data: the version it was made for, and how
        self._calibration: Any = None
        persistence.make_live(self)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def in_features(self) -> int:
        """J."""
        return self._in_features

    @property
    def num_classes(self) -> int:
        """K."""
        return self._num_classes

    @property
    def device(self) -> torch.device:
        """Where the state lives."""
        return self._engine.device if self.statistics is None else self.statistics.device

    @property
    def intercept(self) -> str:
        """How the constant is treated: "free", "penalized" or "none"."""
        return self._options.intercept

    @property
    def multiclass(self) -> str:
        """One class against the rest, "ovr", or against each other one, "ovo"."""
        return self._multiclass

    @property
    def grid(self) -> FixedPoint | None:
        """The grid in use; None while ``"auto"`` has seen no data, or without a grid."""
        return self._grid if self.statistics is None else self.statistics.grid

    @property
    def counts(self) -> Tensor:
        """Samples per class (K,)."""
        source = self._engine if self.statistics is None else self.statistics
        return source.counts.clone()

    @property
    def n(self) -> int | float:
        """The number of samples held (their total weight)."""
        return self._engine.n if self.statistics is None else self.statistics.n

    @property
    def rho(self) -> float:
        """The regularization; setting it costs one solve at the next read."""
        return self._options.rho

    @rho.setter
    def rho(self, value: float) -> None:
        self._set_rho(checks.positive(value, "rho"))

    @exclusive
    def _set_rho(self, value: float) -> None:
        with self._changing():
            if self.statistics is None:
                self._engine.set_rho(value)
            else:
                self._options.rho = value
                self._engine.reset()
            self._made.pop("rho", None)

    @property
    def class_weight(self) -> str | Tensor | None:
        """Weights by class; settable at any time when sums are kept per class."""
        return self._options.class_weight

    @class_weight.setter
    def class_weight(self, value: str | Tensor | None) -> None:
        stats = self._need_statistics("changing class_weight")
        weight = check_class_weight(value, self.num_classes, self.device)
        if weight is not None and not stats.per_class:
            raise ValueError("class_weight needs sums per class: build the head with per_class=True")
        with self._lock, self._changing():
            self._options.class_weight = weight
            self._engine.reset()

    @property
    def P(self) -> Tensor:
        """P = I - C = rho A^-1: (J, J), (J+1, J+1) when penalized, (pairs, ...) for ovo. Do not write to it."""
        return self._current(inverse=True)[2]

    @property
    def weight(self) -> Tensor:
        """w as nn.Linear has it, (K, J)."""
        return self._current()[0].mT

    @property
    def bias(self) -> Tensor:
        """b (K,)."""
        return self._current()[1]

    @property
    def checked(self) -> bool:
        """Whether a removal is refused at once unless its rows are held, bit for bit; ``unchecked`` says why not."""
        return self.unchecked is None

    @property
    def unchecked(self) -> str | None:
        """Why removals are not checked against the rows held; None while they are.

        They are tested all the same: what would leave sums that cannot be those of samples is refused within the call.
        """
        return self._rows.unchecked

    def drop_membership(self, reason: str = "its fingerprints were dropped") -> Self:
        """Forget the fingerprints of the rows held, e.g. where a store has the rows themselves."""
        with self._lock:
            self._membership, self._rows = False, self._rows.dropped(reason)
        return self

    @contextmanager
    def vouched(self) -> Iterator[None]:
        """A context in which the caller has the rows and answers for it that what is removed is held: a store does.

        Without fingerprints every removal would be tested by a solve.
        """
        with self._lock:
            before, self._vouched = self._vouched, True
            try:
                yield
            finally:
                self._vouched = before

    def locked(self) -> AbstractContextManager[Any]:
        """A context in which no other thread reads or changes the head: several calls as one."""
        lock: AbstractContextManager[Any] = self._lock
        return lock

    @property
    def uncertifiable(self) -> str | None:
        """Why the head can no longer be certified to hold exactly the samples it was given; None while it can."""
        return self._uncertifiable

    def config(self) -> dict[str, Any]:
        """The options as primitives; ``LSSVMHead.from_config`` makes an empty head like this one from them."""
        return persistence.config(self)

    @classmethod
    def from_config(cls, config: dict[str, Any], device: torch.device | str | None = None) -> Self:
        """An empty head with the options of another one."""
        return cls(**persistence.arguments(config), device=device)

    # -- inside --------------------------------------------------------------------------------------------------------

    @exclusive
    def _adopt(self, state: dict[str, Tensor] | None) -> None:
        """Put saved statistics in the place of those held; None empties the head."""
        fresh = None if self.statistics is None else self.statistics.zero()
        if fresh is not None and state is not None:
            fresh.load(state)
        self._integrity = Integrity()  # whatever was interrupted before is replaced
        with self._integrity:
            self._published, self._solving = None, True
            if self.statistics is not None and fresh is not None:
                self.statistics.__dict__.update(fresh.__dict__)
            self._rows = (
                self._no_rows() if state is None else self._rows.dropped("its statistics were replaced by saved ones")
            )
            self._agreed_rows = None
            self._uncertifiable = None
            self._ledger.forget()
            self._engine.reset()
            self._version += 1
            self._solving = False

    def _adopt_parts(
        self, statistics: Statistics | None, engine: Any, rows: Membership, agreed: Membership | None, ledger: Ledger,
        uncertifiable: str | None,
    ) -> None:  # fmt: skip
        """Put parts that were built aside in the place of those held: whatever was interrupted before is replaced."""
        with self._lock:
            self._integrity = Integrity()
            with self._integrity:
                self.statistics, self._engine, self._options = statistics, engine, engine.options
                self._rows, self._agreed_rows, self._ledger, self._uncertifiable = rows, agreed, ledger, uncertifiable
                self._published, self._whitened, self._solving = None, None, False
                self._version += 1

    def _agree_rows(self, rows: Membership | None = None) -> None:
        """Take rows, or those held, for what was agreed on; what changes from here on is pending."""
        if rows is not None:
            self._rows = rows
        self._rows = self._agreed_rows = self._rows.hashed()

    def _agreed_or_unknown(self) -> Membership:
        """The rows at the last agreement, ready to be changed."""
        if self._agreed_rows is None or self._rows.unchecked is not None:
            return self._rows.dropped("which rows were agreed on is not known: the head was saved or copied since")
        return self._agreed_rows if self._agreed_rows.tables else self._rows.none_held()

    def _pending_rows(self) -> RowChange:
        """The rows that changed since the last agreement."""
        return self._rows.since(self._agreed_rows)

    def _no_rows(self) -> Membership:
        """The rows of an empty head."""
        if self.statistics is None:
            return Membership((), "the compact form (statistics=False) keeps only w and P")
        if not self.statistics.exact:
            return Membership((), "without a grid (grid=None) a row has no exact form to be recognised by")
        return Membership() if self._membership else Membership((), "the head was made with membership=False")

    def _check_whole(self) -> None:
        """InterruptedUpdateError if a change was interrupted."""
        self._integrity.check()
        if self.statistics is not None:
            self.statistics.check_whole()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change the state: readers wait, an interruption is noticed, weights are published anew. Needs the lock."""
        self._check_whole()
        with self._integrity:
            self._published, self._solving = None, True
            yield
            self._version += 1
            self._solving = False

    def _restart(self) -> Self:
        """Forget what was computed from the statistics, which were changed from outside."""
        with self._lock, self._changing():
            self._engine.reset()
        return self

    @exclusive
    def _current(self, inverse: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """w, b and, if asked for, P: up to date."""
        self._check_whole()
        if self._solving and self.statistics is not None:
            self._engine.reset()
        self._published = None
        with self._integrity if self.statistics is None else nullcontext():  # the compact form has nothing behind it
            self._solving = True
            P = self._engine.inverse() if inverse else None
            w, b = self._engine.weights()
            self._solving = False
        source = self._engine if self.statistics is None else self.statistics
        self._published = None if source.empty else (w, b)
        return w, b, w if P is None else P

    def _fitted(self) -> None:
        source = self._engine if self.statistics is None else self.statistics
        if source.empty:
            raise NotFittedError("the head holds no samples: call add(x, y) first")

    def _need_statistics(self, what: str) -> Statistics:
        if self.statistics is None:
            raise ValueError(f"{what} needs statistics=True: the compact form keeps only w and P")
        with self._lock:  # a change that another thread is making is none that was interrupted
            self._check_whole()
        return self.statistics

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device with the module; the dtype stays float64 whatever ``.half()`` asks for."""
        del recurse
        persistence.move(self, fn(torch.empty(0, device=self.device)).device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:  # a snapshot, as all the rest is: the buffers themselves are written in place later
            destination.update({prefix + k: destination[prefix + k].clone() for k in persistence.BUFFERS})
        destination.update({prefix + k: v for k, v in persistence.save(self).items()})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        mine = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        problems = persistence.load(self, mine)
        missing_keys += [prefix + k for k in problems.missing]
        unexpected_keys += [prefix + k for k in problems.unexpected if strict]
        error_msgs += problems.errors

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: no raw sample is ever in there."""
        return persistence.freeze(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo :meth:`__getstate__`."""
        persistence.thaw(self, state)

    def extra_repr(self) -> str:
        """Shape, options and count."""
        form = "" if self.statistics is not None else ", statistics=False"
        pairs = ", multiclass='ovo'" if isinstance(self._engine, Pairwise) else ""
        shape = f"in_features={self.in_features}, num_classes={self.num_classes}"
        return f"{shape}, n={self.n:g}, rho={self.rho:g}, intercept={self.intercept!r}{pairs}{form}"


def check_class_weight(value: Any, K: int, device: torch.device) -> str | Tensor | None:
    """None, "balanced", "complement" or positive weights (K,)."""
    if value is None or isinstance(value, str):
        checks.one_of(value, "class_weight (or a tensor)", (None, "balanced", "complement"))
        return value
    try:
        weight = torch.as_tensor(value, dtype=torch.float64, device=device).detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        allowed = f"None, 'balanced', 'complement' or {K} numbers in the order of the classes"
        raise ValueError(f"class_weight must be {allowed}; got {type(value).__name__}") from error
    if weight.shape != (K,):
        raise ValueError(f"class_weight must have shape ({K},), got {tuple(weight.shape)}")
    if not checks.is_fake(weight) and not bool((torch.isfinite(weight) & (weight > 0)).all()):
        raise ValueError(f"class_weight must be finite and > 0, got {weight.tolist()}")
    return weight
