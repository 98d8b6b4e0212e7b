"""Sufficient statistics of a least-squares head: the truth from which every weight is derived.

For features phi on a grid (integers q) and targets t the statistics are

    M = sum [q; 1] [q; 1]^T      V = sum [q; 1] t^T      T = sum t^2

in total or per class. They are integers, so sums do not depend on order, batch size, device or the number of machines,
and removing a sample gives, bit for bit, the state that never saw it. Labels are targets -1/+1; what is stored for them
are class sums and counts, from which any coding follows.

The digest (SHA-256) is over bytes anybody can rebuild from the samples:

    digest  = SHA256(header || hash of group 0 || hash of group 1 || ...)
    header  = UTF-8 JSON, sorted keys, separators "," and ":", of
              {"bits","classes","features","folds","format":"torchlssvm-statistics-1","headroom","kind","limit","per_class"
              [,"target_bits","target_headroom","target_limit"]}; limits as float.hex(); kind "labels", "values" or "empty"
    group   = fold * (classes if per_class else 1) + (class if per_class else 0)
    hash    = SHA256(little-endian int64 of: the lower triangle of sum q q^T row by row (J (J+1) / 2 numbers);
              sum z q^T row by row; sum z z^T row by row)
    z       = one-hot label (K), in total; 1, per class; [1, target steps] (K + 1) for values

Samples of weight m count m times. With folds, a sample belongs to fold blake2b-64(str(id)) mod folds (big-endian).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional import checks, gram
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.functional.modes import exactly
from torchlssvm.statistics.batch import Choices
from torchlssvm.statistics.integrity import Integrity
from torchlssvm.statistics.marking import Marking

__all__ = ["FixedPoint", "Statistics"]

FORMAT = "torchlssvm-statistics-1"


class Statistics(Marking):
    """Exact sums over samples; a group under ``+`` and ``-``.

    Args:
        in_features: J.
        num_classes: K, the number of classes or of targets.
        grid: a :class:`FixedPoint`, ``"auto"`` (a power of two from the first batch) or None (float64 sums: the same
            interface, ``exact`` is False, and there is no digest).
        target_grid: the same for float targets.
        per_class: keep M for each class.
        folds: keep everything for each of so many folds; samples then need ids.
        device: where the sums live.

    >>> import torch
    >>> x, y = torch.randn(100, 8), torch.randint(3, (100,))
    >>> everything = Statistics(8, 3, grid=FixedPoint(8.0)).add(x, y)
    >>> rest = Statistics(8, 3, grid=FixedPoint(8.0)).add(x[10:], y[10:])
    >>> everything.remove(x[:10], y[:10]) == rest, everything.digest() == rest.digest()
    (True, True)
    """

    # -- the group -----------------------------------------------------------------------------------------------------

    def compatible(self, other: Statistics) -> None:
        """Raise ValueError naming the first difference that keeps two statistics from being added."""
        for name in ("in_features", "num_classes", "per_class", "folds", "exact", "device"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(f"cannot combine statistics: {name} is {mine!r} here and {theirs!r} there")
        for name in ("kind", "grid", "target_grid"):  # None: still open
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine and theirs and mine != theirs:
                raise ValueError(f"cannot combine statistics: the {name} is {mine} here and {theirs} there")

    def merge(self, other: Statistics, sign: int = 1, held: bool = False) -> None:
        """self += sign * other; with ``held``, RemovalError if counts or diagonals would fall below zero."""
        self.compatible(other)
        self.check_whole()
        other.check_whole()
        if other._sums is None:
            return
        if held and sign < 0 and self._sums is None:
            raise checks.removal_error("the machine is empty")
        other._sums.settle()
        self._reserve(*((0.0, other._gross) if held and sign < 0 else (other._gross, 0.0)))
        if self._sums is not None:
            self._sums.settle()
        side = (
            self._side if self._side.ndim == other._side.ndim else torch.zeros_like(other._side)
        ) + sign * other._side
        diag = sign * other._sums.diag + (0 if self._sums is None else self._sums.diag)
        if held and sign < 0:
            counts = checks.to_host(side if side.ndim == 2 else side[:, 0, 0])
            if counts is not None and min(counts[0]) < -self._slack():
                raise checks.removal_error(f"a count would fall to {min(counts[0]):g}")
            self._check_diagonal(diag)
        with self.integrity:
            mine = self._decide(other._choices)
            for group, theirs in other._sums.sums.items():
                mine.protect(group)
                if group in mine.sums:
                    mine.sums[group].add_(theirs, alpha=sign)
                else:
                    mine.sums[group] = sign * theirs
                mine.touched.add(group)
            mine.diag, self._side = diag, side
            self._gross += other._gross
            self._n += sign * other._n
            if self._base is not None:
                self._base.shrunk |= sign < 0

    def copy(self) -> Statistics:
        """An independent copy."""
        return self._combined(self.zero(), 1, 1)

    def zero(self) -> Statistics:
        """The neutral element."""
        out = object.__new__(Statistics)
        for name in ("in_features", "num_classes", "per_class", "folds", "exact", "device", "_wanted"):
            setattr(out, name, getattr(self, name))
        out._base, out._severed, out.integrity = None, False, Integrity()
        out._reset()
        return out

    @exactly
    def _combined(self, other: Statistics, first: int, second: int) -> Statistics:
        out = self.zero()
        out.merge(self, first)
        out.merge(other, second)
        out.canonicalize()
        return out

    def __add__(self, other: Statistics) -> Statistics:
        """The statistics of both sets of samples."""
        return self._combined(other, 1, 1)

    def __sub__(self, other: Statistics) -> Statistics:
        """The statistics of these samples without the others."""
        return self._combined(other, 1, -1)

    def __neg__(self) -> Statistics:
        """The delta that removes these samples."""
        return self._combined(self.zero(), -1, 1)

    def __eq__(self, other: object) -> bool:
        """Whether all sums, shapes and grids are the same."""
        if not isinstance(other, Statistics):
            return NotImplemented
        self.canonicalize()
        other.canonicalize()
        if self.header() != other.header() or self.device != other.device:
            return False
        if self._sums is None or other._sums is None:
            return self._sums is other._sums
        if not torch.equal(self._side, other._side):
            return False
        groups = set(self._sums.sums) | set(other._sums.sums)
        return all(torch.equal(self._sums.total(g), other._sums.total(g)) for g in groups)

    __hash__ = None  # type: ignore[assignment]

    @exactly
    def canonicalize(self) -> None:
        """Bring all rows into the sums; sums that are all zero go back to the state before any data."""
        self.check_whole()
        if self._sums is None:
            return
        self._sums.settle()
        if checks.is_fake(self._side) or not self.drained or not self._small(self._side):
            return
        left = {g: v for g, v in self._sums.sums.items() if not self._small(v)}
        self._sums.sums = left
        if not left:
            with self.integrity:
                self._reset()

    def _small(self, sums: Tensor) -> bool:
        """Whether sums are zero: exactly on a grid, else up to rounding of what went through them."""
        return not bool(sums.any()) if self.exact else bool(sums.abs().amax() <= 1e-9 * self._gross)

    # -- digest and state ----------------------------------------------------------------------------------------------

    def header(self) -> bytes:
        """The canonical description of shape and grid that the digest starts with."""
        meta: dict[str, Any] = {
            "format": FORMAT,
            "features": self.in_features,
            "classes": self.num_classes,
            "folds": self.folds,
            "per_class": self.per_class,
            "kind": self.kind or "empty",
        }
        for prefix, grid in (("", self.grid), ("target_", self.target_grid)):
            if grid is not None:
                meta |= {
                    f"{prefix}limit": grid.limit.hex(),
                    f"{prefix}bits": grid.bits,
                    f"{prefix}headroom": grid.headroom,
                }
        return json.dumps(meta, sort_keys=True, separators=(",", ":")).encode()

    def digest(self) -> str:
        """SHA-256, as hex, of the canonical bytes: the same on every machine, for every order of the same samples."""
        if not self.exact:
            raise ValueError(
                "no digest without a grid: float64 sums depend on the order of the samples; use grid='auto'"
            )
        self.canonicalize()
        outer = hashlib.sha256(self.header())
        if self._sums is not None:
            touched = set(self._sums.touched)
            self._hashes = {g: h for g, h in self._hashes.items() if g not in touched}
            self._sums.touched -= touched
            for group in range(self._sums.groups):
                if group not in self._hashes:
                    inner = hashlib.sha256(gram.lower_bytes(self._sums.total(group), self.in_features, self._sums.R))
                    inner.update(self._side_bytes(group))
                    self._hashes[group] = inner.digest()
                outer.update(self._hashes[group])
        return outer.hexdigest()

    def _side_bytes(self, group: int) -> bytes:
        """Sum z z^T of a group: the counts on a diagonal, one count, or the moments of [1, t]."""
        if self.per_class:
            part = self._side[group // self.num_classes, group % self.num_classes][None]
        else:
            part = self._side[group] if self._side.ndim == 3 else torch.diag(self._side[group])
        return part.cpu().numpy().astype("<i8", copy=False).tobytes()

    def state(self, whole: bool = False) -> dict[str, Tensor]:
        """Everything, as flat tensors: what is saved. Holds no raw sample, and nothing of one that was removed.

        With a mark and removals since, what was agreed on is left out (see :mod:`torchlssvm.statistics.marking`); ``whole``
        keeps it, for what stays in this process.
        """
        self.canonicalize()
        known = self.exact and self._sums is not None and not checks.is_fake(self._side)
        gross = self._largest() if known else self._gross  # of the sums, not of what went through them
        meta = json.loads(self.header()) | {"exact": self.exact, "gross": gross, "n": self._n}
        out = {"counts": self._side.clone()}
        if self._sums is not None:
            groups = sorted(g for g, v in self._sums.sums.items() if not known or bool(v.any()))
            meta["groups"] = groups
            if groups:
                out["sums"] = torch.stack([self._sums.sums[g] for g in groups])
        base, about = self.base_state(whole)
        out, meta = out | base, meta | about
        return out | {"meta": torch.frombuffer(bytearray(json.dumps(meta).encode()), dtype=torch.uint8)}

    @exactly
    def load(self, state: dict[str, Tensor]) -> None:
        """Replace the sums by saved ones; ValueError, with nothing changed, when they do not fit or are damaged."""
        try:
            meta = json.loads(bytes(state["meta"].tolist()).decode())
            mine = json.loads(self.header())
            for name in ("format", "features", "classes", "folds", "per_class", "exact"):
                here = self.exact if name == "exact" else mine[name]
                if meta[name] != here:
                    raise ValueError(f"{name} is {meta[name]!r} in the saved statistics and {here!r} here")
            out = self.zero()
            if meta["kind"] != "empty":
                grids = []
                for prefix in ("", "target_"):
                    known = f"{prefix}limit" in meta
                    numbers = (meta.get(f"{prefix}{n}") for n in ("bits", "headroom"))
                    grids.append(FixedPoint(float.fromhex(meta[f"{prefix}limit"]), *numbers) if known else None)
                if self._wanted.grid is not None and grids[0] != self._wanted.grid:
                    raise ValueError(f"the grid is {grids[0]} in the saved statistics and {self._wanted.grid} here")
                sums = out._decide(Choices(meta["kind"], *grids))
                size, groups = gram.packed_size(self.in_features, sums.R), meta["groups"]
                saved = state["sums"] if groups else torch.zeros(0, size, dtype=sums.dtype)
                for name, tensor, shape in (
                    ("sums", saved, (len(groups), size)),
                    ("counts", state["counts"], out._side.shape),
                ):
                    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != sums.dtype:
                        raise ValueError(
                            f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, not {tuple(shape)}"
                        )
                sums.sums = {int(g): v.to(self.device, copy=True) for g, v in zip(groups, saved, strict=True)}
                if any(not 0 <= g < sums.groups for g in sums.sums):
                    raise ValueError(f"unknown groups {groups}")
                sums.refresh_diagonals()
                out._side = state["counts"].to(self.device, copy=True)
                out._gross, out._n = float(meta["gross"]), float(meta["n"])
            out.load_base(state, meta.get("base"))
        except (KeyError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(f"the saved statistics are damaged: {error!r}") from error
        self.__dict__.update(out.__dict__)

    def to(self, device: torch.device | str) -> Statistics:
        """These statistics on another device (itself when it is there already)."""
        target = torch.empty(0, device=device).device
        if target == self.device:
            return self
        out = self.zero()
        out.device = target
        out._reset()
        out.load({k: v if k == "meta" else v.to(target) for k, v in self.state(whole=True).items()})
        return out

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: no raw rows, no scratch."""
        fixed = ("in_features", "num_classes", "per_class", "folds", "exact", "device", "_wanted")
        return {name: getattr(self, name) for name in fixed} | {"state": self.state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo :meth:`__getstate__`."""
        saved = state.pop("state")
        self.__dict__.update(state)
        self._base, self.integrity = None, Integrity()
        self._reset()
        self.load(saved)

    def __deepcopy__(self, memo: Any) -> Statistics:
        """A copy in the same process keeps what was agreed on, whatever was removed since."""
        out = self.zero()
        out.load(self.state(whole=True))
        return out

    def __repr__(self) -> str:
        """Shape, grid and count."""
        split = ", per_class=True" if self.per_class else ""
        return f"Statistics({self.in_features}, {self.num_classes}, n={self.n}, grid={self.grid}{split}, device={self.device})"
