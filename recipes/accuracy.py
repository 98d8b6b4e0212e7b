"""Compare the accuracy of the heads with logistic regression, ridge and a linear SVM, and time the removal of samples.

    python recipes/accuracy.py                        # everything; tables: docs/benchmarks/margin_head.md
    python recipes/accuracy.py --only cifar covtype
    python recipes/accuracy.py --quick                # scikit-learn's digits, seconds; needs no data

The data sets are CIFAR-10 and photos of ants and bees (hymenoptera) as features of a pretrained MobileNetV2, MNIST as pixels
and as 2,000 random features, SMS spam as hashed n-grams, and covtype. They come from the folder that TORCHLSSVM_DATA names.
Features of networks are kept in the cache of recipes/pretrained_head.py. Some data sets are subsets (SAMPLES; ``--samples``
sets other sizes), so that the other methods, each of which is fitted 16 times, finish in minutes.

Every method chooses its regularization on the training set alone. Ridge heads use GCV (leave-one-out if samples are few).
Margin heads, LinearSVC and LogisticRegressionCV use the accuracy on three folds, and RidgeClassifierCV uses leave-one-out. The
methods of scikit-learn get standardized features (SMS: rows of length 1).

- ``fit`` is the time to choose the regularization and to fit.
- ``refit`` is the time to fit with the chosen value, on the training set without the removed samples.
- ``remove 1`` and ``remove 100`` are the times in which the head removes samples and computes its weights.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from torchlssvm import LSSVMHead, MarginHead
from torchlssvm.features import RandomReLU
from torchlssvm.functional.row_normalization import normalized

FOLDS = 3
VALUES = 10.0 ** np.arange(-4, 1)
"""Shares of the mean eigenvalue of the training features (centred, as they are solved) that margin heads try as rho."""

RIVAL_C = 10.0 ** np.arange(-4, 1)
"""Values of C for LogisticRegressionCV and LinearSVC, on standardised features."""

READY: dict[str, dict[str, str]] = {
    "": {}, ", l2": {"normalize": "l2"}, ", sqrt": {"normalize": "sqrt"}, ", std": {"scale": "std"},
    ", sqrt + std": {"normalize": "sqrt", "scale": "std"},
}  # fmt: skip
"""Feature options of a head, by the name they have in the table."""


SAMPLES = {"cifar": 10000, "mnist": 4000, "mnist, 2,000 random features": 3000, "covtype": 10000}
"""Samples for training, at most; of the other data sets all."""


class Data(NamedTuple):
    """Training and test features and labels. ``usual`` says how scikit-learn's features are prepared, "std" or "l2"."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    usual: str = "std"

    @property
    def classes(self) -> int:
        """K."""
        return int(self.y.max()) + 1


def folder() -> Path:
    """Folder of the data sets."""
    root = os.environ.get("TORCHLSSVM_DATA")
    if not root:
        raise SystemExit("TORCHLSSVM_DATA is not set: it names the folder with the data sets (--quick needs none)")
    return Path(root).expanduser()


def digits(samples: int) -> Data:
    """Read scikit-learn's digits."""
    from sklearn.datasets import load_digits

    x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    test = torch.arange(len(y)) % 4 == 3
    return Data(x[~test][:samples].float(), y[~test][:samples], x[test].float(), y[test])


def cifar(samples: int) -> Data:
    """Extract MobileNetV2's features of 10,000 + 2,000 pictures of CIFAR-10, enlarged to 96 pixels."""
    from pretrained_head import features

    x, y, x_test, y_test = features()
    return Data(x[:samples], y[:samples], x_test, y_test)


def hymenoptera(samples: int) -> Data:
    """Extract MobileNetV2's features of photographs of ants and bees."""
    from pretrained_head import features

    x, y, x_test, y_test = features(folder=str(folder() / "hymenoptera"), size=224)
    return Data(x[:samples], y[:samples], x_test, y_test)


def mnist(samples: int) -> Data:
    """Read MNIST's pixels, from 0 to 1."""
    parts = []
    for split in ("train", "t10k"):
        for name, offset in (("images-idx3", 16), ("labels-idx1", 8)):
            raw = gzip.decompress((folder() / "mnist" / f"{split}-{name}-ubyte.gz").read_bytes())
            parts.append(torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=offset))
    x, x_test = parts[0].view(-1, 784)[:samples] / 255.0, parts[2].view(-1, 784) / 255.0
    return Data(x, parts[1][:samples].long(), x_test, parts[3].long())


def mnist_lifted(samples: int) -> Data:
    """Lift MNIST's pixels to 2,000 random features."""
    data, lift = mnist(samples), RandomReLU(784, 2000)
    return Data(lift(data.x), data.y, lift(data.x_test), data.y_test)


def sms(samples: int) -> Data:
    """Hash words and pairs of words of SMS messages to 2,000 columns; every fourth message is for testing."""
    from sklearn.feature_extraction.text import HashingVectorizer

    text = gzip.decompress(next((folder() / "sms_spam").glob("*.gz")).read_bytes()).decode()
    pairs = [line.split("\t", 1) for line in text.rstrip("\n").split("\n")]
    hashed = HashingVectorizer(n_features=2000, ngram_range=(1, 2), norm=None, alternate_sign=False)
    x = torch.from_numpy(hashed.transform([words for _, words in pairs]).toarray()).float()
    y = torch.tensor([int(label == "spam") for label, _ in pairs])
    test = torch.arange(len(y)) % 4 == 3
    return Data(x[~test][:samples], y[~test][:samples], x[test], y[test], "l2")


def covtype(samples: int) -> Data:
    """Draw samples of covtype and 20,000 others for testing, in a random order that is always the same."""
    with gzip.open(folder() / "covtype" / "covtype.data.gz") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.int16))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[: samples + 20000]]
    x, y = table[:, :54].float(), table[:, 54].long() - 1
    return Data(x[:samples], y[:samples], x[samples:], y[samples:])


DATA: dict[str, Callable[[int], Data]] = {
    "cifar": cifar, "mnist": mnist, "mnist, 2,000 random features": mnist_lifted, "sms": sms, "covtype": covtype,
    "hymenoptera": hymenoptera,
}  # fmt: skip


class Head:
    """A head of this library, ridge or margin, with feature options."""

    exact = True

    def __init__(self, kind: str, options: dict[str, str]):
        self.kind, self.options = kind, options

    def make(self, data: Data, rho: float) -> Any:
        """Make an empty head."""
        made = LSSVMHead if self.kind == "ridge" else MarginHead
        return made(data.x.shape[1], data.classes, rho=rho, **self.options)

    def fit(self, data: Data) -> float:
        """Choose rho, learn, and return rho."""
        if self.kind == "ridge":
            self.head = self.make(data, 1.0).add(data.x, data.y)
            few = len(data.x) < 2 * data.x.shape[1]  # generalized cross-validation is too sure of itself then
            self.head.select_rho(method="loo", x=data.x, y=data.y) if few else self.head.select_rho()
        else:
            values = [float(v) * mean_eigenvalue(data.x, self.options) for v in VALUES]
            self.head = self.make(data, values[0]).add(data.x, data.y)
            self.head.select_rho(values, folds=FOLDS)
        _ = self.head.w
        return float(self.head.rho)

    def predict(self, x: Tensor) -> Tensor:
        """Classes (n,)."""
        classes: Tensor = self.head.predict(x)
        return classes

    def refit(self, data: Data, rho: float) -> None:
        """Learn from scratch."""
        _ = self.make(data, rho).add(data.x, data.y).w

    def remove(self, x: Tensor, y: Tensor) -> None:
        """Unlearn samples and compute the weights."""
        _ = self.head.remove(x, y).w


class Rival:
    """An estimator of scikit-learn, which is refitted to remove samples."""

    exact = False

    def __init__(self, kind: str):
        self.kind = kind

    def make(self, C: float | None) -> Any:
        """Make an estimator that chooses its regularization, or one with a given value."""
        from sklearn import linear_model, svm
        from sklearn.model_selection import GridSearchCV

        if self.kind == "LogisticRegressionCV":
            if C is not None:
                return linear_model.LogisticRegression(C=C, max_iter=1000)
            return linear_model.LogisticRegressionCV(
                Cs=RIVAL_C, cv=FOLDS, max_iter=1000, l1_ratios=(0,), use_legacy_attributes=False
            )
        if self.kind == "RidgeClassifierCV":
            return (
                linear_model.RidgeClassifierCV(10.0 ** np.arange(-1, 6))
                if C is None
                else linear_model.RidgeClassifier(C)
            )
        if C is not None:
            return svm.LinearSVC(C=C, dual=False, tol=1e-6, max_iter=10000)
        return GridSearchCV(svm.LinearSVC(dual=False, tol=1e-2), {"C": RIVAL_C}, cv=FOLDS, refit=False)

    def ready(self, data: Data) -> tuple[Any, Any]:
        """Prepare training and test features."""
        from sklearn.preprocessing import StandardScaler

        if data.usual == "l2":
            return normalized(data.x.double(), "l2").numpy(), normalized(data.x_test.double(), "l2").numpy()
        scaler = StandardScaler().fit(data.x.numpy())
        return scaler.transform(data.x.numpy()), scaler.transform(data.x_test.numpy())

    def fit(self, data: Data) -> float:
        """Choose C, learn, and return C (for ridge, alpha)."""
        x, self.x_test = self.ready(data)
        model = self.make(None).fit(x, data.y.numpy())
        if self.kind == "LinearSVC":
            C = float(model.best_params_["C"])
            model = self.make(C).fit(x, data.y.numpy())
        else:
            C = float(model.alpha_ if self.kind == "RidgeClassifierCV" else np.ravel(model.C_)[0])
        self.model = model
        return C

    def predict(self, x: Tensor) -> Tensor:
        """Classes (n,) of the test set."""
        del x
        return torch.from_numpy(self.model.predict(self.x_test))

    def refit(self, data: Data, C: float) -> None:
        """Learn from scratch."""
        self.make(C).fit(self.ready(data)[0], data.y.numpy())


def mean_eigenvalue(x: Tensor, options: dict[str, str]) -> float:
    """Mean eigenvalue of the Gram matrix that a head with these options would solve with."""
    if options.get("scale") == "std":
        return float(len(x))
    x = normalized(x.double(), options.get("normalize"))
    return float((x - x.mean(0)).square().sum() / x.shape[1])


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the time and the result of a call."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def methods(only: Sequence[str]) -> dict[str, Head | Rival]:
    """All methods by name, or those whose name begins with one of ``only``."""
    out: dict[str, Head | Rival] = {
        kind + name: Head(kind, options) for kind in ("ridge", "margin") for name, options in READY.items()
    }
    out |= {kind: Rival(kind) for kind in ("LogisticRegressionCV", "RidgeClassifierCV", "LinearSVC")}
    return {name: method for name, method in out.items() if not only or name.startswith(tuple(only))}


def measure(method: Head | Rival, data: Data) -> dict[str, float]:
    """Fit, score, and remove 1 and then 100 samples. Times are in seconds."""
    took, value = seconds(lambda: method.fit(data))
    right = float((method.predict(data.x_test) == data.y_test).double().mean())
    out = {"accuracy": 100 * right, "value": value, "fit": took}
    rest = data._replace(x=data.x[1:], y=data.y[1:])
    out["refit"], _ = seconds(lambda: method.refit(rest, value))
    if isinstance(method, Head):
        for count, rows in ((1, slice(0, 1)), (100, slice(1, 101))):
            out[f"remove {count}"], _ = seconds(lambda rows=rows: method.remove(data.x[rows], data.y[rows]))
        fresh = method.make(data, value)
        fresh.statistics.decide("labels", method.head.grid)
        out["same"] = float(fresh.add(data.x[101:], data.y[101:]).digest() == method.head.digest())
    return out


def line(name: str, found: dict[str, float]) -> str:
    """One line of the table."""
    cells = [f"{found['accuracy']:.2f}", f"{found['value']:.3g}", f"{found['fit']:.2f}", f"{found['refit']:.2f}"]
    for count in (1, 100):
        removed = found.get(f"remove {count}", found["refit"])
        cells.append(
            f"{removed:.3f}" + (f" ({found['refit'] / removed:.0f}x)" if f"remove {count}" in found else " (refit)")
        )
    return f"| {name} | {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, dict[str, float]]]:
    """Print a table for each data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(DATA), default=list(DATA))
    parser.add_argument(
        "--methods", nargs="+", default=[], help="only methods whose names begin with one of these, e.g. ridge Logistic"
    )
    parser.add_argument("--samples", type=int, help="largest number of training samples (default: SAMPLES)")
    parser.add_argument("--quick", action="store_true", help="use scikit-learn's digits")
    parser.add_argument("--out", type=Path, help="write all figures to this file, one JSON object per line")
    o = parser.parse_args(argv)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, load in {"digits": digits}.items() if o.quick else [(n, DATA[n]) for n in o.only]:
        data = load(o.samples or SAMPLES.get(name, 10000))
        error = 100 * (0.25 / len(data.y_test)) ** 0.5
        print(f"\n{name}: {len(data.x):,} samples, {data.x.shape[1]:,} features, {data.classes} classes;")
        print(f"{len(data.y_test):,} samples for testing, standard error of an accuracy at most {error:.1f}\n")
        print("| method | accuracy, % | rho, C or alpha | fit, s | refit, s | remove 1, s | remove 100, s |")
        print("|---|---|---|---|---|---|---|")
        results[name] = {}
        for what, method in methods(o.methods).items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # rivals that stop before they converge say so each time
                found = results[name][what] = measure(method, data)
            print(line(what, found), flush=True)
            if o.out is not None:
                with open(o.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"data": name, "method": what} | found) + "\n")
    return results


if __name__ == "__main__":
    main()
