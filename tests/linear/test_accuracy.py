"""Against dense float64 retraining on the same gridded features, after 1,000 random operations."""

import pytest
import torch

from tests.support.dense import code, relative, ridge
from torchlssvm import CompactLSSVMHead, FixedPoint, LSSVMHead, NumericalWarning


def random_features(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(700, 64, generator=generator, dtype=torch.float64) + 1.0, torch.arange(700) % 3, 1.0


def ill_conditioned():
    """A = rho I + Phi Phi^T with a condition number of 1e6: spectrum of the features over three decades."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(700, 64, generator=generator, dtype=torch.float64)
    mix, _ = torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.float64))
    x = (x * torch.logspace(0, -3.5, 64, dtype=torch.float64)) @ mix
    return x, torch.arange(700) % 3, 5e-4


def breast_cancer():
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_breast_cancer(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    return torch.from_numpy(x), torch.from_numpy(y), 1.0


def run(head, make, x, y, rho, operations, check_every, seed=0):
    """Random add/remove/relabel/replace/update/merge operations; the largest relative errors of w and scores on the way."""
    generator = torch.Generator().manual_seed(seed)
    K, grid = head.num_classes, getattr(head, "grid", None)
    gridded = x if grid is None else grid.snap(x)
    y = y.clone()
    held = torch.zeros(len(x), dtype=torch.bool)
    held[: len(x) // 2] = True
    head.add(x[held], y[held])
    worst = [0.0, 0.0]

    def pick(mask, most):
        index = mask.nonzero()[:, 0]
        size = int(torch.randint(1, most + 1, (), generator=generator))
        return index[torch.randperm(len(index), generator=generator)[:size]]

    for step in range(operations):
        low, high = held.sum() < 0.4 * len(x), held.sum() > 0.8 * len(x)
        kind = (
            "add" if low else "remove" if high else ["add", "remove", "relabel", "replace", "update", "merge"][step % 6]
        )
        if kind == "merge" and grid is None:
            kind = "update"
        into, out = pick(~held, 8), pick(held, 8)
        if kind == "add":
            head.add(x[into], y[into])
        elif kind == "remove":
            head.remove(x[out], y[out])
        elif kind == "relabel":
            new = torch.randint(K, (len(out),), generator=generator)
            head.relabel(x[out], y[out], new)
            y[out] = new
        elif kind == "replace":
            into, out = into[: len(out)], out[: len(into)]
            head.replace(x[out], y[out], x[into], y[into])
        elif kind == "update":
            head.update(add=(x[into], y[into]), remove=(x[out], y[out]))
        else:
            head += make().add(x[into], y[into])
        held[into] |= kind in ("add", "replace", "update", "merge")
        held[out] &= kind not in ("remove", "replace", "update")
        if step % 7 == 0:
            _ = head.P
        if step % 3 == 0:
            _ = head.w
        if step % check_every == 0 or step == operations - 1:
            w, b = ridge(gridded[held], code(y[held], K), rho)
            worst[0] = max(worst[0], relative(head.w, w))
            worst[1] = max(worst[1], relative(head(x), x @ w + b))
    return worst


@pytest.mark.parametrize("form", ["statistics", "compact"])
@pytest.mark.parametrize(
    "features",
    [
        pytest.param(random_features, id="random"),
        pytest.param(ill_conditioned, id="ill-conditioned"),
        pytest.param(breast_cancer, id="breast cancer"),
    ],
)
def test_thousand_operations(features, form):
    x, y, rho = features()
    K = int(y.max()) + 1
    grid = FixedPoint(2.0 ** float(x.abs().max().log2().ceil()), bits=20)
    gridded = grid.snap(x)
    if features is ill_conditioned:
        centred = gridded - gridded.mean(0)
        spectrum = torch.linalg.eigvalsh(centred.T @ centred) + rho
        assert 5e5 < spectrum[-1] / spectrum[0] < 2e6

    def make():
        if form == "compact":
            return CompactLSSVMHead(x.shape[1], K, rho=rho)
        return LSSVMHead(x.shape[1], K, rho=rho, grid=grid)

    worst = run(make(), make, gridded, y, rho, operations=1000, check_every=50)
    print(f"{features.__name__}, {form}: w {worst[0]:.1e}, scores {worst[1]:.1e}")
    assert max(worst) <= (1e-9 if form == "statistics" else 1e-8)


@pytest.mark.parametrize("chunk", [1, 13, 400])
def test_refresh_is_bit_identical_for_any_history(chunk):
    """Order, chunking, partition and detours leave no trace in the weights after refresh()."""
    x, y, rho = random_features(2)
    grid = FixedPoint(8.0)
    fresh = LSSVMHead(64, 3, rho=rho, grid=grid).add(x[:500], y[:500])
    head, other = LSSVMHead(64, 3, rho=rho, grid=grid), LSSVMHead(64, 3, rho=rho, grid=grid)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(chunk))
    for part in order[:300].split(chunk):
        head.add(x[part], y[part])
    _ = head.w
    head.add(x[500:], y[500:])
    _ = head.P
    other.add(x[order[300:]], y[order[300:]])
    head += other
    head.remove(x[500:], y[500:])
    assert head.drift() < 1e-12
    head.refresh()
    for name in ("w", "b", "C", "P"):
        assert torch.equal(getattr(head, name), getattr(fresh, name)), name
    assert head.digest() == fresh.digest()


@pytest.mark.parametrize(
    ("J", "n", "intercept"), [(200, 3, "free"), (64, 30, "penalized"), (40, 150, "none"), (64, 150, "free")]
)
def test_paths_agree(J, n, intercept):
    """Theorem 1, the dual form and a solve give the same answer, for n < J, L > J and in between."""
    generator = torch.Generator().manual_seed(J + n)
    x, y = torch.randn(n, J, generator=generator), torch.arange(n) % 2
    head = LSSVMHead(J, 2, intercept=intercept, grid=FixedPoint(8.0), rho=1.0).add(x, y)
    w, b = ridge(FixedPoint(8.0).snap(x), code(y, 2), 1.0, intercept)
    assert relative(head.w, w) < 1e-10
    assert float((head.b - b).abs().max()) < 1e-10
    before = head.w.clone()
    assert relative(head.refresh().w, before) < 1e-10


def test_means_far_from_zero_cost_nothing():
    """Features with a mean 1e5 times their spread: centring in floating point would lose ten digits."""
    generator = torch.Generator().manual_seed(0)
    x = 1.0 + 1e-5 * torch.randn(500, 60, generator=generator, dtype=torch.float64)
    y = torch.arange(500) % 2
    grid = FixedPoint(2.0, bits=26)
    head = LSSVMHead(60, 2, rho=1e-9, grid=grid).add(x, y)
    w, _ = ridge(grid.snap(x), code(y, 2), 1e-9)
    assert relative(head.w, w) < 1e-9


def test_fewer_samples_than_features_and_a_small_rho_is_told() -> None:
    x, y = torch.randn(50, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(50) % 2
    x[:, 7] = 0.0  # a dead feature loses no digits
    grid = FixedPoint(8.0, bits=26)
    _ = LSSVMHead(200, 2, rho=1e-4, grid=grid).add(x, y).w
    for rho in (1e-6, 1e-10):
        with pytest.warns(NumericalWarning, match=str(rho).replace("1e", "1.0e")):
            _ = LSSVMHead(200, 2, rho=rho, grid=grid).add(x, y).w
