"""What a head is made of: its options and state, how they are read, and how they are saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.functional.modes import exactly
from torchlssvm.heads import persistence
from torchlssvm.heads.compact import Compact
from torchlssvm.heads.engines import Options, Pairwise, engine_for
from torchlssvm.heads.ledger import Ledger
from torchlssvm.heads.solution import NotPositiveDefinite
from torchlssvm.statistics import Statistics

if TYPE_CHECKING:
    from typing_extensions import Self


class HeadBase(nn.Module):
    """State and read access of :class:`~torchlssvm.LSSVMHead`."""

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
        device: torch.device | str | None = None,
    ):
        super().__init__()
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
        self._unverified = False
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
        value = checks.positive(value, "rho")
        self._current()  # what is pending was judged with the old value
        with torch.inference_mode(False), torch.no_grad():
            if self.statistics is None:
                self._engine.set_rho(value)
            else:
                self._options.rho = value
                self._engine.reset()
        self._version += 1
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
        self._current()
        self._options.class_weight = weight
        self._engine.reset()
        self._version += 1

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

    @exactly
    def _adopt(self, state: dict[str, Tensor] | None) -> None:
        """Put saved statistics in the place of those held; None empties the head."""
        if self.statistics is not None:
            fresh = self.statistics.zero()
            if state is not None:
                fresh.load(state)
            self.statistics.__dict__.update(fresh.__dict__)
        self._unverified, self._uncertifiable = False, None
        self._ledger.forget()
        self._restart()

    def _roll_back(self, reason: str) -> None:
        assert self.statistics is not None
        self.statistics.restore()
        self._ledger.forget()  # it may be of what was rolled back
        self._unverified = False
        self._restart()
        error = checks.removal_error(reason)
        error.args = (
            f"{error.args[0]} (The state is that before the first removal since the weights were last read.)",
        )
        raise error from None

    def _restart(self) -> Self:
        self._engine.reset()
        self._version += 1
        return self

    @exactly
    def _current(self, inverse: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """w, b and, if asked for, P: up to date. Verifies pending removals, or rolls them back."""
        try:
            P = self._engine.inverse(self._unverified) if inverse else None
            w, b = self._engine.weights(self._unverified)
        except NotPositiveDefinite:
            self._roll_back("without the samples removed the system would not be positive definite")
            raise
        if self._unverified and self.statistics is not None:
            self.statistics.release()
            self._unverified = False
        return w, b, w if P is None else P

    def _fitted(self) -> None:
        source = self._engine if self.statistics is None else self.statistics
        if source.empty:
            raise NotFittedError("the head holds no samples: call add(x, y) first")

    def _need_statistics(self, what: str) -> Statistics:
        if self.statistics is None:
            raise ValueError(f"{what} needs statistics=True: the compact form keeps only w and P")
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
