"""Saving, loading, copying and moving a :class:`~torchlssvm.MarginHead`.

A margin head needs its samples, so its checkpoints hold them: on the grid as integers, in an order that depends on the samples
alone. Treat such a file as you treat the data set.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchlssvm.errors import VerificationError
from torchlssvm.functional import checks
from torchlssvm.functional.byte_tensors import tensor_to_bytes
from torchlssvm.functional.grid import grid_from_json, grid_to_json
from torchlssvm.linear.active_sets import ActiveSetSolver
from torchlssvm.linear.checkpoint import (
    LoadProblems,
    attributes,
    check_tensors,
    checksum,
    load_meta,
    load_options,
    make_live,
    options_on,
    pack,
    save_options,
)
from torchlssvm.linear.data_choices import DataChoices
from torchlssvm.linear.grid_rows import GridRows
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.statistics import ROW_OPTIONS

if TYPE_CHECKING:
    from torchlssvm.linear.margin_head import MarginHead

MARGIN_FORMAT = "torchlssvm-margin-head-1"
"""Format of a saved head; it changes when files can no longer be read as before."""

MARGIN_BUFFER_NAMES = ("w", "b")
"""Buffers of a head, as its state dict names them."""

SAMPLE_NAMES = ("samples.q", "samples.labels", "samples.copies", "samples.grid")
"""Saved tensors that hold the samples."""


def save_samples(head: MarginHead) -> dict[str, Tensor]:
    """The samples on their grid, in an order that depends on the samples alone."""
    rows = {f"samples.{k}": v for k, v in head.samples.state().items()}
    return rows | {"samples.grid": pack({"grid": grid_to_json(head.statistics.choices.grid)})}


def load_samples(head: MarginHead, state: dict[str, Tensor]) -> tuple[Statistics, GridRows]:
    """Statistics and rows from what :func:`save_samples` returned; ValueError when they do not fit."""
    rows = head.samples.empty()
    rows.load({k.removeprefix("samples."): v for k, v in state.items() if k in SAMPLE_NAMES[:3]}, head.num_classes)
    stats = head.statistics.zero()
    if rows.n:
        grid = grid_from_json(json.loads(tensor_to_bytes(state["samples.grid"]).decode())["grid"])
        if grid is None:
            raise ValueError("the saved rows have no grid")
        wanted = head.statistics.requested.grid
        if wanted is not None and wanted != grid:
            raise ValueError(f"the grid is {grid} in the saved head and {wanted} here")
        stats.decide("labels", grid)
        stats.change([(stats.check(grid.dequantize(rows.q), rows.labels, rows.copies, gridded=True), 1)])
    return stats, rows


def save(head: MarginHead) -> dict[str, Tensor]:
    """State beside the buffers: the samples, the active sets, the weights' proofs and the options."""
    with torch.inference_mode(False), torch.no_grad():
        out = save_samples(head)
        solution = head.solver.state()
        out |= {f"solution.{k}": v.clone() for k, v in solution.items()}
        out["solution.sides"] = head.solver.sides_in_saved_order()
        meta, more = save_options(head)
        out |= more
        meta |= {
            "format": MARGIN_FORMAT,
            "normalize": head.normalize,
            "scale": head.scale,
            "digest": None if checks.is_fake(head.counts) else head.statistics.digest(),
        }
        return out | {"options": pack(meta | {"checksum": checksum(out)})}


def load(head: MarginHead, state: dict[str, Tensor]) -> LoadProblems:
    """Load what :func:`save` and the buffers wrote; with a problem, nothing is changed.

    A damaged state (tensors or statistics that do not have the checksum or digest saved with them) is a VerificationError.
    """
    needed = [*MARGIN_BUFFER_NAMES, *SAMPLE_NAMES, "options", *(f"solution.{k}" for k in ("w", "b", "proofs", "sides"))]
    problems = LoadProblems(
        [k for k in needed if k not in state], [k for k in state if k not in [*needed, "calibration"]], []
    )
    if problems.missing:
        return problems
    with torch.inference_mode(False), torch.no_grad():
        try:
            meta = load_meta(head, state, MARGIN_FORMAT)
            check_tensors(state, [*needed, "calibration"], meta)
            stats, rows = load_samples(head, state)
            if not checks.is_fake(stats.counts) and stats.digest() != meta["digest"]:
                raise VerificationError(
                    "the saved samples do not have the digest saved with them: the state is damaged"
                )
            options, calibration = load_options(head, state, meta)
            if options.class_weight is not None and not stats.per_class:
                raise ValueError("class_weight is set in the saved head, and this one has no sums per class")
            solution = {k[9:]: v for k, v in state.items() if k.startswith("solution.")}
            ActiveSetSolver(rows, stats, options).restore(solution, solution["sides"])  # raises before anything changes
            with head.locked():
                choices = DataChoices.from_json(meta.get("made", {}), calibration)
                head.replace_parts(stats, rows, options)
                head.solver.restore(solution, solution["sides"])
                head.data_choices = choices
        except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
            problems.errors.append(f"MarginHead: {error}")
    return problems


def config(head: MarginHead) -> dict[str, Any]:
    """The arguments that make an empty head like this one, as primitives."""
    weight = head.class_weight
    return {
        "in_features": head.in_features,
        "num_classes": head.num_classes,
        "rho": head.rho,
        "intercept": head.intercept,
        "class_weight": weight.tolist() if isinstance(weight, Tensor) else weight,
        "grid": grid_to_json(head.statistics.requested.grid) or "auto",
        "per_class": head.statistics.per_class,
    } | {name: value for name in ROW_OPTIONS if (value := getattr(head, name)) is not None}


def freeze(head: MarginHead) -> dict[str, Any]:
    """Attributes of the head for pickling: matrices that can be rebuilt are left out."""
    with head.locked(), torch.inference_mode(False), torch.no_grad():
        head.solve()
        rows = head.samples.copy()
        return attributes(head) | {"samples": rows, "solver": head.solver.copy_in_saved_order(rows)}


def move(head: MarginHead, device: torch.device) -> None:
    """Move everything to another device, or nothing: the state is built there first, and then replaces this one."""
    if device == head.device:
        return
    with head.locked(), torch.inference_mode(False), torch.no_grad():
        options = options_on(head, device)
        solution, sides = head.solver.state(), head.solver.sides_in_saved_order()
        stats, rows = head.statistics.to(device), head.samples.to(device)
        head.replace_parts(stats, rows, options)
        head.solver.restore({k: v.to(device) for k, v in solution.items()}, sides.to(device))
        make_live(head, dict.fromkeys(MARGIN_BUFFER_NAMES))
