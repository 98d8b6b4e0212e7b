"""Certificates: they hold when nothing was done to anybody, and fail with the reason when something was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchlssvm import (
    Certificate,
    CompactLSSVMHead,
    FixedPoint,
    LSSVMHead,
    VerificationError,
    attach,
    audit,
    verify,
)
from torchlssvm.audit import Outcome
from torchlssvm.errors import StoreError
from torchlssvm.events import Add, Relabel, Remove
from torchlssvm.store import SampleStore, check_absence

pytest.importorskip("cryptography", reason="signatures need the package cryptography")
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.support import crafted, store_file

J, K, N = 6, 3, 30
KEY = Ed25519PrivateKey.generate()
PUBLIC = KEY.public_key()


def new_head(**options: Any) -> LSSVMHead:
    return LSSVMHead(J, K, **({"grid": FixedPoint(8.0)} | options))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SampleStore]:
    x = torch.randn(N, J, generator=torch.Generator().manual_seed(0))
    with SampleStore(tmp_path / "store", head=new_head(), fingerprint="net") as opened:
        subjects = [f"user-{i % 4}" for i in range(N)]
        opened.apply(Add(ids=[f"s{i}" for i in range(N)], x=x, y=torch.arange(N) % K, subject=subjects))
        opened.apply(Remove(subject="user-1", event_id="erasure"))
        opened.compact()
        yield opened


def test_what_it_says(store: SampleStore) -> None:
    certificate = store.certificate("erasure", key=KEY, choices={"calibration": "made again"})
    assert certificate.erased == 8
    assert store.head.digest() not in json.dumps(certificate.statement())
    assert certificate.opens(store.opening().secret(), store.head.digest())
    assert certificate.commitment == store.history()[-1].mac.hex()
    assert certificate.position == 2
    assert certificate.chain == store.history()[-1].chain.hex()
    assert certificate.grid == {"limit": (8.0).hex(), "bits": 20, "headroom": 0}
    assert certificate.fingerprint == "net"
    assert certificate.samples == len(store) == 22
    assert certificate.compacted
    assert certificate.scope["choices"]["calibration"] == {"state": "stated", "how": "made again"}
    assert certificate.scope["choices"]["grid"]["state"] == "given"
    assert b"user-1" not in certificate.payload()
    assert b'"s1"' not in certificate.payload()
    assert list(certificate.files) == ["000000000002.snapshot.pt"]
    assert certificate.library.startswith("torchlssvm ")


def test_what_is_printed_is_short_and_names_nobody(store: SampleStore) -> None:
    store.apply(Remove(subject="user-2", event_id="second"), keep_receipt=True)
    certificate = store.certificate("second", key=KEY)
    receipt, opening = store.receipt(["second"]), store.opening()
    report = verify(certificate, head=store.head, store=store, public_key=PUBLIC)
    for shown in map(repr, (certificate, receipt, opening, report)):
        assert len(shown) < 400
        assert "\n" not in shown
        for secret in ("user-2", "s2", opening.key, *(n for e in receipt.events for n in e["nonces"])):
            assert secret not in shown
    assert "7 samples" in repr(certificate)
    assert "7 samples" in repr(receipt)


def test_it_holds(store: SampleStore, tmp_path: Path) -> None:
    certificate = store.certificate("erasure", key=KEY)
    certificate.save(tmp_path / "c.json")
    forms: list[Any] = [certificate, certificate.to_json(), json.loads(certificate.to_json()), tmp_path / "c.json"]
    forms += [str(tmp_path / "c.json"), certificate.to_json().encode()]
    for form in forms:
        report = verify(form, head=store.head, store=store, public_key=PUBLIC)
        assert report
        assert set(report.checks) == {
            "signature", "journal", "erased", "rows", "state", "compacted", "files", "head", "rho"
        }  # fmt: skip
    assert len(str(report).splitlines()) == len(report.checks)
    assert verify(certificate, store=store, public_key=PUBLIC)
    assert verify(certificate, public_key=PUBLIC)
    fast = verify(certificate, head=store.head, store=store, public_key=PUBLIC, fast=True)
    assert (fast.checks["rows"].facts["fast"], report.checks["rows"].facts["fast"]) == (True, False)


def test_the_store_may_be_a_path(store: SampleStore, tmp_path: Path) -> None:
    certificate, path = store.certificate("erasure", key=KEY), tmp_path / "store"
    whole = verify(certificate, head=store.head, store=store, public_key=PUBLIC)
    for form in (path, str(path)):
        for fast in (False, True):
            found = verify(certificate, head=store.head, store=form, public_key=PUBLIC, fast=fast)
            assert found.checks.keys() == whole.checks.keys()
    with pytest.raises(StoreError, match="no store"):
        verify(certificate, store=tmp_path / "elsewhere", public_key=PUBLIC)
    for wrong in (3, store.head, {"path": str(path)}):
        with pytest.raises(TypeError, match=type(wrong).__name__):
            verify(certificate, store=wrong, public_key=PUBLIC)
    store.apply(Add(ids=["later"], x=torch.ones(1, J), y=[0]))  # the store itself is still open and writable
    with crafted.sql(path) as db:
        db.execute("DELETE FROM samples WHERE id = 's0'")
    with pytest.raises(VerificationError):
        verify(certificate, store=path, public_key=PUBLIC)


def test_a_head_without_its_store_needs_an_opening(store: SampleStore, tmp_path: Path) -> None:
    certificate, opening = store.certificate("erasure", key=KEY), store.opening()
    with pytest.raises(VerificationError, match="opening="):
        verify(certificate, head=store.head, public_key=PUBLIC)
    opening.save(tmp_path / "opening.json")
    assert (tmp_path / "opening.json").stat().st_mode & 0o077 == 0
    for form in (opening, tmp_path / "opening.json", json.loads((tmp_path / "opening.json").read_text())):
        assert verify(certificate, head=store.head, public_key=PUBLIC, opening=form)
    store.apply(Relabel(ids=["s0"], y=[2]))
    with pytest.raises(VerificationError, match="another state"):
        verify(certificate, head=store.head, public_key=PUBLIC, opening=store.opening())
    with pytest.raises(VerificationError, match="learned others"):
        verify(certificate, head=store.head, public_key=PUBLIC, opening=opening)
    for junk in (
        {},
        [],
        {"chain": "", "key": "00", "format": "torchlssvm-opening-1"},
        opening.__dict__ | {"format": "torchlssvm-opening-2"},
        opening.__dict__ | {"key": "zz"},
    ):
        with pytest.raises(VerificationError, match="not an opening"):
            verify(certificate, head=store.head, public_key=PUBLIC, opening=junk)


def test_the_network_of_a_classifier_is_checked(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, J), torch.nn.Linear(J, K))
    classifier = attach(net, K, head=new_head())
    mark = audit.fingerprint(classifier.backbone, "resize")
    with SampleStore(tmp_path / "s", head=classifier.head, fingerprint=mark) as store:
        store.apply(Add(ids=range(9), x=torch.randn(9, J), y=torch.arange(9) % K))
        store.apply(Remove(ids=[1], event_id="e"))
        ask = {"store": store, "allow_unsigned": True}
        certificate = store.certificate("e")
        assert verify(certificate, classifier, preprocessing="resize", **ask).checks["network"].outcome is Outcome.HOLDS
        with pytest.raises(VerificationError, match="preprocessing="):
            verify(certificate, classifier, **ask)
        with torch.no_grad():
            classifier.backbone[0].weight[0, 0] += 1e-6
        with pytest.raises(VerificationError, match="network"):
            verify(certificate, classifier, preprocessing="resize", **ask)


def test_it_holds_after_later_events_too(store: SampleStore) -> None:
    certificate = store.certificate("erasure", key=KEY)
    store.apply(Relabel(ids=["s0"], y=[2]))
    report = verify(certificate, head=store.head, store=store, public_key=PUBLIC)
    assert report.checks["journal"].facts["later"] == 1
    store.apply(Remove(subject="user-2", event_id="second"))
    store.compact()
    assert verify(certificate, head=store.head, store=store, public_key=PUBLIC)
    assert verify(store.certificate(["erasure", "second"], key=KEY), head=store.head, store=store, public_key=PUBLIC)
    assert report.checks["state"].outcome is Outcome.CHANGED


def test_signatures_and_their_absence(store: SampleStore) -> None:
    """Without a signature or a key nothing is believed unless asked for; the key comes from the verifier."""
    unsigned, certificate = store.certificate("erasure"), store.certificate("erasure", key=KEY)
    for given, options in (
        (unsigned, {}),
        (unsigned, {"public_key": PUBLIC, "allow_unsigned": True}),
        (certificate, {}),
        (certificate, {"public_key": Ed25519PrivateKey.generate().public_key()}),
    ):
        with pytest.raises(VerificationError) as caught:
            verify(given, head=store.head, store=store, **options)
        assert (caught.value.check.name, caught.value.check.outcome) == ("signature", Outcome.FAILED)
    assert verify(unsigned, head=store.head, store=store, allow_unsigned=True)
    with pytest.raises(ValueError, match="PrivateKey"):
        verify(certificate, public_key=KEY)


def test_several_keys_and_rotation(store: SampleStore) -> None:
    """One trusted key that signed is enough; the key id in the envelope decides nothing, nor does a name that is in it."""
    new = Ed25519PrivateKey.generate()
    certificate = store.certificate("erasure", key=KEY)
    rotated = audit.sign(certificate, new)
    assert len(rotated.signatures) == len(audit.sign(rotated, new).signatures) == 2
    other = Ed25519PrivateKey.generate().public_key()
    for keys in (PUBLIC, new.public_key(), [other, PUBLIC], {"old": PUBLIC, "new": [other, new.public_key()]}):
        assert verify(rotated, public_key=keys)
    trusted = audit.trusted_keys({"the new officer": new.public_key()})
    found = verify(rotated, public_key=trusted).checks["signature"].facts
    assert found == {"holder": "the new officer", "key": audit.key_id(new), "others": 1}
    with pytest.raises(VerificationError, match="another key"):
        verify(certificate, public_key=audit.trusted_keys([other, new.public_key()]))
    envelope = json.loads(certificate.to_json())
    for keyid in ("", audit.key_id(other), "the new officer"):  # a hint, right or wrong
        envelope["signatures"][0]["keyid"] = keyid
        assert verify(envelope, public_key=PUBLIC).checks["signature"].facts["holder"] == ""
    with pytest.raises(VerificationError, match="17 items"):
        verify(envelope | {"signatures": envelope["signatures"] * 17}, public_key=PUBLIC)


def test_keys_with_a_passphrase(store: SampleStore, tmp_path: Path) -> None:
    public = audit.new_key(tmp_path / "key.pem", passphrase="öffne dich")
    assert b"ENCRYPTED" in (tmp_path / "key.pem").read_bytes()
    key = audit.private_key(tmp_path / "key.pem", "öffne dich")
    assert verify(store.certificate("erasure", key=key), public_key=public)
    signed = audit.sign(store.certificate("erasure"), tmp_path / "key.pem", "öffne dich")
    assert verify(signed, public_key=public)
    with pytest.raises(audit.PassphraseError, match="needs a passphrase"):
        store.certificate("erasure", key=tmp_path / "key.pem")
    with pytest.raises(audit.PassphraseError, match="passphrase"):
        audit.private_key(tmp_path / "key.pem", b"wrong")
    with pytest.raises(ValueError, match="empty"):
        audit.new_key(tmp_path / "other.pem", passphrase="")


def test_keys_in_every_form(store: SampleStore, tmp_path: Path) -> None:
    public = audit.new_key(tmp_path / "key.pem")
    assert (tmp_path / "key.pem").stat().st_mode & 0o077 == 0
    with pytest.raises(FileExistsError):
        audit.new_key(tmp_path / "key.pem")
    privates = [tmp_path / "key.pem", (tmp_path / "key.pem").read_bytes(), (tmp_path / "key.pem").read_text()]
    publics = [public, str(public), public.read_bytes(), audit.public_key(public).public_bytes_raw()]
    for private in [*privates, audit.private_key(privates[0]).private_bytes_raw()]:
        for key in publics:
            assert verify(store.certificate("erasure", key=private), public_key=key)
    for bad in (b"short", 5, public, tmp_path / "key.pem.pub"):
        with pytest.raises((ValueError, OSError)):
            store.certificate("erasure", key=bad)
    (tmp_path / "bad.pem").write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    with pytest.raises(ValueError, match="not an Ed25519PrivateKey"):
        store.certificate("erasure", key=tmp_path / "bad.pem")


def altered(certificate: Certificate, signed: bool, **fields: Any) -> Certificate:
    """A certificate with other fields, under the old signature or none."""
    return replace(certificate, **fields, signatures=certificate.signatures if signed else ())


def test_every_altered_field_is_noticed(store: SampleStore) -> None:
    """With a signature whatever the field; without one by the store."""
    good = store.certificate("erasure", key=KEY)
    snapshot = store.path / f"{1:012d}.snapshot.pt"
    changes: dict[str, Any] = {
        "commitment": "0" * 64,
        "position": 1,
        "chain": "0" * 64,
        "grid": None,
        "fingerprint": "other",
        "samples": 3,
        "compacted": False,
        "library": "torchlssvm 9",
        "time": "2020-01-01T00:00:00+00:00",
        "scope": {},
        "files": {},
        "requests": [{"id": "1", "received": "2026-01-01T00:00:00+00:00", "due": "2026-02-01", "reason": ""}],
        "shape": {"features": 1, "classes": 1},
        "events": [good.events[0] | {"event_id": "another"}],
    }
    for name, value in changes.items():
        with pytest.raises(VerificationError, match="was altered"):
            verify(altered(good, True, **{name: value}), head=store.head, store=store, public_key=PUBLIC)
    for name in ("commitment", "position", "chain", "fingerprint", "samples", "events", "grid", "shape", "requests"):
        with pytest.raises(VerificationError):
            verify(altered(good, False, **{name: changes[name]}), store=store, allow_unsigned=True)
    fewer = good.events[0] | {"samples": 7, "commitments": good.events[0]["commitments"][:7]}
    with pytest.raises(VerificationError, match="differ from those in the journal"):
        verify(altered(good, False, events=[fewer]), store=store, allow_unsigned=True)
    snapshot.write_bytes(b"an old one")
    with pytest.raises(VerificationError, match=r"00001\.snapshot\.pt is older than the erasure"):
        verify(good, store=store, public_key=PUBLIC)
    named = altered(good, False, scope={"snapshots": [snapshot.name]})
    assert verify(named, store=store, allow_unsigned=True).checks["older files"].facts == {"names": [snapshot.name]}
    for junk in ({}, [], replace(good, events=[]), "{", b"\xff", None, json.loads(good.to_json()) | {"extra": 1}):
        with pytest.raises(VerificationError, match="not a certificate"):
            verify(junk, allow_unsigned=True)  # type: ignore[arg-type]


def test_a_certificate_that_claims_a_compaction_that_was_not(store: SampleStore) -> None:
    store.apply(Remove(subject="user-2", event_id="more"))
    honest = store.certificate("more")
    assert verify(honest, store=store, allow_unsigned=True).checks["compacted"].outcome is Outcome.OPEN
    with pytest.raises(VerificationError, match="it was not"):
        verify(altered(honest, False, compacted=True), store=store, allow_unsigned=True)
    store.compact()
    assert verify(honest, store=store, allow_unsigned=True).checks["compacted"].facts == {"later": True}


def test_a_head_that_still_serves_old_weights_fails(store: SampleStore) -> None:
    old = store.head.w.clone()
    store.apply(Remove(subject="user-2", event_id="more"))
    certificate = store.certificate("more", key=KEY)
    head = store.head
    assert verify(certificate, head=head, public_key=PUBLIC, opening=store.opening())
    solution = head._solver.solution
    solution.w = solution.w * (old / head.w)
    head._state_version += 1
    with pytest.raises(VerificationError, match="uses other weights"):
        verify(certificate, head=head, public_key=PUBLIC, opening=store.opening())


def test_a_head_that_holds_other_samples_fails(store: SampleStore) -> None:
    certificate = store.certificate("erasure", key=KEY)
    rows = store.get(["s0"])
    other = LSSVMHead.from_config(store.head.config()).merge(store.head).add(rows.x, rows.y)
    with pytest.raises(VerificationError, match="learned others"):
        verify(certificate, head=other, public_key=PUBLIC, opening=store.opening())
    with pytest.raises(VerificationError, match="without a digest"):
        verify(certificate, head=LSSVMHead(J, K, grid=None), public_key=PUBLIC)


def test_an_erased_row_put_back_is_noticed(store: SampleStore) -> None:
    """Even by somebody who kept the row and writes it with its nonce and a right checksum."""
    kept = store_file.read(store.path, "SELECT * FROM samples WHERE id = 's0'")[0]
    store.apply(Remove(ids=["s0"], event_id="two"))
    certificate = store.certificate("two", key=KEY)
    with crafted.sql(store.path) as db:
        db.execute(f"INSERT INTO samples VALUES ({', '.join('?' * len(kept))})", kept)
    with pytest.raises(VerificationError, match="erased is among the rows"):
        verify(certificate, head=store.head, store=store, public_key=PUBLIC)


@pytest.mark.parametrize("change", [{"id": "another"}, {"nonce": bytes(32)}])
def test_an_altered_name_of_a_surviving_row_is_noticed(store: SampleStore, change: dict[str, Any]) -> None:
    """Even with a right checksum: the journal has a commitment to each id with its nonce."""
    certificate = store.certificate("erasure", key=KEY)
    crafted.sample(**change)(store.path)
    with pytest.raises(VerificationError, match="id or nonce was altered: row 1"):
        verify(certificate, head=store.head, store=store, public_key=PUBLIC)


def test_a_restored_backup_is_noticed(store: SampleStore) -> None:
    file = store.path / "samples.sqlite"
    store_file.read(store.path, "PRAGMA wal_checkpoint(TRUNCATE)")
    backup = file.read_bytes()
    certificate = None
    store.apply(Remove(subject="user-2", event_id="more"))
    certificate = store.certificate("more", key=KEY)
    store.close()
    file.write_bytes(backup)
    with pytest.raises(StoreError, match="acknowledged"):
        SampleStore(store.path)
    with SampleStore(store.path, accept_rollback=True) as back:
        assert len(back) == 22
        with pytest.raises(VerificationError, match="older copy"):
            verify(certificate, store=back, public_key=PUBLIC)


def test_unknown_events(store: SampleStore) -> None:
    with pytest.raises(StoreError, match="no event"):
        store.certificate("never")
    with pytest.raises(ValueError, match="at least one"):
        store.certificate([])


def test_certificates_are_for_erasures(store: SampleStore) -> None:
    """One of an addition would cover a sample that is held; nobody issues it, and one that was written by hand is refused."""
    added, relabelled = store.history()[0].event_id, store.apply(Relabel(ids=["s0"], y=[2])).event_id
    for event in (added, relabelled, ["erasure", added]):
        with pytest.raises(ValueError, match="for erasures"):
            store.certificate(event)
    good = store.certificate("erasure")
    for kind in ("add", "relabel", "replace"):
        with pytest.raises(VerificationError, match="not a certificate"):
            verify(replace(good, events=[good.events[0] | {"kind": kind}]), allow_unsigned=True)


def test_a_request_of_a_receipt_counts_only_if_the_certificate_names_it(store: SampleStore) -> None:
    """Without the store, an invented request must not make verify speak of another person."""
    store.requests.open("user-2", request_id="R-1")
    done = store.apply(Remove(subject="user-2"), request="R-1").event_id
    receipt, certificate = store.receipt([done]), store.certificate(["R-1", done])
    assert certificate.covers(receipt.ids[0], receipt.events[0]["nonces"][0])
    name = receipt.request["names"][0]
    assert not certificate.covers(name["name"], name["nonce"])  # a name of the request is no erased sample
    named = receipt.check(certificate).facts
    assert (named["request"], named["subjects"], named["unnamed_request"]) == ("R-1", ["user-2"], False)
    names = [{"kind": "subject", "name": "somebody else", "nonce": "0" * 64}]
    invented = replace(receipt, request=receipt.request | {"id": "R-2", "names": names})
    facts = invented.check(certificate).facts
    assert (facts["request"], facts["subjects"], facts["unnamed_request"]) == (None, [], True)
    assert "somebody" not in str(invented.check(certificate))
    with pytest.raises(VerificationError, match="does not name"):
        replace(receipt, request=receipt.request | {"names": names}).check(certificate)
    with pytest.raises(VerificationError, match="no request"):
        check_absence(store, certificate, invented)


def test_machines_without_a_digest(tmp_path: Path) -> None:
    x = torch.randn(N, J, generator=torch.Generator().manual_seed(0))
    with SampleStore(tmp_path / "s", head=new_head(grid=None)) as store:
        store.apply(Add(ids=range(N), x=x, y=torch.arange(N) % K))
        store.apply(Remove(ids=[1, 2], event_id="e"))
        certificate = store.certificate("e", key=KEY)
        assert certificate.commitment is None
        report = verify(certificate, head=store.head, store=store, public_key=PUBLIC)
        assert report.checks["head"].facts["digest"] is False
        other = new_head(grid=None).add(x, torch.arange(N) % K)
        with pytest.raises(VerificationError, match="28 remaining samples"):
            verify(certificate, head=other, store=store, public_key=PUBLIC)


def test_a_head_without_a_grid_that_holds_an_erased_sample_fails(tmp_path: Path) -> None:
    """In place of an empty row, or with a small weight: neither the count nor the scores of the others tell."""
    options: dict[str, Any] = {"grid": None, "rho": 1.0, "intercept": "none"}
    x = torch.randn(N, J, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, -1], x[-1], y = 0.0, 0.0, torch.arange(N) % K
    secret = torch.zeros(1, J, dtype=torch.float64)
    secret[0, -1] = 2.5
    with SampleStore(tmp_path / "s", head=LSSVMHead(J, K, **options)) as store:
        store.apply(Add([*map(str, range(N)), "secret"], torch.cat([x, secret]), torch.cat([y, y[1:2]])))
        store.apply(Remove(ids=["secret"], event_id="e"))
        certificate = store.certificate("e")
        assert verify(certificate, store.head, store, allow_unsigned=True).checks["head"].facts["holds"] == "sums"
        served = LSSVMHead(J, K, **options).add(x[:-1], y[:-1]).add(secret, y[1:2])
        for head in (served, LSSVMHead(J, K, **options).add(x, y).add(secret, y[1:2], weight=[0.4])):
            with pytest.raises(VerificationError, match="sums in the head differ"):
                verify(certificate, head, store, allow_unsigned=True)
        for other in (torch.nn.Linear(J, K), "head", CompactLSSVMHead(J, K).add(x, y)):
            with pytest.raises(VerificationError, match="cannot be checked"):
                verify(certificate, other, store, allow_unsigned=True)


def test_fingerprints() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    first = audit.fingerprint(net, preprocessing="resize 224")
    assert first == audit.fingerprint(net, preprocessing="resize 224")
    assert first != audit.fingerprint(net, preprocessing="resize 256")
    assert first != audit.fingerprint(net)
    assert audit.fingerprint(net) != audit.fingerprint(feature_map=net)
    with torch.no_grad():
        net[0].weight[0, 0] += 1e-6
    assert first != audit.fingerprint(net, preprocessing="resize 224")
