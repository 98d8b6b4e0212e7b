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
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.heads.calibration import Calibration, choices_to_save
from torchlssvm.heads.ledger import Ledger, pending
from torchlssvm.statistics.batch import Choices

if TYPE_CHECKING:
    from torchlssvm.heads.base import HeadBase

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
        with torch.inference_mode(False), torch.no_grad():
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
    return torch.frombuffer(bytearray(json.dumps(meta, sort_keys=True).encode()), dtype=torch.uint8)


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
            if head._ledger.to_json() != Ledger().to_json():
                meta["ledger"] = head._ledger.to_json()
            if not checks.is_fake(head.counts) and pending(head.statistics):
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
            meta |= {"grid": _numbers(head.grid), "target": _numbers(engine.choices.target_grid)}
        return out | {"options": pack(meta | {"checksum": checksum(out)})}


def config(head: HeadBase) -> dict[str, Any]:
    """The arguments that make an empty head like this one, as primitives."""
    weight, stats = head.class_weight, head.statistics
    wanted = Choices(None, head._grid, head._target_grid)
    float_sums = stats is not None and not stats.exact
    return {
        "in_features": head.in_features,
        "num_classes": head.num_classes,
        "rho": head.rho,
        "intercept": head.intercept,
        "class_weight": weight.tolist() if isinstance(weight, Tensor) else weight,
        "multiclass": head.multiclass,
        "grid": None if float_sums else _numbers(wanted.grid) or "auto",
        "target_grid": _numbers(wanted.target_grid) or "auto",
        "statistics": stats is not None,
        "per_class": None if stats is None else stats.per_class,
        "folds": 0 if stats is None else stats.folds,
    }


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`config`: keyword arguments of :class:`~torchlssvm.LSSVMHead`."""
    grids = {k: _grid(config[k]) if isinstance(config[k], list) else config[k] for k in ("grid", "target_grid")}
    weight = config["class_weight"]
    return config | grids | {"class_weight": torch.tensor(weight) if isinstance(weight, list) else weight}


def checksum(state: dict[str, Tensor]) -> str | None:
    """SHA-256 of saved tensors, with their names and shapes; None when they carry no data."""
    if checks.is_fake(*state.values()):
        return None
    total = hashlib.sha256()
    for name, value in sorted(state.items()):
        total.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        total.update(value.cpu().reshape(-1).view(torch.uint8).numpy().data)
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
        problems = Problems([k for k in needed if k not in state], [k for k in state if k not in needed + optional], [])
        if problems.missing:
            return problems
        try:
            meta = json.loads(bytes(state["options"].tolist()).decode())
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
            if head.statistics is None and _numbers(head.grid) != meta["grid"]:
                raise ValueError(f"the grid is {_grid(meta['grid'])} in the saved head and {head.grid} here")
            solution = {k[9:]: _moved(v, head.device) for k, v in state.items() if k.startswith("solution.")}
            if head.statistics is not None:
                fresh = head.statistics.zero()
                fresh.load({k[11:]: v for k, v in state.items() if k.startswith("statistics.")})
                if fresh.exact and not checks.is_fake(fresh.counts) and fresh.digest() != meta["digest"]:
                    raise VerificationError(
                        "the saved statistics do not have the digest saved with them: the state is damaged"
                    )
                changed = not checks.is_fake(fresh.counts) and pending(fresh)
                ledger = Ledger.from_json(meta.get("ledger"), changed)
                if changed:
                    ledger.origins.add(f"file:{meta['checksum']}")
                head.statistics.__dict__.update(fresh.__dict__)
                head._ledger = ledger
            head._options.rho = float(meta["rho"])
            weight = meta["class_weight"]
            head._options.class_weight = (
                torch.tensor(weight, dtype=torch.float64, device=head.device) if isinstance(weight, list) else weight
            )
            head._unverified = False
            head._uncertifiable = meta.get("uncertifiable")
            if head.statistics is not None:
                head._engine.restore(solution, P)
            else:
                _load_compact(head, meta, solution, P, state["counts"])
            head._version += 1
            _load_made(head, meta, state)
        except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
            problems.errors.append(f"LSSVMHead: {error}")
        return problems


def _load_made(head: HeadBase, meta: dict[str, Any], state: dict[str, Tensor]) -> None:
    """What was chosen from data, with the calibration."""
    made = meta.get("made", {})
    head._made = {name: (head._version if current else -1, text) for name, (text, current) in made.items()}
    head._calibration = None
    if "calibration" in meta:
        head._calibration = Calibration.restore(meta["calibration"], _moved(state["calibration"], head.device))


def _load_compact(head: HeadBase, meta: dict[str, Any], solution: dict[str, Tensor], P: Tensor, counts: Tensor) -> None:
    engine = head._engine
    engine.reset()
    if meta["kind"] is not None:
        engine.choices = Choices(meta["kind"], head.grid, _grid(meta["target"]))
        engine.counts, engine.n = _moved(counts, head.device), float(meta["n"])
        engine.solution.set_base(solution["w"], solution["beta"], solution["mu"], float(meta["base"]), P=P)


def _shapes(head: HeadBase) -> dict[str, tuple[int, ...]]:
    J, K = head.in_features, head.num_classes
    D = J + (head.intercept == "penalized")
    pairs = K * (K - 1) // 2
    return {"P": (pairs, D, D), "w": (J, pairs)} if head.multiclass == "ovo" else {"P": (D, D), "w": (J, K)}


def _numbers(grid: FixedPoint | None) -> list[Any] | None:
    return None if grid is None else [grid.limit.hex(), grid.bits, grid.headroom]


def _grid(numbers: list[Any] | None) -> FixedPoint | None:
    return None if numbers is None else FixedPoint(float.fromhex(numbers[0]), numbers[1], numbers[2])


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device=device, copy=True)


def freeze(head: HeadBase) -> dict[str, Any]:
    """The head's attributes for pickling: pending rows are folded in, caches that can be rebuilt are left out."""
    with torch.inference_mode(False), torch.no_grad():
        head._current()
        head._engine.settle()
        if head.statistics is not None and not checks.is_fake(head.counts) and pending(head.statistics):
            head._ledger.copied()
        state = head.__dict__.copy()
        state["_whitened"] = None
        state["_buffers"] = {k: dict.__getitem__(head._buffers, k) for k in head._buffers}
        return state


def thaw(head: HeadBase, state: dict[str, Any]) -> None:
    """Undo :func:`freeze`."""
    buffers = state.pop("_buffers")
    head.__dict__.update(state)
    make_live(head, buffers)


def move(head: HeadBase, device: torch.device) -> None:
    """Everything to another device, by way of what is saved."""
    if device == head.device:
        return
    saved = {
        k: v if v.dtype == torch.uint8 else v.to(device) for k, v in head.state_dict().items()
    }  # options are read here
    marked = head.statistics is not None and head.statistics.marked
    ledger, moved = head._ledger, head.statistics.to(device) if marked and head.statistics is not None else None
    weight = head._options.class_weight
    if isinstance(weight, Tensor):
        head._options.class_weight = weight.to(device)
    if head.statistics is not None:
        empty = head.statistics.zero()
        empty.device = device
        empty._reset()
        head.statistics.__dict__.update(empty.__dict__)
    else:
        head._engine.device = device
    head._engine.reset()
    make_live(head)
    if load(head, saved).errors:
        raise RuntimeError(f"could not move the head to {device}")
    head._ledger = ledger
    if head.statistics is not None and moved is not None:
        head.statistics.__dict__.update(moved.__dict__)  # with what was agreed on, which is not always saved
