"""Functions that recognise a sample: keyed hashes of rows on a grid, keyed hashes of ids, and the fold of an id.

Someone who has the key can recognise a row. Without the key, nobody can test whether a guessed row is the right one.

**Words.** A row q of integers is multiplied by four vectors r of secret integers, and secret odd factors combine the four
products into two words of 64 bits. Two different rows share both words with a probability of about 2^-68: for each vector, they
have the same product for at most one of the 2^17 values of any single entry of r. One matrix product computes the words of many
rows. The products are exact in float64. An entry of q is at most 2^26 in magnitude, an entry of r at most 2^16, and a product
covers at most 2^11 columns, so every partial sum stays within 2^53. Wider rows are split into blocks, whose products are added
as int64.

**Row hashes.** Words identify rows in memory only, because a reader who knows as many rows as there are columns could compute
the vectors from the words. Files and messages contain row hashes instead: hashes, under the key, of the words together with
the row's label and fold.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from torchlssvm.functional.gram import exact_products

KEY_BYTES = 32
"""Bytes of the random key: 256 bits, beyond guessing."""

HASH_BYTES = 16
"""Bytes of a row hash. With 128 bits, two of 2^30 rows share a row hash with a probability below 2^-67."""


_process_key = os.urandom(KEY_BYTES)
_group_key: tuple[weakref.ref[Any], bytes] | None = None  # of the process group that asked last


def shared_key() -> bytes:
    """Return the key of this process or, within a process group, the key that its ranks share.

    The first rank that asks writes its key to the group's store, and the other ranks read it there. No collective is needed.
    """
    global _group_key
    if not (dist.is_available() and dist.is_initialized()):
        return _process_key
    world: Any = dist.group.WORLD
    if _group_key is None or _group_key[0]() is not world:
        try:
            store = dist.distributed_c10d._get_default_store()
            found = store.compare_set("torchlssvm/row_key", "", _process_key.hex())
        except RuntimeError:  # the store's process has ended: recognise rows within this process only
            return _process_key
        _group_key = weakref.ref(world), bytes.fromhex(found.decode())
    return _group_key[1]


def fold_of(ids: Iterable[Any], folds: int) -> list[int]:
    """Return the fold of each id. It is a hash of the id without a key, so it is the same on every machine and in every run."""
    return [int.from_bytes(hashlib.blake2b(str(i).encode(), digest_size=8).digest(), "big") % folds for i in ids]


def id_hash(sample_id: Any, key: bytes) -> bytes:
    """BLAKE2b-128 of an id under a key."""
    return hashlib.blake2b(str(sample_id).encode(), digest_size=HASH_BYTES, key=key).digest()


@lru_cache(maxsize=16)
def key_factors(key: bytes, device: torch.device) -> Tensor:
    """Two secret odd factors (2,) int64 of a key."""
    stream = hashlib.shake_256(b"torchlssvm-row-factors-1" + key).digest(16)
    return torch.from_numpy(np.frombuffer(stream, "<i8").astype(np.int64) | 1).to(device)


def row_words(rows: Tensor, vectors: Tensor, factors: Tensor) -> Tensor:
    """Compute words (B, 2) int64, which are linear in the rows modulo 2^64. rows: (B, J), on the grid; vectors: (4, J)."""
    p = exact_products(rows, vectors)
    return p[:, 0::2] + p[:, 1::2] * factors


@lru_cache(maxsize=16)
def key_vectors(key: bytes, columns: int, device: torch.device) -> Tensor:
    """Return :func:`secret_vectors` on a device, kept for the next batch."""
    return secret_vectors(key, columns).to(device)


def secret_vectors(key: bytes, columns: int) -> Tensor:
    """Return the vectors (4, columns) of a key: float64 integers in [-2^16, 2^16). More columns do not change the others."""
    stream = hashlib.shake_256(b"torchlssvm-row-fingerprint-1" + key).digest(16 * columns)
    entries = np.frombuffer(stream, "<u4").astype(np.int64) % 2**17 - 2**16
    return torch.from_numpy(np.ascontiguousarray(entries.astype(np.float64).reshape(columns, 4).T))


def row_keys(rows: Iterable[Any], labels: NDArray[Any], key: bytes = b"") -> list[bytes]:
    """Hash each row with its label by BLAKE2b-128, under a key if one is given.

    rows: the bytes of each row, or contiguous arrays; labels: (B,) or (B, K), contiguous.
    """
    start = hashlib.blake2b(key=key, digest_size=HASH_BYTES).copy
    out = []
    for row, label in zip(rows, labels if labels.ndim > 1 else labels[:, None], strict=True):
        one = start()
        one.update(row)
        one.update(label.data)
        out.append(one.digest())
    return out


def row_names(words: NDArray[np.int64], groups: NDArray[np.int64], key: bytes) -> list[bytes]:
    """Name each row by 32 bytes: BLAKE2b-128 of its words and group under a key, then the group.

    words: (B, 2); groups: (B, 2), the fold and label of each row.
    """
    start = hashlib.blake2b(key=key, digest_size=HASH_BYTES).copy
    out = []
    for row in np.hstack([words, groups]).astype("<i8", copy=False).view("V32").ravel().tolist():
        one = start()
        one.update(row)
        out.append(one.digest() + row[16:])
    return out
