"""``DriftMonitor``: logs how far the solution in use is from the exact one."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from torchlssvm.lightning.head_lookup import check_interval, find_head, log_metrics
from torchlssvm.sample_adapter import SampleAdapter


class DriftMonitor(Callback):
    """Log at regular intervals how far the current solution is from the exact one, and recompute it above a threshold.

    The callback uses ``drift()`` and ``refresh()`` of an ``LSSVMHead`` or ``KernelLSSVM``, and ``kkt_violation()`` and
    ``refresh()`` or ``polish()`` of an SVM. For ``OneVsRest`` and ``OneVsOne``, the worst of the machines counts.

    Args:
        every: how often to measure the drift, in training batches. Each measurement costs one solve.
        threshold: refresh if the drift exceeds this value.
        head: dotted path of the head in the LightningModule.

    >>> DriftMonitor(every=50, threshold=1e-9).refreshes
    0
    """

    def __init__(self, every: int = 100, threshold: float = 1e-10, head: str = "head"):
        self.every, self.threshold, self.head = check_interval(every, "every"), float(threshold), head
        self.last: float | None = None
        self.refreshes = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise ValueError if the head has no drift to measure."""
        for machine in machines_of(find_head(pl_module, self.head)):
            if method_of(machine, "drift", "kkt_violation") is None:
                raise ValueError(f"a {type(machine).__name__} has neither drift() nor kkt_violation() to monitor")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Measure the drift every ``every`` batches."""
        if (args[2] + 1) % self.every == 0:
            self.look(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the drift once more."""
        self.look(trainer, pl_module)

    def look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the drift, log it, and refresh the head if needed. Each rank measures its own head."""
        held = [part for part in machines_of(find_head(pl_module, self.head)) if SampleAdapter(part).count]
        if not held:
            return
        self.last = max(float(method_of(part, "drift", "kkt_violation")()) for part in held)
        if self.last > self.threshold:
            for part in held:
                method_of(part, "refresh", "polish")()
            self.refreshes += 1
        log_metrics(trainer, {"drift": self.last, "refreshes": float(self.refreshes)})


def machines_of(head: Any) -> list[Any]:
    """The machines whose drift is that of the head."""
    return list(getattr(head, "machines", None) or [head])


def method_of(machine: Any, *names: str) -> Any:
    """The first of some methods that a machine has; None if it has none of them."""
    return next((getattr(machine, name) for name in names if callable(getattr(machine, name, None))), None)
