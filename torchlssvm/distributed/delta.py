"""Deltas: what changed on a node, as sums that can be shipped and merged (algorithms 4 and 5)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchlssvm.distributed.held import check_enough, check_held, least_samples
from torchlssvm.errors import RemovalError, VerificationError
from torchlssvm.fingerprint import fingerprint
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.functional.modes import exactly
from torchlssvm.heads import AttachedClassifier, LSSVMHead
from torchlssvm.heads.ledger import Ledger
from torchlssvm.heads.persistence import checksum, pack
from torchlssvm.statistics import Statistics

if TYPE_CHECKING:
    from typing_extensions import Self

FORMAT = "torchlssvm-delta-1"


def head_of(target: Any) -> tuple[LSSVMHead, Statistics]:
    """The head, or the head of an attached classifier, and its statistics; they must be exact."""
    head = target.head if isinstance(target, AttachedClassifier) else target
    if not isinstance(head, LSSVMHead):
        raise ValueError(f"needed an LSSVMHead, or what attach() returns with one; got {type(head).__name__}")
    stats = head._need_statistics("exchanging changes")
    if not stats.exact:
        raise ValueError(
            "exchanging changes needs a grid: float64 sums depend on the order; use grid=FixedPoint(limit)"
        )
    return head, stats


def fingerprint_of(target: Any, given: str | None) -> str | None:
    """The fingerprint in use: the one given, else that of an attached classifier's backbone."""
    if given is None and isinstance(target, AttachedClassifier):
        return fingerprint(target.backbone)
    return given


class Delta:
    """What changed on a node: sums of what was added minus sums of what was removed, and an id.

    ``m_i = {l_ic, M_ic, v_ic}`` of equations (36) and (37), for any number of classes. A delta needs no model: it may remove
    samples that this node never held. Make one with :meth:`take` (a head's pending changes), :meth:`like` (empty, to be filled)
    or :meth:`load`.

    >>> from torchlssvm import FixedPoint, LSSVMHead
    >>> x, y = torch.randn(30, 4), torch.arange(30) % 2
    >>> node, master = (LSSVMHead(4, 2, grid=FixedPoint(8.0)) for _ in range(2))
    >>> delta = Delta.take(node.add(x, y))
    >>> merge(master, delta).digest() == node.digest()
    True
    >>> merge(master, Delta.like(master).remove(x[:3], y[:3])).n
    27
    """

    def __init__(self, statistics: Statistics, *, fingerprint: str | None = None, id: str | None = None):
        """Wrap statistics, which may be negative."""
        if not isinstance(statistics, Statistics):
            raise ValueError(
                f"a Delta wraps Statistics, got {type(statistics).__name__}: Delta.take(head) has a head's changes, "
                "Delta.like(head) is empty"
            )
        self.statistics = statistics
        self.fingerprint = fingerprint
        self.id = os.urandom(16).hex() if id is None else id
        self._ledger = Ledger()

    @property
    def keys(self) -> dict[bytes, int]:
        """Hashes of the samples whose ids were given, with their net count; never written to a file."""
        return self._ledger.keys

    @classmethod
    def like(cls, target: Any, *, fingerprint: str | None = None) -> Self:
        """An empty delta for a head: same shape, same grid."""
        _, stats = head_of(target)
        out = stats.zero()
        out._wanted = type(out._wanted)(None, stats.grid, stats.target_grid)
        return cls(out, fingerprint=fingerprint_of(target, fingerprint))

    @classmethod
    @exactly
    def take(cls, target: Any, *, fingerprint: str | None = None) -> Self:
        """The head's pending changes; they count as agreed from now on, so that no two deltas hold the same change.

        For nodes that send files. Ranks of one group keep their changes for :func:`sync`.
        """
        head, stats = head_of(target)
        head._current()  # removals that cannot be are found here
        delta = cls(stats.pending(), fingerprint=fingerprint_of(target, fingerprint))
        delta._ledger.keys = dict(head._ledger.keys)
        agree(head)
        return delta

    @exactly
    def add(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> Self:
        """Add samples. x: (B, J); y: (B,) labels or (B, K) targets."""
        return self._change(x, y, weight, ids, 1)

    @exactly
    def remove(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> Self:
        """Remove samples, wherever they are held."""
        return self._change(x, y, weight, ids, -1)

    def _change(self, x: Any, y: Any, weight: Any, ids: Any, sign: int) -> Self:
        batch = self.statistics.check(x, y, weight, ids)
        self.statistics.change([(batch, sign)])
        self._ledger.note(batch, sign, self.statistics.grid)
        return self

    @property
    def least_samples(self) -> int | None:
        """The smallest number of samples that provably went into the sums of any class; None if nothing changed."""
        return least_samples(self.statistics)

    def digest(self) -> str:
        """SHA-256 of the sums."""
        return self.statistics.digest()

    def save(self, path: str | os.PathLike[str], *, min_samples: int = 0, allow_small: bool = False) -> None:
        """Write to a file that holds sums only; it appears whole or not at all."""
        check_enough(self.statistics, min_samples, allow_small)
        out = self.statistics.state()
        meta = {"format": FORMAT, "id": self.id, "fingerprint": self.fingerprint, "checksum": checksum(out)}
        target = Path(path)
        part = target.with_name(f"{target.name}.{os.urandom(4).hex()}.part")
        try:
            torch.save(out | {"delta": pack(meta)}, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> Self:
        """Read a file that :meth:`save` wrote; VerificationError when it is damaged or something else."""
        try:
            saved = torch.load(path, weights_only=True, map_location="cpu")
            about = json.loads(bytes(saved.pop("delta").tolist()).decode())
            if about["format"] != FORMAT:
                raise ValueError(f"the format is {about['format']!r}, not {FORMAT!r}")
            if checksum(saved) != about["checksum"]:
                raise ValueError("its contents do not have the checksum saved with them")
            stats = _shaped(json.loads(bytes(saved["meta"].tolist()).decode()), device)
            stats.load(saved)
        except OSError:
            raise
        except Exception as error:  # garbage makes the unpickler raise anything
            raise VerificationError(f"{os.fspath(path)} is not a delta, or a damaged one: {error}") from error
        return cls(stats, fingerprint=about["fingerprint"], id=about["id"])

    def __repr__(self) -> str:
        """Id and contents."""
        return f"Delta({self.id}, {self.statistics!r})"


def _shaped(meta: dict[str, Any], device: torch.device | str | None) -> Statistics:
    """Empty statistics of the shape that a header describes."""
    limit = meta.get("limit")
    grid = "auto" if limit is None else FixedPoint(float.fromhex(limit), meta["bits"], meta["headroom"])
    return Statistics(
        meta["features"], meta["classes"], grid=grid, per_class=meta["per_class"], folds=meta["folds"], device=device
    )


@exactly
def merge(target: Any, *deltas: Delta, fingerprint: str | None = None) -> LSSVMHead:
    """Add deltas to a head, all or none (algorithm 5). Each is taken once: its id is remembered, and saved with the head.

    The changes are pending until the next :func:`sync`, if there is one. RemovalError when the result could not be that of
    samples; ValueError when shape, grid or fingerprint differ, or when a delta was merged before.
    """
    head, stats = head_of(target)
    mine = fingerprint_of(target, fingerprint)
    ids = [delta.id for delta in deltas]
    head._ledger.refuse_twice(set(ids))
    if len(set(ids)) < len(ids):
        raise ValueError(f"the same delta is given twice: {sorted(i for i in ids if ids.count(i) > 1)[0]}")
    total = stats.zero()
    for delta in deltas:
        if mine is not None and delta.fingerprint is not None and mine != delta.fingerprint:
            raise ValueError(
                f"the delta {delta.id} is of features with fingerprint {delta.fingerprint}, here it is {mine}"
            )
        part = delta.statistics.to(stats.device)
        stats.compatible(part)
        total.merge(part)
    total.canonicalize()
    head._current()  # what is pending and doubtful is not this call's fault
    if total._sums is not None:
        with head._lock, head._changing():
            stats.merge(total)
            try:
                check_held(stats, total._sums.sums, shrunk=True)
            except RemovalError:
                stats.merge(total, -1)  # integers: exactly as before
                stats.canonicalize()
                head._engine.reset()
                raise
            if stats.marked and stats._base is not None:
                stats._base.shrunk = True
            head._rows = head._rows.dropped("a delta was merged, and deltas carry no fingerprints of rows")
            head._engine.reset()
    for delta in deltas:
        for key, n in delta.keys.items():
            head._ledger.keys[key] = head._ledger.keys.get(key, 0) + n
    head._ledger.merged |= set(ids)
    head._ledger.origins |= set(ids)
    return head


@exactly
def agree(target: Any) -> LSSVMHead:
    """Declare that what this head holds now is what all ranks hold: nothing is pending. Runs no collective.

    For a head that every rank loaded from one file, or got as a copy; the next :func:`sync` checks that they are the same.
    """
    head, stats = head_of(target)
    head._current()
    stats.mark()
    ledger = head._ledger
    ledger.commit(ledger.epoch, "" if stats.empty else stats.digest(), ledger.merged, ledger.sink)
    return head


class Status(NamedTuple):
    """How often ranks agreed, the digest they agreed on (empty: on nothing yet), and whether anything changed here since."""

    epoch: int
    agreed: str
    pending: bool


@exactly
def status(target: Any) -> Status:
    """Where a head stands between its ranks. Runs no collective.

    >>> from torchlssvm import FixedPoint, LSSVMHead
    >>> head = LSSVMHead(2, 2, grid=FixedPoint(1.0)).add(torch.eye(2), torch.tensor([0, 1]))
    >>> status(head), status(agree(head)).pending
    (Status(epoch=0, agreed='', pending=True), False)
    """
    head, stats = head_of(target)
    return Status(head._ledger.epoch, head._ledger.agreed, not stats.pending().empty)


@exactly
def discard(target: Any) -> LSSVMHead:
    """Drop what this rank changed since the last agreement. Runs no collective."""
    head, stats = head_of(target)
    stats.adopt(stats.agreed())
    ledger = head._ledger
    ledger.commit(ledger.epoch, ledger.agreed, ledger.merged - ledger.deltas, ledger.sink)
    head._restart()
    return head
