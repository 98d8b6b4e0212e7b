"""Image folders, and the network that computes features from images."""

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
    """A torchvision network without its last layer, the preprocessing of its default weights, and the fingerprint of both.

    Args:
        name: torchvision's name of the network, e.g. ``mobilenet_v2``.
        weights: a file with the network's state_dict (with or without the last layer), or ``"default"`` for torchvision's.
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
    """The images of a folder, as samples with the features that a network computes.

    The id of an image is its path below the folder. Its class is the sub-folder it is in, if the images are labelled.

    Args:
        folder: the folder, or a single image.
        subjects: a file with the subject of each image; see :func:`~torchlssvm.cli.sample_files.read_column`.
        by_position: that file is a list in the order of the paths.
        labelled: every image must be in the sub-folder of its class.
    """

    def __init__(self, folder: Path, subjects: str | None = None, by_position: bool = False, labelled: bool = True):
        self.path, self.paths = folder, [folder]
        if labelled or not folder.is_file():
            self.paths = find_images(folder)
        base = folder if folder.is_dir() else folder.parent
        self.ids = [p.relative_to(base).as_posix() for p in self.paths]
        loose = next((p for p in self.paths if p.parent == folder), None)
        if labelled and loose is not None:
            raise ValueError(f"{loose} is not in a sub-folder: the name of the sub-folder is the class of the image")
        self.class_names = [i.partition("/")[0] for i in self.ids]
        self.y: list[int] | None = None
        self.subjects = None
        if subjects is not None:
            self.subjects = as_subjects(read_column(Path(subjects), "subject", self.ids, folder, by_position))

    def __len__(self) -> int:
        return len(self.paths)

    def use(self, backbone: Backbone, label_of: Callable[[str], int] | None) -> ImageFolder:
        """Set the network that computes features, and the function from class names to labels (None: no labels)."""
        self.backbone, self.width = backbone, backbone.classifier.in_features
        self.y = None if label_of is None else [label_of(name) for name in self.class_names]
        return self

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield the features of all images, ``size`` at a time."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            ids = self.ids[part]
            x = self.backbone.classifier.features(torch.stack([self._read(p) for p in self.paths[part]]))
            subjects = None if self.subjects is None else self.subjects[part]
            y = None if self.y is None else self.y[part]
            yield f"{self.path}, {ids[0]} to {ids[-1]}", ids, x, y, subjects

    def _read(self, path: Path) -> torch.Tensor:
        from PIL import Image

        try:
            with Image.open(path) as image:
                return self.backbone.preprocess(image.convert("RGB"))  # type: ignore[no-any-return]
        except Exception as error:  # the readers of image formats raise errors of many kinds
            raise ValueError(f"{path} cannot be read as an image: {error}") from None


def find_images(folder: Path) -> list[Path]:
    """List the images in a folder and its sub-folders, sorted. Hidden files and folders are left out."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    images = (p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
    found = sorted(p for p in images if not any(s.startswith(".") for s in p.relative_to(folder).parts))
    if not found:
        raise ValueError(f"{folder} contains no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return found
