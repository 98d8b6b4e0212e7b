"""Saving, loading, copying and moving a head. Checkpoints hold tensors only.

Those of a least-squares head never hold a raw sample. A margin head needs its samples, so its checkpoints hold them: on
the grid as integers, in an order that depends on the samples alone. Treat such a file as you treat the data set.

:mod:`torchlssvm.linear.pending` describes how changes since the last agreement between machines are saved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchlssvm.errors import VerificationError
from torchlssvm.functional import checks
from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes
from torchlssvm.functional.grid import grid_from_json
from torchlssvm.linear.data_choices import DataChoices
from torchlssvm.linear.diagnostics.calibration import Calibration
from torchlssvm.linear.solvers import SolverOptions
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.statistics import ROW_OPTIONS

if TYPE_CHECKING:
    from torchlssvm.linear.linear_head import LinearHead

FORMAT = 1
"""Format of a saved head; files with another number are refused."""


class LiveBuffers(dict[str, Any]):
    """Buffers of a module that are brought up to date when they are read: ``w``, ``b`` and ``C``.

    They are written in place, so that references held elsewhere (DistributedDataParallel) stay valid. They are copies:
    the head never computes from them, and overwriting one changes nothing.
    """

    def __init__(self, head: LinearHead, kept: dict[str, Any]):
        super().__init__(kept)
        self.head = head

    def refresh(self, names: Iterable[str]) -> None:
        """Publish the current values. Equal values are not written again, except on a device: to compare would wait for it."""
        head = self.head
        with head._lock, torch.inference_mode(False), torch.no_grad():
            for name in [n for n in names if n in head._buffer_names]:
                old, value = super().get(name), head._buffer_value(name)
                if old is None or old.shape != value.shape or old.device != value.device:
                    self[name] = value.clone()
                elif old.device.type != "cpu" or checks.is_fake(value) or not torch.equal(old, value):
                    old.copy_(value)

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


def make_live(head: LinearHead, kept: dict[str, Any] | None = None) -> None:
    """Give the head its buffers."""
    object.__setattr__(head, "_buffers", LiveBuffers(head, kept or dict.fromkeys(head._buffer_names)))


def pack(meta: dict[str, Any]) -> Tensor:
    """JSON as bytes in a tensor, which every checkpoint format can store."""
    return bytes_to_tensor(json.dumps(meta, sort_keys=True).encode())


def save_options(head: LinearHead) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Options and choices made from data, as JSON fields, and the tensor of a calibration that is not void."""
    weight, choices = head.class_weight, head._choices
    numbers = checks.to_host(weight) if isinstance(weight, Tensor) else None
    meta: dict[str, Any] = {
        "rho": head.rho,
        "intercept": head.intercept,
        "rule": head._options.rule,
        "class_weight": (numbers or [[1.0] * len(weight)])[0] if isinstance(weight, Tensor) else weight,
        "made": choices.to_json(),
    }
    if choices.calibration is None:
        return meta, {}
    return meta | {"calibration": choices.calibration.describe()}, {"calibration": choices.calibration.values.clone()}


def save(head: LinearHead) -> dict[str, Tensor]:
    """State beside the buffers: the statistics or the rows, the solution's own coordinates, the options."""
    with torch.inference_mode(False), torch.no_grad():
        meta, out = save_options(head)
        more, parts = head._saved_parts()
        out |= parts
        meta |= {"format": FORMAT, "type": type(head).__name__} | more | head._row_options()
        return out | {"options": pack(meta | {"checksum": checksum(out)})}


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
        total.update(value.cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


class LoadProblems(NamedTuple):
    """Reasons why a state was not loaded."""

    missing: list[str]
    unexpected: list[str]
    errors: list[str]

    def tell(self, prefix: str, strict: bool, missing: list[str], unexpected: list[str], errors: list[str]) -> None:
        """Append them to torch's lists, as ``_load_from_state_dict`` is asked to."""
        missing += [prefix + name for name in self.missing]
        unexpected += [prefix + name for name in self.unexpected if strict]
        errors += self.errors


def load_meta(head: LinearHead, state: dict[str, Tensor]) -> dict[str, Any]:
    """The JSON fields of a saved head; ValueError for another format, or where an option that cannot change differs."""
    meta = json.loads(tensor_to_bytes(state["options"]).decode())
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = meta.get("format") if isinstance(meta, dict) else type(meta).__name__
        raise ValueError(f"the saved head has format {found!r}, this version reads format {FORMAT}")
    if meta["type"] != type(head).__name__:
        raise ValueError(f"the saved head is a {meta['type']}")
    for name in ("intercept", "multiclass", *ROW_OPTIONS):
        saved = meta.get(name, "ovr" if name == "multiclass" else None)
        if saved != getattr(head, name):
            raise ValueError(f"{name} is {saved!r} in the saved head and {getattr(head, name)!r} here")
    return meta


def check_tensors(state: dict[str, Tensor], names: list[str], meta: dict[str, Any]) -> None:
    """VerificationError if the saved tensors of these names, except the buffers, do not match the checksum."""
    kept = {k: v for k, v in state.items() if k in names and k not in ("w", "b", "C", "options")}
    if checksum(kept) != meta["checksum"]:
        raise VerificationError("the saved tensors do not have the checksum saved with them: the state is damaged")


def load_options(
    head: LinearHead, state: dict[str, Tensor], meta: dict[str, Any]
) -> tuple[SolverOptions, Calibration | None]:
    """Options of the solver and the calibration, from what :func:`save_options` returned."""
    weight, calibration = meta["class_weight"], None
    if isinstance(weight, list):
        weight = torch.tensor(weight, dtype=torch.float64, device=head.device)
    if "calibration" in meta:
        calibration = Calibration.restore(meta["calibration"], moved(state["calibration"], head.device))
    return SolverOptions(float(meta["rho"]), head.intercept, weight, meta["rule"]), calibration


def load(head: LinearHead, state: dict[str, Tensor]) -> LoadProblems:
    """Load what :func:`save` and the buffers wrote; with a problem, nothing is changed.

    A damaged state (tensors or statistics that do not have the checksum or digest saved with them) is a VerificationError.
    """
    needed = (*head._buffer_names, "options", *head._saved_names)
    optional = (*head._optional_names, "calibration")
    problems = LoadProblems(
        [k for k in needed if k not in state], [k for k in state if k not in (*needed, *optional)], []
    )
    if problems.missing:
        return problems
    with torch.inference_mode(False), torch.no_grad():
        try:
            meta = load_meta(head, state)
            check_tensors(state, [*needed, *optional], meta)
            options, calibration = load_options(head, state, meta)
            choices = DataChoices.from_json(meta.get("made", {}), calibration)
            install = head._loaded_parts(state, meta, options)
            with head._lock:
                install()
                head._choices = choices
        except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
            problems.errors.append(f"{type(head).__name__}: {error}")
    return problems


def check_digest(statistics: Statistics, digest: str | None) -> None:
    """VerificationError if the statistics do not have the digest."""
    if statistics.exact and statistics.digest() != digest:
        raise VerificationError("the saved statistics do not have the digest saved with them: the state is damaged")


def part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The saved tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device."""
    return tensor.to(device=device, copy=True)
