"""The file of a receipt: its place, and how it is written after an erasure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm.cli.store_folder import refuse_inside_store

if TYPE_CHECKING:
    from torchlssvm.store import SampleStore

RECEIPT_SUFFIX = ".receipt.json"
OTHER_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
"""Characters that a file is not named with; each run of them becomes a dash."""


def receipt_path(given: Path | None, certificate: Path | None, store: Path, name: str) -> Path:
    """Path of a receipt: as asked for, beside the certificate, or into the folder STORE.receipts."""
    if given is not None:
        return given
    if certificate is not None:
        return certificate.with_name(certificate.name.removesuffix(".json") + RECEIPT_SUFFIX)
    store = store.resolve()
    return store.with_name(store.name + ".receipts") / (OTHER_CHARACTERS.sub("-", name)[:80] + RECEIPT_SUFFIX)


def check_receipt_path(path: Path, store: Path) -> None:
    """ValueError if a receipt cannot be written there; its own folder beside the store is made."""
    refuse_inside_store(path, store)
    if path.exists():
        raise ValueError(f"{path} is there already: a receipt is not written over")
    if path.parent.name == store.resolve().name + ".receipts":
        path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path.absolute().parent} is not a folder: the receipt cannot be written there")


def write_receipt(store: SampleStore, event_ids: Sequence[str], path: Path) -> str:
    """Write the receipt of erasures that are done, and say so. An OSError says that they are done."""
    try:
        store.write_receipt(event_ids, path)
    except OSError as error:
        raise OSError(
            f"the samples are erased, but their receipt is not written ({error}): nothing is lost until the store is "
            f"compacted. torchlssvm receipt {store.path} --out FILE writes it"
        ) from error
    return (
        f"receipt: {path} (it tells whom the erasure was about: keep it apart from the store, and destroy it when the answer "
        "can no longer be questioned)"
    )
