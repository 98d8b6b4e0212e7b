"""Samples ranked by how little a head, or kernel machine, that never saw them agrees with their label."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional.modes import exactly
from torchlssvm.linear import LinearHead
from torchlssvm.sample_adapter import SampleAdapter

CHUNK_SAMPLES = 4096
"""Samples scored at a time: bounds memory, and is enough to keep a matrix product busy."""


@dataclass(frozen=True)
class Suspect:
    """A sample whose label looks wrong: its margin without itself, its label and the one the head would give it."""

    id: str
    margin: float
    label: int
    suggested: int


def rank_suspects(head: Any, ids: list[str], x: Tensor, y: Tensor, numbers: list[int] | None = None) -> list[Suspect]:
    """Rank all samples, the most suspicious first, by s[y] - max s[other], s the scores of the head that never saw the sample.

    x (n, J), y (n,): samples that the head holds, as they were added. numbers: a kernel machine's own ids of them.
    """
    scores, labels = scores_without(head, x, y, numbers).cpu(), y.cpu()
    own = scores.gather(1, labels[:, None])[:, 0]
    best, suggested = scores.scatter(1, labels[:, None], -torch.inf).max(1)
    rows = zip(ids, (own - best).tolist(), labels.tolist(), suggested.tolist(), strict=True)
    return sorted((Suspect(*row) for row in rows), key=lambda s: (s.margin, s.id))


@exactly
def scores_without(head: Any, x: Tensor, y: Tensor, numbers: list[int] | None = None) -> Tensor:
    """Compute scores (n, K) of each sample by the head without it.

    A head answers from its statistics, a kernel machine with ``leave_one_out()`` from its solution; any other one unlearns
    each sample in turn, on a copy, and learns it again.
    """
    if isinstance(head, LinearHead):
        parts = zip(x.split(CHUNK_SAMPLES), y.split(CHUNK_SAMPLES), strict=True)
        return torch.cat([head.leave_one_out(a.to(head.device), b.to(head.device)) for a, b in parts])
    held = head.ids.tolist()
    numbers = held if numbers is None else numbers
    if len(numbers) != len(x) or not set(numbers) <= set(held):
        raise ValueError(f"the samples are not those that are held: {len(x)} were given, {len(held)} are held")
    if not callable(getattr(head, "leave_one_out", None)):
        return scores_by_removal(copy.deepcopy(head), x.to(head.ids.device), y.to(head.ids.device), numbers)
    places = {number: k for k, number in enumerate(held)}
    found, order = head.leave_one_out(), [places[number] for number in numbers]
    if isinstance(found, Tensor):
        return found[order]
    sign = 2 * y.to(found.margin) - 1  # an SVM of two classes: g + 1 = y f
    decision = sign * (found.margin[order] + 1)
    return torch.stack([-decision, decision], 1)


def scores_by_removal(machine: Any, x: Tensor, y: Tensor, numbers: list[int]) -> Tensor:
    """Compute the same scores by unlearning, for a machine without ``leave_one_out``."""
    samples = SampleAdapter(machine)
    samples.ids = dict(enumerate(numbers))
    rows = []
    for k in range(len(x)):
        one = ([k], x[k : k + 1], y[k : k + 1])
        samples.remove(*one)
        rows.append(machine(one[1]) if samples.count else x.new_zeros(1, machine.num_classes))
        samples.add(*one)
    return torch.cat(rows)
