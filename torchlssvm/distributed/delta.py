"""Deltas: what changed on a node, as sums that can be shipped and merged (algorithms 4 and 5)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchlssvm.backbone_hash import fingerprint
from torchlssvm.distributed.sum_checks import check_enough, check_held, least_samples
from torchlssvm.errors import RemovalError, VerificationError
from torchlssvm.functional import checks
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.functional.modes import exactly
from torchlssvm.functional.row_fingerprints import KEY_BYTES
from torchlssvm.linear import AttachedClassifier, LSSVMHead
from torchlssvm.linear.checkpoint import checksum, pack
from torchlssvm.linear.membership import FingerprintTable, RowChange
from torchlssvm.linear.merge_history import MergeHistory, add_to, as_loaded, pending
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.marking import Base

if TYPE_CHECKING:
    from typing_extensions import Self

FORMAT = "torchlssvm-delta-1"


def head_of(target: Any) -> tuple[LSSVMHead, Statistics]:
    """The head, or the head of an attached classifier, and its statistics; they must be exact."""
    head = target.head if isinstance(target, AttachedClassifier) else target
    if not isinstance(head, LSSVMHead):
        raise ValueError(f"needed an LSSVMHead, or what attach() returns with one; got {type(head).__name__}")
    stats = head.need_statistics("exchanging changes")
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

    ``origins`` names what else its changes may be known as: deltas that the head merged, copies and files of the head. A
    receiver that has one of them refuses this delta: its samples would count twice. ``uncertifiable``: why the changes are
    not exactly those of samples, if a head that was so gave them; it goes on to whoever merges them.

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
        self.statistics = statistics.copy() if statistics.marked else statistics
        self.fingerprint = fingerprint
        self.id = os.urandom(16).hex() if id is None else id
        self.uncertifiable: str | None = None
        self.origins: set[str] = set()
        self._ledger = MergeHistory()
        self._rows: FingerprintTable | RowChange = (
            FingerprintTable(os.urandom(KEY_BYTES)) if statistics.empty else RowChange(None)
        )
        self._loan: Loan | None = None

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
        """The head's pending changes, but for those that other deltas taken before still hold.

        They stay pending in the head until they are handed over: when :meth:`save` has written the file, when :func:`merge`
        or a :func:`sync` has put the delta into another head, or with :meth:`commit`. Until then nothing is lost: when a save
        fails, or the delta is dropped, the next ``take`` has the changes. And nothing counts twice: a delta whose changes
        have left the head in another way (``sync``, ``agree``, ``discard``, a load, another delta) is refused.

        For nodes that send files. Ranks of one group keep their changes for :func:`sync`.
        """
        head, stats = head_of(target)
        refuse_severed(stats)
        head.solve()  # removals that cannot be are found here
        ledger = head.history
        delta = cls(stats.pending(), fingerprint=fingerprint_of(target, fingerprint))
        own = delta._ledger = MergeHistory(keys=dict(ledger.keys), ids=dict(ledger.ids))
        rows = head.rows.pending()
        origins = set(ledger.origins)
        for other in ledger.outstanding():
            if other.statistics.num_classes != stats.num_classes:  # classes were added since: it cannot be handed over
                ledger.give_back(other)
                continue
            delta.statistics.merge(other.statistics.to(stats.device), -1)
            for mine, theirs in ((own.keys, other._ledger.keys), (own.ids, other._ledger.ids)):
                add_to(mine, theirs, -1)
            rows = rows.plus(other.rows, -1)
            origins -= other._loan.origins
        delta.statistics.canonicalize()
        delta._rows = rows
        delta.uncertifiable = head.uncertifiable
        ledger.turn += 1
        if not delta.statistics.empty:
            delta.origins = set(map(as_loaded, origins))
            delta._loan = Loan(head, ledger, ledger.turn, origins)
            ledger.lend(delta)
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
        if self._loan is not None:
            raise ValueError(
                f"the delta {self.id} holds changes of a head that are not handed over yet: put others into another delta, "
                "Delta.like(head), and merge both"
            )
        batch = self.statistics.check(x, y, weight, ids)
        self.statistics.change([(batch, sign)])
        self._ledger.note(batch, sign, self.statistics.grid)
        if isinstance(self._rows, FingerprintTable) and len(batch) and not checks.is_fake(batch.x):
            self._rows = self._rows.noted(batch, sign)
        return self

    @property
    def rows(self) -> RowChange:
        """The rows in this delta, where they are known: they are never written to a file."""
        if isinstance(self._rows, FingerprintTable):
            self._rows = self._rows.hashed()
            return RowChange({self._rows.key: self._rows.whole()})
        return self._rows

    @property
    def least_samples(self) -> int | None:
        """The smallest number of distinct samples that provably went into the sums of any class; None if nothing changed."""
        return least_samples(self.statistics, self.rows)

    def digest(self) -> str:
        """SHA-256 of the sums."""
        return self.statistics.digest()

    def save(self, path: str | os.PathLike[str], *, min_samples: int = 0, allow_small: bool = False) -> None:
        """Write to a file that holds sums only; it appears whole or not at all.

        When the file is there, the changes are handed over. When it is refused or fails, they are the head's again: take
        them once more, or save this delta again while nobody else has taken them.
        """
        claims = claim(self)
        target = Path(path)
        part = target.with_name(f"{target.name}.{os.urandom(4).hex()}.part")
        try:
            check_enough(self.statistics, self.rows, min_samples, allow_small)
            out = self.statistics.state()
            meta = {
                "format": FORMAT, "id": self.id, "fingerprint": self.fingerprint, "checksum": checksum(out),
                "origins": sorted(self.origins), "uncertifiable": self.uncertifiable,
            }  # fmt: skip
            with part.open("wb") as file:
                torch.save(out | {"delta": pack(meta)}, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except BaseException:
            if self._loan is not None:
                self._loan.ledger.give_back(self)
            raise
        finally:
            part.unlink(missing_ok=True)
        hand_over(claims, self)

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
            origins = set(map(str, about.get("origins", [])))
        except OSError:
            raise
        except Exception as error:  # garbage makes the unpickler raise anything
            raise VerificationError(f"{os.fspath(path)} is not a delta, or a damaged one: {error}") from error
        out = cls(stats, fingerprint=about["fingerprint"], id=about["id"])
        out.origins, out.uncertifiable = origins, about.get("uncertifiable")
        return out

    # -- handing over --------------------------------------------------------------------------------------------------

    @exactly
    def commit(self) -> Self:
        """Count the changes as handed over: for a delta that is sent in another way than save, merge and sync."""
        hand_over(claim(self), self)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying, once the changes are handed over: else both this and the head would have them."""
        if self._loan is not None:
            raise ValueError(
                f"the delta {self.id} holds changes that are still pending in their head: save it to a file, or call commit() "
                "first, which counts them as handed over"
            )
        return vars(self) | {"_rows": RowChange(None)}  # no fingerprint leaves the process

    def __repr__(self) -> str:
        """Id and contents."""
        return f"Delta({self.id}, {self.statistics!r})"


class Loan(NamedTuple):
    """Whose pending changes a delta holds, as of which turn of the ledger, and which of the ledger's origins are in them."""

    head: LSSVMHead
    ledger: MergeHistory
    turn: int
    origins: set[str]


def claim(*deltas: Delta) -> list[tuple[Statistics, Base]]:
    """What heads will have agreed on once their changes in these deltas are handed over; changes nothing.

    ValueError if the changes of a delta have gone another way.
    """
    parts: dict[int, tuple[Statistics, Statistics]] = {}
    for delta in deltas:
        loan = delta._loan
        if loan is None:
            continue
        stats, ledger = loan.head.statistics, loan.ledger
        known = loan.head.history is ledger and stats is not None and not stats.severed
        if known and delta not in ledger.outstanding() and ledger.turn == loan.turn:
            ledger.lend(delta)  # given back, and nobody has taken it since
        if not known or stats is None or delta not in ledger.outstanding():
            raise ValueError(
                f"the changes of the delta {delta.id} are not its own any more: they went back to the head, or left it with "
                "another delta, a sync, agree, discard or a load. Nothing was done: Delta.take(head) has what is pending."
            )
        part = delta.statistics.to(stats.device)
        stats.compatible(part)
        parts[id(stats)] = (stats, parts[id(stats)][1] + part if id(stats) in parts else part)
    return [(stats, stats.advanced(part)) for stats, part in parts.values()]


def hand_over(claims: list[tuple[Statistics, Base]], *deltas: Delta) -> None:
    """The changes are somewhere else now: to the heads that they come from they count as agreed on."""
    for stats, base in claims:
        stats.rebase(base)
    for delta in deltas:
        if delta._loan is None:
            continue
        head, ledger, _, origins = delta._loan
        delta._loan = None
        ledger.give_back(delta)
        ledger.agreed = None
        ledger.merged.add(delta.id)  # its samples are here: it must not come back
        ledger.origins -= origins
        add_to(ledger.keys, delta.keys, -1)
        add_to(ledger.ids, delta._ledger.ids, -1)
        if not pending(head.statistics):
            head.rows.agree()
        else:
            head.rows.agree_on(delta.rows)


def refuse_severed(stats: Statistics) -> None:
    """ValueError for sums that were saved with removals pending: what was agreed on is not known."""
    if stats.severed:
        raise ValueError(
            "this head was saved or pickled while removals were pending, and what was agreed on is not kept beside an erasure: "
            "the samples held are right, but what changed since the last agreement is not known. If the others hold the same "
            "(the removals reached them, or all ranks loaded this file), agree(head) says so; else load a checkpoint that was "
            "saved after a sync and repeat the removals."
        )


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
    names = [name for delta in deltas for name in {delta.id} | delta.origins]
    for delta in deltas:
        refuse_own(head, delta)
    head.history.refuse_twice(set(names))
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the same delta, or a part of it, is given twice: {twice}")
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
    head.solve()  # what is pending and doubtful is not this call's fault
    claims = claim(*deltas)
    if total._sums is not None:
        with head.locked(), head.changing():
            stats.merge(total)
            try:
                check_held(stats, total._sums.sums, shrunk=True)
            except RemovalError:
                stats.merge(total, -1)  # integers: exactly as before
                stats.canonicalize()
                head.solver.reset()
                raise
            if stats.marked and stats._base is not None:
                stats._base.shrunk = True
            head.rows.drop("a delta was merged, and deltas carry no fingerprints of rows")
            head.solver.reset()
    ledger = head.history
    hand_over(claims, *deltas)
    for delta in deltas:
        add_to(ledger.keys, delta.keys)
        add_to(ledger.ids, delta._ledger.ids)
        head.mark_uncertifiable(delta.uncertifiable)
    ledger.merged |= set(names)
    ledger.origins |= set(names)
    return head


def refuse_own(head: LSSVMHead, delta: Delta) -> None:
    """ValueError for a delta with changes of this very head."""
    if delta._loan is not None and delta._loan.head is head:
        raise ValueError(f"the delta {delta.id} holds changes of this very head: they would count twice")


@exactly
def agree(target: Any) -> LSSVMHead:
    """Declare that what this head holds now is what all ranks hold: nothing is pending. Runs no collective.

    For a head that every rank loaded from one file, or got as a copy; the next :func:`sync` checks that they are the same.
    """
    head, stats = head_of(target)
    head.solve()
    stats.mark()
    ledger = head.history
    ledger.commit(ledger.epoch, "" if stats.empty else stats.digest(), ledger.merged, ledger.sink)
    head.rows.agree()
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
    return Status(head.history.epoch, head.history.agreed_digest(stats), stats.severed or not stats.pending().empty)


@exactly
def discard(target: Any) -> LSSVMHead:
    """Drop what this rank changed since the last agreement. Runs no collective."""
    head, stats = head_of(target)
    refuse_severed(stats)
    stats.adopt(stats.agreed())
    ledger = head.history
    ledger.commit(ledger.epoch, ledger.agreed, ledger.merged - ledger.deltas, ledger.sink)
    head.rows.agree(head.rows.agreed_or_unknown())
    head.invalidate()
    return head
