"""Leave-one-out, leave-group-out and influence against retraining, for every form of the head."""

import itertools
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import solve_dense
from torchlssvm import (
    CompactLSSVMHead,
    FixedPoint,
    LSSVMHead,
    MarginHead,
    NotFittedError,
    NumericalWarning,
)
from torchlssvm.analysis.cross_validation import cross_validate, error_rate, fold_of, margins

GRID = FixedPoint(16.0)
N, J, K = 45, 6, 3
FORMS = [
    {"intercept": i, "multiclass": m, "class_weight": c}
    for i, m, c in (
        ("free", "ovr", None),
        ("penalized", "ovr", torch.tensor([1.0, 3.0, 0.5])),
        ("none", "ovr", "complement"),
        ("free", "ovr", "balanced"),
        ("free", "ovo", None),
        ("penalized", "ovo", torch.tensor([1.0, 3.0, 0.5])),
        ("free", "ovo", "balanced"),
    )
]


def name(form: dict) -> str:
    weight = form["class_weight"]
    return f"{form['intercept']}-{form['multiclass']}-{'tensor' if isinstance(weight, Tensor) else weight}"


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    y = torch.cat([torch.arange(N - 9) % K, torch.zeros(9, dtype=torch.int64)])  # unbalanced
    x = GRID.snap(torch.randn(N, J, dtype=torch.float64) + torch.nn.functional.one_hot(y, J))
    z = torch.randn(17, J, dtype=torch.float64)
    return x, y, z, torch.arange(17) % K


def dense_scores(x: Tensor, y: Tensor, z: Tensor, rho: float, form: dict, weight: Tensor | None = None) -> Tensor:
    """Scores of a model trained from scratch by dense least squares, without a line of the library (but the votes)."""
    w, b = solve_dense(x, y, K, rho=rho, weight=weight, **form)
    scores = z @ w + b
    if form.get("multiclass") != "ovo":
        return scores
    won = torch.zeros(len(z), K, dtype=torch.float64)
    margin = torch.zeros_like(won)
    for p, (i, j) in enumerate(itertools.combinations(range(K), 2)):
        won[:, i] += (scores[:, p].sign() + 1) / 2
        won[:, j] += 1 - (scores[:, p].sign() + 1) / 2
        margin[:, i] += scores[:, p]
        margin[:, j] -= scores[:, p]
    return won + margin / (3 * (margin.abs() + 1))


@pytest.mark.parametrize("form", FORMS, ids=name)
def test_leaving_out_is_retraining_without(data, form) -> None:
    x, y, _, _ = data
    head = LSSVMHead(J, K, rho=0.3, grid=GRID, **form).add(x, y)
    one, groups = head.leave_one_out(x, y), torch.arange(N) // 7
    user = head.leave_one_out(x, y, groups=groups)
    for i in range(0, N, 4):
        keep = torch.arange(N) != i
        assert torch.allclose(one[i], dense_scores(x[keep], y[keep], x[i : i + 1], 0.3, form)[0], rtol=0, atol=1e-10)
    for g in range(0, 7, 2):
        keep = groups != g
        assert torch.allclose(user[~keep], dense_scores(x[keep], y[keep], x[~keep], 0.3, form), rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS, ids=name)
def test_influence_is_retraining(data, form) -> None:
    x, y, z, labels = data
    head = LSSVMHead(J, K, rho=0.3, grid=GRID, **form).add(x, y)
    before, to = head(z), (y + 1) % K
    target = 2 * torch.nn.functional.one_hot(labels, K).double() - 1
    changes = {
        "remove": head.influence(x, y, z, on="scores"),
        "relabel": head.influence(x, y, z, what="relabel", y_new=to, on="scores"),
        "add": head.influence(z, labels, z, what="add", on="scores"),  # z is not on the grid: snapped below
    }
    accuracy = head.influence(x, y, z, labels, on="accuracy")
    loss = head.influence(x, y, z, labels, on="loss") if form["multiclass"] == "ovr" else None
    groups = torch.arange(N) // 6
    together = head.influence(x, y, z, on="scores", groups=groups)
    relabelled = head.influence(x, y, z, what="relabel", y_new=to, on="scores", groups=groups)
    for i in range(0, N, 9):
        keep = torch.arange(N) != i
        after = dense_scores(x[keep], y[keep], z, 0.3, form)
        assert torch.allclose(before + changes["remove"][i], after, rtol=0, atol=1e-10)
        share = [(s.argmax(1) == labels).double().mean() for s in (before, after)]
        assert torch.isclose(accuracy[i], share[1] - share[0], atol=1e-12)
        if loss is not None:
            error = [(target - s).square().mean() for s in (before, after)]
            assert torch.isclose(loss[i], error[1] - error[0], rtol=0, atol=1e-10)
        now = torch.where(keep, y, to)
        assert torch.allclose(before + changes["relabel"][i], dense_scores(x, now, z, 0.3, form), rtol=0, atol=1e-10)
        j = i % len(z)
        more = torch.cat([x, GRID.snap(z[j : j + 1])]), torch.cat([y, labels[j : j + 1]])
        assert torch.allclose(before + changes["add"][j], dense_scores(*more, z, 0.3, form), rtol=0, atol=1e-10)
    for g in range(0, 7, 3):
        keep = groups != g
        after = dense_scores(x[keep], y[keep], z, 0.3, form)
        assert torch.allclose(before + together[g], after, rtol=0, atol=1e-10)
        after = dense_scores(x, torch.where(keep, y, to), z, 0.3, form)
        assert torch.allclose(before + relabelled[g], after, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", [f for f in FORMS if f["multiclass"] == "ovr"], ids=name)
def test_multiplicities(data, form) -> None:
    x, y, z, _ = data
    weight = 1.0 + torch.arange(N, dtype=torch.float64) % 3
    head = LSSVMHead(J, K, rho=2.0, grid=GRID, **form).add(x, y, weight=weight)
    one, change = head.leave_one_out(x, y, weight=weight), head.influence(x, y, z, on="scores", weight=weight)
    for i in range(0, N, 5):
        keep = torch.arange(N) != i
        truth = dense_scores(x[keep], y[keep], torch.cat([x[i : i + 1], z]), 2.0, form, weight[keep])
        assert torch.allclose(one[i], truth[0], rtol=0, atol=1e-10)
        assert torch.allclose(head(z) + change[i], truth[1:], rtol=0, atol=1e-10)


def test_float_targets_and_real_weights() -> None:
    torch.manual_seed(1)
    x, t, weight = torch.randn(30, 4).double(), torch.randn(30, 2).double(), 0.5 + torch.rand(30).double()
    head = LSSVMHead(4, 2, rho=0.7, grid=None).add(x, t, weight=weight)
    one = head.leave_one_out(x, t, weight=weight)
    shift = head.influence(x, t, x[:3], what="relabel", y_new=t + 1, weight=weight, on="scores")
    loss = head.influence(x, t, x[:3], t[:3], weight=weight)
    for i in range(0, 30, 7):
        keep = torch.arange(30) != i
        w, b = solve_dense(x[keep], t[keep], 2, rho=0.7, weight=weight[keep])
        assert torch.allclose(one[i], x[i] @ w + b, rtol=0, atol=1e-11)
        error = (t[:3] - x[:3] @ w - b).square().mean() - (t[:3] - head(x[:3])).square().mean()
        assert torch.isclose(loss[i], error, rtol=0, atol=1e-11)
        moved = torch.where(keep[:, None], t, t + 1)
        w, b = solve_dense(x, moved, 2, rho=0.7, weight=weight)
        assert torch.allclose(head(x[:3]) + shift[i], x[:3] @ w + b, rtol=0, atol=1e-11)


def test_a_loss_of_ones_own(data) -> None:
    x, y, z, labels = data
    head = LSSVMHead(J, K, grid=GRID, rho=1.0).add(x, y)

    def hinge(scores: Tensor) -> Tensor:
        slack = 1 - margins(scores.reshape(-1, K), labels.repeat(len(scores)))
        return slack.clamp(min=0).view(len(scores), -1).mean(1)

    change = head.influence(x, y, z, on=hinge)
    keep = torch.arange(N) != 3
    other = LSSVMHead(J, K, grid=GRID, rho=1.0).add(x[keep], y[keep])
    assert torch.isclose(change[3], hinge(other(z)[None])[0] - hinge(head(z)[None])[0], rtol=0, atol=1e-11)


def decided(head: LSSVMHead, x: Tensor) -> Tensor:
    """Where no pair of classes is tied (n,): a vote on a score of 0 hangs on its last bit."""
    if head.multiclass == "ovr":
        return torch.ones(len(x), dtype=torch.bool)
    return ((x.double() @ head.w + head.b).abs() > 1e-9).all(1)


@given(st.data())
def test_any_small_problem(draw) -> None:
    """Duplicate rows, one class, zero features, n < J, tiny rho: leave-one-out is what a head without the sample says."""
    n, j, k = draw.draw(st.integers(2, 9)), draw.draw(st.integers(1, 5)), draw.draw(st.integers(2, 3))
    values = st.integers(-3, 3).map(float)
    x = torch.tensor(draw.draw(st.lists(st.lists(values, min_size=j, max_size=j), min_size=n, max_size=n)))
    y = torch.tensor(draw.draw(st.lists(st.integers(0, k - 1), min_size=n, max_size=n)))
    form = {
        "intercept": draw.draw(st.sampled_from(["free", "penalized", "none"])),
        "multiclass": draw.draw(st.sampled_from(["ovr", "ovo"])),
        "class_weight": draw.draw(st.sampled_from([None, "balanced", "complement"])),
        "rho": draw.draw(st.sampled_from([1e-3, 1.0, 100.0])),
    }
    head = LSSVMHead(j, k, grid=FixedPoint(4.0), **({"rho": 1.0} | form)).add(x, y)
    one, i = head.leave_one_out(x, y), draw.draw(st.integers(0, n - 1))
    change = head.influence(x, y, x, on="scores")
    keep = torch.arange(n) != i
    other = LSSVMHead(j, k, grid=FixedPoint(4.0), **({"rho": 1.0} | form)).add(x[keep], y[keep])
    sure = decided(other, x)
    assert torch.allclose(one[i : i + 1][sure[i : i + 1]], other(x[i : i + 1])[sure[i : i + 1]], rtol=0, atol=1e-8)
    sure &= decided(head, x)
    assert torch.allclose((head(x) + change[i])[sure], other(x)[sure], rtol=0, atol=1e-8)
    groups = torch.tensor(draw.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    keep = groups != groups[i]
    if keep.any():
        other = LSSVMHead(j, k, grid=FixedPoint(4.0), **({"rho": 1.0} | form)).add(x[keep], y[keep])
        if decided(other, x)[i]:
            assert torch.allclose(head.leave_one_out(x, y, groups=groups)[i], other(x[i : i + 1])[0], rtol=0, atol=1e-8)


@pytest.mark.parametrize("weight", [None, "balanced"])
def test_groups_for_pairs_without_samples(data, weight) -> None:
    x, y, z, _ = data
    options = {"grid": GRID, "rho": 1.0, "multiclass": "ovo", "class_weight": weight}
    held, new = y == 0, (y > 0).nonzero()[:6, 0]
    head = LSSVMHead(J, K, **options).add(x[held], y[held])
    found = head.influence(x[new], y[new], z, what="add", on="scores", groups=[0, 0, 0, 1, 1, 1])
    for change, rows in zip(found, new.split(3), strict=True):
        both = LSSVMHead(J, K, **options).add(x[held], y[held]).add(x[rows], y[rows])
        assert torch.allclose(both(z) - head(z), change)


def test_after_corrections_it_is_about_what_is_held_now(data) -> None:
    x, y, _, _ = data
    head = LSSVMHead(J, K, grid=GRID, rho=1.0).add(x, y)
    head.leave_one_out(x, y)
    head.remove(x[:5], y[:5]).relabel(x[5:6], y[5:6], (y[5:6] + 1) % K)
    now = y[5:].clone()
    now[0] = (now[0] + 1) % K
    fresh = LSSVMHead(J, K, grid=GRID, rho=1.0).add(x[5:], now)
    assert torch.allclose(head.leave_one_out(x[5:], now), fresh.leave_one_out(x[5:], now), rtol=0, atol=1e-12)


def test_cross_validation_by_replacing_folds(data) -> None:
    x, y, _, _ = data
    ids = [f"s{i}" for i in range(N)]
    fold = torch.tensor(fold_of(ids, 4))
    for head in (
        LSSVMHead(J, K, grid=GRID, rho=1.0),
        LSSVMHead(J, K, grid=GRID, folds=4, rho=1.0),
        CompactLSSVMHead(J, K),
    ):
        scores = cross_validate(head, x, y, folds=4, ids=ids)
        assert head.n == 0
        for f in range(4):
            out = fold == f
            w, b = solve_dense(x[~out], y[~out], K)
            assert torch.allclose(scores[out], x[out] @ w + b, rtol=0, atol=1e-9)
    assert 0 < error_rate(scores, y) < 1
    with pytest.raises(ValueError, match="folds must be an int >= 2"):
        cross_validate(LSSVMHead(J, K, rho=1.0), x, y, folds=1)
    with pytest.raises(ValueError, match="holds samples"):
        cross_validate(LSSVMHead(J, K, rho=1.0).add(x, y), x, y)


class Centroids:
    """The least there is to a machine: ``add`` names samples, ``remove`` takes the names, a call gives scores."""

    def __init__(self, names: bool):
        self.names, self.held, self.count, self.most = names, {}, 0, 0

    def add(self, x, y):
        ids = [f"s{self.count + i}" if self.names else self.count + i for i in range(len(x))]
        self.count += len(x)
        self.held |= dict(zip(ids, zip(x, y.tolist(), strict=True), strict=True))
        self.most = max(self.most, len(self.held))
        return ids if self.names else torch.tensor(ids)

    def remove(self, ids) -> None:
        for i in ids if self.names else ids.tolist():
            del self.held[i]

    def __call__(self, z):
        centres = [torch.stack([x for x, y in self.held.values() if y == c]).mean(0) for c in range(K)]
        return -torch.cdist(z, torch.stack(centres))


@pytest.mark.parametrize("names", [False, True])
def test_cross_validation_of_anything_that_adds_and_removes(data, names) -> None:
    x, y, _, _ = data
    scores, fold = cross_validate(Centroids(names), x, y, folds=3), torch.tensor(fold_of(range(N), 3))
    for f in range(3):
        out, machine = fold == f, Centroids(names)
        machine.add(x[~out], y[~out])
        assert torch.allclose(scores[out], machine(x[out]), rtol=0, atol=1e-12)


def test_bad_input_gets_a_clear_error_and_changes_nothing(data) -> None:
    x, y, z, labels = data
    head = LSSVMHead(J, K, grid=GRID, rho=1.0).add(x, y)
    digest = head.digest()
    with pytest.raises(NotFittedError):
        LSSVMHead(J, K, rho=1.0).leave_one_out(x, y)
    for call, what in [
        (lambda: head.leave_one_out(x[:, :2], y), "shape"),
        (lambda: head.leave_one_out(x, y[:3]), "length"),
        (lambda: head.leave_one_out(x, y + 5), "label"),
        (lambda: head.leave_one_out(x, y, weight=torch.zeros(N)), "weight must be an integer >= 1"),
        (lambda: head.leave_one_out(x, y, weight=torch.full((N,), 1.5)), "weight must be an integer >= 1"),
        (lambda: head.leave_one_out(x, y, groups=[1, 2]), "x and groups differ"),
        (lambda: head.leave_one_out(x, y, groups=[0] * N), "nothing to learn from"),
        (lambda: head.leave_one_out(x * torch.nan, y), "NaN"),
        (lambda: head.leave_one_out(x.sign() * 15, y), "not among the current samples"),
        (lambda: head.leave_one_out(x.sign()[:4] * 15, y[:4], groups=[0, 0, 1, 1]), "not among the current samples"),
        (lambda: head.influence(x, y, z, labels, what="forget"), "what must be one of"),
        (lambda: head.influence(x, y, z, labels, on="beauty"), "on .* must be one of"),
        (lambda: head.influence(x, y, z), "need y_val"),
        (lambda: head.influence(x, y, z, labels, y_new=y), "goes with y_new"),
        (lambda: head.influence(x, y, z, labels, what="relabel"), "goes with y_new"),
        (lambda: head.influence(x, y, z, labels, what="relabel", y_new=y + 9), "outside 0..2"),
        (lambda: head.influence(x, y, z, labels[:2]), "y_val must be"),
        (lambda: head.influence(x, y, z, labels, groups=[0] * N), "nothing to learn from"),
    ]:
        with pytest.raises(ValueError, match=what):
            call()
    assert head.digest() == digest
    for judge in (head, MarginHead(J, K, rho=1.0, grid=GRID).add(x, y)):
        for y_val, what in ((None, "need y_val"), (labels[:2], "y_val must be"), (labels + K, r"outside 0\.\.2")):
            with pytest.raises(ValueError, match=what):
                judge.influence(x, y, z, y_val)
    lonely = LSSVMHead(J, K, rho=1.0).add(x[:1], y[:1])
    with pytest.raises(ValueError, match="leaving out the only sample"):
        lonely.leave_one_out(x[:1], y[:1])
    assert head.leave_one_out(x[:0], y[:0]).shape == (0, K)
    assert head.influence(x[:0], y[:0], z, labels).shape == (0,)


def judged(head: LSSVMHead, x: Tensor, y: Tensor) -> dict:
    return {
        "leave one out": lambda: head.leave_one_out(x, y),
        "groups": lambda: head.leave_one_out(x, y, groups=y),
        "influence": lambda: head.influence(x, y, x, on="scores"),
        "loss": lambda: head.influence(x, y, x, y),
        "rho": lambda: head.select_rho([head.rho], "loo", x, y, apply=False),
        "folds": lambda: head.select_rho([head.rho], "kfold", apply=False),
    }


@pytest.mark.parametrize("what", ["leave one out", "groups", "influence", "loss", "rho", "folds"])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_lost_digits_are_reported(what, offset) -> None:
    """Samples that determine their own predictions at a tiny rho, and columns that are nearly one, in a head solved before."""
    gen, y = torch.Generator().manual_seed(0), torch.arange(12) % 2
    x = torch.eye(12).double() if not offset else torch.randn(12, 3, generator=gen).double() + offset
    options = {"grid": FixedPoint(2.0**22, bits=26), "intercept": "none", "folds": 2}
    head = LSSVMHead(x.shape[1], 2, rho=1e-11, **options).add(x, y, ids=range(12))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _ = head.w
    with pytest.warns(NumericalWarning, match="lost digits"):
        judged(head, x, y)[what]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        judged(LSSVMHead(x.shape[1], 2, rho=1.0, **(options | {"intercept": "free"})).add(x, y, ids=range(12)), x, y)[
            what
        ]()
