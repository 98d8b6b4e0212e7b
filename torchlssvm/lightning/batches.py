"""Datasets whose samples have ids, and a loader that resumes in the middle of an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from torchlssvm.lightning import ranks


class Indexed(Dataset[Any]):
    """A dataset of (x, y) whose samples have an id (``prefix`` and index) and, if given, a subject.

    >>> Indexed([(torch.zeros(2), 1)], prefix="train/")[0][1:]
    (1, 'train/0')
    """

    def __init__(self, dataset: Any, prefix: str = "", subjects: Any = None):
        self.dataset, self.prefix, self.subjects = dataset, prefix, subjects

    def __len__(self) -> int:
        """Return the length of the dataset."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        x, y = self.dataset[index]
        sample = (x, y, f"{self.prefix}{index}")
        return sample if self.subjects is None else (*sample, str(self.subjects[index]))


class EpochSampler(Sampler[int]):
    """A permutation of the dataset that depends on the seed and the epoch only."""

    def __init__(self, length: int, seed: int):
        self.length, self.seed, self.epoch = length, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of this epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return iter(torch.randperm(self.length, generator=generator).tolist())


class _RemainingBatches:
    """The batches of a batch sampler after the first ``start``."""

    def __init__(self, batches: Any, start: int):
        self.batches, self.start = batches, start

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.batches), self.start, None)


class ResumableLoader(DataLoader[Any]):
    """A ``DataLoader`` whose state is saved in Lightning's checkpoints: a resumed run continues with the next batch.

    After a restart, completed batches are skipped by their indices, without loading any samples. ``shuffle=True`` shuffles by
    ``seed`` and epoch, so that the order is the same again. You can load a state from the middle of an epoch only into a
    loader with the same batches.

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
        """Iterate over batches. The first iteration starts at the position of a loaded state."""
        batches = super().__iter__()
        self._done, self._start = self._start, 0
        for batch in batches:
            self._done += 1
            yield batch

    def _order(self) -> dict[str, Any]:
        """Describe everything that determines the content of a batch."""
        sampler: Any = getattr(self.batch_sampler, "sampler", self.sampler)
        sampler = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)  # Lightning wraps it on several ranks
        return {
            "samples": len(self.dataset),  # type: ignore[arg-type]
            "batch_size": getattr(self.batch_sampler, "batch_size", self.batch_size),
            "sampler": type(sampler).__name__,
            "seed": getattr(sampler, "seed", None),
            "ranks": ranks.count(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches done in this epoch, and their order."""
        return {"batches": 0 if self._done >= len(self) else self._done, "order": self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the next batch. Raises ValueError if this loader's batches differ, or change with each epoch."""
        now, then = self._order(), state["order"]
        changed = [f"{name} was {then[name]!r} and is {now[name]!r}" for name in now if now[name] != then[name]]
        if now["sampler"] in [kind.__name__ for kind in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)]:
            changed.append(f"a {now['sampler']} draws a new order each time: use shuffle=True")
        if changed and state["batches"]:
            raise ValueError(
                f"the run stopped in the middle of an epoch, and this loader has other batches: {'; '.join(changed)}. Some "
                "samples would never come. Resume with the same loader, or fit without ckpt_path"
            )
        self._start = state["batches"]
