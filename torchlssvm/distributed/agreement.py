"""The plan of an exchange: made from the messages of all ranks before anything is summed, the same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchlssvm.errors import GridError, NotFittedError, RemovalError, VerificationError
from torchlssvm.functional.grid import grid_from_json
from torchlssvm.linear.merge_history import as_loaded
from torchlssvm.statistics.batch import GridChoices
from torchlssvm.statistics.statistics import LARGEST_SUM

ERRORS_BY_NAME: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (RemovalError, GridError, VerificationError, NotFittedError, ValueError, TypeError, RuntimeError)
}
"""Errors that a rank can tell to the others by name."""


@dataclass
class ExchangePlan:
    """The sums to be formed: their groups, kind and grid, a bound on them, and True in ``shrunk`` if any rank removed."""

    choices: GridChoices
    groups: list[int]
    gross: float
    shrunk: bool
    merged: set[str]
    keys: list[int]
    ids: list[int]
    salt: bytes
    uncertifiable: str | None
    rows: list[int | None]

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


def _describe(said: dict[str, list[int]], what: str) -> str:
    return "; ".join(f"{what} is {value} on {_names(ranks)}" for value, ranks in said.items())


def make_plan(messages: list[dict[str, Any]]) -> ExchangePlan:
    """Make the plan that all ranks follow, or raise the error that all of them raise."""
    raise_first(messages)
    for name in messages[0]["form"]:
        said = ranks_by(messages, lambda m, name=name: m["form"].get(name))  # type: ignore[misc]
        if len(said) > 1:
            raise ValueError(f"ranks cannot be added up: {_describe(said, name)}. Nothing was summed.")
    decided = [m for m in messages if m["kind"] is not None]
    for name in ("kind", "grid", "target_grid"):
        said = {v: r for v, r in ranks_by(messages, lambda m, name=name: m[name]).items() if v != "None"}  # type: ignore[misc]
        if len(said) > 1:
            hint = " Give every head the same FixedPoint, not grid='auto'." if "grid" in name else ""
            raise ValueError(f"ranks cannot be added up: {_describe(said, name)}. Nothing was summed.{hint}")
    _check_same_start(messages)
    _check_origins(messages)
    gross = max(m["agreed_gross"] for m in messages) + sum(m["gross"] for m in messages)
    if gross > LARGEST_SUM:
        raise GridError(
            f"int64 sums could overflow: the bound {gross:.3g} exceeds {float(LARGEST_SUM):.3g}. Nothing was summed. Use a "
            "coarser grid, e.g. with bits=16."
        )
    grids = [next((m[n] for m in messages if m[n] is not None), None) for n in ("grid", "target_grid")]
    return ExchangePlan(
        GridChoices(decided[0]["kind"], *(grid_from_json(g) for g in grids)) if decided else GridChoices(),
        sorted({g for m in messages for g in m["groups"]}),
        gross,
        any(m["shrunk"] for m in messages),
        {i for m in messages for i in m["merged"]},
        [m["keys"] for m in messages],
        [m["ids"] for m in messages],
        hashlib.sha256("".join(m["salt"] for m in messages).encode()).digest(),
        next((m["uncertifiable"] for m in messages if m["uncertifiable"]), None),
        [m["rows"] for m in messages],
    )


def _check_same_start(messages: list[dict[str, Any]]) -> None:
    """VerificationError unless every rank starts from the same agreed state (for reduce_to: from the same epoch)."""
    epochs, digests = ranks_by(messages, lambda m: m["epoch"]), ranks_by(messages, lambda m: m["agreed"] or "empty")
    everywhere = messages[0]["to"] is None
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


def _check_origins(messages: list[dict[str, Any]]) -> None:
    """ValueError if the same copy, file or delta is pending on two ranks; so is a file that one saved and another loaded."""
    holders: dict[str, list[int]] = {}
    loaded: set[str] = set()
    for rank, message in enumerate(messages):
        for origin in {as_loaded(o) for o in message["origins"]}:
            holders.setdefault(origin, []).append(rank)
        loaded |= {o for o in message["origins"] if as_loaded(o) == o}
    for origin, ranks in sorted(holders.items()):
        if len(ranks) > 1 and origin in loaded:
            what = (
                "were copied from one head or loaded from one file"
                if ":" in origin
                else f"come from the delta {origin}"
            )
            raise ValueError(
                f"{_names(ranks)} hold the same pending changes (they {what}), which would be counted {len(ranks)} times. "
                "Nothing was summed. If all ranks are to start from them, call agree(head) on every rank; else keep them on "
                "one rank, and discard(head) on the others."
            )
