"""Leave-one-out, influence and the choice of rho of ``MarginHead`` against heads that never saw the samples."""

import copy

import numpy as np
import pytest
import torch

from torchlssvm import FixedPoint, MarginHead, NotFittedError, RemovalError
from torchlssvm.linear.diagnostics import margin_changes

GRID = FixedPoint(64.0)


def samples(n=90, J=5, K=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % K
    x = torch.randn(n, J, generator=generator, dtype=torch.float64)
    x[:, 0] += y
    return GRID.snap(x), y


def without(x, y, rows, **options):
    keep = torch.ones(len(y), dtype=torch.bool)
    keep[rows] = False
    return MarginHead(x.shape[1], 3, grid=GRID, **({"rho": 1.0} | options)).add(x[keep], y[keep])


OPTIONS = [
    {}, {"intercept": "penalized"}, {"intercept": "none", "rho": 1e-3}, {"rho": 3.0}, {"class_weight": "balanced"},
    {"class_weight": torch.tensor([1.0, 3.0, 0.5])}, {"class_weight": "complement", "intercept": "penalized"},
]  # fmt: skip


@pytest.mark.parametrize(("options", "near"), [(o, 2048) for o in OPTIONS] + [(OPTIONS[0], 10), (OPTIONS[4], 10)])
def test_leave_one_out_is_retraining(options, near, monkeypatch):
    monkeypatch.setattr(margin_changes, "NEAR_SAMPLES", near)  # few at hand: what reaches further is done on a copy
    x, y = samples()
    head = MarginHead(5, 3, grid=GRID, **({"rho": 1.0} | options)).add(x, y)
    scores, digest = head.leave_one_out(x, y), head.digest()
    moved = 0
    for i in range(0, 90, 8):
        fresh = without(x, y, [i], **options)
        assert (scores[i] - fresh(x[i : i + 1])[0]).abs().max() < 1e-9
        keep = torch.arange(90) != i
        moved += int((head.active(x, y)[keep] != fresh.active(x[keep], y[keep])).sum())
    assert moved  # the active sets do move
    assert head.digest() == digest
    groups = (torch.arange(90) // 6).tolist()
    scores = head.leave_one_out(x, y, groups=groups)
    for g in (0, 7):
        rows = torch.arange(6 * g, 6 * g + 6)
        assert (scores[rows] - without(x, y, rows, **options)(x[rows])).abs().max() < 1e-9


def test_copies_and_lone_samples():
    x, y = samples(30)
    y[:] = torch.arange(30) % 2
    y[7] = 2  # the only one of its class
    head = MarginHead(5, 3, rho=1.0, grid=GRID).add(x, y).add(x[:3], y[:3])
    scores = head.leave_one_out(x, y)
    assert scores[7, 2] == -1.0
    for i in (0, 2, 7, 8):
        other = MarginHead(5, 3, rho=1.0, grid=GRID).add(x, y).add(x[:3], y[:3]).remove(x[i : i + 1], y[i : i + 1])
        assert (scores[i] - other.refresh()(x[i : i + 1])[0]).abs().max() < 1e-9
    both = head.leave_one_out(x[:3], y[:3], torch.full((3,), 2))
    assert (both[1] - without(x, y, [1]).add(x[[0, 2]], y[[0, 2]])(x[1:2])[0]).abs().max() < 1e-9
    with pytest.raises(RemovalError, match="held 2 time"):
        head.leave_one_out(x[:1], y[:1], [3])
    with pytest.raises(RemovalError, match="not held"):
        head.leave_one_out(x[:1] + 1, y[:1])
    with pytest.raises(ValueError, match="nothing to learn from"):
        head.leave_one_out(torch.cat([x, x[:3]]), torch.cat([y, y[:3]]), groups=[0] * 33)
    with pytest.raises(NotFittedError):
        MarginHead(5, 3, rho=1.0).leave_one_out(x, y)


def test_scale_is_held_fixed():
    x, y = samples()
    x[:, 2] *= 100
    grid = FixedPoint(1024.0, bits=26)
    head = MarginHead(5, 3, rho=1.0, grid=grid, scale="std", intercept="penalized").add(x, y)
    x = grid.snap(x)
    mean, deviation = x.mean(0), x.std(0, correction=0)
    z = (x - mean) / deviation
    fine = FixedPoint(16.0, bits=26)
    plain = MarginHead(5, 3, rho=1.0, grid=fine, intercept="penalized").add(z, y)
    assert (head.leave_one_out(x, y) - plain.leave_one_out(z, y)).abs().max() < 1e-5  # z is rounded to its grid


@pytest.mark.parametrize("options", OPTIONS[:1] + OPTIONS[4:5])
def test_influence_is_retraining(options):
    x, y = samples()
    x_new, y_new = samples(6, seed=1)
    x_val, y_val = samples(12, seed=2)
    head = MarginHead(5, 3, grid=GRID, **({"rho": 1.0} | options)).add(x, y)
    before = head(x_val)
    change = head.influence(x[:20], y[:20], x_val, on="scores")
    loss = head.influence(x[:20], y[:20], x_val, y_val)
    for i in range(0, 20, 3):
        after = without(x, y, [i], **options)(x_val)
        assert (change[i] - (after - before)).abs().max() < 1e-9
        signs = torch.where(y_val[:, None] == torch.arange(3), 1.0, -1.0)
        hinge = [(1 - signs * f).clamp(min=0).square().mean() for f in (after, before)]
        assert abs(float(loss[i] - (hinge[0] - hinge[1]))) < 1e-9
    change = head.influence(x_new, y_new, x_val, what="add", on="scores")
    for i in range(6):
        after = without(x, y, [], **options).add(x_new[i : i + 1], y_new[i : i + 1])(x_val)
        assert (change[i] - (after - before)).abs().max() < 1e-9
    change = head.influence(x[:9], y[:9], x_val, what="relabel", y_new=(y[:9] + 1) % 3, on="scores")
    for i in range(9):
        after = without(x, y, [i], **options).add(x[i : i + 1], (y[i : i + 1] + 1) % 3)(x_val)
        assert (change[i] - (after - before)).abs().max() < 1e-9
    groups = head.influence(x[:9], y[:9], x_val, y_val, on="accuracy", groups=[0, 0, 1, 1, 1, 2, 2, 2, 2])
    after = without(x, y, [2, 3, 4], **options)(x_val).argmax(1)
    assert (
        abs(float(groups[1]) - float(((after == y_val).double() - (before.argmax(1) == y_val).double()).mean())) < 1e-12
    )
    ranked = head.most_influential(x, y, x_val, y_val, 3)
    assert len(ranked.helpful) == 3
    assert ranked.help[0] == head.influence(x, y, x_val, y_val).max()


def test_rho_is_chosen_by_retraining():
    x, y = samples(60)
    head = MarginHead(5, 3, rho=1.0, grid=GRID).add(x, y)
    values = [0.01, 1.0, 50.0]
    path = head.select_rho(values, "loo", score="squared")
    for rho, error in list(zip(values, path.errors.tolist(), strict=True))[:2]:
        scores = torch.cat([without(x, y, [i], rho=rho)(x[i : i + 1]) for i in range(60)])
        signs = torch.where(y[:, None] == torch.arange(3), 1.0, -1.0)
        assert abs(float((1 - signs * scores).clamp(min=0).square().mean()) - error) < 1e-9
    assert head.rho == path.rho == values[int(path.errors.argmin())]
    assert head.choices["rho"].method == "loo"
    path = head.select_rho(values, folds=4)
    fold = head.samples.folds(4)
    rows = GRID.dequantize(head.samples.q)
    wrong = 0
    for f in range(4):
        out = fold == f
        part = MarginHead(5, 3, grid=GRID, rho=1.0).add(rows[~out], head.samples.labels[~out])
        wrong += int((part.predict(rows[out]) != head.samples.labels[out]).sum())
    assert abs(float(path.errors[1]) - wrong / 60) < 1e-12
    mixed = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    again = MarginHead(5, 3, rho=1.0, grid=GRID).add(x[mixed], y[mixed])
    assert torch.equal(again.select_rho(values, folds=4).errors, path.errors)  # folds do not depend on the order
    with pytest.raises(ValueError, match="generalized cross-validation"):
        head.select_rho(values, "gcv")
    with pytest.raises(ValueError, match="finite and > 0"):
        head.select_rho([1.0, -1.0])
    with pytest.raises(NotFittedError):
        MarginHead(5, 3, rho=1.0).select_rho()


def test_leave_one_out_after_updates_of_the_inverse():
    x, y = samples(220, J=60)
    head = MarginHead(60, 3, grid=GRID, rho=20.0).add(x, y)
    _ = head.w
    for i in range(0, 12, 3):
        _ = head.remove(x[i : i + 3], y[i : i + 3]).w
    fresh = MarginHead(60, 3, grid=GRID, rho=20.0).add(x[12:], y[12:])
    scores = head.leave_one_out(x[12:], y[12:])
    assert (scores - fresh.leave_one_out(x[12:], y[12:])).abs().max() < 1e-10
    for i in (12, 50, 111):
        assert (scores[i - 12] - without(x, y, [*range(12), i], rho=20.0)(x[i : i + 1])[0]).abs().max() < 1e-9
    _ = head.remove(x[12:13], y[12:13]).w  # what was computed for it is in use no more
    assert torch.equal(head.refresh().w, fresh.remove(x[12:13], y[12:13]).refresh().w)


def test_the_last_sample_of_a_class_with_weights_by_count() -> None:
    x, y = torch.eye(5, 60, dtype=torch.float64), torch.tensor([0, 1, 1, 1, 1])
    head = MarginHead(60, 3, grid=8.0, rho=1e-6, class_weight="balanced").add(x, y)
    rest = MarginHead(60, 3, grid=8.0, rho=1e-6, class_weight="balanced").add(x[1:], y[1:])
    assert torch.equal(head.leave_one_out(x[:1], y[:1]), rest(x[:1]))


def test_near_copies_at_a_small_rho() -> None:
    random = np.random.default_rng(421)
    x = random.normal(size=(40, 60))
    x = x[random.integers(0, 11, 40)] + random.integers(-1, 2, (40, 60)) * 2.0**-16
    x, y, grid = np.sign(x) * np.sqrt(np.abs(x)), random.integers(0, 4, 40), FixedPoint(8.0)
    weight = torch.tensor([2.0, 1.0, 0.5, 1.5])
    rest, one = np.array([i for i in range(2, 40) if i != 19]), slice(19, 20)  # left without it: 1e-7 of the whole
    head, other = (
        MarginHead(60, 4, grid=grid, rho=1e-6, intercept="penalized", class_weight=weight).add(x[some], y[some])
        for some in (np.arange(40), rest)
    )
    assert head.weight.isfinite().all()  # solved before the removal, which then updates the inverse
    head.remove(x[:2], y[:2])
    wanted = other(grid.snap(torch.tensor(x[one])))
    torch.testing.assert_close(head.leave_one_out(x[one], y[one]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("seed", "intercept"), [(0, "none"), (3, "free"), (3, "penalized")])
def test_changes_where_a_side_is_decided_beyond_rounding(seed, intercept):
    # rows so long beside rho that active samples lie on their margins, to all digits of float64
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-1, 2, (12, 4), generator=generator)
    q[:4], q[4] = 0, torch.tensor([73, 253, 31, 145])
    grid, some = FixedPoint(2.0**24, bits=8), [4, 7]
    x, y = q.to(torch.float64) * grid.resolution, torch.randint(0, 2, (12,), generator=generator)
    y[:2] = torch.arange(2)
    options = {"rho": 1e-6, "intercept": intercept, "grid": grid}
    head = MarginHead(4, 2, **({"rho": 1.0} | options)).add(x, y)
    scores = head.leave_one_out(x[some], y[some])
    swapped = head.influence(x[some], y[some], x, what="relabel", on="scores", y_new=1 - y[some]) + head(x)
    for j, i in enumerate(some):
        keep = torch.arange(12) != i
        rest = MarginHead(4, 2, **({"rho": 1.0} | options)).add(x[keep], y[keep])
        other = MarginHead(4, 2, **({"rho": 1.0} | options)).add(x, torch.where(keep, y, 1 - y))
        for found, truth in ((scores[j], rest(x[i : i + 1])[0]), (swapped[j], other(x))):
            assert (found - truth).abs().max() < 1e-6 * max(1.0, float(truth.abs().max()))


def test_a_change_after_which_full_steps_lead_away():
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = (torch.from_numpy(a) for a in datasets.load_digits(return_X_y=True))
    y = (y == 1).long()
    head = MarginHead(64, 2, rho=1e-2, grid=32.0).add(x, y)
    head(x[:1])
    again, one = copy.deepcopy(head), (x[1117:1118], y[1117:1118])
    again.remove(*one)(x[:1])
    again.add(*one)
    assert torch.equal(again.active(x, y), head.active(x, y))
    assert (again.w - head.w).abs().max() < 1e-8 * head.w.abs().max()
