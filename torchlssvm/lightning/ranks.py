"""Communication between the ranks of a run. Every function is called on all ranks; with one rank it does its work alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch import distributed as dist
from torch.utils.data import DistributedSampler

from torchlssvm.distributed import sync
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.linear import LinearHead, LSSVMHead

T = TypeVar("T")


def are_several() -> bool:
    """True if there is more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def count() -> int:
    """Number of ranks."""
    return dist.get_world_size() if are_several() else 1


def is_first() -> bool:
    """True on the rank that reads sources and writes files."""
    return not are_several() or dist.get_rank() == 0


def share(value: T) -> T:
    """Send the value of the first rank to all ranks."""
    if not are_several():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: T) -> list[T]:
    """Gather the values of all ranks, in their order, on all ranks."""
    if not are_several():
        return [value]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def on_first(work: Callable[[], T]) -> T:
    """Do something on the first rank; its result, or its error, is that of all ranks."""
    result: Any = None
    error: Exception | None = None
    if is_first():
        try:
            result = work()
        except Exception as caught:
            error = caught
    if are_several():
        result, error = share((result, error))
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def is_summed(head: Any) -> bool:
    """True if ranks add up what they learned (a head on a grid); else all of them learn the same."""
    return isinstance(head, LSSVMHead) and head.statistics.exact


def add_up(head: Any) -> None:
    """Add up what each rank learned since the last call, on all ranks."""
    if are_several() and is_summed(head):
        sync(head)


def copy_from_first(head: LinearHead) -> None:
    """Copy the state of the first rank's head to all ranks."""
    if not are_several():
        return
    state = share({k: v.cpu() for k, v in head.sample_state().items()} if is_first() else None)
    rho, chosen = share((head.solver.options.rho, head.data_choices.made.get("rho")))
    if not is_first() and state is not None:
        adopt(head, state)
        head.rho = rho
        if chosen is not None:
            head.data_choices.made["rho"] = chosen


def adopt(head: LinearHead, state: dict[str, Tensor]) -> None:
    """Replace a head's samples by those of another rank."""
    head.adopt({k: v if k == "meta" else v.to(head.device) for k, v in state.items()})


def agree_on_grid(head: Any, x: Tensor) -> None:
    """Choose the grid of an empty head from the first batches of all ranks, where it is to be chosen from the first batch."""
    if not are_several() or not is_summed(head):
        return
    stats = head.statistics
    if stats.grid is None:  # on all ranks, or on none: each has learned a batch, or none has
        x = normalized(x.double(), stats.normalize)
        largest = max(gather(float(x.abs().max()) if x.numel() else 0.0))
        if math.isfinite(largest):
            stats.decide("labels", FixedPoint.auto(largest), None)


def without_padding(loader: Any, position: int, size: int) -> int:
    """Count the real samples among the next ``size`` of this rank, after ``position`` samples of this epoch.

    A ``DistributedSampler`` deals samples out in turns and repeats the first ones until all ranks have as many: the sample
    in place p of rank r is number p W + r, and a repetition if that is not below the number of samples.
    """
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    sampler = sampler if isinstance(sampler, DistributedSampler) else inner
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return size
    real = math.ceil((len(sampler.dataset) - sampler.rank) / sampler.num_replicas)  # type: ignore[arg-type]
    return max(0, min(size, real - position))
