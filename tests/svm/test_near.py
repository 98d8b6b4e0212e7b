"""Walks that look at the samples near the margin only end where those do that look at all."""

import copy

import pytest
import torch

from tests.svm.test_degenerate import churn
from tests.svm.test_hostile import units
from tests.svm.truth import rbf
from torchlssvm import IncrementalSVM
from torchlssvm.kernels import RBF, Linear, Polynomial
from torchlssvm.svm import margin_set, solver


def points(n, d):
    """Two classes that overlap a little: most samples are reserve vectors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.2 * torch.randn(n, generator=generator) > 0).long()
    x[:, 0] *= 3.0
    return x, y


@pytest.fixture
def short_sight(monkeypatch):
    """Hardly anything is near: most samples on the wrong side are found only where a walk ends."""

    def see(**constants):
        for name, value in constants.items():
            monkeypatch.setattr(margin_set, name, value)

    see(MIN_SAMPLES_FOR_WATCH=6, MIN_WATCHED=1, SAMPLES_PER_WATCHED=50)
    return see


@pytest.mark.parametrize(
    "kernel", [RBF(sigma=3.0), Linear(), Polynomial(degree=2)], ids=["rbf", "linear", "polynomial"]
)
def test_random_operations(short_sight, kernel):
    x, y = points(80, 3)
    svm = IncrementalSVM(kernel, C=2.0)
    churn(svm, x, y, 250, 0, 5)


@pytest.mark.parametrize("C", [2.0, 50.0])
def test_every_g_is_kept(short_sight, C):
    """g of the samples that no walk looks at is what its definition says."""
    x, y = points(200, 3)
    svm = IncrementalSVM(RBF(sigma=2.0), C=C).fit(x[:150], y[:150])
    truth = copy.deepcopy(svm)
    for i in range(150, 200):
        svm.add(x[i : i + 1], y[i : i + 1])
        if i % 3 == 0:
            svm.remove([i - 100])
        before = svm.g
        want = (2.0 * svm.y - 1.0) * svm.decision(x[svm.ids]) - 1.0
        assert float((want - before).abs().max()) < 1e-11
    assert svm.kkt_violation() < 1e-11
    truth.update((x[150:], y[150:]), [i - 100 for i in range(150, 200) if i % 3 == 0])
    torch.testing.assert_close(svm.alpha, truth.alpha, rtol=0, atol=1e-9)


def test_error_vectors_that_no_walk_looks_at(short_sight, monkeypatch):
    """Most samples are error vectors; those that come to the right side are found where a walk ends, and walked back."""
    monkeypatch.setattr(solver, "ActiveSet", None)  # no need of it
    x, _ = points(200, 3)
    y, weight = torch.arange(200) % 2, torch.where(torch.arange(200) % 9 == 0, 20.0, 1.0)
    K = rbf(x.numpy(), x.numpy(), 1 / 18)
    svm = IncrementalSVM(RBF(sigma=3.0), C=1.0).fit(x[:150], y[:150], weight[:150])
    assert len(svm.error) > 100
    for i in range(150, 200):
        svm.add(x[i : i + 1], y[i : i + 1], weight[i : i + 1])
        svm.remove([i - 150])
        now = svm.ids.numpy()
        sign, u = 2.0 * svm.y.numpy() - 1.0, weight[now].numpy()
        assert (
            units(K[now][:, now], sign, u, svm.alpha.numpy(), svm.b)
            < solver.MAX_ROUNDING_UNITS + 4 * solver.MAX_REST_ROUNDING_UNITS
        )


def test_no_near_sample_can_balance_the_drive(short_sight):
    """Every near sample is of one class and at its bound: the walk has to look at all."""
    x = torch.tensor([[-3.0 - 0.01 * i, 0.0] for i in range(20)] + [[3.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([0] * 20 + [1])
    svm = IncrementalSVM(Linear(), C=0.01)
    for i in range(21):
        svm.add(x[i : i + 1], y[i : i + 1])
        assert svm.kkt_violation() < 1e-12
    for i in range(20):
        svm.remove([i])
        assert svm.kkt_violation() < 1e-12


def test_events_that_are_watched_are_those_of_the_whole_path(short_sight):
    """With a callback every sample is looked at: the events are the path's own, in its order."""
    x, y = points(60, 2)
    seen = []
    svm = IncrementalSVM(RBF(sigma=1.0), C=3.0, callback=seen.append).fit(x[:50], y[:50])
    seen.clear()
    whole = []
    short_sight(MIN_SAMPLES_FOR_WATCH=1000)
    other = copy.deepcopy(svm).on_event(whole.append)
    other.add(x[50:], y[50:], method="path")
    short_sight(MIN_SAMPLES_FOR_WATCH=6)
    svm.add(x[50:], y[50:], method="path")
    assert seen
    assert [(event.id, event.to) for event in seen] == [(event.id, event.to) for event in whole]
