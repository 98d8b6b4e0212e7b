"""Deltas: algorithms 4 and 5 in one process, files, ids, privacy, all or none."""

import copy
import io
import json
import pickle
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchlssvm import FixedPoint, LSSVMHead, RemovalError, VerificationError, attach
from torchlssvm.distributed import Delta, agree, discard, merge, status
from torchlssvm.linear.checkpoint import checksum, pack

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


def test_sums_from_elsewhere_under_an_id_and_a_network():
    """Sums that another program made, e.g. on Spark, are counted once under the id it gives them."""
    part = batch(range(20)).statistics
    master = merge(head(), Delta(part.copy(), fingerprint="network", id="job 7"), fingerprint="network")
    digest = master.digest()
    for delta in (Delta(part.copy(), fingerprint="network", id="job 7"), Delta(part.copy(), fingerprint="other")):
        with pytest.raises(ValueError, match=r"job 7|other"):
            merge(master, delta, fingerprint="network")
    assert master.digest() == digest == batch(range(20)).digest()


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
    with pytest.raises(ValueError, match="merged already"):
        merge(master, Delta.take(head().merge(agree(merge(head(), delta)))))  # by way of a head that agreed on it
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


def test_classifiers_exchange_deltas():
    x, y = torch.randn(40, 4), torch.arange(40) % 2
    whole, one, other = (attach(torch.nn.Identity(), 2, in_features=4, grid=FixedPoint(8.0)) for _ in range(3))
    whole.add(x, y), one.add(x[:20], y[:20]), other.add(x[20:], y[20:])
    before = one.head.digest()
    with pytest.raises(TypeError, match=r"Delta\.take\(other\)"):
        merge(one, other)
    assert one.head.digest() == before
    merge(one, Delta.take(other))
    assert one.head.digest() == whole.head.digest()


def test_merge_names_what_is_no_delta():
    master = batch(range(9))
    for other in (batch(range(9, 12)), "site.delta"):
        with pytest.raises(TypeError, match="takes deltas"):
            merge(master, other)
    assert master.n == 9


def test_files_hold_sums_only_and_damage_is_found(tmp_path):
    delta = Delta.like(head(), fingerprint="f").add(X[:40].double(), Y[:40], ids=range(40))
    assert len(delta.weights) == len(delta.rows) == 40
    delta.save(tmp_path / "d.pt")
    data = (tmp_path / "d.pt").read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["d.pt"]
    for row in (X[0], X[0].double(), GRID.quantize(X[:1])[0].long(), GRID.quantize(X[:1])[0].int()):
        assert row.numpy().tobytes() not in data
    assert not any(key in data for key in [*delta.weights, *(name[:16] for name in delta.rows)])
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
    reasons = dict.fromkeys(damaged, "not a delta: torch.load cannot read it") | {
        "flipped": "damaged delta: its contents"
    }
    for name, reason in (reasons | dict.fromkeys(("foreign", "list"), "not a delta: another object")).items():
        before = (tmp_path / name).read_bytes()
        with pytest.raises(VerificationError, match=f"{name} is .*{reason}"):
            Delta.load(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    with pytest.raises(FileNotFoundError):
        Delta.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("part", "changes"),
    [("meta", {"features": 10**9}), ("meta", {"classes": 10**9}), ("meta", {"folds": 10**9}), ("delta", {"id": [1]}),
     ("delta", {"uncertifiable": 3}), ("delta", {"fingerprint": ["x"]}), ("delta", {"carried": 5})],
    ids=repr,
)  # fmt: skip
def test_a_crafted_file_is_refused_before_it_takes_memory(tmp_path, part, changes):
    Delta.take(batch(range(12))).save(tmp_path / "d.pt")
    saved = torch.load(tmp_path / "d.pt", weights_only=True)
    about = json.loads(bytes(saved.pop("delta").numpy()))
    if part == "meta":
        saved["meta"] = pack(json.loads(bytes(saved["meta"].numpy())) | changes)
    about |= {"checksum": checksum(saved)} | (changes if part == "delta" else {})
    torch.save(saved | {"delta": pack(about)}, tmp_path / "d.pt")
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(VerificationError):
        Delta.load(tmp_path / "d.pt")
    assert time.process_time() - start < 1.0
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_differences_are_named():
    delta = Delta.like(head(), fingerprint="mine").add(X[:9], Y[:9])
    others = {
        "in_features": LSSVMHead(J + 1, K, grid=GRID, per_class=True, rho=1.0),
        "num_classes": LSSVMHead(J, K + 1, grid=GRID, per_class=True, rho=1.0),
        "per_class": LSSVMHead(J, K, grid=GRID, rho=1.0),
        "grid": LSSVMHead(J, K, grid=FixedPoint(8.0), per_class=True, rho=1.0),
        "needs a grid": LSSVMHead(J, K, grid=None, per_class=True, rho=1.0),
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
    lone.save(tmp_path / "d.pt")
    enough = Delta.like(head()).add(X[:30], Y[:30])
    assert enough.least_samples == 10
    enough.save(tmp_path / "e.pt", min_samples=10)
    back = Delta.like(head()).add(X[:30], Y[:30]).remove(X[:27], Y[:27])  # added and removed: one a class is left
    assert back.least_samples == 1
    assert Delta.like(head()).least_samples is None
    totals = (
        Delta.like(LSSVMHead(J, K, grid=GRID, rho=1.0)).add(X[:30], Y[:30]).add(X[:1], Y[:1]).remove(X[1:2], Y[1:2])
    )
    assert totals.least_samples == 9
    relabelled = Delta.like(LSSVMHead(J, K, grid=GRID, rho=1.0)).remove(X[:1], Y[:1]).add(X[:1], Y[1:2])
    assert relabelled.least_samples == 1  # its class sums are the sample itself
    with pytest.raises(ValueError, match="min_samples must be an int"):
        enough.save(tmp_path / "f.pt", min_samples=-1)


def test_a_copy_saves_what_its_original_saves():
    h = batch(range(20))
    plain = h.state_dict()
    twin = copy.deepcopy(h)
    loaded = head()
    loaded.load_state_dict(plain)
    for other in (h, twin, loaded):
        saved = other.state_dict()
        assert all(torch.equal(saved[k], v) for k, v in plain.items())
    with pytest.raises(ValueError, match=r"Delta\.take"):
        Delta(h)


def test_discard_goes_back_to_what_was_agreed():
    h = agree(batch(range(30)))
    before, w = h.digest(), h.w.clone()
    h.add(X[100:140], Y[100:140]).remove(X[:3], Y[:3])
    merge(h, Delta.like(h).add(X[150:160], Y[150:160]))
    ids = set(h.pending.merged)
    assert discard(h).digest() == before
    assert torch.equal(h.w, w)
    assert ids
    assert not h.pending.merged  # what was dropped may come again


def test_emptied_by_a_delta():
    h = agree(batch(range(6)))
    merge(h, Delta.like(h).remove(X[:6], Y[:6]))
    assert h.n == 0
    assert h.digest() == head().digest()
    assert h.pending.statistics.n == -6
    assert discard(h).digest() == batch(range(6)).digest()


def taken_again(node, master):
    """What a node's changes are, if they are brought to a master that has what was handed over before."""
    return merge(master, Delta.take(node)).digest() == node.digest()


def test_a_save_that_is_refused_loses_nothing(tmp_path):
    node = batch(range(6))
    delta = Delta.take(node)
    with pytest.raises(ValueError, match="min_samples=20"):
        delta.save(tmp_path / "d.pt", min_samples=20)
    assert taken_again(copy.deepcopy(node), head())
    delta.save(tmp_path / "d.pt")  # nobody else has taken it: it may be saved after all
    assert Delta.take(node).statistics.empty
    assert merge(head(), Delta.load(tmp_path / "d.pt")).digest() == node.digest()


class FullDisk:
    """A torch.save that fails when it has written a part, as on a full disk."""

    def __call__(self, out, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stage", ["write", "sync", "rename"])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, stage):
    node = agree(batch(range(30)))
    node.remove(X[:5], Y[:5]).add(X[50:60], Y[50:60])
    master = batch(range(30))

    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if stage == "write":
            patch.setattr(torch, "save", FullDisk())
        else:
            patch.setattr(*(("os.fsync", fails) if stage == "sync" else ("pathlib.Path.replace", fails)))
        with pytest.raises(OSError, match="No space"):
            Delta.take(node).save(tmp_path / "d.pt")
    assert not list(tmp_path.iterdir())
    node.add(X[70:72], Y[70:72])
    Delta.take(node).save(tmp_path / "d.pt")
    assert Delta.take(node).statistics.empty
    assert merge(master, Delta.load(tmp_path / "d.pt")).digest() == node.digest()


def test_changes_after_a_take_stay_pending(tmp_path):
    node, master = agree(batch(range(30))), batch(range(30))
    node.add(X[50:60], Y[50:60])
    first = Delta.take(node)
    node.remove(X[52:55], Y[52:55]).remove(X[:3], Y[:3]).add(X[60:61], Y[60:61])
    first.save(tmp_path / "first.pt")
    assert node.pending.statistics.n == -5
    second = Delta.take(node)
    second.save(tmp_path / "second.pt")
    assert node.pending.statistics.empty
    merge(master, Delta.load(tmp_path / "second.pt"), Delta.load(tmp_path / "first.pt"))
    assert master.digest() == node.digest()


def test_of_two_deltas_with_the_same_changes_one_is_handed_over(tmp_path):
    node = batch(range(10))
    first = Delta.take(node)
    second = Delta.take(node.add(X[10:15], Y[10:15]))
    assert (first.id, second.statistics.n) == (second.id, 15)
    with pytest.raises(ValueError, match=first.id):
        merge(head(), first, second)
    master = merge(head(), first)
    with pytest.raises(ValueError, match=first.id):
        second.save(tmp_path / "d.pt")
    assert merge(master, Delta.take(node)).digest() == node.digest()


@pytest.mark.parametrize("how", ["agree", "discard", "another delta", "more classes", "adopted"])
def test_a_delta_whose_changes_went_another_way_is_refused(tmp_path, how):
    node = batch(range(20))
    delta = Delta.take(node)
    if how == "agree":
        agree(node)
    elif how == "discard":
        discard(node)
    elif how == "more classes":
        node.add_classes(1)
    elif how == "adopted":
        node._adopt(node.statistics.state())
    else:
        merge(head(), Delta.take(node))
    before = status(node)
    for call in (lambda: delta.save(tmp_path / "d.pt"), lambda: merge(head(), delta), delta.commit):
        with pytest.raises(ValueError, match=delta.id):
            call()
    assert not list(tmp_path.iterdir())
    assert status(node) == before


def test_a_failed_merge_hands_nothing_over():
    node, master = agree(batch(range(30))), batch(range(100, 103))
    node.remove(X[:9], Y[:9])
    delta = Delta.take(node)
    with pytest.raises(RemovalError):
        merge(master, delta)
    assert merge(batch(range(30)), delta).digest() == node.digest()
    assert Delta.take(node).statistics.empty


def test_own_changes_do_not_come_back(tmp_path):
    node = batch(range(20))
    delta = Delta.take(node)
    with pytest.raises(ValueError, match="this head itself"):
        merge(node, delta)
    with pytest.raises(ValueError, match="not handed over yet"):
        delta.add(X[:1], Y[:1])
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(ValueError, match="still pending in their head"):
            copied(delta)
    delta.save(tmp_path / "d.pt")
    for there in (node, copy.deepcopy(node), pickle.loads(pickle.dumps(node))):
        with pytest.raises(ValueError, match="merged already"):
            merge(there, Delta.load(tmp_path / "d.pt"))
    sent = pickle.loads(pickle.dumps(Delta.take(batch(range(9))).commit()))
    assert merge(head(), sent).digest() == batch(range(9)).digest()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
@pytest.mark.parametrize("when", ["before the take", "after the take"])
def test_a_copy_of_the_head_does_not_send_the_same_again(tmp_path, how, when):
    """A node that crashed after a delivery, and goes on from a copy or checkpoint made before it."""
    node, twin = batch(range(20)), head()

    def copied():
        if how == "state_dict":
            twin.load_state_dict(node.state_dict())
            return twin
        return copy.deepcopy(node) if how == "deepcopy" else pickle.loads(pickle.dumps(node))

    other = copied() if when == "before the take" else None
    delta = Delta.take(node)
    other = other or copied()
    node.add(X[30:35], Y[30:35])
    delta.save(tmp_path / "d.pt")
    master = merge(head(), Delta.load(tmp_path / "d.pt"))
    before = master.digest()
    with pytest.raises(ValueError, match="merged already"):
        merge(master, Delta.take(other))
    assert master.digest() == before
    assert taken_again(node, master)  # what the original has changed since comes in
    with pytest.raises(ValueError, match="merged already"):
        merge(merge(head(), Delta.take(other)), Delta.load(tmp_path / "d.pt"))


def recovered(path, label):
    """The sample that a file of sums gives away: the class sum divided by the count."""
    stats = Delta.load(path).statistics
    V, counts = stats.class_sums()
    return V[label].double() / counts[label] * GRID.resolution


@pytest.mark.parametrize("form", [{}, {"class_weight": None, "intercept": "free"}])
@pytest.mark.parametrize("way", ["weight", "repeated", "taken after a mark"])
def test_one_sample_of_weight_twenty_is_one_sample(tmp_path, form, way):
    x, y = torch.cat([X[30:90], X[:1]]), torch.cat([Y[30:90] % 2 + 1, torch.tensor([0])])
    target = head(**form)
    if way == "taken after a mark":
        agree(target)
    what = Delta.like(target) if "taken" not in way else target
    what.add(x[:60], y[:60])
    if way == "repeated":
        what.add(x[60:].repeat(20, 1), y[60:].repeat(20))
    else:
        what.add(x[60:], y[60:], torch.tensor([20]))
    delta = Delta.take(what) if "taken" in way else what
    assert delta.least_samples == 1
    with pytest.raises(ValueError, match="perhaps only 1 sample"):
        delta.save(tmp_path / "d.pt", min_samples=20)
    delta.save(tmp_path / "d.pt")
    assert (recovered(tmp_path / "d.pt", 0) - X[0]).abs().max() < 1e-4  # why it is refused


@pytest.mark.parametrize("form", [{}, {"class_weight": None, "intercept": "free"}])
def test_distinct_samples_are_counted_net(tmp_path, form):
    def like():
        return Delta.like(head(**form))

    some = like().add(X[:60], Y[:60], torch.full((60,), 5))
    assert some.least_samples == 20
    some.save(tmp_path / "d.pt", min_samples=20)
    assert some.remove(X[:6], Y[:6], torch.full((6,), 5)).least_samples == 18
    assert some.remove(X[6:9], Y[6:9]).least_samples == 18  # four of five are left
    removed = like().remove(X[:60], Y[:60])
    assert removed.least_samples == 20
    node = head(**form).add(X[:60], Y[:60])
    node.relabel(X[:3], Y[:3], (Y[:3] + 1) % K)
    assert Delta.take(node).least_samples == 20
    loaded = head(**form)
    loaded.load_state_dict(node.state_dict())
    assert Delta.take(loaded).least_samples == 20  # a checkpoint knows its rows


def test_what_cannot_be_certified_stays_so(tmp_path):
    node = batch(range(60))
    merge(head(), Delta.take(node))
    node.remove_approximate(X[:1] + 1e-4, Y[:1])
    Delta.take(node).save(tmp_path / "d.pt")
    loaded = Delta.load(tmp_path / "d.pt")
    assert loaded.uncertifiable == node.uncertifiable
    master = merge(batch(range(60)), loaded)
    assert master.uncertifiable
    assert master.uncertifiable == node.uncertifiable
    relayed = merge(batch(range(60)), Delta.take(master))
    assert relayed.uncertifiable == node.uncertifiable
    assert merge(head(), Delta.take(batch(range(60)))).uncertifiable is None
