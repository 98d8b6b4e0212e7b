"""Parts of saving, loading, copying and moving a head. Checkpoints hold tensors only.

A checkpoint of a least-squares head never contains a raw sample. A margin head, however, needs its samples, so its checkpoints
contain them, as integers on the grid, in an order that depends on the samples alone. Protect such a file like the data set.

:mod:`torchlssvm.linear.pending` describes how changes since the last agreement between machines are saved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchlssvm.errors import VerificationError
from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes
from torchlssvm.functional.grid import grid_from_json
from torchlssvm.statistics import Statistics

FORMAT = 2
"""Format of a saved head; files with another number are refused."""


class LiveBuffers(dict[str, Any]):
    """Buffers of a module that are brought up to date when they are read: ``w``, ``b`` and ``C``.

    Buffers are written in place, so that references held elsewhere (DistributedDataParallel) stay valid. They are only copies
    from which the head never computes, so overwriting a buffer changes nothing. ``refresh`` updates the buffers with the given
    names.
    """

    def __init__(self, kept: dict[str, Any], refresh: Callable[[Iterable[str]], None]):
        super().__init__(kept)
        self.refresh = refresh

    def __getitem__(self, name: str) -> Any:
        self.refresh([name])
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As dict.get, up to date."""
        self.refresh([name])
        return super().get(name, default)

    def items(self) -> Any:
        """As dict.items, up to date."""
        self.refresh(self.keys())
        return super().items()

    def values(self) -> Any:
        """As dict.values, up to date."""
        self.refresh(self.keys())
        return super().values()


def pack(meta: dict[str, Any]) -> Tensor:
    """JSON as bytes in a tensor, which every checkpoint format can store."""
    return bytes_to_tensor(json.dumps(meta, sort_keys=True).encode())


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of :class:`~torchlssvm.LSSVMHead` from what its ``config`` returned."""
    grids = {k: config[k] for k in ("grid", "target_grid") if k in config}
    weight = config["class_weight"]
    return (
        config
        | {k: grid_from_json(grid) if isinstance(grid, list) else grid for k, grid in grids.items()}
        | {"class_weight": torch.tensor(weight, dtype=torch.float64) if isinstance(weight, list) else weight}
    )


def checksum(state: dict[str, Tensor]) -> str:
    """SHA-256 of saved tensors, with their names and shapes."""
    total = hashlib.sha256()
    for name, value in sorted(state.items()):
        total.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        total.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


class LoadProblems(NamedTuple):
    """Reasons why a state was not loaded."""

    missing: list[str]
    unexpected: list[str]
    errors: list[str]

    def tell(self, prefix: str, strict: bool, missing: list[str], unexpected: list[str], errors: list[str]) -> None:
        """Append the problems to torch's lists, as ``_load_from_state_dict`` must do."""
        missing += [prefix + name for name in self.missing]
        unexpected += [prefix + name for name in self.unexpected if strict]
        errors += self.errors


def load_meta(saved: Tensor) -> dict[str, Any]:
    """The JSON fields of a saved head; ValueError for another format."""
    meta = json.loads(tensor_to_bytes(saved).decode())
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = meta.get("format") if isinstance(meta, dict) else type(meta).__name__
        raise ValueError(f"the saved head has format {found!r}, this version reads format {FORMAT}")
    return meta


def check_tensors(state: dict[str, Tensor], names: list[str], meta: dict[str, Any]) -> None:
    """Raise VerificationError if the options and tensors of these names, except the buffers, do not match the checksum."""
    kept = {k: v for k, v in state.items() if k in names and k not in ("w", "b", "C", "options")}
    described = pack({k: v for k, v in meta.items() if k != "checksum"})
    if checksum(kept | {"options": described}) != meta["checksum"]:
        raise VerificationError("the saved tensors do not have the checksum saved with them: the state is damaged")


def check_digest(statistics: Statistics, digest: str | None) -> None:
    """Raise VerificationError if the statistics do not have the digest."""
    if statistics.exact and statistics.digest() != digest:
        raise VerificationError("the saved statistics do not have the digest saved with them: the state is damaged")


def part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The saved tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device."""
    return tensor.to(device=device, copy=True)
