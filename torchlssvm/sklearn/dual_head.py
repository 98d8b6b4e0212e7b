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
from torchlssvm.functional.grid import FixedPoint, as_grid
from torchlssvm.functional.sample_identity import row_keys
from torchlssvm.functional.spectrum import default_values
from torchlssvm.linear.diagnostics.calibration import Calibration, fit
from torchlssvm.linear.diagnostics.rho_rule import HIGHEST_POWER, LEAST_SAMPLES, LOWEST_POWER, TIE_TOLERANCE
from torchlssvm.linear.diagnostics.rho_selection import RhoPath, best_of, check_rhos
from torchlssvm.linear.linear_head import check_class_weight
from torchlssvm.linear.normal_equations import class_weights
from torchlssvm.sklearn.common import Array
from torchlssvm.statistics.batch import LARGEST_FLOAT_VALUE

LEAST_EXPONENT = -1000
"""Exponent of the smallest power of two by which eigenvalues are scaled. The inverse of that power is still finite."""

CENTRED_COLUMNS, GRIDDED_ROWS = 512, 256
"""Numbers of columns that are centred, and of rows that are rounded to the grid, at a time. Working in parts avoids a second
float64 copy of all rows."""

WEIGHT_ROUNDING = 2.0**-42
"""Share of a sample's weight that counts as rounding when the sample is removed in fractions: 1,024 units of float64. Ten
thousand equal fractions need 770."""


class DualHead:
    """Ridge regression in the dual, for the scikit-learn estimators with fewer samples than features.

    With fewer samples than features (n < J), it is cheaper to store the n rows, dense or sparse (CSR), and to solve an (n, n)
    system instead of a (J, J) system. With a grid, the rows are stored as 32-bit integers. Since the rows are the whole state,
    a head after a removal equals a head that never saw the sample. Removing a sample that is not in the head raises
    RemovalError.

    Args:
        in_features: J, the number of features.
        outputs: K, the number of classes or targets.
        targets: as for ``LSSVMHead``. y is (n,) labels for ``"classes"`` and (n, K) otherwise.
        rho: the regularization, a number, or ``"gcv"`` to choose it at each solve by generalized cross-validation.
        intercept: ``"free"`` or ``"none"``.
        grid: as for ``LSSVMHead``, or None to store the rows as floats, without rounding.
        class_weight: as for ``LSSVMHead``.
        calibration: the map from scores to probabilities, which is fitted to leave-one-out scores.
    """

    multiclass, rule = "ovr", "least_squares"
    _keeps_rows = True
    device = torch.device("cpu")

    def __init__(
        self, in_features: int, outputs: int, *, targets: str, rho: Any = "gcv", intercept: str = "free", grid: Any = "auto",
        class_weight: Any = None, calibration: str | None = None,
    ):  # fmt: skip
        self.in_features, self.num_classes, self.intercept, self.kind = in_features, outputs, intercept, targets
        self.class_weight = check_class_weight(class_weight, outputs, self.device)
        self.calibration = calibration
        self.grid = as_grid(grid)  # "auto" until the first rows come
        self.chooses_rho = isinstance(rho, str) and rho == "gcv"
        self._rho = 1.0 if self.chooses_rho else checks.positive(rho, "rho (or 'gcv')")
        self.rows: Any = None  # (n, J), an array or a CSR matrix; steps of the grid, if there is one
        self.y = np.zeros((0,) if targets == "classes" else (0, outputs))
        self.weights = np.zeros(0)  # (n,)
        self.rounding = np.zeros(0)  # (n,) what rounding may leave of a weight; 0 on a grid, where weights are integers
        self._forget_solution()

    def _forget_solution(self) -> None:
        self._solved: tuple[Tensor, Tensor] | None = None
        self._calibration: Calibration | None = None

    @property
    def n(self) -> float:
        """The sum of the samples' weights."""
        return float(self.weights.sum())

    @property
    def rho(self) -> float:
        """The regularization in use."""
        self._solve()
        return self._rho

    @property
    def weight(self) -> Tensor:
        """The weights (K, J), in the layout of nn.Linear."""
        return self._solve()[0].mT

    @property
    def bias(self) -> Tensor:
        """b (K,)."""
        return self._solve()[1]

    @property
    def unit(self) -> float:
        """The value of one step of the rows kept."""
        return self.grid.resolution if isinstance(self.grid, FixedPoint) else 1.0

    # -- changing ------------------------------------------------------------------------------------------------------

    def add(self, x: Any, y: Any, weight: Any = None) -> Self:
        """Learn samples. x: (B, J), a tensor, an array or a CSR matrix; y: (B,) or (B, K); weight: (B,)."""
        x, y, weight = map(as_array, (x, y, weight))
        largest = max(float(x.max()), -float(x.min())) if min(x.shape) else 0.0
        if largest > LARGEST_FLOAT_VALUE:
            raise ValueError(
                f"X holds a value of magnitude {largest!r}, whose square leaves the range of float64: rescale X"
            )
        grid = FixedPoint.auto(largest) if self.grid == "auto" else self.grid
        if isinstance(grid, FixedPoint):
            grid.check(largest, "X")
        weight = self._check_weight(weight, len(y))
        kept = weight > 0
        new = self._stored(x, grid)[kept]
        rows = new if self.rows is None else stack_rows([self.rows, new])
        labels = np.concatenate([self.y.astype(y.dtype) if not len(self.y) else self.y, y[kept]])
        rounding = weight[kept] * (WEIGHT_ROUNDING if grid is None else 0.0)
        self.grid, self.rows, self.y, self.weights = grid, rows, labels, np.concatenate([self.weights, weight[kept]])
        self.rounding = np.concatenate([self.rounding, rounding])
        self._forget_solution()
        return self

    def remove(self, x: Any, y: Any, weight: Any = None) -> Self:
        """Unlearn samples. If the head does not have one of them, raises RemovalError and changes nothing."""
        x, y, weight = map(as_array, (x, y, weight))
        left = self.weights.copy()
        places = self._places()
        for i, (key, wanted) in enumerate(zip(self._keys_of(x, y), self._check_weight(weight, len(y)), strict=True)):
            held = places.get(key, [])
            slack = self.rounding[held].max(initial=0.0)
            while wanted > 0:
                at = next((j for j in reversed(held) if left[j] > 0), None)
                if at is None:
                    error = RemovalError(f"row {i} is not held with this label and weight. Nothing was changed.")
                    error.row, error.label = i, int(y[i]) if self.kind == "classes" else None
                    raise error
                taken = min(wanted, left[at])
                left[at] = left[at] - taken if left[at] - taken > slack else 0.0
                wanted = wanted - taken if wanted - taken > slack else 0.0
        keep = left > 0
        self.rows, self.y, self.weights, self.rounding = self.rows[keep], self.y[keep], left[keep], self.rounding[keep]
        self._forget_solution()
        return self

    def _check_weight(self, weight: Array | None, count: int) -> Array:
        if weight is None:
            return np.ones(count)
        if self.grid is not None and bool(np.any(weight != np.round(weight))):
            raise ValueError("sample weights on a grid are numbers of copies: integers; grid=None takes fractions")
        return np.asarray(weight, dtype=np.float64)

    def _stored(self, x: Any, grid: FixedPoint | str | None) -> Any:
        """Return a copy of rows in the form in which they are stored. Sparse rows are sorted, without zeros or duplicates."""
        dense = isinstance(x, np.ndarray)
        rows = x if dense else x.copy()
        if not dense:
            rows.sum_duplicates()
        values = rows if dense else rows.data[:, None]
        if isinstance(grid, FixedPoint):
            steps = np.empty(values.shape, dtype=np.int32)
            for a in range(0, len(values), GRIDDED_ROWS):
                part = torch.from_numpy(np.ascontiguousarray(values[a : a + GRIDDED_ROWS]))
                steps[a : a + GRIDDED_ROWS] = grid.integers(part).numpy()
        else:
            steps = values + values.dtype.type(0)  # no -0.0: rows are compared by their bytes
        if dense:
            return steps
        rows.data = steps[:, 0]
        rows.eliminate_zeros()
        return rows

    def _keys_of(self, x: Any, y: Array) -> list[bytes]:
        """Return the hashes of rows, which are in the form in which rows are stored."""
        if isinstance(self.rows, np.ndarray):
            x = x if isinstance(x, np.ndarray) else x.toarray()
        elif isinstance(x, np.ndarray):
            x = type(self.rows)(x)
        return hashed_rows(self._stored(x, self.grid), y)

    def _places(self) -> dict[bytes, list[int]]:
        """Return the positions of the stored rows, by their hashes."""
        places: dict[bytes, list[int]] = {}
        for i, key in enumerate(hashed_rows(self.rows, self.y)):
            places.setdefault(key, []).append(i)
        return places

    # -- solving -------------------------------------------------------------------------------------------------------

    def targets(self) -> Tensor:
        """Targets (n, K): -1 and +1 of labels."""
        if self.kind != "classes":
            y = torch.from_numpy(np.asarray(self.y, dtype=np.float64))
            return y if self.kind == "regression" else 2.0 * y - 1.0
        hot = torch.nn.functional.one_hot(torch.from_numpy(self.y.astype(np.int64)), self.num_classes)
        return 2.0 * hot.double() - 1.0

    def _importance(self, counts: Tensor | None = None) -> Tensor:
        """Return the weight d (n,) of each sample times that of its class. counts: (K,) samples by class, by default all."""
        d = torch.from_numpy(self.weights)
        if self.class_weight is None:
            return d
        counts = self._counts() if counts is None else counts
        by_class = class_weights(self.class_weight, counts)
        assert by_class is not None
        return d * by_class[torch.from_numpy(self.y.astype(np.int64))]

    def _counts(self) -> Tensor:
        return torch.from_numpy(np.bincount(self.y.astype(np.int64), self.weights, self.num_classes))

    def system(self, d: Tensor) -> dual_ridge.DualSystem:
        """Return the system of the current samples with the weights d (n,)."""
        free, root = self.intercept == "free", d.sqrt()
        product = np.zeros((len(d), len(d)), order="F")
        for _, part, _ in self._parts(d):
            if isinstance(part, np.ndarray):
                product = dsyrk(1.0, part.T, beta=1.0, c=product, trans=1, overwrite_c=1)
            else:
                G = torch.from_numpy((part @ part.T).toarray())
                product += (dual_ridge.centred(G, d) if free else G).numpy()
        K = torch.from_numpy(product.T).mul_(root).mul_(root[:, None])
        Y = (self.targets() - self._centre(d)) * root[:, None]
        u = root / d.sum().sqrt() if free else torch.zeros_like(root)
        return dual_ridge.DualSystem(K, Y, u, root, self.n - len(d))

    def _centre(self, d: Tensor) -> Tensor:
        """The weighted mean of the targets (outputs,); zeros without an intercept. d: (n,)."""
        Y = self.targets()
        return d @ Y / d.sum() if self.intercept == "free" else torch.zeros_like(Y[0])

    def _parts(self, d: Tensor) -> Iterator[tuple[Any, Any, Array]]:
        """Yield columns as an index, their float64 values, and their means (zeros without an intercept).

        Dense values are centred, sparse values are not. Columns of a sparse matrix that are more than half full are treated as
        dense. Without centring, a large mean would cost the digits of the differences between rows.
        """
        share = (d / d.sum()).numpy() * (self.intercept == "free")

        def centred(values: Array) -> tuple[Array, Array]:
            out = values.astype(np.float64)
            out *= self.unit
            mean: Array = share @ out
            out -= mean
            out -= share @ out  # what rounding left of the mean
            return out, mean

        rows = self.rows
        if not isinstance(rows, np.ndarray):
            full = rows.getnnz(axis=0) > rows.shape[0] / 2
            sparse = rows[:, ~full].astype(np.float64, copy=False) * self.unit
            yield ~full, sparse, share @ sparse
            if full.any():
                yield full, *centred(rows[:, full].toarray())
            return
        for a in range(0, self.in_features, CENTRED_COLUMNS):
            some = slice(a, a + CENTRED_COLUMNS)
            yield some, *centred(rows[:, some])

    def _solve(self) -> tuple[Tensor, Tensor]:
        """Bring w (J, K) and b (K,) up to date."""
        if self._solved is None:
            if not len(self.y):
                raise NotFittedError("no samples are held: call fit or partial_fit first")
            d = self._importance()
            system = self.system(d)
            if self.chooses_rho and self.n >= LEAST_SAMPLES:
                self._rho, alpha = self._choose(system)
            else:
                self._rho = 1.0 if self.chooses_rho else self._rho
                alpha, regular = dual_ridge.solve(system, self._rho)
                if not regular:
                    warnings.warn(
                        f"rho={self._rho!r} is below the rounding of this system: it was solved by eigenvalues, without those "
                        "that are zero but for rounding",
                        NumericalWarning,
                        stacklevel=2,
                    )
            beta = (alpha * system.root[:, None]).numpy()
            w, mean = np.empty((self.in_features, beta.shape[1])), np.empty(self.in_features)
            for columns, part, means in self._parts(d):
                w[columns], mean[columns] = part.T @ beta, means
            self._solved = torch.from_numpy(w), self._centre(d) - torch.from_numpy(mean @ w)
        return self._solved

    def _choose(self, system: dual_ridge.DualSystem) -> tuple[float, Tensor]:
        """Choose rho by GCV among powers of two around the mean eigenvalue, and return its alpha (n, K) as well.

        If several values are nearly equally good, the largest is chosen.
        """
        mean = float(system.K.diagonal().sum()) / self.in_features
        unit = 2.0 ** max(math.frexp(mean)[1], LEAST_EXPONENT) if mean > 0 else 1.0  # squares of rho stay in range
        rhos = torch.tensor([2.0**k for k in range(LOWEST_POWER, HIGHEST_POWER + 1)], dtype=torch.float64)
        system.K.mul_(1.0 / unit)
        errors, alphas, band = dual_ridge.gcv_path(system, rhos)
        best = int((errors <= errors.amin() * (1.0 + TIE_TOLERANCE)).nonzero().amax())
        return float(rhos[best]) * unit, band.rotate_back(alphas[best]).mul_(1.0 / unit)

    def select_rho(self, rhos: Any = None, method: str = "gcv") -> RhoPath:
        """Choose rho among values (None: 100 around the scale of the data) by ``"gcv"`` or ``"loo"``, and keep it."""
        checks.one_of(method, "selection", ("gcv", "loo"))
        d = self._importance()
        system = self.system(d)
        values = (
            default_values(system.K.diagonal(), self.in_features) if rhos is None else check_rhos(rhos, self.device)
        )
        if method == "gcv":
            errors = dual_ridge.gcv_path(system, values)[0]
        else:
            errors = torch.zeros_like(values)
            for rows, weights in self._left_out_weights():
                errors += dual_ridge.left_out_errors(self.system(weights), values)[:, rows] @ (d / d.sum())[rows]
        path = RhoPath(best_of(values, errors), values, errors, None, method)
        self._rho, self.chooses_rho = path.rho, False
        self._forget_solution()
        return path

    def _left_out_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield samples (m,) and the weights (n,) of all samples if one of these m is left out, which changes class weights."""
        if not isinstance(self.class_weight, str):
            yield torch.arange(len(self.y)), self._importance()
            return
        y, counts = torch.from_numpy(self.y.astype(np.int64)), self._counts()
        for k in y.unique().tolist():
            for copies in np.unique(self.weights[self.y == k]).tolist():
                fewer = counts.clone()
                fewer[k] -= copies
                rows = ((y == k) & (torch.from_numpy(self.weights) == copies)).nonzero()[:, 0]
                d = self._importance(fewer)
                if float(fewer[k]) == 0.0:  # the class is empty then: any weight gives the same leave-one-out score
                    d[rows] = 1.0
                yield rows, d

    # -- reading -------------------------------------------------------------------------------------------------------

    def __call__(self, x: Any) -> Tensor:
        """Scores (B, K) of rows (B, J), dense or sparse."""
        w, b = self._solve()
        return torch.from_numpy(np.ascontiguousarray(as_array(x) @ w.numpy())) + b

    def predict_proba(self, x: Any) -> Tensor:
        """Return probabilities (B, K), always calibrated on the leave-one-out scores of the current samples."""
        if self._calibration is None:
            classes = self.kind == "classes"
            labels = torch.from_numpy(self.y.astype(np.int64 if classes else np.bool_))
            method, weights = self.calibration or ("temperature" if classes else None), torch.from_numpy(self.weights)
            self._calibration = fit(self.left_out_scores(), labels, weights, method)
        return self._calibration(self(x))

    def left_out_scores(self) -> Tensor:
        """Scores (n, K) of the current samples, each by a head that never saw the sample, in the order of addition."""
        rho, scores = self.rho, self.targets()
        for rows, weights in self._left_out_weights():
            try:
                residuals = dual_ridge.left_out(self.system(weights), rho)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                raise ValueError(
                    f"rho={rho!r} is below the rounding of this system: leave-one-out needs a larger one"
                ) from None
            scores[rows] -= residuals[rows]
        return scores

    def leave_one_out(self, x: Any, y: Any) -> Tensor:
        """Return scores (B, K) of samples of this head, each by a head without it. Raises ValueError for other samples."""
        places, order = self._places(), []
        for i, key in enumerate(self._keys_of(as_array(x), as_array(y))):
            if key not in places:
                raise ValueError(f"leave-one-out needs samples that are held: row {i} is not")
            copies = places[key]
            order.append(copies.pop(0) if len(copies) > 1 else copies[0])
        return self.left_out_scores()[order]


def as_array(values: Any) -> Any:
    """Convert a tensor to an array, and return anything else unchanged."""
    return values.numpy() if isinstance(values, Tensor) else values


def stack_rows(parts: list[Any]) -> Any:
    """Rows one below the other, dense or sparse."""
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    from scipy.sparse import csr_matrix, vstack

    return vstack([csr_matrix(part) for part in parts], format="csr")


def hashed_rows(rows: Any, y: Array) -> list[bytes]:
    """A hash of each row with its label or targets."""
    if isinstance(rows, np.ndarray):
        parts = (row.astype(np.float64).tobytes() for row in rows)
    else:
        data, at = rows.data.astype(np.float64), rows.indices.astype(np.int64)
        parts = (data[a:b].tobytes() + at[a:b].tobytes() for a, b in itertools.pairwise(rows.indptr))
    return row_keys(parts, np.ascontiguousarray(y, dtype=np.float64))
