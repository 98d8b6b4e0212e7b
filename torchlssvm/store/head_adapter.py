"""Adapters through which a store updates its head.

Both classes are a :class:`~torchlssvm.sample_adapter.SampleAdapter`, which adds and removes samples by their ids in the store.
``HeadAdapter`` updates a kernel machine, which removes samples by ids of its own. ``LinearAdapter`` updates an
:class:`~torchlssvm.LSSVMHead` or a :class:`~torchlssvm.MarginHead`, which need the features of a sample again to remove it. The
adapters also give the store the head's options and digest, and detect changes that were made to the head directly.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor

from torchlssvm.errors import StoreError
from torchlssvm.linear import LinearHead
from torchlssvm.linear.data_choices import DataChoices
from torchlssvm.linear.diagnostics.calibration import Calibration
from torchlssvm.linear.kinds import HEAD_TYPES
from torchlssvm.sample_adapter import Names, SampleAdapter
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.sum_check import SumCheck
from torchlssvm.store.sample_table import ROWS_PER_BATCH, Codec, StoredRows

SETTABLE_OPTIONS = ("rho", "class_weight", "rule")
"""Options of a head that may change while it holds samples."""


BYTES_PER_GROUP = 4096
"""Memory of the sums of a fold or class without samples, and of the objects that keep them."""


def head_from(config: dict[str, Any], device: torch.device | str | None) -> LinearHead:
    """Create the empty head that a store describes. StoreError if the description is damaged or the head exceeds the memory."""
    options = {k: v for k, v in config.items() if k != "type"}
    try:
        kind = HEAD_TYPES[config["type"]]
        check_size(options)
        return kind.from_config(options, device=device)
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise StoreError(f"the store is damaged: its head cannot be made: {error}") from error


def check_size(options: dict[str, Any]) -> None:
    """Raise StoreError for a head that cannot be used in the memory of this machine."""
    J, K, folds = options["in_features"], options["num_classes"], max(1, options.get("folds", 0))
    if not isinstance(J, int) or "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    need = 8 * (4 * J**2 + (4 * J + ROWS_PER_BATCH) * K)  # matrices, weights, and the scores of a batch
    groups = folds * (K if options.get("per_class") else 1)  # their sums are allocated when they get samples
    pairs = K * (K - 1) // 2 if options.get("multiclass") == "ovo" else 0
    small = BYTES_PER_GROUP * groups + 8 * (folds * K + pairs * (J + 2))
    if need > memory // 2 or small > memory // 16:
        raise StoreError(
            f"a head of {str(J)[:20]} features and {str(K)[:20]} classes needs more than the {memory / 2**30:.0f} GiB of this "
            "machine"
        )


class HeadAdapter(SampleAdapter):
    """Updates a kernel machine: its ``add(x, y)`` returns ids, which its ``remove(ids)`` and ``relabel(ids, y)`` take."""

    exact = torn = False

    def __init__(self, head: Any):
        super().__init__(head)
        self.head = head
        self.note()

    @property
    def empty(self) -> bool:
        """True if the head holds no sample."""
        return self.count == 0

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The lock that the store holds while it changes the head; a kernel machine has none."""
        return nullcontext()

    def config(self) -> dict[str, Any]:
        """Options that must agree when the store is opened with another head."""
        return {"type": type(self.head).__name__, "num_classes": getattr(self.head, "num_classes", 2)}

    def codec(self) -> Codec:
        """The form in which features are currently stored: unchanged, as many as the first samples have."""
        return Codec(0, getattr(self.head, "num_classes", 2))

    def digest(self) -> str | None:
        """The digest of the head, or None if it has no digest."""
        return None

    @property
    def version(self) -> object:
        """A number that changes with the state of the head; None if it has no such number."""
        return None

    def signature(self) -> object:
        """A value that changes whenever the samples change."""
        return tuple(self.head.ids.tolist())

    def note(self, digest: str | None = None) -> None:
        """Record the current state as the correct one. ``digest`` is its digest, if already known."""
        self.in_doubt = False  # True while a change that the store makes may be incomplete, or is not committed
        self.seen: tuple[object, object] = (self.version, digest or self.signature())

    @property
    def touched(self) -> bool:
        """True if the samples of the head may have changed since :meth:`note`."""
        known = self.version is not None and self.version == self.seen[0]
        return self.in_doubt or (not known and self.signature() != self.seen[1])

    def add_rows(self, rows: StoredRows, codec: Codec) -> None:
        """Learn stored samples again, on the grid of the stored rows."""
        self.add(rows.ids, rows.x, rows.y)

    def copy(self) -> Self:
        """Return an independent adapter whose head is in the same state."""
        return copy.deepcopy(self)


class LinearAdapter(HeadAdapter):
    """Updates a linear head, which needs the rows of samples again to remove them. The store provides these rows."""

    head: LinearHead

    def __init__(self, head: LinearHead):
        super().__init__(head._drop_membership("it belongs to a store, which has the rows"))

    @property
    def exact(self) -> bool:  # type: ignore[override]
        """True if the same samples give the same state, bit for bit, in any order. Only such a head has a digest."""
        return self.head.statistics.exact

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The lock that the store holds while it changes the head. Readers of the head wait for it."""
        return self.head._lock  # type: ignore[no-any-return]

    @property
    def torn(self) -> bool:  # type: ignore[override]
        """True if a change was interrupted, even if it was the completion of the sums by a reader."""
        return self.head._torn

    def config(self) -> dict[str, Any]:
        """Options that create an empty head like this one, as primitives."""
        return {"type": type(self.head).__name__} | self.head.config()

    def set_options(self, config: dict[str, Any]) -> bool:
        """Adopt the changeable options from another head's :meth:`config`; return True if an option has changed."""
        mine = self.config()
        shared = [name for name in SETTABLE_OPTIONS if name in config and name in mine]  # a margin head has no rule
        other = {name: config[name] for name in shared if config[name] != mine[name]}
        for name, value in other.items():
            numbers = torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
            setattr(self.head, name, numbers)
        return bool(other)

    def options_set(self) -> dict[str, Any]:
        """The changeable options that were set, not chosen from the samples."""
        config, chosen = self.config(), self.head._choices.made
        return {name: config[name] for name in SETTABLE_OPTIONS if name in config and name not in chosen}

    def add_classes(self, k: int) -> None:
        """Add k classes. Only the store may do this; the head refuses other callers."""
        with self.lock:
            keeper, self.head._keeper = self.head._keeper, None
            try:
                self.head.add_classes(k)
            finally:
                self.head._keeper = keeper

    def chosen(self) -> dict[str, Any] | None:
        """Choices made from data, including the calibration, as primitives; None if no choice was made."""
        head = self.head
        if not head._choices.made:
            return None
        calibration = head.calibration
        return {
            "made": head._choices.to_json(),
            "calibration": calibration and calibration.describe(),
            "values": [] if calibration is None else [v.hex() for v in calibration.values.tolist()],
        }

    def restore_chosen(self, chosen: dict[str, Any] | None) -> None:
        """Restore the result of :meth:`chosen` on a head with the samples for which it was written."""
        chosen = chosen or {"made": {}, "calibration": None}
        head, calibration = self.head, None
        try:
            if chosen["calibration"] is not None:
                numbers = [float.fromhex(v) for v in chosen["values"]]
                values = torch.tensor(numbers, dtype=torch.float64, device=head.device)
                calibration = Calibration.restore(chosen["calibration"], values)
            choices = DataChoices.from_json(chosen["made"], calibration)
        except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise StoreError(f"the store is damaged: what was chosen for its head cannot be read: {error}") from error
        head._choices = choices

    def codec(self) -> Codec:
        """The form in which the head's features are currently stored."""
        head = self.head
        target_grid = head.statistics.target_grid if head.grid is not None else None
        return Codec(head.in_features, head.num_classes, head.grid, target_grid, head.normalize is not None)

    def digest(self) -> str | None:
        """The digest of the head, or None if it has no digest."""
        return self.head.digest() if self.exact else None

    def signature(self) -> object:
        """A value that changes whenever the samples change."""
        return self.digest() if self.exact else (self.head.n, self.head.counts.tolist())

    @property
    def version(self) -> object:
        """A number that changes with the state of the head."""
        return self.head._state_version

    def exchange(self, added: tuple[Any, ...] | None, removed: tuple[Any, ...] | None) -> None:
        """Add samples and remove others as one change. The store guarantees that the head holds the samples to remove."""
        device = self.head.device
        new, old = (
            None if samples is None else (samples[0], samples[1].to(device), samples[2].to(device))
            for samples in (added, removed)
        )
        with self.head._trusted_removals():
            super().exchange(new, old)

    def relabel(self, names: Names, labels: Tensor, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        """Change the labels of stored samples from y to ``labels`` (B, ...)."""
        device = self.head.device
        with self.head._trusted_removals():
            super().relabel(names, labels.to(device), x.to(device), y.to(device))

    def add_rows(self, rows: StoredRows, codec: Codec) -> None:
        """Learn stored samples again, on the grid of the stored rows."""
        self._sum(self, self.head.statistics, rows, codec)

    def sum_anew(self, batches: Iterable[StoredRows], codec: Codec) -> str | None:
        """Recompute the sums of samples without changing the head; return the digest, or None for a head without a digest."""
        if not self.exact:
            return None
        sums = self.head.statistics.zero()
        for rows in batches:
            self._sum(SampleAdapter(sums), sums, rows, codec)
        return sums.digest()

    def check_sums(self, batches: Iterable[StoredRows]) -> str | None:
        """Check the head's sums against stored samples in one pass; return the digest, or None for a head without a digest.

        Raises StoreError if the sums do not match the samples.
        """
        if not self.exact:
            return None
        check = SumCheck(self.head.statistics)
        for rows in batches:
            try:
                check.add(rows.x.to(self.head.device), rows.y.to(self.head.device), rows.ids)
            except ValueError as error:
                raise StoreError(f"the store is damaged: rows {rows.seq[0]} to {rows.seq[-1]}: {error}") from error
        failure = check.failure()
        if failure is not None:
            raise StoreError(f"the store is damaged: {failure}")
        return self.digest()

    def _sum(self, learner: SampleAdapter, stats: Statistics, rows: StoredRows, codec: Codec) -> None:
        try:
            if stats.empty and rows.ids:
                stats.decide("labels" if rows.y.ndim == 1 else "values", codec.grid, codec.target_grid)
            device = self.head.device
            learner.add(rows.ids, rows.x.to(device), rows.y.to(device))
        except ValueError as error:  # the head accepted every row when it was written
            raise StoreError(f"the store is damaged: rows {rows.seq[0]} to {rows.seq[-1]}: {error}") from error

    def state(self) -> dict[str, Tensor]:
        """Return the state for a snapshot. It excludes the rows, because the store has them."""
        return {k: v.cpu() for k, v in self.head._snapshot().items()}

    def load(self, state: dict[str, Tensor], batches: Iterable[StoredRows], codec: Codec) -> None:
        """Restore :meth:`state`; ValueError if it does not fit. A head that keeps rows gets its rows from ``batches``."""
        if self.head._keeps_rows:
            self.clear()
            for rows in batches:
                self.add_rows(rows, codec)
        self.head._resume({k: v if k == "meta" else v.to(self.head.device) for k, v in state.items()})


def adapter_for(head: Any) -> HeadAdapter:
    """Return an adapter for a head. Raises StoreError if the type is not supported."""
    if isinstance(head, LinearHead):
        return LinearAdapter(head)
    if all(callable(getattr(head, name, None)) for name in ("add", "remove", "relabel")) and hasattr(head, "ids"):
        return HeadAdapter(head)
    raise StoreError(
        f"a store drives an LSSVMHead, a MarginHead, or a machine with ids, add, remove and relabel; got {type(head).__name__}"
    )
