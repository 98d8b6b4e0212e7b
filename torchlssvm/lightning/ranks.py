"""Communication between the ranks of a run. All ranks must call each function. With a single rank, nothing is communicated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch import distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler

from torchlssvm.distributed import sync
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.linear import LinearHead, LSSVMHead

T = TypeVar("T")


def count() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def are_several() -> bool:
    """True if there is more than one rank."""
    return count() > 1


def is_first() -> bool:
    """True on the rank that reads sources and writes files."""
    return not are_several() or dist.get_rank() == 0


def share(value: T) -> T:
    """Send the value of the first rank to all ranks."""
    box = [value]
    if are_several():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: T) -> list[T]:
    """Gather the values of all ranks, in their order, on all ranks."""
    if not are_several():
        return [value]
    out: list[Any] = [None] * count()
    dist.all_gather_object(out, value)
    return out


def on_first(work: Callable[[], T]) -> T:
    """Run ``work`` on the first rank. All ranks return its result, or raise its error."""
    result: Any = None
    error: Exception | None = None
    if is_first():
        try:
            result = work()
        except Exception as caught:
            error = caught
    result, error = share((result, error))
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def is_summed(head: Any) -> bool:
    """True if each rank can learn its own share, because the shares can be added up. This needs a head on a grid."""
    return isinstance(head, LSSVMHead) and head.statistics.exact


def add_up(head: Any) -> None:
    """Add up what each rank learned since the last call."""
    if are_several() and is_summed(head):
        sync(head)


def copy_from_first(head: Any) -> None:
    """Copy the samples and rho of the first rank's head, or a kernel machine, to all ranks."""
    if not are_several():
        return
    own = head._sample_state() if isinstance(head, LinearHead) else head.state_dict()
    state = share({k: v.cpu() if isinstance(v, Tensor) else v for k, v in own.items()} if is_first() else {})
    if not isinstance(head, LinearHead):
        if not is_first():
            head.load_state_dict(state)
        return
    rho, chosen = share((head._solver.options.rho, head._choices.made.get("rho")))
    if not is_first():
        head._adopt({k: v if k == "meta" else v.to(head.device) for k, v in state.items()})
        head.rho = rho
        if chosen is not None:
            head._choices.made["rho"] = chosen


def agree_on_grid(head: Any, x: Tensor, y: Tensor) -> None:
    """Choose the grids of an empty head, where they are ``"auto"``, from the first batches of all ranks."""
    if not are_several() or not is_summed(head):
        return
    stats = head.statistics
    values = y.ndim == 2 or stats.num_classes == 1
    # Open on all ranks or on none: either each has learned a batch, or none has.
    if stats.grid is None or (values and stats.target_grid is None):
        x = normalized(x.double(), stats.normalize)
        mine = tuple(float(part.abs().max()) if part.numel() else 0.0 for part in (x, y.double()))
        largest, largest_y = map(max, zip(*gather(mine), strict=True))
        if math.isfinite(largest) and math.isfinite(largest_y):
            target_grid = (stats.target_grid or FixedPoint.auto(largest_y)) if values else None
            stats.decide("values" if values else "labels", stats.grid or FixedPoint.auto(largest), target_grid)


def loader_at(loaders: Any, index: int) -> Any:
    """Return one of a Trainer's loaders, which may be one loader, a list or a dict."""
    found = list(loaders.values()) if isinstance(loaders, dict) else loaders
    return found[index] if isinstance(found, list | tuple) else found


def without_padding(loader: Any, batch_idx: int, size: int) -> int:
    """Count the real samples of a batch with ``size`` samples.

    A ``DistributedSampler`` assigns samples to the W ranks in turn, and repeats the first samples until all ranks have the
    same number. The sample with index p on rank r is therefore sample p W + r of the data, or a repetition if that number is
    not below the number of samples.
    """
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(batches, "sampler", None), getattr(loader, "sampler", None))
    sampler = next((s for s in samplers if isinstance(s, DistributedSampler)), None)
    samples = 0 if sampler is None else len(sampler.dataset)  # type: ignore[arg-type]
    if sampler is None or sampler.drop_last or samples % sampler.num_replicas == 0:
        return size
    real = math.ceil((samples - sampler.rank) / sampler.num_replicas)
    if batches is None:  # an item is a batch
        return size if batch_idx < real else 0
    batches = getattr(batches, "_batch_sampler", batches)  # Lightning wraps it for predictions
    if type(batches) is not BatchSampler:
        raise ValueError(
            f"with several ranks, a distributed sampler repeats samples, and in the batches of a {type(batches).__name__} the "
            "repeated ones cannot be recognized: use batch_size=, or DistributedSampler(drop_last=True)"
        )
    return max(0, min(size, real - batch_idx * batches.batch_size))
