"""Adapters through which a store changes its head by rows.

``LinearAdapter`` drives an :class:`~torchlssvm.LSSVMHead`, which needs the samples again to remove them; ``KernelAdapter``
drives a kernel machine, which keeps its samples and removes them by ids of its own.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchlssvm.errors import InterruptedUpdateError, RemovalError, StoreError
from torchlssvm.linear import LSSVMHead
from torchlssvm.linear.checkpoint import arguments
from torchlssvm.linear.data_choices import DataChoices
from torchlssvm.linear.diagnostics.calibration import Calibration
from torchlssvm.statistics import Statistics
from torchlssvm.store.codec import Codec
from torchlssvm.store.sample_table import StoredRows

SETTABLE_OPTIONS = ("rho", "class_weight")
"""Options of a head that may change while it holds samples."""

MATRICES_PER_HEAD = 4
"""J x J matrices that a head needs to be summed and solved, at least."""


def head_from(config: dict[str, Any], device: torch.device | str | None) -> LSSVMHead:
    """The empty head that a store describes; StoreError when there is none, or none that this machine could hold."""
    options = {k: v for k, v in config.items() if k != "type"}
    try:
        J, K, folds = options["in_features"], options["num_classes"], max(1, options["folds"])
        if isinstance(J, int) and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            need = 8 * (
                MATRICES_PER_HEAD * J**2 + J * K + folds * K
            )  # sums of classes and folds are made when they have samples
            if need > memory // 2 or 8 * folds * K > memory // 16:
                raise StoreError(
                    f"a head of {str(J)[:20]} features needs more than the {memory / 2**30:.0f} GiB of this machine"
                )
        return LSSVMHead.from_config(options, device=device)
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise StoreError(f"the store is damaged: its head cannot be made: {error}") from error


class LinearAdapter:
    """Drives an LSSVMHead, which needs the rows again to remove them; the store has them."""

    def __init__(self, head: LSSVMHead):
        self.head = head.drop_membership("it belongs to a store, which has the rows")
        self.seen: tuple[int, object] = (head.version, self.signature())

    @property
    def exact(self) -> bool:
        """True if the state is the same, bit for bit, however it was reached: it then has a digest."""
        return self.head.statistics is not None and self.head.statistics.exact

    @property
    def empty(self) -> bool:
        """True if it holds no sample."""
        return self.head.n == 0

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """A lock that the store holds while the head is between two states, so that readers of the head wait."""
        return self.head.locked()

    @property
    def torn(self) -> bool:
        """True if a change was interrupted, also one by a reader that settled the sums."""
        with self.lock:  # a change that another thread is making is none that was interrupted
            try:
                self.head.check_whole()
            except InterruptedUpdateError:
                return True
        return False

    def holds(self, digest: str | None, samples: int) -> bool:
        """Compare the state with the one that was recorded: by the digest, or else by the number of samples."""
        return self.digest() == digest if self.exact else self.head.n == samples

    def config(self) -> dict[str, Any]:
        """Options that make an empty head like this one, as primitives."""
        return {"type": "LSSVMHead"} | self.head.config()

    def set_options(self, config: dict[str, Any]) -> None:
        """Take over those options of another head's :meth:`config` that may change."""
        mine, given = self.config(), arguments({k: v for k, v in config.items() if k != "type"})
        for name in SETTABLE_OPTIONS:
            if mine[name] != config[name]:
                setattr(self.head, name, given[name])

    def chosen(self) -> dict[str, Any] | None:
        """Choices made from data, with the calibration, as primitives; None if none was made."""
        head = self.head
        if not head.data_choices.made:
            return None
        calibration = head.calibration
        return {
            "made": head.data_choices.to_json(head.version),
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
            choices = DataChoices.from_json(chosen["made"], head.version, calibration)
        except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise StoreError(f"the store is damaged: what was chosen for its head cannot be read: {error}") from error
        head.data_choices = choices

    def codec(self) -> Codec:
        """The form in which its features are stored at the moment."""
        head = self.head
        target_grid = head.target_grid if head.grid is not None else None
        return Codec(head.in_features, head.num_classes, head.grid, target_grid, head.normalize is not None)

    def digest(self) -> str | None:
        """The digest, if there is one."""
        return self.head.digest() if self.exact else None

    def signature(self) -> object:
        """Changes whenever samples do."""
        return self.digest() if self.exact else (self.head.n, self.head.counts.tolist())

    def note(self, digest: str | None = None) -> None:
        """Take the present state for the right one; ``digest``: its digest, if that is known already."""
        self.seen = (self.head.version, digest or self.signature())

    @property
    def touched(self) -> bool:
        """True if it was changed since :meth:`note`, other than through the store."""
        return self.head.version != self.seen[0] and self.signature() != self.seen[1]

    def _ids(self, ids: Sequence[str]) -> Sequence[str] | None:
        """Ids decide the cross-validation folds of samples; a head without folds takes none."""
        folds = self.head.statistics is not None and self.head.statistics.folds
        return ids if folds else None

    def _here(self, *values: Tensor) -> list[Tensor]:
        device = self.head.device
        return [v.to(device) for v in values]

    def add(self, ids: Sequence[str], x: Tensor, y: Tensor) -> None:
        """Learn new samples."""
        x, y = self._here(x, y)
        self.head.add(x, y, ids=self._ids(ids))

    def add_rows(self, rows: StoredRows, codec: Codec) -> None:
        """Learn samples of the store again, on the grid they are on."""
        self._sum(self.head, self.head.statistics, rows, codec)

    def empty_sums(self) -> Statistics | None:
        """Statistics like the head's without any sample, for :meth:`add_to`; None for a head without a digest."""
        return self.head.statistics.zero() if self.head.statistics is not None and self.exact else None

    def add_to(self, sums: Statistics, rows: StoredRows, codec: Codec) -> None:
        """Sum samples of the store beside the head, on the grid they are on."""
        self._sum(sums, sums, rows, codec)

    def _sum(self, learner: LSSVMHead | Statistics, stats: Statistics | None, rows: StoredRows, codec: Codec) -> None:
        try:
            if stats is not None and stats.empty and len(rows):
                stats.decide("labels" if rows.y.ndim == 1 else "values", codec.grid, codec.target_grid)
            x, y = self._here(rows.x, rows.y)
            learner.add(x, y, ids=self._ids(rows.ids))
        except ValueError as error:  # no row that the head would refuse was ever written
            raise StoreError(f"the store is damaged: rows {rows.seq[0]} to {rows.seq[-1]}: {error}") from error

    def remove(self, rows: StoredRows) -> None:
        """Unlearn samples of the store."""
        x, y = self._here(rows.x, rows.y)
        with self.head.vouched():
            self.head.remove(x, y, ids=self._ids(rows.ids))

    def relabel(self, rows: StoredRows, y: Tensor) -> None:
        """Give samples of the store new targets."""
        x, y_old, y = self._here(rows.x, rows.y, y)
        with self.head.vouched():
            self.head.relabel(x, y_old, y, ids=self._ids(rows.ids))

    def replace(self, rows: StoredRows, x: Tensor, y: Tensor) -> None:
        """Exchange the features and targets of samples of the store."""
        ids = self._ids(rows.ids)
        x_old, y_old, x, y = self._here(rows.x, rows.y, x, y)
        with self.head.vouched():
            self.head.replace(x_old, y_old, x, y, ids_old=ids, ids_new=ids)

    def clear(self) -> None:
        """Forget all samples."""
        self.head.adopt(None)

    def state(self) -> dict[str, Tensor]:
        """The statistics, for a snapshot."""
        assert self.head.statistics is not None
        return {k: v.cpu() for k, v in self.head.statistics.state().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Undo :meth:`state`; ValueError when it does not fit."""
        device = self.head.device
        self.head.adopt({k: v if k == "meta" else v.to(device) for k, v in state.items()})

    def copy(self) -> LinearAdapter:
        """An independent one in the same state."""
        return LinearAdapter(copy.deepcopy(self.head))


class KernelAdapter:
    """Drives a kernel machine: its ``add(x, y)`` returns ids, its ``remove(ids)`` and ``relabel(ids, y)`` take them."""

    exact = torn = False

    def __init__(self, head: Any):
        self.head = head
        self.where: dict[str, int] = {}  # id in the store -> id in the machine
        self.note()

    @property
    def empty(self) -> bool:
        """True if it holds no sample."""
        return len(self.head.ids) == 0

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """A context that does nothing: a kernel machine has no lock."""
        return nullcontext()

    def holds(self, digest: str | None, samples: int) -> bool:
        """Compare the number of samples with the one that was recorded."""
        return len(self.head.ids) == len(self.where) == samples

    def set_options(self, config: dict[str, Any]) -> None:
        """Do nothing: no option of a kernel machine can change."""

    def config(self) -> dict[str, Any]:
        """Facts that must agree when the store is opened with another machine."""
        return {"type": type(self.head).__name__, "num_classes": getattr(self.head, "num_classes", 2)}

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

    def find(self, name: str) -> int | None:
        """The machine's id of a sample: by its name, or, for one that was added to the machine itself, its number."""
        if name in self.where or not name.isdecimal():
            return self.where.get(name)
        number = int(name)
        return number if number in self.head.ids.tolist() and number not in self.where.values() else None

    def _machine_ids(self, ids: Sequence[str]) -> Tensor:
        found = [self.find(name) for name in ids]
        missing = next((name for name, number in zip(ids, found, strict=True) if number is None), None)
        if missing is not None:
            raise RemovalError(f"no sample with the id {missing!r} is held")
        return torch.tensor(found, dtype=torch.int64, device=self.head.ids.device)

    def add(self, ids: Sequence[str], x: Tensor, y: Tensor) -> None:
        """Learn new samples."""
        self.where.update(zip(ids, self.head.add(x, y).tolist(), strict=True))

    def add_rows(self, rows: StoredRows, codec: Codec) -> None:
        """Learn samples of the store again."""
        del codec
        self.add(rows.ids, rows.x, rows.y)

    def remove(self, rows: StoredRows) -> None:
        """Unlearn samples of the store."""
        self.head.remove(self._machine_ids(rows.ids))
        for sample in rows.ids:
            self.where.pop(sample, None)

    def relabel(self, rows: StoredRows, y: Tensor) -> None:
        """Give samples of the store new targets."""
        self.head.relabel(self._machine_ids(rows.ids), y)

    def replace(self, rows: StoredRows, x: Tensor, y: Tensor) -> None:
        """Exchange the features and targets of samples of the store."""
        old = self._machine_ids(rows.ids)
        self.add(rows.ids, x, y)  # first: if the new ones are refused, nothing has changed
        self.head.remove(old)

    def clear(self) -> None:
        """Forget all samples."""
        if not self.empty:
            self.head.remove(self.head.ids.clone())
        self.where.clear()

    def copy(self) -> KernelAdapter:
        """An independent one in the same state."""
        return copy.deepcopy(self)


HeadAdapter: TypeAlias = LinearAdapter | KernelAdapter


def adapter_for(head: Any) -> HeadAdapter:
    """The adapter of a head; StoreError when there is none."""
    if isinstance(head, LSSVMHead):
        return LinearAdapter(head)
    if all(callable(getattr(head, name, None)) for name in ("add", "remove", "relabel")) and hasattr(head, "ids"):
        return KernelAdapter(head)
    raise StoreError(
        f"a store drives an LSSVMHead, or a machine with ids, add, remove and relabel; got {type(head).__name__}"
    )
