"""Deltas: algorithms 4 and 5 in one process, files, ids, privacy, all or none."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchlssvm import FixedPoint, LSSVMHead, RemovalError, VerificationError, attach
from torchlssvm.distributed import Delta, agree, discard, merge

GRID = FixedPoint(16.0)
J, K = 5, 3
X, Y = torch.randn(200, J, generator=torch.Generator().manual_seed(0)) * 2, torch.arange(200) % K


def head(**options):
    return LSSVMHead(J, K, **{"grid": GRID, "class_weight": "complement", "intercept": "penalized", **options})


def batch(index):
    index = torch.tensor(sorted(index), dtype=torch.int64)
    return head().add(X[index], Y[index])


@settings(max_examples=40)
@given(data=st.data())
def test_nodes_and_master(data):
    """Nodes that never meet: whatever order their changes come in, the master has what all of them together have."""
    master, held = head(), set()
    deltas = []
    for _ in range(data.draw(st.integers(1, 5))):
        delta = Delta.like(master)
        add = set(data.draw(st.lists(st.integers(0, 199), max_size=20))) - held
        remove = set(data.draw(st.lists(st.sampled_from(sorted(held)), max_size=10))) if held else set()
        for verb, index in (("add", sorted(add)), ("remove", sorted(remove))):
            getattr(delta, verb)(X[index], Y[index])
        held = (held | add) - remove
        deltas.append(delta)
    for delta in deltas if data.draw(st.booleans()) else [None]:
        merge(master, *([delta] if delta else data.draw(st.permutations(deltas))))
    assert master.digest() == batch(held).digest()
    if held:
        assert torch.equal(master.refresh().w, batch(held).refresh().w)


def test_equations_36_and_37():
    """The message: changes of counts, core matrices and core vectors, adds and removes netted."""
    xa, ya, xr, yr = X[:12], Y[:12], X[50:55], Y[50:55]
    stats = Delta.like(head()).add(xa, ya).remove(xr, yr).statistics
    step = GRID.resolution
    for k in range(K):
        E = [
            np.hstack([GRID.snap(x[y == k]).numpy(), np.ones((int((y == k).sum()), 1))])
            for x, y in ((xa, ya), (xr, yr))
        ]
        M = E[0].T @ E[0] - E[1].T @ E[1]
        units = np.array([step] * J + [1.0])
        np.testing.assert_allclose(stats.M[k].numpy() * np.outer(units, units), M, atol=1e-9)
        assert int(stats.counts[k]) == len(E[0]) - len(E[1])


def test_take_hands_each_change_over_once():
    node, master = batch(range(20)), head()
    first = Delta.take(node)
    assert Delta.take(node).statistics.empty
    node.remove(X[:5], Y[:5]).add(X[30:32], Y[30:32])
    second = Delta.take(node)
    assert first.id != second.id
    assert merge(merge(master, first), second).digest() == node.digest()
    assert node.n == 17  # the node goes on with its own model


def test_a_delta_is_merged_once(tmp_path):
    Delta.take(batch(range(20))).save(tmp_path / "d.pt")
    master = merge(head(), Delta.load(tmp_path / "d.pt"))
    before = master.digest()

    def refused(target):
        with pytest.raises(ValueError, match="merged already"):
            merge(target, Delta.load(tmp_path / "d.pt"))
        assert target.digest() == before

    refused(master)
    for twin in (pickle.loads(pickle.dumps(master)), copy.deepcopy(master)):
        refused(twin)
    buffer = io.BytesIO()
    torch.save(master.state_dict(), buffer)
    buffer.seek(0)
    loaded = head()
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    refused(loaded)
    delta = Delta.load(tmp_path / "d.pt")
    with pytest.raises(ValueError, match="given twice"):
        merge(head(), delta, delta)
    with pytest.raises(ValueError, match="merged already"):
        master.merge(merge(head(), delta))  # by way of another head
    master -= merge(head(), delta)
    assert master.n == 0
    assert merge(master, delta).digest() == before


def test_all_or_none():
    good, bad = Delta.like(head()).add(X[:9], Y[:9]), Delta.like(head()).remove(X[100:130], Y[100:130])
    for start in (head(), batch(range(50, 60))):
        before, n = start.digest(), start.n
        with pytest.raises(RemovalError):
            merge(start, good, bad)
        assert (start.digest(), start.n) == (before, n)
        assert merge(start, good).n == n + 9
        if n:
            assert torch.equal(start.refresh().w, batch([*range(50, 60), *range(9)]).refresh().w)


@pytest.mark.parametrize("how", ["count", "diagonal", "definite", "nothing left"])
def test_removals_that_cannot_be(how):
    master = batch(range(9))
    rows = {
        "count": (X[:3].repeat(4, 1), Y[:3].repeat(4)),
        "diagonal": (torch.full((1, J), 15.0), Y[:1]),
        "definite": (X[:1] + 0.25, Y[:1]),
        "nothing left": (X[[0, 3, 6, 1, 4, 7, 2, 5, 8]] * 0.5, Y[[0, 3, 6, 1, 4, 7, 2, 5, 8]]),
    }[how]
    before = master.digest()
    with pytest.raises(RemovalError):
        merge(master, Delta.like(master).remove(*rows))
    assert master.digest() == before


def test_files_hold_sums_only_and_damage_is_found(tmp_path):
    delta = Delta.like(head(), fingerprint="f").add(X[:40].double(), Y[:40], ids=range(40))
    assert len(delta.keys) == 40
    delta.save(tmp_path / "d.pt")
    data = (tmp_path / "d.pt").read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["d.pt"]
    for row in (X[0], X[0].double(), GRID.quantize(X[:1])[0].long(), GRID.quantize(X[:1])[0].int()):
        assert row.numpy().tobytes() not in data
    assert not any(key in data for key in delta.keys)
    loaded = Delta.load(tmp_path / "d.pt")
    assert (loaded.id, loaded.fingerprint, loaded.digest()) == (delta.id, "f", delta.digest())
    flipped = bytearray(data)
    at = data.index(delta.statistics.state()["counts"].numpy().tobytes())
    flipped[at] ^= 1
    damaged = {"cut": data[: len(data) // 2], "empty": b"", "text": b"a,b\n1,2\n", "flipped": bytes(flipped)}
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
    torch.save(head().state_dict(), tmp_path / "foreign")
    torch.save([1, 2], tmp_path / "list")
    for name in [*damaged, "foreign", "list"]:
        before = (tmp_path / name).read_bytes()
        with pytest.raises(VerificationError, match=name):
            Delta.load(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    with pytest.raises(FileNotFoundError):
        Delta.load(tmp_path / "nowhere")


def test_differences_are_named():
    delta = Delta.like(head(), fingerprint="mine").add(X[:9], Y[:9])
    others = {
        "in_features": LSSVMHead(J + 1, K, grid=GRID, per_class=True),
        "num_classes": LSSVMHead(J, K + 1, grid=GRID, per_class=True),
        "per_class": LSSVMHead(J, K, grid=GRID),
        "grid": LSSVMHead(J, K, grid=FixedPoint(8.0), per_class=True),
        "needs a grid": LSSVMHead(J, K, grid=None, per_class=True),
        "statistics=True": LSSVMHead(J, K, grid=GRID, statistics=False),
        "LSSVMHead": torch.nn.Linear(2, 2),
    }
    for text, other in others.items():
        with pytest.raises(ValueError, match=text):
            merge(other, delta)
    with pytest.raises(ValueError, match="fingerprint"):
        merge(head(), delta, fingerprint="other")
    clf = attach(
        torch.nn.Sequential(torch.nn.Linear(7, J), torch.nn.ReLU(), torch.nn.Linear(J, 9)), K, grid=GRID, per_class=True
    )
    with pytest.raises(ValueError, match="fingerprint"):
        merge(clf, delta)
    assert merge(clf, Delta.like(clf).add(X[:9], Y[:9])).n == 9


def test_few_samples_are_not_written(tmp_path):
    lone = Delta.like(head()).add(X[:30][Y[:30] > 0], Y[:30][Y[:30] > 0]).add(X[:1], Y[:1])
    assert lone.least_samples == 1
    with pytest.raises(ValueError, match="perhaps only 1 sample"):
        lone.save(tmp_path / "d.pt", min_samples=5)
    assert not list(tmp_path.iterdir())
    lone.save(tmp_path / "d.pt", min_samples=5, allow_small=True)
    enough = Delta.like(head()).add(X[:30], Y[:30])
    assert enough.least_samples == 10
    enough.save(tmp_path / "e.pt", min_samples=10)
    back = Delta.like(head()).add(X[:30], Y[:30]).remove(X[:27], Y[:27])  # added and removed: one a class is left
    assert back.least_samples == 1
    swapped = Delta.like(head()).add(X[:12], Y[:12]).remove(X[60:72], Y[60:72])  # net zero, but eight samples a class
    assert swapped.least_samples == J  # as many as the rank can prove
    assert Delta.like(head()).least_samples is None
    totals = Delta.like(LSSVMHead(J, K, grid=GRID)).add(X[:30], Y[:30]).add(X[:1], Y[:1]).remove(X[1:2], Y[1:2])
    assert totals.least_samples == 9
    relabelled = Delta.like(LSSVMHead(J, K, grid=GRID)).remove(X[:1], Y[:1]).add(X[:1], Y[1:2])
    assert relabelled.least_samples == 1  # its class sums are the sample itself
    with pytest.raises(ValueError, match="min_samples must be an int"):
        enough.save(tmp_path / "f.pt", min_samples=-1)


def test_discard_goes_back_to_what_was_agreed():
    h = agree(batch(range(30)))
    before, w = h.digest(), h.w.clone()
    h.add(X[100:140], Y[100:140]).remove(X[:3], Y[:3])
    merge(h, Delta.like(h).add(X[150:160], Y[150:160]))
    ids = set(h._ledger.merged)
    assert discard(h).digest() == before
    assert torch.equal(h.w, w)
    assert ids
    assert not h._ledger.merged  # what was dropped may come again


def test_emptied_by_a_delta():
    h = agree(batch(range(6)))
    merge(h, Delta.like(h).remove(X[:6], Y[:6]))
    assert h.n == 0
    assert h.digest() == head().digest()
    assert h.statistics.agreed().n == 6
    assert discard(h).digest() == batch(range(6)).digest()
