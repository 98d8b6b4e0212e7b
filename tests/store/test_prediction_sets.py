"""Prediction sets contain the right class as often as stated, before and after an erasure; loaders go wherever batches go."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchlssvm import Replace, attach
from torchlssvm.functional.conformal import misfit

LEVELS = (0.8, 0.9, 0.95)


def classifier(J: int, K: int, folder: Path, **options: Any) -> Any:
    """A classifier of features: its network does nothing."""
    return attach(nn.Identity(), K, in_features=J, store=folder, **options)


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(x)[order].float(), torch.from_numpy(y)[order]


def check_coverage(clf: Any, x: Tensor, y: Tensor, held: int) -> None:
    """The share of right sets is within four standard deviations of the level, for samples and threshold both drawn."""
    for level in LEVELS:
        sets = clf.predict_set(x, level)
        coverage = float(sets.gather(1, y[:, None]).double().mean())
        spread = math.sqrt(level * (1 - level) * (1 / len(y) + 1 / held))
        assert abs(coverage - level) <= 4 * spread, (level, coverage)


@pytest.mark.parametrize("options", [{}, {"rule": "lda"}, {"class_weight": "balanced"}])
def test_coverage_on_digits_before_and_after_an_erasure(tmp_path: Path, options: dict[str, Any]) -> None:
    x, y = digits()
    clf = classifier(64, 10, tmp_path / "store", **options)
    ids = [f"s{i}" for i in range(900)]
    clf.add(x[:900], y[:900], ids=ids, subjects=[f"u{i % 9}" for i in range(900)])
    check_coverage(clf, x[900:], y[900:], 900)
    clf.remove(subject="u3")
    check_coverage(clf, x[900:], y[900:], 800)
    never = classifier(64, 10, tmp_path / "never", **options)
    rest = [i for i in range(900) if i % 9 != 3]
    never.add(x[rest], y[rest], ids=[ids[i] for i in rest])
    never.store.refresh()
    clf.store.refresh()
    assert torch.equal(clf.predict_set(x[900:], 0.9), never.predict_set(x[900:], 0.9))


def test_the_threshold_is_the_quantile_of_retrained_heads(tmp_path: Path) -> None:
    x, y = digits()
    clf = classifier(64, 10, tmp_path / "store", rho=1.0, grid=16.0)
    clf.add(x[:60], y[:60], ids=[f"s{i}" for i in range(60)])
    own = []
    for i in range(60):
        rest = [k for k in range(60) if k != i]
        head = type(clf.head)(64, 10, rho=1.0, grid=16.0).add(x[rest], y[rest])
        own.append(float(misfit(head(x[i : i + 1]))[0, y[i]]))
    q = sorted(own)[math.ceil(0.8 * 61) - 1]
    expected = misfit(clf(x[60:200])) <= q
    assert torch.equal(clf.predict_set(x[60:200], 0.8), expected)


CHANGES: dict[str, Any] = {
    "a number for rho": lambda clf: clf.store.set_rho(3e3),
    "a rule for rho": lambda clf: clf.store.set_rho("gcv"),
    "rho of the head": lambda clf: setattr(clf.head, "rho", 3e3),
    "a rule of the head": lambda clf: setattr(clf.head, "rho", "gcv"),
    "class weights": lambda clf: clf.store.set_class_weight([1.0] * 9 + [30.0]),
    "other features": lambda clf: clf.store.apply(Replace(ids=["s0"], x=torch.full((1, 64), 8.0))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_sets_follow_every_change_of_the_head(tmp_path: Path, name: str) -> None:
    x, y = digits()
    ids = [f"s{i}" for i in range(200)]
    clf = classifier(64, 10, tmp_path / "store", rho=1.0, grid=16.0, per_class=True)
    clf.add(x[:200], y[:200], ids=ids)
    old = clf.predict_set(x[200:])
    CHANGES[name](clf)
    new = clf.predict_set(x[200:])
    fresh = classifier(64, 10, tmp_path / "fresh", rho=1.0, grid=16.0, per_class=True)
    fresh.add(x[:200], y[:200], ids=ids)
    CHANGES[name](fresh)
    assert torch.equal(new, fresh.predict_set(x[200:]))
    assert not torch.equal(new, old)


def test_rejected_samples_have_no_single_class(tmp_path: Path) -> None:
    x, y = digits()
    clf = classifier(64, 10, tmp_path / "store")
    clf.add(x[:500], y[:500], ids=[f"s{i}" for i in range(500)])
    sets, classes = clf.predict_set(x[500:], 0.99), clf.predict_set(x[500:], 0.99, reject=True)
    sure = sets.sum(1) == 1
    assert 0 < int(sure.sum()) < len(sure)
    assert torch.equal(classes[sure], clf.predict(x[500:])[sure])
    assert bool((classes[~sure] == -1).all())


def test_what_prediction_sets_cannot_do(tmp_path: Path) -> None:
    x, y = digits()
    without = attach(nn.Identity(), 10, in_features=64).add(x[:50], y[:50])
    with pytest.raises(ValueError, match="store"):
        without.predict_set(x)
    clf = classifier(64, 10, tmp_path / "store")
    clf.add(x[:9], y[:9], ids=[f"s{i}" for i in range(9)])
    assert bool(clf.predict_set(x[:5], 0.95).all())  # too few samples for this level: every class is possible
    with pytest.raises(ValueError, match="level"):
        clf.predict_set(x, 90)


@pytest.fixture
def pictures() -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4))
    x, y = torch.randn(40, 1, 8, 8), torch.arange(40) % 3
    x += y[:, None, None, None]
    return attach(network, 3, classes=["ant", "bee", "cat"]).add(x, y), x, y


def unlabelled(x: Tensor) -> DataLoader[Any]:
    return DataLoader(x, batch_size=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["labelled", "unlabelled", "dicts", "list", "generator"])
def test_loaders_go_wherever_batches_go(pictures: tuple[Any, Tensor, Tensor], kind: str) -> None:
    clf, x, y = pictures
    clf.calibrate(x, y)

    def loader() -> Any:
        return {
            "labelled": DataLoader(TensorDataset(x, y), batch_size=7),
            "unlabelled": unlabelled(x),
            "dicts": [{"image": a, "label": b} for a, b in zip(x.split(7), y.split(7), strict=True)],
            "list": list(zip(x.split(7), y.split(7), strict=True)),
            "generator": (part for part in x.split(7)),
        }[kind]

    assert torch.equal(clf.predict(loader()), clf.predict(x))
    assert clf.predict(loader(), names=True) == [["ant", "bee", "cat"][k] for k in clf.predict(x).tolist()]
    assert torch.allclose(clf.features(loader()), clf.features(x), atol=1e-5)
    assert torch.allclose(clf.predict_proba(loader()), clf.predict_proba(x), atol=1e-5)
    with pytest.raises(ValueError, match="no batch"):
        clf.predict(iter(()))


def test_confusion_matrix_and_single_pictures(pictures: tuple[Any, Tensor, Tensor], tmp_path: Path) -> None:
    clf, x, y = pictures
    counts = clf.confusion_matrix(DataLoader(TensorDataset(x, y), batch_size=7), plot=tmp_path / "confusion.png")
    assert torch.equal(counts, clf.confusion_matrix(x, y))
    assert int(counts.diagonal().sum()) / len(y) == clf.score(x, y)
    assert counts.sum(1).tolist() == y.bincount(minlength=3).tolist()
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert clf.predict(x[0]).tolist() == clf.predict(x[:1]).tolist()
    with pytest.raises(ValueError, match="labels"):
        clf.confusion_matrix(x, y + 1)


def test_first_guesses_of_a_newcomer(pictures: tuple[Any, Tensor, Tensor], tmp_path: Path) -> None:
    clf, x, y = pictures
    with pytest.raises(ValueError, match=r"add\(x, y\)"):
        clf.fit(x, y)
    with pytest.raises(ValueError, match="list of names"):
        attach(nn.Linear(4, 3), 3, classes="abc")  # type: ignore[arg-type]
    stored = classifier(4, 2, tmp_path / "store", classes=["ant", "bee"])
    stored.add(torch.randn(20, 4), torch.arange(20) % 2, ids=[f"s{i}" for i in range(20)])
    assert stored.add_classes("fox").classes == ["ant", "bee", "fox"]
    for value in (math.nan, math.inf, -math.inf):
        bad = torch.randn(3, 4)
        bad[1, 2] = value
        with pytest.raises(ValueError, match="1"):
            stored.predict_set(bad)
    for call in (lambda: stored.remove(ids=[]), lambda: stored.remove(subject=[])):
        with pytest.raises(ValueError, match="is empty"):
            call()
    found = stored.store.label_errors()
    assert len(repr(found).splitlines()) <= 10
