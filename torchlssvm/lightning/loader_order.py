"""Describe a loader's order so that resumed runs can compare it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from torchlssvm.lightning import ranks
from torchlssvm.lightning.batches import EpochSampler

RANDOM_ORDER = "random"
"""The order of a sampler that draws anew each time."""


def order_of(sampler: Any) -> str | None:
    """Describe a sampler's order, in the same words for the same order; None for a sampler of another kind.

    >>> order_of(EpochSampler(67, seed=3)), order_of(SequentialSampler(range(5))), order_of(RandomSampler(range(5)))
    ('shuffled by seed 3, 67 samples', 'as they are, 5 samples', 'random')
    """
    if isinstance(sampler, EpochSampler):
        return f"shuffled by seed {sampler.seed}, {len(sampler)} samples"
    if isinstance(sampler, SequentialSampler):
        return f"as they are, {len(sampler)} samples"
    if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        return RANDOM_ORDER
    if isinstance(sampler, DistributedSampler):
        dealt = f"shuffled by seed {sampler.seed}" if sampler.shuffle else "in turns"
        inner = getattr(sampler.dataset, "_sampler", None)  # Lightning's wrapper around a sampler of one's own
        if inner is None:
            return f"{dealt}, {len(sampler.dataset)} samples"  # type: ignore[arg-type]
        before = order_of(inner)
        return before if before in (None, RANDOM_ORDER) else f"{before}, {dealt}"
    return None


def describe(loader: Any) -> dict[str, Any]:
    """Describe order, number of ranks and batch size of a train loader."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
    return {
        "order": order_of(sampler),
        "ranks": ranks.count(),
        "batch_size": getattr(batches, "batch_size", None) or getattr(loader, "batch_size", None),
    }


def describe_difference(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe the differences between two descriptions; empty if there are none."""
    return "; ".join(f"{name} was {then[name]!r}, is {now[name]!r}" for name in now if then[name] != now[name])
