"""Deltas: the changes of a node, as sums that can be sent and merged (algorithms 4 and 5)."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self

import torch

from torchlssvm.backbone_hash import fingerprint as backbone_fingerprint
from torchlssvm.errors import VerificationError
from torchlssvm.files import refuse_in_store, replacement
from torchlssvm.functional.byte_tensors import tensor_to_bytes
from torchlssvm.functional.grid import grid_from_fields
from torchlssvm.functional.modes import exactly
from torchlssvm.functional.sample_identity import shared_key
from torchlssvm.linear import LSSVMHead
from torchlssvm.linear.attach import AttachedClassifier
from torchlssvm.linear.checkpoint import checksum, pack
from torchlssvm.linear.locking import catch_up
from torchlssvm.linear.membership import add_counts, rows_of
from torchlssvm.linear.pending import Changes, Tracking, add_weights
from torchlssvm.statistics import Statistics
from torchlssvm.untrusted import load_tensors

DELTA_FORMAT = "torchlssvm-delta-1"


# -- heads that exchange changes ---------------------------------------------------------------------------------------------


def head_of(target: Any) -> LSSVMHead:
    """Return the head of a target. ValueError unless it is an LSSVMHead on a grid, or an attached classifier with one."""
    head = target.head if isinstance(target, AttachedClassifier) else target
    if not isinstance(head, LSSVMHead):
        raise ValueError(f"needed an LSSVMHead, or what attach() returns with one; got {type(head).__name__}")
    if not head.statistics.exact:
        raise ValueError(
            "exchanging changes needs a grid: float64 sums depend on the order; use grid=FixedPoint(limit)"
        )
    return head


@contextmanager
def locked(*targets: Any) -> Iterator[None]:
    """A context in which no other thread changes these heads, so that an exchange reads and writes one consistent state.

    A head of a store is first brought up to date. To prevent deadlocks, all threads take the locks in the same order. Targets
    that are not heads are skipped here; :func:`head_of` raises the error for them.
    """
    heads = {id(h): h for h in (getattr(t, "head", t) for t in targets) if isinstance(h, LSSVMHead)}
    with ExitStack() as stack:
        for _, head in sorted(heads.items()):
            catch_up(head)
            stack.enter_context(head._lock)
        yield


def fingerprint_of(target: Any, given: str | None) -> str | None:
    """Return the given fingerprint, or that of an attached classifier's backbone if none is given."""
    if given is None and isinstance(target, AttachedClassifier):
        return backbone_fingerprint(target.backbone)
    return given


# -- deltas --------------------------------------------------------------------------------------------------------------------


class Delta(Changes):
    """The changes of a node, to be sent and merged: sums of samples added minus sums of samples removed, and an id.

    To get the pending changes of a head as a delta, call :meth:`take`; to read a delta from a file, call :meth:`load`. You can
    also build a delta without a head: create an empty one with :meth:`like`, and add and remove samples. It may even remove
    samples that this node never held. In the paper, a delta is ``m_i = {l_ic, M_ic, v_ic}`` of equations (36) and (37), here
    for any number of classes.

    A delta has a random id, so that a receiver merges it only once; otherwise its samples would count twice. ``carried``
    contains the ids of merged deltas that are part of this delta. If the source head cannot be certified, ``uncertifiable``
    gives the reason, and a head that merges the delta gets the same reason.

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
        # Rows and weights of the samples are in the memory of this process only.
        super().__init__(statistics, {} if statistics.empty else None, shared_key())
        self.fingerprint = fingerprint
        self.id = uuid.uuid4().hex if id is None else id
        self.uncertifiable: str | None = None
        self.carried: set[str] = set()
        self.source: LSSVMHead | None = None  # the head in which these changes are pending, until they are handed over

    @classmethod
    def like(cls, target: Any, *, fingerprint: str | None = None) -> Self:
        """Create an empty delta for a head, with the same shape and grid."""
        head = head_of(target)
        stats = head.statistics
        out = Statistics(
            stats.in_features, stats.num_classes, grid=stats.grid or "auto", target_grid=stats.target_grid or "auto",
            per_class=stats.per_class, folds=stats.folds, normalize=stats.normalize, scale=stats.scale,
            targets=stats.targets, device=stats.device,
        )  # fmt: skip
        delta = cls(out, fingerprint=fingerprint_of(target, fingerprint))
        delta.key = head.pending.held_rows.key or delta.key
        return delta

    @classmethod
    @exactly
    def take(cls, target: Any, *, fingerprint: str | None = None) -> Self:
        """Copy the head's pending changes into a delta.

        The changes stay pending in the head until they are handed over, so nothing is lost if a save fails or you drop the
        delta. They are handed over when :meth:`save` has written the file, when :func:`merge` or :func:`sync` has put the
        delta into another head, or when you call :meth:`commit`. Until then, a second ``take`` returns the same changes, and
        any later ones, under the same id, and you can hand over only one of the two deltas. A delta is refused if its changes
        have left the head in another way.

        Use deltas between nodes that send files. Ranks of one process group use :func:`sync`.
        """
        with locked(target):
            head = head_of(target)
            changes = head.pending.changes()
            delta = cls(changes.statistics.copy(), fingerprint=fingerprint_of(target, fingerprint))
            delta.rows = None if changes.rows is None else dict(changes.rows)
            delta.key, delta.weights = changes.key or delta.key, dict(changes.weights)
            delta.uncertifiable = head.uncertifiable
            name = head.pending.named()
            if name is not None:
                delta.id, delta.carried, delta.source = name, set(head.pending.carried), head
            return delta

    @exactly
    def add(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> Self:
        """Add samples x (B, J) with labels y (B,) or targets (B, K)."""
        return self._change(x, y, weight, ids, 1)

    @exactly
    def remove(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> Self:
        """Remove samples, which any node may hold."""
        return self._change(x, y, weight, ids, -1)

    def _change(self, x: Any, y: Any, weight: Any, ids: Any, sign: int) -> Self:
        if self.source is not None:
            raise ValueError(
                f"the delta {self.id} holds changes of a head that are not handed over yet: put others into another delta, "
                "Delta.like(head), and merge both"
            )
        batch = self.statistics.check(x, y, weight, ids)
        self.statistics.change([(batch, sign)])
        add_weights(self.weights, batch, sign)
        if self.rows is not None and self.key is not None and len(batch):
            add_counts(self.rows, rows_of(batch, self.key), sign)
        return self

    @property
    def names(self) -> set[str]:
        """The ids under which the samples of this delta may have been counted."""
        return {self.id} | self.carried

    def digest(self) -> str:
        """Return the SHA-256 digest of the sums."""
        return self.statistics.digest()

    def save(self, path: str | os.PathLike[str], *, min_samples: int = 0) -> None:
        """Write the sums to a file, atomically.

        Once the file is written, the changes are handed over. If the save is refused or fails, the changes stay pending in the
        head.
        """
        with locked(self.source):
            self.check_own()
            self.check_enough(min_samples)
            out = self.statistics.state()
            meta = {
                "format": DELTA_FORMAT, "id": self.id, "fingerprint": self.fingerprint, "checksum": checksum(out),
                "carried": sorted(self.carried), "uncertifiable": self.uncertifiable,
            }  # fmt: skip
            refuse_in_store(path)
            with replacement(path) as new, new.open("wb") as file:
                torch.save(out | {"delta": pack(meta)}, file)
            self.hand_over()

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> Self:
        """Read a file that :meth:`save` wrote. Raises VerificationError if the file is damaged or is not a delta."""
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
            for name, types in (("id", str), ("fingerprint", str | None), ("uncertifiable", str | None)):
                if not isinstance(about[name], types):
                    raise ValueError(f"its {name} is a {type(about[name]).__name__}")
            meta = json.loads(tensor_to_bytes(saved["meta"]).decode())
            rows = saved.get("sums")  # no memory is taken that the file does not have
            if saved["counts"].numel() < meta["classes"] * max(1, meta["folds"]) or (
                rows is not None and rows.shape[-1] < meta["features"]
            ):
                raise ValueError("its tensors are smaller than its description says")
            stats = Statistics(
                meta["features"], meta["classes"], grid=grid_from_fields(meta) or "auto", per_class=meta["per_class"],
                folds=meta["folds"], normalize=meta.get("normalize"), scale=meta.get("scale"), targets=meta.get("targets"),
                device=device,
            )  # fmt: skip
            stats.load(saved)
            out = cls(stats, fingerprint=about["fingerprint"], id=about["id"])
            out.carried, out.uncertifiable = set(map(str, about["carried"])), about["uncertifiable"]
        except Exception as error:  # contents of any type and shape
            reason = error if type(error) is ValueError else "its contents cannot be read"
            raise VerificationError(f"{os.fspath(path)} is a damaged delta: {reason}") from error
        return out

    # -- handing over --------------------------------------------------------------------------------------------------

    @exactly
    def commit(self) -> Self:
        """Mark the changes as handed over. Call this method if you send the delta by other means than save, merge or sync."""
        with locked(self.source):
            self.check_own()
            self.hand_over()
        return self

    def check_own(self) -> None:
        """Raise ValueError if the changes have left the head since, or the head's classes have changed."""
        if self.source is None:
            return
        pending = self.source.pending
        if pending.id != self.id or pending.tracking is Tracking.LOST:
            raise ValueError(
                f"the changes of the delta {self.id} are no longer pending in their head: they left it with another delta, a "
                "sync, agree, discard or a load. Nothing was done: Delta.take(head) has what is pending."
            )
        self.source.statistics.compatible(self.statistics.to(self.source.device))

    def hand_over(self) -> None:
        """Mark the changes as agreed in the head that they come from, because another place holds them now."""
        head, self.source = self.source, None
        if head is not None:
            head.pending.hand_over(self, self.id)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle or copy a delta after its hand-over. Before that, both the copy and the head would contain the changes."""
        if self.source is not None:
            raise ValueError(
                f"the delta {self.id} holds changes that are still pending in their head: save it to a file, or call commit() "
                "first, which counts them as handed over"
            )
        return vars(self) | {"rows": None, "key": b"", "weights": {}}  # no hash of a sample leaves the process

    def __repr__(self) -> str:
        """Show the id and the statistics."""
        return f"Delta({self.id}, {self.statistics!r})"


def sources(*deltas: Any) -> list[LSSVMHead]:
    """Return the heads in which the changes of these deltas are pending."""
    return [d.source for d in deltas if isinstance(d, Delta) and d.source is not None]


def check_delta(head: LSSVMHead, delta: Delta, mine: str | None) -> None:
    """Raise ValueError if a delta contains the head's own changes, was merged before, or comes from other features."""
    if delta.source is head:
        raise ValueError(f"the delta {delta.id} contains changes of this head itself, which would count twice")
    head.pending.refuse_twice(delta.names)
    if mine is not None and delta.fingerprint is not None and mine != delta.fingerprint:
        raise ValueError(
            f"the features of delta {delta.id} have the fingerprint {delta.fingerprint}, those of the head {mine}"
        )
    head.statistics.compatible(delta.statistics.to(head.device))
    delta.check_own()


@exactly
def merge(target: Any, *deltas: Delta, fingerprint: str | None = None) -> LSSVMHead:
    """Add deltas to a head, all or none (algorithm 5). The head remembers their ids, so that each delta counts once.

    The changes are pending until the next :func:`sync`, if there is one. Raises RemovalError if no set of samples has the
    resulting sums, and ValueError if shape, grid or fingerprint differ or a delta was merged before.
    """
    strange: Any = next((delta for delta in deltas if not isinstance(delta, Delta)), None)
    if strange is not None:
        if isinstance(strange, AttachedClassifier):
            other = "another classifier: pass Delta.take(other), or call clf.head.merge(other.head)"
        else:
            other = (
                f"{type(strange).__name__}: pass Delta.take(other) or Delta.load(file), or call head.merge(other_head)"
            )
        raise TypeError(f"merge takes deltas, got {other}")
    with locked(target, *sources(*deltas)):
        head, mine = head_of(target), fingerprint_of(target, fingerprint)
        head._refuse_in_store("hold the samples themselves: add them by store.apply(Add(...))")
        names = [name for delta in deltas for name in delta.names]
        for delta in deltas:
            check_delta(head, delta, mine)
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"the same delta, or a part of it, is given twice: {twice}")
        total = Changes(head.statistics.zero(), {}, head.pending.held_rows.key)
        for delta in deltas:
            total = total.plus(delta)
        if not total.statistics.empty:
            head._take_in(total, 1, shrinks=True)
        for delta in deltas:
            delta.hand_over()
            head._mark_uncertifiable(delta.uncertifiable)
        head.pending.count_ids(set(names))
        return head


@exactly
def agree(target: Any) -> LSSVMHead:
    """Declare that all ranks hold the same samples as this head, so that nothing is pending. Runs no collective.

    Call this function on every rank after loading one file or copying one head. The next :func:`sync` checks that the heads are
    equal.
    """
    with locked(target):
        head = head_of(target)
        head.pending.agree()
        return head


class Status(NamedTuple):
    """The number of agreements, the agreed digest ("" before the first agreement), and whether this rank changed since."""

    epoch: int
    agreed: str
    pending: bool


@exactly
def status(target: Any) -> Status:
    """Return the last agreed state of a head, and whether changes are pending. Runs no collective.

    >>> from torchlssvm import FixedPoint, LSSVMHead
    >>> head = LSSVMHead(2, 2, grid=FixedPoint(1.0)).add(torch.eye(2), torch.tensor([0, 1]))
    >>> status(head), status(agree(head)).pending
    (Status(epoch=0, agreed='', pending=True), False)
    """
    with locked(target):
        pending = head_of(target).pending
        return Status(pending.epoch, pending.agreed_digest(), pending.some)


@exactly
def discard(target: Any) -> LSSVMHead:
    """Discard the changes that this rank made since the last agreement. Runs no collective."""
    with locked(target):
        head = head_of(target)
        pending = head.pending
        pending.changes()  # ValueError if they were lost
        merged = pending.merged - pending.carried
        head._hold(pending.agreed_sums(), pending.agreed_rows(), None)
        pending.restart(None, pending.epoch)
        pending.merged = merged
        return head
