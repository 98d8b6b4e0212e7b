"""Train the network itself on samples that never have to be erased, and record these samples.

A head can forget a sample, but a network that was trained on the sample cannot. :func:`adapt` is therefore meant for samples
that are public, or whose owners have agreed. It returns the ids of these samples. Record them in the store of the head, so that
the store refuses to certify their erasure.

>>> import tempfile
>>> from torch import nn
>>> from torchlssvm import attach
>>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
>>> x, y = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])
>>> seen = adapt(network, [(x, y, list("abcdef"), ["u1"] * 6)], epochs=1)
>>> clf = attach(network, 2, store=tempfile.mkdtemp())
>>> seen.record(clf.store)
>>> clf = clf.add(x, y, ids=list("abcdef"), subjects=["u1"] * 6)
>>> erased = clf.remove(subject="u1")
>>> clf.store.certificate(erased.event_id)
Traceback (most recent call last):
torchlssvm.errors.NotForgottenError: ...
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchlssvm.functional.modes import all_or_nothing
from torchlssvm.linear.labelled_batches import to_device, unpack
from torchlssvm.store import SampleStore
from torchlssvm.store.database import ADAPTED_NOTE
from torchlssvm.store.erasure.requests import name_list

__all__ = ["Adaptation", "adapt"]


@dataclass(frozen=True)
class Adaptation:
    """The ids and subjects of the samples that a network was trained on, in order. Both are empty for public data."""

    ids: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()

    def record(self, store: SampleStore) -> None:
        """Record the samples in a store whose features come from the network. Samples recorded before are kept.

        The names stay in the store as long as its network is in use, even after an erasure. They show why the store cannot
        certify the erasure. If you adapt a network again without these samples, create a new store for it.
        """

        def merged(known: Any) -> dict[str, list[str]]:
            known = known or {"ids": [], "subjects": []}
            given = {"ids": self.ids, "subjects": self.subjects}
            return {part: sorted(name_list([*known[part], *names], part)) for part, names in given.items()}

        store.update_note(ADAPTED_NOTE, merged)


def adapt(
    model: nn.Module, loader: Iterable[Any], *, public: bool = False, epochs: int = 8, rate: float = 5e-4,
    weight_decay: float = 0.01, augment: Callable[[Tensor], Tensor] | None = None,
) -> Adaptation:  # fmt: skip
    """Train all layers of a classifier with AdamW, a one-cycle learning rate and cross entropy.

    The network cannot forget these samples later, so train it only on samples that may stay. Call this function before
    :func:`torchlssvm.attach`, because attaching removes the last layer and freezes the rest. The statistics of batch norms do
    not change. If training stops with an error or an interrupt, the network gets its earlier weights back.

    Args:
        model: a classifier with as many outputs as there are classes. It is trained in place.
        loader: batches (x, y, ids) or (x, y, ids, subjects), or dicts with these fields. The loader is read once per epoch, so
            it cannot be a generator.
        public: True if the samples are public and belong to nobody. Ids are then not needed.
        epochs: the number of passes over the data.
        rate: the largest learning rate.
        weight_decay: the weight decay of AdamW.
        augment: a function that randomly augments a batch of inputs.
    """
    batches = operator.length_hint(loader)
    if epochs < 1 or not batches or iter(loader) is loader:
        raise ValueError(
            "adapt reads a loader once each epoch and needs its length: give a DataLoader or a list, and epochs >= 1; got "
            f"{epochs} epochs of {batches} batches"
        )
    device = next(model.parameters()).device
    ids: dict[str, None] = {}
    subjects: dict[str, None] = {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * batches)
    training, before = model.training, copy.deepcopy(model.state_dict())
    model.eval()  # batch norms keep their statistics; gradients still flow
    try:
        with all_or_nothing(model, lambda: model.load_state_dict(before)):
            for batch in itertools.chain.from_iterable(itertools.repeat(loader, epochs)):
                part = unpack(batch)
                if part.ids is None and not public:
                    raise ValueError(
                        "a network does not forget: say whose samples it sees, batches (x, y, ids, subjects), or public=True"
                    )
                ids.update(dict.fromkeys(part.ids or ()))
                subjects.update(dict.fromkeys(s for s in part.subjects or () if s is not None))
                x, y = to_device(part.x, device), part.y.to(device)
                loss = nn.functional.cross_entropy(model(x if augment is None else augment(x)), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    finally:
        model.train(training)
    return Adaptation(tuple(ids), tuple(subjects))
