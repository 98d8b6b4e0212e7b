"""A least-squares head that keeps its rows, for fewer samples than features."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch
from scipy.linalg.blas import dsyrk
from torch import Tensor

from torchlssvm.errors import NotFittedError, NumericalWarning, RemovalError
from torchlssvm.functional import checks, dual_ridge
from torchlssvm.functional.calibration import least_squares
from torchlssvm.linear.diagnostics.rho_rule import HIGHEST_POWER, LEAST_SAMPLES, LOWEST_POWER, TIE_TOLERANCE
from torchlssvm.sklearn.common import Array
from torchlssvm.statistics.batch import LARGEST_FLOAT_VALUE

LEAST_EXPONENT = -1000
"""Power of two below which a mean eigenvalue is not told from zero: its inverse is a number too."""

CENTRED_COLUMNS = 512
"""Columns that are centred and multiplied at a time: no second copy of all rows is made."""


class DualHead:
    """Ridge regression on rows that are kept, dense or sparse (CSR), solved in the dual; for the scikit-learn estimators.

    n samples take n rows, copies of those given, and an (n, n) system instead of a (J, J) one. Sums of floats: no digest,
    removal to rounding.

    Args:
        in_features: J.
        outputs: K, classes or targets.
        rho: a number, or ``"gcv"``: chosen at each solve.
        intercept: ``"free"`` or ``"none"``.
        labels: True for labels (n,), False for targets (n, K).
    """

    multiclass = "ovr"
    keeps_rows = True
    device = torch.device("cpu")

    def __init__(self, in_features: int, outputs: int, rho: Any, intercept: str, labels: bool):
        self.in_features, self.num_classes, self.intercept, self.labels = in_features, outputs, intercept, labels
        self.rule = isinstance(rho, str) and rho == "gcv"
        self._rho = 1.0 if self.rule else checks.positive(rho, "rho (or 'gcv')")
        self.rows: Any = None  # (n, J), an array or a CSR matrix
        self.y = np.zeros((0,) if labels else (0, outputs))
        self._solved: tuple[Tensor, Tensor] | None = None

    @property
    def n(self) -> int:
        """The number of samples."""
        return len(self.y)

    @property
    def rho(self) -> float:
        """The regularization in use."""
        self._solve()
        return self._rho

    @property
    def weight(self) -> Tensor:
        """w as nn.Linear has it, (K, J)."""
        return self._solve()[0].mT

    @property
    def bias(self) -> Tensor:
        """b (K,)."""
        return self._solve()[1]

    def add(self, x: Any, y: Array) -> Self:
        """Learn samples. x: (B, J), an array or a CSR matrix; y: (B,) or (B, K)."""
        largest = max(float(x.max()), -float(x.min())) if x.shape[0] else 0.0
        if largest > LARGEST_FLOAT_VALUE:
            raise ValueError(
                f"X holds a value of magnitude {largest!r}, whose square leaves the range of float64: rescale X"
            )
        rows = copy_rows(x) if self.rows is None else stack_rows([self.rows, copy_rows(x)])
        labels = np.concatenate([self.y.astype(y.dtype) if not len(self.y) else self.y, y])
        self.rows, self.y, self._solved = rows, labels, None
        return self

    def remove(self, x: Any, y: Array) -> Self:
        """Unlearn samples: rows that are held, bit for bit; RemovalError, with nothing changed, for one that is not."""
        held: dict[bytes, list[int]] = {}
        for i, key in enumerate(row_keys(self.rows, self.y)):
            held.setdefault(key, []).append(i)
        gone = []
        for i, key in enumerate(row_keys(self._alike(x), y)):
            if not held.get(key):
                raise RemovalError(f"row {i} is not among the samples held, with this label. Nothing was changed.")
            gone.append(held[key].pop())
        keep = np.setdiff1d(np.arange(self.n), gone)
        self.rows, self.y, self._solved = self.rows[keep], self.y[keep], None
        return self

    def _alike(self, x: Any) -> Any:
        """Rows in the form in which rows are held, dense or sparse."""
        if isinstance(self.rows, np.ndarray):
            return x if isinstance(x, np.ndarray) else x.toarray()
        return copy_rows(x) if not isinstance(x, np.ndarray) else type(self.rows)(x)

    def targets(self) -> Tensor:
        """Targets (n, K): -1 and +1 of labels."""
        if not self.labels:
            return torch.from_numpy(np.asarray(self.y, dtype=np.float64))
        return (
            2.0 * torch.nn.functional.one_hot(torch.from_numpy(self.y.astype(np.int64)), self.num_classes).double()
            - 1.0
        )

    def system(self) -> tuple[Tensor, Tensor, Array, Tensor]:
        """K (n, n), centred targets (n, outputs), and the means of rows (J,) and targets (outputs,); zero without intercept.

        Of K what is above the diagonal may be missing.
        """
        Y, free = self.targets(), self.intercept == "free"
        mean = np.asarray(self.rows.mean(0), dtype=np.float64).reshape(-1) if free else np.zeros(self.in_features)
        centre = Y.mean(0) if free else torch.zeros(Y.shape[1], dtype=torch.float64)
        product = np.zeros((self.n, self.n), order="F")
        for _, part in self._parts(mean):
            if isinstance(part, np.ndarray):
                product = dsyrk(1.0, part.T, beta=1.0, c=product, trans=1, overwrite_c=1)
            else:
                G = torch.from_numpy((part @ part.T).toarray().astype(np.float64, copy=False))
                product += (dual_ridge.centred(G) if free else G).numpy()
        return torch.from_numpy(product.T), Y - centre, mean, centre

    def _parts(self, mean: Array) -> Iterator[tuple[Any, Any]]:
        """Yield columns, as an index and their values: dense ones in float64 and centred, sparse ones as they are.

        Columns of a sparse matrix that are more than half full are dense: uncentred, their mean could hide all the rest.
        """

        def centred(values: Array, of: Any) -> Array:
            out: Array = values - mean[of]
            return out - out.mean(0) if self.intercept == "free" else out  # what rounding left of the mean

        rows = self.rows
        if not isinstance(rows, np.ndarray):
            full = rows.getnnz(axis=0) > rows.shape[0] / 2
            yield ~full, rows[:, ~full]
            if full.any():
                yield full, centred(rows[:, full].toarray(), full)
            return
        for a in range(0, self.in_features, CENTRED_COLUMNS):
            some = slice(a, a + CENTRED_COLUMNS)
            yield some, centred(rows[:, some], some)

    def _solve(self) -> tuple[Tensor, Tensor]:
        """Bring w (J, K) and b (K,) up to date."""
        if self._solved is None:
            if not self.n:
                raise NotFittedError("no samples are held: call fit or partial_fit first")
            K, Y, mean, centre = self.system()
            if self.rule and self.n >= LEAST_SAMPLES:
                self._rho, alpha = self.choose(K, Y)
            else:
                self._rho = 1.0 if self.rule else self._rho
                alpha, regular = dual_ridge.solve(K, Y, self._rho)
                if not regular:
                    warnings.warn(
                        f"rho={self._rho!r} is below the rounding of this system: it was solved by eigenvalues, those that are "
                        "zero but for rounding left out",
                        NumericalWarning,
                        stacklevel=2,
                    )
            w = torch.empty(self.in_features, Y.shape[1], dtype=torch.float64)
            for columns, part in self._parts(mean):
                w.numpy()[columns] = part.T @ alpha.numpy()
            self._solved = w, centre - torch.from_numpy(mean) @ w
        return self._solved

    def choose(self, K: Tensor, Y: Tensor) -> tuple[float, Tensor]:
        """Choose rho by GCV among powers of two around the mean eigenvalue, near-ties to the larger; also returns alpha (n, K).

        K: (n, n); Y: (n, K); both are overwritten.
        """
        mean = float(K.diagonal().sum()) / self.in_features
        unit = 2.0 ** max(math.frexp(mean)[1], LEAST_EXPONENT) if mean > 0 else 1.0  # squares of rho stay in range
        rhos = torch.tensor([2.0**k for k in range(LOWEST_POWER, HIGHEST_POWER + 1)], dtype=torch.float64)
        band = dual_ridge.reduce_to_band(K.mul_(1.0 / unit), Y)
        errors, alphas = band.path(rhos, self.intercept == "free")
        best = int((errors <= errors.amin() * (1.0 + TIE_TOLERANCE)).nonzero().amax())
        return float(rhos[best]) * unit, band.rotate_back(alphas[best]).mul_(1.0 / unit)

    def __call__(self, x: Any) -> Tensor:
        """Scores (B, K) of rows (B, J), dense or sparse."""
        w, b = self._solve()
        return torch.from_numpy(np.ascontiguousarray(x @ w.numpy())) + b

    def predict_proba(self, x: Any) -> Tensor:
        """Probabilities (B, K): (1 + score) / 2, projected."""
        return least_squares(self(x))

    def leave_one_out(self, x: Any, y: Array) -> Tensor:
        """Scores (n, K) of all samples held, each by the head that never saw it; ValueError for other samples."""
        if row_keys(self._alike(x), y) != row_keys(self.rows, self.y):
            raise ValueError("leave-one-out needs the samples that are held, in the order they were added")
        rho = self.rho
        K, Y, _, _ = self.system()
        if int(torch.linalg.cholesky_ex(K + rho * torch.eye(self.n, dtype=torch.float64)).info):
            raise ValueError(f"rho={rho!r} is below the rounding of this system: leave-one-out needs a larger one")
        return self.targets() - dual_ridge.left_out(K, Y, rho, self.intercept == "free")


def copy_rows(x: Any) -> Any:
    """A copy of rows; of a sparse matrix without zeros and with each entry once, in order."""
    if isinstance(x, np.ndarray):
        copy: Array = x + x.dtype.type(0)  # no -0.0: rows are compared by their bytes
        return copy
    rows = x.copy()
    rows.sum_duplicates()
    rows.eliminate_zeros()
    return rows


def stack_rows(parts: list[Any]) -> Any:
    """Rows one below the other, dense or sparse."""
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    from scipy.sparse import csr_matrix, vstack

    return vstack([csr_matrix(part) for part in parts], format="csr")


def row_keys(rows: Any, y: Array) -> list[bytes]:
    """The bytes of each row with its label or targets."""
    y = np.ascontiguousarray(y, dtype=np.float64)
    if isinstance(rows, np.ndarray):
        rows = np.ascontiguousarray(rows, dtype=np.float64) + 0.0
        return [rows[i].tobytes() + y[i].tobytes() for i in range(len(y))]
    data, at, ends = rows.data.astype(np.float64), rows.indices.astype(np.int64), rows.indptr
    return [
        data[a:b].tobytes() + at[a:b].tobytes() + y[i].tobytes() for i, (a, b) in enumerate(itertools.pairwise(ends))
    ]
