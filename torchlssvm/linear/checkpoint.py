"""Saving, loading, copying and moving a head. Checkpoints hold tensors only.

Those of a least-squares head never hold a raw sample. A margin head needs its samples, so its checkpoints hold them: on
the grid as integers, in an order that depends on the samples alone. Treat such a file as you treat the data set.

:mod:`torchlssvm.linear.pending` describes how changes since the last agreement between machines are saved.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from torchlssvm.errors import VerificationError
from torchlssvm.functional import checks
from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes
from torchlssvm.functional.grid import grid_from_json, grid_to_json
from torchlssvm.linear.data_choices import DataChoices
from torchlssvm.linear.diagnostics.calibration import Calibration
from torchlssvm.linear.locking import give_lock
from torchlssvm.linear.membership import HeldRows, RowCounts
from torchlssvm.linear.pending import Pending, Tracking
from torchlssvm.linear.solvers import SolverOptions, make_solver
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.statistics import ROW_OPTIONS

if TYPE_CHECKING:
    from torchlssvm.linear.grid_rows import GridRows
    from torchlssvm.linear.head import LSSVMHead
    from torchlssvm.linear.linear_head import LinearHead
    from torchlssvm.linear.margin_head import MarginHead

FORMAT = 1
"""Format of a saved head; files with another number are refused."""

SAMPLE_NAMES = ("samples.q", "samples.labels", "samples.copies", "samples.grid")
"""Saved tensors that hold the samples of a margin head."""

MARGIN_NAMES = (*SAMPLE_NAMES, "solution.w", "solution.b", "solution.active")
LEAST_SQUARES_NAMES = ("P", "solution.w", "statistics.meta", "statistics.counts")
OPTIONAL_NAMES = (
    "statistics.sums", "solution.beta", "solution.mu", "solution.n", "solution.b", "membership",
    "pending.counts", "pending.sums", "pending.meta", "pending.rows",
)  # fmt: skip


class LiveBuffers(dict[str, Any]):
    """Buffers of a module that are brought up to date when they are read: ``w``, ``b`` and ``C``.

    They are written in place, so that references held elsewhere (DistributedDataParallel) stay valid. They are copies:
    the head never computes from them, and overwriting one changes nothing.
    """

    def __init__(self, head: LinearHead, kept: dict[str, Any]):
        super().__init__(kept)
        self.head = head
        self._inverse_of: tuple[int, int, Tensor, int] | None = (
            None  # the state that C was written for, C, and its version
        )

    def refresh(self, names: Iterable[str]) -> None:
        """Publish the current values. C, which is large, is left alone where it was written for the same state."""
        shared = torch.distributed.is_available() and torch.distributed.is_initialized()
        head = self.head
        with head._lock, torch.inference_mode(False), torch.no_grad():
            head._check_whole()
            for name in [n for n in names if n in head._buffer_names]:
                old = super().get(name)
                # In a process group C may have changed unnoticed: DistributedDataParallel writes to buffers.
                if name == "C" and self._is_current(old) and not shared:
                    continue
                value = published(head, name)
                if old is None or old.shape != value.shape or old.device != value.device:
                    old = self[name] = value.clone()
                elif shared or old.device.type != "cpu" or checks.is_fake(value) or not torch.equal(old, value):
                    old.copy_(value)  # on a device without a comparison, which would wait for it
                if name == "C":
                    self._inverse_of = (head._state_version, head._solver.stamp, old, old._version)

    def _is_current(self, C: Tensor | None) -> bool:
        """Tell if C is what was last written, for the state that the head is in."""
        if C is None or self._inverse_of is None:
            return False
        *state, written, version = self._inverse_of
        return state == [self.head._state_version, self.head._solver.stamp] and written is C and C._version == version

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


def published(head: Any, name: str) -> Tensor:
    """The value of a buffer."""
    if name == "C":
        P: Tensor = head._solve(inverse=True)[2]
        return torch.eye(P.shape[-1], dtype=P.dtype, device=P.device) - P
    value: Tensor = head._solve()[0 if name == "w" else 1]
    return value


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
        more, parts = _margin_parts(head) if _keeps_rows(head) else _least_squares_parts(head)
        out |= parts
        meta |= {"format": FORMAT, "type": type(head).__name__} | more | head._row_options()
        return out | {"options": pack(meta | {"checksum": checksum(out)})}


def _least_squares_parts(head: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    stats = head.statistics
    out = {"P": head.P.clone()}
    out |= {f"solution.{k}": v.clone() for k, v in head._solver.state().items()}
    out |= {f"statistics.{k}": v for k, v in stats.state().items()}
    meta: dict[str, Any] = {
        "multiclass": head.multiclass,
        "uncertifiable": head.uncertifiable,
        "digest": stats.digest() if stats.exact else None,
        "unchecked": head.unchecked,
    }
    if head.unchecked is None:
        out["membership"] = bytes_to_tensor(head._rows.to_bytes())
    if stats.exact:
        mark_pending(head)
        meta["pending"], changes = head._pending.save()
        out |= {f"pending.{k}": v for k, v in changes.items()}
        if changes and head._rows.changed is not None:
            out["pending.rows"] = torch.from_numpy(head._rows.changed.to_array())
    return meta, out


def mark_pending(head: LSSVMHead) -> None:
    """Give the pending changes an id before they are copied or saved, and record whether they include removals."""
    head._rows.flush()
    head._pending.named(head.statistics)
    if head._rows.changed is not None:
        head._pending.shrunk = head._rows.changed.negative > 0


def _margin_parts(head: MarginHead) -> tuple[dict[str, Any], dict[str, Tensor]]:
    meta = {"digest": head.statistics.digest(), "per_class": head.statistics.per_class}
    return meta, save_samples(head) | {f"solution.{k}": v.clone() for k, v in head._solver.state().items()}


def save_samples(head: MarginHead) -> dict[str, Tensor]:
    """The samples of a margin head on their grid, in an order that depends on the samples alone."""
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
        calibration = Calibration.restore(meta["calibration"], _moved(state["calibration"], head.device))
    if meta["rule"] != head._options.rule:
        raise ValueError(f"rule is {meta['rule']!r} in the saved head and {head._options.rule!r} here")
    return SolverOptions(float(meta["rho"]), head.intercept, weight, meta["rule"]), calibration


def load(head: LinearHead, state: dict[str, Tensor]) -> LoadProblems:
    """Load what :func:`save` and the buffers wrote; with a problem, nothing is changed.

    A damaged state (tensors or statistics that do not have the checksum or digest saved with them) is a VerificationError.
    """
    margin = _keeps_rows(head)
    needed, optional = (MARGIN_NAMES, ()) if margin else (LEAST_SQUARES_NAMES, OPTIONAL_NAMES)
    needed, optional = (*head._buffer_names, "options", *needed), (*optional, "calibration")
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
            install = (_built_margin if margin else _built_least_squares)(head, state, meta, options)
            with head._lock:
                install()
                head._choices = choices
        except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
            problems.errors.append(f"{type(head).__name__}: {error}")
    return problems


def _check_digest(statistics: Statistics, digest: str | None) -> None:
    if statistics.exact and statistics.digest() != digest:
        raise VerificationError("the saved statistics do not have the digest saved with them: the state is damaged")


def _built_least_squares(
    head: Any, state: dict[str, Tensor], meta: dict[str, Any], options: SolverOptions
) -> Callable[[], None]:
    """Build the parts of a saved head aside; what is returned puts them into this one."""
    P, w = (_moved(state[k], head.device) for k in ("P", "w"))
    shapes = _shapes(head)
    if tuple(P.shape) != shapes["P"] or tuple(w.shape) != shapes["w"]:
        raise ValueError(f"P, w have shapes {tuple(P.shape)}, {tuple(w.shape)}; needed {shapes['P']}, {shapes['w']}")
    statistics = head.statistics.zero()
    statistics.load({k[11:]: v for k, v in state.items() if k.startswith("statistics.")})
    _check_digest(statistics, meta["digest"])
    pending = Pending()
    if statistics.exact:
        changes = {k[8:]: v for k, v in state.items() if k.startswith("pending.")}
        pending = Pending.load(meta["pending"], changes, statistics)
    rows = _load_rows(head, meta, state, statistics, pending)
    solver = make_solver(statistics, options, head.multiclass)
    solver.restore({k[9:]: _moved(v, head.device) for k, v in state.items() if k.startswith("solution.")}, P)
    return lambda: head._replace_parts(statistics, solver, rows, pending, meta.get("uncertifiable"))


def _built_margin(
    head: Any, state: dict[str, Tensor], meta: dict[str, Any], options: SolverOptions
) -> Callable[[], None]:
    """Build the parts of a saved head aside; what is returned puts them into this one."""
    if meta["per_class"] != head.statistics.per_class:
        raise ValueError(f"per_class is {meta['per_class']} in the saved head and {head.statistics.per_class} here")
    statistics, rows = load_samples(head, state)
    _check_digest(statistics, meta["digest"])
    solver = type(head._solver)(rows, statistics, options)
    solver.restore({k[9:]: v for k, v in state.items() if k.startswith("solution.")})
    return lambda: head._replace_parts(statistics, rows, solver)


def _load_rows(
    head: LSSVMHead, meta: dict[str, Any], state: dict[str, Tensor], statistics: Statistics, pending: Pending
) -> HeldRows:
    """The fingerprints of the rows held, as far as they were saved and this head wants them."""
    rows = HeldRows(head._rows.impossible, head._rows.recorded)
    if rows.unchecked is not None:
        return rows
    if "membership" in state:
        rows.load(tensor_to_bytes(state["membership"]))
    elif not statistics.empty:
        rows.drop(meta.get("unchecked") or "it was loaded from a file that has no fingerprints of rows")
    if pending.tracking is Tracking.CHANGES and "pending.rows" in state:
        rows.changed = RowCounts.from_array(state["pending.rows"].cpu().numpy())
    return rows


def _shapes(head: LSSVMHead) -> dict[str, tuple[int, ...]]:
    J, K = head.in_features, head.num_classes
    D = J + (head.intercept == "penalized")
    pairs = K * (K - 1) // 2
    return {"P": (pairs, D, D), "w": (J, pairs)} if head.multiclass == "ovo" else {"P": (D, D), "w": (J, K)}


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device=device, copy=True)


def freeze(head: LSSVMHead) -> dict[str, Any]:
    """Attributes of the head for pickling: pending rows are taken in, caches that can be rebuilt are left out."""
    with head._lock, torch.inference_mode(False), torch.no_grad():
        head._solve()
        head._solver.drop_raw_samples()
        if head.statistics.exact:
            mark_pending(head)
        return attributes(head) | {"_view_cache": None}


def freeze_margin(head: MarginHead) -> dict[str, Any]:
    """Attributes of a margin head for pickling: matrices that can be rebuilt are left out."""
    with head._lock, torch.inference_mode(False), torch.no_grad():
        head._solve()
        rows = head.samples.copy()
        solver = type(head._solver)(rows, head.statistics, head._options)
        solver.restore(head._solver.state())
        return attributes(head) | {"samples": rows, "_solver": solver}


def attributes(head: LinearHead) -> dict[str, Any]:
    """Attributes of a head for :func:`thaw`: the buffers as they are; not its lock, its store and its published weights."""
    buffers = {k: dict.__getitem__(head._buffers, k) for k in head._buffers}
    kept = {name: value for name, value in vars(head).items() if name not in ("_lock", "_keeper")}
    return kept | {"_published": None, "_buffers": buffers}


def thaw(head: LinearHead, state: dict[str, Any]) -> None:
    """Restore what :func:`attributes` returned, outside of inference mode: its tensors could not be changed later."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            state = copy.deepcopy(state)
    buffers = state.pop("_buffers")
    head.__dict__.update(state)
    give_lock(head)
    make_live(head, buffers)


def options_on(head: LinearHead, device: torch.device) -> SolverOptions:
    """The options of a head on a device it moves to; RuntimeError for the meta device."""
    if device.type == "meta":
        raise RuntimeError(
            "a head cannot move to the meta device: tensors there hold no data, and its samples would be lost"
        )
    weight = head.class_weight
    weight = weight.to(device) if isinstance(weight, Tensor) else weight
    return SolverOptions(head.rho, head.intercept, weight, head._options.rule)


def move(head: LinearHead, device: torch.device) -> None:
    """Move everything to another device, or nothing: the state is built there first, and then replaces this one."""
    if device == head.device:
        return
    with head._lock, torch.inference_mode(False), torch.no_grad():
        options, statistics = options_on(head, device), head.statistics.to(device)
        solution = {k: v.to(device, copy=True) for k, v in head._solver.state().items()}
        if _keeps_rows(head):
            rows = head.samples.to(device)
            active = type(head._solver)(rows, statistics, options)
            active.restore(solution)
            head._replace_parts(statistics, rows, active)
        else:
            least: Any = head
            solver = make_solver(statistics, options, head.multiclass)
            solver.restore(solution, least.P.to(device, copy=True))
            least._rows.flush()  # products that wait to be hashed would stay behind on the old device
            least._replace_parts(statistics, solver, least._rows, least._pending.to(device), least.uncertifiable)
        make_live(head)


def _keeps_rows(head: Any) -> TypeGuard[MarginHead]:
    """True for a margin head, whose checkpoints hold its samples."""
    return bool(head._keeps_rows)
