"""What the Lightning tests share: small data with ids, a quiet Trainer, and the truth without one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.lightning import Indexed, LSSVMModule, ResumableLoader

J, K, LIMIT = 6, 3, 16.0


def samples(n: int = 67, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % K
    x = torch.randn(n, J, generator=random)
    x[:, :K] += 2 * torch.nn.functional.one_hot(y, K)
    return x, y


def indexed(n: int = 67, seed: int = 0, subjects: Any = None) -> Dataset[Any]:
    return Indexed(TensorDataset(*samples(n, seed)), subjects=subjects)


def loader(n: int = 67, batch_size: int = 8, **options: Any) -> ResumableLoader:
    return ResumableLoader(indexed(n), batch_size, **options)


def module(**options: Any) -> LSSVMModule:
    return LSSVMModule("identity", K, in_features=J, **({"grid": LIMIT} | options))


def truth(x: Tensor, y: Tensor, **options: Any) -> LSSVMHead:
    return LSSVMHead(J, K, grid=FixedPoint(LIMIT), **({"rho": "gcv"} | options)).add(x, y)


def quiet(folder: Any, **options: Any) -> Trainer:
    plain = {
        "max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "accelerator": "cpu", "devices": 1, "default_root_dir": str(folder),
    }  # fmt: skip
    return Trainer(**(plain | options))


class Stop(Callback):
    """A run that is interrupted after so many batches."""

    def __init__(self, after: int, epoch: int = 0):
        self.after, self.epoch = after, epoch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if args[2] + 1 == self.after and trainer.current_epoch == self.epoch:
            raise KeyboardInterrupt


def interrupted(trainer: Any, *args: Any, **options: Any) -> None:
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        trainer.fit(*args, **options)


class Network(LightningModule):
    """Trained by gradients; the head beside it is fitted by callbacks."""

    def __init__(self, head: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(J, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.fc = nn.Linear(8, K)
        self.head = head if head is not None else LSSVMHead(8, K, grid=FixedPoint(64.0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.fc(self.backbone(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.backbone(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Recorder:
    """A logger's ear: what was logged, in its order."""

    def __init__(self) -> None:
        from lightning.pytorch.loggers import Logger

        class Ear(Logger):
            said: list[dict[str, float]]

            @property
            def name(self) -> str:
                return "ear"

            @property
            def version(self) -> str:
                return "0"

            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
                self.said.append(dict(metrics))

            def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
                pass

        self.logger = Ear()
        self.logger.said = []

    @property
    def names(self) -> set[str]:
        return set(itertools.chain.from_iterable(self.logger.said))
