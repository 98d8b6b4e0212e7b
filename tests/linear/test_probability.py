"""Calibration, probabilities, leverage and uncertainty; and that they follow the samples."""

import io
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.calibration import _SigmoidCalibration
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from tests.conftest import solve_dense
from torchlssvm import FixedPoint, LSSVMHead, MarginHead, NotFittedError, VerificationError, verify
from torchlssvm.audit import Outcome
from torchlssvm.events import Add, Remove
from torchlssvm.functional.calibration import (
    expected_calibration_error,
    fit_isotonic,
    fit_platt,
    fit_temperature,
    interpolate,
    least_squares,
    reliability,
)
from torchlssvm.linear.data_choices import ChoiceState
from torchlssvm.linear.diagnostics.calibration import fit
from torchlssvm.linear.diagnostics.uncertainty import calibrate_on, leverage, uncertainty
from torchlssvm.store import SampleStore

GRID = FixedPoint(16.0)


def problem(n: int = 120, K: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % K
    return torch.randn(n, 5, generator=generator) + torch.nn.functional.one_hot(y, 5), y


def test_platt_is_that_of_scikit_learn() -> None:
    torch.manual_seed(0)
    s = torch.randn(300).double()
    hit = (s + torch.randn(300)) > 0.3
    for d in (torch.ones(300).double(), torch.randint(1, 4, (300,)).double()):
        a, c = fit_platt(s, hit, d).tolist()
        theirs = _SigmoidCalibration().fit(s.numpy(), hit.numpy().astype(int), sample_weight=d.numpy())
        p = 1 / (1 + np.exp(-(a * s.numpy() + c)))
        np.testing.assert_allclose(p, theirs.predict(s.numpy()), atol=2e-4)
        p = torch.as_tensor(p)  # at the optimum the gradient is zero, which theirs is not quite
        plus, minus = d[hit].sum(), d[~hit].sum()
        target = torch.where(hit, (plus + 1) / (plus + 2), 1 / (minus + 2))
        assert abs((d * (p - target)).sum()) < 1e-8
        assert abs((d * (p - target) * s).sum()) < 1e-8


def test_isotonic_is_that_of_scikit_learn() -> None:
    torch.manual_seed(0)
    s = (torch.randn(200).double() * 20).round() / 20  # with ties
    hit, d = torch.rand(200) < torch.sigmoid(3 * s), torch.randint(1, 4, (200,)).double()
    knots, values = fit_isotonic(s, hit, d)
    theirs = IsotonicRegression(out_of_bounds="clip").fit(s.numpy(), hit.numpy(), sample_weight=d.numpy())
    at = torch.linspace(-4, 4, 333).double()
    np.testing.assert_allclose(interpolate(at, knots, values).numpy(), theirs.predict(at.numpy()), atol=1e-9)
    assert (values.diff() >= 0).all()


def test_temperature_is_the_minimum() -> None:
    torch.manual_seed(0)
    y = torch.arange(200) % 4
    s = torch.randn(200, 4).double() + torch.nn.functional.one_hot(y, 4)
    t = fit_temperature(s, y, torch.ones(200).double())
    eps = 1 / 202
    target = torch.where(torch.nn.functional.one_hot(y, 4) > 0, 1 - eps, eps / 3)
    loss = lambda v: -(target * torch.log_softmax(v * s, 1)).sum()  # noqa: E731
    assert all(loss(t) <= loss(t * f) for f in (0.999, 1.001))
    for scale in (1e-4, 1e4):  # of any size; separable ones too
        assert torch.isfinite(fit_temperature(s * scale, y, torch.ones(200).double())).all()
    one_hot = torch.nn.functional.one_hot(y, 4).double()
    assert torch.softmax(fit_temperature(one_hot, y, torch.ones(200).double()) * one_hot, 1).amax() < 1


@given(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=12))
def test_any_scores_give_finite_maps(pairs) -> None:
    s, hit = torch.tensor([p[0] for p in pairs]).double(), torch.tensor([p[1] for p in pairs])
    d = torch.ones(len(s)).double()
    assert torch.isfinite(fit_platt(s, hit, d)).all()
    knots, values = fit_isotonic(s, hit, d)
    assert (values.diff() >= 0).all()
    assert ((interpolate(s, knots, values) >= 0) & (interpolate(s, knots, values) <= 1)).all()


@given(st.lists(st.lists(st.floats(-3, 3), min_size=3, max_size=3), min_size=1, max_size=8))
def test_least_squares_probabilities_are_a_projection(rows) -> None:
    scores = torch.tensor(rows).double()
    p = least_squares(scores)
    assert torch.allclose(p.sum(1), torch.ones(len(p)).double())
    assert (p >= 0).all()
    corners = torch.eye(3).double()  # the nearest point: no corner of the simplex lies beyond it
    goal = (1 + scores) / 2
    assert (((goal - p)[:, None, :] * (corners - p[:, None, :])).sum(2) <= 1e-9).all()


@given(st.lists(st.lists(st.floats(-3, 3), min_size=3, max_size=3), min_size=2, max_size=8), st.data())
def test_with_a_temperature_the_most_probable_class_is_the_predicted_one(rows, data) -> None:
    """Also where scores say the opposite of the labels, so that the best temperature is zero."""
    scores = (torch.tensor(rows).double() * 1e3).round() / 1e3
    y = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))))
    calibration = fit(scores, y, torch.ones(len(y)).double(), "temperature")
    assert torch.equal(calibration(scores).argmax(1), scores.argmax(1))


@pytest.mark.parametrize("K", [2, 3])
def test_isotonic_steps_are_ordered_by_score(K) -> None:
    """On one step all classes are equally probable but for a billionth, which goes by score: no class wins by its number."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(200, K, generator=generator).double()
    if K == 2:
        scores[:, 0] = -scores[:, 1]
        y = torch.arange(200) % 2  # labels that have nothing to do with the scores, sorted so that one step fits all
        y = y[scores[:, 1].argsort(descending=True).argsort()]
        calibration = fit(scores, y, torch.ones(200).double(), "isotonic")
    else:
        hits = scores.argmax(1)
        calibration = fit(scores + 5 * torch.nn.functional.one_hot(hits, K), hits, torch.ones(200).double(), "isotonic")
        scores = scores - 20  # less than any class ever had
    p = calibration(scores)
    assert torch.allclose(p, torch.full_like(p, 1 / K), atol=1e-6 if K == 2 else 1.0)
    assert torch.equal(p.argmax(1), scores.argmax(1))
    assert torch.allclose(p.sum(1), torch.ones(200).double())


@pytest.mark.parametrize(("method", "K"), list(itertools.product(["temperature", "platt", "isotonic"], [2, 3])))
def test_recalibrated_is_calibrated_from_scratch(method, K) -> None:
    x, y = problem(K=K)
    head = LSSVMHead(5, K, grid=GRID, rho=1.0).add(x, y).calibrate(x, y, method)
    before = head.predict_proba(x)
    assert torch.allclose(before.sum(1), torch.ones(len(x)).double())
    assert (before >= 0).all()
    head.remove(x[:30], y[:30])
    with pytest.raises(NotFittedError, match="calibrate"):
        head.predict_proba(x)
    assert head.calibration is None
    assert head.predict_proba(x, calibrated=False).shape == (len(x), K)
    head.refresh().calibrate(x[30:], y[30:], method)
    never = LSSVMHead(5, K, grid=GRID, rho=1.0).add(x[30:], y[30:]).calibrate(x[30:], y[30:], method)
    assert torch.equal(head.predict_proba(x), never.predict_proba(x))
    assert not torch.equal(head.predict_proba(x), before)
    assert torch.allclose(
        head.calibration(head.leave_one_out(x[30:], y[30:])), head.calibration(never.leave_one_out(x[30:], y[30:]))
    )


def test_every_change_makes_it_void() -> None:
    x, y = problem()
    for change in (
        lambda h: h.add(x[:3], y[:3]),
        lambda h: h.remove(x[:3], y[:3]),
        lambda h: h.relabel(x[:3], y[:3], (y[:3] + 1) % 3),
        lambda h: h.replace(x[:3], y[:3], x[:3] + 1, y[:3]),
        lambda h: h.merge(LSSVMHead(5, 3, grid=GRID, per_class=True, rho=1.0).add(x[:3], y[:3])),
        lambda h: h.forget_class(1),
        lambda h: setattr(h, "rho", 3.0),
        lambda h: setattr(h, "class_weight", "balanced"),
    ):
        head = LSSVMHead(5, 3, grid=GRID, per_class=True, rho=1.0).add(x, y).calibrate(x, y)
        change(head)
        assert head.calibration is None
        assert head.choices["calibration"].state is ChoiceState.STALE
    assert LSSVMHead(5, 3, grid=GRID, rho=1.0).add(x, y).calibrate(x, y).refresh().calibration is not None


@pytest.mark.parametrize("method", ["temperature", "platt", "isotonic"])
def test_it_is_saved_copied_and_loaded(method) -> None:
    x, y = problem()
    head = LSSVMHead(5, 3, grid=GRID, rho=1.0).add(x, y).calibrate(x, y, method)
    file = io.BytesIO()
    torch.save(head.state_dict(), file)
    file.seek(0)
    other = LSSVMHead(5, 3, grid=GRID, rho=1.0)
    other.load_state_dict(torch.load(file, weights_only=True))
    file = io.BytesIO()
    torch.save(head, file)
    file.seek(0)
    for copy in (other, torch.load(file, weights_only=False)):
        assert torch.equal(copy.predict_proba(x), head.predict_proba(x))
    damaged = head.state_dict()
    damaged["calibration"] = damaged["calibration"] + 1
    with pytest.raises(Exception, match="checksum"):
        LSSVMHead(5, 3, grid=GRID, rho=1.0).load_state_dict(damaged)
    head.remove(x[:1], y[:1])
    saved = head.state_dict()  # what a removed sample has shaped is not written out
    assert "calibration" not in saved
    assert json.loads(bytes(saved["options"].tolist()).decode())["made"]["calibration"]["state"] == "stale"
    other.load_state_dict(head.state_dict())
    with pytest.raises(NotFittedError):
        other.predict_proba(x)


def test_the_store_keeps_it_and_certificates_name_it(tmp_path) -> None:
    x, y = problem(120)
    with SampleStore(tmp_path / "s", head=LSSVMHead(5, 3, grid=GRID, rho=1.0)) as store:
        store.apply(Add(ids=range(120), x=x, y=y, subject=[f"user{i % 4}" for i in range(120)]))
        store.head.select_rho([0.1, 1.0, 10.0])
        store.calibrate()
        p = store.head.predict_proba(x)
    with SampleStore(tmp_path / "s") as store:
        assert torch.equal(store.head.predict_proba(x), p)
        erased = store.apply(Remove(subject="user1")).event_id
        choices = store.certificate(erased).scope["choices"]
        assert (choices["calibration"]["state"], choices["rho"]["state"]) == ("void", "kept")
    with SampleStore(tmp_path / "s") as store:
        with pytest.raises(NotFittedError):
            store.head.predict_proba(x)
        store.head.select_rho([0.1, 1.0, 10.0])
        store.calibrate()
        choices = store.certificate(erased).scope["choices"]
        assert choices["calibration"].keys() == {"state", "how", "commitment"}
        assert choices["calibration"]["state"] == "current"
        assert not any(repr(v) in str(choices) for v in store.head.calibration.values.tolist())
        assert choices["rho"]["state"] == "current"
        keep = [i for i in range(120) if i % 4 != 1]
        never = LSSVMHead(5, 3, grid=GRID, rho=1.0).add(x[keep], y[keep])
        never.select_rho([0.1, 1.0, 10.0])
        assert torch.allclose(
            never.calibrate(x[keep], y[keep]).calibration.values, store.head.calibration.values, rtol=1e-10
        )


def test_calibration_error_by_hand() -> None:
    p = torch.tensor([[0.95, 0.05], [0.95, 0.05], [0.35, 0.65], [0.4, 0.6]]).double()
    y = torch.tensor([0, 1, 1, 1])
    # bins of 1/15: two at 0.95 with accuracy 1/2, one at 0.65 and one at 0.6, both right
    assert expected_calibration_error(p, y) == pytest.approx((2 * 0.45 + 0.35 + 0.4) / 4)
    confidence, accuracy, count = reliability(p, y)
    assert int(count.sum()) == 4
    assert confidence[14] == pytest.approx(0.95)
    assert accuracy[14] == 0.5


@pytest.mark.parametrize("intercept", ["free", "penalized", "none"])
def test_leverage_and_uncertainty_by_dense_algebra(intercept) -> None:
    x, y = problem(60)
    x = GRID.snap(x)
    head = LSSVMHead(5, 3, rho=0.7, grid=GRID, intercept=intercept).add(x, y)
    z = torch.cat([x[:4], 40 * torch.ones(1, 5).double()])
    design, at = x, z
    if intercept == "free":
        design, at = x - x.mean(0), z - x.mean(0)
    elif intercept == "penalized":
        design, at = (torch.nn.functional.pad(v, (0, 1), value=1.0) for v in (x, z))
    A = design.T @ design + 0.7 * torch.eye(design.shape[1]).double()
    g = ((at @ A.inverse()) * at).sum(1) + (1 / 60 if intercept == "free" else 0)
    assert torch.allclose(leverage(head, z), g)
    dof = (A.inverse() @ design.T @ design).trace() + (intercept == "free")
    w, b = solve_dense(x, y, 3, rho=0.7, intercept=intercept)
    rss = (2 * torch.nn.functional.one_hot(y, 3) - 1 - x @ w - b).square().sum(0)
    assert torch.allclose(uncertainty(head, z), (g[:, None] * rss / (60 - dof)).sqrt())
    assert torch.allclose(leverage(head, x, relative=True).mean(), torch.ones(()).double())
    assert leverage(head, z, relative=True)[4] > 20  # far away
    assert leverage(head, z[:0]).shape == (0,)


def test_leverage_of_the_other_forms() -> None:
    x, y = problem(60)
    ovr = LSSVMHead(5, 3, grid=GRID, rho=1.0).add(x, y)
    assert torch.allclose(
        leverage(LSSVMHead(5, 3, grid=GRID, multiclass="ovo", rho=1.0).add(x, y), x), leverage(ovr, x)
    )


def test_probabilities_of_pairs_and_batches() -> None:
    x, y = problem()
    head = LSSVMHead(5, 3, grid=GRID, multiclass="ovo", class_weight="balanced", rho=1.0).add(x, y).calibrate(x, y)
    assert torch.allclose(head.predict_proba(x).sum(1), torch.ones(len(x)).double())
    whole = LSSVMHead(5, 3, grid=GRID, rho=1.0).add(x, y)
    scores = torch.cat([whole.leave_one_out(x[i : i + 50], y[i : i + 50]) for i in range(0, 120, 50)])
    calibrate_on(whole, scores, y)
    a, b = whole.calibration.values, whole.calibrate(x, y).calibration.values
    assert torch.allclose(a, b)
    users = torch.arange(120) // 10
    assert not torch.equal(whole.calibrate(x, y, groups=users).calibration.values, b)


def test_bad_input() -> None:
    x, y = problem()
    head = LSSVMHead(5, 3, grid=GRID, rho=1.0).add(x, y)
    with pytest.raises(ValueError, match="method must be one of"):
        head.calibrate(x, y, "magic")
    with pytest.raises(ValueError, match="x is empty"):
        head.calibrate(x[:0], y[:0])
    with pytest.raises(ValueError, match="labels"):
        calibrate_on(head, torch.zeros(3, 3), torch.zeros(2, dtype=torch.int64))
    for judge in (head, MarginHead(5, 3, rho=1.0, grid=GRID).add(x, y)):
        with pytest.raises(ValueError, match=r"outside 0\.\.2"):
            calibrate_on(judge, torch.zeros(3, 3), torch.tensor([0, 1, 7]))
    values = LSSVMHead(5, 2, rho=1.0).add(x, torch.randn(120, 2))
    with pytest.raises(ValueError, match="float targets"):
        values.calibrate(x, torch.randn(120, 2))
    with pytest.raises(ValueError, match="float targets"):
        values.predict_proba(x)
    with pytest.raises(NotFittedError):
        LSSVMHead(5, 3, rho=1.0).predict_proba(x)
    with pytest.raises(NotFittedError):
        leverage(LSSVMHead(5, 3, rho=1.0), x)
    with pytest.raises(ValueError, match="ovr"):
        uncertainty(LSSVMHead(5, 3, multiclass="ovo", rho=1.0).add(x, y), x)


def test_verification_makes_the_calibration_again(tmp_path) -> None:
    """A head that keeps probabilities shaped by what was erased does not pass; nor do made-up ones."""
    x, y = problem(120)
    for method in ("temperature", "platt", "isotonic"):
        with SampleStore(tmp_path / method, head=LSSVMHead(5, 3, grid=GRID, rho=1.0)) as store:
            store.apply(Add(ids=range(120), x=x, y=y, subject=[f"user{i % 4}" for i in range(120)]))
            store.calibrate(method)
            old = store.head.calibration
            erased = store.apply(Remove(subject="user1")).event_id
            void = store.certificate(erased)
            ask = {"head": store.head, "allow_unsigned": True}
            assert verify(void, store=store, **ask).checks["calibration"].outcome is Outcome.VOID
            store.calibrate(method)
            certificate = store.certificate(erased)
            assert "error" in verify(certificate, store=store, **ask).checks["calibration"].facts
            assert "error" in verify(void, store=store, **ask).checks["calibration"].facts
            alone = ask | {"opening": store.opening()}
            assert verify(certificate, **alone).checks["calibration"].outcome is Outcome.HOLDS
            assert verify(void, **alone).checks["calibration"].outcome is Outcome.NOT_CHECKED
            store.head._choices.record_calibration(old)  # still that of the erased samples
            with pytest.raises(VerificationError, match="calibration differs"):
                verify(certificate, **alone)
            for c in (void, certificate):
                with pytest.raises(VerificationError, match="calibration"):
                    verify(c, store=store, **ask)
            rows = store.get(store.find())
            store.head.calibrate(rows.x, rows.y, method, groups=torch.arange(len(rows.y)) // 3)
            assert verify(certificate, store=store, **ask).checks["calibration"].facts["grouped"]
            again = LSSVMHead(5, 3, grid=GRID, rho=1.0)
            again.load_state_dict(store.head.state_dict())
            assert again.calibration.grouped


def test_a_margin_head_calibrates_itself_on_the_samples_it_keeps() -> None:
    x, y = problem()
    head = MarginHead(5, 3, grid=GRID, rho=1.0).add(x, y)
    with pytest.raises(NotFittedError, match="calibrate"):
        LSSVMHead(5, 3, grid=GRID, rho=1.0).add(x, y).predict_proba(x)
    head.predict_proba(x)
    head.remove(x[:30], y[:30]).refresh()
    never = MarginHead(5, 3, grid=GRID, rho=1.0).add(x[30:], y[30:])
    assert torch.equal(head.predict_proba(x), never.predict_proba(x))
    again = MarginHead(5, 3, grid=GRID, rho=1.0).add(x[30:], y[30:]).calibrate(x[30:], y[30:])
    torch.testing.assert_close(head.predict_proba(x), again.predict_proba(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["temperature", "platt"])
def test_fractions_of_weights_do_not_soften_probabilities(method) -> None:
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(300, 4, generator=gen), torch.arange(300) % 2
    x[:, 0] += 2 * y
    found = []
    for share in (1.0, 1 / 64):
        head = LSSVMHead(4, 2, grid=None, rho=2.0 * share, class_weight="balanced")
        weight = torch.full((300,), share, dtype=torch.float64)
        head.add(x, y, weight).calibrate(x, y, method, weight=weight)
        found.append((head.w, head.predict_proba(x)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-9)


def test_balanced_weights_follow_fractional_counts() -> None:
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 3, generator=gen), (torch.arange(60) < 10).long()
    heads = [
        LSSVMHead(3, 2, grid=None, rho=share, class_weight="balanced").add(x, y, torch.full((60,), share).double())
        for share in (1.0, 1 / 64)
    ]
    torch.testing.assert_close(heads[1](x), heads[0](x), rtol=0, atol=1e-9)
