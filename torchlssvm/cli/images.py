"""Image folders, and the network that computes features from images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchlssvm.backbone_hash import fingerprint
from torchlssvm.backbones import build, preprocessing
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

    def features(self, paths: list[Path]) -> Tensor:
        """Read images and compute their features (B, J)."""
        return self.classifier.features(torch.stack([self._read(path) for path in paths]))

    def _read(self, path: Path) -> Tensor:
        from PIL import Image

        try:
            with Image.open(path) as image:
                return self.preprocess(image.convert("RGB"))  # type: ignore[no-any-return]
        except Exception as error:  # the readers of image formats raise errors of many kinds
            raise ValueError(f"{path} cannot be read as an image: {error}") from None


def find_images(folder: Path, labelled: bool) -> Mapping[str, Path]:
    """Return the images in a folder and its sub-folders, sorted, by id: the path below the folder.

    Hidden files and folders are left out. ``labelled``: every image must be in the sub-folder of its class; else ``folder``
    may be a single image too.
    """
    if folder.is_file() and not labelled:
        return {folder.name: folder}
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    images = (p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
    found = sorted(p for p in images if not any(s.startswith(".") for s in p.relative_to(folder).parts))
    if not found:
        raise ValueError(f"{folder} contains no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    loose = next((p for p in found if p.parent == folder), None)
    if labelled and loose is not None:
        raise ValueError(f"{loose} is not in a sub-folder: the name of the sub-folder is the class of the image")
    return {p.relative_to(folder).as_posix(): p for p in found}
