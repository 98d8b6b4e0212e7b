"""Saving, loading, copying and moving a head. Checkpoints hold tensors only, and never a raw sample.

What a head changed since machines last agreed is saved as :mod:`torchlssvm.linear.pending` says.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchlssvm.errors import VerificationError
from torchlssvm.functional import checks
from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes
from torchlssvm.functional.grid import FixedPoint, grid_from_json, grid_to_json
from torchlssvm.linear.compact_solver import CompactSolver
from torchlssvm.linear.data_choices import DataChoices
from torchlssvm.linear.diagnostics.calibration import Calibration
from torchlssvm.linear.locking import give_lock
from torchlssvm.linear.membership import HeldRows, RowCounts
from torchlssvm.linear.pending import Pending, Tracking
from torchlssvm.linear.solvers import Solver, SolverOptions, make_solver
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import GridChoices
from torchlssvm.statistics.statistics import ROW_OPTIONS

if TYPE_CHECKING:
    from torchlssvm.linear.head import LSSVMHead
    from torchlssvm.linear.margin_head import MarginHead

HEAD_FORMAT = "torchlssvm-head-1"
"""Format of a saved head; it changes when files can no longer be read as before."""

BUFFER_NAMES = ("w", "b", "C")
"""Buffers of a head, as its state dict names them."""


class LiveBuffers(dict[str, Any]):
    """Buffers of a module that are brought up to date when they are read: ``w``, ``b`` and ``C``.

    They are written in place, so that references held elsewhere (DistributedDataParallel) stay valid. They are copies:
    the head never computes from them, and overwriting one changes nothing.
    """

    def __init__(self, head: LSSVMHead | MarginHead, kept: dict[str, Any]):
        super().__init__(kept)
        self.head = head
        self._inverse_of: tuple[int, int, Tensor, int] | None = (
            None  # the state that C was written for, C, and its version
        )

    def refresh(self, names: Iterable[str]) -> None:
        """Publish the current values. C, which is large, is left alone where it was written for the same state."""
        shared = torch.distributed.is_available() and torch.distributed.is_initialized()
        head = self.head
        with head.locked(), torch.inference_mode(False), torch.no_grad():
            head.check_whole()
            for name in [n for n in names if n in BUFFER_NAMES]:
                old = super().get(name)
                # In a process group nothing shows that it is unchanged: DistributedDataParallel writes to buffers.
                if name == "C" and self._is_current(old) and not shared:
                    continue
                value = published(head, name)
                if old is None or old.shape != value.shape or old.device != value.device:
                    old = self[name] = value.clone()
                elif shared or old.device.type != "cpu" or checks.is_fake(value) or not torch.equal(old, value):
                    old.copy_(value)  # on a device without a comparison, which would wait for it
                if name == "C":
                    self._inverse_of = (head.version, head.solver.stamp, old, old._version)

    def _is_current(self, C: Tensor | None) -> bool:
        """Tell if C is what was last written, for the state that the head is in."""
        if C is None or self._inverse_of is None:
            return False
        *state, written, version = self._inverse_of
        return state == [self.head.version, self.head.solver.stamp] and written is C and C._version == version

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
        P: Tensor = head.solve(inverse=True)[2]
        return torch.eye(P.shape[-1], dtype=P.dtype, device=P.device) - P
    value: Tensor = head.solve()[BUFFER_NAMES.index(name)]
    return value


def make_live(head: LSSVMHead | MarginHead, kept: dict[str, Any] | None = None) -> None:
    """Give the head its buffers."""
    object.__setattr__(head, "_buffers", LiveBuffers(head, kept or dict.fromkeys(BUFFER_NAMES)))


def pack(meta: dict[str, Any]) -> Tensor:
    """JSON as bytes in a tensor: plain enough for any checkpoint format."""
    return bytes_to_tensor(json.dumps(meta, sort_keys=True).encode())


def save_options(head: LSSVMHead | MarginHead) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Options and choices made from data, as JSON fields, and the tensor of a calibration that is not void."""
    weight, choices = head.class_weight, head.data_choices
    numbers = checks.to_host(weight) if isinstance(weight, Tensor) else None
    meta: dict[str, Any] = {
        "rho": head.rho,
        "intercept": head.intercept,
        "class_weight": (numbers or [[1.0] * len(weight)])[0] if isinstance(weight, Tensor) else weight,
        "made": choices.to_json(),
    }
    if choices.calibration is None:
        return meta, {}
    return meta | {"calibration": choices.calibration.describe()}, {"calibration": choices.calibration.values.clone()}


def save(head: LSSVMHead) -> dict[str, Tensor]:
    """State beside the buffers: P, the solution's own coordinates, the statistics, the options."""
    with torch.inference_mode(False), torch.no_grad():
        meta, out = save_options(head)
        out["P"] = head.P.clone()
        meta |= {
            "format": HEAD_FORMAT,
            "multiclass": head.multiclass,
            "statistics": head.statistics is not None,
            "uncertifiable": head.uncertifiable,
        } | head.row_options()
        if head.statistics is not None:
            out |= {f"solution.{k}": v.clone() for k, v in head.solver.state().items()}
            out |= {f"statistics.{k}": v for k, v in head.statistics.state().items()}
            known = head.statistics.exact and not checks.is_fake(head.statistics.counts)
            meta["digest"] = head.statistics.digest() if known else None
            meta["unchecked"] = head.unchecked
            if head.checked:
                out["membership"] = bytes_to_tensor(head.rows.to_bytes())
            if head.statistics.exact:
                mark_pending(head)
                meta["pending"], changes = head.pending.save()
                out |= {f"pending.{k}": v for k, v in changes.items()}
                if changes and head.rows.changed is not None:
                    out["pending.rows"] = torch.from_numpy(head.rows.changed.to_array())
        else:
            solver = head.solver
            assert isinstance(solver, CompactSolver)
            s = solver.solution
            out |= {
                "solution.w": s.w.clone(),
                "solution.beta": s.beta.clone(),
                "solution.mu": s.mu.clone(),
                "counts": solver.counts.clone(),
            }
            meta |= {"n": solver.n, "base": s.n, "kind": solver.choices.kind}
            meta |= {"grid": grid_to_json(head.grid), "target": grid_to_json(solver.choices.target_grid)}
        return out | {"options": pack(meta | {"checksum": checksum(out)})}


def mark_pending(head: LSSVMHead) -> None:
    """Give what is pending an id, before it is copied or saved, and note whether removals are part of it."""
    assert head.statistics is not None
    head.rows.flush()
    head.pending.named(head.statistics)
    if head.rows.changed is not None:
        head.pending.shrunk = head.rows.changed.negative > 0


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of :class:`~torchlssvm.LSSVMHead` from what its ``config`` returned."""
    grids = {k: config[k] for k in ("grid", "target_grid") if k in config}
    weight = config["class_weight"]
    return (
        config
        | {k: grid_from_json(grid) if isinstance(grid, list) else grid for k, grid in grids.items()}
        | {"class_weight": torch.tensor(weight, dtype=torch.float64) if isinstance(weight, list) else weight}
    )


def checksum(state: dict[str, Tensor]) -> str | None:
    """SHA-256 of saved tensors, with their names and shapes; None when they carry no data."""
    if checks.is_fake(*state.values()):
        return None
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


def load_meta(head: LSSVMHead | MarginHead, state: dict[str, Tensor], form: str) -> dict[str, Any]:
    """The JSON fields of a saved head; ValueError for another format, or where an option that cannot change differs."""
    meta = json.loads(tensor_to_bytes(state["options"]).decode())
    if not isinstance(meta, dict) or meta.get("format") != form:
        found = meta.get("format") if isinstance(meta, dict) else type(meta).__name__
        raise ValueError(f"not the options of such a head: the format is {found!r}, not {form!r}")
    for name in ("intercept", "multiclass", *ROW_OPTIONS):
        saved = meta.get(name, "ovr" if name == "multiclass" else None)
        if saved != getattr(head, name):
            raise ValueError(f"{name} is {saved!r} in the saved head and {getattr(head, name)!r} here")
    return meta


def check_tensors(state: dict[str, Tensor], names: list[str], meta: dict[str, Any]) -> None:
    """VerificationError if the saved tensors of these names, but for the buffers, are not those of the checksum."""
    kept = {k: v for k, v in state.items() if k in names and k not in (*BUFFER_NAMES, "options")}
    if checksum(kept) != meta["checksum"]:
        raise VerificationError("the saved tensors do not have the checksum saved with them: the state is damaged")


def load_options(
    head: LSSVMHead | MarginHead, state: dict[str, Tensor], meta: dict[str, Any]
) -> tuple[SolverOptions, Calibration | None]:
    """Options of the solver and the calibration, from what :func:`save_options` returned."""
    weight, calibration = meta["class_weight"], None
    if isinstance(weight, list):
        weight = torch.tensor(weight, dtype=torch.float64, device=head.device)
    if "calibration" in meta:
        calibration = Calibration.restore(meta["calibration"], _moved(state["calibration"], head.device))
    return SolverOptions(float(meta["rho"]), head.intercept, weight), calibration


def load(head: LSSVMHead, state: dict[str, Tensor]) -> LoadProblems:
    """Load what :func:`save` and the buffers wrote; with a problem, nothing is changed.

    A damaged state (tensors or statistics that do not have the checksum or digest saved with them) is a VerificationError.
    """
    with torch.inference_mode(False), torch.no_grad():
        needed = [*BUFFER_NAMES, "P", "options", "solution.w"]
        needed += (
            ["statistics.meta", "statistics.counts"]
            if head.statistics is not None
            else ["counts", "solution.beta", "solution.mu"]
        )
        optional = ["statistics.sums", "solution.beta", "solution.mu", "solution.n", "solution.b", "calibration"]
        optional += ["pending.counts", "pending.sums", "pending.meta", "pending.rows", "membership"]
        problems = LoadProblems(
            [k for k in needed if k not in state], [k for k in state if k not in needed + optional], []
        )
        if problems.missing:
            return problems
        try:
            meta = load_meta(head, state, HEAD_FORMAT)
            if meta["statistics"] != (head.statistics is not None):
                raise ValueError(f"statistics={meta['statistics']} in the saved head, {not meta['statistics']} here")
            P, w = (_moved(state[k], head.device) for k in ("P", "w"))
            expected = tuple(_shapes(head)["P"])
            if tuple(P.shape) != expected or tuple(w.shape) != _shapes(head)["w"]:
                raise ValueError(
                    f"P, w have shapes {tuple(P.shape)}, {tuple(w.shape)}; needed {expected}, {_shapes(head)['w']}"
                )
            check_tensors(state, needed + optional, meta)
            if head.statistics is None and grid_to_json(head.grid) != meta["grid"]:
                raise ValueError(f"the grid is {grid_from_json(meta['grid'])} in the saved head and {head.grid} here")
            solution = {k[9:]: _moved(v, head.device) for k, v in state.items() if k.startswith("solution.")}
            options, calibration = load_options(head, state, meta)
            statistics, rows, pending = head.statistics, head.rows, Pending()
            solver: Solver
            if head.statistics is not None:
                statistics = head.statistics.zero()
                statistics.load({k[11:]: v for k, v in state.items() if k.startswith("statistics.")})
                if statistics.exact and statistics.digest() != meta["digest"]:
                    raise VerificationError(
                        "the saved statistics do not have the digest saved with them: the state is damaged"
                    )
                if statistics.exact:
                    changes = {k[8:]: v for k, v in state.items() if k.startswith("pending.")}
                    pending = Pending.load(meta["pending"], changes, statistics)
                rows = _load_rows(head, meta, state, statistics, pending)
                solver = restored = make_solver(statistics, options, head.multiclass)
                restored.restore(solution, P)
            else:
                solver = compact = CompactSolver(head.in_features, head.num_classes, options, head.device)
                _load_compact(compact, head.grid, meta, solution, P, state["counts"])
            with head.locked():
                choices = DataChoices.from_json(meta.get("made", {}), calibration)
                head.replace_parts(statistics, solver, rows, pending, meta.get("uncertifiable"))
                head.data_choices = choices
        except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
            problems.errors.append(f"LSSVMHead: {error}")
        return problems


def _load_rows(
    head: LSSVMHead, meta: dict[str, Any], state: dict[str, Tensor], statistics: Statistics, pending: Pending
) -> HeldRows:
    """The fingerprints of the rows held, as far as they were saved and this head wants them."""
    rows = HeldRows(head.rows.impossible, head.rows.recorded)
    if rows.unchecked is not None:
        return rows
    if "membership" in state:
        rows.load(tensor_to_bytes(state["membership"]))
    elif not statistics.empty:
        rows.drop(meta.get("unchecked") or "it was loaded from a file that has no fingerprints of rows")
    if pending.tracking is Tracking.CHANGES and "pending.rows" in state:
        rows.changed = RowCounts.from_array(state["pending.rows"].cpu().numpy())
    return rows


def _load_compact(
    solver: CompactSolver,
    grid: FixedPoint | None,
    meta: dict[str, Any],
    solution: dict[str, Tensor],
    P: Tensor,
    counts: Tensor,
) -> None:
    if meta["kind"] is not None:
        solver.choices = GridChoices(meta["kind"], grid, grid_from_json(meta["target"]))
        solver.counts, solver.n = _moved(counts, solver.device), float(meta["n"])
        solver.solution.set_base(solution["w"], solution["beta"], solution["mu"], float(meta["base"]), P=P)


def _shapes(head: LSSVMHead) -> dict[str, tuple[int, ...]]:
    J, K = head.in_features, head.num_classes
    D = J + (head.intercept == "penalized")
    pairs = K * (K - 1) // 2
    return {"P": (pairs, D, D), "w": (J, pairs)} if head.multiclass == "ovo" else {"P": (D, D), "w": (J, K)}


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device=device, copy=True)


def freeze(head: LSSVMHead) -> dict[str, Any]:
    """Attributes of the head for pickling: pending rows are taken in, caches that can be rebuilt are left out."""
    with head.locked(), torch.inference_mode(False), torch.no_grad():
        head.solve()
        head.solver.drop_raw_samples()
        if head.statistics is not None and head.statistics.exact:
            mark_pending(head)
        return attributes(head) | {"_view": None}


def attributes(head: LSSVMHead | MarginHead) -> dict[str, Any]:
    """Attributes of a head for :func:`thaw`: without its lock and the weights that it published, the buffers as they are."""
    buffers = {k: dict.__getitem__(head._buffers, k) for k in head._buffers}
    kept = {name: value for name, value in vars(head).items() if name != "_lock"}
    return kept | {"_published": None, "_buffers": buffers}


def thaw(head: LSSVMHead | MarginHead, state: dict[str, Any]) -> None:
    """Restore what :func:`attributes` returned, outside of inference mode: its tensors could not be changed later."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            state = copy.deepcopy(state)
    buffers = state.pop("_buffers")
    head.__dict__.update(state)
    give_lock(head)
    make_live(head, buffers)


def options_on(head: LSSVMHead | MarginHead, device: torch.device) -> SolverOptions:
    """The options of a head on a device it moves to; RuntimeError for the meta device."""
    if device.type == "meta":
        raise RuntimeError(
            "a head cannot move to the meta device: tensors there hold no data, and its samples would be lost"
        )
    weight = head.class_weight
    return SolverOptions(head.rho, head.intercept, weight.to(device) if isinstance(weight, Tensor) else weight)


def move(head: LSSVMHead, device: torch.device) -> None:
    """Move everything to another device, or nothing: the state is built there first, and then replaces this one."""
    if device == head.device:
        return
    with head.locked(), torch.inference_mode(False), torch.no_grad():
        options = options_on(head, device)
        solution = head.solver.state()
        P = head.P.to(device, copy=True)
        statistics, old = head.statistics, head.solver
        moved = {k: v.to(device, copy=True) for k, v in solution.items()}
        solver: Solver
        if isinstance(old, CompactSolver):
            solver = compact = CompactSolver(head.in_features, head.num_classes, options, device)
            compact.copy_from(old, moved, P)
        else:
            assert statistics is not None
            statistics = statistics.to(device)
            solver = restored = make_solver(statistics, options, head.multiclass)
            restored.restore(moved, P)
        head.rows.flush()  # products that wait to be hashed would stay behind on the old device
        head.replace_parts(statistics, solver, head.rows, head.pending.to(device), head.uncertifiable)
        make_live(head)
