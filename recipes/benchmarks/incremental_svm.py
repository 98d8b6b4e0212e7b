"""Compare the incremental SVM with refits of scikit-learn's SVC on the CPU, as ratios from one run.

    OMP_NUM_THREADS=1 python recipes/benchmarks/incremental_svm.py            # about a minute
    OMP_NUM_THREADS=1 python recipes/benchmarks/incremental_svm.py --quick    # digits at n = 500 only
    OMP_NUM_THREADS=1 python recipes/benchmarks/incremental_svm.py --only "digits 1797"    # one data set
    OMP_NUM_THREADS=1 python recipes/benchmarks/incremental_svm.py --classes                # ten classes of digits
    OMP_NUM_THREADS=1 python recipes/benchmarks/incremental_svm.py --scale 5000 10000 20000 50000    # a quarter of an hour

Digits (even against odd) and breast cancer come with scikit-learn. Ringnorm, Splice and German are read from the folder that
TORCHLSSVM_DATA names, if it is set. The kernel is RBF with gamma = 1 / (J var(x)), and SVC has its default tolerance. Times
are medians of processor seconds; for single samples they are means, because removals need different numbers of events. The two
sides of a comparison alternate.

``--classes`` adds and removes single samples of 2,000 digits (203 of them are noisy copies) in OneVsRest and OneVsOne with ten
classes. It compares them with two ways to refit SVC: one fit of all pairs, and ten fits of one class against the rest.

``--scale`` fits the given numbers of samples of CoverType (class 2 against the others, columns standardized, RBF, C = 1), and
a problem in which every sample is a margin vector. SVC runs at its default tolerance and at 1e-6.
"""

from __future__ import annotations

import argparse
import copy
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.svm import SVC

from torchlssvm import IncrementalSVM, OneVsOne, OneVsRest
from torchlssvm.kernels import RBF

SINGLE = 40  # samples added, and support vectors removed, one at a time
REFIT = 10  # so many, and a refit beside them: after each it would measure caches that the refit has emptied


def sets(quick: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name: features and labels 0, 1."""
    x, y = load_digits(return_X_y=True)
    out = {f"digits {n}": (x[:n] / 16, y[:n] % 2) for n in ((500,) if quick else (500, 1000, 1797))}
    x, y = load_breast_cancer(return_X_y=True)
    out["breast cancer"] = ((x - x.mean(0)) / x.std(0), y)
    folder = Path(os.environ.get("TORCHLSSVM_DATA", ""))
    if quick or not (folder / "ringnorm").is_dir():
        return out
    table = np.loadtxt(folder / "ringnorm/ringnorm.csv.gz", delimiter=",", skiprows=1)[:2000]
    out["ringnorm 2000"] = (table[:, :-1], (table[:, -1] > 0).astype(int))
    table = np.loadtxt(folder / "german/german_numeric.csv.gz", delimiter=",", skiprows=1)
    out["german"] = ((table[:, :-1] - table[:, :-1].mean(0)) / table[:, :-1].std(0), (table[:, -1] > 1).astype(int))
    table = np.loadtxt(folder / "splice/splice.csv.gz", delimiter=",", skiprows=1)
    some = np.random.RandomState(0).permutation(len(table))[:1000]
    one_hot = np.concatenate([table[some, :-1] == k for k in (1, 2, 3, 4)], 1).astype(float)
    out["splice 1000"] = (one_hot, (table[some, -1] > 0).astype(int))
    return out


def seconds(call: Callable[[], object]) -> float:
    """Processor seconds."""
    start = time.process_time()
    call()
    return time.process_time() - start


class Case:
    """One data set and one C."""

    def __init__(self, x: np.ndarray, y: np.ndarray, C: float):
        self.x, self.y, self.C, self.gamma = x, y, C, 1 / (x.shape[1] * x.var())
        self.tx, self.ty = torch.from_numpy(x.copy()), torch.from_numpy(y.copy()).long()

    def svc(self, keep: np.ndarray | slice = slice(None), C: float | None = None) -> SVC:
        return SVC(C=C or self.C, gamma=self.gamma).fit(self.x[keep], self.y[keep])

    def machine(self) -> IncrementalSVM:
        return IncrementalSVM(RBF(gamma=self.gamma), C=self.C)

    def run(self) -> dict[str, str]:
        n = len(self.y)
        small = self.machine().fit(self.tx[:400], self.ty[:400])  # warm up
        small.remove(small.add(self.tx[400:440], 1 - self.ty[400:440], method="path"), method="path")
        self.machine().fit(self.tx, self.ty)
        fits = [(seconds(self.svc), seconds(lambda: self.machine().fit(self.tx, self.ty))) for _ in range(5)]
        svm = self.machine().fit(self.tx, self.ty)
        refit = median(a for a, _ in fits)
        out = {"S/E": f"{len(svm.margin)}/{len(svm.error)}", "refit ms": f"{refit * 1e3:.1f}"}
        out["fit"] = f"{median(b for _, b in fits) / refit:.1f}"
        out["add"], out["remove"], out["us/event"] = self.single()
        out["batch 50"] = self.batch(50)
        out["C x 2"] = self.change_of_C()
        support = int((svm.alpha > 0).sum())
        loo = median(seconds(svm.leave_one_out) for _ in range(3))
        early = median(seconds(lambda: svm.leave_one_out(early_exit=True)) for _ in range(3))
        drop = [np.delete(np.arange(n), i) for i in svm.margin[:6].tolist()]
        without = median(seconds(lambda keep=keep: self.svc(keep)) for keep in drop)
        out["loo/sv"] = f"{without * support / loo:.0f} ({without * support / early:.0f})"
        out["loo/all"] = f"{without * n / loo:.0f} ({without * n / early:.0f})"
        out["kkt"] = f"{svm.kkt_violation():.0e}"
        return out

    def single(self) -> tuple[str, str, str]:
        """Adding one sample and removing one support vector against a refit, means, a refit after every tenth; us an event."""
        svm = self.machine().fit(self.tx[:-SINGLE], self.ty[:-SINGLE])

        def each(work: Callable[[int], object], items: list[int]) -> tuple[float, float]:
            """Mean seconds of a refit and of one item; a clock read for each item would be a tenth of an addition."""
            parts = [items[first : first + REFIT] for first in range(0, len(items), REFIT)]
            times = [(seconds(lambda part=part: [work(i) for i in part]), seconds(self.svc)) for part in parts]
            return mean(refit for _, refit in times), sum(part for part, _ in times) / len(items)

        n = len(self.y)
        refit, add = each(lambda i: svm.add(self.tx[i : i + 1], self.ty[i : i + 1]), list(range(n - SINGLE, n)))
        added = refit / add
        support, events = svm.ids[svm.alpha > 0], svm.events
        chosen = support[torch.linspace(0, len(support) - 1, min(SINGLE, len(support))).long()].tolist()
        refit, remove = each(lambda i: svm.remove([i]), chosen)
        return (
            f"{added:.0f}",
            f"{refit / remove:.1f}",
            f"{remove * len(chosen) / max(1, svm.events - events) * 1e6:.0f}",
        )

    def batch(self, k: int) -> str:
        start = self.machine().fit(self.tx[:-k], self.ty[:-k])
        times = []
        for _ in range(3):
            svm = copy.deepcopy(start)
            times.append((seconds(self.svc), seconds(lambda svm=svm: svm.add(self.tx[-k:], self.ty[-k:]))))
        return f"{median(a / b for a, b in times):.1f}"

    def change_of_C(self) -> str:
        start = self.machine().fit(self.tx, self.ty)
        times = []
        for _ in range(3):
            svm = copy.deepcopy(start)
            refit = seconds(lambda: self.svc(C=2 * self.C))
            times.append((refit, seconds(lambda svm=svm: svm.set_C(2 * self.C))))
        return f"{median(a / b for a, b in times):.1f}"


def growth(largest: int) -> None:
    """Time of an event for growing n and |S|, and of single samples compared with a refit, on Gaussian data (J = 5)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(largest + SINGLE, 5, generator=generator, dtype=torch.float64)
    y = (x[:, :2].square().sum(1) + 0.3 * torch.randn(len(x), generator=generator) > 1.5).long()
    print("\n     n    |S|    |E|  us/event  refit ms  fit  add one ms  remove one ms   add  remove")
    n = 500
    while n <= largest:
        case = Case(x[:n].numpy(), y[:n].numpy(), 1.0)
        case.gamma = 0.2
        refit = median(seconds(case.svc) for _ in range(3))
        svm = case.machine()
        fit = seconds(lambda svm=svm, n=n: svm.fit(x[:n], y[:n]))
        adds, removals = [], []
        for i in range(n, n + SINGLE):
            adds.append(seconds(lambda i=i, svm=svm: svm.add(x[i : i + 1], y[i : i + 1])))
        events, support = svm.events, svm.ids[svm.alpha > 0]
        for i in support[torch.linspace(0, len(support) - 1, SINGLE).long()].tolist():
            removals.append(seconds(lambda i=i, svm=svm: svm.remove([i])))
        each = sum(removals) / max(1, svm.events - events)
        sizes = (
            f"{n:6d} {len(svm.margin):6d} {len(svm.error):6d} {each * 1e6:9.0f} {refit * 1e3:9.0f} {fit / refit:4.1f}"
        )
        times = f"{mean(adds) * 1e3:11.2f} {mean(removals) * 1e3:14.2f} {refit / mean(adds):5.0f} {refit / mean(removals):7.1f}"
        print(f"{sizes} {times}", flush=True)
        n *= 2


def classes() -> None:
    """Single samples in OneVsRest and OneVsOne of ten classes against refits; kernel values of a fit against n^2."""
    x, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    more = rng.integers(0, len(y), 2000 + SINGLE - len(y))
    x = np.concatenate([x / 16, np.clip(x[more] / 16 + 0.1 * rng.normal(size=(len(more), 64)), 0, 1)])
    y, n = np.concatenate([y, y[more]]), 2000
    tx, ty, gamma = torch.from_numpy(x), torch.from_numpy(y), 1 / (64 * x.var())
    print("            machine   C   fit s  kernel values / n^2  add ms  remove ms  SVC pairs ms  10 SVC ms")
    for kind in (OneVsRest, OneVsOne):
        for C in (1.0, 10.0):
            many = kind(IncrementalSVM(RBF(gamma=gamma), C=C), 10)
            fit = seconds(lambda many=many: many.add(tx[:n], ty[:n]))
            values = many._gram.computed / n**2
            times: list[list[float]] = [[], [], [], []]
            for first in range(n, n + SINGLE, REFIT):
                some = range(first, first + REFIT)
                times[0].append(
                    seconds(lambda some=some, many=many: [many.add(tx[i : i + 1], ty[i : i + 1]) for i in some]) / REFIT
                )
                gone = [[i] for i in many.ids[torch.linspace(0, n - 1, REFIT).long()].tolist()]
                times[1].append(seconds(lambda gone=gone, many=many: [many.remove(i) for i in gone]) / REFIT)
                times[2].append(seconds(lambda C=C: SVC(C=C, gamma=gamma).fit(x[:n], y[:n])))
                times[3].append(seconds(lambda C=C: [SVC(C=C, gamma=gamma).fit(x[:n], y[:n] == k) for k in range(10)]))
            add, remove, pairs, rest = (1e3 * mean(part) for part in times)
            print(
                f"{kind.__name__:>19} {C:3g} {fit:7.2f} {values:20.2f} {add:7.2f} {remove:10.2f} {pairs:13.1f} {rest:10.1f}",
                flush=True,
            )


def cover_type(n: int) -> Case:
    """Return the given number of samples of CoverType, and SINGLE more."""
    file = Path(os.environ.get("TORCHLSSVM_DATA", "")) / "covtype/covtype.data.gz"
    if not file.is_file():
        raise SystemExit("--scale needs covtype/covtype.data.gz in the folder that TORCHLSSVM_DATA names")
    table = np.loadtxt(file, delimiter=",", dtype=np.int16)
    table = table[np.random.RandomState(0).permutation(len(table))[: n + SINGLE]]
    x = table[:, :54].astype(float)
    spread = x.std(0)
    return Case((x - x.mean(0)) / np.where(spread > 0, spread, 1.0), (table[:, 54] == 2).astype(int), 1.0)


def all_margin(n: int) -> Case:
    """Random labels of samples that are far apart, so that every coefficient is strictly between 0 and C."""
    rng = np.random.default_rng(0)
    return Case(rng.normal(size=(n + SINGLE, 50)), rng.integers(0, 2, n + SINGLE), 100.0)


def fits(name: str, case: Case, single: bool) -> None:
    """Compare a fit with two fits of SVC, and add and remove single samples."""
    n = len(case.y) - SINGLE
    small = case.machine().fit(case.tx[:1500], case.ty[:1500])  # warm up
    small.remove(small.add(case.tx[1500:1540], 1 - case.ty[1500:1540], method="path"), method="path")
    svm, before = case.machine(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fit = seconds(lambda: svm.fit(case.tx[:n], case.ty[:n]))
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    sets_of = f"{len(svm.margin)}/{len(svm.error)}"
    row = f"{name:>14} {n:6d} {sets_of:>12} {fit:8.2f} {memory:9.0f}"
    if single:
        adds = [seconds(lambda i=i: svm.add(case.tx[i : i + 1], case.ty[i : i + 1])) for i in range(n, n + SINGLE)]
        support = svm.ids[svm.alpha > 0]
        chosen = support[torch.linspace(0, len(support) - 1, SINGLE).long()].tolist()
        removals = [seconds(lambda i=i: svm.remove([i])) for i in chosen]
        for times in (adds, removals):
            row += f" {mean(times) * 1e3:8.1f} {max(times) * 1e3:8.1f}"
    else:
        row += " " * 36
    print(row, end="", flush=True)
    for tol in (1e-3, 1e-6):
        model = SVC(C=case.C, gamma=case.gamma, tol=tol)
        refit = seconds(lambda model=model: model.fit(case.x[:n], case.y[:n]))
        print(f" {refit:9.2f} {fit / refit:6.2f}", end="", flush=True)
    print()


def scale(sizes: list[int]) -> None:
    columns = ("add ms", "largest", "rem. ms", "largest")
    print(f"{'data':>14} {'n':>6} {'S/E':>12} {'fit s':>8} {'MiB more':>9}", *(f"{c:>8}" for c in columns), end="")
    print(f" {'SVC 1e-3':>9} {'ratio':>6} {'SVC 1e-6':>9} {'ratio':>6}", flush=True)
    for n in sizes:
        fits("covtype", cover_type(n), single=True)
    fits("all in S", all_margin(4096), single=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run only a small part")
    parser.add_argument("--only", metavar="NAME", help="run only this data set")
    parser.add_argument("--classes", action="store_true", help="measure ten classes of digits instead")
    parser.add_argument(
        "--scale", type=int, nargs="+", metavar="N", help="measure fits with these numbers of samples instead"
    )
    options = parser.parse_args()
    quick = options.quick
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s).")
    if options.scale or options.classes:
        scale(options.scale) if options.scale else classes()
        return
    print("Columns with no unit are ratios: how many times")
    print(
        "faster than refitting SVC; fit: how many times slower; loo: without (with) the early exits of Algorithm 2.\n"
    )
    head = False
    for name, (x, y) in sets(quick).items():
        if options.only not in (None, name):
            continue
        for C in (1.0, 10.0):
            row = {"data": name, "C": f"{C:g}"} | Case(x, y, C).run()
            if not head:
                print("".join(f"{k:>14}" for k in row))
                head = True
            print("".join(f"{v:>14}" for v in row.values()), flush=True)
    if options.only is None:
        growth(1000 if quick else 8000)


if __name__ == "__main__":
    main()
