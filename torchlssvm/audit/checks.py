"""The results of a verification, as typed outcomes and facts, and the sentences that describe them."""

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

    HOLDS = "holds"  # compared and equal
    FAILED = "failed"  # only in ``VerificationError.check``, never in a report
    NOT_CHECKED = "not checked"  # nothing to compare it with was given
    CHANGED = "changed"  # changed since the certificate was issued
    OPEN = "open"  # still to be done
    KEPT = "kept"  # chosen before samples changed, and still in use
    VOID = "void"  # no longer in use, since samples have changed


class FileState(Enum):
    """The state of a file that a certificate names."""

    SAME = "unchanged"
    CHANGED = "changed"
    GONE = "gone"
    UNTESTABLE = "exists; whether it changed can no longer be tested"
    TOO_LARGE = "not read (too large)"


@dataclass(frozen=True)
class Check:
    """One check of a verification.

    Attributes:
        name: the name of the check, e.g. "signature".
        outcome: the result.
        facts: the numbers and names that the check found. ``str(check)`` describes them and the outcome in a sentence.
    """

    name: str
    outcome: Outcome
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.outcome is Outcome.FAILED:
            return printable(self.facts["reason"])
        return printable(SENTENCES[self.name](self.outcome, self.facts))


@dataclass(frozen=True, repr=False)
class Report:
    """The checks that were made, by name. ``bool(report)`` is always True, because a failed check raises VerificationError."""

    checks: dict[str, Check] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Report({', '.join(f'{name}: {check.outcome.value}' for name, check in self.checks.items())})"

    def __str__(self) -> str:
        return "\n".join(f"{name}: {check}" for name, check in self.checks.items())


@contextmanager
def checking(name: str) -> Iterator[None]:
    """Attach the failed check to a VerificationError that is raised inside."""
    try:
        yield
    except VerificationError as error:
        if error.check is None:
            error.check = Check(name, Outcome.FAILED, {"reason": str(error)})
        raise


# -- text --------------------------------------------------------------------------------------------------------------

Facts = Mapping[str, Any]
SAME_CONTENT = "the same content under another id and subject would not be recognized"
"""Limit of every check of names."""


def _signature(outcome: Outcome, facts: Facts) -> str:
    if outcome is Outcome.HOLDS:
        holder = f" of {facts['holder']}" if facts["holder"] else ""
        others = f" ({counted(facts['others'], 'more signature')} not checked)" if facts["others"] else ""
        return f"valid, by the trusted key{holder}, Ed25519 sha256:{facts['key']}{others}"
    return "not checked: give the issuer's public key" if facts["signed"] else "none: the certificate is not signed"


def _state(outcome: Outcome, facts: Facts) -> str:
    if outcome is Outcome.HOLDS:
        return "rows, number of samples, shape and grid match the certificate"
    if facts["recorded"]:
        return "changed since the certificate was issued; the journal has the certificate's commitment"
    return "changed since the certificate was issued; the journal no longer has the earlier state"


def _compacted(outcome: Outcome, facts: Facts) -> str:
    if outcome is Outcome.OPEN:
        return "no: the store's files may still contain bytes of the erased samples"
    later = ", and after the certificate was issued" if facts["later"] else ""
    return f"yes: the store's files were rewritten after the erasure{later}"


def _head(outcome: Outcome, facts: Facts) -> str:
    if facts["digest"]:
        *first, last = facts["derived"]
        follow = f"{', '.join(first)} and {last} match a fresh solve (to {facts['error']:.1g})"
        return f"its digest shows that it has learned the remaining samples and no others; {follow}"
    held = {
        "all": "it holds the remaining samples and no others",
        "some": "it holds some of the remaining samples and no others",
        "none": "it stores no samples",
        "sums": "its sums match those of the remaining samples (to 1e-9)",
    }[facts["holds"]]
    return f"no digest; {held}; its scores match a machine trained on the remaining samples (to {facts['error']:.1g})"


def _rho(outcome: Outcome, facts: Facts) -> str:
    if outcome is Outcome.HOLDS:
        return f"{facts['rho']!r} minimizes GCV for the remaining samples (to {facts['excess']:.1g})"
    if outcome is Outcome.OPEN:
        return f"will be chosen by {facts['method']} from the remaining samples at the first read"
    when = "before samples changed, and kept" if outcome is Outcome.KEPT else "from the remaining samples; not checked"
    return f"{facts['rho']!r}, chosen by {facts['method']} {when}"


def _calibration(outcome: Outcome, facts: Facts) -> str:
    if outcome is Outcome.VOID:
        return "invalidated by a change of samples; not in use"
    if outcome is Outcome.NOT_CHECKED:
        why = "the store does not know its groups" if facts["grouped"] else "newer than the certificate; give the store"
        return f"not checked: {why}"
    if "error" not in facts:
        return "matches the certificate"
    return f"matches a calibration on the remaining samples (to {facts['error']:.1g})"


def _returned(outcome: Outcome, facts: Facts) -> str:
    if outcome is Outcome.HOLDS:
        entries = counted(facts["entries"], "entr", "ies") if facts["entries"] != 1 else "1 entry"
        return f"no sample of the store is on its suppression list ({entries}); {SAME_CONTENT}"
    why = "give the key of the suppression list" if facts["list"] else "the store uses no suppression list"
    names = ", except by the names in the receipt" if facts["receipt"] and not facts["list"] else ""
    return f"not checked: {why}. Samples that were added again cannot be recognized{names}"


def _receipt(outcome: Outcome, facts: Facts) -> str:
    whose = f" of {listed(facts['subjects'])}" if facts["subjects"] else ""
    request = f", request {facts['request']}" if facts["request"] else ""
    parts = [f"the certificate is about {counted(len(facts['ids']), 'sample')}{whose}{request}: {listed(facts['ids'])}"]
    if facts["more"]:
        parts.append(f"{counted(facts['more'], 'more sample')} of the certificate not in this receipt")
    if facts["unnamed_request"]:
        parts.append("the certificate does not name the request in the receipt, which was not checked")
    if facts.get("returned"):
        parts.append(f"{facts['returned']} of these names returned lawfully, as recorded in the journal")
    elif "returned" in facts:
        parts += ["none of these names is in the store", SAME_CONTENT]
    return "; ".join(parts)


def _time_stamp(outcome: Outcome, facts: Facts) -> str:
    when = f"{facts['time']:%Y-%m-%d %H:%M:%S} UTC"
    if outcome is Outcome.HOLDS:
        return f"{facts['authority']} confirms that the certificate existed on {when}"
    return f"claims {when}; NOT checked: give the root certificate of the authority"


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
        f"{counted(facts['samples'], 'remaining sample')}, all recorded in the journal; "
        + ("checked against the sums (Freivalds' test)" if facts["fast"] else "summed again")
    ),
    "state": _state,
    "requests": lambda _, facts: (
        f"{counted(facts['requests'], 'request')}, with the same dates and reasons as in the store"
    ),
    "compacted": _compacted,
    "older files": lambda _, facts: f"files from before the erasure still exist: {listed(facts['names'])}",
    "files": lambda _, facts: "; ".join(f"{name}: {state.value}" for name, state in facts["files"].items()),
    "network": lambda _, facts: "its fingerprint matches the certificate",
    "head": _head,
    "exported head": _head,
    "rho": _rho,
    "calibration": _calibration,
    "returned": _returned,
    "receipt": _receipt,
    "time stamp": _time_stamp,
}
"""For each check, the function that describes its result."""
