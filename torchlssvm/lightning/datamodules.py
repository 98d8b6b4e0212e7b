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
from torch.utils.data import DataLoader, Dataset, TensorDataset

from torchlssvm.lightning.batches import Indexed, ResumableLoader

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of each colour that ImageNet's networks were trained with."""


class IndexedData(LightningDataModule):
    """Loaders over ``self.train`` and ``self.val``, datasets of (x, y); training samples have ids, ``train/0`` and so on."""

    def __init__(self, batch_size: int = 128, num_workers: int = 0, shuffle: bool = False):
        super().__init__()
        self.batch_size, self.num_workers, self.shuffle = batch_size, num_workers, shuffle
        self.train: Any = None
        self.val: Any = None

    def train_dataloader(self) -> ResumableLoader:
        """Loader of the training samples with ids, which resumes in the middle of an epoch."""
        data = Indexed(self.train, prefix="train/")
        return ResumableLoader(data, self.batch_size, shuffle=self.shuffle, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[Any]:
        """Loader of the validation samples."""
        return DataLoader(self.val, batch_size=self.batch_size, num_workers=self.num_workers)

    test_dataloader = predict_dataloader = val_dataloader

    def stand_in(self, missing: str, digits: DigitsData) -> None:
        """Use scikit-learn's digits in place of missing data, and say so."""
        rank_zero_info(f"data: there is no {missing}; using scikit-learn's digits instead")
        digits.setup("fit")
        self.train, self.val = digits.train, digits.val


CIFAR_SIDE_PIXELS, DIGIT_SIDE_PIXELS = 96, 64
"""Pixels of a side of enlarged pictures: what small networks were trained for; larger ones only take longer."""


class PictureData(IndexedData):
    """Data of small pictures whose training labels may be made wrong, at random, for trying out corrections."""

    def __init__(
        self, size: int | None = None, noise: float = 0.0, limit: int | None = None, batch_size: int = 128,
        num_workers: int = 0, shuffle: bool = False, seed: int = 0,
    ):  # fmt: skip
        super().__init__(batch_size, num_workers, shuffle)
        self.size, self.noise, self.limit, self.seed = size, noise, limit, seed


class DigitsData(PictureData):
    """scikit-learn's 1,797 digits: as 64 features, or with ``size`` as pictures (3, size, size) for a network.

    Args:
        size: pixels of a side; None for features.
        noise: the share of training labels that are wrong, at random, for trying out corrections.
        limit: so many training samples only.
        batch_size, num_workers, shuffle: of the loaders.
        seed: of the noise.
    """

    def setup(self, stage: str) -> None:
        """Read the digits; every fifth is a validation sample."""
        if self.train is not None:
            return
        from sklearn.datasets import load_digits

        rank_zero_info("data: scikit-learn's digits, which come with it; nothing is downloaded")
        found = load_digits()
        x = torch.from_numpy(found.data).float() / 16
        y = torch.from_numpy(found.target).long()
        if self.size is not None:
            pictures = x.reshape(-1, 1, 8, 8).expand(-1, 3, 8, 8)
            x = torch.nn.functional.interpolate(pictures, size=(self.size, self.size), mode="bilinear")
        judges = torch.arange(len(x)) % 5 == 4
        wrong = noisy_labels(y[~judges], self.noise, 10, self.seed)
        end = self.limit
        self.train = TensorDataset(x[~judges][:end], wrong[:end])
        self.val = TensorDataset(x[judges][:end], y[judges][:end])


class Cifar10Data(PictureData):
    """The 10,000 + 2,000 pictures of ``cifar10/cifar10_12k.npz`` in the folder that TORCHLSSVM_DATA names; digits without it.

    Args:
        size: pixels of a side after enlarging; None for 96.
        noise: the share of training labels that are wrong, at random.
        limit: so many training samples only.
        batch_size, num_workers, shuffle: of the loaders.
        seed: of the noise.
    """

    def setup(self, stage: str) -> None:
        """Read the pictures, or digits where there are none."""
        if self.train is not None:
            return
        size = self.size or CIFAR_SIDE_PIXELS
        path = Path(os.environ.get("TORCHLSSVM_DATA", ""), "cifar10", "cifar10_12k.npz")
        if not os.environ.get("TORCHLSSVM_DATA") or not path.exists():
            missing = f"{path} (TORCHLSSVM_DATA names its folder)"
            self.stand_in(missing, DigitsData(size, self.noise, self.limit, seed=self.seed))
            return
        found = np.load(path)
        y = torch.from_numpy(found["y_train"]).long()
        self.train = Pictures(
            found["x_train"][: self.limit], noisy_labels(y, self.noise, 10, self.seed)[: self.limit], size
        )
        self.val = Pictures(found["x_test"][: self.limit], torch.from_numpy(found["y_test"]).long()[: self.limit], size)


class FolderData(IndexedData):
    """Photographs in ``root/train/<class>/`` and ``root/val/<class>/``; digits where there is no such folder.

    Args:
        root: the folder; a relative one is also looked for below the folder that TORCHLSSVM_DATA names.
        size: pixels of a side after a centre crop.
        limit: so many samples of each part only, spread evenly.
        batch_size, num_workers, shuffle: of the loaders.
    """

    def __init__(
        self, root: str, size: int = 224, limit: int | None = None, batch_size: int = 64, num_workers: int = 0,
        shuffle: bool = False,
    ):  # fmt: skip
        super().__init__(batch_size, num_workers, shuffle)
        self.root, self.size, self.limit = root, size, limit

    def setup(self, stage: str) -> None:
        """Find the photographs, or take digits where there are none."""
        if self.train is not None:
            return
        found = [
            p
            for p in (Path(self.root), Path(os.environ.get("TORCHLSSVM_DATA", "."), self.root))
            if (p / "train").is_dir()
        ]
        if not found:
            small = min(self.size, DIGIT_SIDE_PIXELS)  # of pictures of 8 x 8 a large one says no more
            self.stand_in(f"folder {self.root}/train", DigitsData(small, limit=self.limit))
            return
        from torchvision import transforms
        from torchvision.datasets import ImageFolder

        steps = [
            transforms.Resize(self.size),
            transforms.CenterCrop(self.size),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
        self.train, self.val = (
            every_nth(ImageFolder(str(found[0] / part), transforms.Compose(steps)), self.limit)
            for part in ("train", "val")
        )


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
        return (x - torch.tensor(IMAGENET_MEAN)[:, None, None]) / torch.tensor(IMAGENET_STD)[:, None, None], self.y[
            index
        ]


def noisy_labels(y: Tensor, share: float, K: int, seed: int) -> Tensor:
    """Labels (n,) of which a share is replaced by another label, at random."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(y), generator=generator) < share
    return torch.where(wrong, (y + torch.randint(1, K, (len(y),), generator=generator)) % K, y)


def every_nth(dataset: Any, limit: int | None) -> Any:
    """At most ``limit`` samples, spread evenly."""
    if limit is None or limit >= len(dataset):
        return dataset
    return torch.utils.data.Subset(dataset, [k * len(dataset) // limit for k in range(limit)])
