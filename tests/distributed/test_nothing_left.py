"""Erasures and files: nothing that is saved, pickled or checkpointed gives an erased sample away, or confirms a guess."""

import copy
import hashlib
import io
import pickle

import pytest
import torch

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.corrections.seen_samples import SeenSamples
from torchlssvm.distributed import Delta, agree, discard, merge, status
from torchlssvm.linear.pending import Tracking

GRID = FixedPoint(8.0)
J, K = 6, 3
X, Y = torch.randn(60, J, generator=torch.Generator().manual_seed(0)), torch.arange(60) % K
FORMS = [{}, {"class_weight": "balanced"}, {"folds": 2, "per_class": True}]


def head(**options):
    return LSSVMHead(J, K, grid=GRID, **({"rho": 1.0} | options))


def names(index):
    return [f"patient-{i}" for i in index]


def batch(index, **options):
    index = list(index)
    return head(**options).add(X[index], Y[index], ids=names(index))


def change(h, verb, index):
    return getattr(h, verb)(X[index], Y[index], ids=names(index))


def saved(h, how):
    """What ends up in a file: every tensor, and all bytes."""
    buffer = io.BytesIO()
    if how == "state_dict":
        torch.save(h.state_dict(), buffer)
        return h.state_dict(), buffer.getvalue()
    data = pickle.dumps(h)
    return pickle.loads(data).statistics.state(), data


def loaded(h, how):
    if how == "pickle":
        return pickle.loads(pickle.dumps(h))
    out = LSSVMHead.from_config(h.config())
    out.load_state_dict(h.state_dict())
    return out


def hashes_of(sample_id, row, label):
    """Everything that a guess of an id and its sample can be hashed to without a key."""
    q = GRID.quantize(row[None])[0]
    target = torch.tensor([float(label)], dtype=torch.float64)
    texts = [
        sample_id.encode(),
        sample_id.encode() + b"\0" + torch.cat([target, q]).numpy().tobytes(),
        q.numpy().tobytes(),
    ]
    for text in texts:
        for size in (8, 16, 20, 32, 64):
            yield hashlib.blake2b(text, digest_size=size).digest()
        for kind in ("sha256", "sha1", "md5"):
            yield hashlib.new(kind, text).digest()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["state_dict", "pickle"])
def test_agreed_minus_present_is_not_saved(form, how):
    """The attack: the base in the file minus the present sums is the erased sample; so is a digest that it would confirm."""
    h = agree(batch(range(60), **form))
    before = h.digest()
    change(h, "remove", [7])
    tensors, data = saved(h, how)
    assert not [name for name in tensors if "pending" in name]
    assert before.encode() not in data
    assert bytes.fromhex(before) not in data
    never = batch([i for i in range(60) if i != 7], **form)
    for name, value in never.statistics.state().items():
        if name != "meta":
            mine = tensors.get(f"statistics.{name}", tensors.get(name))
            assert torch.equal(mine, value)


@pytest.mark.parametrize("how", ["state_dict", "pickle"])
def test_what_is_saved_does_not_tell_that_somebody_was_there(how):
    """Added and removed since the mark: the file is that of a head that never saw the sample."""
    h, never = (agree(batch(range(59), per_class=True)) for _ in range(2))
    big = torch.full((1, J), 7.0)
    h.add(big, torch.tensor([1])).remove(big, torch.tensor([1]))
    mine, theirs = (saved(one.refresh(), how)[0] for one in (h, never))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[k], theirs[k]) for k in mine if k != "options")
    only = head(per_class=True).add(X[:3], torch.zeros(3, dtype=torch.int64))
    both = copy.deepcopy(only).add(big, torch.tensor([1])).remove(big, torch.tensor([1]))
    assert all(torch.equal(both.statistics.state()[k], v) for k, v in only.statistics.state().items())


@pytest.mark.parametrize("how", ["state_dict", "pickle"])
@pytest.mark.parametrize("then", ["removed", "relabelled", "removed, handed over"])
def test_no_hash_of_a_sample_in_a_file(how, then):
    """The attack: guess an id and its sample, and look for its hash."""
    h = agree(batch(range(60), folds=2))
    if then == "relabelled":
        h.relabel(X[7:8], Y[7:8], (Y[7:8] + 1) % K, ids=names([7]))
    else:
        change(h, "remove", [7])
    h.add(X[20:22] / 2, Y[20:22], ids=["new-1", "new-2"])
    if "handed over" in then:
        delta = Delta.take(h).commit()
        assert not [g for g in hashes_of("patient-7", X[7], Y[7]) if g in pickle.dumps(delta)]
    _, data = saved(h, how)
    found = [g for i in (7, 8) for g in hashes_of(f"patient-{i}", X[i], Y[i]) if g in data or g.hex().encode() in data]
    assert not found


@pytest.mark.parametrize("how", ["state_dict", "pickle"])
def test_resumed_between_agree_and_remove(how, tmp_path):
    """A checkpoint after the removal answers as before; what it no longer knows is named, and nothing is sent twice."""
    h = agree(batch(range(60)))
    change(h, "remove", [7])
    other = loaded(h, how)
    assert other.digest() == h.digest() == batch([i for i in range(60) if i != 7]).digest()
    assert torch.equal(other(X), h(X))
    assert other.pending.tracking is Tracking.LOST
    assert status(other).pending
    for call in (lambda: Delta.take(other), lambda: discard(other)):
        with pytest.raises(ValueError, match=r"agree\(head\)"):
            call()
    again = loaded(other, how)  # and it does not become right by being saved again
    with pytest.raises(ValueError, match=r"agree\(head\)"):
        Delta.take(again)
    merge(again, Delta.like(again).add(X[7:8], Y[7:8]))
    assert again.digest() == batch(range(60)).digest()
    agree(other)
    assert status(other) == (0, other.digest(), False)
    change(other, "add", [7])
    assert Delta.take(other).statistics.n == 1
    Delta.take(h).save(tmp_path / "d.pt")  # the original goes on
    assert merge(batch(range(60)), Delta.load(tmp_path / "d.pt")).digest() == h.digest()


@pytest.mark.parametrize("how", ["state_dict", "pickle"])
def test_additions_that_are_pending_survive(how):
    h = agree(batch(range(30)))
    change(h, "add", range(30, 40))
    other = loaded(h, how)
    assert other.pending.agreed_sums().digest() == batch(range(30)).digest()
    assert status(other)[:2] == status(h)[:2] == (0, batch(range(30)).digest())
    assert Delta.take(other).statistics.n == 10
    synced = loaded(agree(change(h, "remove", [3])), how)  # nothing pending: nothing is left out
    assert synced.pending.tracking is Tracking.CHANGES
    assert status(synced) == (0, h.digest(), False)


def test_copies_and_moves_within_the_process_keep_what_was_agreed_on():
    h = agree(batch(range(30)))
    change(h, "remove", [3])
    for other in (copy.deepcopy(h), copy.deepcopy(torch.nn.Sequential(h))[0]):
        assert other.pending.agreed_sums().digest() == batch(range(30)).digest()
        assert Delta.take(other).statistics.n == -1
    assert h.statistics.to("cpu") is h.statistics


def test_offered_ids_in_a_checkpoint_are_keyed():
    offered = SeenSamples()
    offered.record(names(range(5)), "e")
    for data in (pickle.dumps(offered.state_dict()), pickle.dumps(offered)):
        found = [g for i in range(5) for g in hashes_of(f"patient-{i}", X[0], 0) if g in data]
        assert not found
    other = SeenSamples()
    other.load_state_dict(offered.state_dict())
    other.record(["later"], "e2")
    third = SeenSamples()
    third.load_state_dict(other.state_dict())
    assert third.new([*names(range(7)), "later"]) == [5, 6]
    assert pickle.loads(pickle.dumps(third)).new([*names(range(7)), "later"]) == [5, 6]
