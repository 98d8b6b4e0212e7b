"""A classifier that is attached to a store it finds: the options that may change are the store's unless they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchlssvm import LSSVMHead, attach
from torchlssvm.store import SampleStore

IMAGES, LABELS = torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2))


def attached(path: Any, head: Any, **options: Any) -> Any:
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
    with SampleStore(tmp_path / "s", LSSVMHead(8, 3, rho=7.0, grid=64.0)):
        pass
    clf = attach(network(), 3, LSSVMHead(8, 3, rho=2.0, grid=64.0), store=tmp_path / "s")
    assert clf.head.rho == 2.0


def test_an_empty_store_of_other_options_says_what_to_do(tmp_path):
    attached(tmp_path / "s", "lssvm", grid=0.5).store.close()
    with pytest.raises(ValueError, match=r"FixedPoint\(limit=64.*not FixedPoint\(limit=0.5.*delete its folder"):
        attached(tmp_path / "s", "lssvm")


def test_what_differs_most_is_named_first(tmp_path):
    attached(tmp_path / "s", "lssvm").store.close()
    with pytest.raises(ValueError, match="type is 'MarginHead', not 'LSSVMHead'"):
        attached(tmp_path / "s", "margin")
