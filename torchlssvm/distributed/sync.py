"""``sync`` and ``reduce_to``: add the pending changes of all ranks to the agreed state, all or none.

A call has five steps, which are the same on all ranks:

    1. tell      shape, options, grid, epoch, agreed digest, which classes changed; a rank with a problem tells that
    2. compare   any difference is the same error on every rank; nothing has been summed yet
    3. sum       the pending changes of all ranks: total + sum of all - own pending, in separate memory
    4. check     no row is held less than zero times, no sum is one that samples cannot have; tell verdict and digest
    5. commit    only if every rank has accepted the sum and has the same digest

If a peer dies during steps 1 to 4, the collective raises an error before anything has changed. Only if it dies while the last
verdicts are being sent, some ranks may be one step ahead, which the next sync detects by epoch and digest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchlssvm.distributed.collectives import Peers
from torchlssvm.distributed.delta import Delta, check_delta, fingerprint_of, head_of, locked, sources
from torchlssvm.errors import GridError, NotFittedError, RemovalError, VerificationError
from torchlssvm.functional import checks
from torchlssvm.functional.grid import grid_from_json, grid_to_json
from torchlssvm.functional.modes import exactly
from torchlssvm.linear import LSSVMHead
from torchlssvm.linear.membership import Counts, add_counts, count_negative, counts_from_array, counts_to_array
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.batch import GridChoices
from torchlssvm.statistics.statistics import LARGEST_SUM
from torchlssvm.wording import counted

ERRORS_BY_NAME: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (RemovalError, GridError, VerificationError, NotFittedError, ValueError, TypeError, RuntimeError)
}
"""Errors that a rank can tell to the others by name."""

Message = dict[str, Any]


def sync(
    head: Any, group: Any = None, *, delta: Delta | None = None, fingerprint: str | None = None, min_samples: int = 0
) -> Any:
    """Add up the changes of all ranks since the last sync. Afterwards all ranks hold the same state, bit for bit.

    Every rank of ``group`` must call this function. If anything goes wrong on one rank, every rank raises the same error and
    no rank has changed. If a peer dies, the error is raised within the timeout of the group. Threads that want to change the
    head wait until the call ends. Returns ``head``.

    Args:
        head: an ``LSSVMHead`` with a grid, the same on all ranks, or a classifier that ``attach`` returned.
        group: a process group. Default: all ranks.
        delta: further changes to send, e.g. removals of samples that this rank does not hold. A delta can be used once.
        fingerprint: hash of the network, which must be the same on all ranks. Default: that of the backbone, if ``head`` has
            one.
        min_samples: refuse to send sums of fewer distinct samples in any class.

    Example of one rank; torchrun starts more:
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
        return _run(head, group, None, delta, fingerprint, min_samples)


def reduce_to(
    head: Any, rank: int, group: Any = None, *, delta: Delta | None = None, fingerprint: str | None = None,
    min_samples: int = 0,
) -> Any:  # fmt: skip
    """Add the changes of all ranks to the head of one ``rank`` of the group, the master of algorithm 5.

    Only the master keeps the result. The other ranks hand their changes over to it and return to the state of the previous
    agreement, so from then on their heads differ from the head of the master. ``sync`` would refuse such a group; to exchange
    further changes, call ``reduce_to`` again with the same rank.
    """
    with locked(head, *sources(delta)):
        return _run(head, group, rank, delta, fingerprint, min_samples)


@exactly
def _run(target: Any, group: Any, to: int | None, delta: Delta | None, fingerprint: str | None, least: int) -> Any:
    device = target.device if isinstance(target, LSSVMHead) else getattr(getattr(target, "head", None), "device", None)
    peers = Peers(group, device if isinstance(device, torch.device) else torch.device("cpu"))
    try:
        mine = Contribution(target, delta, fingerprint_of(target, fingerprint))
        message = mine.message(to, peers.size, least)
    except Exception as error:  # any error: the other ranks wait for an answer, and raise it too
        message = problem_message(error)
    messages = peers.exchange(message)
    choices = compare(messages)
    merged = {name for m in messages for name in m["merged"]}
    uncertifiable = next((m["uncertifiable"] for m in messages if m["uncertifiable"]), None)
    receives = to is None or to == peers.rank
    if choices.kind is not None and any(m["groups"] for m in messages):
        mine.refuse_added_twice(peers)
        total, rows = mine.sum(peers, to, choices, messages), mine.exchange_rows(peers, receives, messages)
        digest = settle(peers, to, total, rows if receives else None, messages)
        key = next((m["key"] for m in messages if m["key"] is not None), None)
        mine.head._hold(total, rows, None if key is None else bytes.fromhex(key))
        mine.pending.restart(digest, mine.pending.epoch + 1)
    mine.pending.merged = mine.pending.merged | merged
    if delta is not None:
        delta.hand_over()
    if receives:
        mine.head._mark_uncertifiable(uncertifiable)
    return target


class Contribution:
    """The data that one rank sends: the pending changes of its head, and those of a delta."""

    def __init__(self, target: Any, delta: Delta | None, fingerprint: str | None):
        self.head, self.fingerprint = head_of(target), fingerprint
        self.pending = pending = self.head.pending
        self.own = self.all = pending.changes()
        self.held, self.merged = pending.held, pending.merged
        self.names: set[Any] = {pending.id} - {None} | pending.carried if pending.some else set()
        self.shrunk, self.uncertifiable = pending.shrunk, self.head.uncertifiable
        if delta is not None:
            check_delta(self.head, delta, fingerprint)
            self.all = self.own.plus(delta)
            self.names, self.merged = self.names | delta.names, self.merged | delta.names
            self.shrunk, self.uncertifiable = True, self.uncertifiable or delta.uncertifiable

    def message(self, to: int | None, size: int, min_samples: int) -> Message:
        """Return the facts that the other ranks need. Raises ValueError for an invalid rank, or for sums of too few samples."""
        if to is not None and (isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < size):
            raise ValueError(f"rank must be an int in 0..{size - 1}, got {to!r}")
        self.all.check_enough(min_samples)
        sums, own, held, rows = self.all.statistics, self.own.statistics, self.held, self.pending.held_rows.known()
        decided = held if sums.kind is None else sums
        known = self.all.rows is not None and rows is not None
        key = self.all.key if known and (rows or self.all.rows) else None
        return {
            "form": self.head._form() | {"fingerprint": self.fingerprint, "destination": to},
            "kind": decided.kind, "grid": grid_to_json(decided.grid), "target_grid": grid_to_json(decided.target_grid),
            "epoch": self.pending.epoch, "agreed": self.pending.agreed_digest(),
            "names": sorted(self.names), "merged": sorted(self.merged), "uncertifiable": self.uncertifiable,
            "groups": sorted({*sums.group_sums(), *own.group_sums()}), "gross": sums.bound,
            "agreed_gross": 0.0 if own is held else held.bound + own.bound, "shrunk": self.shrunk, "known": known,
            "key": None if key is None else key.hex(),
        }  # fmt: skip

    def refuse_added_twice(self, peers: Peers) -> None:
        """Raise ValueError, on all ranks, if samples with the same id, net of removals, were added on two ranks."""
        weights = self.all.weights
        hashes = np.frombuffer(b"".join(sorted(weights)), "<i8").reshape(-1, 2)
        signs = np.sign([weights[h] for h in sorted(weights)]).astype(np.int64).reshape(-1, 1)
        net: dict[tuple[int, ...], int] = {}
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank, part in enumerate(peers.gather(torch.from_numpy(np.hstack([hashes, signs])))):
            for *words, sign in part.tolist():
                name = tuple(words)
                net[name] = net.get(name, 0) + sign
                if sign > 0:
                    holders.setdefault(name, []).append(rank)
        twice = sorted(name for name, n in net.items() if n > 1)
        if twice:
            ranks = " and ".join(f"rank {r}" for r in holders[twice[0]])
            raise ValueError(
                f"samples were added on {ranks} under the same ids ({counted(len(twice), 'sample')}): "
                "they would count twice. No rank changed anything. Keep them on one rank: remove them on the others, or "
                "discard(head) there, and sync again."
            )

    def sum(self, peers: Peers, to: int | None, choices: GridChoices, messages: list[Message]) -> Statistics:
        """Return total + sum of all ranks - own pending. A rank that does not receive the sum omits that term."""
        parts = self.all.statistics, self.own.statistics, self.held
        sent, own, held = (part.group_sums() for part in parts)
        all_pending, receives = self.own.statistics is self.held, to is None or to == peers.rank
        groups = sorted({g for m in messages for g in m["groups"]})
        sums = {} if all_pending else dict(held)
        zero = torch.zeros(self.held.packed_length(choices.kind), dtype=torch.int64, device=self.held.device)
        step = max(1, 2**23 // len(zero))  # 64 MB in one message: large for the network, small beside many classes
        for start in range(0, len(groups), step):
            part = groups[start : start + step]
            reduced = peers.total(torch.stack([sent.get(g, zero) for g in part]), to)
            for g, value in zip(part, reduced, strict=True):
                agreed = zero if all_pending else held.get(g, zero) - own.get(g, zero)
                sums[g] = agreed + value if receives else agreed.clone()
        none = self.held.zero_moments(choices.kind)
        moments, mine, now = (part.moments if part.kind is not None else none for part in parts)
        reduced = peers.total(moments.clone(), to)
        moments = (reduced if receives else none) + (now - mine)
        n = checks.to_host(moments.sum() if moments.ndim == 2 else moments[:, 0, 0].sum())[0][0]
        gross = gross_bound(messages)  # additions and removals cancel: a large bound is taken from the sums again
        out = self.held.with_sums(choices, sums, moments, gross if gross < 2.0**52 else None, n)
        out.reuse_hashes(self.held, groups)  # of classes that did not change
        return out

    def exchange_rows(self, peers: Peers, receives: bool, messages: list[Message]) -> Counts | None:
        """Return the rows that are held after the exchange; None if the rows are not known."""
        keys = {m["key"] for m in messages} - {None}
        if len(keys) > 1 or not all(m["known"] for m in messages):
            return None
        total = self.pending.agreed_rows()
        assert total is not None
        assert self.all.rows is not None
        for part in peers.gather(torch.from_numpy(counts_to_array(self.all.rows))):
            if receives:
                add_counts(total, counts_from_array(part.numpy()))
        return total


def settle(peers: Peers, to: int | None, total: Statistics, rows: Counts | None, messages: list[Message]) -> str:
    """Check the sum on all ranks and return its digest. An error of any rank is raised on all ranks."""
    try:
        if to is None or to == peers.rank:
            if rows is not None and (short := count_negative(rows)):
                raise checks.removal_error(f"{counted(short, 'row')} would be removed more often than they are held")
            total.canonicalize()
            if not total.empty and any(m["shrunk"] for m in messages):
                total.check_counts(total.moments)
                total.check_possible({g for m in messages for g in m["groups"]} if rows is None else ())
        total.canonicalize()
        verdict = {"digest": "" if total.empty else total.digest()}
    except Exception as error:
        verdict = problem_message(error)
    verdicts = peers.exchange(verdict)
    raise_first(verdicts)
    if to is None and len({v["digest"] for v in verdicts}) > 1:
        raise RuntimeError(
            "the sums arrived differently on different ranks: check the network. No rank changed anything."
        )
    return verdicts[peers.rank]["digest"]  # type: ignore[no-any-return]


# -- messages of all ranks: every rank finds the same in them ------------------------------------------------------------------


def problem_message(error: Exception) -> Message:
    """Create the message that reports an error to the other ranks."""
    kind = next((name for name, k in ERRORS_BY_NAME.items() if isinstance(error, k)), "RuntimeError")
    return {"problem": [kind, str(error)]}


def raise_first(messages: list[Message]) -> None:
    """Raise the error of the lowest rank that reports one, so that all ranks raise the same error."""
    found = [(rank, m["problem"]) for rank, m in enumerate(messages) if m.get("problem")]
    if found:
        rank, (kind, text) = found[0]
        others = f" (and {counted(len(found) - 1, 'more rank')})" if len(found) > 1 else ""
        raise ERRORS_BY_NAME[kind](f"on rank {rank}{others}: {text} No rank changed anything.")


def gross_bound(messages: list[Message]) -> float:
    """Bound the absolute value of every sum."""
    return float(max(m["agreed_gross"] for m in messages) + sum(m["gross"] for m in messages))


def compare(messages: list[Message]) -> GridChoices:
    """Return the grids in use, or raise the error that all ranks raise."""
    raise_first(messages)
    for name in messages[0]["form"]:
        _check_same(name, _ranks_by(messages, lambda m, name=name: m["form"][name]))  # type: ignore[misc]
    for name in ("kind", "grid", "target_grid"):
        said = _ranks_by(messages, lambda m, name=name: m[name])  # type: ignore[misc]
        said.pop("None", None)
        _check_same(name, said, " Give every head the same FixedPoint, not grid='auto'." if "grid" in name else "")
    _check_same_start(messages)
    _check_names(messages)
    if gross_bound(messages) > LARGEST_SUM:
        raise GridError(
            f"int64 sums could overflow: the bound {gross_bound(messages):.3g} exceeds {float(LARGEST_SUM):.3g}. Nothing was "
            "summed. Use a coarser grid, e.g. with bits=16."
        )
    kind, *grids = (next((m[n] for m in messages if m[n] is not None), None) for n in ("kind", "grid", "target_grid"))
    return GridChoices() if kind is None else GridChoices(kind, *(grid_from_json(g) for g in grids))


def _ranks_by(messages: list[Message], value: Callable[[Message], Any]) -> dict[str, list[int]]:
    """Group ranks by a value in their messages."""
    out: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        out.setdefault(str(value(message)), []).append(rank)
    return out


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _check_same(what: str, said: dict[str, list[int]], hint: str = "") -> None:
    if len(said) > 1:
        found = "; ".join(f"{what} is {value} on {_names(ranks)}" for value, ranks in said.items())
        raise ValueError(f"ranks cannot be added up: {found}. Nothing was summed.{hint}")


def _check_same_start(messages: list[Message]) -> None:
    """Raise VerificationError unless all ranks start from the same agreed state (for reduce_to: the same epoch)."""

    def start(m: Message) -> str:
        everywhere = m["form"]["destination"] is None
        return f"epoch {m['epoch']}" + (f", agreed digest {m['agreed'] or 'empty'}" if everywhere else "")

    said = _ranks_by(messages, start)
    if len(said) == 1:
        return
    most = max(said.values(), key=len)
    alone = sorted(r for ranks in said.values() if ranks is not most for r in ranks)
    detail = "; ".join(f"{state} on {_names(ranks)}" for state, ranks in said.items())
    raise VerificationError(
        f"ranks have diverged: {_names(alone)} and {_names(most)} differ in what was agreed on ({detail}). Nothing was "
        "summed. Load one checkpoint on all ranks (and agree(head) on each), or start from empty heads."
    )


def _check_names(messages: list[Message]) -> None:
    """Raise ValueError if changes with the same id (of one delta, file or copy) are pending on two ranks."""
    for name in sorted({name for m in messages for name in m["names"]}):
        ranks = [rank for rank, m in enumerate(messages) if name in m["names"]]
        if len(ranks) > 1:
            raise ValueError(
                f"{_names(ranks)} hold the same pending changes (of one delta, file or copy, with the id {name}), which would "
                f"be counted {len(ranks)} times. Nothing was summed. If all ranks are to start from them, call agree(head) on "
                "every rank; else keep them on one rank, and discard(head) on the others."
            )
