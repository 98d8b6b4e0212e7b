"""Ranks: the same state to the bit for 1 to 4 of them, all or none, one error on all, and nothing implicit. Real processes."""

import copy
import functools
import io
import os
import pickle
import random
import shutil
import tempfile
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support import ranks
from torchlssvm import FixedPoint, LSSVMHead, attach
from torchlssvm.distributed import Delta, agree, discard, fingerprint, merge, reduce_to, status, sync

GRID = FixedPoint(16.0)
J, K = 6, 3


def samples(n=240, seed=0, width=J):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=generator) * 2, torch.arange(n) % K


X, Y = samples()
FORMS = {
    "total": {},
    "weighted": {"class_weight": "complement", "intercept": "penalized"},
    "per class, folds": {"per_class": True, "folds": 2},
    "pairs": {"multiclass": "ovo", "class_weight": "balanced"},
}


def head(form="total", **options):
    return LSSVMHead(J, K, **{"grid": GRID, "rho": 1.0, **FORMS[form], **options})


def ids(index):
    return [f"s{int(i)}" for i in index]


def change(what, verb, index, y=None):
    """Add or remove samples by number; they have ids."""
    index = torch.as_tensor(sorted(index), dtype=torch.int64)
    labels = Y[index] if y is None else y
    return getattr(what, verb)(X[index], labels, ids=ids(index))


def batch(index, form="total", **options):
    return change(head(form, **options), "add", index)


@functools.lru_cache
def groups():
    """A group for each number of ranks: made once, by all."""
    return {n: dist.new_group(list(range(n))) for n in range(1, dist.get_world_size() + 1)}


def state(h):
    pending = h.pending.sums.copy()
    pending.canonicalize()
    return h.digest(), pending.digest(), *status(h)


# -- scenarios: run on every rank ---------------------------------------------------------------------------------------


def same_for_every_number_of_ranks(rank, world):
    """Table I: distributed, incremental and distributed incremental, random splits, a rank with nothing, removals anywhere."""
    out = []
    for size, group in groups().items():
        if rank >= size:
            continue
        for number, form in enumerate(FORMS):
            shuffle = random.Random(size * 10 + number)
            order = shuffle.sample(range(240), 240)
            cuts = sorted(shuffle.sample(range(1, 240), size - 1))
            parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, 240], strict=True)]
            if size > 2:
                parts[0] += parts.pop()
                parts.append([])  # joins with nothing
            h, mine = head(form), parts[rank]
            change(h, "add", mine[: len(mine) // 2])
            sync(h, group)
            first = {i for p in parts for i in p[: len(p) // 2]}
            one = h.digest() == batch(first, form).digest()
            change(h, "add", mine[len(mine) // 2 :])
            sync(h, group)
            two = h.digest() == batch(range(240), form).digest()
            gone = parts[0][:30]
            change(h, "remove", gone[rank::size])  # most ranks never held what they remove
            sync(h, group)
            left = batch(set(range(240)) - set(gone), form).refresh()
            out.append((one, two, h.digest() == left.digest(), torch.equal(h.w, left.w), torch.equal(h.b, left.b)))
    return out


def again_changes_nothing(rank, world):
    h = change(head(), "add", range(rank * 10, rank * 10 + rank))  # rank 0 has nothing
    sync(h)
    before = state(h)
    for _ in range(3):
        sync(h)
    assert status(h) == (1, h.digest(), False)
    return before == state(h), before[0] == batch([i for r in range(world) for i in range(r * 10, r * 10 + r)]).digest()


def random_sequences(rank, world):
    """Each rank adds, removes, relabels and drops at random; all know what everybody does, so all know the truth."""
    problems = []
    for seed in range(6):
        shuffle = random.Random(seed)
        form = shuffle.choice(["total", "weighted", "per class, folds"])
        h, held = head(form), {}
        pending = [{} for _ in range(world)]
        for step in range(40):
            who = shuffle.randrange(world)
            seen = {k: v for k, v in {**held, **pending[who]}.items() if v is not None}
            others = {k for r, p in enumerate(pending) if r != who for k in p}
            act, size = (
                shuffle.choice(["add", "add", "remove", "relabel", "sync", "read", "drop"]),
                shuffle.choice([1, 4, 30]),
            )
            free = sorted(set(range(240)) - set(held) - others - set(seen))
            mine = sorted(set(seen) - others)
            index = shuffle.sample(free if act == "add" else mine, min(size, len(free if act == "add" else mine)))
            new = {i: shuffle.randrange(K) for i in sorted(index)}
            if act == "add":
                pending[who] |= new
            elif act in ("remove", "relabel"):
                pending[who] |= {i: None if act == "remove" else new[i] for i in new}
            if who == rank and new:
                old = torch.tensor([seen.get(i, 0) for i in new])
                rows, labels = X[list(new)], torch.tensor(list(new.values()))
                if act == "add":
                    h.add(rows, labels, ids=ids(new))
                elif act == "remove":
                    h.remove(rows, old, ids=ids(new))
                elif act == "relabel":
                    h.relabel(rows, old, labels, ids=ids(new))
            if act == "read" and who == rank and h.n:
                _ = h.w
            if act == "drop":
                pending[who] = {}
                if who == rank:
                    discard(h)
            if act == "sync" or step == 39:
                sync(h)
                for p in pending:
                    held |= p
                held = {k: v for k, v in held.items() if v is not None}
                pending = [{} for _ in range(world)]
                truth = head(form)
                if held:
                    index = sorted(held)
                    truth.add(X[index], torch.tensor([held[i] for i in index]), ids=ids(index))
                if h.digest() != truth.digest() or (held and not torch.equal(h.w, truth.w)):
                    problems.append((seed, step))
    return problems


def differences_are_one_error_everywhere(rank, world):
    """Whatever differs on one rank: the same error on all, before anything is summed."""
    odd = rank == world - 1
    cases = {
        "num_classes": lambda: (LSSVMHead(J, K + odd, grid=GRID, rho=1.0), {}),
        "in_features": lambda: (LSSVMHead(J + odd, K, grid=GRID, rho=1.0), {}),
        "grid": lambda: (head(grid=FixedPoint(16.0 if odd else 8.0)), {}),
        "per_class": lambda: (head(per_class=odd), {}),
        "folds": lambda: (head(folds=2 * odd), {}),
        "rho": lambda: (head(rho=1.0 + odd), {}),
        "intercept": lambda: (head(intercept="none" if odd else "free"), {}),
        "class_weight": lambda: (head(per_class=True, class_weight="balanced" if odd else None), {}),
        "fingerprint": lambda: (head(), {"fingerprint": "a" if odd else "b"}),
        "no head": lambda: (torch.nn.Linear(2, 2) if odd else head(), {}),
        "no grid": lambda: (head(grid=None if odd else GRID), {}),
    }
    out = {}
    for name, make in cases.items():
        h, options = make()
        if name not in ("no head", "in_features"):
            h.add(X[rank : rank + 5], Y[rank : rank + 5], ids=ids(range(5)))
        keeps = isinstance(h, LSSVMHead) and h.statistics is not None and h.statistics.exact
        before = state(h) if keeps else None
        out[name] = (
            *ranks.caught(lambda h=h, options=options: sync(h, **options)),
            before == (state(h) if keeps else None),
        )
    h = LSSVMHead(J, K, rho=1.0).add(X[:9] * (50.0 if odd else 1.0), Y[:9])  # grids chosen from the data
    out["auto grids"] = (*ranks.caught(lambda: sync(h)), True)
    values = torch.randn(4, K)
    h = head().add(X[:4], values if odd else Y[:4])
    out["kind"] = (*ranks.caught(lambda: sync(h)), True)
    out["destination"] = (*ranks.caught(lambda: reduce_to(head(), 5 if odd else 0)), True)
    out["other verb"] = (*ranks.caught(lambda: reduce_to(batch([rank]), 0) if odd else sync(batch([rank]))), True)
    return out


def removed_twice(rank, world):
    """Two ranks remove one sample: found on all ranks by its fingerprint or its id; and can be put right."""
    out = {}
    lonely = torch.zeros(1, J)
    lonely[0, 0] = 3.0

    def start(rows, labels, ids=None, **options):
        h = head(**options)
        if rank == 0:
            h.add(rows, labels, ids=ids)
        return sync(h)

    def twice(name, h, x, y, ids=None):
        if rank in (1, 2):
            h.remove(x, y, ids=ids)
        before = state(h)
        error = ranks.caught(lambda: sync(h))
        out[name] = (*error, state(h) == before)
        if rank == 2:
            discard(h)
        sync(h)
        out[name] += (h.n,)

    base = X.clone()
    base[:, 0] = 0
    count = start(torch.cat([X[:50][Y[:50] > 0], X[:1]]), torch.cat([Y[:50][Y[:50] > 0], Y[:1]]))
    twice("counts", count, X[:1], Y[:1])
    twice("diagonal", start(torch.cat([base[:60], lonely]), torch.cat([Y[:60], Y[:1]])), lonely, Y[:1])
    few = 4.0 + torch.eye(J)[:4]  # independent, and no diagonal comes near zero
    twice("definite", start(few, Y[:1].expand(4), per_class=True), few[:1], Y[:1])
    twice("ids", start(X, Y, ids(range(240))), X[:1], Y[:1], ids([0]))
    twice("many, without ids", start(X, Y), X[:1], Y[:1])  # fingerprints prove it
    return out


def copies_of_several_ranks(rank, world):
    """Ranks that added the same rows may each remove as many as they like, while all of them together hold enough."""
    row, label = X[:1], Y[:1]
    h = sync(head().add(X[:20], Y[:20]).add(row.expand(2, J), label.expand(2)))  # three copies on each rank
    h.remove(row.expand(3, J), label.expand(3)) if rank else h.remove(row.expand(2, J), label.expand(2))
    sync(h)
    truth = head().add(X[1:20].repeat(world, 1), Y[1:20].repeat(world)).add(row, label)
    same, left = h.digest() == truth.digest(), ranks.caught(lambda: h.remove(row.expand(2, J), label.expand(2)))[0]
    h.remove(row, label)  # there is one left, and every rank takes it
    before, left_behind = state(h), pickle.loads(pickle.dumps(h)).pending.held_rows.changed
    refused = ranks.caught(lambda: sync(h))
    unchanged = state(h) == before
    if rank:
        discard(h)
    truth.remove(row, label)
    return same, left, *refused, unchanged, sync(h).digest() == truth.digest(), left_behind is None


def ids_net_out(rank, world):
    """What one rank removes and another adds again is no double removal; relabelling twice is one."""
    h = sync(batch(range(60)) if rank == 0 else head())
    if rank in (0, 1):
        change(h, "remove", [5])
    if rank == 2:
        change(h, "add", [5])
    sync(h)
    same = h.digest() == batch(set(range(60)) - {5}).digest()
    if rank in (0, 1):
        h.relabel(X[7:8], Y[7:8], (Y[7:8] + 1) % K, ids=ids([7]))
    return same, ranks.caught(lambda: sync(h))[0]


def added_twice(rank, world):
    """Two ranks add samples under one id: one error on all, whatever the features, labels and weights are."""
    out = {}

    def twice(name, x, y, weight=None):
        h = sync(batch(range(30)) if rank == 0 else head())
        if rank in (1, 3):
            h.add(x, y, weight, ids=["new", f"own {rank}"])
        before = state(h)
        error = ranks.caught(lambda: sync(h))
        kept = state(h) == before
        if rank == 3:
            discard(h)
        out[name] = (*error, kept, sync(h).n)

    twice("same", X[40:42], Y[40:42])
    twice("other features", X[40:42] + rank, Y[40:42])
    twice("other labels", X[40:42], (Y[40:42] + rank) % K)
    twice("weighted", X[40:42], Y[40:42], torch.tensor([2, 1]))
    h = batch([5], "weighted") if rank in (0, 2) else head("weighted")  # before the first sync
    out["from the start"] = (*ranks.caught(lambda: sync(h)), True, 1)
    h = sync(batch(range(60)) if rank == 0 else head())
    if rank == 0:
        change(h, "remove", [5])
    if rank in (1, 2):
        change(h, "add", [5])
    if rank == 2:
        change(h, "remove", [5])
        change(h, "add", [70])
    return out, sync(h).digest() == batch([*range(60), 70]).digest()


def deltas_and_ranks(rank, world):
    """A delta of another head goes through a sync: handed over when it succeeds, kept when it fails."""
    h = sync(batch(range(30)) if rank == 0 else head())
    node = batch([100 + rank])
    delta = Delta.take(node) if rank else None
    if rank == 1:
        change(h, "remove", [3])
    if rank == 2:
        change(h, "remove", [3])
    error = ranks.caught(lambda: sync(h, delta=delta))
    kept = rank == 0 or status(node).pending
    if rank == 2:
        discard(h)
    sync(h, delta=delta)
    right = h.digest() == batch([i for i in range(30) if i != 3] + [100 + r for r in range(1, world)]).digest()
    handed = rank == 0 or not status(node).pending
    own = ranks.caught(lambda: sync(change(h, "add", [50 + rank]), delta=Delta.take(h)))
    discard(h)
    if rank == 1:
        change(h, "remove", [4])
    back = change(Delta.like(h), "add", [4]) if rank == 1 else None
    before = h.n
    sync(h, delta=back)  # takes back all that is pending anywhere
    return error[0], kept, right, handed, own[0], (h.n, before) if rank == 1 else None, status(h).pending, sync(h).n


def heads_saved_with_removals_pending_are_named(rank, world):
    """A checkpoint taken with removals pending: sync names it on all ranks; loaded everywhere, agree goes on."""
    h = sync(batch(range(40)) if rank == 0 else head())
    if rank == 1:
        change(h, "remove", [4])
    box = [{k: v.clone() for k, v in h.state_dict().items()} if rank == 1 else None]
    dist.broadcast_object_list(box, 1)
    resumed = head()
    resumed.load_state_dict(box[0] if rank == 1 else h.state_dict())
    error = ranks.caught(lambda: sync(resumed))
    everywhere = head()
    everywhere.load_state_dict(box[0])
    agree(everywhere)
    change(everywhere, "add", [100 + rank])
    sync(everywhere)
    truth = batch([i for i in range(40) if i != 4] + [100 + r for r in range(world)])
    return (*error, everywhere.digest() == truth.digest(), sync(h).n)


def not_certifiable_anywhere(rank, world):
    h = sync(batch(range(200), "weighted") if rank == 0 else head("weighted"))
    if rank == 2:
        h.remove_approximate(X[:1] + 1e-5, Y[:1])
    before = h.uncertifiable
    sync(h)
    return before, h.uncertifiable


def diverged_ranks_are_named(rank, world):
    h = sync(batch(range(rank * 5, rank * 5 + 5)))
    good = h.digest()
    if rank == 2:
        h.add(X[100:101], Y[100:101])
        agree(h)
    error = ranks.caught(lambda: sync(h))
    if rank == 2:
        h.remove(X[100:101], Y[100:101])
        agree(h)
    return (*error, sync(h).digest() == good)


def copies_are_not_counted_again(rank, world):
    """One file loaded on every rank, one head pickled to all: refused, or agreed on."""
    buffer = io.BytesIO()
    torch.save(batch(range(40)).state_dict(), buffer)
    file = [buffer.getvalue()]
    dist.broadcast_object_list(file, 0)
    loaded = head()
    loaded.load_state_dict(torch.load(io.BytesIO(file[0]), weights_only=True))
    change(loaded, "add", [50 + rank])
    first = ranks.caught(lambda: sync(loaded))
    change(loaded, "remove", [50 + rank])
    agree(loaded)
    change(loaded, "add", [50 + rank])
    sync(loaded)
    right = loaded.digest() == batch([*range(40), *range(50, 50 + world)]).digest()
    resumed = head()  # saved with changes pending on this rank, and loaded again: they are still pending
    change(loaded, "add", [60 + rank])
    resumed.load_state_dict(loaded.state_dict())
    sync(resumed)
    resumed_right = resumed.digest() == batch([*range(40), *range(50, 50 + world), *range(60, 60 + world)]).digest()
    return (*first, right, resumed_right, resumed.pending.epoch)


def star(rank, world):
    """Algorithms 4 and 5: nodes send changes to one master and keep nothing."""
    h, out = head("weighted"), []
    for step in range(3):
        index = range(step * 40 + rank * 10, step * 40 + rank * 10 + 10)
        reduce_to(change(h, "add", index), 2)
        out.append(h.n)
    delta = change(Delta.like(h), "remove", [rank])  # samples this node no longer has
    everyone = torch.distributed.new_group()
    reduce_to(h, 2, everyone, delta=delta, fingerprint="network")
    right = h.digest() == batch(set(range(120)) - set(range(world)), "weighted").digest()
    return out, right, ranks.caught(lambda: sync(h))[0]


def one_file_on_two_ranks(rank, world):
    name = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(name, 0)
    folder, name[0] = name[0], f"{name[0]}/delta.pt"
    if rank == 0:
        Delta.take(batch(range(9))).save(name[0])
    dist.barrier()
    h = head()
    if rank in (1, 3):
        merge(h, Delta.load(name[0]))
    error = ranks.caught(lambda: sync(h))
    if rank == 3:
        discard(h)
    sync(h)
    later = ranks.caught(lambda: merge(h, Delta.load(name[0])))  # every rank knows it by now
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return (*error, h.n, *later)


def few_samples_are_not_sent(rank, world):
    h = batch(range(rank * 30, rank * 30 + (30 if rank else 4)), "weighted")
    before = state(h)
    error = ranks.caught(lambda: sync(h, min_samples=5))
    kept = state(h) == before
    sync(h)
    return (*error, kept, h.n)


def nothing_is_implicit(rank, world):
    """Between syncs every operation is this rank's own: no collective runs, so none can wait."""
    h = sync(batch(range(rank * 5, rank * 5 + 5)))
    names = [
        n
        for n in dir(dist)
        if n.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "barrier", "send", "recv"))
    ]
    if rank == 0:
        with mock.patch.multiple(dist, **{n: mock.Mock(side_effect=AssertionError(n)) for n in names}):
            change(h, "add", range(100, 140))
            change(h, "remove", range(100, 110))
            other = head()
            other.load_state_dict(h.state_dict())
            assert torch.equal(other(X[:3]), h(X[:3]))
            assert h.digest() == copy.deepcopy(h).digest()
            _ = h.w, h.C, h.counts, h.refresh(), h.drift()
            h.rho = 2.0
            h.rho = 1.0
            Delta.take(copy.deepcopy(h))
            discard(h)
    return sync(h).n


def classes_may_change(rank, world):
    h = sync(batch(range(rank * 9, rank * 9 + 9), "weighted"))
    h.add_classes(1)
    h.add(X[100 + rank : 101 + rank], torch.tensor([K]))
    if rank == 1:
        h.forget_class(0)
    sync(h)
    index = [i for i in range(world * 9) if Y[i] != 0]
    truth = (
        LSSVMHead(J, K + 1, grid=GRID, **({"rho": 1.0} | FORMS["weighted"]))
        .add(X[index], Y[index])
        .add(X[100 : 100 + world], torch.full((world,), K))
    )
    right = h.digest() == truth.digest()
    both = ranks.caught(lambda: sync(h.forget_class(1)))
    return right and discard(h).digest() == truth.digest(), both[0]


def values_and_attached(rank, world):
    targets = torch.randn(60, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    make = functools.partial(LSSVMHead, J, 2, grid=GRID, target_grid=FixedPoint(8.0))
    h = make().add(X[rank * 10 : rank * 10 + 10], targets[rank * 10 : rank * 10 + 10])
    right = sync(h).digest() == make().add(X[: 10 * world], targets[: 10 * world]).digest()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(J, 4), torch.nn.ReLU(), torch.nn.Linear(4, 9))
    clf = attach(network, K, grid=FixedPoint(64.0)).add(X[rank * 10 : rank * 10 + 10], Y[rank * 10 : rank * 10 + 10])
    n = sync(clf).head.n
    if rank == 1:
        with torch.no_grad():
            clf.backbone[0].weight += 1
    return right, n, *ranks.caught(lambda: sync(clf))


def empty_again(rank, world):
    h = sync(batch(range(rank * 3, rank * 3 + 3), grid="auto") if rank == 0 else head(grid="auto"))
    if rank == 1:
        change(h, "remove", range(3))
    sync(h)
    out = h.n, h.statistics.empty, h.digest() == head(grid="auto").digest()
    h.add(X[:2] * 100 * (rank == 0), Y[:2])
    return (*out, ranks.caught(lambda: sync(h))[0])


def sums_that_would_overflow(rank, world):
    h = LSSVMHead(1, 2, grid=FixedPoint(1.0, bits=26), rho=1.0).add(
        torch.ones(1, 1), torch.tensor([0]), weight=torch.tensor([2**9])
    )
    error = ranks.caught(lambda: sync(h))
    return (*error, h.n)


def ddp(rank, world):
    """A head in a DDP module: each rank's own changes survive its forwards, and sync makes all ranks answer alike."""
    own = batch(range(rank * 9, rank * 9 + 9))
    module = torch.nn.ModuleDict({"layer": torch.nn.Linear(J, J), "head": copy.deepcopy(own)})
    module.forward = lambda x: module["layer"](x).sum() + 0 * module["head"](x).sum()
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    for _ in range(2):
        wrapped(X[:4]).backward()  # copies the buffers of rank 0 over those of the others
    seen, true = dict(module["head"].named_buffers()), dict(own.named_buffers())
    kept = module["head"].digest() == own.digest() and all(torch.equal(seen[name], true[name]) for name in "wbC")
    sync(module["head"])
    wrapped(X[:4]).backward()
    truth = batch(range(9 * world))
    return kept, torch.equal(module["head"](X), truth(X)), torch.equal(module["head"].w, truth.w)


SCENARIOS = [
    same_for_every_number_of_ranks, again_changes_nothing, random_sequences, differences_are_one_error_everywhere,
    removed_twice, copies_of_several_ranks, ids_net_out, diverged_ranks_are_named, copies_are_not_counted_again, star,
    one_file_on_two_ranks, few_samples_are_not_sent, nothing_is_implicit,
    classes_may_change, values_and_attached, empty_again, sums_that_would_overflow, ddp, added_twice, deltas_and_ranks,
    heads_saved_with_removals_pending_are_named, not_certifiable_anywhere,
]  # fmt: skip


# -- what they must give --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results():
    return ranks.run(4, SCENARIOS)


@pytest.fixture
def result(results, request):
    """A scenario's results by rank: the test is named after it."""
    got = results[request.node.name.removeprefix("test_")]
    for rank, one in enumerate(got):
        assert not isinstance(one, ranks.Failed), f"rank {rank}: {one}"
    return got


def test_same_for_every_number_of_ranks(result):
    assert [len(r) for r in result] == [16, 12, 8, 4]
    assert all(all(case) for r in result for case in r)


def test_again_changes_nothing(result):
    assert result == [(True, True)] * 4


def test_random_sequences(result):
    assert result == [[]] * 4


def test_differences_are_one_error_everywhere(result):
    expected = {
        "num_classes": "num_classes is 3 on ranks 0, 1, 2; num_classes is 4 on rank 3",
        "in_features": "in_features is 6 on ranks 0, 1, 2; in_features is 7 on rank 3",
        "grid": "the same FixedPoint",
        "rho": "rho is 1.0 on ranks 0, 1, 2; rho is 2.0 on rank 3",
        "class_weight": "class_weight is None on ranks 0, 1, 2; class_weight is balanced on rank 3",
        "fingerprint": "fingerprint is b on ranks 0, 1, 2; fingerprint is a on rank 3",
        "no head": "on rank 3: needed an LSSVMHead",
        "no grid": "on rank 3: exchanging changes needs a grid",
        "auto grids": "not grid='auto'",
        "kind": "kind is labels on ranks 0, 1, 2; kind is values on rank 3",
        "destination": "rank must be an int in 0..3, got 5",
        "other verb": "destination is None on ranks 0, 1, 2; destination is 0 on rank 3",
    }
    assert all(r == result[0] for r in result[1:])
    for name, (kind, text, unchanged) in result[0].items():
        assert kind == "ValueError", (name, kind, text)
        assert expected.get(name, name) in text, (name, text)
        assert unchanged, name


def test_removed_twice(result):
    held = {"counts": 33, "diagonal": 60, "definite": 3, "ids": 239, "many, without ids": 239}
    for name, n in held.items():
        said = [r[name] for r in result]
        assert {s[0] for s in said} == {"RemovalError"}, (name, said)
        assert len({s[1] for s in said}) == 1
        assert all(s[2] for s in said), name
        assert [s[3] for s in said] == [n] * 4
    assert all("1 row would be removed more often" in r[name][1] for r in result for name in held)


def test_copies_of_several_ranks(result):
    for same, left, kind, text, unchanged, at_last, clean in result:
        assert (same, left, kind, unchanged, at_last) == (True, "RemovalError", "RemovalError", True, True)
        assert clean  # a pickle keeps no fingerprint of a row that was removed
        assert "more often than they are held" in text


def test_ids_net_out(result):
    assert result == [(True, "RemovalError")] * 4


def test_diverged_ranks_are_named(result):
    assert all(r == result[0] for r in result)
    kind, text, again = result[0]
    assert kind == "VerificationError"
    assert again
    assert "rank 2 and ranks 0, 1, 3 differ" in text
    assert "epoch 1" in text


def test_copies_are_not_counted_again(result):
    assert all(r == result[0] for r in result)
    kind, text, right, resumed, epoch = result[0]
    assert (kind, right, resumed, epoch) == ("ValueError", True, True, 2)
    assert "ranks 0, 1, 2, 3 hold the same pending changes" in text
    assert "agree(head)" in text


def test_star(result):
    assert [r[0] for r in result] == [[0, 0, 0], [0, 0, 0], [40, 80, 120], [0, 0, 0]]
    assert [r[1] for r in result] == [False, False, True, False]
    assert [r[2:] for r in result] == [("VerificationError",)] * 4


def test_one_file_on_two_ranks(result):
    assert all(r == result[0] for r in result)
    kind, text, n, later, why = result[0]
    assert (kind, n, later) == ("ValueError", 9, "ValueError")
    assert "ranks 1, 3 hold the same pending changes" in text
    assert "merged already" in why


def test_few_samples_are_not_sent(result):
    assert all(r == result[0] for r in result)
    kind, text, kept, n = result[0]
    assert (kind, kept, n) == ("ValueError", True, 94)
    assert "on rank 0: the changes to be sent have a class with the sums of perhaps only 1 sample" in text


def test_added_twice(result):
    assert all(r == result[0] for r in result)
    out, right = result[0]
    assert right
    for name, (kind, text, kept, n) in out.items():
        assert kind == "ValueError", name
        assert "under the same ids (1 sample): they would count twice" in text
        assert kept
        assert n == (33 if name == "weighted" else 1 if "start" in name else 32)


def test_deltas_and_ranks(result):
    assert [r[:5] for r in result] == [("RemovalError", True, True, True, "ValueError")] * 4
    assert result[1][5] == (32, 31)
    assert [r[6:] for r in result] == [(False, 32)] * 4


def test_heads_saved_with_removals_pending_are_named(result):
    assert all(r == result[0] for r in result)
    kind, text, right, n = result[0]
    assert (kind, right, n) == ("ValueError", True, 39)
    assert "on rank 1: this head was saved or pickled while removals were pending" in text


def test_not_certifiable_anywhere(result):
    assert [before is None for before, _ in result] == [True, True, False, True]
    assert {after for _, after in result} == {result[2][0]}


def test_nothing_is_implicit(result):
    assert result == [20] * 4


def test_classes_may_change(result):
    assert result == [(True, "RemovalError")] * 4


def test_values_and_attached(result):
    assert [r[:3] for r in result] == [(True, 40, "ValueError")] * 4
    assert "fingerprint is" in result[0][3]


def test_empty_again(result):
    assert result == [(0, True, True, "ValueError")] * 4


def test_sums_that_would_overflow(result):
    assert [r[0] for r in result] == ["GridError"] * 4
    assert [r[2] for r in result] == [512] * 4


def test_ddp(result):
    assert result == [(True, True, True)] * 4


# -- a rank that dies -------------------------------------------------------------------------------------------------


def dies_in_the_middle(rank, world):
    """Rank 2 is killed after its sums are on their way; the others get an error and are as before."""
    from torchlssvm.distributed.collectives import Peers

    h = sync(batch(range(rank * 9, rank * 9 + 9), "weighted"))
    change(h, "add", range(100 + rank * 9, 109 + rank * 9))
    before = state(h)
    if rank == 2:
        total = Peers.total

        def last(self, part, to=None):
            total(self, part, to)
            os.kill(os.getpid(), 9)

        Peers.total = last
    start = time.monotonic()
    error = ranks.caught(lambda: sync(h))
    waited = time.monotonic() - start
    agreed = status(h).agreed == batch(range(27), "weighted").digest()
    return *error, state(h) == before, agreed, h.n, waited


def test_a_rank_that_dies_changes_nothing_elsewhere():
    *living, dead = ranks.run(3, [dies_in_the_middle], seconds=30)["dies_in_the_middle"]
    for kind, text, unchanged, agreed, n, waited in living:
        assert waited < 30  # the group's timeout: an error, not a hang
        assert kind == "RuntimeError"
        assert "lost its peers" in text
        assert unchanged
        assert agreed
        assert n == 36
    assert isinstance(dead, ranks.Failed)


def test_without_a_process_group():
    assert not dist.is_initialized()
    kind, text = ranks.caught(lambda: sync(head()))
    assert kind == "RuntimeError"
    assert "init_process_group" in text


def test_fingerprint_is_of_values_and_names():
    a = torch.nn.Linear(3, 2)
    b = copy.deepcopy(a)
    assert fingerprint(a) == fingerprint(b)
    with torch.no_grad():
        b.bias[0] += 1
    assert fingerprint(a) != fingerprint(b)
