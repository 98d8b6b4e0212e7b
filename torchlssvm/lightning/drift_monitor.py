"""``DriftMonitor``: logs how far the weights in use are from those solved from statistics."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from torchlssvm.lightning.finding import find_head, log_metrics, moment


class DriftMonitor(Callback):
    """Logs ``head.drift()`` every so many batches, and solves the weights anew past a threshold.

    Args:
        every: training batches between two looks. A look costs one solve.
        threshold: refresh past it.
        head: where the head is in the LightningModule.

    >>> DriftMonitor(every=50, threshold=1e-9).state_key
    'DriftMonitor(head=head)'
    """

    def __init__(self, every: int = 100, threshold: float = 1e-10, head: str = "head"):
        self.every, self.threshold, self.head = moment(every, "every"), float(threshold), head
        self.last: float | None = None
        self.refreshes = 0

    @property
    def state_key(self) -> str:
        """One for each head."""
        return f"DriftMonitor(head={self.head})"

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Look, when it is time."""
        batch_idx = args[2]
        if (batch_idx + 1) % self.every == 0:
            self.look(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look once more."""
        self.look(trainer, pl_module)

    def look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure, log, and refresh if need be. Each rank looks at its own head."""
        head = find_head(pl_module, self.head)
        if not callable(getattr(head, "drift", None)) or not holds_something(head):
            return
        self.last = float(head.drift())
        if self.last > self.threshold:
            head.refresh()
            self.refreshes += 1
        log_metrics(trainer, {"drift": self.last, "refreshes": float(self.refreshes)})

    def state_dict(self) -> dict[str, Any]:
        """The last drift and the number of refreshes."""
        return {"last": self.last, "refreshes": self.refreshes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo it."""
        self.last, self.refreshes = state_dict["last"], state_dict["refreshes"]


def holds_something(head: Any) -> bool:
    """Whether there is anything to look at."""
    return bool(head.n if hasattr(head, "n") else len(head.ids))
