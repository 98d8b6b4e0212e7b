"""A complete erasure: remove the samples, write the receipt, compact the store and write the certificate, in this order.

Later, :func:`check_absence` checks that the samples have not been added again, as far as the available names and keys allow.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torchlssvm.audit.certificate import Certificate
from torchlssvm.audit.checks import Check, Outcome, checking
from torchlssvm.audit.receipt import ErasureReceipt
from torchlssvm.errors import RemovalError, StoreBusyError, VerificationError
from torchlssvm.events import Remove, check_text
from torchlssvm.files import refuse_in_store
from torchlssvm.store.erasure.requests import name_list
from torchlssvm.store.journal import commitments
from torchlssvm.store.transaction import EventResult
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.store.sample_store import Compaction, SampleStore


@dataclass(frozen=True)
class Erasure:
    """Result of :meth:`SampleStore.erase <torchlssvm.store.SampleStore.erase>`.

    Attributes:
        results: the results of the Remove events of this call, one for each subject and one for the ids. The list is empty if
            an earlier call removed the samples.
        event_ids: all erasures that the receipt and the certificate cover.
        still_held: names in the request that still have samples in the store.
        receipt: the file written by this call or by an earlier one; None if there is no receipt.
        compaction: the result of the compaction; None if you did not request one, or if an earlier call compacted the store.
        certificate: the certificate; None if you did not request one.
        unfinished: the reason why the store could not be compacted. Repeat the call later to finish.
    """

    results: list[EventResult]
    event_ids: list[str]
    still_held: list[str]
    receipt: Path | None
    compaction: Compaction | None
    certificate: Certificate | None
    unfinished: StoreBusyError | None = None

    @property
    def samples(self) -> int:
        """The number of samples that this call removed."""
        return sum(result.samples for result in self.results if result.applied)


def erase(
    store: SampleStore,
    subjects: Any = (),
    ids: Any = (),
    *,
    request: str | None = None,
    event_id: str | None = None,
    receipt: str | os.PathLike[str] | None = None,
    compact: bool = False,
    certificate: str | os.PathLike[str] | None = None,
    key: Any = None,
) -> Erasure:
    """Erase subjects, samples, or all samples named in a request; write the receipt and the certificate.

    The steps of an erasure run in a fixed order: the samples are removed, the receipt is written, the bytes are destroyed, and
    the certificate is written. Each step is durable before the next one starts, and no step is repeated. **After a crash, the
    same call completes the missing steps.** It finds the earlier erasures by the request, or by the ``event_id`` of the first
    call.

    Args:
        store: the store.
        subjects: one or more subjects.
        ids: the ids of the samples.
        request: id of an open request (:attr:`requests`). If you pass no subjects and ids, all samples that the request names
            are erased.
        event_id: the id of the erasure. Default: a random id.
        receipt: file to write the receipt to. The receipt names the erased people, so the file must be outside the store. If
            it is the receipt of earlier erasures of this request, the new erasures are added to it.
        compact: also destroy the bytes; see :meth:`compact`.
        certificate: file to write the certificate to.
        key: key to sign the certificate with; see :meth:`certificate`.
    """
    owners, samples = name_list(subjects, "subject"), name_list(ids, "an id")
    if not owners and not samples and request is None:
        raise ValueError("name at least one subject, id or request")
    if event_id is not None and len(owners) + bool(samples) > 1:
        raise ValueError("event_id names one event: erase one subject, or samples by their ids")
    named = owners or samples
    if request is not None and not named:
        owners, samples = held_of_request(store, request)
    given = {} if event_id is None else {"event_id": check_text(event_id, "event_id")}
    events = [Remove(subject=s, **given) for s in owners] + ([Remove(ids=samples, **given)] if samples else [])
    earlier = [] if request is None else store.requests.get(request).events
    done = list(dict.fromkeys([*earlier, *(store.recorded_id(event.event_id) for event in events)]))
    old_receipt = None if receipt is None else check_place(receipt, ErasureReceipt, done)
    if certificate is not None:
        check_place(certificate, Certificate, done)
        if receipt is not None and Path(receipt).resolve() == Path(certificate).resolve():
            raise ValueError(
                f"{certificate} cannot be the file of the receipt and of the certificate. Nothing was changed."
            )
    results = store.apply(events, request=request, keep_receipt=receipt is not None) if events else []
    if not done:
        raise nothing_held(store, request)
    store.refresh()
    written = None if receipt is None else write_receipt(store, done, Path(receipt), old_receipt)
    last = max(entry.position for entry in store.history() if entry.event_id in done)
    compaction, unfinished = None, None
    if compact and store.compacted < last:
        try:
            compaction = store.compact()
        except StoreBusyError as error:
            unfinished = error
    made = None
    if certificate is not None:
        made = store.certificate([*([request] if request else []), *done], key)
        check_place(certificate, Certificate, done)  # again: the receipt is there now, perhaps under another name
        made.save(certificate)
        if request is not None:
            store.requests.certified(done)
    still_held = [] if request is None else store.requests.still_held(store.requests.get(request))
    names = [n.name for n in still_held if n.name is not None]
    return Erasure(results, done, names, written, compaction, made, unfinished)


def held_of_request(store: SampleStore, request_id: str) -> tuple[list[str], list[str]]:
    """The subjects of a request that have samples in the store, and its stored ids that belong to no such subject."""
    request = store.requests.get(request_id)
    subjects = [s for s in request.named("subject") if store.find(subject=s)]
    ids = [i for i in request.named("id") if i in store]
    owners = store.get(ids).subjects if ids else []
    return subjects, [i for i, owner in zip(ids, owners, strict=True) if owner not in subjects]


def nothing_held(store: SampleStore, request: str | None) -> RemovalError:
    """The error for a request if the store neither holds nor has erased any of its samples."""
    if any(entry.kind == "remove" and entry.position > store.compacted for entry in store.history()):
        advice = f"samples were erased without it, and their bytes may still be there: torchlssvm compact {store.path}"
    else:
        advice = f"answer it with torchlssvm request close {store.path} {request} --answer TEXT"
    return RemovalError(f"nothing is held of those whom the request {request!r} names: {advice}")


Document = TypeVar("Document", ErasureReceipt, Certificate)


def check_place(path: str | os.PathLike[str], kind: type[Document], done: list[str]) -> Document | None:
    """Return the document of an earlier call for these erasures. Raises ValueError if a file cannot be written at a path."""
    place = Path(path)
    if not place.absolute().parent.is_dir():
        raise ValueError(f"{place.absolute().parent} is not a folder: {place.name} cannot be written there")
    refuse_in_store(place)
    if not os.path.lexists(place):
        return None
    try:
        found = kind.load(place)
        about = not {event["event_id"] for event in found.events}.isdisjoint(done)
    except (OSError, ValueError, VerificationError):
        about = False
    if not about:
        raise ValueError(f"{place} exists already, and is not about this erasure: choose another name")
    return found


def write_receipt(store: SampleStore, done: Sequence[str], path: Path, earlier: ErasureReceipt | None) -> Path | None:
    """Write the receipt of erasures unless it was already written; return None if it was written to another file.

    ``earlier`` is the receipt in the file. It may be the only copy of its nonces, so the new receipt includes it.
    """
    waiting = [event_id for event_id in store.receipts.unwritten() if event_id in done]
    if not waiting:
        return path if path.exists() else None
    try:
        store.write_receipt([e for e in store.receipts.all() if e in done], path, earlier)
    except OSError as error:
        raise OSError(
            f"the samples are erased, but their receipt is not written ({error}): nothing is lost until the store is "
            f"compacted. torchlssvm receipt {store.path} --out FILE writes it"
        ) from error
    return path


# -- absence -----------------------------------------------------------------------------------------------------------


def check_absence(
    store: SampleStore, certificate: Certificate, receipt: ErasureReceipt | None = None
) -> dict[str, Check]:
    """Check by the suppression list, and by the names in a receipt, that erased samples have not been added again.

    Raises VerificationError if the store holds an erased sample again without a lawful return. The result also lists the checks
    that were not possible.
    """
    with store.view():
        with checking("returned"):
            found = {"returned": check_list(store, receipt is not None)}
        if receipt is not None:
            with checking("receipt"):
                about, back = receipt.check(certificate), check_receipt(store, receipt)
            facts = {**about.facts, "returned": back}
            if receipt.request is not None:  # the journal contains the request with these names
                facts |= {"request": receipt.request["id"], "subjects": receipt.subjects, "unnamed_request": False}
            found["receipt"] = replace(about, facts=facts)
        return found


def check_list(store: SampleStore, receipt: bool) -> Check:
    """Compare all samples with the suppression list, if the store has a list and its key is given."""
    if store.suppression.path is None or not store.suppression.has_key:
        facts = {"list": store.suppression.path is not None, "receipt": receipt}
        return Check("returned", Outcome.NOT_CHECKED, facts)
    used, held = store.suppression.required(), store.suppression.held()
    if held:
        raise VerificationError(
            f"the store holds {counted(len(held), 'sample')} from its suppression list, the first is {held[0]!r}: a copy was "
            "put back, an erasure interrupted, or they were erased in another store with the same list. Erase them here too."
        )
    return Check("returned", Outcome.HOLDS, {"entries": len(used)})


def check_receipt(store: SampleStore, receipt: ErasureReceipt) -> int:
    """Search the samples for the ids and subjects of a receipt; return the number of samples back after a lawful return."""
    request = receipt.request
    entries = {entry.event_id: entry for entry in store.history()}
    if request is not None:
        opened = entries.get(store.recorded_id(request["id"]))
        nonces = [bytes.fromhex(n["nonce"]) for n in request["names"]]
        named = {c.hex() for c in commitments(nonces, [n["name"] for n in request["names"]])}
        if opened is None or opened.kind != "request" or not named <= set(opened.commitment_list):
            raise VerificationError(f"the journal has no request {request['id'][:80]!r} with the names of the receipt")
    erased = max(event["position"] for event in receipt.events)
    returns = [entry for entry in entries.values() if entry.kind == "readmit" and entry.position > erased]
    allowed = {c for entry in returns for c in entry.commitment_list}
    keyed = store.suppression.path is not None and store.suppression.has_key
    used = store.suppression.required() if allowed and keyed else None
    back = [("id", i) for i in receipt.ids if i in store]
    back += [("subject", s) for s in receipt.subjects if store.find(subject=s)]
    for kind, name in back:
        if used is None or used.tag(kind, name).hex() not in allowed:
            what = "the sample" if kind == "id" else "a sample of"
            hint = " (the journal has a lawful return since; only the suppression key can tell whose)"
            unknown = returns and not store.suppression.has_key
            raise VerificationError(f"{what} {name!r} of the receipt is in the store again{hint if unknown else ''}")
    return len(back)
