"""Compare time and memory of LSSVMClassifier, RidgeClassifier and LinearSVC on few samples with many features.

    OMP_NUM_THREADS=1 python recipes/benchmarks/wide.py            # n = 4,000 rows of J = 20,000, and tf-idf of SMS messages
    OMP_NUM_THREADS=1 python recipes/benchmarks/wide.py --quick    # a fifth of it in each direction

Each fit runs in its own process and reports the peak memory of that process, which includes the data. The recipe prints
wall-clock seconds and processor seconds. On a shared machine, processor seconds are the better measure. The SMS messages come
from the folder that TORCHLSSVM_DATA names and are skipped without it.

docs/benchmarks/wide.md says which method to use when.
"""

from __future__ import annotations

import argparse
import gzip
import multiprocessing
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np


def random_rows(n: int, J: int) -> tuple[Any, Any]:
    """Two classes that differ in the first ten columns."""
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((n, J)), np.arange(n) % 2
    X[:, :10] += 0.3 * y[:, None]
    return X, y


def messages(folder: Path) -> tuple[list[str], Any]:
    """SMS messages, and whether each is spam."""
    with gzip.open(folder / "sms_spam" / "SMSSpamCollection.tsv.gz", "rt", encoding="utf-8") as file:
        pairs = [line.rstrip("\n").split("\t", 1) for line in file if "\t" in line]
    return [text for _, text in pairs], np.array([label == "spam" for label, _ in pairs], dtype=np.int64)


def make(name: str) -> Any:
    """Make an estimator by its name in the table."""
    from sklearn.linear_model import RidgeClassifier
    from sklearn.svm import LinearSVC

    from torchlssvm.sklearn import LSSVMClassifier

    return {
        "RidgeClassifier(1)": lambda: RidgeClassifier(alpha=1.0),
        "LSSVMClassifier(1)": lambda: LSSVMClassifier(rho=1.0),
        "LSSVMClassifier()": LSSVMClassifier,
        "LSSVMClassifier(1, grid=None)": lambda: LSSVMClassifier(rho=1.0, grid=None),
        "LinearSVC()": LinearSVC,
    }[name]()


def measure(name: str, data: str, size: tuple[int, int], pipe: Any) -> None:
    """Fit one estimator; send seconds, gigabytes and accuracy."""
    if data == "random":
        X, y = random_rows(*size)
        test, truth = X[:200], y[:200]
    else:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.model_selection import train_test_split

        texts, labels = messages(Path(os.environ["TORCHLSSVM_DATA"]))
        train, held, y, truth = train_test_split(texts, labels, test_size=0.25, random_state=0, stratify=labels)
        words = TfidfVectorizer(sublinear_tf=True).fit(texts)
        X, test = words.transform(train), words.transform(held)
    model = make(name)
    start, used = time.perf_counter(), time.process_time()
    model.fit(X, y).predict(test[:1])
    seconds, processor = time.perf_counter() - start, time.process_time() - used
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    accuracy = float(model.score(test, truth))
    pipe.send({"seconds": seconds, "processor": processor, "gigabytes": memory, "accuracy": accuracy, "shape": X.shape})


def main(arguments: list[str] | None = None) -> dict[str, dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="use a fifth of the rows and columns")
    quick = parser.parse_args(arguments).quick
    size = (800, 4_000) if quick else (4_000, 20_000)
    names = ("RidgeClassifier(1)", "LSSVMClassifier(1)", "LSSVMClassifier()", "LSSVMClassifier(1, grid=None)")
    runs = [("random", name) for name in names]
    if os.environ.get("TORCHLSSVM_DATA"):
        runs += [("tf-idf of SMS", name) for name in ("LinearSVC()", *names)]
    context, results = multiprocessing.get_context("spawn"), {}
    print("| data | estimator | n, J | seconds | of the processor | GB | accuracy, % |\n|---|---|---|---|---|---|---|")
    for data, name in runs:
        here, there = context.Pipe(False)
        process = context.Process(target=measure, args=(name, data, size, there))
        process.start()
        there.close()
        found = results[f"{data} {name}"] = here.recv()
        process.join()
        n, J = found["shape"]
        print(
            f"| {data} | `{name}` | {n:,}, {J:,} | {found['seconds']:.1f} | {found['processor']:.1f} | "
            f"{found['gigabytes']:.2f} | "
            f"{100 * found['accuracy']:.1f} |",
            flush=True,
        )
    return results


if __name__ == "__main__":
    main()
