"""What ``LSSVMModule`` does with features: learn them once, on one rank or many, with or without a store."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchlssvm.audit import fingerprint
from torchlssvm.corrections import Corrector
from torchlssvm.events import Add
from torchlssvm.heads import LSSVMHead
from torchlssvm.lightning import ranks
from torchlssvm.offered import Offered
from torchlssvm.store import SampleStore


class Learner:
    """A head and what is known about the samples it was offered.

    Three ways, by what the head is: a head on a grid learns each rank's own share, and :meth:`level` adds the shares up; with a
    store the first rank learns all, and the others take its sums over; anything else learns all, on every rank.
    """

    def __init__(self, head: Any):
        self.head = head
        self.corrector = Corrector(head)
        self.offered = Offered()
        self.path: str | None = None
        self.observers: list[Any] = []  # called with (ids, x, y) of what was learned here

    @property
    def store(self) -> SampleStore | None:
        """The open store."""
        return self.corrector.store

    @property
    def empty(self) -> bool:
        """Whether the head holds nothing."""
        return self.corrector.machine.empty

    # -- the store -----------------------------------------------------------------------------------------------------

    def open(self, path: str, backbone: nn.Module) -> None:
        """Open or create the store, on the first rank; the network is its source."""
        if self.path is not None:
            return
        if not isinstance(self.head, LSSVMHead) and ranks.several():
            raise ValueError("a store of a kernel machine is for one rank: its samples cannot be added up")

        def work() -> None:
            if not self.empty:  # a checkpoint was loaded before: the store knows better
                self.corrector.machine.clear()
            store = SampleStore(path, head=self.head, fingerprint=fingerprint(backbone))
            self.corrector, self.offered = Corrector(self.head, store), Offered(store)

        ranks.on_first(work)
        self.path = str(path)
        if not ranks.is_first():
            self.corrector, self.offered = Corrector(self.head), Offered()

    def restore(self) -> None:
        """The head is what the store says, on all ranks."""
        if self.path is not None:
            ranks.on_first(lambda: None if self.store is None else self.store.restore())
            self._take_over()

    def _take_over(self) -> None:
        if isinstance(self.head, LSSVMHead) and self.head.statistics is not None:
            ranks.copy_from_first(self.head)

    def close(self) -> None:
        """Close the store; the head stays as it is."""
        if self.store is not None:
            self.store.close()
        if self.path is not None:
            self.corrector, self.offered, self.path = Corrector(self.head), Offered(), None

    # -- learning ------------------------------------------------------------------------------------------------------

    def learn(self, x: Tensor, y: Tensor, ids: list[str] | None, subjects: list[str | None] | None) -> int:
        """Learn samples x (B, J), y (B,); returns how many of them were offered before."""
        if self.path is not None and ids is None:
            raise ValueError(
                "a store needs an id for each sample: batches (x, y, ids), e.g. of torchlssvm.lightning.Indexed(dataset)"
            )
        if ranks.is_summed(self.head) and self.path is None:
            ranks.agree_on_grid(self.head, x)
            return self._learn(x, y, ids, subjects)
        if not ranks.several():
            return self._learn(x, y, ids, subjects)
        parts = ranks.gather((x.cpu(), y.cpu(), ids, subjects))
        if self.path is not None and self.store is None:
            return 0
        return sum(self._learn(part[0].to(x.device), part[1].to(x.device), *part[2:]) for part in parts)

    def _learn(self, x: Tensor, y: Tensor, ids: list[str] | None, subjects: list[str | None] | None) -> int:
        if ids is None:
            if len(x):
                self.corrector.complete = False
                self.head.add(x, y)
                self._tell(None, x, y)
            return 0
        new = self.offered.new(ids)
        if new:
            keep = torch.tensor(new, device=x.device)
            names = [ids[k] for k in new]
            event = Add(
                ids=names, x=x[keep], y=y[keep], subject=None if subjects is None else [subjects[k] for k in new]
            )
            if self.store is not None:
                self.offered.record(names, event.event_id)  # first: it is taken back if the event is not applied
            outcome = self.corrector.apply([event])[0]
            if outcome.status != "applied":
                raise ValueError(f"samples cannot be added: {outcome.reason}")
            if self.store is None:
                self.offered.record(names, event.event_id)
            self._tell(names, event.x, event.y)
        return len(ids) - len(new)

    def _tell(self, ids: list[str] | None, x: Tensor, y: Tensor) -> None:
        for observer in self.observers:
            observer(ids, x.detach().cpu(), y.detach().cpu())

    def level(self) -> None:
        """All ranks hold the same: what each learned is added up, or taken over from the first one."""
        if not ranks.several():
            return
        if self.path is not None:
            self._take_over()
        elif ranks.is_summed(self.head):
            ranks.level(self.head)
            self.meet()

    def meet(self) -> None:
        """All ranks know what each of them was offered."""
        states = ranks.gather((self.corrector.held, self.corrector.complete, self.offered.hashes))
        self.corrector.held = {name: value for held, _, _ in states for name, value in held.items()}
        self.corrector.complete = all(complete for _, complete, _ in states)
        self.offered.hashes = set().union(*(hashes for _, _, hashes in states))

    # -- what goes into a checkpoint -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Primitives and tensors; with a store nothing, it is all there."""
        if self.path is not None:
            return {}
        return {"corrector": self.corrector.state_dict(), "offered": self.offered.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        if self.path is None and state:
            self.corrector.load_state_dict(state["corrector"])
            self.offered.load_state_dict(state["offered"])
