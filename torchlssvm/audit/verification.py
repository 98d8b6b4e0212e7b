"""The verification of certificates.

A certificate says that samples were erased from a store, and gives the digest of the head since then. ``verify`` believes
none of it: it checks the signature with a key of the verifier's own, solves the head's weights again from its statistics,
and, given the store, rebuilds the statistics from the surviving rows and follows the journal.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from torchlssvm.audit import keys
from torchlssvm.audit.certificate import Certificate
from torchlssvm.errors import StoreBusyError, StoreError, VerificationError
from torchlssvm.linear import LSSVMHead
from torchlssvm.linear.diagnostics.calibration import fit

if TYPE_CHECKING:
    from torchlssvm.store import SampleStore

__all__ = ["Report", "verify"]

WEIGHT_TOLERANCE = 1e-9
"""Relative distance of weights in use from those solved from statistics: rounding, on another number of threads or device."""

SCORE_TOLERANCE = 1e-6
"""Distance of scores and probabilities of a machine that was trained in steps from those of one that was trained at once."""

TINY = 1e-300
"""Least scale of a relative distance: weights that are all zero have none."""


@dataclass(frozen=True)
class Report:
    """The checks that were made. Always true: a report exists only when every check held."""

    checks: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return "\n".join(f"{name}: {result}" for name, result in self.checks.items())


def verify(
    certificate: Certificate | Mapping[str, Any] | str | bytes | os.PathLike[str],
    head: Any = None,
    store: SampleStore | None = None,
    public_key: Any = None,
    allow_unsigned: bool = False,
) -> Report:
    """Check a certificate of erasure against all that is given; VerificationError with the reason when it fails.

    Args:
        certificate: the object, its dict, its JSON, or a file.
        head: its digest must be the certificate's (or, with the store, that of the surviving rows); w, b and P must be those
            that its statistics give, so a head that still serves old weights fails. So does one with another calibration than
            the certificate's or, with the store, than the surviving rows give.
        store: the journal must be unbroken and hold the certificate's events; none of the erased samples may be in its rows;
            the rows, summed anew, must give the digest.
        public_key: Ed25519, of the issuer: from the verifier, never from the certificate.
        allow_unsigned: accept a certificate whose signature is missing or cannot be checked for want of a key.
    """
    cert = read_certificate(certificate)
    checks = {"signature": _check_signature(cert, public_key, allow_unsigned)}
    if store is None:
        return Report(checks | _check_state(cert, head, None))
    with store.view():  # journal, rows and head of one position, whatever is written meanwhile
        if store.machine is not None and getattr(head, "head", head) is store.machine.head:
            _ = store.head
        return Report(checks | _check_state(cert, head, store))


def _check_state(cert: Certificate, head: Any, store: SampleStore | None) -> dict[str, str]:
    """Check store and head, as far as they are given."""
    checks: dict[str, str] = {}
    expected = cert.digest
    if store is not None:
        try:
            expected, found = _check_store(cert, store)
        except StoreBusyError:
            raise
        except StoreError as error:
            raise VerificationError(f"the store does not hold up: {error}") from error
        checks |= found
    if head is not None:
        checks |= _check_head(head, expected, store)
        checks |= _check_calibration(getattr(head, "head", head), cert, store)
    return checks


def read_certificate(certificate: Any) -> Certificate:
    """A certificate from any of its forms, with every field checked."""
    if isinstance(certificate, Certificate):
        return Certificate.from_json(certificate.to_json())
    if isinstance(certificate, Mapping):
        return Certificate.from_dict(certificate)
    if isinstance(certificate, bytes) or (isinstance(certificate, str) and certificate.lstrip().startswith("{")):
        return Certificate.from_json(certificate)
    if isinstance(certificate, str | os.PathLike):
        return Certificate.load(certificate)
    raise VerificationError(f"not a certificate: {type(certificate).__name__}")


def _check_signature(cert: Certificate, given: Any, allow_unsigned: bool) -> str:
    if not cert.signature:
        if given is not None or not allow_unsigned:
            raise VerificationError("the certificate is not signed")
        return "none (allowed)"
    if given is None:
        if not allow_unsigned:
            raise VerificationError("give the issuer's public key to check the signature")
        return "not checked (no public key; allowed)"
    try:
        signature = bytes.fromhex(cert.signature)
    except ValueError:
        signature = b""
    if signature.hex() != cert.signature:  # one way to write it, as for everything else
        raise VerificationError("the signature is not lower-case hex")
    key = keys.public_key(given)
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, cert.payload())
    except InvalidSignature:
        raise VerificationError(
            "the signature does not fit: the certificate was altered, or another key signed it"
        ) from None
    return "Ed25519, holds"


def _check_store(cert: Certificate, store: SampleStore) -> tuple[str | None, dict[str, str]]:
    """Check journal and rows; returns the digest the head must have now, and the checks made."""
    history = store.history()
    entries = {entry.position: entry for entry in history}
    if not 0 < cert.position <= len(entries):
        raise VerificationError(
            f"the journal ends at event {len(entries)}, the certificate's position is {cert.position}"
        )
    if entries[cert.position].chain.hex() != cert.chain:
        raise VerificationError(f"the journal is not the one of the certificate: the chain differs at {cert.position}")
    erased: set[str] = set()
    for event in cert.events:
        entry = entries.get(event["position"])
        if entry is None or (entry.event_id, entry.kind) != (event["event_id"], event["kind"]):
            raise VerificationError(
                f"the journal has no {event['kind']} event {event['event_id'][:80]!r} at {event['position']}"
            )
        if entry.commitment_list != event["commitments"] or entry.time != event["time"]:
            raise VerificationError(f"the samples of event {event['event_id'][:80]!r} are not those of the journal")
        if event["kind"] == "remove":
            erased.update(event["commitments"])
    if store.fingerprint != cert.fingerprint:
        raise VerificationError("the store is bound to another network than the certificate")
    count, digest = store.recompute(
        history
    )  # the erased are removals of the journal: a row of one is none that it has as held
    if cert.position == len(entries):
        if digest != cert.digest:
            raise VerificationError("the surviving rows do not give the certificate's digest")
        if count != cert.samples:
            raise VerificationError(f"the store holds {count} samples, the certificate says {cert.samples}")
    elif cert.digest is not None and store.confirms(cert.position, cert.digest) is False:
        raise VerificationError("the digest after the erasure was another one, says the journal")
    later = len(entries) - cert.position
    return digest, {
        "journal": f"{len(entries)} events, unbroken, {later} after the certificate",
        "erased": f"{len(erased)} samples, none of them in the store",
        "rows": f"{count} summed anew" + (", digest as recorded" if digest is not None else ""),
    }


def _check_head(head: Any, expected: str | None, store: SampleStore | None) -> dict[str, str]:
    head = getattr(head, "head", head)  # an attached classifier
    if not isinstance(head, LSSVMHead) or head.statistics is None or not head.statistics.exact:
        return _check_without_digest(head, store)
    reason = head.uncertifiable
    if reason is not None:
        raise VerificationError(f"the head cannot be certified: {reason}")
    if head.digest() != expected:
        raise VerificationError("the head's digest is not the one it should have: it holds other samples")
    fresh = _solved_anew(head)
    largest = 0.0
    for name in ("w", "b", "P"):
        used, solved = getattr(head, name), getattr(fresh, name)
        scale = max(TINY, float(solved.abs().max())) if solved.numel() else 1.0
        error = float((used - solved).abs().max()) / scale if used.shape == solved.shape and used.numel() else 0.0
        if used.shape != solved.shape or not error <= WEIGHT_TOLERANCE:
            raise VerificationError(
                f"{name} is not what the statistics give: the head serves other weights (off by {error:.2g})"
            )
        largest = max(largest, error)
    return {"head": f"digest holds; w, b and P as solved from the statistics (to {largest:.1g})"}


def _solved_anew(head: Any) -> LSSVMHead:
    """Another head with the same options and statistics; VerificationError when they contradict each other."""
    fresh = LSSVMHead.from_config(head.config(), device=head.device)
    try:
        fresh.adopt(head.statistics.state())
    except ValueError as error:
        raise VerificationError(f"the head's options do not fit its statistics: {error}") from error
    return fresh


def _check_calibration(head: Any, cert: Certificate, store: SampleStore | None) -> dict[str, str]:
    """Check the calibration, which samples that are gone must not have shaped."""
    if not isinstance(head, LSSVMHead):
        return {}
    calibration = head.calibration
    if calibration is None:
        return {"calibration": "void, not served"} if "calibration" in head.choices else {}
    if store is None:
        said = cert.scope.get("choices", {}).get("calibration")
        if said is None or str(said).startswith("void"):
            return {"calibration": "made since the certificate; not checked without the store"}
        if said != head.choices["calibration"]:
            raise VerificationError("the calibration is not the one of the certificate")
        return {"calibration": "as the certificate says"}
    if calibration.grouped:
        return {"calibration": "on leave-group-out scores; not checked, since the store does not know the groups"}
    fresh = _solved_anew(head)
    scores, labels = [], []
    for rows in store.batches():
        labels.append(rows.y.to(head.device))
        scores.append(fresh.leave_one_out(rows.x.to(head.device), labels[-1]))
    s, y = torch.cat(scores), torch.cat(labels)
    again = fit(s, y, torch.ones_like(s[:, 0]), calibration.method)
    error = float((again(s) - calibration(s)).abs().max())
    if calibration.samples != len(y) or not error <= SCORE_TOLERANCE:
        raise VerificationError(f"the calibration is not the one that the surviving samples give (off by {error:.2g})")
    return {"calibration": f"made anew from the surviving rows, the same (to {error:.1g})"}


def _check_without_digest(head: Any, store: SampleStore | None) -> dict[str, str]:
    """Learn the surviving rows with another machine and compare the scores of the rows: for machines without a digest."""
    if store is None:
        raise VerificationError(
            f"a {type(head).__name__} without a digest can be checked against its store only: give store="
        )
    fresh = store.relearn(copy.deepcopy(head))
    largest = 0.0
    for rows in store.batches():
        here, there = head(rows.x.to(torch.float64)), fresh(rows.x.to(torch.float64))
        largest = max(largest, float((here - there).abs().max() / there.abs().max().clamp(min=TINY)))
    if not largest <= SCORE_TOLERANCE:
        raise VerificationError(f"the head's scores are not those of the surviving samples (off by {largest:.2g})")
    return {"head": f"no digest; scores as those of a machine that learned the surviving rows (to {largest:.1g})"}
