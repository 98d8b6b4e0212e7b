"""Adapters through which a store changes its head by rows.

Both are :class:`~torchlssvm.sample_adapter.SampleAdapter`: samples are added and removed under their ids in the store.
``LinearAdapter`` drives an :class:`~torchlssvm.LSSVMHead` or a :class:`~torchlssvm.MarginHead`, which are given the samples
again to remove them; ``KernelAdapter`` drives a kernel machine, which removes its samples by ids of its own. They also
tell the store the head's options and digest, and whether somebody changed the head directly.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchlssvm.errors import StoreError
from torchlssvm.linear import LinearHead
from torchlssvm.linear.data_choices import DataChoices
from torchlssvm.linear.diagnostics.calibration import Calibration
from torchlssvm.linear.kinds import HEAD_TYPES
from torchlssvm.sample_adapter import Names, SampleAdapter, SampleArguments
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.sum_check import SumCheck
from torchlssvm.store.sample_table import Codec, StoredRows

SETTABLE_OPTIONS = ("rho", "class_weight", "rule")
"""Options of a head that may change while it holds samples."""


def head_from(config: dict[str, Any], device: torch.device | str | None) -> LinearHead:
    """Make the empty head that a store describes; StoreError if the description is damaged, or the head exceeds the memory."""
    options = {k: v for k, v in config.items() if k != "type"}
    try:
        kind = HEAD_TYPES[config["type"]]
        J, K, folds = options["in_features"], options["num_classes"], max(1, options.get("folds", 0))
        if isinstance(J, int) and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            # At least four J x J matrices; sums of classes and folds are made when they have samples.
            need = 8 * (4 * J**2 + J * K + folds * K)
            if need > memory // 2 or 8 * folds * K > memory // 16:
                raise StoreError(
                    f"a head of {str(J)[:20]} features needs more than the {memory / 2**30:.0f} GiB of this machine"
                )
        return kind.from_config(options, device=device)
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise StoreError(f"the store is damaged: its head cannot be made: {error}") from error


class LinearAdapter(SampleAdapter):
    """Drives a linear head, which needs the rows again to remove them; the store has them."""

    def __init__(self, head: LinearHead):
        super().__init__(head)
        self.head: LinearHead = head._drop_membership("it belongs to a store, which has the rows")
        self.seen: tuple[int, object] = (head._state_version, self.signature())

    @property
    def exact(self) -> bool:
        """True if the same samples give the same state, bit for bit, in any order. Such a head has a digest."""
        return self.head.statistics.exact

    @property
    def empty(self) -> bool:
        """True if it holds no sample."""
        return self.head.n == 0

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """A lock that the store holds while the head is between two states, so that readers of the head wait."""
        lock: AbstractContextManager[Any] = self.head._lock
        return lock

    @property
    def torn(self) -> bool:
        """True if a change was interrupted, also one by a reader that completed the sums."""
        return self.head._torn

    def config(self) -> dict[str, Any]:
        """Options that make an empty head like this one, as primitives."""
        return {"type": type(self.head).__name__} | self.head.config()

    def set_options(self, config: dict[str, Any]) -> bool:
        """Adopt those options of another head's :meth:`config` that may change; True if one is another now."""
        mine = self.config()
        shared = [name for name in SETTABLE_OPTIONS if name in config and name in mine]  # a margin head has no rule
        other = {name: config[name] for name in shared if config[name] != mine[name]}
        for name, value in other.items():
            numbers = torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
            setattr(self.head, name, numbers)
        return bool(other)

    def add_classes(self, k: int) -> None:
        """Add k classes. Only the store may do this: the head refuses other callers."""
        with self.lock:
            keeper, self.head._keeper = self.head._keeper, None
            try:
                self.head.add_classes(k)
            finally:
                self.head._keeper = keeper

    def chosen(self) -> dict[str, Any] | None:
        """Choices made from data, with the calibration, as primitives; None if none was made."""
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
        """Undo :meth:`chosen`, on a head with the samples it was written for."""
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

    @property
    def rho_is_open(self) -> bool:
        """True if the head has a rule for rho and has not applied it yet."""
        return self.head._choices.rho_is_open

    def codec(self) -> Codec:
        """The form in which its features are stored at the moment."""
        head = self.head
        target_grid = head.statistics.target_grid if head.grid is not None else None
        return Codec(head.in_features, head.num_classes, head.grid, target_grid, head.normalize is not None)

    def digest(self) -> str | None:
        """The digest, if there is one."""
        return self.head.digest() if self.exact else None

    def signature(self) -> object:
        """Changes whenever samples do."""
        return self.digest() if self.exact else (self.head.n, self.head.counts.tolist())

    def note(self, digest: str | None = None) -> None:
        """Take the present state for the right one; ``digest``: its digest, if that is known already."""
        self.seen = (self.head._state_version, digest or self.signature())

    @property
    def touched(self) -> bool:
        """True if it was changed since :meth:`note`, other than through the store."""
        return self.head._state_version != self.seen[0] and self.signature() != self.seen[1]

    def exchange(self, added: SampleArguments | None, removed: SampleArguments | None) -> None:
        """Add samples and remove others as one change; the store guarantees that the latter are held."""
        device = self.head.device
        new, old = (
            None if samples is None else (samples[0], samples[1].to(device), samples[2].to(device))
            for samples in (added, removed)
        )
        with self.head._trusted_removals():
            super().exchange(new, old)

    def relabel(self, names: Names, labels: Tensor, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        """Give samples of the store the labels (B, ...) in place of y."""
        device = self.head.device
        with self.head._trusted_removals():
            super().relabel(names, labels.to(device), x.to(device), y.to(device))

    def add_rows(self, rows: StoredRows, codec: Codec) -> None:
        """Learn samples of the store again, on the grid they are on."""
        self._sum(self, self.head.statistics, rows, codec)

    def sum_anew(self, batches: Iterable[StoredRows], codec: Codec) -> str | None:
        """Recompute the sums of samples without changing the head; returns the digest, or None for a head without one."""
        if not self.exact:
            return None
        sums = self.head.statistics.zero()
        for rows in batches:
            self._sum(SampleAdapter(sums), sums, rows, codec)
        return sums.digest()

    def check_sums(self, batches: Iterable[StoredRows]) -> str | None:
        """Check the head's sums against samples of the store in one pass; returns the digest, or None for a head without one.

        StoreError if the sums do not match the samples.
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
        except ValueError as error:  # no row that the head would refuse was ever written
            raise StoreError(f"the store is damaged: rows {rows.seq[0]} to {rows.seq[-1]}: {error}") from error

    def state(self) -> dict[str, Tensor]:
        """The state for a snapshot. It leaves out the rows, since the store has them."""
        return {k: v.cpu() for k, v in self.head._snapshot().items()}

    def load(self, state: dict[str, Tensor], batches: Iterable[StoredRows], codec: Codec) -> None:
        """Undo :meth:`state`; ValueError when it does not fit. ``batches``: the rows then, for a head that keeps them."""
        if self.head._keeps_rows:
            self.clear()
            for rows in batches:
                self.add_rows(rows, codec)
        self.head._resume({k: v if k == "meta" else v.to(self.head.device) for k, v in state.items()})

    def copy(self) -> LinearAdapter:
        """An independent one in the same state."""
        return LinearAdapter(copy.deepcopy(self.head))


class KernelAdapter(SampleAdapter):
    """Drives a kernel machine: its ``add(x, y)`` returns ids, its ``remove(ids)`` and ``relabel(ids, y)`` take them."""

    exact = torn = False

    def __init__(self, head: Any):
        super().__init__(head)
        self.head = head
        self.note()

    @property
    def empty(self) -> bool:
        """True if it holds no sample."""
        return self.count == 0

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """A context that does nothing: a kernel machine has no lock."""
        return nullcontext()

    def set_options(self, config: dict[str, Any]) -> bool:
        """Do nothing: no option of a kernel machine can change."""
        return False

    def config(self) -> dict[str, Any]:
        """Facts that must agree when the store is opened with another machine."""
        return {"type": type(self.head).__name__, "num_classes": getattr(self.head, "num_classes", 2)}

    rho_is_open = False

    def chosen(self) -> None:
        """None: a kernel machine chooses nothing from data."""

    def restore_chosen(self, chosen: Any) -> None:
        """Do nothing: nothing was kept."""

    def codec(self) -> Codec:
        """Features are kept as they are; their number comes with the first ones."""
        return Codec(0, getattr(self.head, "num_classes", 2))

    def digest(self) -> None:
        """None: a kernel machine has no digest."""

    def signature(self) -> object:
        """Changes whenever samples do."""
        return tuple(self.head.ids.tolist())

    def note(self, digest: str | None = None) -> None:
        """Take the present state for the right one."""
        del digest
        self.seen = self.signature()

    @property
    def touched(self) -> bool:
        """True if it was changed since :meth:`note`, other than through the store."""
        return self.signature() != self.seen

    def add_rows(self, rows: StoredRows, codec: Codec) -> None:
        """Learn samples of the store again."""
        del codec
        self.add(rows.ids, rows.x, rows.y)

    def copy(self) -> KernelAdapter:
        """An independent one in the same state."""
        return copy.deepcopy(self)


HeadAdapter: TypeAlias = LinearAdapter | KernelAdapter


def adapter_for(head: Any) -> HeadAdapter:
    """Return an adapter for a head; StoreError if the type is not supported."""
    if isinstance(head, LinearHead):
        return LinearAdapter(head)
    if all(callable(getattr(head, name, None)) for name in ("add", "remove", "relabel")) and hasattr(head, "ids"):
        return KernelAdapter(head)
    raise StoreError(
        f"a store drives an LSSVMHead, a MarginHead, or a machine with ids, add, remove and relabel; got {type(head).__name__}"
    )
