"""The live head of a store, seen as rows that come and go.

``Linear`` drives an :class:`~torchlssvm.LSSVMHead`, which needs the samples again to remove them; ``ByIds`` drives a kernel
machine, which keeps its samples and removes them by ids of its own.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchlssvm.errors import RemovalError, StoreError
from torchlssvm.linear import LSSVMHead
from torchlssvm.linear.checkpoint import arguments
from torchlssvm.linear.data_choices import DataChoices
from torchlssvm.linear.diagnostics.calibration import Calibration
from torchlssvm.store.codec import Codec
from torchlssvm.store.sample_table import Rows

SETTABLE = ("rho", "class_weight")
"""Options of a head that may change while it holds samples."""

MATRICES = 4
"""J x J matrices that a head needs to be summed and solved, at least."""


def head_from(config: dict[str, Any], device: torch.device | str | None) -> LSSVMHead:
    """The empty head that a store describes; StoreError when there is none, or none that this machine could hold."""
    options = {k: v for k, v in config.items() if k != "type"}
    try:
        J, K, folds = options["in_features"], options["num_classes"], max(1, options["folds"])
        if isinstance(J, int) and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            need = 8 * (
                MATRICES * J**2 + J * K + folds * K
            )  # sums of classes and folds are made when they have samples
            if need > memory:
                raise StoreError(
                    f"a head of {str(J)[:20]} features needs more than the {memory / 2**30:.0f} GiB of this machine"
                )
        return LSSVMHead.from_config(options, device=device)
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise StoreError(f"the store is damaged: its head cannot be made: {error}") from error


class Linear:
    """An LSSVMHead."""

    def __init__(self, head: LSSVMHead):
        self.head = head.drop_membership("it belongs to a store, which has the rows")
        self.seen: tuple[int, object] = (head.version, self.signature())

    @property
    def exact(self) -> bool:
        """Whether the state is the same, bit for bit, however it was reached: it then has a digest."""
        return self.head.statistics is not None and self.head.statistics.exact

    @property
    def empty(self) -> bool:
        """Whether it holds nothing."""
        return self.head.n == 0

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held by the store while the head is between two states: whoever reads it meanwhile waits."""
        return self.head.locked()

    def holds(self, digest: str | None, samples: int) -> bool:
        """Whether the state is the one that was recorded, as far as it can tell."""
        return self.digest() == digest if self.exact else self.head.n == samples

    def config(self) -> dict[str, Any]:
        """What is needed to make an empty one."""
        return {"type": "LSSVMHead"} | self.head.config()

    def set_options(self, config: dict[str, Any]) -> None:
        """Take over those options of another head's :meth:`config` that may change."""
        mine, given = self.config(), arguments({k: v for k, v in config.items() if k != "type"})
        for name in SETTABLE:
            if mine[name] != config[name]:
                setattr(self.head, name, given[name])

    def chosen(self) -> dict[str, Any] | None:
        """What was chosen from data, with the calibration, as primitives; None if nothing was."""
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
        """How its features are written at the moment."""
        head = self.head
        return Codec(head.in_features, head.num_classes, head.grid, head.target_grid if head.grid is not None else None)

    def digest(self) -> str | None:
        """The digest, if there is one."""
        return self.head.digest() if self.exact else None

    def signature(self) -> object:
        """Changes whenever samples do."""
        return self.digest() if self.exact else (self.head.n, self.head.counts.tolist())

    def note(self) -> None:
        """Take the present state for the right one."""
        self.seen = (self.head.version, self.signature())

    @property
    def touched(self) -> bool:
        """Whether somebody else changed it since :meth:`note`."""
        return self.head.version != self.seen[0] and self.signature() != self.seen[1]

    def _ids(self, ids: Sequence[str]) -> Sequence[str] | None:
        folds = self.head.statistics is not None and self.head.statistics.folds
        return ids if folds else None

    def _here(self, values: Tensor) -> Tensor:
        return values.to(self.head.device)

    def add(self, ids: Sequence[str], x: Tensor, y: Tensor) -> None:
        """Learn samples."""
        self.head.add(self._here(x), self._here(y), ids=self._ids(ids))

    def add_rows(self, rows: Rows, codec: Codec) -> None:
        """Learn samples of the store again, on the grid they are on."""
        stats = self.head.statistics
        try:
            if stats is not None and stats.empty and len(rows):
                stats.decide("labels" if rows.y.ndim == 1 else "values", codec.grid, codec.target_grid)
            self.add(rows.ids, rows.x, rows.y)
        except ValueError as error:  # no row that the head would refuse was ever written
            raise StoreError(f"the store is damaged: rows {rows.seq[0]} to {rows.seq[-1]}: {error}") from error

    def remove(self, rows: Rows) -> None:
        """Unlearn samples of the store."""
        with self.head.vouched():
            self.head.remove(self._here(rows.x), self._here(rows.y), ids=self._ids(rows.ids))

    def relabel(self, rows: Rows, y: Tensor) -> None:
        """Give samples of the store new targets."""
        with self.head.vouched():
            self.head.relabel(self._here(rows.x), self._here(rows.y), self._here(y), ids=self._ids(rows.ids))

    def replace(self, rows: Rows, x: Tensor, y: Tensor) -> None:
        """Exchange the features and targets of samples of the store."""
        ids = self._ids(rows.ids)
        old = (self._here(rows.x), self._here(rows.y))
        with self.head.vouched():
            self.head.replace(*old, self._here(x), self._here(y), ids_old=ids, ids_new=ids)

    def clear(self) -> None:
        """Forget everything."""
        self.head.adopt(None)

    def state(self) -> dict[str, Tensor]:
        """The statistics, for a snapshot."""
        assert self.head.statistics is not None
        return {k: v.cpu() for k, v in self.head.statistics.state().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Undo :meth:`state`; ValueError when it does not fit."""
        self.head.adopt({k: v if k == "meta" else self._here(v) for k, v in state.items()})

    def copy(self) -> Linear:
        """An independent one in the same state."""
        return Linear(copy.deepcopy(self.head))


class ByIds:
    """A kernel machine: ``add(x, y)`` returns ids, ``remove(ids)`` and ``relabel(ids, y)`` take them."""

    exact = False

    def __init__(self, head: Any):
        self.head = head
        self.where: dict[str, int] = {}  # id in the store -> id in the machine
        self.note()

    @property
    def empty(self) -> bool:
        """Whether it holds nothing."""
        return len(self.head.ids) == 0

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """A kernel machine has none."""
        return nullcontext()

    def holds(self, digest: str | None, samples: int) -> bool:
        """Whether it holds as many samples as were recorded."""
        return len(self.head.ids) == len(self.where) == samples

    def set_options(self, config: dict[str, Any]) -> None:
        """Nothing of it can change."""

    def config(self) -> dict[str, Any]:
        """What must agree when the store is opened with another machine."""
        return {"type": type(self.head).__name__, "num_classes": getattr(self.head, "num_classes", 2)}

    def chosen(self) -> None:
        """Nothing is kept."""

    def restore_chosen(self, chosen: Any) -> None:
        """Nothing was kept."""

    def codec(self) -> Codec:
        """Features are kept as they are; their number comes with the first ones."""
        return Codec(0, getattr(self.head, "num_classes", 2))

    def digest(self) -> None:
        """A kernel machine has none."""

    def signature(self) -> object:
        """Changes whenever samples do."""
        return tuple(self.head.ids.tolist())

    def note(self) -> None:
        """Take the present state for the right one."""
        self.seen = self.signature()

    @property
    def touched(self) -> bool:
        """Whether somebody else changed it since :meth:`note`."""
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
        """Learn samples."""
        self.where.update(zip(ids, self.head.add(x, y).tolist(), strict=True))

    def add_rows(self, rows: Rows, codec: Codec) -> None:
        """Learn samples of the store again."""
        del codec
        self.add(rows.ids, rows.x, rows.y)

    def remove(self, rows: Rows) -> None:
        """Unlearn samples of the store."""
        self.head.remove(self._machine_ids(rows.ids))
        for sample in rows.ids:
            self.where.pop(sample, None)

    def relabel(self, rows: Rows, y: Tensor) -> None:
        """Give samples of the store new targets."""
        self.head.relabel(self._machine_ids(rows.ids), y)

    def replace(self, rows: Rows, x: Tensor, y: Tensor) -> None:
        """Exchange the features and targets of samples of the store."""
        old = self._machine_ids(rows.ids)
        self.add(rows.ids, x, y)  # first: if the new ones are refused, nothing has changed
        self.head.remove(old)

    def clear(self) -> None:
        """Forget everything."""
        if not self.empty:
            self.head.remove(self.head.ids.clone())
        self.where.clear()

    def copy(self) -> ByIds:
        """An independent one in the same state."""
        return copy.deepcopy(self)


def machine_for(head: Any) -> Linear | ByIds:
    """The adapter of a head; StoreError when there is none."""
    if isinstance(head, LSSVMHead):
        return Linear(head)
    if all(callable(getattr(head, name, None)) for name in ("add", "remove", "relabel")) and hasattr(head, "ids"):
        return ByIds(head)
    raise StoreError(
        f"a store drives an LSSVMHead, or a machine with ids, add, remove and relabel; got {type(head).__name__}"
    )
