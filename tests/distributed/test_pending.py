"""Pending changes of a head: a second Statistics, whatever happens to the head; and the checks of sums that are exchanged."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from torchlssvm import FixedPoint, LSSVMHead, RemovalError, Statistics
from torchlssvm.distributed import Delta, agree, collectives, discard, status
from torchlssvm.functional import gram
from torchlssvm.functional.definite import is_semidefinite
from torchlssvm.linear.pending import Tracking

GRID = FixedPoint(8.0)


def samples(n, J=5, K=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, J, generator=generator), torch.arange(n) % K


X, Y = samples(400)


def of(index, **options):
    index = torch.tensor(sorted(index), dtype=torch.int64)
    return Statistics(5, 3, grid=GRID, **options).add(X[index], Y[index])


class Agreements(RuleBasedStateMachine):
    """A head that agrees now and then, against sets of samples: what is pending is the difference, whatever happened."""

    @initialize(per_class=st.booleans(), membership=st.booleans())
    def start(self, per_class, membership):
        self.options = {"per_class": per_class}
        self.head = LSSVMHead(5, 3, grid=GRID, membership=membership, **({"rho": 1.0} | self.options))
        self.held, self.agreed = set(), set()

    def change(self, data, verb, among, size):
        some = data.draw(st.permutations(sorted(among)))[:size]
        getattr(self.head, verb)(X[some], Y[some])
        return set(some)

    @rule(data=st.data(), size=st.sampled_from([1, 3, 300]))
    def add(self, data, size):
        self.held |= self.change(data, "add", set(range(400)) - self.held, size)

    @rule(data=st.data(), size=st.sampled_from([1, 5, 299]))
    def remove(self, data, size):
        self.held -= self.change(data, "remove", self.held, size)

    @rule()
    def remove_what_is_not_there(self):
        if self.held and self.head.unchecked is None:
            with pytest.raises(RemovalError):
                self.head.remove(torch.full((1, 5), 7.9), Y[:1])

    @rule()
    def agree(self):
        agree(self.head)
        self.agreed = set(self.held)

    @rule()
    def discard(self):
        discard(self.head)
        self.held = set(self.agreed)

    @rule()
    def hand_over(self):
        Delta.take(self.head).commit()
        self.agreed = set(self.held)

    @rule(how=st.sampled_from(["pickle", "deepcopy", "state_dict"]))
    def copied(self, how):
        if how == "state_dict":
            other = LSSVMHead.from_config(self.head.config())
            other.load_state_dict(self.head.state_dict())
        else:
            other = pickle.loads(pickle.dumps(self.head)) if how == "pickle" else copy.deepcopy(self.head)
        self.head = other
        if other.pending.tracking is Tracking.LOST:  # what was agreed on is not saved beside a removal
            assert how != "deepcopy"
            assert self.head.unchecked is not None or self.agreed - self.held
            self.agree()

    @invariant()
    def sums_are_those_of_the_sets(self):
        if not hasattr(self, "head"):
            return
        stats, pending = self.head.statistics, self.head.pending
        assert stats.digest() == of(self.held, **self.options).digest()
        assert pending.sums == of(self.held, **self.options) - of(self.agreed, **self.options)
        assert pending.agreed_digest() == (of(self.agreed, **self.options).digest() if self.agreed else "")
        assert status(self.head).pending == (self.held != self.agreed)
        if self.head.pending.held_rows.changed is not None:
            self.head._rows.read_waiting()
            assert len(self.head.pending.held_rows.changed) == len(self.held ^ self.agreed)


TestAgreements = Agreements.TestCase
TestAgreements.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)


def test_a_head_that_exchanges_nothing_keeps_no_second_sums():
    head = LSSVMHead(5, 3, grid=GRID, rho=1.0).add(X, Y).remove(X[:3], Y[:3])
    assert (head.pending.tracking, head.pending.statistics, head.pending.held_rows.changed) == (
        Tracking.ALL,
        None,
        None,
    )


@pytest.mark.parametrize("kind", ["labels", "values"])
def test_classes_may_be_added_while_changes_are_pending(kind):
    y = Y if kind == "labels" else torch.nn.functional.one_hot(Y, 3).double()
    options = {"grid": GRID, "target_grid": FixedPoint(1.0)}
    head = agree(LSSVMHead(5, 3, **({"rho": 1.0} | options)).add(X[:20], y[:20])).add(X[20:30], y[20:30])
    head.add_classes(2)
    wide = y if kind == "labels" else torch.nn.functional.pad(y, (0, 2))
    head.add(X[30:40], wide[30:40])
    assert head.pending.statistics == Statistics(5, 5, **options).add(X[20:40], wide[20:40])


def test_a_class_forgotten_is_a_pending_removal():
    head = agree(LSSVMHead(5, 3, grid=GRID, per_class=True, rho=1.0).add(X[:30], Y[:30])).forget_class(1)
    gone = [i for i in range(30) if Y[i] == 1]
    assert head.pending.statistics == -of(gone, per_class=True)
    assert sum(n < 0 for n in head.pending.held_rows.changed.values()) == len(gone)


def test_heads_merged_and_subtracted_are_pending():
    head = agree(LSSVMHead(5, 3, grid=GRID, rho=1.0).add(X[:30], Y[:30]))
    head += LSSVMHead(5, 3, grid=GRID, rho=1.0).add(X[30:50], Y[30:50])
    head -= LSSVMHead(5, 3, grid=GRID, rho=1.0).add(X[:10], Y[:10])
    assert head.pending.statistics == of(range(30, 50)) - of(range(10))
    assert (len(head.pending.held_rows.changed), sum(n < 0 for n in head.pending.held_rows.changed.values())) == (
        30,
        10,
    )


def test_what_was_agreed_decides_the_grid_after_everything_is_removed():
    head = agree(LSSVMHead(5, 3, rho=1.0).add(X[:10], Y[:10]))
    grid = head.grid
    head.remove(X[:10], Y[:10])
    head.add(X[:10] * 50, Y[:10])  # "auto" would choose a coarser grid now
    assert head.grid == grid
    assert status(head).pending


def test_pending_sums_are_those_of_the_classes_touched():
    x, y = samples(600, 16, 20)
    head = agree(LSSVMHead(16, 20, grid=GRID, per_class=True, rho=1.0).add(x, y))
    head.add(torch.randn(300, 16), torch.tensor([3, 4, 3]).repeat(100))
    assert set(head.pending.statistics.group_sums()) == {3, 4}


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_definiteness_finds_what_was_never_there(scale):
    generator = torch.Generator().manual_seed(0)
    for n, J in ((3, 5), (5, 5), (4, 40), (30, 5)):
        units = torch.tensor([scale if j % 2 else 1.0 for j in range(J)], dtype=torch.float64)
        q = (torch.randn(n, J, generator=generator, dtype=torch.float64) * 1000 * units).round()
        rows = torch.cat([q, torch.ones(n, 1, dtype=torch.float64)], 1)

        def verdict(rows, signs, J=J):
            G = (rows * signs[:, None]).T @ rows
            return bool(is_semidefinite(gram.pack(G[:J, :J].long(), G[:0, :J].long()), G[J, :J].long(), G[J, J].long()))

        ones = torch.ones(n, dtype=torch.float64)
        assert verdict(rows, ones)
        assert verdict(rows.repeat(3, 1), ones.repeat(3))
        if n <= J + 1:  # independent samples: the second removal of one is proved
            twice = torch.cat([rows, rows[:1], rows[:1]])
            assert verdict(twice[:-1], torch.cat([ones, -ones[:1]]))
            assert not verdict(twice, torch.cat([ones, -ones[:1], -ones[:1]]))


@pytest.mark.parametrize(
    ("backend", "head", "expected"),
    [("gloo", "cpu", "cpu"), ("gloo", "cuda:1", "cpu"), ("nccl", "cuda:1", "cuda:1"), ("nccl", "cpu", "cuda"),
     ("cpu:gloo,cuda:nccl", "cpu", "cpu"), ("cpu:gloo,cuda:nccl", "cuda:0", "cuda:0")],
)  # fmt: skip
def test_sums_travel_on_a_device_that_the_backend_serves(backend, head, expected):
    fake = mock.Mock(
        **{"get_backend.return_value": backend, "get_rank.return_value": 0, "get_world_size.return_value": 2}
    )
    with mock.patch.object(collectives, "dist", fake):
        assert collectives.Peers(None, torch.device(head)).device == torch.device(expected)
