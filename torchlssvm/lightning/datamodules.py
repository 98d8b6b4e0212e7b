"""Data modules for configuration files: scikit-learn's digits, the CIFAR-10 subset and image folders. Batches have ids."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from torchlssvm.lightning.batches import Indexed, ResumableLoader

# Mean and standard deviation of each colour that ImageNet's networks were trained with.
IMAGENET_COLOURS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class DigitsData(LightningDataModule):
    """scikit-learn's 1,797 digits: as 64 features, or with ``size`` as pictures (3, size, size) for a network.

    Training samples have ids, ``train/0`` and so on. Every fifth digit is a validation sample.

    Args:
        size: side of the images in pixels. Default: features instead of images for digits, 96 for CIFAR-10.
        noise: the fraction of training labels that are replaced at random, to try out corrections.
        limit: the number of samples used of each part.
        batch_size, num_workers, shuffle: options of the loaders.
        seed: the seed of the noise.
        stand_in: if the data are missing, print a message and use scikit-learn's digits. If False, raise an error.
    """

    def __init__(
        self, size: int | None = None, noise: float = 0.0, limit: int | None = None, batch_size: int = 128,
        num_workers: int = 0, shuffle: bool = False, seed: int = 0, stand_in: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.size, self.noise, self.limit, self.seed, self.stand_in = size, noise, limit, seed, stand_in
        self.shuffle, self.options = shuffle, {"batch_size": batch_size, "num_workers": num_workers}
        self.train: Any = None
        self.val: Any = None

    def setup(self, stage: str) -> None:
        """Read the data once. Raises FileNotFoundError if they are missing, unless digits may replace them."""
        if self.train is not None:
            return
        try:
            self.train, self.val = self.read()
        except FileNotFoundError as error:
            if not self.stand_in:
                raise
            rank_zero_info(f"data: {error}")
            self.train, self.val = DigitsData(min(self.size or 64, 64), self.noise, self.limit, seed=self.seed).read()

    def read(self) -> tuple[Any, Any]:
        """Return the datasets of (x, y) for training and validation."""
        from sklearn.datasets import load_digits

        rank_zero_info("data: scikit-learn's digits, which come with it; nothing is downloaded")
        found = load_digits()
        x, y = torch.from_numpy(found.data).float() / 16, torch.from_numpy(found.target).long()
        if self.size is not None:
            x = interpolate(x.reshape(-1, 1, 8, 8).expand(-1, 3, 8, 8), size=(self.size, self.size), mode="bilinear")
        val, n = torch.arange(len(x)) % 5 == 4, self.limit
        labels = noisy_labels(y[~val], self.noise, self.seed)
        return TensorDataset(x[~val][:n], labels[:n]), TensorDataset(x[val][:n], y[val][:n])

    def train_dataloader(self) -> ResumableLoader:
        """Loader of the training samples with ids, which resumes in the middle of an epoch."""
        return ResumableLoader(Indexed(self.train, prefix="train/"), shuffle=self.shuffle, **self.options)

    def val_dataloader(self) -> DataLoader[Any]:
        """Loader of the validation samples."""
        return DataLoader(self.val, **self.options)  # type: ignore[arg-type]

    test_dataloader = predict_dataloader = val_dataloader


class Cifar10Data(DigitsData):
    """The 10,000 + 2,000 pictures of ``cifar10/cifar10_12k.npz`` in the folder that TORCHLSSVM_DATA names."""

    def read(self) -> tuple[Any, Any]:
        """Read the pictures."""
        path = Path(os.environ.get("TORCHLSSVM_DATA", "."), "cifar10", "cifar10_12k.npz")
        if not path.exists():
            raise FileNotFoundError(f"there is no {path} (TORCHLSSVM_DATA names its folder)")
        found, n = np.load(path), self.limit
        y = {part: torch.from_numpy(found[f"y_{part}"]).long() for part in ("train", "test")}
        y["train"] = noisy_labels(y["train"], self.noise, self.seed)
        train, val = (Pictures(found[f"x_{part}"][:n], labels[:n], self.size or 96) for part, labels in y.items())
        return train, val


class FolderData(DigitsData):
    """Photographs in ``root/train/<class>/`` and ``root/val/<class>/``.

    Args:
        root: the folder. A relative path is also searched for below the folder that TORCHLSSVM_DATA names.
        size: side of the images in pixels, after a centre crop.
        limit, batch_size, num_workers, shuffle, stand_in: as for :class:`DigitsData`; the limit is spread evenly.
    """

    def __init__(
        self, root: str, size: int = 224, limit: int | None = None, batch_size: int = 64, num_workers: int = 0,
        shuffle: bool = False, stand_in: bool = False,
    ):  # fmt: skip
        super().__init__(size, 0.0, limit, batch_size, num_workers, shuffle, stand_in=stand_in)
        self.root = root

    def read(self) -> tuple[Any, Any]:
        """Find the photographs."""
        places = [Path(self.root), Path(os.environ.get("TORCHLSSVM_DATA", "."), self.root)]
        found = next((place for place in places if (place / "train").is_dir()), None)
        if found is None:
            raise FileNotFoundError(f"there is no folder {self.root}/train")
        from torchvision import transforms
        from torchvision.datasets import ImageFolder

        steps = transforms.Compose([
            transforms.Resize(self.size), transforms.CenterCrop(self.size), transforms.ToTensor(),
            transforms.Normalize(*IMAGENET_COLOURS),
        ])  # fmt: skip
        parts = [ImageFolder(str(found / part), steps) for part in ("train", "val")]
        counts = [len(part) if self.limit is None else min(self.limit, len(part)) for part in parts]
        train, val = (Subset(p, [k * len(p) // n for k in range(n)]) for p, n in zip(parts, counts, strict=True))
        return train, val


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """uint8 pictures (n, 3, H, W), enlarged to ``size`` and normalised as ImageNet's networks expect."""

    def __init__(self, x: np.ndarray[Any, Any], y: Tensor, size: int):
        self.x, self.y, self.size = x, y, size

    def __len__(self) -> int:
        """The number of pictures."""
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(self.x[index]).float()[None] / 255
        mean, std = torch.tensor(IMAGENET_COLOURS)[:, :, None, None]
        return (interpolate(x, size=(self.size, self.size), mode="bilinear")[0] - mean) / std, self.y[index]


def noisy_labels(y: Tensor, share: float, seed: int) -> Tensor:
    """Labels 0 to 9 (n,) of which a share is replaced by another label, at random."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(y), generator=generator) < share
    return torch.where(wrong, (y + torch.randint(1, 10, (len(y),), generator=generator)) % 10, y)
