"""The results of a verification: typed outcomes with their facts, and the one place where they become text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torchlssvm.errors import VerificationError
from torchlssvm.wording import counted, listed, printable

__all__ = ["Check", "FileState", "Outcome", "Report", "checking"]


class Outcome(Enum):
    """The result of one check."""

    HOLDS = "holds"  # compared, and equal
    FAILED = "failed"  # only as ``VerificationError.check``: a report has none
    NOT_CHECKED = "not checked"  # what it would be compared with was not given
    CHANGED = "changed"  # no longer what it was when the certificate was issued
    OPEN = "open"  # still to be done
    KEPT = "kept"  # chosen before samples changed, and still in use
    VOID = "void"  # no longer in use, since samples have changed


class FileState(Enum):
    """The state of a file that a certificate names."""

    SAME = "unchanged"
    CHANGED = "changed"
    GONE = "gone"
    UNTESTABLE = "there; its old state can no longer be tested"
    TOO_LARGE = "not read: too large"


@dataclass(frozen=True)
class Check:
    """One check of a verification.

    Attributes:
        name: of what was checked, e.g. "signature".
        outcome: the result.
        facts: numbers and names found, by their names; ``str(check)`` turns all of it into a sentence.
    """

    name: str
    outcome: Outcome
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.outcome is Outcome.FAILED:
            return printable(self.facts["reason"])
        return printable(SENTENCES[self.name](self.outcome, self.facts))


@dataclass(frozen=True)
class Report:
    """The checks that were made, by name. Always true: a report exists only when no check failed."""

    checks: dict[str, Check] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return "\n".join(f"{name}: {check}" for name, check in self.checks.items())


@contextmanager
def checking(name: str) -> Iterator[None]:
    """Give a VerificationError that is raised inside the name of the check that failed."""
    try:
        yield
    except VerificationError as error:
        if error.check is None:
            error.check = Check(name, Outcome.FAILED, {"reason": str(error)})
        raise


# -- text --------------------------------------------------------------------------------------------------------------

Facts = Mapping[str, Any]
SAME_CONTENT = "the same content under a new id and another subject is not recognized"
"""Limit of every check of names."""


def _signature(outcome: Outcome, facts: Facts) -> str:
    if outcome is Outcome.HOLDS:
        holder = f" of {facts['holder']}" if facts["holder"] else ""
        others = f" ({counted(facts['others'], 'more signature')} not needed)" if facts["others"] else ""
        return f"valid, by the trusted key{holder}, Ed25519 sha256:{facts['key']}{others}"
    return "not checked: pass the issuer's public key" if facts["signed"] else "none: the certificate is not signed"


def _state(outcome: Outcome, facts: Facts) -> str:
    if outcome is Outcome.HOLDS:
        return "as the certificate says: rows, number of samples, shape and grid"
    if facts["recorded"]:
        return (
            "changed since; the journal recorded the one that the certificate commits to, which can no longer be tested"
        )
    return "changed since; the journal no longer tells what it was"


def _compacted(outcome: Outcome, facts: Facts) -> str:
    if outcome is Outcome.OPEN:
        return "no: bytes of the erased samples may still be in the files of the store"
    later = ", after the certificate" if facts["later"] else ""
    return f"yes: the store's files were rewritten after the erasure{later}"


def _head(outcome: Outcome, facts: Facts) -> str:
    if facts["digest"]:
        *first, last = facts["derived"]
        follow = f"{', '.join(first)} and {last} follow from them (to {facts['error']:.1g})"
        return f"its digest is that of the samples left: it has learned them and no others; {follow}"
    held = {
        "all": "it holds the samples left and no others",
        "some": "the samples that it holds are among those left",
        "none": "it keeps no samples",
    }[facts["holds"]]
    return f"no digest; {held}; it scores like a machine that learned the samples left (to {facts['error']:.1g})"


def _rho(outcome: Outcome, facts: Facts) -> str:
    if outcome is Outcome.HOLDS:
        return f"{facts['rho']!r}, the minimum of GCV for the samples left (to {facts['excess']:.1g})"
    if outcome is Outcome.OPEN:
        return f"to be chosen by {facts['method']} from the samples left, at the first read"
    when = "before samples changed, and kept" if outcome is Outcome.KEPT else "from the samples left; not checked"
    return f"{facts['rho']!r}, chosen by {facts['method']} {when}"


def _calibration(outcome: Outcome, facts: Facts) -> str:
    if outcome is Outcome.VOID:
        return "void, since samples have changed; not in use"
    if outcome is Outcome.NOT_CHECKED:
        why = "the store does not know the groups" if facts["grouped"] else "made after the certificate; give the store"
        return f"not checked: {why}"
    if "error" not in facts:
        return "as the certificate says"
    return f"the one that the samples left give (to {facts['error']:.1g})"


def _returned(outcome: Outcome, facts: Facts) -> str:
    if outcome is Outcome.HOLDS:
        return f"no sample of the store is on its suppression list of {facts['entries']} entries; {SAME_CONTENT}"
    why = "the key of the suppression list was not given" if facts["list"] else "the store uses no suppression list"
    names = " except by the names in the receipt" if facts["receipt"] and not facts["list"] else ""
    return f"not checked: {why}, so a sample added again cannot be recognized{names}"


def _receipt(outcome: Outcome, facts: Facts) -> str:
    whose = f" of {listed(facts['subjects'])}" if facts["subjects"] else ""
    request = f", request {facts['request']}" if facts["request"] else ""
    parts = [f"the certificate is about {counted(len(facts['ids']), 'sample')}{whose}{request}: {listed(facts['ids'])}"]
    if facts["more"]:
        parts.append(f"{counted(facts['more'], 'more sample')} of the certificate not in this receipt")
    if facts["unnamed_request"]:
        parts.append("the certificate does not name the receipt's request, so nothing in that was checked")
    if facts.get("returned"):
        parts.append(f"{facts['returned']} of these names are back after a lawful return, which the journal has")
    elif "returned" in facts:
        parts += ["none of these names is in the store", SAME_CONTENT]
    return "; ".join(parts)


def _time_stamp(outcome: Outcome, facts: Facts) -> str:
    when = f"{facts['time']:%Y-%m-%d %H:%M:%S} UTC"
    if outcome is Outcome.HOLDS:
        return f"the certificate existed on {when}, says {facts['authority']}"
    return f"names {when}; NOT checked: give the certificate of the authority"


SENTENCES: dict[str, Callable[[Outcome, Facts], str]] = {
    "signature": _signature,
    "journal": lambda _, facts: (
        f"{counted(facts['entries'], 'event')}, complete and unaltered; {facts['later']:,} after the certificate"
    ),
    "erased": lambda _, facts: (
        f"{counted(facts['samples'], 'sample')} erased; none is in the store (a sample added again gets a new commitment, "
        "which this check cannot see)"
    ),
    "rows": lambda _, facts: (
        f"{counted(facts['samples'], 'sample')} left, those of the journal and no others; "
        + ("checked against the sums (Freivalds' test)" if facts["fast"] else "summed again")
    ),
    "state": _state,
    "requests": lambda _, facts: (
        f"{counted(facts['requests'], 'request')}, with the dates and reasons that the store has"
    ),
    "compacted": _compacted,
    "older files": lambda _, facts: f"from before the erasure, and still there: {listed(facts['names'])}",
    "files": lambda _, facts: "; ".join(f"{name}: {state.value}" for name, state in facts["files"].items()),
    "network": lambda _, facts: "the one that the certificate names, by its fingerprint",
    "head": _head,
    "exported head": _head,
    "rho": _rho,
    "calibration": _calibration,
    "returned": _returned,
    "receipt": _receipt,
    "time stamp": _time_stamp,
}
"""For each check, the function that describes its result."""
