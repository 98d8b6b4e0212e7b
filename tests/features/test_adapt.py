"""A network trained on somebody's samples: the store knows, and no certificate says that they are forgotten."""

from pathlib import Path

import pytest
import torch

from tests.support.networks import IMAGES, LABELS, network
from torchlssvm import attach, verify
from torchlssvm.adapt import Adaptation, adapt
from torchlssvm.errors import NotForgottenError

IDS = [str(i) for i in range(12)]
OWNERS = ["a"] * 4 + ["b"] * 4 + ["c"] * 4


def adapted() -> tuple[torch.nn.Module, Adaptation]:
    model = network()
    model.fc = torch.nn.Linear(6, 3)
    return model, adapt(model, [(IMAGES[:4], LABELS[:4], IDS[:4], OWNERS[:4])], epochs=2)


def test_the_network_learns():
    torch.manual_seed(0)
    model = network()
    model.fc = torch.nn.Linear(6, 3)
    batches = [{"x": IMAGES, "y": LABELS}]
    first = torch.nn.functional.cross_entropy(model(IMAGES), LABELS)
    seen = adapt(model, batches, public=True, epochs=60, rate=0.02, augment=lambda images: images.flip(-1))
    assert torch.nn.functional.cross_entropy(model(IMAGES), LABELS) < first - 0.1
    assert seen == Adaptation()
    assert model.training


@pytest.mark.parametrize("by", ["subject", "ids"])
def test_no_certificate_for_those_the_network_has_seen(by: str, tmp_path: Path):
    model, seen = adapted()
    assert seen == Adaptation(tuple(IDS[:4]), ("a",))
    clf = attach(model, 3, layers="blocks", store=tmp_path)
    seen.record(clf.store)
    clf.add(IMAGES, LABELS, ids=IDS, subjects=OWNERS)
    known = clf.remove(subject="a") if by == "subject" else clf.remove(ids=["1", "5"])
    other = clf.remove(subject="c")
    clf.store.compact()
    with pytest.raises(NotForgottenError, match="a" if by == "subject" else "1") as refusal:
        clf.store.certificate(known.event_id)
    assert "Adapt the network again" in str(refusal.value)
    with pytest.raises(NotForgottenError):
        clf.store.certificate([other.event_id, known.event_id])
    certificate = clf.store.certificate(other.event_id)
    assert verify(certificate, store=clf.store, allow_unsigned=True)


def test_what_is_recorded_stays(tmp_path: Path):
    model, seen = adapted()
    clf = attach(model, 3, layers="blocks", store=tmp_path)
    seen.record(clf.store)
    Adaptation(("x", "Zoe\u0308"), ("z",)).record(clf.store)
    assert clf.store.note("adapted") == {"ids": ["0", "1", "2", "3", "Zo\u00eb", "x"], "subjects": ["a", "z"]}


def test_samples_of_nobody_are_refused():
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="public=True"):
        adapt(model, [(IMAGES, LABELS)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="each epoch"):
        adapt(model, iter([(IMAGES, LABELS)]))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_training_that_stops_early_leaves_nothing_in_the_network(error: type[BaseException]):
    """Nobody would have recorded whose samples the network has seen."""
    model, calls = network().train(), []
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def augment(images: torch.Tensor) -> torch.Tensor:
        calls.append(not torch.equal(model.fc.weight, before["fc.weight"]))
        if len(calls) == 3:
            raise error
        return images

    with pytest.raises(error):
        adapt(model, [(IMAGES, LABELS, IDS)], augment=augment)
    assert calls == [False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
