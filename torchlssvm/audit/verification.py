"""Verify certificates of erasure.

A certificate states that samples were erased from a store, and commits to the state of the head since then. ``verify`` trusts
neither statement, but checks the signature with a key that you trust and solves for the weights again from the statistics. If
you pass the store, it also recomputes the statistics from the remaining rows and checks the journal.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchlssvm.audit import keys
from torchlssvm.audit.certificate import Certificate, Opening, public_choices
from torchlssvm.audit.checks import Check, FileState, Outcome, Report, checking
from torchlssvm.backbone_hash import fingerprint
from torchlssvm.errors import StoreBusyError, StoreError, VerificationError
from torchlssvm.files import holds_store
from torchlssvm.functional.threads import threads_for
from torchlssvm.linear import LinearHead, LSSVMHead
from torchlssvm.linear.data_choices import ChoiceState
from torchlssvm.linear.diagnostics.calibration import fit
from torchlssvm.linear.diagnostics.rho_rule import TIE_TOLERANCE, excess

if TYPE_CHECKING:
    from torchlssvm.store import SampleStore

__all__ = ["verify"]

WEIGHT_TOLERANCE = 1e-9
"""Largest relative difference between the weights in use and a fresh solve: rounding on another device or thread count."""

SCORE_TOLERANCE = 1e-6
"""Largest difference between the scores of a machine that was trained in steps and one that was trained at once."""

ANOTHER_STORE = "this is probably another store, or an older copy"
"""The likely reason if the journal of a store does not match a certificate."""

LEAST_DIVISOR = 1e-300
"""Smallest divisor of a relative difference, for weights that are all zero."""


def verify(
    certificate: Certificate | Mapping[str, Any] | str | bytes | os.PathLike[str],
    head: Any = None,
    store: SampleStore | str | os.PathLike[str] | None = None,
    public_key: Any = None,
    allow_unsigned: bool = False,
    *,
    opening: Opening | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    preprocessing: Any = None,
    fast: bool = False,
) -> Report:
    """Check a certificate of erasure against the head, store and keys that you pass. Raises VerificationError if it fails.

    Args:
        certificate: a :class:`Certificate`, its envelope as a dict or as JSON, or a file.
        head: the head or classifier in use. Its digest must equal that of the remaining rows or, without the store, the digest
            that ``opening`` opens. Its w, b and P must follow from its statistics, so a head that still serves old weights
            fails. A MarginHead or a kernel machine must hold the remaining rows and no others. A calibration must match the
            certificate or, with the store, the remaining rows. The network of a classifier must have the fingerprint in the
            certificate.
        store: the store, or its path (it is then opened read-only). The journal must be unbroken and contain the events of the
            certificate. The rows must contain no erased sample, and their sum must match the commitment. Everything else that
            the certificate says about the store must be true.
        public_key: the Ed25519 key of the issuer, from a source that you trust, never from the certificate. Pass one key, a
            list, or a mapping from names of holders to keys. One of the keys must have signed.
        allow_unsigned: accept a certificate without a signature, and do not check a signature if you pass no key.
        opening: the key of the commitment (:meth:`SampleStore.opening`), to check a head without its store.
        preprocessing: the preprocessing of the classifier's inputs, if it is part of the fingerprint.
        fast: check the sums with Freivalds' test (:mod:`torchlssvm.statistics.sum_check`) instead of summing the rows again.
            The test takes as long as reading the rows, and wrong sums pass with a probability below 2^-60.
    """
    if isinstance(store, str | os.PathLike):
        with open_store(store, fast) as found:
            return verify(
                certificate,
                head,
                found,
                public_key,
                allow_unsigned,
                opening=opening,
                preprocessing=preprocessing,
                fast=fast,
            )
    check_store(store)
    machine = getattr(head, "head", head)  # of an attached classifier
    given = Examined(read_certificate(certificate), head, machine, store, read_opening(opening), preprocessing, fast)
    with checking("signature"):
        checks = {"signature": check_signature(given.cert, public_key, allow_unsigned)}
    if store is None:
        return Report(checks | run_checks(given))
    threads = threads_for(machine.in_features**3) if isinstance(machine, LSSVMHead) else nullcontext()
    with store.view(), threads:  # journal, rows and head of one position, even if others write at the same time
        if store.live.adapter is not None and store.live.adapter.head is machine:
            store.live.follow()
        try:
            return Report(checks | run_checks(given))
        except StoreBusyError:
            raise
        except StoreError as error:
            raise VerificationError(f"the store is damaged: {error}") from error


@contextmanager
def open_store(path: str | os.PathLike[str], fast: bool) -> Iterator[SampleStore]:
    """Open a store for the time of a check. Raises VerificationError if it is damaged."""
    from torchlssvm.store import SampleStore

    try:
        with SampleStore(path, readonly=True) as store:
            if not fast:  # the fast check does this itself
                store.check_structure()
            yield store
    except StoreBusyError:
        raise
    except StoreError as error:
        if not holds_store(Path(path)):
            raise
        raise VerificationError(f"the store is damaged: {error}") from error


def check_store(store: Any) -> None:
    """Raise TypeError unless ``store`` is a store or None."""
    if store is None:
        return
    from torchlssvm.store import SampleStore

    if not isinstance(store, SampleStore):
        raise TypeError(f"store takes a SampleStore or the path of one; got {type(store).__name__}")


@dataclass
class Examined:
    """Everything that a certificate is compared with. ``machine``: the head of a classifier, or the head itself.

    Checks of the store record results for later ones: ``entries`` of the journal; ``count`` and ``digest`` of the rows.
    """

    cert: Certificate
    head: Any
    machine: Any
    store: Any  # SampleStore | None
    opening: Opening | None
    preprocessing: Any
    fast: bool
    entries: Any = None
    count: int = 0
    digest: str | None = None

    @property
    def last(self) -> int:
        """Position of the certificate's last event."""
        return int(max(event["position"] for event in self.cert.events))


def run_checks(given: Examined) -> dict[str, Check]:
    """Make all checks for which there is something to compare with, in order."""
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
    """Read a certificate in any of its forms, and check every field."""
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
    """Read an opening in any of its forms."""
    if given is None or isinstance(given, Opening):
        return given
    return Opening.load(given) if isinstance(given, str | os.PathLike) else Opening.from_dict(given)


def check_signature(cert: Certificate, given: Any, allow_unsigned: bool) -> Check:
    if not cert.signatures:
        if given is not None or not allow_unsigned:
            allow = "" if given is not None else "; pass allow_unsigned=True (--allow-unsigned) to accept that"
            raise VerificationError(f"the certificate is not signed{allow}")
        return Check("signature", Outcome.NOT_CHECKED, {"signed": False})
    if given is None:
        if not allow_unsigned:
            raise VerificationError(
                "give the issuer's public key to check the signature (public_key=, --public-key FILE), or skip that check with "
                "allow_unsigned=True (--allow-unsigned)"
            )
        return Check("signature", Outcome.NOT_CHECKED, {"signed": True})
    signer = keys.find_signer(cert, given)
    if signer is None:
        raise VerificationError("the signature is not valid: the certificate was altered, or another key signed it")
    name, key = signer
    facts = {"holder": name, "key": keys.key_id(key), "others": len(cert.signatures) - 1}
    return Check("signature", Outcome.HOLDS, facts)


# -- the store ---------------------------------------------------------------------------------------------------------


def check_journal(given: Examined) -> Check:
    """Check that the journal is the one of the certificate and contains its events."""
    cert, given.entries = given.cert, given.store.history()
    entries = {entry.position: entry for entry in given.entries}
    if not 0 < cert.position <= len(entries):
        raise VerificationError(
            f"the journal ends at event {len(entries)}, but the certificate was issued at {cert.position}: {ANOTHER_STORE}"
        )
    if entries[cert.position].chain.hex() != cert.chain:
        raise VerificationError(
            f"the journal does not match the certificate (its hash differs at event {cert.position}): {ANOTHER_STORE}"
        )
    for event in cert.events:
        entry, name = entries.get(event["position"]), event["event_id"][:80]
        if entry is None or (entry.event_id, entry.kind) != (event["event_id"], event["kind"]):
            raise VerificationError(f"the journal has no {event['kind']} event {name!r} at {event['position']}")
        if entry.commitment_list != event["commitments"] or entry.time != event["time"]:
            raise VerificationError(f"the samples of event {name!r} differ from those in the journal")
    return Check("journal", Outcome.HOLDS, {"entries": len(entries), "later": len(entries) - cert.position})


def check_erased(given: Examined) -> Check:
    """Check that the journal records every row as present, so that no row is an erased sample; sum the rows again."""
    given.count, given.digest = given.store.recompute(given.entries, given.fast)
    erased = {c for event in given.cert.events if event["kind"] == "remove" for c in event["commitments"]}
    return Check("erased", Outcome.HOLDS, {"samples": len(erased)})


def check_rows(given: Examined) -> Check:
    """Report how :func:`check_erased` summed the rows."""
    return Check("rows", Outcome.HOLDS, {"samples": given.count, "fast": given.fast and given.digest is not None})


def check_state(given: Examined) -> Check:
    """Check the certificate's statements about the state, if the store is still in that state."""
    cert, issuer = given.cert, given.store.certificates
    if issuer.journal.last_change() > cert.position:
        recorded = issuer.recorded(cert)
        if recorded is False:
            raise VerificationError("the journal has a different state after the erasure")
        return Check("state", Outcome.CHANGED, {"recorded": recorded is True})
    key = issuer.journal.opening(cert.position)
    if given.digest is not None and key is None:
        raise VerificationError(
            "the store has no key for the certificate's commitment, although nothing has changed since it was issued"
        )
    if not cert.opens(key or b"", given.digest):
        raise VerificationError("the remaining rows do not give the state that the certificate commits to")
    for name, now in (("samples", given.count), ("grid", issuer.grid()), ("shape", issuer.shape())):
        if now != getattr(cert, name):
            raise VerificationError(f"{name} is {now} in the store and {getattr(cert, name)} in the certificate")
    return Check("state", Outcome.HOLDS)


def check_requests(given: Examined) -> Check | None:
    """Check the certificate's statements about requests."""
    if not given.cert.requests:
        return None
    known = {r.id: r for r in given.store.requests.all()}
    for request in given.cert.requests:
        found = known.get(request["id"]) or known.get(given.store.recorded_id(request["id"]))
        if found is None or not found.matches(request):
            raise VerificationError(f"the store has no request {request['id'][:80]!r} with the same dates and reasons")
    return Check("requests", Outcome.HOLDS, {"requests": len(given.cert.requests)})


def check_compaction(given: Examined) -> Check:
    """Check that the store was compacted, if the certificate says so."""
    said, done = given.cert.compacted, given.store.compacted >= given.last
    if said and not done:
        raise VerificationError("the certificate says that the store was compacted after the erasure, but it was not")
    return Check("compacted", Outcome.HOLDS if done else Outcome.OPEN, {"later": done and not said})


def check_older_files(given: Examined) -> Check | None:
    """Check that the certificate names all snapshots from before the erasure."""
    issuer = given.store.certificates
    snapshots = issuer.snapshots.names_before(given.last)
    unnamed = [name for name in snapshots if name not in given.cert.scope.get("snapshots", [])]
    if unnamed:
        raise VerificationError(f"{unnamed[0]} is older than the erasure, and the certificate does not list it")
    older = snapshots + issuer.checkpoints_before(given.last)
    return Check("older files", Outcome.OPEN, {"names": older}) if older else None


def check_files(given: Examined) -> Check | None:
    """Compare the files that the certificate commits to."""
    if not given.cert.files:
        return None
    issuer = given.store.certificates
    found = issuer.compare_files(given.cert, issuer.journal.opening(given.cert.position))
    same = all(state is FileState.SAME for state in found.values())
    return Check("files", Outcome.HOLDS if same else Outcome.CHANGED, {"files": found})


def check_binding(given: Examined) -> None:
    """Check the network of the store."""
    if given.store.fingerprint != given.cert.fingerprint:
        raise VerificationError("the store and the certificate name different networks")


# -- the head ----------------------------------------------------------------------------------------------------------


def check_network(given: Examined) -> Check | None:
    """Check the network of an attached classifier."""
    backbone = getattr(given.head, "backbone", None)
    if not isinstance(backbone, torch.nn.Module) or given.cert.fingerprint is None:
        return None
    if fingerprint(backbone, given.preprocessing) != given.cert.fingerprint:
        raise VerificationError(
            "the classifier's network does not match the certificate: build it with the same weights"
            + (" (pass preprocessing= if it is part of the fingerprint)" if given.preprocessing is None else "")
        )
    return Check("network", Outcome.HOLDS)


def has_expected_digest(given: Examined) -> bool:
    """Compare the digest of a head with that of the store's rows or, without a store, with the certificate."""
    if given.store is not None:
        return bool(given.machine.digest() == given.digest)
    if given.opening is None:
        raise VerificationError(
            "a head can only be checked with its store (store=), or with an opening from the issuer (opening=): the "
            "certificate contains a commitment, not a digest"
        )
    if given.opening.chain != given.cert.chain:
        raise VerificationError("the opening belongs to another state than the certificate")
    return given.cert.opens(given.opening.secret(), given.machine.digest())


def check_head(given: Examined) -> Check:
    """Check that a head has learned the remaining rows and no others, and that its weights follow from them."""
    head = given.machine
    if not isinstance(head, LinearHead) or not head.statistics.exact:
        return check_without_digest(head, given.store)
    reason = head.uncertifiable
    if reason is not None:
        raise VerificationError(f"the head cannot be certified: {reason}")
    if not has_expected_digest(given):
        raise VerificationError("the head's digest differs from that of the remaining samples: it has learned others")
    if head._keeps_rows:
        check_rows_held(head, given.store)
    used_values, largest = head._derived(), 0.0
    for name, solved in head._derived_anew().items():
        used, solved = used_values[name].to(torch.float64), solved.to(torch.float64)
        scale = max(LEAST_DIVISOR, float(solved.abs().max())) if solved.numel() else 1.0
        error = float((used - solved).abs().max()) / scale if used.shape == solved.shape and used.numel() else 0.0
        if used.shape != solved.shape or not error <= WEIGHT_TOLERANCE:
            raise VerificationError(
                f"{name} does not follow from the samples: the head uses other weights (off by {error:.2g})"
            )
        largest = max(largest, error)
    return Check("head", Outcome.HOLDS, {"digest": True, "derived": list(used_values), "error": largest})


def check_rows_held(head: LinearHead, store: SampleStore | None) -> None:
    """Check the rows of a head that keeps rows, against the store or, without a store, against its own statistics."""
    fresh = type(head).from_config(head.config(), device=head.device)
    if store is None:
        fresh._adopt(head._sample_state())
        if fresh.digest() != head.digest():
            raise VerificationError("the head's digest differs from that of the rows it holds")
        return
    mine, theirs = head._sample_state(), store.relearn(fresh)._sample_state()
    if any(mine[name].shape != rows.shape or not mine[name].equal(rows) for name, rows in theirs.items()):
        raise VerificationError("the head and the store hold different rows")


def check_rho(given: Examined) -> Check | None:
    """Check that a rho chosen by GCV is a minimum for the remaining samples, apart from rounding.

    A rho that ``select_rho`` chose once cannot be checked.
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
    if not above <= 10 * TIE_TOLERANCE:
        raise VerificationError(
            f"rho is {head.rho!r}, which does not minimize GCV for the remaining samples (the error is {above:.2g} too large)"
        )
    return Check("rho", Outcome.HOLDS, facts | {"excess": above})


def check_calibration(given: Examined) -> Check | None:
    """Check that only remaining samples have shaped the calibration."""
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
            raise VerificationError("the calibration differs from the certificate's")
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
        raise VerificationError(f"the calibration does not follow from the remaining samples (off by {error:.2g})")
    return Check("calibration", Outcome.HOLDS, {"error": error})


def check_without_digest(head: Any, store: SampleStore | None) -> Check:
    """Check a machine without a digest: the samples it holds, and its scores on the remaining rows."""
    if store is None:
        raise VerificationError(
            f"a {type(head).__name__} without a digest can only be checked against its store: pass store="
        )
    if not isinstance(head, LinearHead) and not hasattr(head, "ids"):
        raise VerificationError(
            f"a {type(head).__name__} cannot be checked: pass a linear head, a kernel machine, or a classifier with one"
        )
    fresh = store.relearn(copy.deepcopy(head))
    holds = check_samples_held(head, fresh, store)
    largest = 0.0
    for rows in store.batches():
        here, there = head(rows.x.to(torch.float64)), fresh(rows.x.to(torch.float64))
        largest = max(largest, float((here - there).abs().max() / there.abs().max().clamp(min=LEAST_DIVISOR)))
    if not largest <= SCORE_TOLERANCE:
        raise VerificationError(f"the head's scores do not follow from the remaining samples (off by {largest:.2g})")
    return Check("head", Outcome.HOLDS, {"digest": False, "holds": holds, "error": largest})


def check_samples_held(head: Any, fresh: Any, store: SampleStore) -> str:
    """Compare the samples in a machine with the remaining rows, and with a machine that learned these rows.

    Returns "sums" for a linear head, "some" for a machine that drops samples by itself (a budget, a reserve limit), "none" for
    one that keeps no rows, and "all" otherwise.
    """
    if isinstance(head, LinearHead):
        used, again = head._sample_state(), fresh._sample_state()
        for name in [name for name, value in again.items() if value.is_floating_point()]:
            largest = max(LEAST_DIVISOR, float(again[name].abs().max())) if again[name].numel() else 1.0
            if (
                used[name].shape != again[name].shape
                or not ((used[name] - again[name]).abs() <= WEIGHT_TOLERANCE * largest).all()
            ):
                raise VerificationError(f"the sums in the head differ from those of the {len(store)} remaining samples")
        return "sums"
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
            raise VerificationError("the samples or labels in the head differ from the remaining ones")
    return "some" if forgets else "all"


def samples_held(machine: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the features (n, J) and targets of each part of a machine, by name. Machines save them as rows or as x."""
    state, saved = machine.state_dict(), (("rows", "targets"), ("x", "y"))
    pairs = ((name, x, y) for x, y in saved for name in state if name.rpartition(".")[2] == x)
    return {name: (state[name], state[name[: -len(x)] + y]) for name, x, y in pairs if name[: -len(x)] + y in state}


def as_rows(*columns: torch.Tensor) -> list[bytes]:
    """Return the bytes of each row; minus zero counts as zero."""
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
