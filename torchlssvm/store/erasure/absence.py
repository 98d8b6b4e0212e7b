"""Check that erased samples have not come back, as far as the available names and keys allow."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchlssvm.audit.checks import Check, Outcome, checking
from torchlssvm.errors import VerificationError
from torchlssvm.store.journal import commitments

if TYPE_CHECKING:
    from torchlssvm.audit.certificate import Certificate
    from torchlssvm.audit.receipt import ErasureReceipt
    from torchlssvm.store.sample_store import SampleStore


def check_absence(
    store: SampleStore, certificate: Certificate, receipt: ErasureReceipt | None = None
) -> dict[str, Check]:
    """Look for the return of erased samples: by the suppression list, and by the names of a receipt.

    VerificationError if the store holds an erased sample again without a lawful return. The result also lists what could not be
    checked.
    """
    with store.view():
        with checking("returned"):
            found = {"returned": check_list(store, receipt is not None)}
        if receipt is not None:
            with checking("receipt"):
                about, back = receipt.check(certificate), check_receipt(store, receipt)
            facts = {**about.facts, "returned": back}
            if receipt.request is not None:  # the journal has it with these names
                facts |= {"request": receipt.request["id"], "subjects": receipt.subjects, "unnamed_request": False}
            found["receipt"] = replace(about, facts=facts)
        return found


def check_list(store: SampleStore, receipt: bool) -> Check:
    """Compare all samples with the suppression list, if there is one and its key."""
    if store.suppression.path is None or not store.suppression.has_key:
        facts = {"list": store.suppression.path is not None, "receipt": receipt}
        return Check("returned", Outcome.NOT_CHECKED, facts)
    used, held = store.suppression.required(), store.suppression.held()
    if held:
        raise VerificationError(
            f"{len(held)} samples of the store are on its suppression list, the first is {held[0]!r}: a copy was put back, an "
            "erasure was interrupted, or they were erased in another store with the same list. Erase them here too."
        )
    return Check("returned", Outcome.HOLDS, {"entries": len(used)})


def check_receipt(store: SampleStore, receipt: ErasureReceipt) -> int:
    """Look for the ids and subjects of a receipt among the samples; returns how many are back after a lawful return."""
    request = receipt.request
    entries = {entry.event_id: entry for entry in store.history()}
    if request is not None:
        opened = entries.get(request["id"])
        nonces = [bytes.fromhex(n["nonce"]) for n in request["names"]]
        named = {c.hex() for c in commitments(nonces, [n["name"] for n in request["names"]])}
        if opened is None or opened.kind != "request" or not named <= set(opened.commitment_list):
            raise VerificationError(f"the journal has no request {request['id'][:80]!r} with the names of the receipt")
    erased = max(event["position"] for event in receipt.events)
    returns = [entry for entry in entries.values() if entry.kind == "readmit" and entry.position > erased]
    back = [("id", i) for i in receipt.ids if i in store]
    back += [("subject", s) for s in receipt.subjects if store.find(subject=s)]
    allowed = {c for entry in returns for c in entry.commitment_list}
    unlawful = [(kind, name) for kind, name in back if not (allowed and tag_of(store, kind, name) in allowed)]
    if unlawful:
        kind, name = unlawful[0]
        what = "the sample" if kind == "id" else "a sample of"
        hint = (
            " (the journal has a lawful return after the erasure; only the suppression key can tell whose)"
            if returns and not store.suppression.has_key
            else ""
        )
        raise VerificationError(f"{what} {name!r} of the receipt is in the store again{hint}")
    return len(back)


def tag_of(store: SampleStore, kind: str, name: str) -> str | None:
    """The entry that a name has in the suppression list, as hex; None without the key."""
    if not store.suppression.has_key or store.suppression.path is None:
        return None
    tags = store.suppression.tags([name], []) if kind == "id" else store.suppression.tags([], [name])
    return tags[0].hex()
