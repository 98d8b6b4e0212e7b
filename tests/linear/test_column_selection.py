"""``restrict`` and ``select``: every probe from one pass, against dense least squares on the same columns."""

import pytest
import torch
from sklearn.linear_model import RidgeCV
from torch import Tensor

from tests.conftest import code, solve_dense
from torchlssvm import FixedPoint, LSSVMHead, MarginHead, NotFittedError
from torchlssvm.audit.certificate import public_choices
from torchlssvm.linear.column_selection import restrict, select, select_groups

N, J, K = 80, 30, 3
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, J, generator=GENERATOR), torch.arange(N) % K
X[:, 10:14] += 2 * torch.nn.functional.one_hot(Y, 4)
GRID = FixedPoint(16.0)
COLUMNS = [12, 3, 29, 10, 0]


def normalized(kind: str | None) -> Tensor:
    """The rows as a head with this ``normalize`` takes them (N, J)."""
    x = X.double()
    if kind == "l2":
        return x / x.norm(dim=1, keepdim=True)
    return x if kind is None else x.sign() * x.abs().sqrt()


def deviations(z: Tensor, scale: str | None) -> Tensor:
    """The divisors of the columns (J,) for an option ``scale``."""
    return z.std(0, unbiased=False) if scale == "std" else torch.ones(z.shape[1], dtype=torch.float64)


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
    head = LSSVMHead(J, K, **({"rho": 1.0} | options)).add(X, Y, ids=ids)
    part = restrict(head, COLUMNS)
    z = normalized(options.get("normalize"))[:, COLUMNS]
    z = z if options["grid"] is None else GRID.snap(z)
    rest = {name: options[name] for name in ("rho", "intercept", "class_weight", "multiclass") if name in options}

    def dense(gone: int) -> Tensor:
        kept, deviation = z[gone:], deviations(z[gone:], options.get("scale"))
        return solve_dense(kept / deviation, Y[gone:], K, **rest)[0] / deviation[:, None]

    assert torch.allclose(part.w, dense(0), rtol=1e-9, atol=1e-12)
    rows = z if options.get("normalize") == "l2" else X[:, COLUMNS]  # of all columns only their length was known
    if options.get("normalize") != "l2" and options["grid"] is not None:
        fresh = LSSVMHead(len(COLUMNS), K, **({"rho": 1.0} | options)).add(rows, Y, ids=ids)
        assert part.digest() == fresh.digest()
    few = None if ids is None else ids[:7]
    assert torch.allclose(part.remove(rows[:7], Y[:7], ids=few).w, dense(7), rtol=1e-9, atol=1e-12)
    assert part.unchecked
    assert head.n == N  # as it was


def test_forms_of_columns_and_bad_ones():
    head = LSSVMHead(J, K, grid=GRID, normalize="l2", rho=1.0).add(X, Y)
    mask = torch.zeros(J, dtype=torch.bool)
    mask[2:5] = True
    assert restrict(head, slice(2, 5)).digest() == restrict(head, mask).digest() == restrict(head, [2, 3, 4]).digest()
    assert restrict(head, range(J)).digest() == head.digest()  # all columns: the row's length is theirs
    for bad, text in (
        ([], "one or more"), ([0, 0], "twice"), ([0, J], "outside"), ([-1], "outside"), ([0.5], "integers"), (mask[:4], "mask"),
        ("ab", "columns"), (None, "columns"), ([[1, 2]], "integers"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            restrict(head, bad)
    assert restrict(LSSVMHead(J, K, normalize="sqrt", rho=1.0), [1, 2]).add(X[:, 1:3], Y).n == N


@pytest.mark.parametrize("normalize", [None, "l2"])
@pytest.mark.parametrize("method", ["gcv", "loo"])
def test_select_finds_what_dense_solutions_find(method, normalize):
    head = LSSVMHead(J, K, grid=GRID, normalize=normalize, rho=1.0).add(X, Y)
    layers = {"first": slice(0, 10), "second": slice(10, 20), "third": slice(20, 30), "all": None}
    rhos = [0.01, 0.1, 1.0, 10.0, 100.0]
    samples = {"x": X, "y": Y} if method == "loo" else {}
    found = select(head, layers, rhos, (None, "std"), method, **samples)
    assert len(found.candidates) == 8
    z = head.grid.snap(normalized(normalize))
    for c in found.candidates:
        rows = z[:, c.columns]
        rows = rows / deviations(rows, c.scale)
        rows, goal = rows - rows.mean(0), code(Y, K) - code(Y, K).mean(0)
        if method == "loo":
            theirs = RidgeCV(alphas=rhos, store_cv_results=True).fit(rows.numpy(), code(Y, K).numpy())
            errors = torch.from_numpy(theirs.cv_results_.reshape(-1, len(rhos)).mean(0))
        else:
            hats = [
                rows @ torch.linalg.solve(rows.T @ rows + r * torch.eye(rows.shape[1]).double(), rows.T) for r in rhos
            ]
            errors = torch.stack([(goal - H @ goal).square().mean() / (1 - (H.trace() + 1) / N) ** 2 for H in hats])
        assert torch.allclose(c.path.errors, errors, rtol=1e-8)
        assert (c.rho, c.error) == (rhos[int(errors.argmin())], pytest.approx(float(errors.min())))
        assert c.seconds > 0
    assert found.best.error == min(c.error for c in found.candidates)
    assert found.best.name in ("second", "all")
    assert found.head.rho == found.best.rho
    assert set(found.head.choices) == {"rho", "columns", "scale"}
    assert str(found).count("\n") == 8
    assert head.rho == 1.0


def gcv(rows: Tensor, d: Tensor, columns: list[int], rho: float, free: bool) -> float:
    """Generalized cross-validation from the hat matrix itself. rows: (N, J); d: (N,) weights."""
    z = rows[:, columns]
    goal = code(Y, K)
    if free:
        z, goal = z - d @ z / d.sum(), goal - d @ goal / d.sum()
    z, goal = z * d.sqrt()[:, None], goal * d.sqrt()[:, None]
    H = z @ torch.linalg.solve(z.T @ z + rho * torch.eye(len(columns)).double(), z.T)
    return float((goal - H @ goal).square().sum() / K * N / (N - H.trace() - int(free)) ** 2)


@pytest.mark.parametrize(
    "options", [{}, {"intercept": "none"}, {"scale": "std", "class_weight": torch.tensor([0.1, 1.0, 2.0])}], ids=str
)
def test_groups_are_dropped_as_brute_force_drops_them(options):
    head = LSSVMHead(J, K, grid=GRID, rho=0.7, **options).add(X, Y)
    groups = {"a": range(9), "b": range(9, 12), "c": [12, 13, 29], "d": range(14, 20), "e": range(20, 28)}
    rows = GRID.snap(X.double())
    rows = rows / deviations(rows, options.get("scale"))
    d = options.get("class_weight", torch.ones(K).double()).double()[Y]

    def error(names: tuple[str, ...]) -> float:
        columns = [c for name in names for c in groups[name]]
        return gcv(rows, d, [*columns, 28], 0.7, head.intercept == "free")  # column 28 is in no group

    kept = tuple(groups)
    truth = [(kept, error(kept))]
    while len(kept) > 1:
        kept = min((tuple(n for n in kept if n != gone) for gone in kept), key=error)
        truth.append((kept, error(kept)))
    found = select_groups(head, groups)
    assert [c.name.split() for c in found.candidates[1:]] == [list(names) for names, _ in truth[1:]]
    best = min(truth, key=lambda pair: pair[1])[0]
    assert found.best.name == ("all" if len(best) == len(groups) else " ".join(best))
    for c, (_, expected) in zip(found.candidates, truth, strict=True):
        assert c is found.best or c.error == pytest.approx(expected, rel=1e-9)
    assert found.head.rho == restrict(head, found.best.columns).select_rho().rho
    assert set(found.head.choices) == {"rho", "columns"}


GROUPS = {"left": slice(0, 10), "right": slice(10, 20), "rest": slice(20, 30)}


@pytest.mark.parametrize("rho", [1.0, "gcv"])
@pytest.mark.parametrize("choose", [select, select_groups])
def test_a_choice_forgets_a_removed_sample(choose, rho):
    """The removed samples had shifted the choice of columns and that of rho."""
    loud, labels = 12 * torch.randn(20, J, generator=torch.Generator().manual_seed(1)), torch.arange(20) % K
    loud[:, :10] = 0.0
    loud[:, :3] += 8 * torch.nn.functional.one_hot(labels, K)
    head = LSSVMHead(J, K, grid=64.0, rho=rho).add(X, Y).add(loud, labels)
    found = choose(head, GROUPS)
    before, probe = found.best.name, found.head
    assert found.head is probe
    head.remove(loud, labels)
    never = choose(LSSVMHead(J, K, grid=64.0, rho=rho).add(X, Y), GROUPS)
    assert found.best.name == never.best.name != before
    assert [(c.name, c.error) for c in found.candidates] == [(c.name, c.error) for c in never.candidates]
    assert found.head.digest() == never.head.digest()
    assert found.head.rho == never.head.rho
    assert torch.equal(found.head.w, never.head.w)
    assert torch.equal(found.refresh().head.refresh().w, never.head.w)


def test_a_chosen_head_says_that_its_choice_is_older_than_its_samples():
    head = LSSVMHead(J, K, grid=GRID, rho=1.0).add(X, Y)
    found = select_groups(head, GROUPS)
    columns = found.best.columns
    found.head.remove(X[:5][:, columns], Y[:5])
    assert public_choices(found.head, None)["columns"]["state"] == "kept"
    with pytest.warns(UserWarning, match=r"found\.head"):
        found.head.refresh()
    head.remove(X[:5], Y[:5])
    with pytest.raises(ValueError, match="source"):  # choosing again would undo the removal
        found.refresh()


def test_groups_that_cannot_be_judged_are_refused():
    head = LSSVMHead(J, K, grid=GRID, rho=1.0)
    with pytest.raises(NotFittedError):
        select_groups(head, {"a": slice(0, 3)})
    with pytest.raises(ValueError, match="one group"):
        select_groups(head.add(X, Y), {"a": slice(0, 3), "b": [2, 3]})
    with pytest.raises(ValueError, match="ovr"):
        select_groups(LSSVMHead(J, K, grid=GRID, multiclass="ovo").add(X, Y), {"a": slice(0, 3)})


@pytest.mark.parametrize("choose", [select, select_groups, restrict])
def test_a_head_without_such_sums_is_refused(choose):
    with pytest.raises(ValueError, match="MarginHead"):
        choose(MarginHead(J, K, rho=1.0).add(X, Y), {"a": [0, 1]})


def test_select_refuses_what_it_cannot_judge():
    head = LSSVMHead(J, K, grid=GRID, rho=1.0)
    with pytest.raises(NotFittedError):
        select(head)
    head.add(X, Y)
    for options, text in (
        ({"columns": [0, 1]}, "list of candidates"), ({"columns": []}, "empty"), ({"columns": 3}, "list of candidates"),
        ({"scale": ()}, "empty"), ({"scale": "max"}, "scale"), ({"method": "loo"}, "needs the current samples"), ({"rho": [-1.0]}, "rhos"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            select(head, **options)
