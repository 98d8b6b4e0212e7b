"""``FitHead``: fits the head of any LightningModule in closed form, at chosen moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.lightning import ranks
from torchlssvm.lightning.head_lookup import check_interval, find_features, find_head, frozen, log_metrics
from torchlssvm.linear import LinearHead, LSSVMHead
from torchlssvm.linear.labelled_batches import unpack
from torchlssvm.sample_adapter import SampleAdapter


class FitHead(Callback):
    """Clear a head and fit it on the features of a whole loader, in eval mode and without gradients.

    The features change while the network is being trained, so each fit starts from an empty head. Each rank fits its share of
    the samples.

    Args:
        when: when to fit: ``"fit_start"``, ``"validation"`` (before each validation), ``"epoch_end"`` or ``"train_end"``.
        every: how often to fit, in epochs.
        head: dotted path of the head in the LightningModule.
        features: a function, or the name of a method or sub-module, that computes features (B, J) from inputs. Default: the
            classifier that ``attach`` made, or ``backbone``.
        loader: the loader to fit on. Default: the train loader. Do not use random augmentation.

    >>> FitHead(when="validation").fits
    0
    """

    def __init__(
        self,
        when: str = "train_end",
        every: int = 1,
        head: str = "head",
        features: str | Callable[[Any], Tensor] | None = None,
        loader: Any = None,
    ):
        self.when = checks.one_of(when, "when", ("fit_start", "validation", "epoch_end", "train_end"))
        self.every = check_interval(every, "every")
        self.head, self.features, self.loader = head, features, loader
        self.fits = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit, if this is the moment. Raises StoreError for the head of a store, which has its own samples."""
        head = find_head(pl_module, self.head)
        if isinstance(head, LinearHead):
            head._refuse_in_store("learn the samples itself, by store.apply(Add(...)) or LSSVMModule(store=...)")
        if self.when == "fit_start":
            self.fit(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit, if this is the moment; not for the sanity check."""
        if self.when == "validation" and not trainer.sanity_checking and trainer.current_epoch % self.every == 0:
            self.fit(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit, if this is the moment."""
        if self.when == "epoch_end" and (trainer.current_epoch + 1) % self.every == 0:
            self.fit(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit, if this is the moment."""
        if self.when == "train_end":
            self.fit(trainer, pl_module)

    def fit(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Empty the head and fit it on the loader."""
        loader = self.loader if self.loader is not None else trainer.train_dataloader
        if loader is None:
            raise ValueError("FitHead needs a loader: there is no train loader in this run, give loader=")
        head, features = find_head(pl_module, self.head), find_features(pl_module, self.features)
        samples = SampleAdapter(head)
        samples.clear()
        with frozen(pl_module):
            for batch_idx, raw in enumerate(loader):
                batch = unpack(pl_module.transfer_batch_to_device(raw, pl_module.device, 0))
                keep = ranks.without_padding(loader, batch_idx, len(batch.y))
                phi = features(batch.x[:keep])
                phi = phi.flatten(1) if phi.ndim > 2 else phi
                self._add(head, phi.detach(), batch.y[:keep])
        ranks.add_up(head)
        if isinstance(head, LSSVMHead) and samples.count:
            head.refresh()
        self.fits += 1
        log_metrics(trainer, {"head_samples": float(samples.count)})

    def _add(self, head: Any, phi: Tensor, y: Tensor) -> None:
        if ranks.is_summed(head):
            ranks.agree_on_grid(head, phi, y)
            head.add(phi, y)
            return
        for x, labels in ranks.gather((phi.cpu(), y.cpu())) if ranks.are_several() else [(phi, y)]:
            head.add(x.to(phi.device), labels.to(phi.device))
