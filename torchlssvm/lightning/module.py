"""``LSSVMModule``: a head on a frozen network that a Trainer fits in one pass, without an optimizer."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from torchlssvm.backbones import build
from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks
from torchlssvm.functional.grid import FixedPoint, grid_to_text
from torchlssvm.functional.several_targets import f1_score, r2_score
from torchlssvm.lightning import ranks
from torchlssvm.lightning.checkpoint_registry import register_with
from torchlssvm.lightning.learner import Learner
from torchlssvm.linear import LinearHead, LSSVMHead
from torchlssvm.linear.attach import AttachedClassifier, attach
from torchlssvm.linear.labelled_batches import TrainingBatch, check_names, first_samples, unpack, unpack_inputs
from torchlssvm.linear.linear_head import targets_of
from torchlssvm.sample_adapter import SampleAdapter
from torchlssvm.wording import counted


class Anchor(nn.Module):
    """A parameter without meaning, which is never saved.

    It is needed because ``DistributedDataParallel`` refuses a module in which no parameter requires a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(()))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save nothing, because the parameter has no meaning."""

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load nothing, because checkpoints do not contain the parameter."""


class LSSVMModule(LightningModule):
    """A least-squares SVM head on a frozen network. ``training_step`` adds samples, and one epoch is the whole training.

    A batch is (x, y), (x, y, ids), (x, y, ids, subjects) or a dict with these names. :class:`~torchlssvm.lightning.Indexed`
    provides ids by using the index of a sample. A sample with an id is counted once, in training and in validation, even if it
    arrives again in a second epoch, as padding of a distributed sampler, or in a resumed run. With a store, it must then have
    the same features and label; otherwise a ValueError is raised. Samples without ids are learned in the first epoch only.

    **Store.** With ``store``, every sample is written to a :class:`~torchlssvm.store.SampleStore`, and the head always matches
    the store. Loading an older checkpoint therefore does not bring back an erased sample. Checkpoints are registered with the
    store, so that certificates of erasure list the older ones. After an erasure and a compaction, nothing shows which samples
    were erased. A run that began earlier can then no longer be resumed, and a new run prints a warning. A suppression list
    keeps samples that were erased on request out of every run.

    **Ranks.** With several ranks, each rank learns its share of the samples. The shares are added up before the head is read,
    validated or saved. Every rank must therefore call ``trainer.save_checkpoint``, as Lightning requires.

    **Metrics.** The module logs ``val_accuracy``, ``val_loss`` (the mean squared error against targets -1 and +1, or the error
    rate with one-vs-one), ``val_recall`` (the mean over the classes that occur) and, with at most 50 classes, ``val_recall_0``
    and so on. With ``targets="multilabel"``, it logs ``val_f1`` (micro), ``val_f1_macro`` and ``val_loss``; with
    ``"regression"``, ``val_r2`` and ``val_loss``. In a test, the names begin with ``test_``. With several loaders, each name
    ends in ``/dataloader_idx_0`` and so on. At the end of a training epoch, it logs ``rho`` and the number of samples ``n``.

    Args:
        backbone: the name of a classifier of torchvision (``"mobilenet_v2"``) or timm (``"timm/resnet18"``), ``"identity"`` if
            the data are features, or an ``nn.Module`` (see :func:`torchlssvm.attach`).
        num_classes: K, the number of classes, or the number of labels or values per sample.
        classes: names of the classes, in label order, for the store and for :class:`~torchlssvm.lightning.PredictionFile`.
        targets: ``"classes"``, ``"multilabel"`` (batches with y (B, K) of 0 and 1) or ``"regression"`` (y (B, K) or (B,)), as
            for :class:`~torchlssvm.LSSVMHead`.
        weights: the weights of a backbone that is given by name: a member of torchvision's enum (``"DEFAULT"``),
            ``"pretrained"`` (timm), a file, ``"auto"`` (the best weights available), or ``"random"``.
        in_features: the width of the features, for ``"identity"`` and for a network that ends in features.
        layers, pool, max_features: the layers that the head learns from (``"last"``, ``"blocks"``, ``"all"`` or names), and how
            they are pooled, as for :func:`torchlssvm.attach`.
        views: names of fixed transforms, e.g. ``["flip"]``. Features are averaged over a sample and its transforms.
        feature_map: a module between network and head, with ``out_features``, e.g. ``torchlssvm.features.RandomReLU``.
        head: ``"lssvm"`` or None for an :class:`~torchlssvm.LSSVMHead`, ``"margin"`` for a :class:`~torchlssvm.MarginHead`, or
            a head or kernel machine, for which ``rho``, ``grid`` and ``head_options`` are not used.
        rho: the regularization of the head: a number, ``"gcv"``, or ``"kfold"`` (on the ``folds`` of the head, or on the
            samples of a ``MarginHead``). ``"gcv"`` and ``"kfold"`` choose rho before each validation of a fit and at the end of
            each epoch. Default: that of the head.
        grid: a :class:`~torchlssvm.FixedPoint`, its limit, its limit and bits as text (``"8:20"``), ``"auto"`` or None.
        head_options: other options of :class:`~torchlssvm.LSSVMHead` or :class:`~torchlssvm.MarginHead`, e.g.
            ``{"class_weight": "balanced"}``.
        batch_names: the keys of batches that are dicts, e.g. ``{"x": "photo", "y": "species"}``. The keys ``image`` and
            ``label`` need no entry.
        store: folder of a store.
        suppression_list: file that prevents samples erased on request from being added again, as for
            :class:`~torchlssvm.store.SampleStore`.
        suppression_key: the key of the suppression list, which is never saved. Default: the environment variable
            ``TORCHLSSVM_SUPPRESSION_KEY``.
        erased: what to do with samples that were erased on request: ``"skip"`` them and print their number at the end (the
            default, because the data set may still contain them), or ``"refuse"`` the batch.

    Example:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from lightning.pytorch import Trainer
        >>> x, y = torch.randn(64, 8), torch.arange(64) % 2
        >>> x[:, 0] += 4 * y
        >>> module = LSSVMModule("identity", 2, in_features=8)
        >>> trainer = Trainer(
        ...     max_epochs=1,
        ...     logger=False,
        ...     enable_checkpointing=False,
        ...     enable_progress_bar=False,
        ...     enable_model_summary=False,
        ...     accelerator="cpu",
        ... )
        >>> trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=16))
        >>> module.head.n, bool((module.head.predict(x) == y).float().mean() > 0.9)
        (64, True)
    """

    def __init__(
        self,
        backbone: str | nn.Module,
        num_classes: int,
        *,
        classes: list[str] | None = None,
        targets: str = "classes",
        weights: str | None = None,
        in_features: int | None = None,
        layers: str | list[str] = "last",
        pool: str | list[str] | None = None,
        max_features: int | None = 4096,
        views: list[str] | None = None,
        feature_map: nn.Module | None = None,
        head: nn.Module | str | None = None,
        rho: float | str | None = None,
        grid: FixedPoint | float | str | None = "auto",
        head_options: dict[str, Any] | None = None,
        batch_names: dict[str, str] | None = None,
        store: str | None = None,
        suppression_list: str | None = None,
        suppression_key: str | None = None,
        erased: str = "skip",
    ):
        super().__init__()
        modules = {"backbone": backbone, "feature_map": feature_map, "head": head}
        unsaved = [name for name, value in modules.items() if isinstance(value, nn.Module)]
        self.save_hyperparameters(ignore=[*unsaved, "suppression_key"])
        if isinstance(grid, FixedPoint):  # a checkpoint holds primitives
            self.hparams["grid"] = grid_to_text(grid)
        self._suppression_key = suppression_key
        options: dict[str, Any] = {}
        if not isinstance(head, nn.Module):
            options = {"grid": grid} | ({} if targets == "classes" else {"targets": targets}) | (head_options or {})
            if rho == "kfold":  # chosen by select_rho later
                options["rho"] = 1.0
            elif rho is not None or head != "margin":
                options["rho"] = rho or "gcv"
        options |= {"layers": layers, "pool": pool, "max_features": max_features, "views": views or ()}
        options |= {"in_features": in_features, "feature_map": feature_map, "classes": classes}
        self.classifier = classifier(backbone, num_classes, weights, head, options)
        self.ddp = Anchor()
        # DDP must not copy buffers between ranks. Gradients change nothing here, and the ranks add up what they learn.
        names = [f"classifier.{name}" for name, _ in self.classifier.named_buffers()]
        self._ddp_params_and_buffers_to_ignore = names
        self.learner = Learner(self.classifier.head)
        self.judged: dict[int, list[tuple[Any, ...]]] = {}
        """Results of this validation or test on this rank, by loader: ids or None, predicted classes, labels, losses (B,)."""
        check_names(batch_names)
        self._run: str | None = None  # the run of a checkpoint that was loaded, then of this fit
        self._warned: set[str] = set()
        self._begun = self._resumed = False
        self._filled = False  # whether the head held samples when a new run began
        self.unanswered = 0
        """The number of events whose samples had not arrived when the last fit ended."""
        self._rho_version = -1  # the version of the head for which rho was chosen

    @property
    def head(self) -> Any:
        """The head, or kernel machine."""
        return self.classifier.head

    @property
    def store(self) -> Any:
        """The open store, on the first rank of a run with a store."""
        return self.learner.store

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores (B, K)."""
        return self.classifier(x)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> None:
        """There is nothing to optimize."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """There is nothing to differentiate."""

    # -- learning ------------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Add the new samples of a batch. Returns 0, since there is no loss."""
        loss, loader = torch.zeros((), device=self.device), self.trainer.train_dataloader
        if self._resumed and not self._begun and batch_idx and not hasattr(loader, "load_state_dict"):
            raise ValueError(
                "the run is resumed in the middle of an epoch, but its train loader starts again from the first batch: use "
                "torchlssvm.lightning.ResumableLoader with shuffle and seed, or another loader with load_state_dict"
            )
        self._begun = True
        part = self._real(batch, loader, batch_idx)
        if part.ids is None and self.current_epoch > 0:
            self._warn_once(
                "no ids",
                "samples without ids are counted in the first epoch only: this epoch changes nothing. Use max_epochs=1, "
                "or give ids, e.g. with torchlssvm.lightning.Indexed",
            )  # fmt: skip
            return loss
        if part.ids is None and self._filled:
            self._filled = False
            rank_zero_warn(
                "the head holds samples from before this fit, and these come without ids: if they are the same ones, they are "
                "counted twice. Fit a new module, resume with ckpt_path, or give ids, e.g. with torchlssvm.lightning.Indexed, "
                "then none is counted twice"
            )
        skipped = self.learner.learn(self.classifier.features(part.x), part.y, part.ids, part.subjects)
        if skipped:
            self._warn_once(
                "seen",
                f"not counted twice: {counted(skipped, 'sample')} of this batch, with ids that were offered before",
            )
        return loss

    def _warn_once(self, kind: str, message: str) -> None:
        """Print a message on the first rank, once of each kind."""
        if ranks.is_first() and kind not in self._warned:
            self._warned.add(kind)
            self.print(f"torchlssvm: {message}")

    def _real(self, batch: Any, loader: Any, batch_idx: int) -> TrainingBatch:
        """Unpack a batch, without the samples that a distributed sampler repeats."""
        part = unpack(batch, self.hparams["batch_names"])
        keep = ranks.without_padding(loader, batch_idx, len(part.y))
        return first_samples(part, keep)

    def _synchronize(self) -> None:
        """Bring all ranks to the same state."""
        if not self.trainer.sanity_checking:
            self.learner.synchronize()

    def bring_up_to_date(self) -> None:
        """Add up the shares of the ranks, and choose rho if a rule is set. Does nothing if nothing has changed since."""
        self._synchronize()
        head = self.head
        if self.hparams["rho"] == "kfold":
            if not self.learner.empty and self._rho_version != head._state_version:
                head.select_rho(method="kfold")
                self._rho_version = head._state_version
        elif isinstance(head, LSSVMHead):
            if self.learner.store is not None:
                self.learner.store.refresh()
            if self.learner.path is not None:
                self._synchronize()
            else:
                head._refresh_rho()

    def on_train_epoch_end(self) -> None:
        """Finish the epoch: apply the events that waited for its end, add up the shares of the ranks, and choose rho."""
        if self.trainer.is_last_batch:
            self.learner.end_pass()
        self.bring_up_to_date()
        held = SampleAdapter(self.head).count
        self.log("n", float(held), sync_dist=True)
        if isinstance(self.head, LinearHead) and held:
            self.log("rho", float(self.head.rho), sync_dist=True)

    def on_train_end(self) -> None:
        """Print the events whose samples did not arrive."""
        waiting = self.learner.unanswered(over=self.trainer.is_last_batch)
        self.unanswered = len(waiting)
        corrector = self.learner.corrector
        if corrector.suppressed:
            self.print(f"torchlssvm: {counted(len(corrector.suppressed), 'sample')} left out, erased on request")
        if corrector.unusable:
            self.print(
                f"torchlssvm: {counted(len(corrector.unusable), 'sample')} left out, to be removed: they cannot be learned"
            )
        if waiting:
            self.print(unanswered_text(waiting, self.hparams["store"]))

    # -- judging -------------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Bring all ranks to the same head. In a fit, also choose rho, because validation runs before the end of the epoch."""
        if self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            self.bring_up_to_date()
        else:
            self._synchronize()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluate a batch. Does nothing if the head has no samples."""
        loaders = self.trainer.test_dataloaders if self.trainer.testing else self.trainer.val_dataloaders
        part = self._real(batch, ranks.loader_at(loaders, dataloader_idx), batch_idx)
        if self.learner.empty or not len(part.y):
            return
        scores, targets = self(part.x), targets_of(self.head)
        predicted = {"classes": scores.argmax(1), "multilabel": scores > 0, "regression": scores}[targets]
        y = checks.truth(part.y, predicted, targets)
        if getattr(self.head, "multiclass", "ovr") == "ovo":
            loss = (predicted != y).double()
        else:
            wanted = nn.functional.one_hot(y.long(), scores.shape[1]) if targets == "classes" else y
            loss = (scores - (wanted if targets == "regression" else 2.0 * wanted - 1.0)).square().mean(1)
        self.judged.setdefault(dataloader_idx, []).append((part.ids, predicted, y, loss))

    test_step = validation_step

    def on_test_epoch_start(self) -> None:
        """Bring all ranks to the same head. Raises NotFittedError if it is empty, which Lightning would not report."""
        self._synchronize()
        if self.learner.empty:
            raise NotFittedError(
                "there is nothing to test: the head holds no samples. Fit the module first, or give the checkpoint of a run "
                "(ckpt_path) or its store"
            )

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of each loader over the samples of all ranks. A sample with an id counts once."""
        mine, self.judged = self.judged, {}
        stage = "test" if self.trainer.testing else "val"
        if self.trainer.sanity_checking:
            return
        given = getattr(self.trainer, f"{stage}_dataloaders")
        loaders = len(given) if isinstance(given, list | tuple | dict) else 1
        for index in range(loaders):
            parts = [part for rank in ranks.gather(mine.get(index, [])) for part in rank]
            if not parts:
                continue
            targets = targets_of(self.head)
            found, repeated = summarize(parts, self.hparams["num_classes"], targets)
            if repeated and not ranks.are_several():
                self._warn_once(
                    "repeated", f"{counted(repeated, 'sample')} to be judged with a repeated id: each is counted once"
                )
            end = f"/dataloader_idx_{index}" if loaders > 1 else ""
            # All ranks log the same values, whose mean Lightning takes.
            for name, value in found.items():
                shown = name in ("accuracy", "f1", "r2")
                self.log(f"{stage}_{name}{end}", value, prog_bar=shown, sync_dist=True, add_dataloader_idx=False)

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Compute scores (B, K) of a batch with or without labels."""
        return self(unpack_inputs(batch, self.hparams["batch_names"]))  # type: ignore[no-any-return]

    # -- the store and checkpoints -------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Open the store, on the first rank. A trial run (``fast_dev_run``) learns in memory only.

        If ``torch.compile`` wrapped the module, its steps run uncompiled, because bookkeeping need not be traced.
        """
        compiled = getattr(self, "_compiler_ctx", None) or {}
        for step in ("training_step", "validation_step", "test_step", "predict_step"):
            if f"original_{step}" in compiled:
                setattr(self, step, compiled[f"original_{step}"])
        trial = self._trainer is not None and getattr(self.trainer, "fast_dev_run", False)
        if self.hparams["store"] is not None and not trial:
            options = {name: self.hparams[name] for name in ("suppression_list", "erased")}
            options["suppression_key"] = self._suppression_key
            self.learner.open(self.hparams["store"], self.classifier.backbone, self.classifier.classes, **options)
            if self._trainer is not None and self.store is not None:
                register_with(self.trainer, self.store)

    def teardown(self, stage: str) -> None:
        """Close the store."""
        self.learner.close()

    def on_fit_start(self) -> None:
        """Begin a run, or resume the run of a checkpoint. With a store, restore the head from the store."""
        self.learner.restore()
        self._resumed = self._resumed and self.trainer.ckpt_path is not None
        self._run = self.learner.begin(self._run if self._resumed else None)
        self._begun = False
        self._filled = not self._resumed and not self.learner.empty and self.hparams["store"] is None

    def on_validation_start(self) -> None:
        """With a store, restore the head from the store."""
        self.learner.restore()

    on_test_start = on_predict_start = on_validation_start

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what all ranks learned. The weights are solved again, so that they do not depend on the order of changes."""
        if self._trainer is not None:
            self._synchronize()
        if isinstance(self.head, LinearHead) and self.head.n:
            self.head.refresh()
        state, prefix = checkpoint["state_dict"], "classifier.head."  # it was taken before the ranks added up
        for name in [name for name in state if name.startswith(prefix)]:
            del state[name]
        state.update({prefix + name: value for name, value in self.head.state_dict().items()})
        checkpoint["torchlssvm"] = {"learner": self.learner.state_dict(), "run": self._run}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the record of the samples that were seen. The head itself is loaded with the module."""
        saved = checkpoint.get("torchlssvm")
        if saved is not None:
            self.learner.load_state_dict(saved["learner"])
            self._run, self._resumed = saved["run"], saved["run"] is not None


def unanswered_text(waiting: list[str], store: str | None) -> str:
    """Describe the events whose samples did not arrive, where they are stored, and how to drop them."""
    kept = f"the store at {store}" if store else "the checkpoints of this run"
    drop = f"torchlssvm drop {store} EVENT" if store else "a new run from a source without it"
    text = (
        f"torchlssvm: not answered, because samples have not arrived: {counted(len(waiting), 'event')}, kept in {kept} for "
        f"the next run. Drop an event that can never be answered with {drop}"
    )
    shown = waiting[:10] + ([f"and {len(waiting) - 10} more"] if len(waiting) > 10 else [])  # fits on a screen
    return "\n  ".join([text, *shown])


def summarize(
    parts: list[tuple[Any, ...]], classes: int, targets: str = "classes"
) -> tuple[dict[str, Tensor | float], int]:
    """Compute metrics of predictions, each id once, and count the predictions that were left out.

    Recall is the mean over the classes that occur among the labels.
    """
    ids = [i for names, _, y, _ in parts for i in names or [None] * len(y)]
    first = {name: k for k, name in reversed(list(enumerate(ids)))}
    kept = [k for k, name in enumerate(ids) if name is None or first[name] == k]
    device = parts[0][2].device
    predicted, y, loss = (torch.cat([part[k].to(device) for part in parts])[kept] for k in (1, 2, 3))
    found: dict[str, Tensor | float] = {"loss": loss.double().mean()}
    if targets == "multilabel":
        found |= {"f1": f1_score(y, predicted), "f1_macro": f1_score(y, predicted, "macro")}
        return found, len(ids) - len(kept)
    if targets == "regression":
        return found | {"r2": r2_score(y, predicted)}, len(ids) - len(kept)
    right = (predicted == y).double()
    found["accuracy"] = right.mean()
    recalls = {c: right[y == c].mean() for c in range(classes) if bool((y == c).any())}
    found["recall"] = torch.stack(list(recalls.values())).mean()
    each = {f"recall_{c}": value for c, value in recalls.items()} if classes <= 50 else {}  # more would flood a logger
    return found | each, len(ids) - len(kept)


def classifier(
    backbone: str | nn.Module, num_classes: int, weights: str | None, head: nn.Module | str | None, options: dict[str, Any]
) -> AttachedClassifier:  # fmt: skip
    """Attach a head to a network, which is given as a module or by name, with these options of :func:`torchlssvm.attach`."""
    if isinstance(backbone, str) and backbone == "identity":
        if options["in_features"] is None and options["feature_map"] is None:
            raise ValueError("backbone 'identity' takes data that are features: give in_features, their number")
        backbone = nn.Flatten(1)
        options["in_features"] = options["in_features"] or int(options["feature_map"].in_features)
    elif isinstance(backbone, str) and weights is None:
        raise ValueError(
            f"{backbone} needs weights: a member of torchvision's enum such as 'DEFAULT', 'pretrained' (timm), a file, 'auto', "
            "or 'random' for a network whose features mean little"
        )
    model = build(backbone, None if weights == "random" else weights) if isinstance(backbone, str) else backbone
    return attach(model, num_classes, head, **options)
