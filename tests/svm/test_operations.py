"""Operations that fail, are interrupted or come from a callback; answers where rounding or an empty margin set could mislead."""

from __future__ import annotations

import copy
import os
import random
import signal
import threading

import numpy as np
import pytest
import torch

from torchlssvm import IncrementalSVM, KernelLSSVM, LagrangianSVM, OneVsRest, RemovalError
from torchlssvm.kernels import RBF, Laplacian
from torchlssvm.svm import leave_one_out


def noisy(n, seed=0, d=2):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] + 0.5 * torch.randn(n, generator=generator, dtype=torch.float64) > 0).long()


def units(svm, K):
    """The largest violation of the Kuhn-Tucker conditions, in units of rounding, from alpha, b and a kernel matrix (n, n)."""
    alpha, y = svm.alpha.numpy(), 2.0 * svm.y.numpy() - 1.0
    g = y * (K @ (y * alpha) + svm.b) - 1.0
    unit = 2.0**-52 * (np.abs(K) @ alpha + abs(svm.b) + 1.0)
    C = float(svm.C)
    off = np.where(alpha <= 0, -g, np.where(alpha >= C, g, np.abs(g)))
    return float((off / unit).max())


@pytest.mark.parametrize("C", [1e3, 1e6, 1e10])
def test_pivoting_leaves_no_roundings_behind(C):
    for seed in range(12):
        x, y = noisy(60, seed)
        svm = IncrementalSVM(RBF(gamma=2.0), C=C)
        svm.add(x[:30], y[:30], method="pivot")
        svm.add(x[30:], y[30:], method="pivot")
        svm.remove(svm.ids[::3], method="pivot")
        held = x[svm.ids]
        assert units(svm, np.exp(-2.0 * torch.cdist(held, held).square().numpy())) <= 256.0


def test_leave_one_out_where_the_margin_set_becomes_empty(monkeypatch):
    for seed in range(60):
        x, y = noisy(12, seed)
        svm = IncrementalSVM(RBF(gamma=1.0), C=0.3)
        svm.add(x, y)
        found = svm.leave_one_out().margin
        with monkeypatch.context() as one_by_one:
            one_by_one.setattr(leave_one_out.Tableau, "margins", lambda _, samples: np.full(len(samples), np.nan))
            assert torch.allclose(svm.leave_one_out().margin, found, atol=1e-9), seed


def test_a_callback_may_read_and_not_change():
    x, y = noisy(60)
    svm = IncrementalSVM(RBF(gamma=1.0), C=10.0, record=True)
    ids = svm.add(x, y)
    alpha, scores, events = svm.alpha, copy.deepcopy(svm).decision(x), len(svm.trajectory)
    changes = [
        lambda: svm.add(x[:1], y[:1]), lambda: svm.remove(ids[:1]), lambda: svm.set_C(1.0), lambda: svm.polish(),
        lambda: svm.leave_one_out(), lambda: svm.k_fold(3), lambda: svm.reset(), lambda: svm.relabel(ids[:1], y[:1]),
    ]  # fmt: skip
    for change in changes:

        def callback(event, change=change):
            svm.decision(x)
            change()

        svm.on_event(callback)
        with pytest.raises(RuntimeError, match="it may only be read"):
            svm.remove(ids[:20], method="joint")
        svm.on_event(None)
        assert torch.equal(svm.alpha, alpha)
        assert torch.equal(svm.decision(x), scores)  # no answer is left from inside
        assert len(svm.trajectory) == events


@pytest.mark.parametrize(
    "wrong",
    [True, [True], torch.tensor([True, False]), [1.0], torch.tensor([1.0]), torch.ones(2, 3), "1", [None], None],
)
@pytest.mark.parametrize("machine", [IncrementalSVM, KernelLSSVM, LagrangianSVM])
def test_ids_are_integers(machine, wrong):
    svm = machine(RBF(gamma=1.0))
    svm.add(*noisy(6))
    with pytest.raises((ValueError, RemovalError)):
        svm.remove(wrong)
    assert len(svm) == 6
    assert svm.remove([np.int64(0), torch.tensor(1)]).ids.tolist() == [2, 3, 4, 5]


DAMAGE = {
    "labels": {"y": lambda v: v * 0},
    "weights": {"weight": lambda v: -v},
    "format": {"format": lambda v: v + 1},
    "C": {"C": lambda v: v * 0},
    "ids": {"ids": lambda v: v - 1},
    "float ids": {"ids": lambda v: v.double()},
    "the next id": {"numbers": lambda v: v * torch.tensor([1.0, 0.0, 1.0, 1.0])},
    "sides": {"side": lambda v: v + 0.5},
    "alpha": {"alpha": lambda v: v.tolist()},
    "gamma": {"kernel._extra_state": lambda v: -v},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_refused(damage):
    x, y = noisy(30)
    svm, other = IncrementalSVM(RBF(gamma=1.0), C=5.0), IncrementalSVM(RBF(gamma=2.0))
    svm.add(x, y)
    other.add(x[:10], y[:10])
    before, state = other.decision(x), svm.state_dict()
    state |= {name: change(state[name]) for name, change in damage.items()}
    with pytest.raises(ValueError):  # noqa: PT011
        other.load_state_dict(state)
    assert torch.equal(other.decision(x), before)


def test_a_damaged_checkpoint_changes_none_of_several_machines():
    x, y = noisy(30)
    saved, other = (OneVsRest(IncrementalSVM(RBF(gamma=1.0), C=5.0), num_classes=2) for _ in range(2))
    saved.add(x, y)
    other.add(x[:12], y[:12])
    before, state = other(x), saved.state_dict()
    state["machines.1.x"] = state["machines.1.x"] * float("nan")
    with pytest.raises(ValueError, match="damaged"):
        other.load_state_dict(state)
    assert len(other) == 12
    assert torch.equal(other(x), before)


@pytest.mark.parametrize("machine", [IncrementalSVM, KernelLSSVM])
def test_a_checkpoint_of_another_kernel_is_refused(machine):
    svm, other = machine(RBF(gamma=1.0)), machine(Laplacian(gamma=1.0))
    svm.add(*noisy(10))
    with pytest.raises((ValueError, RuntimeError), match="the kernel RBF, but this one has Laplacian"):
        other.load_state_dict(svm.state_dict())


def test_rows_whose_squares_overflow_are_refused():
    x, y = noisy(20)
    svm = IncrementalSVM(RBF(gamma=1.0))
    svm.add(x, y)
    before = svm.alpha
    with pytest.raises(ValueError, match="scale the features"):
        svm.add(1e200 * x, y)
    assert torch.equal(svm.alpha, before)


def machines():
    kernel = RBF(gamma=1.0)
    return {
        "svm": IncrementalSVM(kernel, C=5.0),
        "lssvm": KernelLSSVM(kernel),
        "lagrangian": LagrangianSVM(kernel),
        "rest": OneVsRest(IncrementalSVM(kernel, C=5.0), num_classes=2),
    }


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
@pytest.mark.parametrize("name", machines())
def test_ctrl_c_leaves_a_machine_as_it_was_or_the_operation_done(name):
    rng, hits = random.Random(0), 0
    svm, (x, y) = machines()[name], noisy(60)
    row_of = {int(i): k for k, i in enumerate(svm.add(x, y))}
    plain = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for turn in range(80):
            ids = svm.ids.tolist()
            timer = threading.Timer(rng.uniform(0.0, 0.004), os.kill, (os.getpid(), signal.SIGINT))
            try:
                try:
                    timer.start()
                    svm.add(x[:5], y[:5]) if turn % 2 else svm.remove(rng.sample(ids, 5))
                finally:
                    timer.join()
            except KeyboardInterrupt:
                hits += 1
            after = svm.ids.tolist()
            new = [i for i in after if i not in ids]
            assert len(set(after)) == len(after)
            assert after == ids or len(after) == len(ids) + (5 if turn % 2 else -5)
            row_of.update(zip(new, range(5), strict=False))
    finally:
        signal.signal(signal.SIGINT, plain)
    assert hits
    rows = [row_of[i] for i in svm.ids.tolist()]
    fresh = machines()[name]
    fresh.add(x[rows], y[rows])
    assert torch.allclose(svm(x), fresh(x), atol=1e-6)
