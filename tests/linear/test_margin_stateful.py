"""Random histories of a margin head on small integers: digest and active sets are those from scratch, proven in fractions."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.support.margin_exact import check_active_set, standardised
from torchlssvm import FixedPoint, MarginHead, RemovalError

J, K = 2, 3
GRID = FixedPoint(limit=8.0, bits=3)  # steps of 1: the features are the integers themselves
ROW = st.tuples(*[st.integers(-2, 2)] * J)
SAMPLE = st.tuples(ROW, st.integers(0, K - 1))


def tensors(samples):
    x = torch.tensor([row for row, _ in samples], dtype=torch.float64).reshape(-1, J)
    return x, torch.tensor([label for _, label in samples], dtype=torch.int64)


class Histories(RuleBasedStateMachine):
    """A head beside the multiset of samples it should hold."""

    every_step = True

    @initialize(
        rho=st.sampled_from([1.0, 0.25, 2.0**-20, 0.1, 4096.0]),
        intercept=st.sampled_from(["free", "penalized", "none"]),
        class_weight=st.sampled_from([None, None, "balanced", (1.0, 2.0, 0.3)]),
        scale=st.sampled_from([None, None, "std"]),
        samples=st.lists(SAMPLE, max_size=8),
    )
    def start(self, rho, intercept, class_weight, scale, samples):
        weight = torch.tensor(class_weight, dtype=torch.float64) if isinstance(class_weight, tuple) else class_weight
        self.options = {"rho": rho, "intercept": intercept, "class_weight": weight, "grid": GRID, "scale": scale}
        self.head = MarginHead(J, K, **self.options)
        self.held = Counter()
        self.add(samples)

    @rule(samples=st.lists(SAMPLE, min_size=1, max_size=4))
    def add(self, samples):
        self.head.add(*tensors(samples))
        self.held.update(samples)

    @rule(data=st.data())
    def remove(self, data):
        some = data.draw(st.lists(st.sampled_from(sorted(self.held.elements()) or [((9, 9), 0)]), max_size=3))
        gone = Counter(some)
        if any(self.held[s] < c for s, c in gone.items()):
            with pytest.raises((RemovalError, ValueError)):
                self.head.remove(*tensors(some))
        else:
            self.head.remove(*tensors(some))
            self.held = self.held - gone

    @rule(data=st.data(), label=st.integers(0, K - 1))
    def relabel(self, data, label):
        if self.held:
            row, old = data.draw(st.sampled_from(sorted(self.held)))
            x, y = tensors([(row, old)])
            self.head.relabel(x, y, torch.tensor([label]))
            self.held = self.held - Counter([(row, old)]) + Counter([(row, label)])

    @rule(data=st.data(), new=SAMPLE)
    def replace(self, data, new):
        if self.held:
            old = data.draw(st.sampled_from(sorted(self.held)))
            self.head.replace(*tensors([old]), *tensors([new]))
            self.held = self.held - Counter([old]) + Counter([new])

    @rule(rho=st.sampled_from([1.0, 0.25, 3.0]))
    def change_rho(self, rho):
        self.head.rho = self.options["rho"] = rho

    @rule()
    def refresh(self):
        self.head.refresh()

    @rule()
    def read(self):
        if self.held:
            self.head.predict(torch.zeros(1, J))

    @invariant()
    def equal_at_every_step(self):
        if self.every_step and hasattr(self, "head"):
            self.compare()

    def teardown(self):
        if hasattr(self, "head"):
            self.compare()

    def compare(self):
        """Compare with a head from scratch, and prove its active sets."""
        samples = sorted(self.held)
        fresh = MarginHead(J, K, **self.options)
        if not samples:
            assert self.head.n == 0
            assert self.head.digest() == fresh.digest()
            return
        x, y = tensors(samples)
        copies = torch.tensor([self.held[s] for s in samples], dtype=torch.float64)
        fresh.add(x, y, copies)
        assert self.head.digest() == fresh.digest()
        active, by_class = self.head.active(x, y), self.head._solver.class_weights()
        assert torch.equal(active, fresh.active(x, y))
        weight = (torch.ones(K, dtype=torch.float64) if by_class is None else by_class)[y] * copies
        rows, rho, mean = [row for row, _ in samples], self.head.rho, [0] * J
        if self.head.scale is not None:
            rows, rho, mean = standardised(rows, [self.held[s] for s in samples], rho)
        for k in range(K):
            signs = [1 if label == k else -1 for label in y.tolist()]
            if len(set(signs)) == 1:
                assert self.head.b[k] == signs[0]
                assert not self.head.w[:, k].any()
                assert not active[:, k].any()
                continue
            w, b, _ = check_active_set(rows, signs, weight.tolist(), rho, self.head.intercept, active[:, k].tolist())
            b -= sum(m * v for m, v in zip(mean, w, strict=True))
            exact = torch.tensor([float(v) for v in [*w, b]], dtype=torch.float64)
            found = torch.cat([self.head.w[:, k], self.head.b[k : k + 1]])
            assert torch.allclose(found, exact, rtol=1e-6, atol=1e-6)


class LongHistories(Histories):
    """Compared at its end alone, so that thousands of them can be run."""

    every_step = False


QUICK = settings(max_examples=8, stateful_step_count=6, deadline=None, suppress_health_check=list(HealthCheck))


def test_random_histories():
    run_state_machine_as_test(Histories, settings=QUICK)


@pytest.mark.slow
def test_many_random_histories():
    run_state_machine_as_test(LongHistories, settings=settings(QUICK, max_examples=5000, stateful_step_count=10))


def follow_changes(seed, steps, wide=60):
    """Change a head of so many features that it keeps its inverses, and compare it with one from scratch after each step."""
    rng = np.random.default_rng(seed)
    options = {
        "rho": float(rng.choice([0.05, 1.0, 30.0])),
        "intercept": str(rng.choice(["free", "penalized", "none"])),
        "class_weight": [None, torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)][rng.integers(2)],
        "grid": FixedPoint(limit=8.0, bits=3),
    }
    head, held = MarginHead(wide, K, **options), []

    def draw(n):
        x = rng.integers(-1, 2, (n, wide)) * (rng.random((n, wide)) < 0.3)
        y = rng.integers(0, K, n)
        x[:, 0] += y
        return [(tuple(int(v) for v in row), int(label)) for row, label in zip(x, y, strict=True)]

    def as_tensors(some):
        x = torch.tensor([row for row, _ in some], dtype=torch.float64)
        return x, torch.tensor([label for _, label in some])

    start = draw(250)
    head.add(*as_tensors(start))
    held += start
    moved = 0
    for _ in range(steps):
        before = head.active(*as_tensors(held)).sum()
        some = [held[i] for i in rng.choice(len(held), rng.integers(1, 4), replace=False)]
        kind = rng.integers(4)
        if kind == 0:
            new = draw(2) + some[:1]  # a copy among them
            head.add(*as_tensors(new))
            held += new
        elif kind == 1:
            x, y = as_tensors(some)
            new = (y + 1) % K
            head.relabel(x, y, new)
            for s, label in zip(some, new.tolist(), strict=True):
                held[held.index(s)] = (s[0], label)
        else:
            head.remove(*as_tensors(some))
            for s in some:
                held.remove(s)
        fresh = MarginHead(wide, K, **options).add(*as_tensors(held))
        assert head.digest() == fresh.digest()
        assert torch.equal(head.active(*as_tensors(held)), fresh.active(*as_tensors(held)))
        assert (head.w - fresh.w).abs().max() < 1e-9
        moved += int(head.active(*as_tensors(held)).sum() != before)
    assert moved
    assert torch.equal(head.refresh().w, fresh.w)


@pytest.mark.parametrize("seed", range(3))
def test_inverses_that_are_kept(seed):
    follow_changes(seed, 8)


@pytest.mark.slow
def test_inverses_that_are_kept_for_long():
    for seed in range(100, 200):
        follow_changes(seed, 40)
