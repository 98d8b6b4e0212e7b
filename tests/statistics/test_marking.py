"""Agreed and pending: marks on statistics, with guards, class changes, saving, and the memory they take."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from torchlssvm import FixedPoint, LSSVMHead, RemovalError, Statistics
from torchlssvm.functional import gram
from torchlssvm.functional.definite import is_semidefinite, least_rank

GRID = FixedPoint(8.0)


def samples(n, J=5, K=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, J, generator=generator), torch.arange(n) % K


X, Y = samples(400)


def of(index, **options):
    index = torch.tensor(sorted(index), dtype=torch.int64)
    return Statistics(5, 3, grid=GRID, **options).add(X[index], Y[index])


class Marks(RuleBasedStateMachine):
    """A head with marks, against sets of samples: agreed and pending are those of the sets, whatever happened."""

    @initialize(per_class=st.booleans())
    def start(self, per_class):
        self.options = {"per_class": per_class}
        self.head = LSSVMHead(5, 3, grid=GRID, **self.options)
        self.held, self.agreed, self.marked = set(), set(), False

    def free(self):
        return sorted(set(range(400)) - self.held)

    @rule(data=st.data(), size=st.sampled_from([1, 3, 300]))
    def add(self, data, size):
        some = data.draw(st.permutations(self.free()))[:size]
        index = torch.tensor(some, dtype=torch.int64)
        self.head.add(X[index], Y[index])
        self.held |= set(some)

    @rule(data=st.data(), size=st.sampled_from([1, 5, 299]))
    def remove(self, data, size):
        some = data.draw(st.permutations(sorted(self.held)))[:size]
        index = torch.tensor(some, dtype=torch.int64)
        self.head.remove(X[index], Y[index])
        self.held -= set(some)

    @rule()
    def read(self):
        _ = self.head.w

    @rule(data=st.data())
    def remove_what_is_not_there(self, data):
        """Refused at once, or rolled back at the read, to a state that the mark knows; else put back."""
        if len(self.held) < 2 or not self.free():
            return
        _ = self.head.w
        stranger = data.draw(st.sampled_from(self.free()))
        x, y = X[stranger : stranger + 1], Y[stranger : stranger + 1]
        for repeats in (1, 400):  # a row that waits, and a bulk that is undone
            with pytest.raises(RemovalError):
                self.head.remove(
                    x.repeat(400 // repeats, 1), y.repeat(400 // repeats), torch.full((400 // repeats,), repeats)
                )
        large = x * 7.9 / x.abs().max()
        try:
            _ = self.head.remove(large, y).w
        except RemovalError:
            return
        self.head.add(large, y)

    @rule()
    def mark(self):
        _ = self.head.w
        self.head.statistics.mark()
        self.agreed, self.marked = set(self.held), True

    @rule()
    def drop_pending(self):
        if self.marked:
            stats = self.head.statistics
            stats.adopt(stats.agreed())
            self.head.invalidate().drop_membership("its statistics were replaced behind it")
            self.held = set(self.agreed)

    @rule(how=st.sampled_from(["pickle", "deepcopy", "state_dict"]))
    def copied(self, how):
        if how == "state_dict":
            other = LSSVMHead(5, 3, grid=GRID, **self.options)
            other.load_state_dict(self.head.state_dict())
        else:
            other = pickle.loads(pickle.dumps(self.head)) if how == "pickle" else copy.deepcopy(self.head)
        self.head = other
        if other.statistics.severed:  # what was agreed on is not saved beside a removal
            assert how != "deepcopy"
            assert self.marked
            assert self.held != self.agreed
            self.mark()

    @invariant()
    def sums_are_those_of_the_sets(self):
        if not hasattr(self, "head"):
            return
        stats = self.head.statistics
        assert stats.digest() == of(self.held, **self.options).digest()
        assert stats.agreed().digest() == of(self.agreed, **self.options).digest()
        expected = of(self.held, **self.options) - of(self.agreed, **self.options)
        assert stats.pending() == expected
        assert stats.pending().n == len(self.held) - len(self.agreed)


TestMarks = Marks.TestCase
TestMarks.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)


@pytest.mark.parametrize("per_class", [True, False])
@pytest.mark.parametrize("kind", ["labels", "values"])
def test_classes_may_be_added_after_a_mark(per_class, kind):
    if per_class and kind == "values":
        return
    x, labels = samples(40)
    y = labels if kind == "labels" else torch.nn.functional.one_hot(labels, 3).double()
    stats = Statistics(5, 3, grid=GRID, per_class=per_class).add(x[:20], y[:20])
    stats.mark()
    stats.add(x[20:30], y[20:30])
    stats.add_classes(2)
    wide = y if kind == "labels" else torch.nn.functional.pad(y, (0, 2))
    stats.add(x[30:], wide[30:])
    make = {"grid": GRID, "per_class": per_class, "target_grid": stats.target_grid}
    assert stats.agreed() == Statistics(5, 5, **make).add(x[:20], wide[:20])
    assert stats.pending() == Statistics(5, 5, **make).add(x[20:], wide[20:])


def test_a_class_forgotten_is_a_pending_removal():
    stats = of(range(30), per_class=True)
    stats.mark()
    stats.forget_class(1)
    gone = [i for i in range(30) if Y[i] == 1]
    assert stats.pending() == -of(gone, per_class=True)
    assert stats.agreed() == of(range(30), per_class=True)


def test_what_was_agreed_decides_the_grid_after_everything_is_removed():
    stats = Statistics(5, 3).add(X[:10], Y[:10])
    grid = stats.grid
    stats.mark()
    stats.remove(X[:10], Y[:10])
    stats.add(X[:10] * 50, Y[:10])  # "auto" would choose a coarser grid now
    assert stats.grid == grid
    assert stats.pending().n == 0
    assert not stats.pending().empty


def tensor_bytes(*owners):
    """Bytes of every tensor reachable from some objects, each storage once."""
    seen, found, todo = set(), {}, list(owners)
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, dict):
            todo += list(one.values())
        elif isinstance(one, list | tuple | set):
            todo += list(one)
        elif hasattr(one, "__dict__"):
            todo += list(vars(one).values())
    return sum(found.values())


def test_a_hundred_classes_fit_in_half_a_gigabyte():
    """K=100, J=1024, with pending changes and a removal under guard: counted tensor by tensor."""
    J, K = 1024, 100
    head = LSSVMHead(J, K, grid=GRID, class_weight="balanced")
    x, y = samples(400, J, K)
    head.add(x, y)  # more rows than wait: all hundred classes have their matrix
    stats = head.statistics
    stats.mark()
    assert len(stats.group_sums()) == K
    head.add(x[:200] / 2, y[:200])  # pending in every class
    head.remove(x[:50], y[:50])
    _ = head(x[:2])  # a read sums the rows: what was agreed is kept as rows
    everywhere = tensor_bytes(head)
    assert len(stats.baseline.undo) == K
    assert not any(b.copied for b in stats.baseline.undo.values())
    head.add(torch.randn(900, J), torch.tensor([3, 7, 20, 50, 99]).repeat(180))  # and five classes copied
    head.remove(x[50:100], y[50:100])
    stats.group_sums()  # under the guard of the removal
    copied = sum(b.copied for b in stats.baseline.undo.values())
    print(
        f"\n100 classes, J=1024: {everywhere / 1e6:.0f} MB with pending rows everywhere, {tensor_bytes(head) / 1e6:.0f} MB and {copied} copied"
    )
    assert copied == 5
    assert everywhere <= 0.5e9
    assert tensor_bytes(head) <= 0.5e9
    assert stats.agreed() == Statistics(J, K, grid=GRID, per_class=True).add(x, y)
    assert gram.packed_size(J, 1) <= 1.03 * (J * (J + 1) // 2 + J)


def test_pending_memory_is_that_of_the_classes_touched():
    J, K = 256, 20
    stats = Statistics(J, K, grid=GRID, per_class=True).add(*samples(600, J, K))
    stats.mark()
    before = tensor_bytes(stats)
    stats.add(torch.randn(300, J), torch.tensor([3, 4, 3]).repeat(100))
    assert set(stats.baseline.undo) == {3, 4} == {g for g, b in stats.baseline.undo.items() if b.copied}
    one = gram.packed_size(J, 1) * 8
    assert tensor_bytes(stats) - before <= 2.2 * one


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


def test_rank_is_a_lower_bound_for_the_samples_in_a_delta():
    generator = torch.Generator().manual_seed(1)
    for added, removed, J in ((1, 0, 6), (2, 0, 6), (1, 1, 6), (3, 2, 6), (20, 0, 6)):
        rows = torch.randint(-99, 99, (added + removed, J), generator=generator)
        signs = torch.tensor([1] * added + [-1] * removed)
        M = (rows * signs[:, None]).T @ rows
        assert int(least_rank(gram.pack(M, M[:0]), J)) == min(added + removed, J)
    assert int(least_rank(gram.pack(torch.zeros(4, 4).long(), torch.zeros(0, 4).long()), 4)) == 0


@pytest.mark.parametrize(
    ("backend", "head", "expected"),
    [("gloo", "cpu", "cpu"), ("gloo", "cuda:1", "cpu"), ("nccl", "cuda:1", "cuda:1"), ("nccl", "cpu", "cuda"),
     ("cpu:gloo,cuda:nccl", "cpu", "cpu"), ("cpu:gloo,cuda:nccl", "cuda:0", "cuda:0")],
)  # fmt: skip
def test_sums_travel_on_a_device_that_the_backend_serves(backend, head, expected):
    from torchlssvm.distributed import collectives

    fake = mock.Mock(
        **{"get_backend.return_value": backend, "get_rank.return_value": 0, "get_world_size.return_value": 2}
    )
    with mock.patch.object(collectives, "dist", fake):
        assert collectives.Peers(None, torch.device(head)).device == torch.device(expected)
