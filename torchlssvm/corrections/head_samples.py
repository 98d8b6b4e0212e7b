"""The samples of a head or a kernel machine without a store, identified by their ids. Each event is applied once.

Without a store, events have to carry their samples again, exactly as they were added. To check this, a hash of each sample is
kept: the sample removed under an id must equal, bit for bit, the sample added under that id. Save ``state_dict`` in the same
checkpoint as the head, so that both are restored together.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.errors import RemovalError
from torchlssvm.events import Add, Event, Relabel, Remove
from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes
from torchlssvm.functional.sample_identity import HASH_BYTES, row_keys
from torchlssvm.sample_adapter import SampleAdapter
from torchlssvm.store.transaction import EventResult, NetChange

__all__ = ["HeadSamples", "hash_samples"]


class HeadSamples:
    """Takes the place of the store in a :class:`~torchlssvm.corrections.corrector.Corrector` for a head without a store.

    The id of a sample that you added directly to a kernel machine is the id that the machine returned, as text.
    """

    def __init__(self, head: Any):
        self.head, self.machine = head, SampleAdapter(head)
        self.applied: dict[str, None] = {}
        self.hashes: dict[str, bytes] = {}
        """The hash of each sample that is held under an id."""
        self.complete = self.machine.count == 0
        """True if all samples of the head were added here, with ids: an unknown id is then an error."""

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self.hashes or (self.machine.by_ids and self.machine.find(sample_id) is not None)

    def find(self, subject: str) -> list[str]:
        """Return an empty list, because the subjects of samples are not known without a store."""
        return []

    def has_applied(self, event_id: str) -> bool:
        """True if an event with this id was applied before."""
        return event_id in self.applied

    def is_unnamed(self, event: Event) -> bool:
        """True if samples were added without ids. Only the head can then tell whether it holds the samples of an event."""
        if self.complete or self.machine.by_ids or isinstance(event, Add) or event.ids is None:
            return False
        return not any(i in self.hashes for i in event.ids)

    def apply(self, events: Sequence[Event], notes: Any = None, keep_receipt: bool = False) -> list[EventResult]:
        """Apply events as one change, all or nothing. A kernel machine takes one event. Notes are not supported."""
        held: dict[str, bytes | None] = {}  # the hashes that change
        new: dict[str, Event] = {}
        results = []
        for event in events:
            is_new = event.event_id not in self.applied and event.event_id not in new
            if is_new:
                held.update(self._hashes_after(event, held))
                new[event.event_id] = event
            results.append(EventResult(event.event_id, event.kind, 0, is_new, len(event.ids) if is_new else 0, None))
        was_empty = self.machine.count == 0
        try:
            self._change([*new.values()])
        except Exception:
            if was_empty:
                self.machine.clear()
            raise
        self.applied.update(dict.fromkeys(new))
        self.hashes.update({name: value for name, value in held.items() if value is not None})
        for name in [name for name, value in held.items() if value is None]:
            self.hashes.pop(name, None)
        return results

    def preview(self, events: Sequence[Event]) -> None:
        """Try events on a copy of the head."""
        copy.deepcopy(self).apply(events)

    def check(self, event: Event) -> list[bytes] | None:
        """Check that an event carries the samples it changes, which a head without a store needs; return their hashes."""
        if event.ids is None:
            raise ValueError("there is no store here that knows subjects: give ids and the samples as they were added")
        if self.machine.by_ids:
            return None
        for name in ("x", "x_old"):
            x = getattr(event, name, None)
            if x is not None and x.shape[1] != self.head.in_features:
                raise ValueError(f"{name} must have shape (B, {self.head.in_features}), got {tuple(x.shape)}")
        if isinstance(event, Add):
            return None
        x, y = (getattr(event, name) for name in event.old_fields)
        if x is None or y is None:
            raise ValueError(
                f"there is no store here: a {type(event).__name__} must carry the samples as they were added "
                f"({', '.join(event.old_fields)})"
            )
        return hash_samples(x, y)

    def _hashes_after(self, event: Event, changed: dict[str, bytes | None]) -> dict[str, bytes | None]:
        """The hash of each sample after the event (None: removed). Raises an error if the event cannot be applied."""
        old = self.check(event)
        for k, name in enumerate(event.ids):
            held = changed[name] if name in changed else self.hashes.get(name)
            if isinstance(event, Add):
                if held is not None:
                    raise ValueError(f"there is already a sample with the id {name!r}: remove or replace it")
                continue
            unknown = self.machine.find(name) is None if self.machine.by_ids else self.complete
            if held is None and (unknown or name in changed):
                raise RemovalError(f"no sample with the id {name!r} is held. Nothing was changed.")
            if held is not None and old is not None and held != old[k]:
                raise RemovalError(f"the sample carried for {name!r} is not, bit for bit, the one that was added")
        if isinstance(event, Remove):
            return dict.fromkeys(event.ids)
        x = torch.zeros(len(event.ids), 0) if event.x is None else event.x
        if event.new_y is None:
            raise ValueError("a Replace without a store needs y, or y_old")
        return dict(zip(event.ids, hash_samples(x, event.new_y), strict=True))

    def _change(self, events: Sequence[Event]) -> None:
        """Apply events to the head: all at once to a linear head, a single event to a kernel machine."""
        change, empty = NetChange(), self.machine.count == 0
        removes = not self.machine.by_ids and not all(isinstance(event, Add) for event in events)
        if removes and not empty:
            _ = self.head.bias  # earlier removals are judged before, these at once
        for event in events:
            if self.machine.by_ids:
                if isinstance(event, Relabel):
                    self.machine.relabel(event.ids, event.y)
                else:
                    new = None if isinstance(event, Remove) else (event.ids, event.x, event.new_y)
                    self.machine.exchange(new, None if isinstance(event, Add) else (event.ids,))
                return
            if isinstance(event, Add):
                change.add(event.ids, event.x, event.new_y)
                if empty:  # the first samples determine an automatic grid
                    change.apply(self.machine, self.head.device)
                    change, empty = NetChange(), self.machine.count == 0
            elif isinstance(event, Remove):
                change.remove(event.ids, event.x, event.new_y)
            else:
                x, y = (getattr(event, name) for name in event.old_fields)
                change.exchange(event.ids, x, y, event.x, event.new_y)
        change.apply(self.machine, None if self.machine.by_ids else self.head.device)
        if removes:
            _ = self.head.bias

    def state_dict(self) -> dict[str, Any]:
        """Applied events and held samples, as primitives and tensors."""
        return {
            "applied": list(self.applied),
            "ids": list(self.hashes),
            "hashes": bytes_to_tensor(b"".join(self.hashes.values())) if self.hashes else None,
            "complete": self.complete,
            "machine_ids": [list(self.machine.ids), list(self.machine.ids.values())],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`. The head itself must be loaded separately."""
        packed = b"" if state["hashes"] is None else tensor_to_bytes(state["hashes"])
        parts = (packed[k : k + HASH_BYTES] for k in range(0, len(packed), HASH_BYTES))
        self.applied = dict.fromkeys(state["applied"])
        self.hashes = dict(zip(state["ids"], parts, strict=True))
        self.complete = state["complete"]
        self.machine.ids = dict(zip(*state["machine_ids"], strict=True))


def hash_samples(x: Tensor, y: Tensor) -> list[bytes]:
    """Hash each sample to 16 bytes. Equal numbers have equal hashes, regardless of their dtype."""
    return row_keys(as_float64(x), as_float64(y))


def as_float64(t: Tensor) -> Any:
    """Convert to a contiguous NumPy array (B, ...), which is cheaper than a tensor for few numbers.

    bfloat16 is converted through float32.
    """
    t = t.detach().cpu()
    values = (t.float() if t.dtype == torch.bfloat16 else t).numpy()
    return np.ascontiguousarray(values, np.float64).reshape(len(t), -1) if t.numel() else np.zeros((len(t), 0))
