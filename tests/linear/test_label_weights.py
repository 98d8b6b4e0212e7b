"""Class weights for several labels: scikit-learn, dense solves, retraining and the digest's specification are the truth."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from tests.support.dense import ridge
from torchlssvm import FixedPoint, LSSVMHead, RemovalError
from torchlssvm.distributed.delta import Delta, merge
from torchlssvm.functional.sample_identity import fold_of
from torchlssvm.linear.column_selection import select, select_groups
from torchlssvm.linear.diagnostics.uncertainty import leverage, uncertainty
from torchlssvm.statistics import batch
from torchlssvm.statistics.sum_check import SumCheck

J, K, N, RHO = 6, 4, 400, 2.0
GRID = FixedPoint(8.0)
DRAWN = torch.Generator().manual_seed(0)
X = GRID.snap(torch.randn(N, J, generator=DRAWN).clamp(-7, 7))
Y = X[:, :K] + 0.5 * torch.randn(N, K, generator=DRAWN) > torch.tensor([0.0, 0.7, 1.5, 2.2])
IDS = [f"s{i}" for i in range(N)]
OPTIONS: dict[str, Any] = {
    "balanced": "balanced",
    "complement": "complement",
    "numbers": torch.tensor([1.0, 2.5, 0.5, 6.0], dtype=torch.float64),
}
weights = pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)


def make(option: Any = "balanced", **options: Any) -> LSSVMHead:
    return LSSVMHead(J, K, **{"rho": RHO, "grid": GRID, "targets": "multilabel", "class_weight": option} | options)


def sample_weights(y: Tensor, option: Any, k: int, times: Tensor | None = None) -> Tensor:
    """Weights (n,) of the samples for label k. y: (n, K)."""
    times = torch.ones(len(y), dtype=torch.float64) if times is None else times.double()
    positive, n = y[:, k], float(times.sum())
    count = float(times[positive].sum())
    yes, no = (float(option[k]), 1.0) if isinstance(option, Tensor) else (1.0, 1.0)
    if option == "balanced" and 0 < count < n:
        yes, no = n / (2 * count), n / (2 * (n - count))
    if option == "complement" and 0 < count < n:
        yes, no = (n - count) / n, count / n
    return times * (no + (yes - no) * positive.double())


def truth(x: Tensor, y: Tensor, option: Any, intercept: str = "free", times: Tensor | None = None) -> Any:
    """w (J, K) and b (K,), one dense solve per label."""
    found = [
        ridge(x, 2.0 * y[:, [k]].double() - 1.0, RHO, intercept, sample_weights(y, option, k, times)) for k in range(K)
    ]
    return torch.cat([w for w, _ in found], 1), torch.cat([b for _, b in found])


def assert_weights(head: LSSVMHead, expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close((head.w, head.b), expected, rtol=0, atol=1e-11)


@weights
@pytest.mark.parametrize("grid", [GRID, None])
def test_each_label_is_ridge_with_sample_weights(option: Any, grid: FixedPoint | None) -> None:
    head = make(option, grid=grid).add(X[:300], Y[:300]).add(X[300:], Y[300:])
    for k in range(K):
        theirs = Ridge(RHO, solver="cholesky")
        theirs.fit(X.numpy(), np.where(Y[:, k], 1.0, -1.0), sample_weight=sample_weights(Y, option, k).numpy())
        np.testing.assert_allclose(head(X)[:, k].numpy(), theirs.predict(X.numpy()), rtol=0, atol=1e-11)
    assert head.predict(X).dtype == torch.bool


@weights
@pytest.mark.parametrize("intercept", ["free", "penalized", "none"])
def test_dense_solves_with_copies_of_samples(option: Any, intercept: str) -> None:
    times = torch.arange(N) % 4
    head = make(option, intercept=intercept).add(X, Y, weight=times)
    assert_weights(head, truth(X, Y, option, intercept, times))
    head.remove(X[:50], Y[:50], weight=times[:50])
    assert_weights(head, truth(X[50:], Y[50:], option, intercept, times[50:]))


def test_standardized_features_and_sparse_rows() -> None:
    head = make(scale="std").add(X.to_sparse(), Y)
    x = torch.from_numpy(StandardScaler().fit_transform(X.numpy()))
    w, b = truth(x, Y, "balanced")
    torch.testing.assert_close(head(X), x @ w + b, rtol=0, atol=1e-10)
    assert head.digest() == make(scale="std").add(X, Y).digest()


def test_a_rare_label_is_found() -> None:
    plain, weighted = (make(option).add(X, Y) for option in (None, "balanced"))
    recall = [float(head.predict(X)[Y[:, 3], 3].double().mean()) for head in (plain, weighted)]
    assert recall[0] < 0.5 < 0.8 < recall[1]


# -- exactness ---------------------------------------------------------------------------------------------------------


@weights
@pytest.mark.parametrize("folds", [0, 3])
def test_removed_is_never_added(option: Any, folds: int) -> None:
    def learned(some: slice, y: Tensor = Y) -> LSSVMHead:
        return make(option, folds=folds).add(X[some], y[some], ids=IDS[some])

    head, never = learned(slice(0, N)), learned(slice(20, N))
    for i in range(0, 20, 5):  # few rows at a time
        head.remove(X[i : i + 5], Y[i : i + 5], ids=IDS[i : i + 5])
    assert head.digest() == never.digest()
    assert_weights(head, truth(X[20:], Y[20:], option))
    assert torch.equal(head.w, never.w)
    wrong = Y.clone()
    wrong[20, 1] = ~wrong[20, 1]
    with pytest.raises(RemovalError):
        head.remove(X[20:21], wrong[20:21], ids=IDS[20:21])
    head.relabel(X[20:21], Y[20:21], wrong[20:21], ids=IDS[20:21])
    assert head.digest() == learned(slice(20, N), wrong).digest()
    merged = learned(slice(20, 200), wrong)
    merged += learned(slice(200, N))
    assert merged.digest() == head.digest()
    merged -= learned(slice(200, N))
    assert merged.digest() == learned(slice(20, 200), wrong).digest()
    head.remove(X[20:], wrong[20:], ids=IDS[20:])
    assert head.digest() == make(option, folds=folds).digest()


def lower(q: np.ndarray) -> bytes:
    """The lower triangle of sum q q^T, then sum q, as the digest covers them. q: (n, J) integers."""
    products = q.T @ q
    return products[np.tril_indices(J)].astype("<i8").tobytes() + q.sum(0).astype("<i8").tobytes()


@pytest.mark.parametrize("folds", [0, 2])
def test_the_digest_can_be_rebuilt_from_the_samples(folds: int) -> None:
    head = make(folds=folds).add(X, Y, ids=IDS)
    header = {
        "bits": 20, "classes": K, "features": J, "folds": folds, "format": "torchlssvm-statistics-1", "headroom": 0,
        "kind": "values", "limit": (8.0).hex(), "per_class": True, "targets": "multilabel", "target_bits": 1,
        "target_headroom": 0, "target_limit": (1.0).hex(),
    }  # fmt: skip
    q, t = np.round(X.numpy() / GRID.resolution).astype(np.int64), np.where(Y.numpy(), 2, -2)
    z = np.concatenate([np.ones((N, 1), np.int64), t], 1)
    fold = np.array(fold_of(IDS, folds)) if folds else np.zeros(N, np.int64)
    groups = b""
    for f in range(max(1, folds)):
        mine = fold == f
        groups += hashlib.sha256(lower(q[mine]) + (z[mine].T @ z[mine]).astype("<i8").tobytes()).digest()
        for k in range(K):
            has = mine & Y[:, k].numpy()
            groups += hashlib.sha256(lower(q[has]) + np.array(has.sum()).astype("<i8").tobytes()).digest()
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    assert head.digest() == hashlib.sha256(text + groups).hexdigest()


@pytest.mark.parametrize("grid", [GRID, None])
def test_labels_that_no_sample_has_and_samples_without_labels(grid: FixedPoint | None) -> None:
    y = Y & torch.tensor([True, True, False, False])
    more = make(grid=grid, folds=2).add(X, y, ids=IDS)
    grown = LSSVMHead(J, 2, rho=RHO, grid=grid, targets="multilabel", class_weight="balanced", folds=2)
    grown.add(X, y[:, :2], ids=IDS).add_classes(2)
    if grid is not None:
        assert grown.digest() == more.digest()
    assert_weights(more, truth(X, y, "balanced"))
    torch.testing.assert_close((grown.w, grown.b), (more.w, more.b), rtol=0, atol=1e-12)
    none = torch.zeros(3, K, dtype=torch.bool)
    head = make(grid=grid).add(X[:3], none)
    assert bool((head(X[:3]) == -1).all())
    assert head.remove(X[:3], none).n == 0


def test_many_pairs_are_summed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make().add(X, Y)
    monkeypatch.setattr(batch, "PAIR_NUMBERS", 60 * J)
    assert make().add(X, Y).digest() == whole.digest()
    assert make().add(X.to_sparse(), Y).digest() == whole.digest()
    assert make().add(X, Y).remove(X[:300], Y[:300]).digest() == make().add(X[300:], Y[300:]).digest()


@pytest.mark.parametrize("group", range(K + 1))
def test_a_wrong_sum_of_a_label_is_detected(group: int) -> None:
    stats = make().add(X, Y).statistics
    check = SumCheck(stats)
    check.add(X[:250], Y[:250])
    check.add(X[250:], Y[250:])
    assert check.failure() is None
    stats.group_sums()[group][0] += 1  # the sum of squares of the first feature
    assert check.failure() is not None


def test_removals_are_tested_without_row_hashes() -> None:
    head = make(membership=False).add(X[:300], Y[:300])
    before = head.digest()
    with pytest.raises(RemovalError):
        head.remove(torch.full((1, J), 7.9), Y[:1])
    assert head.digest() == before
    assert head.remove(X[:9], Y[:9]).digest() == make().add(X[9:300], Y[9:300]).digest()


# -- options, files ----------------------------------------------------------------------------------------------------


def test_weights_can_be_set_at_any_time() -> None:
    head = make(None, per_class=True).add(X, Y)
    plain = make(None).add(X, Y)
    assert head.P.shape == (J, J)
    assert_weights(head, (plain.w, plain.b))
    for option in (*OPTIONS.values(), None):
        head.class_weight = option
        assert_weights(head, truth(X, Y, option))
        head.add(X[:2], Y[:2]).remove(X[:2], Y[:2])
        assert_weights(head, truth(X, Y, option))
        assert head.P.shape == ((J, J) if option is None else (K, J, J))
    with pytest.raises(ValueError, match="per_class"):
        plain.class_weight = "balanced"
    with pytest.raises(ValueError, match="per_class"):
        make(per_class=False)


@weights
def test_saved_and_copied(option: Any) -> None:
    head = make(option, rho="gcv").add(X, Y).calibrate(X, Y)
    loaded = make(None, per_class=True)
    loaded.load_state_dict(head.state_dict())
    built = LSSVMHead.from_config(head.config())
    built.load_state_dict(head.state_dict())
    for other in (loaded, built, pickle.loads(pickle.dumps(head)), copy.deepcopy(head)):
        assert other.digest() == head.digest()
        assert torch.equal(other.predict_proba(X), head.predict_proba(X))
        assert torch.equal(other.P, head.P)
        other.remove(X[:20], Y[:20])
        assert_weights(other.refresh(), (other._solved_anew()[0], other._solved_anew()[1]))
        other.rho = RHO
        assert_weights(other, truth(X[20:], Y[20:], option))


def test_a_delta_carries_the_sums_of_labels(tmp_path: Any) -> None:
    head, other = make().add(X[:200], Y[:200]), make().add(X[200:], Y[200:])
    with pytest.raises(ValueError, match="min_samples"):
        Delta.take(other).save(tmp_path / "d.pt", min_samples=2)  # a label may be that of a single sample
    Delta.take(other).save(tmp_path / "d.pt")
    merge(head, Delta.load(tmp_path / "d.pt"))
    assert head.digest() == make().add(X, Y).digest()
    assert_weights(head, truth(X, Y, "balanced"))


# -- diagnostics -------------------------------------------------------------------------------------------------------


@weights
@pytest.mark.parametrize("grouped", [False, True])
def test_leave_one_out_is_retraining(option: Any, grouped: bool) -> None:
    """Weights follow the counts; the last label has one sample in the first group, which leaves none."""
    y = Y.clone()
    y[:, 3] = torch.arange(N) == 1
    groups = torch.arange(N) // 4 if grouped else None
    scores = make(option).add(X, y).leave_one_out(X, y, groups=groups)
    for i in (0, 1, 57, N - 1):
        rest = (torch.arange(N) // 4 != i // 4) if grouped else (torch.arange(N) != i)
        w, b = truth(X[rest], y[rest], option)
        torch.testing.assert_close(scores[i], X[i] @ w + b, rtol=0, atol=1e-9)


def test_equal_weights_are_no_weights() -> None:
    """All diagnostics that read one matrix per label, against those that read the shared one."""
    ones, plain = (make(option, folds=3).add(X, Y, ids=IDS) for option in (torch.ones(K), None))
    rhos = [0.1, 1.0, 10.0, 100.0]
    for method, samples in (("gcv", {}), ("loo", {"x": X, "y": Y}), ("kfold", {})):
        mine, shared = (head.select_rho(rhos, method, apply=False, **samples) for head in (ones, plain))
        torch.testing.assert_close(mine.errors, shared.errors, rtol=1e-9, atol=0)
    torch.testing.assert_close(ones.leave_one_out(X, Y), plain.leave_one_out(X, Y), rtol=0, atol=1e-11)
    torch.testing.assert_close(leverage(ones, X), leverage(plain, X))
    found = select(make(torch.ones(K)).add(X, Y), {"two": [0, 1], "four": [0, 1, 2, 3]})
    assert found.best.name == "four"


@weights
def test_errors_of_rho_are_those_of_retraining(option: Any) -> None:
    some = slice(0, 60)
    path = make(option).add(X[some], Y[some]).select_rho([RHO], "loo", X[some], Y[some])
    errors = []
    for k in range(K):
        d, t = sample_weights(Y[some], option, k), 2.0 * Y[some].double() - 1.0
        missed = []
        for i in range(60):
            rest = torch.arange(60) != i
            w, b = truth(X[some][rest], Y[some][rest], option)
            missed.append(float((t[i, k] - X[i] @ w[:, k] - b[k]).square()))
        errors.append(float(d @ torch.tensor(missed, dtype=torch.float64) / d.sum()))
    assert float(path.errors[0]) == pytest.approx(np.mean(errors), rel=1e-9)


def test_what_needs_one_matrix_is_refused() -> None:
    head = make().add(X, Y)
    for ask in (
        lambda: head.influence(X[:2], Y[:2], X[:5], Y[:5]), lambda: uncertainty(head, X),
        lambda: head.remove_approximate(X[:2], Y[:2]), lambda: select_groups(head, {"a": [0, 1], "b": [2, 3]}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="class_weight"):
            ask()
    with pytest.raises(ValueError, match="forget_class"):
        head.forget_class(0)
    assert head.digest() == make().add(X, Y).digest()
