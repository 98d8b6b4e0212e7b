"""Read the four data sets of Zhu et al., Table I, from the folder that TORCHLSSVM_DATA names: two classes, standardized.

Heart has the usual 13 attributes (the paper counts 75). Its six missing values are replaced by the mean of the column.
Anonymous Web has no label, so the target is the most visited area, and the features are the other areas.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchlssvm import FixedPoint


def folder() -> Path:
    if not os.environ.get("TORCHLSSVM_DATA"):
        raise SystemExit("TORCHLSSVM_DATA is not set: it names the folder with the data sets")
    return Path(os.environ["TORCHLSSVM_DATA"]).expanduser()


def heart() -> tuple[np.ndarray, np.ndarray]:
    a = np.genfromtxt(folder() / "heart/heart_cleveland.csv.gz", delimiter=",", skip_header=1)
    x, y = a[:, :-1], a[:, -1] > 0
    return np.where(np.isnan(x), np.nanmean(x, 0), x), y


def breast() -> tuple[np.ndarray, np.ndarray]:
    a = np.genfromtxt(folder() / "wdbc/wdbc.csv.gz", delimiter=",", skip_header=1)
    return a[:, :-1], a[:, -1] > 0


def web() -> tuple[np.ndarray, np.ndarray]:
    z = np.load(folder() / "msweb/msweb_csr.npz")
    x = np.zeros(z["shape"])
    x[np.repeat(np.arange(len(x)), np.diff(z["indptr"])), z["indices"]] = 1.0
    target = int(x.sum(0).argmax())
    return np.delete(x, target, 1), x[:, target] > 0


def covertype() -> tuple[np.ndarray, np.ndarray]:
    """Lodgepole pine, the most frequent class, against the rest."""
    c = np.loadtxt(folder() / "covtype/covtype.data.gz", delimiter=",", dtype=np.int16)
    return c[:, :54].astype(np.float64), c[:, 54] == 2


SETS: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "Heart": heart,
    "BreastWisconsin": breast,
    "AnonymousWeb": web,
    "CoverType": covertype,
}


def load(name: str) -> tuple[Tensor, Tensor, FixedPoint]:
    """x (n, J) standardised, y (n,) in {0, 1}, and a grid that covers x."""
    x, y = SETS[name]()
    deviation = x.std(0)
    x = (x - x.mean(0)) / np.where(deviation > 0, deviation, 1.0)
    return (
        torch.from_numpy(x),
        torch.from_numpy(y.astype(np.int64)),
        FixedPoint(2.0 ** np.ceil(np.log2(np.abs(x).max()))),
    )
