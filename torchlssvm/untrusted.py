"""Read untrusted files within bounds: regular files up to a size limit, and tensors no larger than their stored bytes."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import zipfile
from typing import Any

__all__ = ["FileHashes", "check_regular", "load_tensors", "read_regular"]


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if the path exists but is not a regular file: reading a FIFO or a device might never end."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(f"{os.fspath(path)} is a link that leads to itself") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{os.fspath(path)} is not a regular file")


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the content of a regular file, up to a limit in bytes; ValueError for anything else, OSError if unreadable."""
    check_regular(path)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):  # put there since
            raise ValueError(f"{os.fspath(path)} is not a regular file")
        content = file.read(most + 1) if found.st_size <= most else None
    if content is None or len(content) > most:
        raise ValueError(f"{os.fspath(path)} is larger than {most:,} bytes")
    return content


class FileHashes:
    """SHA-256 of regular files within limits. Each file is read once, even under several names, and ``most`` bytes in total."""

    def __init__(self, most: int):
        self.left = most
        self.known: dict[tuple[int, int], bytes] = {}

    def sha256(self, path: str | os.PathLike[str]) -> bytes | None:
        """The hash of a file's bytes; None if it is not a regular file, cannot be read, or exceeds the remaining limit."""
        try:
            check_regular(path)
            with open(path, "rb") as file:
                found = os.fstat(file.fileno())
                place = (found.st_dev, found.st_ino)
                if place not in self.known:
                    if found.st_size > self.left:
                        return None
                    self.left -= found.st_size
                    digest, size = hashlib.sha256(), found.st_size
                    while size > 0 and (part := file.read(min(size, 2**20))):
                        digest.update(part)
                        size -= len(part)
                    self.known[place] = digest.digest()
                return self.known[place]
        except (OSError, ValueError):
            return None


def load_tensors(file: Any) -> Any:
    """Load plain data that ``torch.save`` wrote, from a path or a file in memory. No data may grow when it is read.

    Raises ValueError if the archive is compressed, or if a tensor claims more bytes than the file holds for it (a stride of 0
    makes a kilobyte look like a gigabyte). For other damage torch's own reader raises errors of many kinds.
    """
    import torch

    packed = None
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            packed = next((i.filename for i in archive.infolist() if i.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise ValueError(f"it is packed ({packed[:80]!r}); torch.save packs nothing")
    on_disk = isinstance(file, str | os.PathLike)
    if not on_disk:
        file.seek(0)
    found = torch.load(file, weights_only=True, map_location="cpu", mmap=on_disk and zipfile.is_zipfile(file))
    left = [found]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
        elif isinstance(value, torch.Tensor) and (
            value.layout is not torch.strided
            or value.device.type != "cpu"
            or value.numel() * value.element_size() > value.untyped_storage().nbytes()
        ):
            raise ValueError(f"a tensor of shape {tuple(value.shape)} has fewer bytes in the file than its shape needs")
    return found
