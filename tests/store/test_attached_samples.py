"""What people type first: fit a loader, add batches, score, save and load, and erase a subject by name."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchlssvm import (
    AttachedClassifier,
    CompactLSSVMHead,
    FixedPoint,
    KernelLSSVM,
    LSSVMHead,
    RemovalError,
    Remove,
    VerificationError,
    attach,
    verify,
)
from torchlssvm.errors import NotFittedError, StoreError
from torchlssvm.kernels import RBF
from torchlssvm.store import SampleStore

N, K = 60, 3
GRID = FixedPoint(64.0)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(1)
    y = torch.arange(N) % K
    x = torch.randn(N, 1, 8, 8)
    x[:, 0, 0] += 3 * y[:, None]
    ids = [f"s{i}" for i in range(N)]
    subjects = [f"u{i % 7}" for i in range(N)]
    return x, y, ids, subjects


def pairs(data, size=16):
    x, y, *_ = data
    return DataLoader(TensorDataset(x, y), batch_size=size)


def named(data, size=16):
    x, y, ids, subjects = data
    return [(x[a : a + size], y[a : a + size], ids[a : a + size], subjects[a : a + size]) for a in range(0, N, size)]


@pytest.mark.parametrize("head", [None, "margin"])
def test_a_fit_is_one_add_and_a_second_fit_starts_anew(data, head):
    clf = attach(network(), K, head, grid=GRID)
    assert clf.fit(pairs(data), progress=False) is clf
    plain = attach(network(), K, head, grid=GRID).add(data[0], data[1])
    assert clf.head.digest() == plain.head.digest()
    held = clf.head
    assert clf.fit(pairs(data)).head is held
    assert held.digest() == plain.head.digest()
    assert clf.score(pairs(data)) == clf.score(data[0], data[1]) > 0.8
    if head is None:  # a margin head keeps its samples and calibrates itself
        with pytest.raises(NotFittedError, match="calibrate"):
            clf.predict_proba(data[0])
        clf.calibrate(pairs(data))
    p = clf.predict_proba(data[0])
    assert p.shape == (N, K)
    assert torch.allclose(p.sum(1), torch.ones(N, dtype=p.dtype))


@pytest.mark.parametrize("kind", ["tuples", "dicts", "hugging"])
def test_batches_may_be_tuples_or_dicts(data, kind):
    x, y, *_ = data
    batches = {
        "tuples": [(x, y)],
        "dicts": [{"x": x, "y": y, "ids": data[2]}],
        "hugging": [{"image": x, "label": y}],
    }[kind]
    assert attach(network(), K).fit(batches).head.n == N


def test_add_takes_a_loader_wholly_or_not_at_all(data):
    x, y, *_ = data
    clf = attach(network(), K).add(x[:20], y[:20])
    before = clf.head.digest()
    with pytest.raises(ValueError, match="label 9 is outside"):
        clf.add([(x[20:40], y[20:40]), (x[40:], torch.full((20,), 9))])
    assert clf.head.digest() == before
    assert clf.add([(x[20:40], y[20:40]), (x[40:], y[40:])]).head.n == N
    whole = attach(network(), K, grid=clf.head.grid).add(x[:20], y[:20]).add(x[20:40], y[20:40]).add(x[40:], y[40:])
    assert clf.head.digest() == whole.head.digest()
    assert clf.remove(x[:20], y[:20]).head.n == 40  # rows of a merged head are still known


def test_a_kernel_machine_takes_a_loader_too(data):
    x, y, *_ = data
    clf = attach(network(), K, KernelLSSVM(RBF(sigma=3.0), num_classes=K))
    clf.fit(pairs(data))
    assert len(clf.head.ids) == N
    ids = clf.add([(x[:5], y[:5])])
    assert len(ids) == 5
    with pytest.raises(ValueError, match="a tensor y"):
        clf.add([(x[:5], y[:5]), "no batch"])
    assert len(clf.head.ids) == N + 5
    assert len(clf.fit(pairs(data)).head.ids) == N


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "uint8.*float"),
        ([torch.zeros(1, 8, 8)], "torch.stack"),
        ([[0.0]], "preprocess"),
        (np.zeros((2, 1, 8, 8)), "from_numpy"),
    ],
)
def test_inputs_that_no_network_takes_are_told_what_to_do(given, words):
    clf = attach(network(), K)
    for call in (clf.predict, lambda g: clf.add(g, torch.zeros(2, dtype=torch.int64)), clf.features):
        with pytest.raises(ValueError, match=words):
            call(given)


@pytest.mark.parametrize("wrong", [torch.zeros(3, 1, 8, 8), "folder", 7, TensorDataset(torch.zeros(3, 64))])
def test_what_is_no_loader_is_named(wrong):
    with pytest.raises(ValueError, match=r"takes (images and labels|a DataLoader)"):
        attach(network(), K).fit(wrong)
    with pytest.raises(ValueError, match="no samples"):
        attach(network(), K).score([])


# -- with a store ------------------------------------------------------------------------------------------------------


def left_of(data, subject, size):
    """The head that never saw a subject, from the features of the same passes."""
    x, y, _, subjects = data
    head = attach(network(), K, grid=GRID)
    for a in range(0, N, size):
        phi = head.features(x[a : a + size])
        keep = [k for k in range(len(phi)) if subjects[a + k] != subject]
        head.head.add(phi[keep], y[a : a + size][keep])
    return head.head


@pytest.mark.parametrize("size", [1, 7, 16, 60])
def test_a_subject_is_removed_exactly_whatever_the_batch_size(data, tmp_path, size):
    clf = attach(network(), K, grid=GRID, store=tmp_path / "store").fit(named(data, size))
    receipt = clf.remove(subject="u3")
    assert receipt.samples == sum(s == "u3" for s in data[3])
    assert clf.head.digest() == left_of(data, "u3", size).digest()
    certificate = clf.store.certificate(receipt.event_id)
    assert verify(certificate, store=clf.store, allow_unsigned=True)
    clf.store.close()


def test_fit_opens_a_store_and_a_second_fit_refuses(data, tmp_path):
    clf = attach(network(), K)
    clf.join(tmp_path / "store").fit(named(data))
    assert len(clf.store) == N
    before = clf.head.digest()
    with pytest.raises(ValueError, match=r"holds 60 samples.*clf\.add"):
        clf.fit(named(data))
    with pytest.raises(ValueError, match="already"):
        clf.join(tmp_path / "other")
    assert clf.head.digest() == before
    assert not (tmp_path / "other").exists()
    clf.add(named(data))  # all of them are there
    assert clf.head.digest() == before
    with pytest.raises(ValueError, match="label"):
        clf.add([(data[0][:1], data[1][:1] + 1, data[2][:1], data[3][:1])])
    with pytest.raises(ValueError, match="subject"):
        clf.add([(data[0][:1], data[1][:1], data[2][:1])])
    clf.store.close()


def test_without_ids_it_fails_at_fit_with_the_reason(data, tmp_path):
    clf = attach(network(), K, store=tmp_path / "store")
    with pytest.raises(ValueError, match="needs an id for each sample"):
        clf.fit(pairs(data))
    assert clf.head.n == 0
    plain = attach(network(), K)
    with pytest.warns(UserWarning, match="not kept without a store"):
        plain.fit(named(data, N))
    for arguments in ({"subject": "u3"}, {"ids": ["s1"]}):
        with pytest.raises(ValueError, match="only a store keeps them"):
            plain.remove(**arguments)
    with pytest.raises(ValueError, match="store=folder"):
        plain.add(data[0], data[1], subjects=data[3])
    clf.store.close()


def test_verbs_by_name(data, tmp_path):
    x, y, ids, subjects = data
    clf = attach(network(), K, grid=GRID, store=str(tmp_path / "store"))
    clf.add(x[:30], y[:30], ids=ids[:30], subjects=subjects[:30])
    clf.add(x[30:], y[30:], ids=ids[30:], subjects="late")
    assert clf.remove(ids="s0").samples == 1
    assert clf.relabel(ids=["s1"], y_new=[0]).samples == 1
    assert clf.remove(subject="late").samples == 30
    for wrong in (
        lambda: clf.remove(x[:1], y[:1]),
        lambda: clf.remove(),
        lambda: clf.remove(ids=["s2"], subject="u2"),
        lambda: clf.relabel(x[:1], y[:1], y[:1]),
        lambda: clf.add(x, y, ids=ids, weight=torch.ones(N)),
        lambda: clf.add(x[:1], y[:1]),
    ):
        with pytest.raises(ValueError, match=r"store|takes ids|needs an id"):
            wrong()
    with pytest.raises(RemovalError):
        clf.remove(subject="nobody")
    assert len(clf.store) == clf.head.n == 29
    clf.store.close()


def test_a_head_with_samples_gets_no_store(data, tmp_path):
    clf = attach(network(), K).add(data[0], data[1])
    with pytest.raises(StoreError, match="already has samples"):
        clf.join(tmp_path / "store")
    assert clf.store is None
    store = SampleStore(tmp_path / "theirs", LSSVMHead(24, K))
    with pytest.raises(ValueError, match="drives another head"):
        attach(network(), K).join(store)
    with pytest.raises(ValueError, match="a folder or a SampleStore"):
        attach(network(), K).join(7)
    store.close()


def test_copies_and_pickles_have_no_store(data, tmp_path):
    clf = attach(network(), K, store=tmp_path / "store").fit(named(data))
    for other in (copy.deepcopy(clf), pickle.loads(pickle.dumps(clf))):
        assert other.store is None
        assert torch.equal(other(data[0]), clf(data[0]))
    assert clf.store is not None
    clf.store.close()


# -- saving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [None, "margin"])
@pytest.mark.parametrize("backbone", [True, False])
def test_saved_and_loaded(data, tmp_path, head, backbone):
    clf = attach(network(), K, head, grid=GRID).fit(pairs(data))
    clf.save(tmp_path / "clf.pt", backbone=backbone)
    torch.manual_seed(9)
    fresh = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    for model in (network(), copy.deepcopy(clf.backbone), *([fresh] if backbone else [])):
        again = AttachedClassifier.load(tmp_path / "clf.pt", model)
        assert torch.equal(again(data[0]), clf(data[0]))
        assert again.head.digest() == clf.head.digest()
        again.remove(data[0][:16], data[1][:16])  # membership came along
    if not backbone:
        with pytest.raises(ValueError, match="without the weights"):
            AttachedClassifier.load(tmp_path / "clf.pt", fresh)
    assert [p.name for p in tmp_path.iterdir()] == ["clf.pt"]


@pytest.mark.parametrize("kind", ["empty", "cut", "foreign", "altered"])
def test_a_damaged_file_is_named(data, tmp_path, kind):
    path = tmp_path / "clf.pt"
    attach(network(), K).fit(pairs(data)).save(path)
    if kind in ("empty", "cut"):
        path.write_bytes(path.read_bytes()[: 0 if kind == "empty" else 2000])
    elif kind == "foreign":
        torch.save({"weight": torch.ones(2)}, path)
    else:
        saved = torch.load(path, weights_only=True)
        saved["head"]["state"]["w"] = saved["head"]["state"]["w"][:3]
        torch.save(saved, path)
    with pytest.raises(VerificationError, match=r"clf\.pt"):
        AttachedClassifier.load(path, network())


def test_a_saved_file_is_on_the_certificate_of_a_later_erasure(data, tmp_path):
    clf = attach(network(), K, store=tmp_path / "store").fit(named(data))
    clf.save(tmp_path / "clf.pt")
    clf.remove(subject="u4")
    assert any("clf.pt" in name for name in clf.store.certificates.checkpoints_before(clf.store.position))
    again = AttachedClassifier.load(tmp_path / "clf.pt", network())
    assert again.head.n == N  # the file is older
    joined = AttachedClassifier.load(tmp_path / "clf.pt", network(), store=tmp_path / "store")
    assert torch.equal(joined(data[0]), clf(data[0]))  # what the store says
    clf.store.close()
    joined.store.close()


def test_labels_of_another_shape_are_not_scored(data):
    clf = attach(network(), K, grid=GRID).add(data[0], data[1])
    for y in (data[1][:, None], data[1][:1]):  # both broadcast against the predictions (N,)
        with pytest.raises(ValueError, match="one label for each"):
            clf.score(data[0], y)
        with pytest.raises(ValueError, match="one label for each"):
            clf.score([(data[0], y)])
    assert clf.score(data[0], data[1].tolist()) == clf.score(data[0], data[1])


def test_names_in_a_batch_are_taken_whole(data, tmp_path):
    x, y = data[0][:2], data[1][:2]
    clf = attach(network(), K, store=tmp_path / "s", grid=GRID)
    for ids in ("ab", [None, "b"], [b"a", b"b"], torch.tensor([0.5, 1.5]), [[1], [2]], {"a": 1, "b": 2}):
        with pytest.raises(ValueError, match="ids of a batch must be"):
            clf.add([(x, y, ids)])
    assert len(clf.store) == 0
    clf.add([(x, y, [torch.tensor(1), np.int64(2)], "u1"), (x, y, ["c", "d"], [float("nan"), "u2"])])
    assert [(s.id, s.subject) for s in clf.store] == [("1", "u1"), ("2", "u1"), ("c", None), ("d", "u2")]


def test_a_store_that_refuses_leaves_the_network_as_it_was(data, tmp_path):
    attach(network(), K, store=tmp_path / "s", grid=GRID).store.close()
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 10))
    other[1].weight.requires_grad_(False)
    other[2].eval()
    before = (list(other), [p.requires_grad for p in other.parameters()], [m.training for m in other.modules()])
    scores = other(data[0])
    with pytest.raises(ValueError, match="bound to the network"):
        attach(other, K, store=tmp_path / "s", grid=GRID)
    assert before == (list(other), [p.requires_grad for p in other.parameters()], [m.training for m in other.modules()])
    assert torch.equal(other(data[0]), scores)


@pytest.mark.parametrize("verb", ["fit", "add"])
@pytest.mark.parametrize("kind", ["kernel", "without statistics", "margin", "lssvm"])
def test_a_loader_that_fails_leaves_any_head_as_it_was(data, kind, verb):
    x, y = data[0], data[1] % 2
    head = {"kernel": KernelLSSVM(RBF(1.0)), "without statistics": CompactLSSVMHead(24, 2)}.get(kind, kind)
    clf = attach(network(), 2, head)
    clf.add(x, y)
    before = clf(x)

    def batches():
        yield x[:5], 1 - y[:5]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        getattr(clf, verb)(batches())
    assert torch.equal(clf(x), before)
    used_up = iter([])
    with pytest.raises(ValueError, match="nothing to fit"):
        clf.fit(used_up)
    assert torch.equal(clf(x), before)


def test_a_file_is_not_read_on_another_network(data, tmp_path):
    clf = attach(network(), K, grid=GRID).add(data[0], data[1])
    clf.save(tmp_path / "c.pt")
    smooth = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.GELU(), nn.Linear(24, 10))  # the weights fit
    for other in (
        smooth,
        network().double(),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 25), nn.ReLU(), nn.Linear(24, 10)),
    ):
        with pytest.raises(ValueError, match="saved with another network"):
            AttachedClassifier.load(tmp_path / "c.pt", other)


def test_a_file_written_beside_an_erasure_is_named(data, tmp_path, monkeypatch):
    clf = attach(network(), K, store=tmp_path / "s", grid=GRID).fit(named(data))
    erased = []
    write = torch.save

    def save(*args, **options):
        write(*args, **options)
        erased.append(clf.remove(subject="u3"))  # another thread, after the head was read

    monkeypatch.setattr(torch, "save", save)
    clf.save(tmp_path / "c.pt")
    assert clf.store.certificates.checkpoints() == {str(tmp_path / "c.pt"): erased[0].position - 1}


def test_a_compiled_classifier_follows_an_erasure_of_another_process(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    clf = attach(network, 3, grid=16.0, store=tmp_path / "store")
    x, y = torch.randn(60, 16), torch.arange(60) % 3
    clf.fit([(x, y, [str(i) for i in range(60)])])
    compiled = torch.compile(clf, backend="eager")
    before = compiled(x)
    with SampleStore(tmp_path / "store") as other:
        other.apply(Remove(ids=[str(i) for i in range(30)]))
    after = compiled(x)
    assert not torch.equal(after, before)
    assert torch.equal(after, clf(x))
    assert clf.head.n == 30


# -- options: those that may change are the store's unless they are given ----------------------------------------------

IMAGES, LABELS = torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 3


def attached(path, head, **options):
    return attach(network(), 3, head, store=path, **{"grid": 64.0, **options})


@pytest.mark.parametrize(("head", "options"), [("lssvm", {"per_class": True}), ("margin", {})])
def test_options_that_are_not_given_are_those_of_the_store(tmp_path, head, options):
    clf = attached(tmp_path / "s", head, **options, **({"class_weight": "balanced"} if options else {}))
    clf.fit([(IMAGES, LABELS, [str(i) for i in range(60)])])
    clf.store.set_rho(7.0)
    scores, expected = clf(IMAGES), (7.0, clf.head.class_weight)
    clf.store.close()
    for _ in range(2):  # opening it writes nothing else for the next time
        again = attached(tmp_path / "s", head, **options)
        assert (again.head.rho, again.head.class_weight) == expected
        assert torch.equal(again(IMAGES), scores)
        again.store.close()
        with SampleStore(tmp_path / "s") as store:
            assert (store.head.rho, store.head.class_weight) == expected


@pytest.mark.parametrize(
    ("head", "options"),
    [
        ("lssvm", {"multiclass": "ovo", "per_class": True, "intercept": "none", "normalize": "l2"}),
        ("lssvm", {"targets": "multilabel", "scale": "std", "rho": 3.0}),
        ("margin", {"grid": 16.0, "intercept": "penalized", "scale": "std"}),
    ],
)
def test_nothing_has_to_be_repeated_for_a_store_that_exists(tmp_path, head, options):
    y = torch.nn.functional.one_hot(LABELS, 3).double() if "targets" in options else LABELS
    first = attached(tmp_path / "s", head, **options).fit([(IMAGES, y, [str(i) for i in range(60)])])
    scores, config = first(IMAGES), first.head.config()
    first.store.close()
    again = attach(network(), 3, store=tmp_path / "s")
    assert again.head.config() == config
    assert torch.equal(again(IMAGES), scores)
    again.store.close()
    with pytest.raises(ValueError, match="grid is"):
        attach(network(), 3, store=tmp_path / "s", grid=2.0)


@pytest.mark.parametrize("head", ["lssvm", "margin"])
def test_what_is_given_counts(tmp_path, head):
    clf = attached(tmp_path / "s", head, rho=7.0)
    clf.fit([(IMAGES, LABELS, [str(i) for i in range(60)])])
    clf.store.close()
    again = attached(tmp_path / "s", head, rho=2.0)
    assert again.head.rho == 2.0
    again.store.close()
    with SampleStore(tmp_path / "s") as store:
        assert store.head.rho == 2.0


def test_a_rho_chosen_from_the_samples_stays_a_choice(tmp_path):
    clf = attached(tmp_path / "s", "margin")
    clf.fit([(IMAGES, LABELS, [str(i) for i in range(60)])])
    chosen = clf.head.select_rho().rho
    clf.store.close()
    again = attached(tmp_path / "s", "margin")
    assert again.head.rho == chosen
    assert "rho" in again.head.choices


def test_a_head_of_ones_own_counts_as_it_is(tmp_path):
    with SampleStore(tmp_path / "s", LSSVMHead(24, 3, rho=7.0, grid=64.0)):
        pass
    clf = attach(network(), 3, LSSVMHead(24, 3, rho=2.0, grid=64.0), store=tmp_path / "s")
    assert clf.head.rho == 2.0


def test_an_empty_store_of_other_options_says_what_to_do(tmp_path):
    attached(tmp_path / "s", "lssvm", grid=0.5).store.close()
    with pytest.raises(ValueError, match=r"FixedPoint\(limit=64.*not FixedPoint\(limit=0.5.*delete its folder"):
        attached(tmp_path / "s", "lssvm")


def test_what_differs_most_is_named_first(tmp_path):
    attached(tmp_path / "s", "lssvm").store.close()
    with pytest.raises(ValueError, match="type is 'MarginHead', not 'LSSVMHead'"):
        attached(tmp_path / "s", "margin")


def test_pixels_as_features_may_be_bytes():
    clf = attach(nn.Linear(4, 2), 2)
    clf.add(torch.tensor([[0, 1, 2, 3], [9, 9, 9, 9]], dtype=torch.uint8), torch.tensor([0, 1]))
    assert clf.head.n == 2


def test_readers_beside_an_erasure_see_one_state_or_the_other(data, tmp_path):
    clf = attach(network(), K, grid=GRID, store=tmp_path / "store").fit(named(data))
    before = clf(data[0])
    seen: list[torch.Tensor] = []
    reader = threading.Thread(target=lambda: seen.extend(clf(data[0]) for _ in range(50)))
    reader.start()
    clf.remove(subject="u2")
    reader.join()
    after = clf(data[0])
    assert len(seen) == 50
    assert all(torch.equal(s, before) or torch.equal(s, after) for s in seen)
    clf.store.close()
