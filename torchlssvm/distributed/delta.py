"""Deltas: the changes of a node as sums that can be shipped and merged (algorithms 4 and 5)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchlssvm.distributed.participant import Participant, fingerprint_of, locked
from torchlssvm.distributed.sum_checks import check_enough, least_samples
from torchlssvm.errors import VerificationError
from torchlssvm.functional import checks
from torchlssvm.functional.byte_tensors import tensor_to_bytes
from torchlssvm.functional.grid import grid_from_fields
from torchlssvm.functional.modes import exactly
from torchlssvm.functional.row_fingerprints import FINGERPRINT_KEY_BYTES
from torchlssvm.linear import LSSVMHead
from torchlssvm.linear.checkpoint import checksum, pack
from torchlssvm.linear.membership import FingerprintChange, FingerprintTable
from torchlssvm.linear.merge_history import MergeHistory, add_to, as_loaded
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.baseline import Baseline
from torchlssvm.untrusted import load_tensors

if TYPE_CHECKING:
    from typing_extensions import Self

DELTA_FORMAT = "torchlssvm-delta-1"


class Delta:
    """The changes of a node: sums of samples added minus sums of samples removed, and an id.

    ``m_i = {l_ic, M_ic, v_ic}`` of equations (36) and (37), for any number of classes. A delta needs no model: it may remove
    samples that this node never held. Make one with :meth:`take` (a head's pending changes), :meth:`like` (empty, to be filled)
    or :meth:`load`.

    ``origins`` names what else its changes may be known as: deltas that the head merged, copies and files of the head. A
    receiver that has one of them refuses this delta: its samples would count twice. ``uncertifiable``: why the changes are
    not exactly those of samples, if a head that was so gave them; it goes on to a head that merges them.

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
        self.ledger = MergeHistory()  # of the samples whose ids were given; never written to a file
        self.loan: Loan | None = None  # the pending changes of a head that are in here, until they are handed over
        self._rows: FingerprintTable | FingerprintChange = (
            FingerprintTable(os.urandom(FINGERPRINT_KEY_BYTES)) if statistics.empty else FingerprintChange(None)
        )

    @property
    def keys(self) -> dict[bytes, int]:
        """Hashes of the samples whose ids were given, with their net count; never written to a file."""
        return self.ledger.keys

    @classmethod
    def like(cls, target: Any, *, fingerprint: str | None = None) -> Self:
        """Make an empty delta for a head: same shape, same grid."""
        stats = Participant(target).statistics
        out = Statistics(
            stats.in_features, stats.num_classes, grid=stats.grid or "auto", target_grid=stats.target_grid or "auto",
            per_class=stats.per_class, folds=stats.folds, normalize=stats.normalize, scale=stats.scale, device=stats.device,
        )  # fmt: skip
        return cls(out, fingerprint=fingerprint_of(target, fingerprint))

    @classmethod
    @exactly
    def take(cls, target: Any, *, fingerprint: str | None = None) -> Self:
        """Take the head's pending changes, but for those that other deltas taken before still hold.

        They stay pending in the head until they are handed over: when :meth:`save` has written the file, when :func:`merge`
        or a :func:`sync` has put the delta into another head, or with :meth:`commit`. Until then nothing is lost: when a save
        fails, or the delta is dropped, the next ``take`` has the changes. And nothing counts twice: a delta whose changes
        have left the head in another way (``sync``, ``agree``, ``discard``, a load, another delta) is refused.

        For nodes that send files. Ranks of one group keep their changes for :func:`sync`.
        """
        with locked(target):
            return cls._taken(Participant(target), fingerprint_of(target, fingerprint))

    @classmethod
    def _taken(cls, source: Participant, fingerprint: str | None) -> Self:
        """Make the delta of what is pending; needs the head's lock."""
        source.refuse_severed()
        source.solve()  # removals that cannot be are found here
        stats, ledger = source.statistics, source.ledger
        delta = cls(stats.pending(), fingerprint=fingerprint)
        own = delta.ledger = MergeHistory(keys=dict(ledger.keys), ids=dict(ledger.ids))
        rows = source.pending_rows()
        origins = set(ledger.origins)
        for other in ledger.outstanding():
            if other.statistics.num_classes != stats.num_classes:  # classes were added since: it cannot be handed over
                ledger.give_back(other)
                continue
            delta.statistics.merge(other.statistics.to(stats.device), -1)
            for mine, theirs in ((own.keys, other.ledger.keys), (own.ids, other.ledger.ids)):
                add_to(mine, theirs, -1)
            rows = rows.plus(other.rows, -1)
            origins -= other.loan.origins
        delta.statistics.canonicalize()
        delta.rows = rows
        delta.uncertifiable = source.head.uncertifiable
        ledger.turn += 1
        if not delta.statistics.empty:
            delta.origins = set(map(as_loaded, origins))
            delta.loan = Loan(source, ledger, ledger.turn, origins)
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
        if self.loan is not None:
            raise ValueError(
                f"the delta {self.id} holds changes of a head that are not handed over yet: put others into another delta, "
                "Delta.like(head), and merge both"
            )
        batch = self.statistics.check(x, y, weight, ids)
        self.statistics.change([(batch, sign)])
        self.ledger.note(batch, sign, self.statistics.grid)
        if isinstance(self._rows, FingerprintTable) and len(batch) and not checks.is_fake(batch.x):
            self._rows = self._rows.noted(batch, sign)
        return self

    @property
    def rows(self) -> FingerprintChange:
        """The rows in this delta, where they are known: they are never written to a file."""
        if isinstance(self._rows, FingerprintTable):
            self._rows = self._rows.hashed()
            return FingerprintChange({self._rows.key: self._rows.whole()})
        return self._rows

    @rows.setter
    def rows(self, rows: FingerprintChange) -> None:
        self._rows = rows

    @property
    def least_samples(self) -> int | None:
        """A lower bound on the number of distinct samples in the sums of any class; None if nothing changed."""
        return least_samples(self.statistics, self.rows)

    def digest(self) -> str:
        """SHA-256 of the sums."""
        return self.statistics.digest()

    def save(self, path: str | os.PathLike[str], *, min_samples: int = 0, allow_small: bool = False) -> None:
        """Write to a file that holds sums only; it appears whole or not at all.

        When the file is there, the changes are handed over. When it is refused or fails, they are the head's again: take
        them once more, or save this delta again while no other delta has taken them.
        """
        with locked(*sources(self)):
            self._save(Path(path), min_samples, allow_small)

    def _save(self, target: Path, min_samples: int, allow_small: bool) -> None:
        claims = claim(self)
        part = target.with_name(f"{target.name}.{os.urandom(4).hex()}.part")
        try:
            check_enough(self.statistics, self.rows, min_samples, allow_small)
            out = self.statistics.state()
            meta = {
                "format": DELTA_FORMAT, "id": self.id, "fingerprint": self.fingerprint, "checksum": checksum(out),
                "origins": sorted(self.origins), "uncertifiable": self.uncertifiable,
            }  # fmt: skip
            with part.open("wb") as file:
                torch.save(out | {"delta": pack(meta)}, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except BaseException:
            if self.loan is not None:
                self.loan.ledger.give_back(self)
            raise
        finally:
            part.unlink(missing_ok=True)
        hand_over(claims, self)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> Self:
        """Read a file that :meth:`save` wrote; VerificationError when it is damaged or something else."""
        try:
            saved = load_tensors(path)
        except OSError:
            raise
        except Exception as error:  # garbage makes the unpickler raise anything
            raise VerificationError(f"{os.fspath(path)} is not a delta: torch.load cannot read it") from error
        if not isinstance(saved, dict) or "delta" not in saved:
            raise VerificationError(f"{os.fspath(path)} is not a delta: another object was saved there")
        try:
            about = json.loads(tensor_to_bytes(saved.pop("delta")).decode())
            if about["format"] != DELTA_FORMAT:
                raise ValueError(f"the format is {about['format']!r}, not {DELTA_FORMAT!r}")
            if checksum(saved) != about["checksum"]:
                raise ValueError("its contents do not have the checksum saved with them")
            stats = _shaped(json.loads(tensor_to_bytes(saved["meta"]).decode()), device)
            stats.load(saved)
            origins = set(map(str, about.get("origins", [])))
        except Exception as error:  # contents of any type and shape
            reason = error if type(error) is ValueError else "its contents cannot be read"
            raise VerificationError(f"{os.fspath(path)} is a damaged delta: {reason}") from error
        out = cls(stats, fingerprint=about["fingerprint"], id=about["id"])
        out.origins, out.uncertifiable = origins, about.get("uncertifiable")
        return out

    # -- handing over --------------------------------------------------------------------------------------------------

    @exactly
    def commit(self) -> Self:
        """Count the changes as handed over: for a delta that is sent in another way than save, merge and sync."""
        with locked(*sources(self)):
            hand_over(claim(self), self)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying, once the changes are handed over: else both this and the head would have them."""
        if self.loan is not None:
            raise ValueError(
                f"the delta {self.id} holds changes that are still pending in their head: save it to a file, or call commit() "
                "first, which counts them as handed over"
            )
        return vars(self) | {"_rows": FingerprintChange(None)}  # no fingerprint leaves the process

    def __repr__(self) -> str:
        """Show the id and the statistics."""
        return f"Delta({self.id}, {self.statistics!r})"


class Loan(NamedTuple):
    """The head whose pending changes a delta holds, as of which turn of its ledger, and the ledger's origins in them."""

    source: Participant
    ledger: MergeHistory
    turn: int
    origins: set[str]


def sources(*deltas: Delta | None) -> list[LSSVMHead]:
    """Return the heads whose pending changes these deltas hold; anything that is no delta holds none."""
    loans = [delta.loan if isinstance(delta, Delta) else None for delta in deltas]
    return [loan.source.head for loan in loans if loan is not None]


def claim(*deltas: Delta) -> list[tuple[Statistics, Baseline]]:
    """Return what heads will have agreed on once their changes in these deltas are handed over; changes nothing.

    ValueError if the changes of a delta have gone another way.
    """
    parts: dict[int, tuple[Statistics, Statistics]] = {}
    for delta in deltas:
        loan = delta.loan
        if loan is None:
            continue
        stats, ledger = loan.source.statistics, loan.ledger
        known = loan.source.ledger is ledger and not stats.severed
        if known and delta not in ledger.outstanding() and ledger.turn == loan.turn:
            ledger.lend(delta)  # given back, and not taken since
        if not known or delta not in ledger.outstanding():
            raise ValueError(
                f"the changes of the delta {delta.id} are not its own any more: they went back to the head, or left it with "
                "another delta, a sync, agree, discard or a load. Nothing was done: Delta.take(head) has what is pending."
            )
        part = delta.statistics.to(stats.device)
        stats.compatible(part)
        parts[id(stats)] = (stats, parts[id(stats)][1] + part if id(stats) in parts else part)
    return [(stats, stats.advanced(part)) for stats, part in parts.values()]


def hand_over(claims: list[tuple[Statistics, Baseline]], *deltas: Delta) -> None:
    """Count changes that are somewhere else now as agreed on, in the heads that they come from."""
    for stats, baseline in claims:
        stats.rebase(baseline)
    for delta in deltas:
        if delta.loan is None:
            continue
        source, ledger, _, origins = delta.loan
        delta.loan = None
        ledger.give_back(delta)
        ledger.agreed = None
        ledger.merged.add(delta.id)  # its samples are here: it must not come back
        ledger.origins -= origins
        add_to(ledger.keys, delta.ledger.keys, -1)
        add_to(ledger.ids, delta.ledger.ids, -1)
        source.advance_rows(delta.rows)


def _shaped(meta: dict[str, Any], device: torch.device | str | None) -> Statistics:
    """Make empty statistics of the shape that a header describes."""
    return Statistics(
        meta["features"], meta["classes"], grid=grid_from_fields(meta) or "auto", per_class=meta["per_class"],
        folds=meta["folds"], normalize=meta.get("normalize"), scale=meta.get("scale"), device=device,
    )  # fmt: skip


@exactly
def merge(target: Any, *deltas: Delta, fingerprint: str | None = None) -> LSSVMHead:
    """Add deltas to a head, all or none (algorithm 5). Each is taken once: its id is remembered, and saved with the head.

    The changes are pending until the next :func:`sync`, if there is one. RemovalError when the result could not be that of
    samples; ValueError when shape, grid or fingerprint differ, or when a delta was merged before.
    """
    with locked(target, *sources(*deltas)):
        return _merge(Participant(target), deltas, fingerprint_of(target, fingerprint))


def _merge(receiver: Participant, deltas: tuple[Delta, ...], mine: str | None) -> LSSVMHead:
    """Add deltas to a head; needs the locks of all heads concerned."""
    stats, ledger = receiver.statistics, receiver.ledger
    names = [name for delta in deltas for name in {delta.id} | delta.origins]
    for delta in deltas:
        refuse_own(receiver, delta)
    ledger.refuse_twice(set(names))
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
    receiver.solve()  # what is pending and doubtful is not this call's fault
    claims = claim(*deltas)
    if not total.empty:
        receiver.add_sums(total)
    hand_over(claims, *deltas)
    for delta in deltas:
        add_to(ledger.keys, delta.ledger.keys)
        add_to(ledger.ids, delta.ledger.ids)
        receiver.note_uncertifiable(delta.uncertifiable)
    ledger.merged |= set(names)
    ledger.origins |= set(names)
    return receiver.head


def refuse_own(receiver: Participant, delta: Delta) -> None:
    """ValueError for a delta with changes of this very head."""
    if delta.loan is not None and delta.loan.source.head is receiver.head:
        raise ValueError(f"the delta {delta.id} holds changes of this very head: they would count twice")


@exactly
def agree(target: Any) -> LSSVMHead:
    """Declare that what this head holds now is what all ranks hold: nothing is pending. Runs no collective.

    For a head that every rank loaded from one file, or got as a copy; the next :func:`sync` checks that they are the same.
    """
    with locked(target):
        here = Participant(target)
        here.solve()
        stats, ledger = here.statistics, here.ledger
        here.agree()
        ledger.commit(ledger.epoch, "" if stats.empty else stats.digest(), ledger.merged, ledger.sink)
        return here.head


class Status(NamedTuple):
    """Number of agreements, the digest agreed on (empty: nothing yet), and True if anything changed here since."""

    epoch: int
    agreed: str
    pending: bool


@exactly
def status(target: Any) -> Status:
    """Tell where a head stands between its ranks. Runs no collective.

    >>> from torchlssvm import FixedPoint, LSSVMHead
    >>> head = LSSVMHead(2, 2, grid=FixedPoint(1.0)).add(torch.eye(2), torch.tensor([0, 1]))
    >>> status(head), status(agree(head)).pending
    (Status(epoch=0, agreed='', pending=True), False)
    """
    with locked(target):
        here = Participant(target)
        stats, ledger = here.statistics, here.ledger
        return Status(ledger.epoch, ledger.agreed_digest(stats), stats.severed or not stats.pending().empty)


@exactly
def discard(target: Any) -> LSSVMHead:
    """Drop what this rank changed since the last agreement. Runs no collective."""
    with locked(target):
        here = Participant(target)
        here.refuse_severed()
        stats, ledger = here.statistics, here.ledger
        here.adopt(stats.agreed(), here.agreed_rows())
        ledger.commit(ledger.epoch, ledger.agreed, ledger.merged - ledger.deltas, ledger.sink)
        return here.head
