"""Datasets whose samples have ids, a loader that goes on in the middle of an epoch, and the order in which a loader goes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from torchlssvm.lightning import ranks

RANDOM_ORDER = "random"
"""The order of a sampler that draws a new one each time."""


class Indexed(Dataset[Any]):
    """A dataset of (x, y) whose samples carry their index as id, ``prefix`` before it, and a subject if they are given.

    >>> Indexed([(torch.zeros(2), 1)], prefix="train/")[0][1:]
    (1, 'train/0')
    """

    def __init__(self, dataset: Any, prefix: str = "", subjects: Any = None):
        self.dataset, self.prefix, self.subjects = dataset, prefix, subjects

    def __len__(self) -> int:
        """As many as the dataset."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        x, y = self.dataset[index]
        sample = (x, y, f"{self.prefix}{index}")
        return sample if self.subjects is None else (*sample, str(self.subjects[index]))


class EpochSampler(Sampler[int]):
    """A permutation of the dataset for each epoch, the same whenever it is asked for."""

    def __init__(self, length: int, seed: int):
        self.length, self.seed, self.epoch = length, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation by the epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        """The number of samples."""
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return iter(torch.randperm(self.length, generator=generator).tolist())


class _RemainingBatches:
    """The batches of a sampler of batches after the first ``start``."""

    def __init__(self, batches: Any, start: int):
        self.batches, self.start = batches, start

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.batches), self.start, None)


class ResumableLoader(DataLoader[Any]):
    """A ``DataLoader`` that a checkpoint can stop in the middle of an epoch; it goes on behind the batches that are done.

    Those are passed over by their indices, nothing is loaded for them. ``shuffle=True`` shuffles by ``seed`` and epoch.

    >>> loader = ResumableLoader(range(7), batch_size=2)
    >>> iterator = iter(loader)
    >>> _ = next(iterator), next(iterator)
    >>> other = ResumableLoader(range(7), batch_size=2)
    >>> other.load_state_dict(loader.state_dict())
    >>> [b.tolist() for b in other], [b.tolist() for b in other][:1]
    ([[4, 5], [6]], [[0, 1]])
    """

    def __init__(self, dataset: Any, batch_size: int = 1, *, shuffle: bool = False, seed: int = 0, **options: Any):
        self._done = self._start = 0
        if shuffle and options.get("sampler") is None and options.get("batch_sampler") is None:
            options["sampler"] = EpochSampler(len(dataset), seed)
        super().__init__(dataset, batch_size=batch_size, **options)

    @property
    def _index_sampler(self) -> Any:
        return _RemainingBatches(super()._index_sampler, self._start)

    def __iter__(self) -> Any:
        """Iterate over batches: once from the place of a loaded state, then from the first one."""
        batches = super().__iter__()
        self._done, self._start = self._start, 0
        for batch in batches:
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Number of batches of this epoch that are done."""
        return {"batches": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batches that are done; at the end of an epoch, from the start of the next."""
        self._start = state["batches"] if state["batches"] < len(self) else 0


def order_of(sampler: Any) -> str | None:
    """Describe a sampler's order, in the same words for the same order; None for a sampler of another kind.

    >>> order_of(EpochSampler(67, seed=3)), order_of(RandomSampler(range(5)))
    ('EpochSampler, 67 samples, seed 3', 'random')
    """
    if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        return RANDOM_ORDER
    if not isinstance(sampler, EpochSampler | SequentialSampler | DistributedSampler):
        return None
    given = sampler.dataset if isinstance(sampler, DistributedSampler) else sampler
    seed = sampler.seed if getattr(sampler, "shuffle", True) and hasattr(sampler, "seed") else None
    text = f"{type(sampler).__name__}, {len(given)} samples" + ("" if seed is None else f", seed {seed}")  # type: ignore[arg-type]
    if not hasattr(given, "_sampler"):
        return text
    before = order_of(given._sampler)  # Lightning's wrapper around a sampler of one's own
    return before if before in (None, RANDOM_ORDER) else f"{before}, {text}"


def describe(loader: Any) -> dict[str, Any]:
    """Describe what the content of a train loader's batches depends on, for a run that is resumed."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
    size = getattr(batches, "batch_size", None) or getattr(loader, "batch_size", None)
    return {"order": order_of(sampler), "ranks": ranks.count(), "batch_size": size}


def describe_difference(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe the differences between two descriptions; empty if there are none."""
    return "; ".join(f"{name} was {then[name]!r}, is {now[name]!r}" for name in now if then[name] != now[name])
