"""``sync`` and ``reduce_to``: the changes pending on all ranks become what they agree on, all or none.

Five steps, each the same on all ranks:

    1. tell      shape, options, grid, epoch, agreed digest, which classes changed; a rank with a problem tells that
    2. decide    the same plan, or the same error, on every rank; nothing has been summed yet
    3. sum       what is pending, into a copy
    4. check     agreed + sum: counts, diagonals, definiteness; tell the verdict and the digest
    5. commit    only if every rank is content and has the same digest

A peer that dies shows as an error of a collective, in steps 1 to 4, before anything was changed. One that dies while the last
verdicts are on their way may leave some ranks a step ahead; epoch and digest tell at the next sync.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch
from torch import Tensor

from torchlssvm.distributed.agreement import ExchangePlan, make_plan, problem_message, raise_first
from torchlssvm.distributed.collectives import Peers
from torchlssvm.distributed.delta import Delta, claim, hand_over, refuse_own, sources
from torchlssvm.distributed.participant import Participant, fingerprint_of, locked
from torchlssvm.distributed.sum_checks import check_enough, check_held
from torchlssvm.functional import checks
from torchlssvm.functional.grid import grid_to_json
from torchlssvm.functional.modes import exactly
from torchlssvm.linear import LSSVMHead
from torchlssvm.linear.membership import FingerprintChange, Membership
from torchlssvm.linear.merge_history import add_to
from torchlssvm.statistics import Statistics

MESSAGE_NUMBERS = 2**23
"""Numbers (64 MB of int64) in one message with sums: large enough for the network, small beside the sums of many classes."""

LOOSE_BOUND = 2.0**52
"""A bound on the sums from here on is taken anew from the sums themselves: additions and removals cancel."""


def sync(
    head: Any, group: Any = None, *, delta: Delta | None = None, fingerprint: str | None = None, min_samples: int = 0,
    allow_small: bool = False,
) -> Any:  # fmt: skip
    """Add up what every rank of the group changed since the last sync; all ranks then hold the same, bit for bit.

    Every rank of ``group`` (None: all) must call it. On any error every rank raises the same one and none has changed;
    when a peer dies, the error comes within the group's timeout. Other threads that change the head wait meanwhile.
    Returns ``head``.

    Args:
        head: an ``LSSVMHead`` with a grid, the same on all ranks, or what ``attach`` returns.
        group: a process group.
        delta: changes to go in with those of the head, e.g. removals of samples that are not here. Taken once.
        fingerprint: must be the same on all ranks; that of the backbone, if ``head`` has one.
        min_samples: refuse to send the sums of fewer samples in any class.
        allow_small: send them all the same.

    Example, of one rank; more are started by torchrun:
        >>> import tempfile, torch
        >>> from torchlssvm import FixedPoint, LSSVMHead
        >>> store = torch.distributed.FileStore(tempfile.mktemp(), 1)
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> head = LSSVMHead(4, 2, grid=FixedPoint(8.0)).add(torch.randn(20, 4), torch.arange(20) % 2)
        >>> before = head.digest()
        >>> sync(sync(head)).digest() == before
        True
        >>> torch.distributed.destroy_process_group()
    """
    with locked(head, *sources(delta)):
        return _run(head, group, None, delta, fingerprint, min_samples, allow_small)


def reduce_to(
    head: Any, rank: int, group: Any = None, *, delta: Delta | None = None, fingerprint: str | None = None,
    min_samples: int = 0, allow_small: bool = False,
) -> Any:  # fmt: skip
    """As :func:`sync`, but what all ranks changed goes to the head of one ``rank`` of the group only (algorithm 5's master).

    The other ranks keep what was agreed on before; their changes have left them. Their heads and the master's do not agree any
    more, so ``sync`` refuses them; ``reduce_to`` the same rank goes on.
    """
    with locked(head, *sources(delta)):
        return _run(head, group, rank, delta, fingerprint, min_samples, allow_small)


class Exchange:
    """One rank's part in one exchange."""

    def __init__(self, peers: Peers, to: int | None):
        """Start with nothing known. ``to``: the rank of the group that alone receives the sum; None: all do."""
        self.peers, self.to = peers, to
        self.pending: Statistics | None = None
        self.delta: Delta | None = None
        self.cancelled = False  # True if a delta took back all that is pending here

    def message(
        self, target: Any, delta: Delta | None, fingerprint: str | None, min_samples: int, allow_small: bool
    ) -> dict[str, Any]:
        """Collect what the other ranks need to know. Any error here is told to them, too."""
        self.here = Participant(target)
        self.here.refuse_severed()
        stats, ledger, head = self.here.statistics, self.here.ledger, self.here.head
        self._check_destination()
        self.pending = stats.pending()
        self.rows = self.here.pending_rows()
        self.keys, self.ids = dict(ledger.keys), dict(ledger.ids)
        new: set[str] = set()
        if delta is not None:
            new = {delta.id} | delta.origins
            refuse_own(self.here, delta)
            ledger.refuse_twice(new)
            self._include(delta, fingerprint)
        check_enough(self.pending, self.rows, min_samples, allow_small)
        self.agreed = stats.agreed()
        pending, some = self.pending, not self.pending.empty
        weight = head.class_weight
        held = pending if some else stats
        return {
            "form": {
                "in_features": stats.in_features, "num_classes": stats.num_classes, "per_class": stats.per_class,
                "folds": stats.folds, "normalize": stats.normalize, "scale": stats.scale,
                "intercept": head.intercept, "multiclass": head.multiclass,
                "rho": head.data_choices.rho_rule or head.rho,
                "class_weight": weight.tolist() if isinstance(weight, Tensor) else weight,
                "fingerprint": fingerprint, "destination": self.to,
            },
            "to": self.to, "kind": held.kind, "grid": grid_to_json(held.grid),
            "target_grid": grid_to_json(held.target_grid),
            "epoch": ledger.epoch, "agreed": ledger.agreed_digest(stats),
            "origins": sorted(ledger.origins | new) if some else [],
            "merged": sorted(ledger.deltas | new), "groups": sorted(pending.group_sums()),
            "gross": pending.bound, "agreed_gross": self.agreed.bound, "salt": os.urandom(16).hex(),
            "keys": sum(n < 0 for n in self.keys.values()), "ids": sum(n > 0 for n in self.ids.values()),
            "uncertifiable": head.uncertifiable or (None if delta is None else delta.uncertifiable),
            "shrunk": delta is not None or stats.shrunk,
            "rows": self._row_count(),
        }  # fmt: skip

    def _check_destination(self) -> None:
        """ValueError for a rank that is none, or one that does not go with earlier exchanges."""
        sink = self.here.ledger.sink
        if self.to is not None and (
            isinstance(self.to, bool) or not isinstance(self.to, int) or not 0 <= self.to < self.peers.size
        ):
            raise ValueError(f"rank must be an int in 0..{self.peers.size - 1}, got {self.to!r}")
        if self.to is None and sink is not None:
            raise ValueError(
                f"changes were sent to rank {sink} alone, so the heads do not agree: go on with reduce_to."
            )
        if self.to is not None and sink not in (None, self.to):
            raise ValueError(f"changes were sent to rank {sink} before, not to rank {self.to}.")

    def _include(self, delta: Delta, fingerprint: str | None) -> None:
        """Add the changes of a delta to those that are pending here."""
        assert self.pending is not None
        stats = self.here.statistics
        if fingerprint is not None and delta.fingerprint is not None and fingerprint != delta.fingerprint:
            raise ValueError(f"the delta {delta.id} has the fingerprint {delta.fingerprint}, here it is {fingerprint}.")
        part = delta.statistics.to(stats.device)
        stats.compatible(part)
        had = not self.pending.empty
        self.pending.merge(part)
        self.pending.canonicalize()
        self.cancelled = had and self.pending.empty
        self.rows = self.rows.plus(delta.rows)
        add_to(self.keys, delta.ledger.keys)
        add_to(self.ids, delta.ledger.ids)
        self.delta, self.claims = delta, claim(delta)

    def _row_count(self) -> int | None:
        """Count the rows that changed here; None when they, or those agreed on, are not known by fingerprints."""
        known = self.rows.known and self.here.knows_rows and self.delta is None
        return len(self.rows.to_rows()) if known else None

    def exchange_rows(self, plan: ExchangePlan) -> FingerprintChange:
        """Gather the rows that all ranks changed; not known if they are not known on one of them."""
        sizes = [n for n in plan.rows if n is not None]
        if len(sizes) < len(plan.rows):
            return FingerprintChange(None)
        total = FingerprintChange({})
        for part in self.peers.gather(torch.from_numpy(self.rows.to_rows()), sizes) if any(sizes) else []:
            total = total.plus(FingerprintChange.from_rows(part.numpy()))
        return total

    def refuse_twice(self, plan: ExchangePlan) -> None:
        """Raise an error, on all ranks, if two of them removed the same sample or added samples under the same id.

        The same sample is the same id, features and label. What is compared is hashed with a salt of this exchange.
        """
        removed = [ranks for n, ranks in self._on_several(plan, plan.keys, self.keys, -1) if n < -1]
        if removed:
            raise checks.removal_error(f"{len(removed)} sample(s) were removed on {removed[0]} both, by their ids")
        signs = {k: 1 if n > 0 else -1 for k, n in self.ids.items()}
        added = [ranks for n, ranks in self._on_several(plan, plan.ids, signs, 1) if n > 1]
        if added:
            raise ValueError(
                f"{len(added)} sample(s) were added on {added[0]} both, by their ids: they would count twice. No rank changed "
                "anything. Keep them on one rank: remove them on the others, or discard(head) there, and sync again."
            )

    def _on_several(
        self, plan: ExchangePlan, sizes: list[int], mine: dict[bytes, int], sign: int
    ) -> list[tuple[int, str]]:
        """Return, for each hash that several ranks have with this sign, its total over all ranks and their names."""
        if sum(1 for n in sizes if n) < 2:
            return []
        salted = {hashlib.blake2b(k, digest_size=16, key=plan.salt).digest(): n for k, n in mine.items()}
        keys = sorted(k for k, n in salted.items() if n * sign > 0)
        rows = torch.tensor([[int.from_bytes(k[i : i + 8], "big", signed=True) for i in (0, 8)] for k in keys])
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank, part in enumerate(self.peers.gather(rows.reshape(-1, 2).to(torch.int64), sizes)):
            for row in part.tolist():
                holders.setdefault(tuple(row), []).append(rank)
        several = sorted((k, r) for k, r in holders.items() if len(r) > 1)
        if not several:
            return []
        found = [b"".join(v.to_bytes(8, "big", signed=True) for v in k) for k, _ in several]
        net = self.peers.total(torch.tensor([salted.get(k, 0) for k in found])).tolist()  # others may have undone it
        names = [" and ".join(f"rank {r}" for r in ranks) for _, ranks in several]
        return list(zip(net, names, strict=True))

    def sum(self, plan: ExchangePlan) -> Statistics:
        """Add the pending changes of all ranks to what was agreed on, in memory of its own where anything changed."""
        assert self.pending is not None
        stats, kind = self.here.statistics, plan.choices.kind
        moments = self.pending.moments.clone() if not self.pending.empty else stats.zero_moments(kind)
        mine, here = self.pending.release_sums(), self.agreed.group_sums()
        sums = {g: v for g, v in here.items() if g not in plan.groups}
        size = stats.packed_length(kind)
        none = torch.zeros(size, dtype=torch.int64, device=stats.device)
        step = max(1, MESSAGE_NUMBERS // size)
        for start in range(0, len(plan.groups), step):
            groups = plan.groups[start : start + step]
            total = self.peers.total(torch.stack([mine.pop(g, none) for g in groups]), self.to)
            for g, v in zip(groups, total, strict=True):
                sums[g] = v.add_(here[g]) if g in here else v
        moments = self.peers.total(moments, self.to)
        if not self.agreed.empty:
            moments = moments + self.agreed.moments
        n = checks.to_host(moments.sum() if moments.ndim == 2 else moments[:, 0, 0].sum())
        bound = plan.gross if plan.gross < LOOSE_BOUND else None
        out = stats.with_sums(plan.choices, sums, moments, bound, n[0][0] if n else 0.0)
        out.reuse_hashes(stats, plan.groups)  # of classes that did not change
        return out

    def commit(self, total: Statistics, digest: str, plan: ExchangePlan, rows: Membership) -> None:
        """Make the sum the agreed state."""
        self.here.adopt(total, self.here.no_rows() if total.empty else rows)
        ledger = self.here.ledger
        ledger.commit(ledger.epoch + 1, digest, ledger.merged | plan.merged, self.to)
        self.finish(plan)

    def cancel(self) -> None:
        """Go back to the agreed state: a delta took back all that was pending."""
        ledger = self.here.ledger
        self.here.adopt(self.agreed, self.here.agreed_rows())
        ledger.commit(ledger.epoch, ledger.agreed, ledger.merged, ledger.sink)

    def finish(self, plan: ExchangePlan) -> None:
        """Hand over the delta; what cannot be certified on one rank cannot be on any."""
        if self.delta is not None:
            hand_over(self.claims, self.delta)
        if self.to is None or self.to == self.peers.rank:
            self.here.note_uncertifiable(plan.uncertifiable)


@exactly
def _run(
    target: Any,
    group: Any,
    to: int | None,
    delta: Delta | None,
    fingerprint: str | None,
    min_samples: int,
    allow_small: bool,
) -> Any:
    device = target.device if isinstance(target, LSSVMHead) else getattr(getattr(target, "head", None), "device", None)
    peers = Peers(group, device if isinstance(device, torch.device) else torch.device("cpu"))
    turn = Exchange(peers, to)
    try:
        message = turn.message(target, delta, fingerprint_of(target, fingerprint), min_samples, allow_small)
    except Exception as error:  # whatever it is, the others wait for an answer: they raise it too
        message = problem_message(error)
    plan = make_plan(peers.exchange(message))
    if plan.empty:
        if turn.cancelled:
            turn.cancel()
        turn.here.ledger.merged |= plan.merged
        turn.finish(plan)
        return target
    turn.refuse_twice(plan)
    total, digest, verdict = turn.here.statistics.zero(), "", {}
    receives = to is None or to == peers.rank
    summed, changed = turn.sum(plan), turn.exchange_rows(plan)
    rows = turn.here.agreed_rows()
    try:
        if receives:
            total, rows = summed, rows.advanced(changed)
            check_held(total, plan.groups, plan.shrunk and rows.unchecked is not None)
        else:
            total = turn.agreed
        digest = "" if total.empty else total.digest()
    except Exception as error:
        verdict = problem_message(error)
    verdicts = peers.exchange(verdict or {"digest": digest})
    raise_first(verdicts)
    if to is None and len({v["digest"] for v in verdicts}) > 1:
        raise RuntimeError(
            "the sums arrived differently on different ranks: check the network. No rank changed anything."
        )
    turn.commit(total, digest, plan, rows)
    return target
