"""``rule="lda"``: the discriminant of the current samples, against scikit-learn and against heads that never saw a sample."""

import io

import pytest
import torch

from torchlssvm import FixedPoint, LSSVMHead, verify
from torchlssvm.errors import NumericalWarning
from torchlssvm.events import Add
from torchlssvm.linear.discriminant_rule import choose_rule
from torchlssvm.store import SampleStore

K, J, N = 4, 6, 90


def drawn(n, j, k):
    """Samples of k classes of unequal size, far from the origin, on the grid."""
    gen = torch.Generator().manual_seed(0)
    y = torch.cat([torch.arange(k).repeat(3), (torch.rand(n - 3 * k, generator=gen) ** 2 * k).long()])
    x = torch.randn(n, j, generator=gen) * torch.linspace(1, 6, j) + 2 * torch.randn(k, j, generator=gen)[y] + 7
    return FixedPoint(limit=64.0).snap(x).float(), y


@pytest.fixture
def samples():
    return drawn(N, J, K)


def make(rho=2.0, shape=(J, K), **options):
    return LSSVMHead(*shape, rho=rho, grid=FixedPoint(limit=64.0), **({"rule": "lda"} | options))


@pytest.mark.parametrize("rho", [0.02, 2.0, 2000.0])
@pytest.mark.parametrize(("N", "J", "K"), [(90, 6, 4), (300, 5, 40), (60, 70, 4), (90, 12, 2)])
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("scale", [None, "std"])
def test_equals_scikit_learn(N, J, K, rho, balanced, scale):
    lda = pytest.importorskip("sklearn.discriminant_analysis", reason="scikit-learn is not installed")
    x, y = drawn(N, J, K)
    head = make(rho, (J, K), class_weight="balanced" if balanced else None, scale=scale).add(x, y)
    rows = x.double()
    if scale:
        rows = (rows - rows.mean(0)) / rows.std(0, correction=0)
    weight = (N / (K * head.counts.double()))[y] if balanced else torch.ones(N, dtype=torch.float64)
    means = torch.stack([rows[y == k].mean(0) for k in range(K)])
    trace = (weight[:, None] * (rows - means[y]).square()).sum()
    shrinkage = float(rho * J / (trace + rho * J))
    theirs = lda.LinearDiscriminantAnalysis(
        solver="lsqr", shrinkage=shrinkage, priors=[1 / K] * K if balanced else None
    ).fit(rows.numpy(), y.numpy())
    expected = torch.from_numpy(theirs.predict_proba(rows.numpy()))
    torch.testing.assert_close(torch.softmax(head(x), 1), expected, rtol=1e-8, atol=1e-8)


def test_removing_leaves_the_discriminant_that_never_saw_the_samples(samples):
    x, y = samples
    head, never = make().add(x, y), make().add(x[20:], y[20:])
    head.predict(x)
    head.remove(x[:20], y[:20])
    torch.testing.assert_close(head(x), never(x), rtol=1e-9, atol=1e-9)
    assert head.digest() == never.digest() == make(rule="least_squares").add(x[20:], y[20:]).digest()
    assert torch.equal(head.refresh().w, never.refresh().w)
    assert torch.equal(head.b, never.b)


def test_merges_relabels_saves_and_grows(samples):
    x, y = samples
    head = make().add(x[:40], y[:40])
    head += make().add(x[40:], y[40:])
    head.relabel(x[:3], y[:3], (y[:3] + 1) % K)
    y = torch.cat([(y[:3] + 1) % K, y[3:]])
    torch.testing.assert_close(head(x), make().add(x, y)(x), rtol=1e-9, atol=1e-9)
    file = io.BytesIO()
    torch.save(head.state_dict(), file)
    file.seek(0)
    loaded = make()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(loaded(x), head(x))
    other = make(rule="least_squares")
    other.load_state_dict(head.state_dict())
    assert torch.equal(other(x), head(x))
    head.add_classes(1)
    assert (head(x)[:, K] < -1e29).all()
    assert torch.equal(head.predict(x), loaded.predict(x))
    torch.testing.assert_close(head(x)[:, :K], loaded(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("J", [6, 70])
@pytest.mark.parametrize("class_weight", [None, "balanced", torch.arange(1, K + 1).double()])
@pytest.mark.parametrize("scale", [None, "std"])
def test_leave_one_out_is_that_of_heads_without_the_sample(J, class_weight, scale):
    (x, y), weight, groups = drawn(N, J, K), 1 + torch.arange(N) % 3, torch.arange(N) // 5
    y[y == 3] = 2
    y[:2] = 3  # a class that goes with its group
    head = make(shape=(J, K), class_weight=class_weight, scale=scale).add(x, y, weight)
    ours, grouped = head.leave_one_out(x, y, weight), head.leave_one_out(x, y, weight, groups)
    assert grouped.isfinite().all()
    for i in (0, 17, N - 1):
        for scores, keep in ((ours, torch.arange(N) != i), (grouped, groups != groups[i])):
            rest = make(shape=(J, K), class_weight=class_weight, scale=scale).add(x[keep], y[keep], weight[keep])
            # The scale is held fixed, with the sample's share of about 1/n in it.
            tolerance = 0.05 if scale else 1e-8
            left = y[keep].unique()
            found, truth = (torch.softmax(s[left], 0) for s in (scores[i], rest(x[i : i + 1])[0]))
            torch.testing.assert_close(found, truth, rtol=0, atol=tolerance)


def test_a_rho_too_small_for_the_scatter_within_classes_is_reported():
    x, y = drawn(9, 8, 3)  # six directions within classes, of features far above the root of rho
    head = LSSVMHead(8, 3, rho=1e-2, grid=FixedPoint(2.0**27), rule="lda").add(x * 1e6, y)
    with pytest.warns(NumericalWarning, match="small for these features"):
        head(x)
    alone = torch.zeros(12, 2)
    alone[0, 0] = 1.0  # without this sample there is no scatter, and the ridge inflates the scores a millionfold
    head = LSSVMHead(2, 3, rho=1e-8, grid=2.0, rule="lda").add(alone, torch.arange(12) % 3)
    with pytest.warns(NumericalWarning, match="lost digits"):
        head.leave_one_out(alone, torch.arange(12) % 3)


def test_auto_takes_the_discriminant_where_features_are_few_for_the_classes():
    assert LSSVMHead(J, K, rule="auto").rule == "lda"
    assert LSSVMHead(J, 2, rule="auto").rule == "least_squares"
    assert LSSVMHead(100 * K + 1, K, rule="auto").rule == "least_squares"
    assert LSSVMHead(J, K).rule == "least_squares"


def test_what_the_discriminant_refuses(samples):
    x, y = samples
    with pytest.raises(ValueError, match="ovr"):
        make(multiclass="ovo")
    with pytest.raises(ValueError, match="free"):
        make(intercept="none")
    with pytest.raises(ValueError, match="least_squares"):
        make(rule="ridge")
    with pytest.raises(ValueError, match="labels"):
        make().add(x, torch.randn(N, K))
    head = make().add(x, y)
    with pytest.raises(ValueError, match="least_squares"):
        head.influence(x, y, x[:5], y[:5])


def test_classes_with_one_sample_or_none():
    x, y = torch.randn(90, 2, generator=torch.Generator().manual_seed(0)), torch.arange(90) % 2
    y[0] = 2
    head = LSSVMHead(2, 4, rule="lda").add(x, y)
    assert head.leave_one_out(x, y)[0, :3].argmin() == 2  # without its only sample
    assert head.calibrate(x, y).predict_proba(x).isfinite().all()
    assert head.calibrate(x, y, groups=y).predict_proba(x).isfinite().all()
    alone = LSSVMHead(2, 3, rule="lda", rho=1.0).add(x[:6], torch.ones(6, dtype=torch.long))
    assert alone.predict(x).tolist() == [1] * 90
    one_each = LSSVMHead(2, 3, rule="lda", rho=1.0).add(x[:3], torch.arange(3))
    assert one_each.predict(x[:3]).tolist() == [0, 1, 2]


def test_a_class_that_is_emptied_from_float_sums():
    x, y = torch.randn(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(30) % 3
    head = LSSVMHead(3, 3, grid=None, rule="lda", rho=1.0, normalize="l2").add(x, y)
    for i in (y == 0).nonzero()[:, 0].tolist():
        head.remove(x[i : i + 1], y[i : i + 1])
    assert head(x).isfinite().all()
    assert (head.predict(x) > 0).all()


def test_auto_is_least_squares_for_float_targets():
    x, t = torch.randn(80, 5), torch.randn(80, 3)
    head = LSSVMHead(5, 3, rule="auto", rho=1.0).add(x, t)
    assert head.rule == "least_squares"
    assert torch.equal(head(x), LSSVMHead(5, 3, rho=1.0, grid=head.grid).add(x, t)(x))


def ordered(n: int = 60, spread: float = 0.3):
    """Classes on a line: least squares hides those in the middle."""
    y = torch.arange(n) % 4
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(0)) * spread + y[:, None], y


def uneven():
    """One class holds most samples and is five times as wide as the others: the discriminant's common covariance is wrong."""
    gen = torch.Generator().manual_seed(28)
    y = torch.where(torch.rand(60, generator=gen) < 0.7, 2, torch.arange(60) % 3)
    x = torch.randn(60, 4, generator=gen) * (1 + 4 * (y == 2))[:, None] + 2 * torch.randn(3, 4, generator=gen)[y]
    return x, y


@pytest.mark.parametrize(("data", "expected"), [(ordered, "lda"), (uneven, "least_squares")])
def test_auto_takes_the_rule_that_is_better_on_samples_left_out(data, expected):
    x, y = data()

    def left_out(rule: str) -> int:
        right = 0
        for i in range(len(x)):
            others = torch.arange(len(x)) != i
            head = LSSVMHead(x.shape[1], 4, rho=1.0, grid=64.0, rule=rule).add(x[others], y[others])
            right += int(head.predict(x[i : i + 1])[0] == y[i])
        return right

    assert (left_out("lda") > left_out("least_squares")) == (expected == "lda")
    head = LSSVMHead(x.shape[1], 4, rho=1.0, grid=64.0, rule="auto").add(x, y)
    assert head.rule == "lda"  # by the numbers of classes and features
    assert choose_rule(head, lambda: [(x[:20], y[:20], None), (x[20:], y[20:], None)]) == head.rule == expected
    assert head.choices["rule"].value == expected
    torch.testing.assert_close(head.w, LSSVMHead(x.shape[1], 4, rho=1.0, grid=64.0, rule=expected).add(x, y).w)


def test_a_rule_chosen_in_a_store_is_kept_and_forgets(tmp_path):
    x, y = ordered()
    options = {"rho": 1.0, "grid": 64.0}
    with SampleStore(tmp_path / "s", LSSVMHead(2, 4, rule="auto", **options)) as store:
        store.apply(Add(ids=list(range(60)), x=x, y=y, subject=["a"] * 20 + ["b"] * 40))
        store.refresh()
        assert store.head.choices["rule"].value == store.head.rule == "lda"
        store.erase(subjects=["a"], compact=True, certificate=tmp_path / "c.json")  # which chooses again
        assert verify(tmp_path / "c.json", head=store.head, store=store, allow_unsigned=True)
    with SampleStore(tmp_path / "s") as store:
        choice = store.head.choices["rule"]
        assert (choice.state.value, choice.method, choice.rule) == ("current", "loo", True)
        assert store.stats()["rule"] == str(choice)
        torch.testing.assert_close(store.head.w, LSSVMHead(2, 4, rule="lda", **options).add(x[20:], y[20:]).w)
        store.erase(subjects=["b"])
    with SampleStore(tmp_path / "s") as store:
        assert ("rule" in store.head.choices, store.head.config()["rule"]) == (False, "auto")


@pytest.mark.parametrize("empty", [lambda head, x, y: head.remove(x, y), lambda head, x, y: head.clear()])
def test_an_emptied_head_forgets_the_rule_that_it_chose(empty):
    x, y = uneven()
    head = LSSVMHead(4, 4, grid=64.0, rule="auto").add(x, y)
    assert choose_rule(head, lambda: [(x, y, None)]) == "least_squares"
    empty(head, x, y)
    assert head.config() == LSSVMHead(4, 4, grid=64.0, rule="auto").config()
    assert (head.rule, "rule" in head.choices) == ("lda", False)
    head.rule = "least_squares"  # given, not chosen
    empty(head.add(x, y), x, y)
    assert head.rule == "least_squares"
