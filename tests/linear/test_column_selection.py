"""``restrict`` and ``select``: every probe from one pass, against heads that were trained for it."""

import pytest
import torch

from torchlssvm import FixedPoint, LSSVMHead, NotFittedError
from torchlssvm.functional.row_normalization import normalized

N, J, K = 80, 30, 3
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, J, generator=GENERATOR), torch.arange(N) % K
X[:, 10:14] += 2 * torch.nn.functional.one_hot(Y, 4)
GRID = FixedPoint(16.0)
COLUMNS = [12, 3, 29, 10, 0]


@pytest.mark.parametrize(
    "options",
    [
        {}, {"scale": "std", "class_weight": "balanced"}, {"multiclass": "ovo"}, {"folds": 3, "intercept": "penalized"},
        {"normalize": "sqrt"}, {"normalize": "l2", "scale": "std"}, {"class_weight": torch.tensor([0.1, 1.0, 2.0])},
        {"grid": None},
    ],
    ids=str,
)  # fmt: skip
def test_restricted_is_trained_on_those_columns(options):
    ids = list(range(N)) if options.get("folds") else None
    options = {"grid": GRID, "rho": 0.7} | options
    head = LSSVMHead(J, K, **options).add(X, Y, ids=ids)
    part = head.restrict(COLUMNS)
    rows = X[:, COLUMNS]
    if options.get("normalize") == "l2":
        rows, options = normalized(X.double(), "l2")[:, COLUMNS], options | {"normalize": None}
    fresh = LSSVMHead(len(COLUMNS), K, **options).add(rows, Y, ids=ids)
    if options["grid"] is not None:
        assert part.digest() == fresh.digest()
    assert torch.allclose(part.w, fresh.w, rtol=1e-9, atol=1e-12)
    few = None if ids is None else ids[:7]
    assert torch.allclose(part.remove(rows[:7], Y[:7], ids=few)(rows), fresh.remove(rows[:7], Y[:7], ids=few)(rows))
    assert part.unchecked
    assert head.n == N  # as it was


def test_forms_of_columns_and_bad_ones():
    head = LSSVMHead(J, K, grid=GRID, normalize="l2").add(X, Y)
    mask = torch.zeros(J, dtype=torch.bool)
    mask[2:5] = True
    assert head.restrict(slice(2, 5)).digest() == head.restrict(mask).digest() == head.restrict([2, 3, 4]).digest()
    assert head.restrict(range(J)).digest() == head.digest()  # all columns: the row's length is theirs
    for bad, text in (
        ([], "one or more"), ([0, 0], "twice"), ([0, J], "outside"), ([-1], "outside"), ([0.5], "integers"), (mask[:4], "mask"),
        ("ab", "columns"), (None, "columns"), ([[1, 2]], "integers"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            head.restrict(bad)
    with pytest.raises(ValueError, match="statistics=True"):
        LSSVMHead(J, K, statistics=False).add(X, Y).restrict([0])
    assert LSSVMHead(J, K, normalize="sqrt").restrict([1, 2]).add(X[:, 1:3], Y).n == N


@pytest.mark.parametrize("normalize", [None, "l2"])
@pytest.mark.parametrize("method", ["gcv", "loo"])
def test_select_finds_what_trained_heads_find(method, normalize):
    head = LSSVMHead(J, K, grid=GRID, normalize=normalize).add(X, Y)
    layers = {"first": slice(0, 10), "second": slice(10, 20), "third": slice(20, 30), "all": None}
    rhos = [0.01, 0.1, 1.0, 10.0, 100.0]
    samples = {"x": X, "y": Y} if method == "loo" else {}
    found = head.select(layers, rhos, (None, "std"), method, **samples)
    assert len(found.candidates) == 8
    z = normalized(X.double(), normalize)
    for c in found.candidates:
        rows = z[:, c.columns]
        fresh = LSSVMHead(rows.shape[1], K, grid=head.grid, scale=c.scale).add(rows, Y)
        path = fresh.rho_path(rhos, method, rows if samples else None, Y if samples else None)
        assert torch.allclose(path.errors, c.path.errors, rtol=1e-9)
        assert (c.rho, c.error) == (path.rho, pytest.approx(float(path.errors.min())))
        assert c.seconds > 0
    assert found.best.error == min(c.error for c in found.candidates)
    assert found.best.name in ("second", "all")
    assert found.head.rho == found.best.rho
    assert set(found.head.choices) == {"rho", "columns", "scale"}
    assert str(found).count("\n") == 8
    assert head.rho == 1.0


def test_select_refuses_what_it_cannot_judge():
    head = LSSVMHead(J, K, grid=GRID)
    with pytest.raises(NotFittedError):
        head.select()
    head.add(X, Y)
    for options, text in (
        ({"columns": [0, 1]}, "list of candidates"), ({"columns": []}, "empty"), ({"columns": 3}, "list of candidates"),
        ({"scale": ()}, "empty"), ({"scale": "max"}, "scale"), ({"method": "loo"}, "needs the samples"), ({"rho": [-1.0]}, "rhos"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            head.select(**options)
