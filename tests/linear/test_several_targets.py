"""Several labels for each sample, and numbers: dense solves, scikit-learn and retraining are the truth."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import make_multilabel_classification
from sklearn.linear_model import Ridge, RidgeClassifier
from sklearn.metrics import f1_score as their_f1
from sklearn.metrics import multilabel_confusion_matrix
from sklearn.metrics import r2_score as their_r2
from torch import Tensor

from tests.support.dense import ridge
from torchlssvm import (
    Add,
    CompactLSSVMHead,
    FixedPoint,
    LSSVMHead,
    MarginHead,
    NotFittedError,
    NumericalWarning,
    RemovalError,
    Replace,
    SampleStore,
    attach,
    verify,
)
from torchlssvm.analysis.label_errors import LabelPairErrors, find_label_errors
from torchlssvm.functional.several_targets import confusion_by_label, f1_score, f1_thresholds, r2_score
from torchlssvm.linear.attach import AttachedClassifier

J, K, N = 7, 4, 150
GRID = FixedPoint(8.0)
X = torch.randn(N, J, generator=torch.Generator().manual_seed(0)).double().clamp(-8, 8)
NOISE = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).double()
LABELS = X[:, :K] + 0.5 * NOISE > torch.tensor([0.0, 0.5, 1.0, 1.5])
NUMBERS = X[:, :K] * 3 + NOISE
IDS = [f"s{i}" for i in range(N)]
MODES = {"multilabel": LABELS, "regression": NUMBERS}


def make(targets: str, **options: Any) -> LSSVMHead:
    return LSSVMHead(J, K, **{"rho": 2.0, "grid": GRID, "targets": targets} | options)


def coded(targets: str, y: Tensor) -> Tensor:
    return 2.0 * y.double() - 1.0 if targets == "multilabel" else y


# -- weights and predictions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("intercept", ["free", "penalized", "none"])
@pytest.mark.parametrize("targets", MODES)
def test_weights_are_those_of_a_dense_solve_for_each_output(targets: str, intercept: str) -> None:
    y = MODES[targets]
    head = make(targets, intercept=intercept, target_grid=FixedPoint(64.0, 26) if targets == "regression" else "auto")
    w, b = ridge(GRID.snap(X), coded(targets, y), 2.0, intercept)
    head.add(X[:100], y[:100]).add(X[100:], y[100:])
    torch.testing.assert_close(head.w, w, rtol=0, atol=1e-6)
    torch.testing.assert_close(head.b, b, rtol=0, atol=1e-6)


def test_answers_of_scikit_learn() -> None:
    head = make("multilabel", grid=None).add(X, LABELS)
    theirs = RidgeClassifier(alpha=2.0).fit(X.numpy(), LABELS.long().numpy())
    np.testing.assert_allclose(head(X).numpy(), theirs.decision_function(X.numpy()), atol=1e-10)
    predicted = head.predict(X)
    assert predicted.dtype == torch.bool
    np.testing.assert_array_equal(predicted.numpy(), theirs.predict(X.numpy()))
    numbers = make("regression", grid=None).add(X, NUMBERS)
    np.testing.assert_allclose(
        numbers.predict(X).numpy(), Ridge(2.0).fit(X.numpy(), NUMBERS.numpy()).predict(X.numpy())
    )
    one = LSSVMHead(J, 1, rho=2.0, grid=None, targets="regression").add(X, NUMBERS[:, 0])
    assert one.predict(X).shape == (N,)
    np.testing.assert_allclose(one.predict(X).numpy(), numbers.predict(X)[:, 0].numpy(), atol=1e-10)


def test_measures_are_those_of_scikit_learn() -> None:
    predicted = LABELS.roll(3, 0) | LABELS
    predicted[:, 3] = False
    for y in (LABELS, LABELS & (torch.arange(K) != 3)):  # also a label that neither occurs nor is predicted
        for average in ("micro", "macro"):
            mine = f1_score(y, predicted, average)
            assert mine == pytest.approx(their_f1(y, predicted, average=average, zero_division=0), abs=1e-15)
        np.testing.assert_array_equal(confusion_by_label(y, predicted), multilabel_confusion_matrix(y, predicted))
    with pytest.raises(ValueError, match="average"):
        f1_score(LABELS, predicted, "weighted")
    constant = torch.cat([NUMBERS, torch.ones(N, 1)], 1)
    for moved in (constant, constant + 0.1):
        assert r2_score(constant, moved) == pytest.approx(their_r2(constant, moved), abs=1e-12)


def test_thresholds() -> None:
    """The best of all thresholds that tell scores apart, found by trying them; equal scores stay together."""
    scores = (make("multilabel").add(X, LABELS).leave_one_out(X, LABELS) * 8).round() / 8  # many are equal
    chosen = f1_thresholds(scores, LABELS)
    for k in range(K):
        values = scores[:, k].unique()
        tried = [f1_score(LABELS[:, k : k + 1], scores[:, k : k + 1] > t) for t in [-99.0, *values.tolist()]]
        mine = f1_score(LABELS[:, k : k + 1], scores[:, k : k + 1] > chosen[k])
        assert mine == pytest.approx(max(tried))
    constant = torch.stack([torch.zeros(N), torch.ones(N)], 1)
    assert f1_thresholds(scores[:, :2], constant).tolist() == [0.0, 0.0]
    head = make("multilabel").add(X, LABELS)
    assert torch.equal(head.predict(X, chosen), head(X) > chosen)
    assert torch.equal(head.predict(X, 0.25), head(X) > 0.25)
    for bad in ([0.0], [0.0] * 3 + [float("nan")], "high"):
        with pytest.raises((ValueError, TypeError)):
            head.predict(X, bad)
    with pytest.raises(ValueError, match="multilabel"):
        make("regression").add(X, NUMBERS).predict(X, 0.5)


# -- exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", MODES)
def test_removed_is_never_added(targets: str) -> None:
    y = MODES[targets]
    options = {"target_grid": FixedPoint(64.0)} if targets == "regression" else {}
    never = make(targets, **options).add(X[20:], y[20:])
    head = make(targets, **options).add(X[:60], y[:60]).add(X[60:], y[60:]).remove(X[:20], y[:20])
    assert head.digest() == never.digest()
    wrong = y[[0]].clone()
    wrong[0, 1] = not wrong[0, 1]
    with pytest.raises(RemovalError):
        head.remove(X[20:21], wrong)
    head.relabel(X[20:21], y[20:21], wrong).replace(X[21:22], y[21:22], X[:1], y[:1])
    other = make(targets, **options).add(torch.cat([X[20:21], X[:1], X[22:]]), torch.cat([wrong, y[:1], y[22:]]))
    assert head.digest() == other.digest()
    torch.testing.assert_close(head.w, other.w)
    merged = make(targets, **options).add(X[:70], y[:70])
    merged += make(targets, **options).add(X[70:], y[70:])
    assert merged.digest() == make(targets, **options).add(X, y).digest()
    head.clear()
    assert head.digest() == make(targets, **options).digest()


@pytest.mark.parametrize("grid", [8.0, None])
@pytest.mark.parametrize("targets", MODES)
def test_removals_that_no_targets_allow_are_refused_without_row_hashes(targets: str, grid: float | None) -> None:
    given = {"target_grid": 16.0} if targets == "regression" else {}
    rare = LABELS & (torch.arange(N) < 1)[:, None]  # at most one sample has each label
    y = NUMBERS.clamp(-5, 5) if targets == "regression" else rare
    head = make(targets, membership=False, grid=grid, **given).add(X, y)
    never = torch.full_like(y[:60], 15.0) if targets == "regression" else torch.ones_like(y[:60])
    before = head.w.clone()
    with pytest.raises(RemovalError):
        head.remove(X[:60], never)
    assert torch.equal(head.w, before)
    for i in range(N - 1):
        head.remove(X[i : i + 1], y[i : i + 1])
    assert head.n == 1
    few = make(targets, membership=False, grid=8.0, **given).add(X[: J + 1], y[: J + 1])
    with pytest.raises(RemovalError):  # the targets of so few samples depend on the features
        few.remove(X[:1], never[:1])


def test_integers_are_exact() -> None:
    y = torch.randint(-1000, 1000, (N, 2), generator=torch.Generator().manual_seed(0))
    head = LSSVMHead(J, 2, grid=GRID, targets="regression").add(X, y)
    step = head.statistics.target_grid.resolution  # type: ignore[union-attr]
    assert (head.statistics.V[-1].double() * step).tolist() == y.sum(0).tolist()


def test_targets_lost_to_their_grid_are_reported() -> None:
    scales = torch.tensor([1e6, 0.05], dtype=torch.float64)
    large, small = (1.7e9 + 100 * X[:, :1]), X[:, :2] * scales
    with pytest.warns(NumericalWarning, match="Column 0 of y"):
        LSSVMHead(J, 1, targets="regression").add(X, large)
    with pytest.warns(NumericalWarning, match="Column 1 of y"):
        LSSVMHead(J, 2, targets="regression").add(X, small)
    head = LSSVMHead(J, 1, targets="regression").add(X, small[:, 0])
    for later in (small[:, 1], torch.full((N,), 0.05)):
        with pytest.warns(NumericalWarning, match="target_grid"):
            head.add(X[: len(later)], later)
    with pytest.warns(NumericalWarning, match="Column 1 of y"):
        LSSVMHead(J, 2, targets="regression", target_grid=FixedPoint(2.0**23, 26)).add(X, small)
    one_by_one = LSSVMHead(J, 1, targets="regression")
    for i in range(2):
        one_by_one.add(X[i : i + 1], large[i : i + 1] + 3000 * i)
    with pytest.warns(NumericalWarning, match="Column 0 of y"):
        one_by_one.add(X[2:3], large[2:3])
    with warnings.catch_warnings():  # whole steps, zeros, equal numbers and float64 sums lose nothing
        warnings.simplefilter("error")
        make("regression").add(X, NUMBERS).add(X[:1], NUMBERS[:1] * 0 + 1e-6).add(
            X[:2], torch.tensor([[0.3], [0.1 + 0.2]], dtype=torch.float64).expand(2, K)
        )
        head.add(X[:3], torch.tensor([4, 8, 12])).add(X[:3], torch.zeros(3))
        LSSVMHead(J, 1, targets="regression", grid=None).add(X, large)


@pytest.mark.parametrize("targets", MODES)
@pytest.mark.parametrize("grouped", [False, True])
def test_leave_one_out_is_retraining(targets: str, grouped: bool) -> None:
    y, groups = MODES[targets], torch.arange(N) // 3 if grouped else None
    scores = make(targets, grid=None).add(X, y).leave_one_out(X, y, groups=groups)
    for i in (0, 40, N - 1):
        rest = (torch.arange(N) // 3 != i // 3) if grouped else (torch.arange(N) != i)
        w, b = ridge(X[rest], coded(targets, y[rest]), 2.0)
        torch.testing.assert_close(scores[i], X[i] @ w + b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("targets", MODES)
def test_influence_is_retraining(targets: str) -> None:
    y, val = MODES[targets], slice(100, N)
    head = make(targets, grid=None).add(X[:100], y[:100])
    change = head.influence(X[:3], y[:3], X[val], y[val])
    for i in range(3):
        w, b = ridge(X[:100][torch.arange(100) != i], coded(targets, y[:100])[torch.arange(100) != i], 2.0)
        after = (X[val] @ w + b - coded(targets, y[val])).square().mean()
        before = (head(X[val]) - coded(targets, y[val])).square().mean()
        assert float(change[i]) == pytest.approx(float(after - before), abs=1e-9)
    with pytest.raises(ValueError, match="loss"):
        head.influence(X[:3], y[:3], X[val], y[val], on="accuracy")


@pytest.mark.parametrize("grid", [GRID, None])
def test_new_labels_are_those_that_nobody_had(grid: FixedPoint | None) -> None:
    none = torch.cat([LABELS, torch.zeros(N, 2, dtype=torch.bool)], 1)
    head = make("multilabel", grid=grid).add(X, LABELS).add_classes(2)
    start = LSSVMHead(J, K + 2, rho=2.0, grid=grid, targets="multilabel").add(X, none)
    assert head.add_classes(0).num_classes == K + 2
    if grid is not None:
        assert head.digest() == start.digest()
    torch.testing.assert_close(head.w, start.w)
    head.remove(X[:9], none[:9])
    torch.testing.assert_close(head.w, start.remove(X[:9], none[:9]).w, rtol=0, atol=1e-9)


# -- probabilities and label errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [None, "platt", "isotonic"])
def test_probabilities_are_one_map_for_each_label(method: str | None) -> None:
    """Each column is calibrated as a head of two classes would calibrate it; see the tests of the maps."""
    head = make("multilabel").add(X, LABELS)
    with pytest.raises(NotFittedError):
        head.predict_proba(X)
    clipped = head.predict_proba(X, calibrated=False)
    torch.testing.assert_close(clipped, ((1 + head(X)) / 2).clamp(0, 1), rtol=0, atol=1e-8)
    p = head.calibrate(X, LABELS, method).predict_proba(X)
    assert p.shape == (N, K)
    for k in range(K):
        two = LSSVMHead(J, 2, rho=2.0, grid=GRID).add(X, LABELS[:, k].long()).calibrate(X, LABELS[:, k].long(), method)
        expected = two.predict_proba(X)[:, 1]
        torch.testing.assert_close(p[:, k], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(copy.deepcopy(head).predict_proba(X), p)
    with pytest.raises(NotFittedError):
        head.remove(X[:1], LABELS[:1]).predict_proba(X)
    with pytest.raises(ValueError, match="platt"):
        head.calibrate(X[1:], LABELS[1:], "temperature")


def test_wrong_pairs_are_found() -> None:
    features, y = (
        torch.from_numpy(part) for part in make_multilabel_classification(400, 12, n_classes=5, random_state=0)
    )
    signal = torch.cat([features, 6.0 * y], 1)
    given, wrong = y.clone(), [(7, 0), (7, 3), (50, 2), (200, 4)]
    for i, k in wrong:
        given[i, k] = 1 - given[i, k]
    head = LSSVMHead(17, 5, targets="multilabel").add(signal, given)
    found = find_label_errors(head, signal, given, ids=range(400))
    assert isinstance(found, LabelPairErrors)
    assert sorted(map(tuple, found.order[:4].tolist())) == wrong
    events = found.events(4)
    assert {event.ids: event.y.long().tolist() for event in events} == {
        (str(i),): y[i : i + 1].tolist() for i in (7, 50, 200)
    }
    assert {(i, k) for i, k, _ in found.names(4)} == set(wrong)
    assert "5" not in repr(found).splitlines()[0].split(":")[0]
    assert len(repr(found).splitlines()) <= 7
    assert found.pred_probs.shape == (400, 5)
    assert find_label_errors(head, signal, given, lift=200).order.shape == (2000, 2)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_is_no_label_is_refused() -> None:
    head = make("multilabel").add(X, LABELS)
    before = head.digest()
    bad: list[Any] = [
        2.0 * LABELS - 1, NUMBERS, LABELS * 0.5, LABELS[:, 0], LABELS[:, :2], LABELS[:, 0].long(), LABELS[:-1],
        torch.where(LABELS, torch.nan, 1.0),
    ]  # fmt: skip
    for y in bad:
        with pytest.raises(ValueError, match=r"multilabel|length"):
            head.add(X, y)
    for same in (LABELS, LABELS.long(), LABELS.float(), LABELS.numpy(), LABELS.tolist()):
        head.add(X, same).remove(X, LABELS)
    assert head.digest() == before
    with pytest.raises(ValueError, match="regression"):
        make("regression").add(X, torch.arange(N) % K)


def test_measures_refuse_what_add_refuses() -> None:
    nan, signs = NUMBERS.clone(), 2.0 * LABELS - 1
    nan[3, 1] = torch.nan
    numbers = make("regression").add(X, NUMBERS)
    labels = make("multilabel").add(X, LABELS)
    clf = attach(torch.nn.Identity(), K, numbers, in_features=J)
    for judge in (
        lambda: r2_score(nan, NUMBERS), lambda: r2_score(NUMBERS, nan), lambda: clf.score(X, nan),
        lambda: clf.score(X, torch.where(nan.isnan(), torch.inf, nan)), lambda: numbers.influence(X[:2], NUMBERS[:2], X, nan),
        lambda: f1_thresholds(nan, LABELS),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="NaN or inf"):
            judge()
    for judge in (
        lambda: f1_score(signs, LABELS), lambda: f1_score(LABELS, signs), lambda: confusion_by_label(nan, LABELS),
        lambda: f1_thresholds(NUMBERS, signs), lambda: labels.influence(X[:2], LABELS[:2], X, signs),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="multilabel"):
            judge()
    for judge in (
        lambda: f1_score(LABELS[:, :1], LABELS), lambda: r2_score(NUMBERS[:, 0], NUMBERS),
        lambda: f1_thresholds(NUMBERS, LABELS[:, 0]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="shape"):
            judge()


def test_a_preview_refuses_labels_that_are_none(tmp_path: Any) -> None:
    with SampleStore(tmp_path / "labels", head=make("multilabel")) as store:
        store.apply(Add(ids=IDS, x=X, y=LABELS))
        for y in (2.0 * LABELS - 1, LABELS[:, :1], LABELS[:, 0]):
            with pytest.raises(ValueError, match=r"multilabel|shape"):
                store.preview([], X, y)
    with SampleStore(tmp_path / "classes", head=LSSVMHead(J, 2, grid=GRID)) as store:
        y = LABELS[:, 0].long()
        store.apply(Add(ids=IDS, x=X, y=y))
        with pytest.raises(ValueError, match="shape"):
            store.preview([], X, y[:, None])
        assert store.preview([], X, y.tolist()).accuracy_before == store.preview([], X, y).accuracy_before


@pytest.mark.parametrize("targets", MODES)
@pytest.mark.parametrize("stored", [False, True])
def test_a_name_is_no_label_of_a_row(targets: str, stored: bool, tmp_path: Any) -> None:
    """Even if there is one label or number, where the number of the class, 0, would have a meaning of its own."""
    folder = {"store": tmp_path / "store"} if stored else {}
    clf = attach(torch.nn.Identity(), 1, targets=targets, in_features=J, classes=["sky"], grid=GRID, **folder)
    ids = {"ids": IDS[:2]} if stored else {}
    refused = [
        lambda: clf.add(X[:2], ["sky", "sky"], **ids), lambda: clf.add([(X[:2], ["sky", "sky"], IDS[:2])]),
        lambda: clf.score(X[:2], ["sky", "sky"]), lambda: clf.relabel(X[:1], ["sky"], ["sky"]),
    ]  # fmt: skip
    refused += [lambda: clf.store.labels(["sky"])] if stored else [lambda: clf.remove(X[:1], ["sky"])]
    for change in refused:
        with pytest.raises(ValueError, match=f"'sky'.*{targets}"):
            change()
    assert clf.head.n == 0


REFUSED: dict[str, Any] = {
    "pairs": {"multiclass": "ovo"},
    "the discriminant": {"rule": "lda"},
}


@pytest.mark.parametrize("targets", MODES)
@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_options_for_classes_are_refused(targets: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=targets):
        make(targets, **options)


def test_more_refusals() -> None:
    head = make("multilabel").add(X, LABELS)
    for change in (
        lambda: setattr(head, "class_weight", "balanced"),  # without sums per label
        lambda: make("regression", class_weight="balanced"),
        lambda: make("regression", per_class=True),
        lambda: setattr(head, "rule", "lda"),
        lambda: head.forget_class(0),
        lambda: make("multilabel", target_grid=4.0),
        lambda: make("several"),
        lambda: MarginHead(J, K, targets="multilabel"),
        lambda: attach(torch.nn.Linear(J, 2), K, "margin", targets="multilabel"),
        lambda: head.merge(make("regression").add(X, NUMBERS)),
        lambda: head.merge(LSSVMHead(J, K, grid=GRID).add(X, NUMBERS)),
    ):
        with pytest.raises(ValueError, match=r"targets|class_weight|rule|forget_class"):
            change()
    assert make("multilabel", rule="auto").add(X, LABELS).rule == "least_squares"
    with pytest.raises(RuntimeError, match="targets"):
        LSSVMHead(J, K, grid=GRID).load_state_dict(head.state_dict())


def test_float_targets_of_a_head_of_classes_name_no_class() -> None:
    """Until they are gone."""
    for head in (LSSVMHead(J, K, grid=GRID), CompactLSSVMHead(J, K)):
        head.add(X, LABELS.double())
        assert head(X).shape == (N, K)
        with pytest.raises(ValueError, match="float targets"):
            head.predict(X)
        head.remove(X, LABELS.double())
        y = torch.arange(N) % K
        assert head.add(X, y).predict(X).shape == (N,)


# -- attached, stored, certified ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "options"), [("multilabel", {}), ("regression", {}), ("multilabel", {"class_weight": "balanced"})]
)
def test_attached_with_a_store(targets: str, options: dict[str, Any], tmp_path: Any) -> None:
    y, names = MODES[targets], ["sky", "sea", "sand", "sun"]
    network = torch.nn.Linear(J, 9)
    clf = attach(network, K, targets=targets, store=tmp_path / "store", classes=names, grid=GRID, **options)
    clf.add(X, y, ids=IDS, subjects=[f"u{i % 10}" for i in range(N)])
    predicted = clf.predict([(X[:50], y[:50]), (X[50:], y[50:])])
    if targets == "multilabel":
        assert clf.score(X, y) == pytest.approx(their_f1(y, predicted, average="micro"))
        assert clf.score([(X, y)], average="macro") == pytest.approx(their_f1(y, predicted, average="macro"))
        np.testing.assert_array_equal(clf.confusion_matrix(X, y), multilabel_confusion_matrix(y, predicted))
        assert clf.predict(X[:5], names=True) == [
            [n for n, on in zip(names, row, strict=True) if on] for row in predicted[:5]
        ]
        assert torch.equal(clf.predict(X, thresholds=[0.5] * K), clf(X) > 0.5)
        assert clf.predict_proba(X).shape == (N, K)
        assert clf.store.apply(clf.store.label_errors().events(2))[0].applied
        assert clf.store.preview([], X, y).flips == 0
        with pytest.raises(ValueError, match="label"):
            clf.confusion_matrix(X, y, plot=tmp_path / "x.png")
        with pytest.raises(ValueError, match="multilabel"):
            clf.score(X, NUMBERS)
    else:
        assert clf.score(X, y) == pytest.approx(their_r2(y, predicted))
        for refused in (
            clf.predict_proba, lambda x: clf.predict(x, names=True), lambda x: clf.confusion_matrix(x, y),
            lambda x: clf.store.label_errors(), lambda x: clf.store.preview([], x, y),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r"regression|labels"):
                refused(X)
    with pytest.raises(ValueError, match=targets):
        clf.store.find(label=1)
    with pytest.raises(ValueError, match="several labels or numbers"):
        clf.predict_set(X)
    with pytest.raises(ValueError, match="several labels or numbers"):
        clf.add_classes(["moon"])
    clf.relabel(ids=["s0"], y_new=y[1:2])
    clf.store.apply(Replace(ids=["s1"], x=X[2:3], y=y[3:4]))
    gone = clf.remove(subject="u3")
    certificate = clf.store.certificate(gone.event_id)
    assert certificate.grid is not None
    assert certificate.grid["targets"] == targets
    chosen = clf.head.statistics.target_grid  # from samples, one of which may be erased
    if targets == "regression":
        assert certificate.grid["target_limit"] == chosen.limit.hex()
        assert certificate.scope["choices"]["target_grid"]["state"] == "kept"
    for fast in (False, True):
        assert verify(certificate, head=clf.head, store=clf.store, allow_unsigned=True, fast=fast)
    clf.store.recompute(fast=True)
    clf.store.compact()
    clf.save(tmp_path / "clf.pt")
    scores, digest = clf(X), clf.head.digest()
    clf.store.close()
    with SampleStore(tmp_path / "store") as store:
        assert store.head.targets == store.stats()["targets"] == targets
        assert store.head.digest() == digest == store.recompute()[1]
        truth = store.relearn(type(store.head).from_config(store.head.config()))
        torch.testing.assert_close(truth(X), scores)
        kept = store.get(["s0", "s1"])
        torch.testing.assert_close(kept.y.double(), y[[1, 3]].double(), rtol=0, atol=1e-4)
    loaded = AttachedClassifier.load(tmp_path / "clf.pt", torch.nn.Linear(J, 9))
    assert loaded.targets == targets
    torch.testing.assert_close(loaded(X), scores)
    with pytest.raises(ValueError, match="targets"):
        attach(torch.nn.Linear(J, 9), K, store=tmp_path / "store", grid=GRID, targets="classes")
    assert attach(torch.nn.Linear(J, 9), K, store=tmp_path / "store").targets == targets
