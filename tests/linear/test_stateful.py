"""Random sequences of operations: the digest is always that of a fresh head on what survives."""

import copy
import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.support.dense import code, ridge
from torchlssvm import FixedPoint, LSSVMHead

GRID = FixedPoint(8.0)
POOL = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
POOL[3] = POOL[2]  # duplicates
POOL[5] = 0.0  # a zero row
POOL[:, 4] = 1.25  # a constant feature
K = 3
picks = st.lists(st.integers(0, len(POOL) - 1), max_size=6)
labels = st.integers(0, K - 1)


class Head(RuleBasedStateMachine):
    """A head and the multiset of (sample, label) pairs it holds."""

    @initialize(
        per_class=st.booleans(),
        intercept=st.sampled_from(["free", "penalized", "none"]),
        rho=st.sampled_from([1e-6, 1.0, 50.0]),
    )
    def start(self, per_class, intercept, rho):
        self.options = {"grid": GRID, "per_class": per_class, "intercept": intercept, "rho": rho}
        self.head = LSSVMHead(6, K, **({"rho": 1.0} | self.options))
        self.held: list[tuple[int, int]] = []

    def some(self, data, most=5):
        size = data.draw(st.integers(0, min(most, len(self.held))))
        order = data.draw(st.permutations(range(len(self.held)))) if self.held else []
        return list(order)[:size]

    @staticmethod
    def arrays(pairs):
        index = torch.tensor([i for i, _ in pairs], dtype=torch.int64)
        return POOL[index], torch.tensor([c for _, c in pairs], dtype=torch.int64)

    @rule(index=picks, label=labels)
    def add(self, index, label):
        pairs = [(i, (i + label) % K) for i in index]
        self.head.add(*self.arrays(pairs))
        self.held += pairs

    @rule(data=st.data())
    def remove(self, data):
        out = self.some(data)
        self.head.remove(*self.arrays([self.held[i] for i in out]))
        self.held = [p for i, p in enumerate(self.held) if i not in out]

    @rule(data=st.data(), index=picks)
    def update(self, data, index):
        out, pairs = self.some(data), [(i, i % K) for i in index]
        self.head.update(add=self.arrays(pairs), remove=self.arrays([self.held[i] for i in out]))
        self.held = [p for i, p in enumerate(self.held) if i not in out] + pairs

    @rule(data=st.data(), shift=labels)
    def relabel(self, data, shift):
        out = self.some(data)
        x, old = self.arrays([self.held[i] for i in out])
        self.head.relabel(x, old, (old + shift) % K)
        for i in out:
            self.held[i] = (self.held[i][0], (self.held[i][1] + shift) % K)

    @rule(index=picks)
    def merge_and_split(self, index):
        pairs = [(i, (i + 1) % K) for i in index]
        other = LSSVMHead(6, K, **({"rho": 1.0} | self.options)).add(*self.arrays(pairs))
        self.head += other
        if len(pairs) % 2:
            self.head -= other
        else:
            self.held += pairs

    @rule(c=labels)
    def forget_class(self, c):
        if self.options["per_class"]:
            self.head.forget_class(c)
            self.held = [p for p in self.held if p[1] != c]

    @rule()
    def look(self):
        _ = self.head.w, self.head.P

    @rule()
    def copy(self):
        self.head = copy.deepcopy(self.head)

    @rule()
    def save_and_load(self):
        head = LSSVMHead(6, K, **({"rho": 1.0} | self.options))
        head.load_state_dict(self.head.state_dict())
        self.head = head

    @invariant()
    def digest_is_that_of_the_survivors(self):
        if not hasattr(self, "head"):
            return
        fresh = LSSVMHead(6, K, **({"rho": 1.0} | self.options)).add(*self.arrays(sorted(self.held)))
        assert self.head.digest() == fresh.digest()
        assert self.head.n == len(self.held)

    def teardown(self):
        if not getattr(self, "held", None):
            return
        fresh = LSSVMHead(6, K, **({"rho": 1.0} | self.options)).add(*self.arrays(sorted(self.held)))
        self.head.refresh()
        assert torch.equal(self.head.w, fresh.w)
        assert torch.equal(self.head.b, fresh.b)
        x, y = self.arrays(self.held)
        if self.options["rho"] >= 1:
            w, b = ridge(GRID.snap(x), code(y, K), self.options["rho"], self.options["intercept"])
            torch.testing.assert_close(self.head.w, w, rtol=1e-9, atol=1e-10)
            torch.testing.assert_close(self.head.b, b, rtol=1e-9, atol=1e-10)


def run(examples):
    run_state_machine_as_test(
        Head,
        settings=settings(
            max_examples=examples,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )


@pytest.mark.filterwarnings("ignore::torchlssvm.errors.NumericalWarning")  # a rho of 1e-6 with few samples warns
def test_sequences():
    run(int(os.environ.get("TORCHLSSVM_SEQUENCES", "150")))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchlssvm.errors.NumericalWarning")
def test_ten_thousand_sequences():
    run(10_000)


@pytest.mark.slow
def test_a_million_single_updates():
    """1,000,000 adds and removes of one sample at J=16: the digest at the end, and no drift."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(1000, 16, generator=generator), torch.randint(2, (1000,), generator=generator)
    head = LSSVMHead(16, 2, grid=GRID, rho=1.0)
    held = torch.zeros(1000, dtype=torch.bool)
    order = torch.randint(1000, (1_000_000,), generator=generator).tolist()
    inside = [False] * 1000
    for i in order:
        if inside[i]:
            head.remove(x[i : i + 1], y[i : i + 1])
        else:
            head.add(x[i : i + 1], y[i : i + 1])
        inside[i] = not inside[i]
    held = torch.tensor(inside)
    fresh = LSSVMHead(16, 2, grid=GRID, rho=1.0).add(x[held], y[held])
    assert head.digest() == fresh.digest()
    assert head.drift() == 0.0
    assert torch.equal(head.w, fresh.w)
