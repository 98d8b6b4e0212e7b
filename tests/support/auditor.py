"""The digest of a store, computed from its file by somebody who trusts only sqlite3, numpy and hashlib.

    python tests/auditor.py STORE

Labels, totals over all classes, no folds. The byte layout is that of the docstring of torchlssvm/statistics/__init__.py.
"""

import hashlib
import json
import sqlite3
import sys

import numpy as np


def digest(folder: str) -> str:
    db = sqlite3.connect(f"file:{folder}/samples.sqlite?mode=ro", uri=True)
    meta = {name: json.loads(value) for name, value in db.execute("SELECT name, value FROM meta")}
    rows, head = meta["rows"], meta["head"]
    J, K = rows["features"], rows["targets"]
    M, V, counts = np.zeros((J, J), object), np.zeros((K, J), object), np.zeros(K, np.int64)
    for label, blob in db.execute("SELECT label, features FROM samples"):
        width = len(blob) // J
        q = np.array([int.from_bytes(blob[i : i + width], "little", signed=True) for i in range(0, len(blob), width)])
        M, V[label], counts[label] = M + np.outer(q, q), V[label] + q, counts[label] + 1
    limit, bits, headroom = rows["grid"]
    header = {"bits": bits, "classes": K, "features": J, "folds": head["folds"], "format": "torchlssvm-statistics-1"}
    header |= {"headroom": headroom, "kind": "labels", "limit": limit, "per_class": head["per_class"]}
    group = b"".join(M[i, : i + 1].astype("<i8").tobytes() for i in range(J))
    group += V.astype("<i8").tobytes() + np.diag(counts).astype("<i8").tobytes()
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(text + hashlib.sha256(group).digest()).hexdigest()


if __name__ == "__main__":
    print(digest(sys.argv[1]))
