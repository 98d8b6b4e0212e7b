"""``sync`` and ``reduce_to``: what is pending on all ranks becomes what they agree on, all or none.

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

from torchlssvm.distributed.agreement import Plan, decide, numbers, problem, raise_first
from torchlssvm.distributed.collectives import Peers
from torchlssvm.distributed.delta import (
    Delta,
    claim,
    fingerprint_of,
    hand_over,
    head_of,
    refuse_own,
    refuse_severed,
)
from torchlssvm.distributed.sum_checks import check_enough, check_held
from torchlssvm.functional import checks
from torchlssvm.functional.gram import packed_size
from torchlssvm.functional.modes import exactly
from torchlssvm.linear import LSSVMHead
from torchlssvm.linear.membership import Membership, RowChange
from torchlssvm.linear.merge_history import add_to
from torchlssvm.statistics import Statistics

BUCKET = 2**23
"""Sums are sent in pieces of about so many numbers."""

TIGHTEN = 2.0**52
"""Past this the bound on the sums is taken from the sums themselves."""


def sync(
    head: Any, group: Any = None, *, delta: Delta | None = None, fingerprint: str | None = None, min_samples: int = 0,
    allow_small: bool = False,
) -> Any:  # fmt: skip
    """Add up what every rank of the group changed since the last sync; all ranks then hold the same, bit for bit.

    Every rank of ``group`` (None: all) must call it. On any error every rank raises the same one and none has changed;
    when a peer dies, the error comes within the group's timeout. Returns ``head``.

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
    return _run(head, group, None, delta, fingerprint, min_samples, allow_small)


def reduce_to(
    head: Any, rank: int, group: Any = None, *, delta: Delta | None = None, fingerprint: str | None = None,
    min_samples: int = 0, allow_small: bool = False,
) -> Any:  # fmt: skip
    """As :func:`sync`, but what all ranks changed goes to the head of one ``rank`` of the group only (algorithm 5's master).

    The other ranks keep what was agreed on before; their changes have left them. Their heads and the master's do not agree any
    more, so ``sync`` refuses them; ``reduce_to`` the same rank goes on.
    """
    return _run(head, group, rank, delta, fingerprint, min_samples, allow_small)


class Turn:
    """One rank's part in one exchange."""

    def __init__(self, peers: Peers, to: int | None):
        """Nothing known yet."""
        self.peers, self.to = peers, to
        self.pending: Statistics | None = None
        self.delta: Delta | None = None
        self.cancelled = False  # whether a delta took back all that is pending here

    def tell(
        self, target: Any, delta: Delta | None, mark: str | None, min_samples: int, allow_small: bool
    ) -> dict[str, Any]:
        """What the others need to know. Any error here is told, too."""
        self.head, self.stats = head_of(target)
        stats, ledger = self.stats, self.head.history
        refuse_severed(stats)
        if self.to is not None and (
            isinstance(self.to, bool) or not isinstance(self.to, int) or not 0 <= self.to < self.peers.size
        ):
            raise ValueError(f"rank must be an int in 0..{self.peers.size - 1}, got {self.to!r}")
        if self.to is None and ledger.sink is not None:
            raise ValueError(
                f"changes were sent to rank {ledger.sink} alone, so the heads do not agree: go on with reduce_to."
            )
        if self.to is not None and ledger.sink not in (None, self.to):
            raise ValueError(f"changes were sent to rank {ledger.sink} before, not to rank {self.to}.")
        self.pending = stats.pending()
        self.rows = self.head.rows.pending()
        self.keys, self.ids = dict(ledger.keys), dict(ledger.ids)
        new: set[str] = set()
        if delta is not None:
            new = {delta.id} | delta.origins
            refuse_own(self.head, delta)
            ledger.refuse_twice(new)
            if mark is not None and delta.fingerprint is not None and mark != delta.fingerprint:
                raise ValueError(f"the delta {delta.id} has the fingerprint {delta.fingerprint}, here it is {mark}.")
            part = delta.statistics.to(stats.device)
            stats.compatible(part)
            had = not self.pending.empty
            self.pending.merge(part)
            self.pending.canonicalize()
            self.cancelled = had and self.pending.empty
            self.rows = self.rows.plus(delta.rows)
            add_to(self.keys, delta.keys)
            add_to(self.ids, delta._ledger.ids)
            self.delta, self.claims = delta, claim(delta)
        check_enough(self.pending, self.rows, min_samples, allow_small)
        self.agreed = stats.agreed()
        pending, some = self.pending, not self.pending.empty
        weight = self.head.class_weight
        held = pending if some else stats
        return {
            "form": {
                "in_features": stats.in_features, "num_classes": stats.num_classes, "per_class": stats.per_class,
                "folds": stats.folds, "intercept": self.head.intercept, "multiclass": self.head.multiclass,
                "rho": self.head.rho, "class_weight": weight.tolist() if isinstance(weight, Tensor) else weight,
                "fingerprint": mark, "destination": self.to,
            },
            "to": self.to, "kind": held.kind, "grid": numbers(held.grid), "target_grid": numbers(held.target_grid),
            "epoch": ledger.epoch, "agreed": ledger.agreed_digest(stats),
            "origins": sorted(ledger.origins | new) if some else [],
            "merged": sorted(ledger.deltas | new), "groups": sorted(pending._sums.sums) if pending._sums else [],
            "gross": pending._gross, "agreed_gross": self.agreed._gross, "salt": os.urandom(16).hex(),
            "keys": sum(n < 0 for n in self.keys.values()), "ids": sum(n > 0 for n in self.ids.values()),
            "uncertifiable": self.head.uncertifiable or (None if delta is None else delta.uncertifiable),
            "shrunk": delta is not None or (stats._base is not None and stats._base.shrunk),
            "rows": self._row_count(),
        }  # fmt: skip

    def _row_count(self) -> int | None:
        """The number of rows that changed here; None when they, or those agreed on, are not known by fingerprints."""
        known = self.rows.known and self.head.rows.agreed is not None and self.head.checked and self.delta is None
        return len(self.rows.to_rows()) if known else None

    def exchange_rows(self, plan: Plan) -> RowChange:
        """The rows that all ranks changed; not known if they are not known on one of them."""
        sizes = [n for n in plan.rows if n is not None]
        if len(sizes) < len(plan.rows):
            return RowChange(None)
        total = RowChange({})
        for part in self.peers.gather(torch.from_numpy(self.rows.to_rows()), sizes) if any(sizes) else []:
            total = total.plus(RowChange.from_rows(part.numpy()))
        return total

    def refuse_twice(self, plan: Plan) -> None:
        """An error, on all ranks, when two of them removed the same sample or added samples under the same id.

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

    def _on_several(self, plan: Plan, sizes: list[int], mine: dict[bytes, int], sign: int) -> list[tuple[int, str]]:
        """For each hash that several ranks have with this sign: its total over all ranks, and which ranks they are."""
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

    def summed(self, plan: Plan) -> Statistics:
        """Agreed + everybody's pending changes, in memory of its own where anything changed."""
        assert self.pending is not None
        part, out = self.pending, self.stats.zero()
        sums = out._decide(plan.choices)
        here = self.agreed._sums.sums if self.agreed._sums is not None else {}
        mine = part._sums.sums if part._sums is not None else {}
        sums.sums = {g: v for g, v in here.items() if g not in plan.groups}
        size = packed_size(self.stats.in_features, sums.R)
        device = self.stats.device
        for start in range(0, len(plan.groups), max(1, BUCKET // size)):
            groups = plan.groups[start : start + max(1, BUCKET // size)]
            none = torch.zeros(size, dtype=torch.int64, device=device)
            total = self.peers.total(torch.stack([mine.pop(g, none) for g in groups]), self.to)
            for g, v in zip(groups, total, strict=True):
                sums.sums[g] = v.add_(here[g]) if g in here else v
        sums.refresh_diagonals()
        side = self.peers.total(part._side.clone() if part._side.ndim == out._side.ndim else out._side.clone(), self.to)
        out._side = side + self.agreed._side if self.agreed._side.ndim == side.ndim else side
        n = checks.to_host(out._side.sum() if side.ndim == 2 else out._side[:, 0, 0].sum())
        out._n = n[0][0] if n else 0.0
        out._gross = plan.gross if plan.gross < TIGHTEN else out._largest()  # adds and removes cancel
        if self.stats._sums is not None:  # classes that nobody changed keep their hash
            stale = self.stats._sums.touched | set(plan.groups)
            out._hashes = {g: h for g, h in self.stats._hashes.items() if g not in stale}
            sums.touched.clear()
        return out

    def commit(self, total: Statistics, digest: str, plan: Plan, rows: Membership) -> None:
        """Make the sum the agreed state."""
        hashes = total._hashes
        self.stats.adopt(total)
        if self.stats._sums is not None:
            self.stats._hashes = hashes
            self.stats._sums.touched.clear()
        ledger = self.head.history
        ledger.commit(ledger.epoch + 1, digest, ledger.merged | plan.merged, self.to)
        self.head.rows.agree(self.head.rows.none() if total.empty else rows)
        self.head.invalidate()
        self.settle(plan)

    def settle(self, plan: Plan) -> None:
        """The delta is handed over, and what cannot be certified on one rank cannot be on any."""
        if self.delta is not None:
            hand_over(self.claims, self.delta)
        if self.to is None or self.to == self.peers.rank:
            self.head.mark_uncertifiable(plan.uncertifiable)


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
    turn = Turn(peers, to)
    try:
        message = turn.tell(target, delta, fingerprint_of(target, fingerprint), min_samples, allow_small)
    except Exception as error:  # whatever it is, the others wait for an answer: they raise it too
        message = problem(error)
    plan = decide(peers.exchange(message))
    if plan.empty:
        ledger = turn.head.history
        if turn.cancelled:
            turn.stats.adopt(turn.agreed)
            ledger.commit(ledger.epoch, ledger.agreed, ledger.merged, ledger.sink)
            turn.head.rows.agree(turn.head.rows.agreed_or_unknown())
            turn.head.invalidate()
        ledger.merged |= plan.merged
        turn.settle(plan)
        return target
    turn.refuse_twice(plan)
    total, digest, verdict = turn.stats.zero(), "", {}
    receives = to is None or to == peers.rank
    summed, changed = turn.summed(plan), turn.exchange_rows(plan)
    rows = turn.head.rows.agreed_or_unknown()
    try:
        if receives:
            total, rows = summed, rows.advanced(changed)
            check_held(total, plan.groups, plan.shrunk and rows.unchecked is not None)
        else:
            total = turn.agreed
        digest = "" if total.empty else total.digest()
    except Exception as error:
        verdict = problem(error)
    verdicts = peers.exchange(verdict or {"digest": digest})
    raise_first(verdicts)
    if to is None and len({v["digest"] for v in verdicts}) > 1:
        raise RuntimeError(
            "the sums arrived differently on different ranks: check the network. No rank changed anything."
        )
    turn.commit(total, digest, plan, rows)
    return target
