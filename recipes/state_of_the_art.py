"""Compare nine methods that learn from a stream by exactness, memory, removal and time.

    OMP_NUM_THREADS=1 python recipes/state_of_the_art.py               # two tables, and state_of_the_art.png; needs matplotlib
    OMP_NUM_THREADS=1 python recipes/state_of_the_art.py --no-picture  # only the tables

Lee et al. compare these families of methods. Each is a small implementation of the idea in its paper, and none is tuned:

- support vectors only (Syed, Liu and Sung): train on the new batch and the support vectors kept so far, and forget the rest.
- weighted support vectors (Rueping): the same, with each old support vector weighted for the samples that it represents.
- combined classifiers (Wen and Lu): train one SVM for each batch, and let them vote.
- kernel recursive least squares (Engel, Mannor and Meir): keep a dictionary of samples that are not in the span of the others.
- budgeted LS-SVM (Jian, Shen, Li and Liang): keep a fixed number of samples, and drop the one with the least leave-one-out
  error.
- recursive LS-SVM (Chi and Ersoy; Hao, Yu and others): keep the inverse of the whole system, and add or remove one row at a
  time.
- exact SVM (Cauwenberghs and Poggio; Diehl and Cauwenberghs): ``IncrementalSVM``.
- LS-SVM by blocks (``KernelLSSVM``), and the linear LS-SVM from sums on a grid (``LSSVMHead``).

Every method learns half of the training samples, then the other half in batches of 25. Then it has to unlearn 40 samples, old
and new, 10 at a time. A method that cannot remove samples keeps them.

Retraining solves the method's own problem from scratch, without this library, on the remaining samples. This is the SVM for
the first three methods and the exact one, and the least-squares problem for the others. Memory is the size of the state that
the method needs to continue, that is, samples and matrices. For machines of this library it is the size of the pickle, from
which they compute their inverse again.
"""

from __future__ import annotations

import argparse
import pickle
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.svm import SVC

from torchlssvm import FixedPoint, IncrementalSVM, KernelLSSVM, LSSVMHead
from torchlssvm.kernels import RBF

Array = Any

C = 10.0
BATCH, REMOVED, REMOVED_AT_ONCE = 25, 40, 10
BUDGET = 150
"""Samples of the budgeted LS-SVM."""
NEW_DIRECTION = 1e-3
"""Squared distance from the span of the dictionary from which kernel recursive least squares takes a sample into it."""


class Stream(NamedTuple):
    """A data set in the order in which it arrives; labels are -1 and +1."""

    x: Array  # (n, J)
    y: Array  # (n,)
    gone: Array  # (REMOVED,) samples to unlearn at the end
    test: Array  # (m, J)
    test_y: Array  # (m,)
    gamma: float


def streams() -> dict[str, Stream]:
    """Read breast cancer and digits (even against odd), columns standardized or in [0, 1]."""
    cancer, digits = load_breast_cancer(return_X_y=True), load_digits(return_X_y=True)
    sets = {
        "breast cancer": ((cancer[0] - cancer[0].mean(0)) / cancer[0].std(0), 2.0 * cancer[1] - 1),
        "digits, even against odd": (digits[0] / 16, 2.0 * (digits[1] % 2) - 1),
    }
    out = {}
    for name, (x, y) in sets.items():
        rng = np.random.default_rng(0)
        order = rng.permutation(len(y))
        learn, test = np.split(order, [2 * len(y) // 3])
        gone = rng.choice(len(learn), REMOVED, replace=False)
        out[name] = Stream(x[learn], y[learn], gone, x[test], y[test], 1 / (x.shape[1] * x.var()))
    return out


def rbf(x: Array, z: Array, gamma: float) -> Array:
    """exp(-gamma |x - z|^2)."""
    squares = (x * x).sum(1)[:, None] + (z * z).sum(1) - 2 * x @ z.T
    return np.exp(-gamma * np.maximum(squares, 0))


def svm(s: Stream, keep: Array) -> Array:
    """Scores of an SVM on these samples: libsvm finds the sets, in single precision, and a dense solve is exact."""
    x, y = s.x[keep], s.y[keep]
    model = SVC(C=C, gamma=s.gamma, tol=1e-8).fit(x, y)
    alpha = np.zeros(len(y))
    alpha[model.support_] = np.abs(model.dual_coef_[0])
    Q = rbf(x, x, s.gamma) * np.outer(y, y)
    inside, error = (alpha > 0) & (alpha < C), alpha == C
    A = np.zeros((inside.sum() + 1, inside.sum() + 1))
    A[0, 1:] = A[1:, 0] = y[inside]
    A[1:, 1:] = Q[np.ix_(inside, inside)]
    right = np.append(-C * y[error].sum(), 1 - C * Q[np.ix_(inside, error)].sum(1))
    solution = np.linalg.solve(A, right)
    alpha[inside] = solution[1:]
    g = Q @ alpha + y * solution[0] - 1
    wrong = np.concatenate([-g[alpha == 0], g[error], -alpha, alpha - C])
    assert wrong.max() < 1e-9
    return rbf(s.test, x, s.gamma) @ (alpha * y) + solution[0]


def least_squares(s: Stream, keep: Array) -> Array:
    """Scores of a least-squares SVM on these samples, by a dense solve."""
    x, y = s.x[keep], s.y[keep]
    A = np.ones((len(y) + 1, len(y) + 1))
    A[0, 0], A[1:, 1:] = 0.0, rbf(x, x, s.gamma) + np.eye(len(y)) / C
    solution = np.linalg.solve(A, np.concatenate([[0.0], y]))
    return rbf(s.test, x, s.gamma) @ solution[1:] + solution[0]


def linear_least_squares(s: Stream, keep: Array) -> Array:
    """Scores of the linear least-squares SVM on these samples: rho = 1 / C, b is not penalized."""
    x, y = np.column_stack([s.x[keep], np.ones(len(keep))]), s.y[keep]
    w = np.linalg.solve(x.T @ x + np.diag([1 / C] * s.x.shape[1] + [0.0]), x.T @ y)
    return np.column_stack([s.test, np.ones(len(s.test))]) @ w


class SupportVectorsOnly:
    """Syed, Liu and Sung: keep only the support vectors of earlier batches."""

    removes, retrain, weighted = False, staticmethod(svm), False

    def __init__(self, s: Stream):
        self.s, self.seen = s, 0
        self.x, self.y = s.x[:0], s.y[:0]

    def add(self, at: Array) -> None:
        """Train on the support vectors and a batch."""
        old = len(self.y)
        x, y = np.concatenate([self.x, self.s.x[at]]), np.concatenate([self.y, self.s.y[at]])
        weight = np.ones(len(y))
        if self.weighted and old:
            weight[:old] = self.seen / old  # each old support vector stands for that many samples
        self.model = SVC(C=C, gamma=self.s.gamma).fit(x, y, sample_weight=weight)
        self.x, self.y, self.seen = x[self.model.support_], y[self.model.support_], self.seen + len(at)

    def scores(self) -> Array:
        """Decision values of the test samples."""
        return self.model.decision_function(self.s.test)

    def bytes(self) -> int:
        """Memory for samples and labels kept."""
        return int(self.x.nbytes + self.y.nbytes)


class WeightedSupportVectors(SupportVectorsOnly):
    """Rueping: errors on old support vectors count for the samples that they stand for."""

    weighted = True


class CombinedClassifiers:
    """Wen and Lu: a classifier for each batch, and a vote of all."""

    removes, retrain = False, staticmethod(svm)

    def __init__(self, s: Stream):
        self.s, self.models = s, []

    def add(self, at: Array) -> None:
        """Train on a batch alone."""
        if len(np.unique(self.s.y[at])) == 2:
            self.models.append(SVC(C=C, gamma=self.s.gamma).fit(self.s.x[at], self.s.y[at]))

    def scores(self) -> Array:
        """Mean of the votes."""
        return np.mean([np.sign(m.decision_function(self.s.test)) for m in self.models], 0)

    def bytes(self) -> int:
        """Memory for the support vectors of all classifiers."""
        return int(sum(m.support_vectors_.nbytes + m.dual_coef_.nbytes for m in self.models))


class KernelRecursiveLeastSquares:
    """Engel, Mannor and Meir: least squares on a dictionary; other samples are projected on it."""

    removes = False

    def __init__(self, s: Stream):
        self.s, self.x = s, s.x[:0]

    @staticmethod
    def retrain(s: Stream, keep: Array) -> Array:
        """Learn the remaining samples one after another."""
        model = KernelRecursiveLeastSquares(s)
        model.add(keep)
        return model.scores()

    def add(self, at: Array) -> None:
        """Learn one sample after the other."""
        for x, y in zip(self.s.x[at], self.s.y[at], strict=True):
            self._learn(x[None], float(y))

    def _learn(self, x: Array, y: float) -> None:
        own = 1.0
        if not len(self.x):
            self.x, self.K_inverse, self.P, self.a = x, np.array([[1 / own]]), np.eye(1), np.array([y / own])
            return
        k = rbf(self.x, x, self.s.gamma)[:, 0]
        c = self.K_inverse @ k
        distance, error = own - k @ c, y - k @ self.a
        if distance > NEW_DIRECTION:
            m = len(self.x)
            v = np.append(-c, 1.0)
            grown = np.zeros((m + 1, m + 1))
            grown[:m, :m] = self.K_inverse
            self.K_inverse = grown + np.outer(v, v) / distance
            self.P = np.pad(self.P, (0, 1))
            self.P[m, m] = 1.0
            self.a = np.append(self.a - c * error / distance, error / distance)
            self.x = np.concatenate([self.x, x])
        else:
            q = self.P @ c / (1.0 + c @ self.P @ c)
            self.P -= np.outer(q, c @ self.P)
            self.a = self.a + self.K_inverse @ q * error

    def scores(self) -> Array:
        """Predictions of the test samples."""
        return rbf(self.s.test, self.x, self.s.gamma) @ self.a

    def bytes(self) -> int:
        """Memory for the dictionary and two matrices."""
        return int(self.x.nbytes + self.K_inverse.nbytes + self.P.nbytes + self.a.nbytes)


class RecursiveLSSVM:
    """Chi and Ersoy; Hao and others: the inverse of K + I / C, one row and column in or out at a time."""

    removes, retrain, budget = True, staticmethod(least_squares), 10**9

    def __init__(self, s: Stream):
        self.s, self.at, self.R = s, np.zeros(0, dtype=int), np.zeros((0, 0))

    def add(self, at: Array) -> None:
        """Learn one sample after another. Above the budget, drop the sample with the least leave-one-out error."""
        for i in at:
            k = rbf(self.s.x[self.at], self.s.x[[i]], self.s.gamma)[:, 0]
            v = np.append(-self.R @ k, 1.0)
            pivot = 1.0 + 1 / C + k @ v[:-1]
            self.R = np.pad(self.R, (0, 1)) + np.outer(v, v) / pivot
            self.at = np.append(self.at, i)
            if len(self.at) > self.budget:
                self._leave(int(np.abs(self._solve()[0] / np.diag(self.R)).argmin()))

    def remove(self, at: Array) -> None:
        """Unlearn one sample after the other."""
        for i in at:
            self._leave(int(np.flatnonzero(self.at == i)[0]))

    def _leave(self, k: int) -> None:
        rest = np.delete(self.R - np.outer(self.R[k], self.R[k]) / self.R[k, k], k, 0)
        self.R, self.at = np.delete(rest, k, 1), np.delete(self.at, k)

    def _solve(self) -> tuple[Array, float]:
        h, t = self.R.sum(1), self.R @ self.s.y[self.at]
        b = t.sum() / h.sum()
        return t - b * h, float(b)

    def scores(self) -> Array:
        """Decision values of the test samples."""
        alpha, b = self._solve()
        return rbf(self.s.test, self.s.x[self.at], self.s.gamma) @ alpha + b

    def bytes(self) -> int:
        """Memory for samples, labels and the inverse."""
        return int(self.s.x[self.at].nbytes + self.s.y[self.at].nbytes + self.R.nbytes)


class BudgetedLSSVM(RecursiveLSSVM):
    """Jian, Shen, Li and Liang: an LS-SVM that keeps a fixed number of samples."""

    removes, budget = False, BUDGET


class Machine:
    """A machine of torchlssvm with ids."""

    removes = True

    def __init__(self, s: Stream, machine: Any, retrain: Any):
        self.s, self.machine, self.retrain, self.ids = s, machine, retrain, {}

    def _tensors(self, at: Array) -> tuple[Any, Any]:
        return torch.from_numpy(self.s.x[at]), torch.from_numpy((self.s.y[at] > 0).astype(np.int64))

    def add(self, at: Array) -> None:
        """Learn a batch."""
        self.ids |= dict(zip(at.tolist(), self.machine.add(*self._tensors(at)).tolist(), strict=True))

    def remove(self, at: Array) -> None:
        """Unlearn samples."""
        self.machine.remove(torch.tensor([self.ids.pop(i) for i in at.tolist()]))

    def scores(self) -> Array:
        """Decision values of the test samples."""
        with torch.no_grad():
            return self.machine(torch.from_numpy(self.s.test))[:, 1].numpy()

    def bytes(self) -> int:
        """The size of a pickle."""
        return len(pickle.dumps(self.machine))


class Head(Machine):
    """A linear head of torchlssvm, which keeps sums of features on a grid, and no samples."""

    def __init__(self, s: Stream, machine: LSSVMHead):
        super().__init__(s, machine, self._retrain)

    def _retrain(self, s: Stream, keep: Array) -> Array:
        grid = self.machine.grid
        assert isinstance(grid, FixedPoint)
        return linear_least_squares(s._replace(x=grid.snap(torch.from_numpy(s.x)).numpy()), keep)

    def add(self, at: Array) -> None:
        """Learn a batch."""
        self.machine.add(*self._tensors(at))

    def remove(self, at: Array) -> None:
        """Unlearn samples."""
        self.machine.remove(*self._tensors(at))


METHODS = {
    "support vectors only": SupportVectorsOnly,
    "weighted support vectors": WeightedSupportVectors,
    "combined classifiers": CombinedClassifiers,
    "kernel recursive least squares": KernelRecursiveLeastSquares,
    "budgeted LS-SVM": BudgetedLSSVM,
    "recursive LS-SVM": RecursiveLSSVM,
    "exact SVM (IncrementalSVM)": lambda s: Machine(s, IncrementalSVM(RBF(gamma=s.gamma), C=C), svm),
    "LS-SVM by blocks (KernelLSSVM)": lambda s: Machine(s, KernelLSSVM(RBF(gamma=s.gamma), C=C), least_squares),
    "linear LS-SVM from sums (LSSVMHead)": lambda s: Head(s, LSSVMHead(s.x.shape[1], 2, rho=1 / C)),
}


class Row(NamedTuple):
    """The results of a method at the end of a stream."""

    added: float  # largest difference to retraining before removals, as a share of the largest score
    removed: float  # the same after them
    removes: bool
    kilobytes: float
    add_ms: float  # processor time of a batch
    remove_ms: float  # of a removal of ten; NaN if it cannot
    accuracy: float  # after the removals


def run(s: Stream, method: Any) -> Row:
    """Send a stream through a method."""
    model, n = method(s), len(s.y)
    model.add(np.arange(n // 2))
    start = time.process_time()
    for first in range(n // 2, n, BATCH):
        model.add(np.arange(first, min(n, first + BATCH)))
    add = (time.process_time() - start) / len(range(n // 2, n, BATCH))

    def off(keep: Array) -> float:
        found, truth = model.scores(), np.asarray(model.retrain(s, keep))
        return float(np.abs(found - truth).max() / np.abs(truth).max())

    added, remove = off(np.arange(n)), float("nan")
    if model.removes:
        start = time.process_time()
        for first in range(0, REMOVED, REMOVED_AT_ONCE):
            model.remove(s.gone[first : first + REMOVED_AT_ONCE])
        remove = (time.process_time() - start) / (REMOVED // REMOVED_AT_ONCE)
    removed = off(np.setdiff1d(np.arange(n), s.gone))
    accuracy = float((np.sign(model.scores()) == s.test_y).mean())
    return Row(added, removed, model.removes, model.bytes() / 1024, 1e3 * add, 1e3 * remove, accuracy)


def draw(tables: dict[str, dict[str, Row]], file: Path) -> None:
    """Draw memory against the difference to retraining after the removals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(tables), figsize=(12, 4.6), sharey=True, constrained_layout=True)
    for axis, (name, rows) in zip(axes, tables.items(), strict=True):
        for k, row in enumerate(rows.values(), 1):
            color = "#0072B2" if row.removes else "#D55E00"
            axis.plot(row.kilobytes, max(row.removed, 1e-16), "o", color=color, markersize=9)
            axis.annotate(str(k), (row.kilobytes, max(row.removed, 1e-16)), (7, 5), textcoords="offset points")
        axis.set(xscale="log", yscale="log", title=name, xlabel="memory, KiB")
        axis.axhline(1e-9, color="#595959", linewidth=0.8, linestyle=":")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("difference to retraining after 40 removals")
    text = "\n".join(f"{k}  {name}" for k, name in enumerate(next(iter(tables.values())), 1))
    axes[-1].text(1.03, 0.98, text + "\n\nblue: can remove\norange: cannot", transform=axes[-1].transAxes, va="top")
    figure.savefig(file, dpi=110)


def main(arguments: list[str] | None = None) -> dict[str, dict[str, Row]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-picture", action="store_true", help="only the tables")
    parser.add_argument("--out", type=Path, default=Path(), help="the folder for the picture")
    options = parser.parse_args(arguments)
    tables: dict[str, dict[str, Row]] = {}
    for name, s in streams().items():
        print(f"\n{name}: {len(s.y)} samples, {s.x.shape[1]} features, {len(s.test_y)} to test\n")
        print(
            "| method | off when added | when removed | can remove | KiB | add 25, ms | remove 10, ms | accuracy, % |"
        )
        print("|---|---|---|---|---|---|---|---|")
        tables[name] = {}
        for method, make in METHODS.items():
            row = tables[name][method] = run(s, make)
            times = f"{row.add_ms:.1f} | {row.remove_ms:.1f}" if row.removes else f"{row.add_ms:.1f} | –"
            can = "yes" if row.removes else "no"
            off = f"{row.added:.0e} | {row.removed:.0e}"
            print(
                f"| {method} | {off} | {can} | {row.kilobytes:.0f} | {times} | {100 * row.accuracy:.1f} |", flush=True
            )
    if not options.no_picture:
        draw(tables, options.out / "state_of_the_art.png")
    return tables


if __name__ == "__main__":
    main()
