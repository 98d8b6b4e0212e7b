"""Columns that were chosen, with the network that computes them: restricted, saved, stored, and on a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchlssvm import AttachedClassifier, LSSVMHead, attach
from torchlssvm.adapt import Adaptation
from torchlssvm.cli import main
from torchlssvm.errors import NotForgottenError, SuppressedError
from torchlssvm.linear.column_selection import Selection, select, select_groups
from torchlssvm.store import SampleStore, new_suppression_key

N = 48
Y = torch.arange(N) % 3
IDS, SUBJECTS = [f"s{i}" for i in range(N)], [f"user-{i % 6}" for i in range(N)]


def images() -> Tensor:
    made = torch.randn(N, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    return made * (1 + 0.4 * Y)[:, None, None, None]


def network() -> nn.Module:
    def block(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU())

    torch.manual_seed(3)
    blocks = nn.Sequential(block(3, 8), block(8, 16), block(16, 32))
    return nn.Sequential(blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def wide(**options: Any) -> AttachedClassifier:
    """The three blocks, 56 values each twice, projected to at most 60 columns."""
    how = {"layers": "blocks", "pool": ("mean", "std"), "max_features": 60, "classes": ["a", "b", "c"], "grid": 4.0}
    return attach(network(), 3, **how | options)


def chosen(clf: AttachedClassifier, kind: str) -> tuple[Any, Tensor]:
    """What a user may choose, and the numbers of its columns."""
    groups = clf.backbone.groups
    if kind == "groups":
        found: Selection = select_groups(clf.head, {"first": groups["0.0"], "last": groups["0.2"]})
        return found, found.best.columns
    if kind == "layer":
        found = select(clf.head, {"middle": groups["0.1"]})
        return found, found.best.columns
    numbers = [40, 3, 0]
    return numbers, torch.tensor(numbers)


@pytest.mark.parametrize("views", [(), ("flip",)])
@pytest.mark.parametrize("kind", ["groups", "layer", "numbers"])
def test_a_choice_is_a_classifier_that_can_be_saved(tmp_path: Path, kind: str, views: Any) -> None:
    pytest.importorskip("safetensors")
    from torchlssvm.hub import from_pretrained, save_pretrained

    clf, x = wide(views=views), images()
    clf.add(x, Y)
    choice, columns = chosen(clf, kind)
    small = clf.restrict(choice)
    whole = clf.features(x)
    assert torch.equal(small.features(x), whole[:, columns])
    assert torch.equal(small(x), small.head(whole[:, columns]))
    assert small.head.n == clf.head.n == N
    assert small.head.digest() == (choice.head.digest() if isinstance(choice, Selection) else small.head.digest())
    small.save(tmp_path / "small.pt")
    again = AttachedClassifier.load(tmp_path / "small.pt", network())
    save_pretrained(small, tmp_path / "hub", statistics=True)
    served = from_pretrained(tmp_path / "hub", network())
    learner = from_pretrained(tmp_path / "hub", network(), statistics=True)
    given = attach(network(), 3, small.head, **small.network_options._asdict())
    for other in (again, learner, given):
        assert other.head.digest() == small.head.digest()
        torch.testing.assert_close(other(x), small(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(served(x).double(), small(x), rtol=1e-4, atol=1e-5)
    assert again.classes == learner.classes == ["a", "b", "c"]
    again.remove(x[:4], Y[:4])
    assert again.head.n == N - 4


def test_layers_that_are_not_chosen_are_not_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    clf, x = wide(), images()
    clf.add(x, Y)
    small = clf.restrict(clf.backbone.groups["0.2"])
    small.features(x)  # the first batch is followed by one of its samples by itself
    pooled: list[int] = []
    plain = type(small.backbone)._pooled
    monkeypatch.setattr(type(small.backbone), "_pooled", lambda taps, *args: (pooled.append(1), plain(taps, *args))[1])
    small.features(x)
    assert (len(pooled), list(small.backbone.groups)) == (1, ["0.2"])
    clf.features(x)
    assert len(pooled) == 4


@pytest.mark.parametrize("kind", ["groups", "numbers"])
def test_a_choice_has_a_store_of_its_own(tmp_path: Path, kind: str) -> None:
    clf, x = wide(store=tmp_path / "wide"), images()
    clf.add(x, Y, ids=IDS, subjects=SUBJECTS)
    choice, columns = chosen(clf, kind)
    small = clf.restrict(choice, store=tmp_path / "small")
    assert small.head.digest() == clf.restrict(choice).head.digest()
    torch.testing.assert_close(small(x), clf.restrict(choice)(x), rtol=1e-10, atol=1e-10)
    assert (small.classes, small.store.find(subject="user-2")) == (["a", "b", "c"], clf.store.find(subject="user-2"))
    small.save(tmp_path / "small.pt")
    done = small.remove(subject="user-2")
    if kind == "groups":  # the columns were chosen with the help of the person who left
        assert small.store.certificate(done.event_id).scope["choices"]["columns"]["state"] == "kept"
    digest = small.head.digest()
    small.store.close()
    again = AttachedClassifier.load(tmp_path / "small.pt", network(), store=tmp_path / "small")
    assert again.head.digest() == digest
    rest = torch.tensor([i for i in range(N) if SUBJECTS[i] != "user-2"])
    never = type(small.head)(len(columns), 3, grid=small.head.grid).add(clf.store.get(IDS).x[rest][:, columns], Y[rest])
    assert again.head.digest() == never.digest()
    again.store.close()


def test_a_copy_keeps_list_adapted_samples_and_calibration(tmp_path: Path) -> None:
    key = new_suppression_key(tmp_path / "key")
    head = LSSVMHead(3, 3, grid=4.0)
    store = SampleStore(tmp_path / "wide", head, suppression_list=tmp_path / "list", suppression_key=str(key))
    x = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
    clf = attach(nn.Identity(), 3, head, in_features=3, store=store)
    clf.add(x, Y, ids=IDS, subjects=SUBJECTS)
    store.calibrate("temperature", keep=True, groups="subject")
    Adaptation((), ("user-1",)).record(store)
    store.erase(request=store.requests.open("user-2").id, receipt=tmp_path / "receipt")
    small = clf.restrict([0, 2], store=tmp_path / "small")
    assert torch.equal(small.predict_proba(x).argmax(1), small.predict(x))
    gone = [i for i, subject in enumerate(SUBJECTS) if subject == "user-2"]
    with pytest.raises(SuppressedError):
        small.add(x[gone], Y[gone], ids=[IDS[i] for i in gone])
    done = small.remove(subject="user-1")
    assert torch.equal(small.predict_proba(x).argmax(1), small.predict(x))
    with pytest.raises(NotForgottenError):
        small.store.certificate(done.event_id)


def test_a_copy_keeps_the_grid_and_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(N, 3)
    x[:, 0], x[0, 2] = torch.linspace(-1, 1, N), 100.0
    clf = attach(nn.Identity(), 3, in_features=3, store=tmp_path / "wide")
    clf.add(x, Y, ids=IDS, subjects=SUBJECTS)
    small = clf.restrict([0, 1], store=tmp_path / "small")
    assert small.head.grid == clf.head.grid
    assert small.head.digest() == clf.restrict([0, 1]).head.digest()
    with pytest.raises(ValueError, match="not empty"):  # samples that are there already would join the copies
        clf.restrict([0, 1], store=tmp_path / "small")
    small.store.close()
    with SampleStore(tmp_path / "small") as store:
        assert (len(store), store.head.digest()) == (N, clf.restrict([0, 1]).head.digest())
    monkeypatch.setattr(SampleStore, "name_classes", lambda *_: 1 / 0)
    clf.store._db.put("classes", ["a", "b", "c"])
    with pytest.raises(ZeroDivisionError):
        clf.restrict([0, 1], store=tmp_path / "half")
    assert not (tmp_path / "half").exists()


def test_a_named_network_with_chosen_columns_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchvision")
    from PIL import Image

    from torchlssvm.backbones import build

    (tmp_path / "weights").mkdir()
    torch.save(build("squeezenet1_1").state_dict(), tmp_path / "weights" / "squeezenet1_1_imagenet.pt")
    monkeypatch.setenv("TORCHLSSVM_DATA", str(tmp_path))
    clf = attach("squeezenet1_1", classes=["dark", "light"], layers="blocks", max_features=40, store=tmp_path / "wide")
    pictures = [Image.new("RGB", (32, 32), (60 * i, 90, 200)) for i in range(4)]
    clf.add(pictures, ["dark", "dark", "light", "light"], ids=range(4))
    small = clf.restrict([3, 5, 7], store=tmp_path / "small")
    small.save(tmp_path / "clf.pt")
    again = AttachedClassifier.load(tmp_path / "clf.pt", "squeezenet1_1")
    assert (again.source, again.predict(pictures, names=True)) == (clf.source, small.predict(pictures, names=True))
    small.store.close()
    pictures[0].save(tmp_path / "a.png")
    assert main(["classify", str(tmp_path / "small"), "--images", str(tmp_path / "a.png")]) == 0
    with SampleStore(tmp_path / "small", readonly=True) as store:
        assert store.head.in_features == 3


def test_what_cannot_be_restricted(tmp_path: Path) -> None:
    clf, x = wide(), images()
    clf.add(x, Y)
    found = select_groups(clf.head, clf.backbone.groups)
    with pytest.raises(ValueError, match="another head"):
        wide().add(x, Y).restrict(found)
    clf.remove(x[:1], Y[:1])
    assert clf.restrict(found).head.n == len(Y) - 1  # the choice is made again
    with pytest.raises(ValueError, match="no store"):
        clf.restrict([0], store=tmp_path / "small")
    with pytest.raises(ValueError, match="outside"):
        clf.restrict([99])
    with pytest.raises(ValueError, match="l2"):
        wide(normalize="l2").add(x, Y).restrict([0])
    with pytest.raises(ValueError, match="MarginHead"):
        wide(head="margin").add(x, Y).restrict([0])
