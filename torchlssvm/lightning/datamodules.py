"""Data that configs name: scikit-learn's digits, the CIFAR-10 subset, a folder of images. Batches carry ids."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.dataset import Dataset

from torchlssvm.lightning.batches import Indexed, ResumableLoader

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of each colour that ImageNet's networks were trained with."""


class IndexedData(LightningDataModule):
    """Loaders over ``self.train`` and ``self.val``, datasets of (x, y); training samples have ids, ``train/0`` and so on.

    Args:
        size: pixels of a side of pictures; None for features (digits) or 96 (CIFAR-10).
        noise: the share of training labels that are replaced at random, for trying out corrections.
        limit: the number of samples used of each part.
        batch_size, num_workers, shuffle: of the loaders.
        seed: of the noise.
        stand_in: use scikit-learn's digits where the data are missing, and say so. Otherwise that is an error.
    """

    def __init__(
        self, size: int | None = None, noise: float = 0.0, limit: int | None = None, batch_size: int = 128,
        num_workers: int = 0, shuffle: bool = False, seed: int = 0, stand_in: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.size, self.noise, self.limit, self.seed, self.stand_in = size, noise, limit, seed, stand_in
        self.options = {"batch_size": batch_size, "num_workers": num_workers}
        self.shuffle = shuffle
        self.train: Any = None
        self.val: Any = None

    def setup(self, stage: str) -> None:
        """Read the data once. FileNotFoundError if they are missing, unless digits may stand in for them."""
        if self.train is not None:
            return
        try:
            self.train, self.val = self.read()
        except FileNotFoundError as error:
            if not self.stand_in:
                raise
            rank_zero_info(f"data: {error}; using scikit-learn's digits instead")
            self.train, self.val = digits(min(self.size or 64, 64), self.noise, self.limit, self.seed)

    def read(self) -> tuple[Any, Any]:
        """Return the datasets for training and validation."""
        raise NotImplementedError

    def train_dataloader(self) -> ResumableLoader:
        """Loader of the training samples with ids, which resumes in the middle of an epoch."""
        return ResumableLoader(Indexed(self.train, prefix="train/"), shuffle=self.shuffle, **self.options)

    def val_dataloader(self) -> DataLoader[Any]:
        """Loader of the validation samples."""
        return DataLoader(self.val, **self.options)  # type: ignore[arg-type]

    test_dataloader = predict_dataloader = val_dataloader


class DigitsData(IndexedData):
    """scikit-learn's 1,797 digits: as 64 features, or with ``size`` as pictures (3, size, size) for a network."""

    def read(self) -> tuple[Any, Any]:
        """Read the digits; every fifth is a validation sample."""
        rank_zero_info("data: scikit-learn's digits, which come with it; nothing is downloaded")
        return digits(self.size, self.noise, self.limit, self.seed)


class Cifar10Data(IndexedData):
    """The 10,000 + 2,000 pictures of ``cifar10/cifar10_12k.npz`` in the folder that TORCHLSSVM_DATA names."""

    def read(self) -> tuple[Any, Any]:
        """Read the pictures."""
        path = Path(os.environ.get("TORCHLSSVM_DATA", "."), "cifar10", "cifar10_12k.npz")
        if not path.exists():
            raise FileNotFoundError(f"there is no {path} (TORCHLSSVM_DATA names its folder)")
        found = np.load(path)
        y = {part: torch.from_numpy(found[f"y_{part}"]).long() for part in ("train", "test")}
        y["train"] = noisy_labels(y["train"], self.noise, self.seed)
        train, val = (
            Pictures(found[f"x_{part}"][: self.limit], y[part][: self.limit], self.size or 96)
            for part in ("train", "test")
        )
        return train, val


class FolderData(IndexedData):
    """Photographs in ``root/train/<class>/`` and ``root/val/<class>/``.

    Args:
        root: the folder; a relative one is also looked for below the folder that TORCHLSSVM_DATA names.
        size: pixels of a side after a centre crop.
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
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ])  # fmt: skip
        train, val = (ImageFolder(str(found / part), steps) for part in ("train", "val"))
        return every_nth(train, self.limit), every_nth(val, self.limit)


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """uint8 pictures (n, 3, H, W), enlarged to ``size`` and normalised as ImageNet's networks expect."""

    def __init__(self, x: np.ndarray[Any, Any], y: Tensor, size: int):
        self.x, self.y, self.size = x, y, size

    def __len__(self) -> int:
        """The number of pictures."""
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(self.x[index]).float()[None] / 255
        x = torch.nn.functional.interpolate(x, size=(self.size, self.size), mode="bilinear", align_corners=False)[0]
        mean, std = torch.tensor(IMAGENET_MEAN)[:, None, None], torch.tensor(IMAGENET_STD)[:, None, None]
        return (x - mean) / std, self.y[index]


def digits(size: int | None, noise: float, limit: int | None, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's digits for training and validation: features (n, 64), or pictures (n, 3, size, size)."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.from_numpy(found.data).float() / 16, torch.from_numpy(found.target).long()
    if size is not None:
        pictures = x.reshape(-1, 1, 8, 8).expand(-1, 3, 8, 8)
        x = torch.nn.functional.interpolate(pictures, size=(size, size), mode="bilinear")
    val = torch.arange(len(x)) % 5 == 4
    labels = noisy_labels(y[~val], noise, seed)
    return TensorDataset(x[~val][:limit], labels[:limit]), TensorDataset(x[val][:limit], y[val][:limit])


def noisy_labels(y: Tensor, share: float, seed: int) -> Tensor:
    """Labels 0 to 9 (n,) of which a share is replaced by another label, at random."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(y), generator=generator) < share
    return torch.where(wrong, (y + torch.randint(1, 10, (len(y),), generator=generator)) % 10, y)


def every_nth(dataset: Any, limit: int | None) -> Any:
    """At most ``limit`` samples, spread evenly."""
    if limit is None or limit >= len(dataset):
        return dataset
    return Subset(dataset, [k * len(dataset) // limit for k in range(limit)])
