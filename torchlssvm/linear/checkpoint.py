"""Saving, loading, copying and moving a head. Checkpoints hold tensors only, and never a raw sample.

A head that takes part in an exchange (:mod:`torchlssvm.distributed`) saves what it holds, how often ranks agreed, and which
deltas it merged. What was agreed on goes with it as long as changes that are pending are additions. With removals pending it
does not: agreed minus present would be the sample removed. A head loaded from such a file (or pickle) answers as before, but
``sync``, ``Delta.take`` and ``discard`` refuse it until ``agree(head)`` declares its state the agreed one. So ``sync``, or
hand the delta over, before a save. Hashes of samples and ids, and digests of earlier states, are never saved.
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
from torchlssvm.functional.grid import FixedPoint, grid_from_json, grid_to_json
from torchlssvm.linear.compact_solver import Compact
from torchlssvm.linear.diagnostics.calibration import Calibration, choices_to_save
from torchlssvm.linear.locking import give_lock
from torchlssvm.linear.membership import Membership
from torchlssvm.linear.merge_history import Ledger
from torchlssvm.linear.solvers import Options, engine_for
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import GridChoices

if TYPE_CHECKING:
    from torchlssvm.linear.base import HeadBase

FORMAT = "torchlssvm-head-1"
BUFFERS = ("w", "b", "C")


class LiveBuffers(dict[str, Any]):
    """A module's buffers that are brought up to date when somebody looks: ``w``, ``b`` and ``C``.

    They are written in place, so that references held elsewhere (DistributedDataParallel) stay valid. They are copies:
    the head never computes from them, and somebody who overwrites one changes nothing.
    """

    def __init__(self, head: HeadBase, kept: dict[str, Any]):
        super().__init__(kept)
        self.head = head
        self.seen: dict[str, tuple[int, int, int]] = {}

    def refresh(self, names: Iterable[str]) -> None:
        """Publish the current values."""
        shared = torch.distributed.is_available() and torch.distributed.is_initialized()
        with self.head._lock, torch.inference_mode(False), torch.no_grad():
            self.head._check_whole()
            for name in [n for n in names if n in BUFFERS]:
                old = super().get(name)
                # In a process group the version says nothing: DistributedDataParallel writes to buffers past it.
                if (
                    old is not None
                    and not shared
                    and self.seen.get(name)
                    == (
                        self.head._version,
                        self.head._engine.stamp,
                        old._version,
                    )
                ):
                    continue
                value = published(self.head, name)
                if old is None or old.shape != value.shape or old.device != value.device:
                    old = value.clone()
                    self[name] = old
                else:
                    old.copy_(value)
                self.seen[name] = (self.head._version, self.head._engine.stamp, old._version)

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


def published(head: HeadBase, name: str) -> Tensor:
    """The value of a buffer."""
    if name == "C":
        P = head._current(inverse=True)[2]
        return torch.eye(P.shape[-1], dtype=P.dtype, device=P.device) - P
    return head._current()[BUFFERS.index(name)]


def make_live(head: HeadBase, kept: dict[str, Any] | None = None) -> None:
    """Give the head its buffers."""
    object.__setattr__(head, "_buffers", LiveBuffers(head, kept or dict.fromkeys(BUFFERS)))


def pack(meta: dict[str, Any]) -> Tensor:
    """JSON as bytes in a tensor: plain enough for any checkpoint format."""
    return bytes_to_tensor(json.dumps(meta, sort_keys=True).encode())


def save(head: HeadBase) -> dict[str, Tensor]:
    """What the buffers do not hold: P, the solution's own coordinates, the statistics, the options."""
    with torch.inference_mode(False), torch.no_grad():
        out = {"P": head.P.clone()}
        weight = head.class_weight
        numbers = checks.to_host(weight) if isinstance(weight, Tensor) else None
        meta: dict[str, Any] = {
            "format": FORMAT,
            "rho": head.rho,
            "intercept": head.intercept,
            "multiclass": head.multiclass,
            "class_weight": (numbers or [[1.0] * len(weight)])[0] if isinstance(weight, Tensor) else weight,
            "statistics": head.statistics is not None,
            "uncertifiable": head.uncertifiable,
            "made": choices_to_save(head._made, head._version),
        }
        calibration = head._calibration if meta["made"].get("calibration", ("", False))[1] else None
        if calibration is not None:
            meta["calibration"], out["calibration"] = calibration.describe(), calibration.values.clone()
        if head.statistics is not None:
            out |= {f"solution.{k}": v.clone() for k, v in head._engine.state().items()}
            out |= {f"statistics.{k}": v for k, v in head.statistics.state().items()}
            known = head.statistics.exact and not checks.is_fake(head.statistics.counts)
            meta["digest"] = head.statistics.digest() if known else None
            meta["unchecked"] = head.unchecked
            head._rows = head._rows.hashed()
            if head.checked:
                out["membership"] = bytes_to_tensor(head._rows.to_bytes())
            if head._ledger.to_json() != Ledger().to_json():
                meta["ledger"] = head._ledger.to_json()
            if not checks.is_fake(head.counts) and head.statistics.has_pending:
                head._ledger.origins.add(f"saved:{checksum(out)}")
        else:
            engine, s = head._engine, head._engine.solution
            out |= {
                "solution.w": s.w.clone(),
                "solution.beta": s.beta.clone(),
                "solution.mu": s.mu.clone(),
                "counts": engine.counts.clone(),
            }
            meta |= {"n": engine.n, "base": s.n, "kind": engine.choices.kind}
            meta |= {"grid": grid_to_json(head.grid), "target": grid_to_json(engine.choices.target_grid)}
        return out | {"options": pack(meta | {"checksum": checksum(out)})}


def config(head: HeadBase) -> dict[str, Any]:
    """The arguments that make an empty head like this one, as primitives."""
    weight, stats = head.class_weight, head.statistics
    wanted = GridChoices(None, head._grid, head._target_grid)
    float_sums = stats is not None and not stats.exact
    return {
        "in_features": head.in_features,
        "num_classes": head.num_classes,
        "rho": head.rho,
        "intercept": head.intercept,
        "class_weight": weight.tolist() if isinstance(weight, Tensor) else weight,
        "multiclass": head.multiclass,
        "grid": None if float_sums else grid_to_json(wanted.grid) or "auto",
        "target_grid": grid_to_json(wanted.target_grid) or "auto",
        "statistics": stats is not None,
        "per_class": None if stats is None else stats.per_class,
        "folds": 0 if stats is None else stats.folds,
        "membership": head._membership,
    }


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`config`: keyword arguments of :class:`~torchlssvm.LSSVMHead`."""
    grids = {
        k: grid_from_json(config[k]) if isinstance(config[k], list) else config[k] for k in ("grid", "target_grid")
    }
    weight = config["class_weight"]
    return config | grids | {"class_weight": torch.tensor(weight) if isinstance(weight, list) else weight}


def checksum(state: dict[str, Tensor]) -> str | None:
    """SHA-256 of saved tensors, with their names and shapes; None when they carry no data."""
    if checks.is_fake(*state.values()):
        return None
    total = hashlib.sha256()
    for name, value in sorted(state.items()):
        total.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        total.update(value.cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


class Problems(NamedTuple):
    """What kept a state from being loaded."""

    missing: list[str]
    unexpected: list[str]
    errors: list[str]


def load(head: HeadBase, state: dict[str, Tensor]) -> Problems:
    """Load what :func:`save` and the buffers wrote; with a problem, nothing is changed.

    A damaged state (tensors or statistics that do not have the checksum or digest saved with them) is a VerificationError.
    """
    with torch.inference_mode(False), torch.no_grad():
        needed = [*BUFFERS, "P", "options", "solution.w"]
        needed += (
            ["statistics.meta", "statistics.counts"]
            if head.statistics is not None
            else ["counts", "solution.beta", "solution.mu"]
        )
        optional = ["statistics.sums", "solution.beta", "solution.mu", "solution.n", "solution.b", "calibration"]
        optional += ["statistics.base_counts", "statistics.base_sums"]
        optional += ["membership"]
        problems = Problems([k for k in needed if k not in state], [k for k in state if k not in needed + optional], [])
        if problems.missing:
            return problems
        try:
            meta = json.loads(tensor_to_bytes(state["options"]).decode())
            if not isinstance(meta, dict) or meta.get("format") != FORMAT:
                found = meta.get("format") if isinstance(meta, dict) else type(meta).__name__
                raise ValueError(f"not the options of a head: the format is {found!r}, not {FORMAT!r}")
            for name in ("intercept", "multiclass"):
                if meta[name] != getattr(head, name):
                    raise ValueError(f"{name} is {meta[name]!r} in the saved head and {getattr(head, name)!r} here")
            if meta["statistics"] != (head.statistics is not None):
                raise ValueError(f"statistics={meta['statistics']} in the saved head, {not meta['statistics']} here")
            P, w = (_moved(state[k], head.device) for k in ("P", "w"))
            expected = tuple(_shapes(head)["P"])
            if tuple(P.shape) != expected or tuple(w.shape) != _shapes(head)["w"]:
                raise ValueError(
                    f"P, w have shapes {tuple(P.shape)}, {tuple(w.shape)}; needed {expected}, {_shapes(head)['w']}"
                )
            kept = {k: v for k, v in state.items() if k in needed + optional and k not in (*BUFFERS, "options")}
            if checksum(kept) != meta["checksum"]:
                raise VerificationError(
                    "the saved tensors do not have the checksum saved with them: the state is damaged"
                )
            if head.statistics is None and grid_to_json(head.grid) != meta["grid"]:
                raise ValueError(f"the grid is {grid_from_json(meta['grid'])} in the saved head and {head.grid} here")
            solution = {k[9:]: _moved(v, head.device) for k, v in state.items() if k.startswith("solution.")}
            made, calibration = _load_made(meta, state, head.device)
            weight = meta["class_weight"]
            if isinstance(weight, list):
                weight = torch.tensor(weight, dtype=torch.float64, device=head.device)
            options = Options(float(meta["rho"]), head.intercept, weight)
            statistics, rows, ledger = head.statistics, head._rows, head._ledger
            engine: Any
            if head.statistics is not None:
                statistics = head.statistics.zero()
                statistics.load({k[11:]: v for k, v in state.items() if k.startswith("statistics.")})
                known = not checks.is_fake(statistics.counts)
                if statistics.exact and known and statistics.digest() != meta["digest"]:
                    raise VerificationError(
                        "the saved statistics do not have the digest saved with them: the state is damaged"
                    )
                changed = known and statistics.has_pending
                ledger = Ledger.from_json(meta.get("ledger"))
                if changed:
                    ledger.origins.add(f"file:{meta['checksum']}")
                rows = _load_rows(head, meta, state, statistics)
                engine = engine_for(statistics, options, head.multiclass)
                engine.restore(solution, P)
            else:
                engine = Compact(head.in_features, head.num_classes, options, head.device)
                _load_compact(engine, head.grid, meta, solution, P, state["counts"])
            agreed = _agreed_after_loading(statistics, rows)
            head._adopt_parts(statistics, engine, rows, agreed, ledger, meta.get("uncertifiable"))
            head._made = {name: (head._version if current else -1, text) for name, (text, current) in made.items()}
            head._calibration = calibration
        except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
            problems.errors.append(f"LSSVMHead: {error}")
        return problems


def _load_made(meta: dict[str, Any], state: dict[str, Tensor], device: torch.device) -> tuple[dict[str, Any], Any]:
    """What was chosen from data, and the calibration."""
    made = {name: (str(text), bool(current)) for name, (text, current) in meta.get("made", {}).items()}
    if "calibration" not in meta:
        return made, None
    return made, Calibration.restore(meta["calibration"], _moved(state["calibration"], device))


def _load_rows(head: HeadBase, meta: dict[str, Any], state: dict[str, Tensor], statistics: Statistics) -> Membership:
    """The fingerprints of the rows held, as far as they were saved and this head wants them."""
    empty = head._no_rows()
    if statistics.empty or empty.unchecked is not None:
        return empty
    if "membership" in state:
        return Membership.from_bytes(tensor_to_bytes(state["membership"]))
    return empty.dropped(meta.get("unchecked") or "it was loaded from a file that has no fingerprints of rows")


def _agreed_after_loading(statistics: Statistics | None, rows: Membership) -> Membership | None:
    """The rows that were agreed on, as far as that follows from what is saved: none, all, or not known."""
    if statistics is None or not (statistics.marked or statistics.severed):
        return Membership(())
    return None if checks.is_fake(statistics.counts) or statistics.severed or statistics.has_pending else rows


def _load_compact(
    engine: Compact,
    grid: FixedPoint | None,
    meta: dict[str, Any],
    solution: dict[str, Tensor],
    P: Tensor,
    counts: Tensor,
) -> None:
    if meta["kind"] is not None:
        engine.choices = GridChoices(meta["kind"], grid, grid_from_json(meta["target"]))
        engine.counts, engine.n = _moved(counts, engine.device), float(meta["n"])
        engine.solution.set_base(solution["w"], solution["beta"], solution["mu"], float(meta["base"]), P=P)


def _shapes(head: HeadBase) -> dict[str, tuple[int, ...]]:
    J, K = head.in_features, head.num_classes
    D = J + (head.intercept == "penalized")
    pairs = K * (K - 1) // 2
    return {"P": (pairs, D, D), "w": (J, pairs)} if head.multiclass == "ovo" else {"P": (D, D), "w": (J, K)}


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device=device, copy=True)


def freeze(head: HeadBase) -> dict[str, Any]:
    """The head's attributes for pickling: pending rows are folded in, caches that can be rebuilt are left out."""
    with head._lock, torch.inference_mode(False), torch.no_grad():
        head._current()
        head._engine.settle()
        head._rows = head._rows.hashed()
        if head.statistics is not None and not checks.is_fake(head.counts) and head.statistics.has_pending:
            head._ledger.copied()
        state = head.__dict__.copy()
        del state["_lock"]
        state["_whitened"] = state["_published"] = None
        state["_agreed_rows"] = _agreed_after_loading(head.statistics, head._rows)  # no trace of rows removed since
        state["_buffers"] = {k: dict.__getitem__(head._buffers, k) for k in head._buffers}
        return state


def thaw(head: HeadBase, state: dict[str, Any]) -> None:
    """Undo :func:`freeze`."""
    buffers = state.pop("_buffers")
    head.__dict__.update(state)
    give_lock(head)
    make_live(head, buffers)


def move(head: HeadBase, device: torch.device) -> None:
    """Everything to another device, or nothing: the state is built there first, and then takes the place of this one."""
    if device == head.device:
        return
    if device.type == "meta":
        raise RuntimeError(
            "a head cannot move to the meta device: tensors there hold no data, and its samples would be lost"
        )
    with head._lock, torch.inference_mode(False), torch.no_grad():
        solution = head._engine.state()
        P = head.P.to(device, copy=True)
        weight = head._options.class_weight
        options = Options(head.rho, head.intercept, weight.to(device) if isinstance(weight, Tensor) else weight)
        statistics, engine = head.statistics, None
        moved = {k: v.to(device, copy=True) for k, v in solution.items()}
        if statistics is not None:
            statistics = statistics.to(device)
            engine = engine_for(statistics, options, head.multiclass)
            engine.restore(moved, P)
        else:
            engine = Compact(head.in_features, head.num_classes, options, device)
            engine.take_over(head._engine, moved, P)
        made = head._made
        version = head._version
        head._adopt_parts(statistics, engine, head._rows, head._agreed_rows, head._ledger, head._uncertifiable)
        head._made = {n: (head._version if v == version else v, text) for n, (v, text) in made.items()}
        make_live(head)
