"""Features of photographs from a torchvision network: the class is the sub-folder, the id the path below the folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchlssvm.backbone_hash import fingerprint
from torchlssvm.backbones import build, preprocessing
from torchlssvm.cli.columns import Column
from torchlssvm.cli.samples import FileBatch, as_subjects
from torchlssvm.cli.settings import Settings
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


class ImageSamples:
    """Samples from the photographs of a folder. Features computed again may differ in their last bits, hence the tolerance."""

    tolerance = 1e-3

    def __init__(self, folder: Path, subjects: str | None, by_position: bool = False):
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
        self.total = len(self.paths)
        self.subjects = None if subjects is None else Column(Path(subjects), "subject")
        if self.subjects is not None:
            self.subjects.check(self.total, folder, by_position)

    def class_name(self, path: Path) -> str:
        """Return the first folder below the one given."""
        return path.relative_to(self.folder).parts[0]

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, sorted, each once."""
        return sorted({self.class_name(p) for p in self.paths})

    def use_backbone(self, backbone: Backbone, settings: Settings, classes: int) -> ImageSamples:
        """Set the network that makes features of images, and the settings that make labels of names."""
        self.backbone, self.settings, self.classes = backbone, settings, classes
        self.width = backbone.classifier.in_features
        return self

    def batches(self, size: int) -> Iterator[FileBatch]:
        """Yield the features of all images, ``size`` at a time."""
        for start in range(0, self.total, size):
            paths = self.paths[start : start + size]
            ids = [p.relative_to(self.folder).as_posix() for p in paths]
            names = None if self.subjects is None else self.subjects.take(start, ids)
            images = torch.stack([self._read(p) for p in paths])
            x = self.backbone.classifier.features(images)
            y = [self.settings.label(self.class_name(p), self.classes) for p in paths]
            where = f"{self.folder}, {ids[0]} to {ids[-1]}"
            yield FileBatch(where, ids, as_subjects(names), x, y)

    def _read(self, path: Path) -> torch.Tensor:
        from PIL import Image

        try:
            with Image.open(path) as image:
                return self.backbone.preprocess(image.convert("RGB"))  # type: ignore[no-any-return]
        except Exception as error:  # the readers of image formats raise errors of many kinds
            raise ValueError(f"{path} is no image that can be read: {error}") from None
