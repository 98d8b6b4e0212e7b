"""The collective operations that a sync needs, on any backend of the process group."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes


class Peers:
    """The ranks of a process group, numbered 0..size-1 within it."""

    def __init__(self, group: Any, device: torch.device):
        """``group`` is None for all ranks; ``device`` is that of the sums. The constructor runs no collective."""
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "there is no process group: call torch.distributed.init_process_group() first, also under torchrun"
            )
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the group")
        backend = str(dist.get_backend(group))
        cuda = "nccl" in backend and (device.type == "cuda" or "gloo" not in backend)
        self.device = (device if device.type == "cuda" else torch.device("cuda")) if cuda else torch.device("cpu")

    def _run(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:  # backends raise this if a peer is gone or the timeout expires
            raise RuntimeError(
                f"rank {self.rank} of {self.size} lost its peers in the middle of an exchange. Nothing was changed here: the "
                f"agreed state and what is pending are as before. ({str(error).splitlines()[0]})"
            ) from error

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages of all ranks, in order. Messages are JSON, so no received data is executed."""
        texts = self.gather(bytes_to_tensor(json.dumps(message).encode())[:, None])
        return [json.loads(tensor_to_bytes(text[:, 0])) for text in texts]

    def gather(self, rows: Tensor) -> list[Tensor]:
        """Return the rows of all ranks, on the host. rows: (n, m), with any n on each rank."""
        length = torch.tensor([len(rows)], device=self.device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(lengths, length, group=self.group))
        sizes = [int(n) for n in lengths]
        padded = torch.zeros(max(sizes), rows.shape[1], dtype=rows.dtype)
        padded[: len(rows)] = rows
        padded = padded.to(self.device)
        parts = [torch.empty_like(padded) for _ in sizes]
        if max(sizes):
            self._run(lambda: dist.all_gather(parts, padded, group=self.group))
        return [p[:n].cpu() for p, n in zip(parts, sizes, strict=True)]

    def total(self, part: Tensor, to: int | None = None) -> Tensor:
        """Sum the tensors of all ranks, on all ranks or only on rank ``to``; ``part`` itself may be overwritten."""
        work = part.to(self.device)
        if to is None:
            self._run(lambda: dist.all_reduce(work, group=self.group))
        else:
            root = to if self.group is None else dist.get_global_rank(self.group, to)
            self._run(lambda: dist.reduce(work, root, group=self.group))
        return work.to(part.device)
