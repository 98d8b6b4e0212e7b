"""Thumbnails from a folder of image files or an array of pictures, as data URIs."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchlssvm.errors import TorchLSSVMError

THUMBNAIL_PIXELS = 112
"""Length of the longer side on the page in pixels. The picture has twice as many pixels, for high-resolution screens."""

Source = Callable[[str], "str | None"]
"""A function from a sample's id to a data URI, or to None if there is no picture."""

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp"}


def source(images: Any) -> Source:
    """Return a function from sample ids to pictures.

    ``images`` may be a folder, in which the id of a sample is the path of its picture. It may be an array (n, H, W) or
    (n, H, W, 3), or a .npy file with such an array. The sample with the id ``<anything>:<row>`` or ``<row>`` then has the
    picture in that row. It may also be a function from an id to a path, an array or None.
    """
    if callable(images):
        return lambda sample: uri(images(sample))
    if isinstance(images, np.ndarray):
        return from_array(images)
    path = Path(images)
    if path.is_dir():
        return lambda sample: uri(_below(path, sample))
    if path.suffix == ".npy":
        return from_array(np.load(path, mmap_mode="r", allow_pickle=False))
    raise ValueError(f"images must be a folder or a .npy file with an array (n, H, W) or (n, H, W, 3), got {path}")


def _below(folder: Path, sample: str) -> Path | None:
    path = (folder / sample).resolve()
    inside = path.is_relative_to(folder.resolve()) and path.suffix.lower() in IMAGE_SUFFIXES
    return path if inside and path.is_file() else None


def from_array(array: NDArray[Any]) -> Source:
    """Return a function from sample ids to rows of an array of pictures."""
    if array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[3] != 3):
        raise ValueError(f"an array of pictures has shape (n, H, W) or (n, H, W, 3), got {array.shape}")

    def picture(sample: str) -> str | None:
        row = sample.rpartition(":")[2]
        return uri(array[int(row)]) if row.isdigit() and int(row) < len(array) else None

    return picture


def uri(picture: Any) -> str | None:
    """Encode a picture as a data URI. Pass a path, or an array (H, W) or (H, W, 3) of bytes or of numbers from 0 to 1."""
    if picture is None:
        return None
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError:
        raise TorchLSSVMError("pictures need the package pillow: pip install 'torchlssvm[report]'") from None
    out = io.BytesIO()
    if isinstance(picture, str | Path):
        with Image.open(picture) as image:
            small = ImageOps.exif_transpose(image).convert("RGB")
            small.thumbnail((2 * THUMBNAIL_PIXELS, 2 * THUMBNAIL_PIXELS))
            small.save(out, "JPEG", quality=80)
        return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode('ascii')}"
    values = np.asarray(picture)
    if values.dtype != np.uint8:
        values = (np.clip(np.nan_to_num(values.astype(np.float64)), 0.0, 1.0) * 255).round().astype(np.uint8)
    Image.fromarray(values).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode('ascii')}"
