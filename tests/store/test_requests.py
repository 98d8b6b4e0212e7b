"""Requests for erasure and their receipts: who asked, until when, what was done, and whom a certificate is about."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from torchlssvm import Certificate, FixedPoint, LSSVMHead, RemovalError, VerificationError
from torchlssvm.audit import ErasureReceipt
from torchlssvm.cli import main
from torchlssvm.errors import StoreError
from torchlssvm.events import Add, Remove
from torchlssvm.store import SampleStore, check_absence

J, N = 5, 12
X, Y = torch.randn(N, J, generator=torch.Generator().manual_seed(2)), torch.arange(N) % 2
IDS, SUBJECTS = [f"photo-{i:03d}" for i in range(N)], [f"customer-{i // 4}" for i in range(N)]


@pytest.fixture
def store(tmp_path: Path) -> SampleStore:
    store = SampleStore(tmp_path / "store", head=LSSVMHead(J, 2, grid=FixedPoint(8.0)))
    store.apply(Add(IDS, X, Y, SUBJECTS))
    return store


def test_the_way_of_a_request(store: SampleStore, tmp_path: Path) -> None:
    opened = store.requests.open(
        ["customer-1", "customer-2"], received="2026-01-31T09:00", reason="Art. 17 GDPR", operator="dpo-3"
    )
    assert (opened.state, opened.due, opened.overdue) == ("received", "2026-02-28", True)
    entry = store.history()[-1]
    assert (entry.kind, entry.event_id, entry.samples) == ("request", store.recorded_id(opened.id), 2)
    store.requests.take_step(opened.id, "previewed")
    receipts = store.apply([Remove(subject="customer-1"), Remove(subject="customer-2")], request=opened.id)
    with pytest.raises(StoreError, match="the receipts of 2 erasures are not written"):
        store.compact()
    assert store.requests.get(opened.id).named("subject") == ["customer-1", "customer-2"]
    store.write_receipt([r.event_id for r in receipts], tmp_path / "receipt.json")
    store.compact()
    done = store.requests.get(opened.id)
    assert (done.state, done.named("subject"), done.forgotten) == ("compacted", [], True)
    certificate = store.certificate([opened.id, *done.events])
    store.requests.certified(done.events)
    assert store.requests.close(opened.id).state == "answered"
    assert not store.requests.get(opened.id).overdue
    receipt = ErasureReceipt.load(tmp_path / "receipt.json")
    about = receipt.check(certificate).facts
    assert (len(about["ids"]), about["subjects"], about["request"]) == (8, ["customer-1", "customer-2"], opened.id)
    assert {i: n for e in receipt.events for i, n in zip(e["ids"], e["nonces"], strict=True)} == receipts[
        0
    ].nonces | receipts[1].nonces
    store.close()
    content = b"".join(p.read_bytes() for p in (tmp_path / "store").iterdir())
    assert b"customer-0" in content
    for name in (
        "customer-1",
        "customer-2",
        *IDS[4:],
        *receipts[0].nonces.values(),
        *(n["nonce"] for n in receipt.request["names"]),
    ):
        assert name.encode() not in content
        assert not (len(name) == 64 and bytes.fromhex(name) in content)


def test_the_order_of_the_list(store: SampleStore) -> None:
    today = datetime.now(UTC).date()
    for name, age in (("R-fresh", 1), ("R-late", 90), ("R-old-answered", 200), ("R-later", 60)):
        store.requests.open("customer-1", request_id=name, received=(today - timedelta(days=age)).isoformat())
    store.requests.close("R-old-answered", "withdrawn")
    assert [(r.id, r.overdue) for r in store.requests.all()] == [
        ("R-late", True), ("R-later", True), ("R-fresh", False), ("R-old-answered", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reason": "Customer-1 wrote to us"}, "reason holds an id or a subject"),
        ({"operator": "photo-004"}, "operator holds an id"),
        ({"request_id": "erase customer-1"}, "request_id holds an id"),
        ({"reason": "two\nlines"}, "one line"),
        ({"reason": "\x1b[2J"}, "printable"),
        ({"received": "yesterday"}, "not a day or a time"),
        ({"received": "2999-01-01"}, "in the future"),
        ({"due": "2020-01-01"}, "before the request was received"),
        ({"subjects": []}, "at least one subject or id"),
        ({"subjects": {"a": 1}}, "text or a list"),
    ],
)
def test_what_is_refused(store: SampleStore, options: dict[str, object], message: str) -> None:
    position = store.position
    with pytest.raises(ValueError, match=message):
        store.requests.open(**({"subjects": "customer-1"} | options))  # type: ignore[arg-type]
    assert (store.requests.all(), store.position) == ([], position)


def test_erasures_belong_to_an_open_request_that_names_them(store: SampleStore, tmp_path: Path) -> None:
    store.requests.open("customer-1", request_id="R-1")
    digest, position = store.head.digest(), store.position
    for event, request, error, message in (
        (Remove(subject="customer-2"), "R-1", ValueError, "does not name the subject"),
        (Remove(subject="customer-1"), "R-2", ValueError, "there is no request"),
        (Add(["n"], X[:1], Y[:1]), "R-1", ValueError, "Remove events only"),
        (Remove(ids=["nobody"]), "R-1", RemovalError, "no sample with the id"),
    ):
        with pytest.raises(error, match=message):
            store.apply(event, request=request)
    with pytest.raises(ValueError, match="used before"):
        store.requests.open("customer-2", request_id="R-1")
    assert (store.head.digest(), store.position) == (digest, position)
    with pytest.raises(ValueError, match="not erased and not compacted and not certified"):
        store.requests.close("R-1")
    store.requests.close("R-1", "the customer withdrew it")
    for again in (
        lambda: store.requests.close("R-1", "twice"),
        lambda: store.apply(Remove(subject="customer-1"), request="R-1"),
    ):
        with pytest.raises(ValueError, match="answered"):
            again()
    store.compact()
    assert store.requests.get("R-1").forgotten


def test_a_request_that_is_not_erased_yet_keeps_its_names_through_a_compaction(store: SampleStore) -> None:
    store.requests.open("customer-1", request_id="R-1")
    store.compact()
    assert store.requests.get("R-1").named("subject") == ["customer-1"]
    assert store.apply(Remove(subject="customer-1"), request="R-1").samples == 4


def test_a_crash_before_the_receipt_is_written_loses_no_nonce(store: SampleStore, tmp_path: Path) -> None:
    store.close()

    def crash() -> None:
        SampleStore(tmp_path / "store").apply(Remove(subject="customer-1", event_id="erasure"), keep_receipt=True)
        os._exit(9)

    process = multiprocessing.get_context("fork").Process(target=crash)
    process.start()
    process.join()
    assert process.exitcode == 9
    with SampleStore(tmp_path / "store") as again:
        assert again.receipts.unwritten() == [again.recorded_id("erasure")]
        with pytest.raises(StoreError, match="not compacted"):
            again.compact()
        with pytest.raises(ValueError, match="inside the store"):
            again.write_receipt(["erasure"], again.path / "receipt.json")
        assert again.receipts.unwritten() == [again.recorded_id("erasure")]
        receipt = again.write_receipt(["erasure"], tmp_path / "receipt.json")
        with pytest.raises(FileExistsError):
            again.write_receipt(["erasure"], tmp_path / "receipt.json")
        again.compact()
        with pytest.raises(StoreError, match="there is no receipt"):
            again.receipt(["erasure"])
        assert receipt.check(again.certificate("erasure")).facts["ids"][0] == "photo-004"


def test_a_receipt_is_checked_against_its_certificate(store: SampleStore, tmp_path: Path) -> None:
    store.apply(Remove(ids=IDS[:2], event_id="one"), keep_receipt=True)
    store.apply(Remove(ids=IDS[2:3], event_id="two"), keep_receipt=True)
    receipt = store.receipt(["one"])
    receipt.check(store.certificate("one"))
    assert receipt.check(store.certificate(["one", "two"])).facts["more"] == 1
    with pytest.raises(VerificationError, match="not about the erasure"):
        receipt.check(store.certificate("two"))
    data = json.loads(
        json.dumps({"events": receipt.events, "request": None, "time": receipt.time, "format": receipt.format})
    )
    data["events"][0]["ids"][0] = "photo-9"
    with pytest.raises(VerificationError, match="not about the sample"):
        ErasureReceipt.from_dict(data).check(store.certificate("one"))
    for name, value in (("events", []), ("events", [{}]), ("request", 7), ("format", "x"), ("more", 1)):
        with pytest.raises(VerificationError, match="not a receipt"):
            ErasureReceipt.from_dict(data | {name: value})
    (tmp_path / "broken").write_text("{")
    with pytest.raises(VerificationError, match="not a receipt"):
        ErasureReceipt.load(tmp_path / "broken")


def test_two_handles_and_snapshots_see_the_entries_of_requests(store: SampleStore, tmp_path: Path) -> None:
    other = SampleStore(tmp_path / "store")
    store.requests.open("customer-1", request_id="R-1")
    other.apply(Remove(subject="customer-1"), request="R-1")
    store.apply(Add(["n"], X[:1], Y[:1]))
    assert (
        store.head.digest()
        == other.head.digest()
        == LSSVMHead(J, 2, grid=FixedPoint(8.0))
        .add(torch.cat([X[:4], X[8:], X[:1]]), torch.cat([Y[:4], Y[8:], Y[:1]]))
        .digest()
    )
    other.close()
    store.close()
    with SampleStore(tmp_path / "store") as again:
        again.requests.open("customer-0", request_id="R-2")
    with SampleStore(tmp_path / "store") as again:
        assert "snapshot" in again.live.recovery


def test_receipts_of_many_samples_are_checked_in_one_pass(store: SampleStore) -> None:
    """Twice the same sample, or a sample of another erasure, does not fill a place."""
    n = 3_000
    ids = [f"many-{i}" for i in range(n)]
    store.apply(Add(ids, torch.zeros(n, J), torch.zeros(n, dtype=torch.int64)))
    store.apply(Remove(ids=ids, event_id="bulk"), keep_receipt=True)
    certificate, receipt = store.certificate("bulk"), store.receipt(["bulk"])
    assert len(receipt.check(certificate).facts["ids"]) == 3000
    event = receipt.events[0]
    for wrong in (
        event | {"ids": [*event["ids"][:-1], event["ids"][0]], "nonces": [*event["nonces"][:-1], event["nonces"][0]]},
        event | {"ids": event["ids"][:-1], "nonces": event["nonces"][:-1]},
    ):
        with pytest.raises(VerificationError, match="of an erasure"):
            replace(receipt, events=[wrong]).check(certificate)


def test_a_request_is_erased_when_nothing_is_held_of_all_whom_it_names(store: SampleStore, tmp_path: Path) -> None:
    """One of two subjects is erased and compacted: the other is neither forgotten nor answered for."""
    store.requests.open(["customer-1", "customer-2"], ids=["photo-000"], request_id="R-1")
    first = store.apply(Remove(subject="customer-1"), request="R-1")
    assert store.requests.get("R-1").state == "received"
    receipt = store.write_receipt([first.event_id], tmp_path / "first.json")
    assert receipt.subjects == ["customer-1"]  # the others are not in it: they are held
    store.compact()
    half = store.requests.get("R-1")
    assert (half.state, half.named("subject"), half.named("id")) == ("received", ["customer-2"], ["photo-000"])
    store.requests.certified([first.event_id])
    with pytest.raises(ValueError, match="not erased and not compacted and not certified"):
        store.requests.close("R-1")
    certificate = store.certificate(["R-1", first.event_id])
    assert check_absence(store, certificate, receipt)["receipt"].facts["returned"] == 0
    rest = [store.apply(event, request="R-1") for event in (Remove(subject="customer-2"), Remove(ids=["photo-000"]))]
    assert store.requests.get("R-1").state == "erased"
    store.write_receipt([r.event_id for r in rest], tmp_path / "rest.json")
    store.compact()
    done = store.requests.get("R-1")
    assert (done.state, done.forgotten, len(done.events)) == ("compacted", True, 3)
    store.requests.certified([first.event_id])  # not all of them
    assert store.requests.get("R-1").state == "compacted"
    store.requests.certified(done.events)
    with pytest.raises(ValueError, match="no longer kept, so a text cannot be checked"):
        store.requests.close("R-1", "customer-1 is gone")
    assert store.requests.close("R-1").state == "answered"


def test_a_request_may_arrive_on_a_day_that_is_tomorrow_elsewhere(store: SampleStore) -> None:
    here = datetime.now(UTC) + timedelta(hours=13)
    assert store.requests.open("customer-1", received=here.isoformat()).open
    with pytest.raises(ValueError, match="in the future"):
        store.requests.open("customer-1", received=here + timedelta(days=1))


def test_short_names_count_as_words(store: SampleStore) -> None:
    store.apply(Add(["x1"], X[:1], Y[:1], "u42"))
    with pytest.raises(ValueError, match="holds an id or a subject"):
        store.requests.open("u42", reason="mail of U42.")
    with pytest.raises(ValueError, match="holds an id or a subject"):
        store.requests.open("u42", reason="about x1")
    with pytest.raises(ValueError, match="holds an id or a subject"):
        store.requests.open("u42", request_id="R-u42")
    with pytest.raises(ValueError, match="holds an id or a subject"):
        store.requests.open("Zo\u00eb", reason="letter of zoe\u0308")
    assert store.requests.open("17", reason="Art. 17 GDPR").reason == "Art. 17 GDPR"  # a number tells nothing


def test_an_open_request_knows_whom_to_answer_and_a_closed_one_does_not(store: SampleStore) -> None:
    def on_disk(name: str) -> bool:
        return any(name.encode() in path.read_bytes() for path in store.path.iterdir() if path.is_file())

    store.apply(Add(["berg-1"], torch.ones(1, store.head.in_features), [0], subject="Anna Berg"))
    request = store.requests.open(subjects="Anna Berg")
    store.apply(Remove(subject="Anna Berg"))  # not as part of the request
    store.compact()
    assert store.requests.get(request.id).named("subject") == ["Anna Berg"]
    store.requests.close(request.id, answer="erased earlier")
    store.compact()
    assert not on_disk("Anna Berg")


@pytest.mark.parametrize("text", ["anna-berg", "AnnaBerg", "for anna.berg", "anna  berg", "ANNA_BERG-2"])
def test_a_name_of_several_words_is_found_however_it_is_joined(store: SampleStore, text: str) -> None:
    for field in ("operator", "reason", "request_id"):
        with pytest.raises(ValueError, match=field):
            store.requests.open("Anna Berg", **{field: text})
    with pytest.raises(ValueError, match="event_id"):
        Remove(subject="Anna Berg", event_id=text)
    Remove(subject="Anna Berg", event_id="Joanna-Berger")
    Remove(ids=["id-10"], event_id="valid 10 days")
    assert not store.requests.all()


# -- ids of events -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["R-2026-01-01-0123abcd", "rollback-" + "ab" * 16, hashlib.md5(b"anna@berg.de").hexdigest()]
)
def test_no_id_of_a_caller_is_recorded_as_it_is(store: SampleStore, name: str) -> None:
    done = store.apply(Remove(subject="customer-1", event_id=name), keep_receipt=True)
    recorded = store.recorded_id(name)
    assert (done.event_id, store.history()[-1].event_id) == (name, recorded)
    assert recorded == store.recorded_id(recorded) != name
    assert store.has_applied(name)
    assert store.has_applied(recorded)
    assert [event["event_id"] for event in store.receipt(recorded).events] == [recorded]
    assert [event["event_id"] for event in store.certificate(name).events] == [recorded]
    assert not any(name.encode() in path.read_bytes() for path in store.path.iterdir() if path.is_file())


def test_an_event_is_found_by_any_form_of_its_id(store: SampleStore) -> None:
    store.apply(Remove(subject="customer-1", event_id="zo\u00eb"), keep_receipt=True)
    store.apply(Remove(subject="customer-2", event_id=77), keep_receipt=True)  # type: ignore[arg-type]
    for given in ("zoe\u0308", "zo\u00eb", 77, "77"):
        assert store.has_applied(given)  # type: ignore[arg-type]
        assert len(store.receipt(given).events) == 1  # type: ignore[arg-type]
        assert store.receipt([given]).events == store.receipt(given).events  # type: ignore[arg-type, list-item]
    with pytest.raises(ValueError, match="event_id"):
        store.has_applied(7.7)  # type: ignore[arg-type]


def test_an_id_and_its_recorded_form_are_one_id(store: SampleStore) -> None:
    x = torch.ones(1, store.head.in_features)
    both = [Add(["new"], x, [0], event_id="dd"), Add(["new"], x, [0], event_id=store.recorded_id("dd"))]
    assert [done.applied for done in store.apply(both)] == [True, False]
    with pytest.raises(ValueError, match="used"):
        store.apply(Add(["other", "more"], torch.cat([x, x]), [0, 1], event_id=store.recorded_id("dd")))


# -- erasures ------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for kill -9."""


@pytest.mark.parametrize("step", ["refresh", "save", "mark_written", "compact", "certificate", "certified"])
def test_a_killed_erasure_is_finished_by_the_same_call(
    store: SampleStore, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = store.requests.open("customer-1").id
    files: dict[str, Any] = {"receipt": tmp_path / "r.json", "certificate": tmp_path / "c.json", "compact": True}
    owner: Any = {
        "save": Certificate,
        "mark_written": type(store.receipts),
        "certified": type(store.requests),
    }.get(step, SampleStore)

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, killed)
        with pytest.raises(Killed):
            store.erase(request=request, **files)
    store._db.connection.close()  # as the end of the process does
    with SampleStore(tmp_path / "store") as again:
        if "compacted" not in again.requests.get(request).steps:
            with pytest.raises(ValueError, match="may still be in the files"):
                again.requests.close(request, "nothing is held any more")
        again.erase(request=request, **files)
        certificate = Certificate.load(tmp_path / "c.json")
        receipt = ErasureReceipt.load(tmp_path / "r.json")
        assert certificate.compacted
        assert certificate.erased == 4
        receipt.check(certificate)
        assert receipt.subjects == ["customer-1"]
        assert again.requests.get(request).skipped == []
        again.requests.close(request)


def test_the_command_line_finishes_an_erasure_that_was_stopped(store: SampleStore, tmp_path: Path) -> None:
    request = store.requests.open("customer-1").id
    store.erase(request=request, receipt=tmp_path / "r.json")  # stopped before the compaction and the certificate
    store.close()
    command = ["remove", str(tmp_path / "store"), "--request", request, "--compact"]
    command += ["--certificate", str(tmp_path / "c.json"), "--receipt", str(tmp_path / "r.json")]
    assert main(command) == 0
    assert Certificate.load(tmp_path / "c.json").compacted
    assert main(["request", "close", str(tmp_path / "store"), request]) == 0


def test_a_request_of_a_stranger_is_answered_only_where_nothing_is_left(store: SampleStore) -> None:
    request = store.requests.open("customer-1").id
    store.apply(Remove(subject="customer-1"))  # without the request
    with pytest.raises(RemovalError, match="torchlssvm compact"):
        store.erase(request=request)
    store.compact()
    with pytest.raises(RemovalError, match="--answer"):
        store.erase(request=request)


def test_a_file_of_something_else_is_not_overwritten(store: SampleStore, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        store.erase("customer-1", certificate=tmp_path / "c.json")
    assert (len(store), (tmp_path / "c.json").read_text()) == (N, "mine")


@pytest.mark.parametrize("name", ["one.json", "folder/../one.json"])
def test_a_certificate_never_replaces_the_receipt(store: SampleStore, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="receipt and of the certificate"):
        store.erase("customer-1", receipt=tmp_path / "one.json", certificate=tmp_path / name)
    assert len(store) == N


def test_a_receipt_covers_all_parts_of_a_request(store: SampleStore, tmp_path: Path) -> None:
    """The file is the only copy of the nonces once the store is compacted: a later part is added to it."""
    store.requests.open(["customer-1", "customer-2"], request_id="R1")
    store.erase("customer-1", request="R1", receipt=tmp_path / "r.json", compact=True)
    first = ErasureReceipt.load(tmp_path / "r.json")
    done = store.erase(request="R1", receipt=tmp_path / "r.json", compact=True, certificate=tmp_path / "c.json")
    both = ErasureReceipt.load(tmp_path / "r.json")
    assert (both.ids, both.subjects) == (IDS[4:], ["customer-1", "customer-2"])
    assert both.events[0] == first.events[0]
    about = both.check(done.certificate).facts
    assert (about["ids"], about["subjects"], about["request"], about["more"]) == (IDS[4:], both.subjects, "R1", 0)
    assert (tmp_path / "r.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", ["", "{}", None])
def test_a_file_that_is_no_receipt_of_the_request_stops_the_erasure(
    store: SampleStore, tmp_path: Path, content: str | None
) -> None:
    store.requests.open(["customer-1", "customer-2"], request_id="R1")
    if content is None:  # the receipt of another erasure
        store.erase("customer-0", receipt=tmp_path / "r.json")
    else:
        (tmp_path / "r.json").write_text(content)
    before = (tmp_path / "r.json").read_bytes(), len(store)
    with pytest.raises(ValueError, match="not about this erasure"):
        store.erase("customer-1", request="R1", receipt=tmp_path / "r.json")
    assert ((tmp_path / "r.json").read_bytes(), len(store)) == before


def test_the_ids_of_an_erasure_belong_to_the_request(store: SampleStore, tmp_path: Path) -> None:
    store.requests.open("customer-1", ids=[IDS[0]], request_id="R1")
    before = store.position
    with pytest.raises(ValueError, match=f"names neither the sample '{IDS[8]}' nor its subject"):
        store.erase(ids=[IDS[0], IDS[8]], request="R1", receipt=tmp_path / "r.json")
    assert (len(store), store.position, (tmp_path / "r.json").exists()) == (N, before, False)
    done = store.erase(ids=[IDS[0], IDS[4]], request="R1", receipt=tmp_path / "r.json")
    assert (done.samples, done.still_held) == (2, ["customer-1"])
