"""A head that takes part in an exchange of changes: the one place where this package touches the parts of a head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torchlssvm.backbone_hash import fingerprint
from torchlssvm.distributed.sum_checks import check_held
from torchlssvm.errors import RemovalError
from torchlssvm.linear import LSSVMHead
from torchlssvm.linear.attach import AttachedClassifier
from torchlssvm.linear.membership import FingerprintChange, Membership
from torchlssvm.linear.merge_history import MergeHistory
from torchlssvm.statistics import Statistics


class Participant:
    """A head with exact statistics, or the head of an attached classifier."""

    def __init__(self, target: Any):
        """ValueError unless the target has an LSSVMHead on a grid."""
        head = target.head if isinstance(target, AttachedClassifier) else target
        if not isinstance(head, LSSVMHead):
            raise ValueError(f"needed an LSSVMHead, or what attach() returns with one; got {type(head).__name__}")
        if not head.statistics.exact:
            raise ValueError(
                "exchanging changes needs a grid: float64 sums depend on the order; use grid=FixedPoint(limit)"
            )
        self.head = head

    @property
    def statistics(self) -> Statistics:
        """The exact sums of the head."""
        return self.head.statistics

    @property
    def ledger(self) -> MergeHistory:
        """The head's merge history."""
        return self.head.history

    def solve(self) -> None:
        """Solve the head: a removal of samples that were never held is found here."""
        self.head.solve()

    def refuse_severed(self) -> None:
        """ValueError for sums that were saved with removals pending: what was agreed on is not known."""
        if self.statistics.severed:
            raise ValueError(
                "this head was saved or pickled while removals were pending, and what was agreed on is not kept beside an "
                "erasure: the samples held are right, but what changed since the last agreement is not known. If the others "
                "hold the same (the removals reached them, or all ranks loaded this file), agree(head) says so; else load a "
                "checkpoint that was saved after a sync and repeat the removals."
            )

    # -- rows, by their fingerprints -----------------------------------------------------------------------------------

    def pending_rows(self) -> FingerprintChange:
        """Return the rows that changed since the last agreement."""
        return self.head.rows.pending()

    def agreed_rows(self) -> Membership:
        """Return the rows at the last agreement, as a copy that may be changed; unchecked ones if they are not known."""
        return self.head.rows.agreed_or_unknown()

    def no_rows(self) -> Membership:
        """Return the rows of an empty head."""
        return self.head.rows.none()

    @property
    def knows_rows(self) -> bool:
        """True when the rows held and those agreed on are known."""
        return self.head.rows.agreed is not None and self.head.checked

    def advance_rows(self, part: FingerprintChange) -> None:
        """Count the rows of a delta that was handed over as agreed on."""
        agreed = self.head.rows.agreed
        if not self.statistics.has_pending:
            self.head.rows.agree()
        else:
            self.head.rows.agreed = None if agreed is None or not part.known else agreed.advanced(part)

    # -- changes of the head -------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """Take what is held for what was agreed on."""
        self.statistics.mark()
        self.head.rows.agree()

    def adopt(self, agreed: Statistics, rows: Membership) -> None:
        """Replace what is held by an agreed state (its parts, not copies) and its rows."""
        with self.head.locked(), self.head.changing():
            self.statistics.adopt(agreed)
            self.head.rows.agree(rows)
            self.head.data_choices.reopen_rho()  # ranks may have chosen differently: all choose from what they agree on
            self.head.solver.reset()

    def add_sums(self, total: Statistics) -> None:
        """Add sums; RemovalError, with nothing changed, if the result could not be that of samples."""
        stats, groups = self.statistics, set(total.group_sums())
        with self.head.locked(), self.head.changing():
            stats.merge(total)
            try:
                check_held(stats, groups, shrunk=True)
            except RemovalError:
                stats.merge(total, -1)  # integers: exactly as before
                stats.canonicalize()
                self.head.solver.reset()
                raise
            stats.note_removal()
            self.head.rows.drop("a delta was merged, and deltas carry no fingerprints of rows")
            self.head.solver.reset()

    def note_uncertifiable(self, reason: str | None) -> None:
        """Record why the head cannot be certified any more; an earlier reason stays, and an empty head has none."""
        self.head.mark_uncertifiable(reason)


@contextmanager
def locked(*targets: Any) -> Iterator[None]:
    """A context in which no other thread changes these heads: what an exchange reads and writes is of one state.

    Locks are taken in one order in all threads, so that none waits for another for ever. Targets that are no heads are left
    to :class:`Participant`, which says so.
    """
    heads = {id(h): h for h in (getattr(t, "head", t) for t in targets) if isinstance(h, LSSVMHead)}
    with ExitStack() as stack:
        for _, head in sorted(heads.items()):
            stack.enter_context(head.locked())
        yield


def fingerprint_of(target: Any, given: str | None) -> str | None:
    """Return the fingerprint in use: the one given, else that of an attached classifier's backbone."""
    if given is None and isinstance(target, AttachedClassifier):
        return fingerprint(target.backbone)
    return given
