"""The verification of certificates.

A certificate says that samples were erased from a store, and commits to the state of the head since then. ``verify`` believes
none of it: it checks the signature with a key of the verifier's own, solves the head's weights again from its statistics,
and, given the store, rebuilds the statistics from the surviving rows and follows the journal.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchlssvm.audit import keys
from torchlssvm.audit.certificate import Certificate, Opening
from torchlssvm.audit.checks import Check, FileState, Outcome, Report, checking
from torchlssvm.audit.public_choices import public_choices
from torchlssvm.backbone_hash import fingerprint
from torchlssvm.errors import StoreBusyError, StoreError, VerificationError
from torchlssvm.functional.threads import threads_for
from torchlssvm.linear import LinearHead, LSSVMHead
from torchlssvm.linear.data_choices import ChoiceState
from torchlssvm.linear.diagnostics.calibration import fit
from torchlssvm.linear.diagnostics.rho_rule import MINIMUM_TOLERANCE, excess

if TYPE_CHECKING:
    from torchlssvm.store import SampleStore

__all__ = ["verify"]

WEIGHT_TOLERANCE = 1e-9
"""Relative distance of weights in use from those solved from statistics: rounding, on another number of threads or device."""

SCORE_TOLERANCE = 1e-6
"""Distance of scores and probabilities of a machine that was trained in steps from those of one that was trained at once."""

ANOTHER_STORE = "probably this is another store, or an older copy"
"""Likely reason why a store's journal is not the one of a certificate."""

LEAST_DIVISOR = 1e-300
"""Least scale of a relative distance: weights that are all zero have none."""


def verify(
    certificate: Certificate | Mapping[str, Any] | str | bytes | os.PathLike[str],
    head: Any = None,
    store: SampleStore | None = None,
    public_key: Any = None,
    allow_unsigned: bool = False,
    *,
    opening: Opening | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    preprocessing: Any = None,
    fast: bool = False,
) -> Report:
    """Check a certificate of erasure against all that is given; VerificationError with the reason when it fails.

    Args:
        certificate: the object, its envelope as a dict or as JSON, or a file.
        head: its digest must be that of the surviving rows or, without the store, the one that ``opening`` opens; w, b and P
            must be those that its statistics give, so a head that still serves old weights fails. A MarginHead or a kernel
            machine must hold the surviving rows and no other; weights and active sets of the former must be those they give.
            A calibration must be the certificate's or, with the store, the one that the surviving rows give. A classifier's
            network must have the certificate's fingerprint.
        store: the journal must be unbroken and hold the certificate's events; none of the erased samples may be in its rows;
            the rows, summed anew, must give what was committed to; and all else that the certificate says of the store must be
            so.
        public_key: Ed25519, of the issuer: from the verifier, never from the certificate. One key, a list, or a mapping from
            names of holders to keys; one of them must have signed.
        allow_unsigned: accept a certificate without a signature, or leave its signature unchecked without a key.
        opening: of the certificate's commitment (:meth:`SampleStore.opening`), for a head without its store.
        preprocessing: of the classifier's inputs, where it is part of the fingerprint.
        fast: check the sums against the rows by Freivalds' test (:mod:`torchlssvm.statistics.sum_check`) instead of summing
            the rows again: it takes the time of reading them, and wrong sums pass with a probability below 2^-60.
    """
    machine = getattr(head, "head", head)  # of an attached classifier
    given = Examined(read_certificate(certificate), head, machine, store, read_opening(opening), preprocessing, fast)
    with checking("signature"):
        checks = {"signature": check_signature(given.cert, public_key, allow_unsigned)}
    if store is None:
        return Report(checks | run_checks(given))
    threads = threads_for(machine.in_features**3) if isinstance(machine, LSSVMHead) else nullcontext()
    with store.view(), threads:  # journal, rows and head of one position, whatever is written meanwhile
        if store.live.adapter is not None and store.live.adapter.head is machine:
            store.live.follow()
        try:
            return Report(checks | run_checks(given))
        except StoreBusyError:
            raise
        except StoreError as error:
            raise VerificationError(f"the store does not hold up: {error}") from error


@dataclass
class Examined:
    """What a certificate is compared with. ``machine``: the head of a classifier, or the head itself.

    The checks of a store leave here what later ones need: ``found``, its facts; ``count`` and ``digest``, of its rows.
    """

    cert: Certificate
    head: Any
    machine: Any
    store: Any  # SampleStore | None
    opening: Opening | None
    preprocessing: Any
    fast: bool
    found: Any = None  # StoreFacts | None
    count: int = 0
    digest: str | None = None


def run_checks(given: Examined) -> dict[str, Check]:
    """Make all checks for which there is something to compare with, in their order."""
    made = {}
    for needed, checks in (
        (given.store is not None, STORE_CHECKS),
        (given.head is not None, HEAD_CHECKS),
        (isinstance(given.machine, LinearHead), CHOICE_CHECKS),
    ):
        for name, make in checks.items() if needed else ():
            with checking(name):
                check = make(given)
            if check is not None:
                made[name] = check
    return made


def read_certificate(certificate: Any) -> Certificate:
    """A certificate from any of its forms, with every field checked."""
    if isinstance(certificate, Certificate):
        return certificate.checked()
    if isinstance(certificate, Mapping):
        return Certificate.from_dict(certificate)
    if isinstance(certificate, bytes) or (isinstance(certificate, str) and certificate.lstrip().startswith("{")):
        return Certificate.from_json(certificate)
    if isinstance(certificate, str | os.PathLike):
        return Certificate.load(certificate)
    raise VerificationError(f"not a certificate: {type(certificate).__name__}")


def read_opening(given: Any) -> Opening | None:
    """An opening from any of its forms."""
    if given is None or isinstance(given, Opening):
        return given
    return Opening.load(given) if isinstance(given, str | os.PathLike) else Opening.from_dict(given)


def check_signature(cert: Certificate, given: Any, allow_unsigned: bool) -> Check:
    if not cert.signatures:
        if given is not None or not allow_unsigned:
            allow = "" if given is not None else ": allow_unsigned=True (--allow-unsigned) accepts that"
            raise VerificationError(f"the certificate is not signed{allow}")
        return Check("signature", Outcome.NOT_CHECKED, {"signed": False})
    if given is None:
        if not allow_unsigned:
            raise VerificationError(
                "give the issuer's public key to check the signature (public_key=, --public-key FILE), or leave it unchecked "
                "(allow_unsigned=True, --allow-unsigned)"
            )
        return Check("signature", Outcome.NOT_CHECKED, {"signed": True})
    signer = keys.find_signer(cert, given)
    if signer is None:
        raise VerificationError("the signature does not fit: the certificate was altered, or another key signed it")
    name, key = signer
    facts = {"holder": name, "key": keys.key_id(key), "others": len(cert.signatures) - 1}
    return Check("signature", Outcome.HOLDS, facts)


# -- the store ---------------------------------------------------------------------------------------------------------


def check_journal(given: Examined) -> Check:
    """Check that the journal is the certificate's and has its events."""
    cert, given.found = given.cert, given.store.certificates.examine(given.cert)
    entries = {entry.position: entry for entry in given.found.entries}
    if not 0 < cert.position <= len(entries):
        raise VerificationError(
            f"the journal ends at event {len(entries)}, the certificate's position is {cert.position}: {ANOTHER_STORE}"
        )
    if entries[cert.position].chain.hex() != cert.chain:
        raise VerificationError(
            f"the journal is not the one of the certificate: the chain differs at {cert.position}; {ANOTHER_STORE}"
        )
    for event in cert.events:
        entry, name = entries.get(event["position"]), event["event_id"][:80]
        if entry is None or (entry.event_id, entry.kind) != (event["event_id"], event["kind"]):
            raise VerificationError(f"the journal has no {event['kind']} event {name!r} at {event['position']}")
        if entry.commitment_list != event["commitments"] or entry.time != event["time"]:
            raise VerificationError(f"the samples of event {name!r} are not those of the journal")
    return Check("journal", Outcome.HOLDS, {"entries": len(entries), "later": len(entries) - cert.position})


def check_erased(given: Examined) -> Check:
    """Check that no erased sample is among the rows, and sum them again.

    The erased are removals of the journal, so that a row of one of them is none that the journal has as held.
    """
    given.count, given.digest = given.store.recompute(given.found.entries, given.fast)
    erased = {c for event in given.cert.events if event["kind"] == "remove" for c in event["commitments"]}
    return Check("erased", Outcome.HOLDS, {"samples": len(erased)})


def check_rows(given: Examined) -> Check:
    """Say how the rows were summed; :func:`check_erased` has done it."""
    return Check("rows", Outcome.HOLDS, {"samples": given.count, "fast": given.fast and given.digest is not None})


def check_state(given: Examined) -> Check:
    """Check what the certificate says of the state, as far as the store is still in it."""
    cert, found = given.cert, given.found
    if found.last_change > cert.position:
        recorded = given.store.certificates.recorded(cert)
        if recorded is False:
            raise VerificationError("the state after the erasure was another one, says the journal")
        return Check("state", Outcome.CHANGED, {"recorded": recorded is True})
    if given.digest is not None and found.key is None:
        raise VerificationError(
            "the store has no key to the certificate's commitment, though nothing has changed since"
        )
    if not cert.opens(found.key or b"", given.digest):
        raise VerificationError("the surviving rows do not give the state that the certificate commits to")
    for name, now in (("samples", given.count), ("grid", found.grid), ("shape", found.shape)):
        if now != getattr(cert, name):
            raise VerificationError(f"the store's {name}: {now}; the certificate says {getattr(cert, name)}")
    return Check("state", Outcome.HOLDS)


def check_requests(given: Examined) -> Check | None:
    """Check what the certificate says of requests."""
    if not given.cert.requests:
        return None
    known = {request.id: request.for_certificate() for request in given.store.requests.all()}
    for request in given.cert.requests:
        if known.get(request["id"]) != request:
            raise VerificationError(
                f"the store has no such request {request['id'][:80]!r}, or has other dates or reasons"
            )
    return Check("requests", Outcome.HOLDS, {"requests": len(given.cert.requests)})


def check_compaction(given: Examined) -> Check:
    """Check that the bytes are gone, if the certificate says so."""
    said, done = given.cert.compacted, given.found.compacted >= max(event["position"] for event in given.cert.events)
    if said and not done:
        raise VerificationError("the certificate says that the store was compacted after the erasure, and it was not")
    return Check("compacted", Outcome.HOLDS if done else Outcome.OPEN, {"later": done and not said})


def check_older_files(given: Examined) -> Check | None:
    """Check that the certificate names the snapshots that are older than the erasure."""
    unnamed = [name for name in given.found.snapshots if name not in given.cert.scope.get("snapshots", [])]
    if unnamed:
        raise VerificationError(f"{unnamed[0]} is older than the erasure, is there, and is not in the certificate")
    older = given.found.snapshots + given.found.checkpoints
    return Check("older files", Outcome.OPEN, {"names": older}) if older else None


def check_files(given: Examined) -> Check | None:
    """Compare the files that the certificate commits to."""
    if not given.cert.files:
        return None
    found = given.store.certificates.compare_files(given.cert, given.found.key)
    same = all(state is FileState.SAME for state in found.values())
    return Check("files", Outcome.HOLDS if same else Outcome.CHANGED, {"files": found})


def check_binding(given: Examined) -> None:
    """Check the network to which the store is bound; there is nothing to say if it is the certificate's."""
    if given.found.fingerprint != given.cert.fingerprint:
        raise VerificationError("the store is bound to another network than the certificate")


# -- the head ----------------------------------------------------------------------------------------------------------


def check_network(given: Examined) -> Check | None:
    """Check the network of an attached classifier."""
    backbone = getattr(given.head, "backbone", None)
    if not isinstance(backbone, torch.nn.Module) or given.cert.fingerprint is None:
        return None
    if fingerprint(backbone, given.preprocessing) != given.cert.fingerprint:
        raise VerificationError(
            "the classifier's network is not the one of the certificate: build it with the same weights"
            + (" (give preprocessing= if it is part of the fingerprint)" if given.preprocessing is None else "")
        )
    return Check("network", Outcome.HOLDS)


def has_expected_digest(given: Examined) -> bool:
    """Compare the digest of a head with that of the store's rows or, without it, with the certificate."""
    if given.store is not None:
        return bool(given.machine.digest() == given.digest)
    if given.opening is None:
        raise VerificationError(
            "a head without its store cannot be compared: the certificate has a commitment instead of a digest. Give "
            "store=, or an opening that the issuer wrote for this purpose"
        )
    if given.opening.chain != given.cert.chain:
        raise VerificationError("the opening is of another state than the certificate")
    return given.cert.opens(given.opening.secret(), given.machine.digest())


def check_head(given: Examined) -> Check:
    """Check that a head has learned the surviving rows and no others, and serves the weights that they give."""
    head = given.machine
    if not isinstance(head, LinearHead) or not head.statistics.exact:
        return check_without_digest(head, given.store)
    reason = head.uncertifiable
    if reason is not None:
        raise VerificationError(f"the head cannot be certified: {reason}")
    if not has_expected_digest(given):
        raise VerificationError("the head's digest is not the one it should have: it holds other samples")
    if head._keeps_rows:
        check_rows_held(head, given.store)
    used_values, largest = head._derived(), 0.0
    for name, solved in head._derived_anew().items():
        used, solved = used_values[name].to(torch.float64), solved.to(torch.float64)
        scale = max(LEAST_DIVISOR, float(solved.abs().max())) if solved.numel() else 1.0
        error = float((used - solved).abs().max()) / scale if used.shape == solved.shape and used.numel() else 0.0
        if used.shape != solved.shape or not error <= WEIGHT_TOLERANCE:
            raise VerificationError(
                f"{name} is not what the samples give: the head serves other weights (off by {error:.2g})"
            )
        largest = max(largest, error)
    return Check("head", Outcome.HOLDS, {"digest": True, "derived": list(used_values), "error": largest})


def check_rows_held(head: LinearHead, store: SampleStore | None) -> None:
    """Check that a head which keeps its rows holds those of the store or, without it, those that its statistics are of."""
    fresh = type(head).from_config(head.config(), device=head.device)
    if store is None:
        fresh._adopt(head._sample_state())
        if fresh.digest() != head.digest():
            raise VerificationError("the head's digest is not that of the rows it holds")
        return
    mine, theirs = head._sample_state(), store.relearn(fresh)._sample_state()
    if any(mine[name].shape != rows.shape or not mine[name].equal(rows) for name, rows in theirs.items()):
        raise VerificationError("the head holds other rows than the store")


def check_rho(given: Examined) -> Check | None:
    """Check that a rho that was chosen by GCV for the samples held is a minimum, apart from rounding.

    A rho that was chosen once, by ``select_rho``, cannot be checked.
    """
    head = given.machine
    choice = head.choices.get("rho")
    if choice is None:
        return None
    facts = {"rho": head.rho, "method": choice.method}
    if choice.state is ChoiceState.OPEN:
        return Check("rho", Outcome.OPEN, facts)
    if choice.state is ChoiceState.STALE:
        return Check("rho", Outcome.KEPT, facts)
    if not choice.rule or not isinstance(head, LSSVMHead) or given.fast:
        return Check("rho", Outcome.NOT_CHECKED, facts)
    above = excess(head._view(), head.rho)
    if not above <= MINIMUM_TOLERANCE:
        raise VerificationError(
            f"rho is {head.rho!r}, and its error lies {above:.2g} above the least: the samples held do not give it by GCV"
        )
    return Check("rho", Outcome.HOLDS, facts | {"excess": above})


def check_calibration(given: Examined) -> Check | None:
    """Check the calibration, which samples that are gone must not have shaped."""
    head, cert, store, opening = given.machine, given.cert, given.store, given.opening
    if "calibration" not in head._choices.made:
        return None
    calibration = head.calibration
    if calibration is None:
        return Check("calibration", Outcome.VOID)
    if store is None:
        said = cert.scope.get("choices", {}).get("calibration")
        if said is None or said["state"] != "current":
            return Check("calibration", Outcome.NOT_CHECKED, {"grouped": False})
        if said != public_choices(head, None if opening is None else opening.secret())["calibration"]:
            raise VerificationError("the calibration is not the one of the certificate")
        return Check("calibration", Outcome.HOLDS)
    if calibration.grouped:
        return Check("calibration", Outcome.NOT_CHECKED, {"grouped": True})
    fresh: Any = copy.deepcopy(head).refresh()
    scores, labels = [], []
    for rows in store.batches():
        labels.append(rows.y.to(head.device))
        scores.append(fresh.leave_one_out(rows.x.to(head.device), labels[-1]))
    s, y = torch.cat(scores), torch.cat(labels)
    again = fit(s, y, torch.ones_like(s[:, 0]), calibration.method)
    error = float((again(s) - calibration(s)).abs().max())
    if calibration.samples != len(y) or not error <= SCORE_TOLERANCE:
        raise VerificationError(f"the calibration is not the one that the surviving samples give (off by {error:.2g})")
    return Check("calibration", Outcome.HOLDS, {"error": error})


def check_without_digest(head: Any, store: SampleStore | None) -> Check:
    """Check a machine without a digest: the samples that it holds, and its scores of the surviving rows."""
    if store is None:
        raise VerificationError(
            f"a {type(head).__name__} without a digest can be checked against its store only: give store="
        )
    fresh = store.relearn(copy.deepcopy(head))
    holds = check_samples_held(head, fresh, store)
    largest = 0.0
    for rows in store.batches():
        here, there = head(rows.x.to(torch.float64)), fresh(rows.x.to(torch.float64))
        largest = max(largest, float((here - there).abs().max() / there.abs().max().clamp(min=LEAST_DIVISOR)))
    if not largest <= SCORE_TOLERANCE:
        raise VerificationError(f"the head's scores are not those of the surviving samples (off by {largest:.2g})")
    return Check("head", Outcome.HOLDS, {"digest": False, "holds": holds, "error": largest})


SAVED_SAMPLES = (("rows", "targets"), ("x", "y"))
"""Names under which kernel machines save the features and targets that they hold."""


def check_samples_held(head: Any, fresh: Any, store: SampleStore) -> str:
    """Compare the samples in a machine with the surviving rows, and with those of one that learned them.

    A machine that forgets by itself (a budget, a reserve limit) holds "some" of the rows, any other one "all", if it keeps
    rows (else "none").
    """
    if isinstance(head, LinearHead):
        if round(head.n) != len(store):
            raise VerificationError(f"the head holds {head.n:g} samples, the store {len(store)}")
        return "all"
    mine, theirs = samples_held(head), samples_held(fresh)
    if not mine:
        return "none"
    forgets = getattr(head, "budget", None) is not None or getattr(head, "reserve_limit", None) is not None
    rows = Counter(row for batch in store.batches() for row in as_rows(batch.x))
    for name, (x, y) in mine.items():
        held = Counter(as_rows(x[:, : store.certificates.shape()["features"]]))
        if held - rows:
            raise VerificationError(f"the head still holds {(held - rows).total()} samples that are not in the store")
        if not forgets and Counter(as_rows(x, y)) != Counter(as_rows(*theirs[name])):
            raise VerificationError("the head does not hold the surviving samples with their labels, and only them")
    return "some" if forgets else "all"


def samples_held(machine: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The features (n, J) and targets of each part of a machine, by the part's name."""
    state = machine.state_dict()
    pairs = ((name, x, y) for x, y in SAVED_SAMPLES for name in state if name.rpartition(".")[2] == x)
    return {name: (state[name], state[name[: -len(x)] + y]) for name, x, y in pairs if name[: -len(x)] + y in state}


def as_rows(*columns: torch.Tensor) -> list[bytes]:
    """The bytes of each row; minus zero counts as zero."""
    table = torch.cat([c.detach().reshape(len(c), -1).to("cpu", torch.float64) for c in columns], 1) + 0.0
    return [row.tobytes() for row in table.numpy()]


STORE_CHECKS: dict[str, Callable[[Examined], Check | None]] = {
    "journal": check_journal,
    "network": check_binding,
    "erased": check_erased,
    "rows": check_rows,
    "state": check_state,
    "requests": check_requests,
    "compacted": check_compaction,
    "older files": check_older_files,
    "files": check_files,
}
HEAD_CHECKS: dict[str, Callable[[Examined], Check | None]] = {"network": check_network, "head": check_head}
CHOICE_CHECKS: dict[str, Callable[[Examined], Check | None]] = {"rho": check_rho, "calibration": check_calibration}
"""Checks in their order, by name: with a store, with a head, and with a head that chooses options from data."""
