"""``OnlineProbe``: the accuracy of a head on the features of a network that is still being trained."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from torchlssvm.analysis.sliding_window import SlidingWindow
from torchlssvm.errors import GridError
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.lightning import ranks
from torchlssvm.lightning.head_lookup import check_interval
from torchlssvm.linear import LinearHead, LSSVMHead, head_class
from torchlssvm.linear.labelled_batches import check_names, unpack


class OnlineProbe(Callback):
    """A linear probe in closed form on the most recent features of a layer, without a learning rate or extra data passes.

    The features of training steps enter a sliding window, the oldest features leave it, and the head always contains exactly
    the samples in the window. At each validation, the accuracy of the head on the validation features is logged. Each rank has
    its own window, and the probe is fitted on all windows together. The window is not saved, so it fills again after a
    restart.

    Args:
        layer: the dotted name of the module whose output (B, J) is used as features.
        num_classes: K, the number of classes.
        window: the number of samples in the window of each rank.
        rho: the regularization of the head. Default: chosen before each validation, by ``"gcv"`` or, for a margin head, by
            k-fold cross-validation.
        name: the name under which the module logs the accuracy, for ``EarlyStopping(monitor="probe_accuracy", mode="max")`` or
            ``ModelCheckpoint``.
        head: the kind of probe, ``"lssvm"`` or ``"margin"``.
        batch_names: the keys of batches that are dicts. The keys ``image`` and ``label`` need no entry.

    If a batch contains several views of each sample, ((x1, x2), y) or (x1, x2, y), the probe uses only the first view. This is
    the first output of the layer in a step, or the first B rows of the output if all views pass through the layer together.

    >>> OnlineProbe("backbone", num_classes=10).name
    'probe_accuracy'
    """

    def __init__(
        self,
        layer: str,
        num_classes: int,
        window: int = 4096,
        rho: float | str | None = None,
        name: str = "probe_accuracy",
        head: str = "lssvm",
        batch_names: dict[str, str] | None = None,
    ):
        self.layer, self.num_classes, self.size = layer, num_classes, check_interval(window, "window")
        self.name, self.kind, self.batch_names = name, head_class(head), batch_names
        self.rho: Any = rho or ("gcv" if self.kind is LSSVMHead else None)
        check_names(batch_names)
        self.window: SlidingWindow | None = None
        self.probe: LinearHead | None = None  # of all ranks, made for a validation
        self.accuracy: float | None = None
        self._captured: Tensor | None = None
        self._hook: Any = None
        self._right = self._total = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch the outputs of the layer."""
        parts = dict(pl_module.named_modules())
        if self.layer not in parts or not self.layer:
            raise ValueError(
                f"{type(pl_module).__name__} has no module {self.layer!r}: layer names one, e.g. 'backbone'"
            )
        self._hook = parts[self.layer].register_forward_hook(self._capture)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching the layer."""
        self._hook.remove()

    def _capture(self, module: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and self._captured is None:
            self._captured = output.detach().flatten(1)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Add the features of this batch to the window."""
        x, y = self._real(args[1], trainer.train_dataloader, args[2])
        if x is None or not len(x):
            return
        x = x.float().clone()
        self.window = self.window or SlidingWindow(self._new_head(x), self.size)
        try:
            self.window.add(x, y)
        except GridError:  # features have outgrown the grid
            held = [*self.window, (x, y)]
            self.window = SlidingWindow(self._new_head(x), self.size)
            for part in held:
                self.window.add(*part)

    def _new_head(self, x: Tensor) -> LinearHead:
        """Make an empty head on a grid for features like x."""
        grid = FixedPoint.auto(float(x.abs().max()) or 1.0)
        return self.kind(x.shape[1], self.num_classes, rho=self.rho, grid=grid, device=x.device)

    def _real(self, batch: Any, loader: Any, batch_idx: int) -> tuple[Tensor | None, Tensor]:
        """Return features and labels of a batch, without the samples that a distributed sampler repeats."""
        x, self._captured = self._captured, None
        y = unpack(batch, self.batch_names, views=True).y
        keep = ranks.without_padding(loader, batch_idx, len(y))
        views = 0 if x is None or not len(y) else len(x) / len(y)
        return (x[:keep] if x is not None and views in (1, 2, 3, 4) else None), y[:keep]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the windows of all ranks together."""
        self._right = self._total = 0
        self._captured = self.probe = None
        if not trainer.sanity_checking:
            self.probe = self._merge_windows(pl_module.device)
        if isinstance(self.probe, LSSVMHead):
            self.probe.refresh()

    def _merge_windows(self, device: Any) -> LinearHead | None:
        """Return a head on the samples of all ranks' windows."""
        if not ranks.are_several():
            return self.window.machine if self.window else None
        mine = [(x.cpu(), y.cpu()) for x, y in self.window or []]
        parts = [part for rank in ranks.gather(mine) for part in rank]
        if not parts:
            return None
        x, y = (torch.cat(column).to(device) for column in zip(*parts, strict=True))
        return self._new_head(x).add(x, y)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Count the probe's right answers on the features of this batch."""
        loader = ranks.loader_at(trainer.val_dataloaders, args[3] if len(args) > 3 else 0)
        x, y = self._real(args[1], loader, args[2])
        if self.probe is not None and x is not None and len(x):
            self._right += int((self.probe.predict(x) == y).sum())
            self._total += len(y)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the accuracy on the validation samples of all ranks, through the module."""
        if trainer.sanity_checking:
            return
        sums = ranks.gather((self._right, self._total))
        total = sum(t for _, t in sums)
        if total:
            self.accuracy = sum(r for r, _ in sums) / total
            pl_module.log(self.name, self.accuracy, sync_dist=True)  # the same on all ranks
