"""Sliding windows around heads, statistics, and machines that remove by id."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchlssvm import FixedPoint, LSSVMHead, RemovalError, Statistics
from torchlssvm.analysis.sliding_window import SlidingWindow

GRID = FixedPoint(8.0)
X, Y = torch.randn(300, 4, generator=torch.Generator().manual_seed(0)), torch.arange(300) % 3


class ById:
    """A machine as kernel machines are: add returns ids, remove takes them."""

    def __init__(self):
        self.held, self.next = {}, 0

    def add(self, x, y):
        ids = torch.arange(self.next, self.next + len(x))
        self.next += len(x)
        self.held |= {int(i): (tuple(r.tolist()), int(t)) for i, r, t in zip(ids, x, y, strict=True)}
        return ids

    def remove(self, ids):
        for i in ids.tolist():
            del self.held[i]


@settings(max_examples=40)
@given(size=st.integers(1, 60), steps=st.lists(st.integers(0, 70), max_size=6))
def test_the_machine_is_the_one_that_only_saw_the_window(size, steps):
    windows = [
        SlidingWindow(LSSVMHead(4, 3, grid=GRID, class_weight="balanced"), size),
        SlidingWindow(Statistics(4, 3, grid=GRID), size),
        SlidingWindow(ById(), size),
    ]
    position = 0
    for step in steps:
        rows = torch.arange(position, position + step) % 300
        position += step
        for window in windows:
            window.add(X[rows], Y[rows])
        held = torch.arange(max(0, position - size), position) % 300
        assert {len(w) for w in windows} == {len(held)}
        head, stats, by_id = (w.machine for w in windows)
        assert head.digest() == LSSVMHead(4, 3, grid=GRID, class_weight="balanced").add(X[held], Y[held]).digest()
        assert stats.digest() == Statistics(4, 3, grid=GRID).add(X[held], Y[held]).digest()
        assert list(by_id.held.values()) == [(tuple(X[i].tolist()), int(Y[i])) for i in held]
    for window in windows:
        assert len(window.clear()) == 0
    assert windows[0].machine.n == 0
    assert not windows[2].machine.held


def test_a_refused_batch_leaves_the_window_as_it_was():
    window = SlidingWindow(LSSVMHead(4, 3, grid=GRID), 10).add(X[:10], Y[:10])
    before = window.machine.digest()
    for bad in ((X[:3], Y[:2]), (X[:3, :2], Y[:3]), (X[:3] * 100, Y[:3]), (X[:3], Y[:3] + 5)):
        with pytest.raises(ValueError, match=r"shape|length|grid|label"):
            window.add(*bad)
    assert (len(window), window.machine.digest()) == (10, before)
    window.machine.remove(X[:4], Y[:4])  # behind its back: what is to leave is gone already
    window.machine.remove(X[6:10], Y[6:10])
    behind = window.machine.digest()
    with pytest.raises(RemovalError):
        window.add(X[20:30], Y[20:30])
    assert (len(window), window.machine.digest()) == (10, behind)


def test_what_was_given_may_change_afterwards():
    x = X[:5].clone()
    window = SlidingWindow(LSSVMHead(4, 3, grid=GRID), 5).add(x, Y[:5])
    x.zero_()
    window.add(X[5:10], Y[5:10])
    assert window.machine.digest() == LSSVMHead(4, 3, grid=GRID).add(X[5:10], Y[5:10]).digest()
    assert len(SlidingWindow(LSSVMHead(4, 3, grid=GRID), 5).add(np.ones((2, 4)), np.zeros(2, dtype=int))) == 2


@pytest.mark.parametrize("size", [0, -1, 2.5, True, None])
def test_bad_sizes(size):
    with pytest.raises(ValueError, match="size must be an int >= 1"):
        SlidingWindow(LSSVMHead(4, 3), size)


def test_needs_add_and_remove():
    with pytest.raises(TypeError, match="add and remove"):
        SlidingWindow(torch.nn.Linear(2, 2), 3)


def test_a_pickled_window_holds_no_sample_that_has_left():
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.arange(20) % 2
    window = SlidingWindow(LSSVMHead(4, 2, grid=FixedPoint(8.0), membership=False), size=12).add(x[:12], y[:12])
    window.add(x[12:], y[12:])
    saved = pickle.dumps(window)
    assert not any(row.numpy().tobytes() in saved for row in x[:8])
    assert x[8].numpy().tobytes() in saved
