"""The digest of statistics: SHA-256 over bytes that can be rebuilt from the samples alone.

    digest  = SHA256(header || hash of group 0 || hash of group 1 || ...)
    header  = UTF-8 JSON, sorted keys, separators "," and ":", of
              {"bits","classes","features","folds","format":"torchlssvm-statistics-1","headroom","kind","limit","per_class"
              [,"normalize"] [,"scale"] [,"target_bits","target_headroom","target_limit"]}; limits as float.hex();
              kind "labels", "values" or "empty";
              normalize "l2" or "sqrt" and scale "std", where they are used: q is then of the row made ready
              (:mod:`torchlssvm.functional.row_normalization`), and weights are solved for standardised features
    group   = fold * (classes if per_class else 1) + (class if per_class else 0)
    hash    = SHA256(little-endian int64 of: the lower triangle of sum q q^T row by row (J (J+1) / 2 numbers);
              sum z q^T row by row; sum z z^T row by row)
    z       = one-hot label (K), in total; 1, per class; [1, target steps] (K + 1) for values

Samples of weight m count m times. With folds, a sample belongs to fold blake2b-64(str(id)) mod folds (big-endian).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torchlssvm.canonical_json import canonical
from torchlssvm.functional import gram

FORMAT = "torchlssvm-statistics-1"


def hash_group(packed: Tensor, J: int, R: int, moments: Tensor) -> bytes:
    """Hash the packed sums of a group and its sum z z^T."""
    inner = hashlib.sha256()
    gram.hash_lower(inner.update, packed, J, R)
    inner.update(moments.cpu().numpy().astype("<i8", copy=False).tobytes())
    return inner.digest()


def hash_all(header: dict[str, Any], groups: Iterable[bytes]) -> str:
    """Hash the fields of the header and the hashes of all groups, as hex."""
    outer = hashlib.sha256(canonical(header))
    for group in groups:
        outer.update(group)
    return outer.hexdigest()
