"""``sync`` and ``reduce_to``: the changes pending on all ranks become what they agree on, all or none.

Five steps, each the same on all ranks:

    1. tell      shape, options, grid, epoch, agreed digest, which classes changed; a rank with a problem tells that
    2. decide    the same plan, or the same error, on every rank; nothing has been summed yet
    3. sum       what is pending everywhere: total + sum of all - own pending, in memory of its own
    4. check     no row is held less than zero times, no sum is one that samples cannot have; tell verdict and digest
    5. commit    only if every rank has accepted it and has the same digest

A peer that dies shows as an error of a collective, in steps 1 to 4, before anything was changed. One that dies while the last
verdicts are on their way may leave some ranks a step ahead; epoch and digest tell at the next sync.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.distributed.collectives import Peers
from torchlssvm.distributed.delta import (
    Delta,
    begin,
    check_delta,
    fingerprint_of,
    head_of,
    locked,
    pending_rows,
    refuse_lost,
    replace_held,
    sources,
    sums_of,
)
from torchlssvm.distributed.sum_checks import check_enough, check_held
from torchlssvm.errors import GridError, NotFittedError, RemovalError, VerificationError
from torchlssvm.functional import checks
from torchlssvm.functional.grid import grid_from_json, grid_to_json
from torchlssvm.functional.modes import exactly
from torchlssvm.linear import LSSVMHead
from torchlssvm.linear.membership import RowCounts
from torchlssvm.linear.pending import add_counts
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import GridChoices
from torchlssvm.statistics.statistics import LARGEST_SUM

MESSAGE_NUMBERS = 2**23
"""Numbers (64 MB of int64) in one message with sums: large enough for the network, small beside the sums of many classes."""

LOOSE_BOUND = 2.0**52
"""A bound on the sums from here on is computed again from the sums themselves: additions and removals cancel."""

ERRORS_BY_NAME: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (RemovalError, GridError, VerificationError, NotFittedError, ValueError, TypeError, RuntimeError)
}
"""Errors that a rank can tell to the others by name."""


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
        allow_small: send them nevertheless.

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

    The other ranks keep what was agreed on before; their changes have left them. Their heads and the master's no longer agree,
    so ``sync`` refuses them; go on with ``reduce_to`` the same rank.
    """
    with locked(head, *sources(delta)):
        return _run(head, group, rank, delta, fingerprint, min_samples, allow_small)


# -- the plan: made from the messages of all ranks before anything is summed, the same on every rank --------------------------


@dataclass
class ExchangePlan:
    """The sums to be formed: their groups, kind and grid, a bound on them, and True in ``shrunk`` if any rank removed.

    ``rows``: for each rank the number of rows it sends; None if they are not known everywhere under one key.
    """

    choices: GridChoices
    groups: list[int]
    gross: float
    shrunk: bool
    merged: set[str]
    uncertifiable: str | None
    rows: list[int] | None
    ids: list[int]
    key: str | None

    @property
    def empty(self) -> bool:
        """True when no rank changed anything."""
        return self.choices.kind is None or not self.groups


def problem_message(error: Exception) -> dict[str, Any]:
    """Make the message that tells an error to the other ranks."""
    kind = next((name for name, k in ERRORS_BY_NAME.items() if isinstance(error, k)), "RuntimeError")
    return {"problem": [kind, str(error)]}


def raise_first(messages: list[dict[str, Any]]) -> None:
    """Raise the problem of the lowest rank that has one: the same on every rank."""
    found = [(rank, m["problem"]) for rank, m in enumerate(messages) if m.get("problem")]
    if found:
        rank, (kind, text) = found[0]
        others = f" (and {len(found) - 1} more rank(s))" if len(found) > 1 else ""
        raise ERRORS_BY_NAME[kind](f"on rank {rank}{others}: {text} No rank changed anything.")


def ranks_by(messages: list[dict[str, Any]], value: Callable[[dict[str, Any]], Any]) -> dict[str, list[int]]:
    """Group ranks by a value in their messages."""
    out: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        out.setdefault(str(value(message)), []).append(rank)
    return out


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _check_same(said: dict[str, list[int]], what: str, hint: str = "") -> None:
    if len(said) > 1:
        found = "; ".join(f"{what} is {value} on {_names(ranks)}" for value, ranks in said.items())
        raise ValueError(f"ranks cannot be added up: {found}. Nothing was summed.{hint}")


def make_plan(messages: list[dict[str, Any]]) -> ExchangePlan:
    """Make the plan that all ranks follow, or raise the error that all of them raise."""
    raise_first(messages)
    for name in messages[0]["form"]:
        _check_same(ranks_by(messages, lambda m, name=name: m["form"].get(name)), name)  # type: ignore[misc]
    for name in ("kind", "grid", "target_grid"):
        said = ranks_by(messages, lambda m, name=name: m[name])  # type: ignore[misc]
        said.pop("None", None)
        hint = " Give every head the same FixedPoint, not grid='auto'." if "grid" in name else ""
        _check_same(said, name, hint)
    _check_same_start(messages)
    _check_names(messages)
    gross = max(m["agreed_gross"] for m in messages) + sum(m["gross"] for m in messages)
    if gross > LARGEST_SUM:
        raise GridError(
            f"int64 sums could overflow: the bound {gross:.3g} exceeds {float(LARGEST_SUM):.3g}. Nothing was summed. Use a "
            "coarser grid, e.g. with bits=16."
        )
    kind, *grids = (next((m[n] for m in messages if m[n] is not None), None) for n in ("kind", "grid", "target_grid"))
    keys = {m["key"] for m in messages if m["key"] is not None}
    known = len(keys) < 2 and all(m["rows"] is not None for m in messages)
    return ExchangePlan(
        GridChoices() if kind is None else GridChoices(kind, *(grid_from_json(g) for g in grids)),
        sorted({g for m in messages for g in m["groups"]}),
        gross,
        any(m["shrunk"] for m in messages),
        {i for m in messages for i in m["merged"]},
        next((m["uncertifiable"] for m in messages if m["uncertifiable"]), None),
        [m["rows"] for m in messages] if known else None,
        [m["ids"] for m in messages],
        next(iter(keys), None),
    )


def _check_same_start(messages: list[dict[str, Any]]) -> None:
    """VerificationError unless every rank starts from the same agreed state (for reduce_to: from the same epoch)."""
    epochs, digests = ranks_by(messages, lambda m: m["epoch"]), ranks_by(messages, lambda m: m["agreed"] or "empty")
    everywhere = messages[0]["form"]["destination"] is None
    said = {**digests} if everywhere and len(digests) > 1 else epochs
    if len(said) == 1:
        return
    most = max(said.values(), key=len)
    alone = sorted(r for ranks in said.values() if ranks is not most for r in ranks)
    detail = "; ".join(
        f"rank {r}: epoch {m['epoch']}, agreed digest {(m['agreed'] or 'empty')[:16]}" for r, m in enumerate(messages)
    )
    raise VerificationError(
        f"ranks have diverged: {_names(alone)} differ(s) from {_names(most)} in what was agreed on ({detail}). Nothing was "
        "summed. Load one checkpoint on all ranks (and agree(head) on each), or start from empty heads."
    )


def _check_names(messages: list[dict[str, Any]]) -> None:
    """ValueError if changes of the same id (of one delta, file or copy) are pending on two ranks."""
    holders: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        for name in message["names"]:
            holders.setdefault(name, []).append(rank)
    for name, ranks in sorted(holders.items()):
        if len(ranks) > 1:
            raise ValueError(
                f"{_names(ranks)} hold the same pending changes (of one delta, file or copy, with the id {name}), which would "
                f"be counted {len(ranks)} times. Nothing was summed. If all ranks are to start from them, call agree(head) on "
                "every rank; else keep them on one rank, and discard(head) on the others."
            )


# -- the exchange --------------------------------------------------------------------------------------------------------


class Exchange:
    """One rank's part in one exchange."""

    def __init__(self, peers: Peers, to: int | None, delta: Delta | None):
        """``to``: the rank of the group that alone receives the sum; None: all do."""
        self.peers, self.to, self.delta = peers, to, delta
        self.receives = to is None or to == peers.rank

    def message(self, target: Any, fingerprint: str | None, min_samples: int, allow_small: bool) -> dict[str, Any]:
        """Collect what the other ranks need to know. Any error here is told to them, too."""
        head = self.head = head_of(target)
        refuse_lost(head)
        if self.to is not None and (
            isinstance(self.to, bool) or not isinstance(self.to, int) or not 0 <= self.to < self.peers.size
        ):
            raise ValueError(f"rank must be an int in 0..{self.peers.size - 1}, got {self.to!r}")
        stats, pending = sums_of(head), head.pending
        some = pending.some(stats)
        self.own = pending.sums(stats)
        self.sent, self.rows, self.weights = self.own, pending_rows(head), dict(pending.weights)
        names = {pending.id} - {None} | pending.carried if some else set()
        merged, key = pending.merged, head.rows.key
        if self.delta is not None:
            check_delta(head, self.delta, fingerprint)
            self.sent = self.own.copy()
            self.sent.merge(self.delta.statistics.to(head.device))
            same = self.rows is not None and self.delta.rows is not None and self.delta.key == (key or self.delta.key)
            self.rows = self.rows.plus(self.delta.rows) if same else None  # type: ignore[union-attr,arg-type]
            key = key or self.delta.key
            add_counts(self.weights, self.delta.weights)
            names, merged = names | self.delta.names, merged | self.delta.names
        check_enough(self.sent, self.rows, min_samples, allow_small)
        known = self.rows is not None and head.rows.unchecked is None
        held = stats if self.sent.kind is None else self.sent
        weight = head.class_weight
        return {
            "form": {
                "in_features": stats.in_features, "num_classes": stats.num_classes, "per_class": stats.per_class,
                "folds": stats.folds, "normalize": stats.normalize, "scale": stats.scale,
                "intercept": head.intercept, "multiclass": head.multiclass,
                "rho": head.data_choices.rho_rule or head.rho,
                "class_weight": weight.tolist() if isinstance(weight, Tensor) else weight,
                "fingerprint": fingerprint, "destination": self.to,
            },
            "kind": held.kind, "grid": grid_to_json(held.grid), "target_grid": grid_to_json(held.target_grid),
            "epoch": pending.epoch, "agreed": pending.agreed_digest(stats), "names": sorted(names), "merged": sorted(merged),
            "groups": sorted(self.sent.group_sums()), "gross": self.sent.bound,
            "agreed_gross": 0.0 if self.own is stats else stats.bound + self.own.bound,
            "shrunk": self.delta is not None or pending.shrunk,
            "rows": len(self.rows) if known and self.rows is not None else None,
            "key": key.hex() if known and key is not None and (len(head.rows.held) or self.rows) else None,
            "ids": sum(n > 0 for n in self.weights.values()),
            "uncertifiable": head.uncertifiable or (None if self.delta is None else self.delta.uncertifiable),
        }  # fmt: skip

    def refuse_added_twice(self, plan: ExchangePlan) -> None:
        """ValueError, on all ranks, if two of them added samples under the same id."""
        if sum(1 for n in plan.ids if n) < 2:
            return
        added = np.frombuffer(b"".join(sorted(h for h, n in self.weights.items() if n > 0)), "<i8").reshape(-1, 2)
        holders: dict[bytes, list[int]] = {}
        for rank, part in enumerate(self.peers.gather(torch.from_numpy(added.astype(np.int64)), plan.ids)):
            for row in part.numpy():
                holders.setdefault(row.tobytes(), []).append(rank)
        several = sorted(h for h, ranks in holders.items() if len(ranks) > 1)
        if not several:
            return
        net = self.peers.total(torch.tensor([np.sign(self.weights.get(h, 0)) for h in several])).tolist()
        twice = [h for h, n in zip(several, net, strict=True) if n > 1]  # others may have removed what they had
        if twice:
            raise ValueError(
                f"{len(twice)} sample(s) were added on {' and '.join(f'rank {r}' for r in holders[twice[0]])} both, by their "
                "ids: they would count twice. No rank changed anything. Keep them on one rank: remove them on the others, or "
                "discard(head) there, and sync again."
            )

    def sum(self, plan: ExchangePlan) -> Statistics:
        """Return total + sum of all ranks - own pending, or where the sum goes elsewhere, total - own pending."""
        stats, kind = sums_of(self.head), plan.choices.kind
        here, own, sent = stats.group_sums(), self.own.group_sums(), self.sent.group_sums()
        agreed = {} if self.own is stats else here
        sums = {g: v for g, v in agreed.items() if g not in plan.groups}
        none = torch.zeros(stats.packed_length(kind), dtype=torch.int64, device=stats.device)
        step = max(1, MESSAGE_NUMBERS // len(none))
        for start in range(0, len(plan.groups), step):
            groups = plan.groups[start : start + step]
            reduced = self.peers.total(torch.stack([sent.get(g, none) for g in groups]), self.to)
            for g, value in zip(groups, reduced, strict=True):
                total = value if self.receives else torch.zeros_like(none)
                if g in agreed:
                    total = total + agreed[g]
                if agreed is here and g in own:
                    total = total - own[g]
                sums[g] = total
        zero = stats.zero_moments(kind)
        mine, now, changed = (s.moments if s.kind is not None else zero for s in (self.sent, stats, self.own))
        reduced = self.peers.total(mine.clone(), self.to)
        moments = (reduced if self.receives else zero) + (now - changed)
        n = checks.to_host(moments.sum() if moments.ndim == 2 else moments[:, 0, 0].sum())[0][0]
        out = stats.with_sums(plan.choices, sums, moments, plan.gross if plan.gross < LOOSE_BOUND else None, n)
        out.reuse_hashes(stats, plan.groups)  # of classes that did not change
        return out

    def exchange_rows(self, plan: ExchangePlan) -> RowCounts | None:
        """Return the rows that are held after the exchange; None if they are not known. RemovalError comes with the verdict."""
        if plan.rows is None or self.rows is None:
            return None
        own = pending_rows(self.head)
        assert own is not None
        total = self.head.rows.held.plus(own, -1)
        if any(plan.rows):
            for part in self.peers.gather(torch.from_numpy(self.rows.to_array()), plan.rows):
                if self.receives:
                    total = total.plus(RowCounts.from_array(part.numpy()))
        return total

    def commit(self, total: Statistics, digest: str, plan: ExchangePlan, rows: RowCounts | None) -> None:
        """Make the sum the agreed state."""
        head = self.head
        key = None if plan.key is None else bytes.fromhex(plan.key)
        if not plan.empty:
            replace_held(head, total, rows, key)
            begin(head, digest, head.pending.epoch + 1)
        head.pending.merged = head.pending.merged | plan.merged
        if self.delta is not None:
            self.delta.hand_over()
        if self.receives:
            head._mark_uncertifiable(plan.uncertifiable)


@exactly
def _run(
    target: Any, group: Any, to: int | None, delta: Delta | None, fingerprint: str | None, min_samples: int,
    allow_small: bool,
) -> Any:  # fmt: skip
    device = target.device if isinstance(target, LSSVMHead) else getattr(getattr(target, "head", None), "device", None)
    peers = Peers(group, device if isinstance(device, torch.device) else torch.device("cpu"))
    turn = Exchange(peers, to, delta)
    try:
        message = turn.message(target, fingerprint_of(target, fingerprint), min_samples, allow_small)
    except Exception as error:  # whatever it is, the others wait for an answer: they raise it too
        message = problem_message(error)
    plan = make_plan(peers.exchange(message))
    if plan.empty:
        turn.commit(sums_of(turn.head), "", plan, None)
        return target
    turn.refuse_added_twice(plan)
    total, rows = turn.sum(plan), turn.exchange_rows(plan)
    try:
        if turn.receives:
            if rows is not None and (short := rows.negative):
                raise checks.removal_error(f"{short} row(s) would be removed more often than they are held")
            check_held(total, plan.groups, plan.shrunk and rows is None)
        total.canonicalize()
        digest = "" if total.empty else total.digest()
        verdict = {"digest": digest}
    except Exception as error:
        digest, verdict = "", problem_message(error)
    verdicts = peers.exchange(verdict)
    raise_first(verdicts)
    if to is None and len({v["digest"] for v in verdicts}) > 1:
        raise RuntimeError(
            "the sums arrived differently on different ranks: check the network. No rank changed anything."
        )
    turn.commit(total, digest, plan, rows)
    return target
