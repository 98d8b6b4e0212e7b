"""Features of photographs from a torchvision network: the class is the sub-folder, the id the path below the folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from torchlssvm.backbone_hash import fingerprint
from torchlssvm.backbones import build, preprocessing
from torchlssvm.cli.sample_files import Batch, as_subjects, read_column
from torchlssvm.linear.attach import AttachedClassifier, attach

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
DEFAULT_WEIGHTS = "default"


class Backbone:
    """A classifier of torchvision without its last layer, the preprocessing of its default weights, and their fingerprint.

    Args:
        name: as torchvision calls it, e.g. ``mobilenet_v2``.
        weights: a file with the network's state_dict (with or without the last layer), or ``"default"``: torchvision's.
        num_classes, head, options: as for :func:`torchlssvm.attach`.
    """

    def __init__(self, name: str, weights: str, num_classes: int, head: Any = None, **options: Any):
        self.preprocess = preprocessing(name)
        if weights != DEFAULT_WEIGHTS:
            Path(weights).stat()
        model = build(name, "DEFAULT" if weights == DEFAULT_WEIGHTS else weights)
        self.classifier: AttachedClassifier = attach(model, num_classes, head, **options)
        self.fingerprint = fingerprint(self.classifier.backbone, self.preprocess)


class ImageFolder:
    """The photographs of a folder, as samples with the features that a network makes of them.

    Args:
        folder: the class of an image is the sub-folder it is in, its id the path below the folder.
        subjects: a file with the subject of each image; see :func:`~torchlssvm.cli.sample_files.read_column`.
        by_position: that file is a list in the order of the paths.
    """

    tolerance = 1e-3
    """Features computed again may differ in their last bits."""

    def __init__(self, folder: Path, subjects: str | None = None, by_position: bool = False):
        self.folder = folder
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
        images = (p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
        self.paths = sorted(p for p in images if not any(s.startswith(".") for s in p.relative_to(folder).parts))
        if not self.paths:
            raise ValueError(f"{folder} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
        loose = next((p for p in self.paths if p.parent == folder), None)
        if loose is not None:
            raise ValueError(f"{loose} is in no sub-folder: the class of an image is the name of its sub-folder")
        self.ids = [p.relative_to(folder).as_posix() for p in self.paths]
        self.class_names = [i.partition("/")[0] for i in self.ids]
        self.subjects = None
        if subjects is not None:
            self.subjects = as_subjects(read_column(Path(subjects), "subject", self.ids, folder, by_position))

    def __len__(self) -> int:
        return len(self.paths)

    def use(self, backbone: Backbone, label_of: Callable[[str], int]) -> ImageFolder:
        """Set the network that makes features of images, and the label that the name of a class stands for."""
        self.backbone, self.width = backbone, backbone.classifier.in_features
        self.y = [label_of(name) for name in self.class_names]
        return self

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield the features of all images, ``size`` at a time."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            ids = self.ids[part]
            x = self.backbone.classifier.features(torch.stack([self._read(p) for p in self.paths[part]]))
            subjects = None if self.subjects is None else self.subjects[part]
            yield f"{self.folder}, {ids[0]} to {ids[-1]}", ids, x, self.y[part], subjects

    def _read(self, path: Path) -> torch.Tensor:
        from PIL import Image

        try:
            with Image.open(path) as image:
                return self.backbone.preprocess(image.convert("RGB"))  # type: ignore[no-any-return]
        except Exception as error:  # the readers of image formats raise errors of many kinds
            raise ValueError(f"{path} is no image that can be read: {error}") from None
