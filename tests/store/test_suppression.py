"""Samples that were erased on request stay erased: in this store and in others, after compaction, and no list tells who they were."""

from __future__ import annotations

import hashlib
import hmac
import multiprocessing
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch

from torchlssvm import Certificate, FixedPoint, LSSVMHead
from torchlssvm.cli import main
from torchlssvm.corrections.corrector import Corrector
from torchlssvm.errors import StoreError, SuppressedError, SuppressedWarning
from torchlssvm.events import Add, Relabel, Remove
from torchlssvm.report.findings import waiting_work
from torchlssvm.store import SampleStore, SuppressionList, new_suppression_key, suppression_key
from torchlssvm.store.erasure.suppression import KEY_VARIABLE

J, N = 6, 24
X, Y = torch.randn(N, J, generator=torch.Generator().manual_seed(1)), torch.arange(N) % 2
IDS, SUBJECTS = [f"photo-{i:03d}" for i in range(N)], [f"customer-{i // 4}" for i in range(N)]


def new_head() -> LSSVMHead:
    return LSSVMHead(J, 2, grid=FixedPoint(8.0))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    new_suppression_key(tmp_path / "suppression.key")
    return tmp_path


def opened(folder: Path, name: str = "store", **options: object) -> SampleStore:
    given = {"suppression_list": folder / "erased.list", "suppression_key": folder / "suppression.key"} | options
    head = None if (folder / name).exists() else new_head()
    return SampleStore(folder / name, head=head, **given)  # type: ignore[arg-type]


def filled(folder: Path, name: str = "store", **options: object) -> SampleStore:
    store = opened(folder, name, **options)
    store.apply(Add(IDS, X, Y, SUBJECTS))
    return store


def erase(folder: Path, store: SampleStore, **whose: object) -> None:
    """Erase on request, with a receipt, down to the bytes."""
    names = {"subjects": whose["subject"]} if "subject" in whose else whose
    request = store.requests.open(**names)  # type: ignore[arg-type]
    receipt = store.apply(Remove(**whose), request=request.id)
    store.write_receipt([receipt.event_id], folder / f"{request.id}.receipt.json")
    store.compact()


def test_by_subject_the_subject_and_its_ids_stay_out_and_by_ids_the_ids(folder: Path) -> None:
    with filled(folder) as store:
        erase(folder, store, subject="customer-1")
        erase(folder, store, ids=IDS[:1])
        before = store.head.digest()
        for again in (
            Add(IDS[4:8], X[4:8], Y[4:8], "customer-1"),  # as they were
            Add(IDS[4:5], X[4:5], Y[4:5]),  # the id, without its subject
            Add(["photo-new"], X[4:5], Y[4:5], "customer-1"),  # the subject, under a new id
            Add(["photo-other", IDS[0]], X[:2], Y[:2], "customer-0"),  # one of two
        ):
            with pytest.raises(SuppressedError, match="erased on request and stay erased"):
                store.apply(again)
        assert (store.head.digest(), len(store)) == (before, N - 5)
        store.apply(Add(["photo-more"], X[:1], Y[:1], "customer-0"))  # only an id of this customer was erased


def test_skipping_counts_and_learns_the_rest(folder: Path) -> None:
    with filled(folder) as store:
        erase(folder, store, subject="customer-1")
    with opened(folder, erased="skip") as store:
        every = Add([*IDS[4:8], "new"], X[4:9], Y[4:9], [*SUBJECTS[4:8], "customer-9"], event_id="again")
        receipt = store.apply(every)
        assert (receipt.applied, receipt.samples, receipt.left_out) == (True, 1, tuple(IDS[4:8]))
        assert not store.apply(every).applied  # the same event once more
        nothing = store.apply(Add(IDS[4:8], X[4:8], Y[4:8], SUBJECTS[4:8]))
        assert (nothing.applied, nothing.samples, len(nothing.left_out)) == (False, 0, 4)
        kept = [i for i in range(N) if not 4 <= i < 8]
        expected = new_head().add(X[kept], Y[kept]).add(X[8:9], Y[8:9])
        assert store.head.digest() == expected.digest()
        assert sum(e.kind == "add" for e in store.history()) == 2
    with pytest.raises(ValueError, match="erased must be one of"):
        opened(folder, erased="ignore")


def test_another_store_with_the_same_list(folder: Path) -> None:
    with filled(folder) as first, filled(folder, "older") as older:
        erase(folder, first, subject="customer-1")
        assert older.suppression.held() == IDS[4:8]  # learned before: to be erased there, too
    with opened(folder, "second") as second:
        with pytest.raises(SuppressedError):
            second.apply(Add(IDS, X, Y, SUBJECTS))
        assert len(second) == 0


def test_corrections_and_plain_removals_are_not_entered(folder: Path) -> None:
    with filled(folder) as store:
        store.apply(Remove(ids=IDS[:2]))
        store.apply(Add(IDS[:2], X[:2], Y[:2], SUBJECTS[:2]))
        erase(folder, store, subject="customer-1")
        outcomes = Corrector(store.head, store).apply(
            [Remove(ids=IDS[:1]), Add(IDS[:1], X[:1], Y[:1]), Add(IDS[4:5], X[4:5], Y[4:5])]
        )
        assert [o.status for o in outcomes] == ["applied", "applied", "refused"]
        assert "erased on request" in outcomes[-1].reason


def test_without_the_key_nothing_is_added_or_erased(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(folder) as store:
        digest = store.head.digest()
    new_suppression_key(folder / "other.key")
    with SampleStore(folder / "store") as store:
        for event in (Add(["n"], X[:1], Y[:1]), Remove(ids=IDS[:1])):
            with pytest.raises(StoreError, match="nothing is added or erased without its key"):
                store.apply(event)
        store.apply(Relabel(ids=IDS[:1], y=[int(Y[0])]))
        assert (store.head.digest(), len(store)) == (digest, N)
    with (
        SampleStore(folder / "store", suppression_key=folder / "other.key") as store,
        pytest.raises(StoreError, match="not the key of the suppression list"),
    ):
        store.apply(Add(["n"], X[:1], Y[:1]))
    for value in (folder / "suppression.key", suppression_key(folder / "suppression.key").hex()):
        monkeypatch.setenv(KEY_VARIABLE, str(value))
        with SampleStore(folder / "store") as store:
            store.apply(Add([f"with the key {len(str(value))}"], X[:1], Y[:1]))


def test_where_key_and_list_may_be(folder: Path) -> None:
    with filled(folder) as store:
        with pytest.raises(ValueError, match="is inside the store"):
            new_suppression_key(store.path / "key")
        with pytest.raises(ValueError, match="is inside the store"):
            SuppressionList.create(store.path / "list", bytes(32))
    with pytest.raises(FileExistsError):
        new_suppression_key(folder / "suppression.key")
    assert (folder / "suppression.key").stat().st_mode & 0o077 == 0
    for bad in (b"short", "0" * 63, 7, folder / "erased.list"):
        with pytest.raises((ValueError, FileNotFoundError)):
            suppression_key(bad)


def test_a_list_that_is_missing_older_or_another_one(folder: Path) -> None:
    with filled(folder) as store:
        shutil.copy(folder / "erased.list", folder / "old copy")
        erase(folder, store, subject="customer-1")
        (folder / "erased.list").rename(folder / "moved.list")
        add = Add(["n"], X[:1], Y[:1])
        with pytest.raises(StoreError, match="is missing"):
            store.apply(add)
        shutil.copy(folder / "old copy", folder / "erased.list")
        with pytest.raises(StoreError, match="an older copy"):
            store.apply(add)
        (folder / "erased.list").unlink()
        SuppressionList.create(folder / "erased.list", suppression_key(folder / "suppression.key"))
        with pytest.raises(StoreError, match="not the suppression list of"):
            store.apply(add)
        shutil.copy(folder / "erased.list", folder / "another")
        with pytest.raises(StoreError, match="another one"):
            store.use_suppression_list(folder / "another")
        store.use_suppression_list(folder / "moved.list")
        store.apply(add)
        (folder / "moved.list").write_bytes(b"no list at all")
        with pytest.raises(StoreError, match=r"moved\.list"):
            store.apply(Add(["m"], X[:1], Y[:1]))


def test_a_lawful_return_leaves_an_entry_in_the_journal(folder: Path) -> None:
    with filled(folder) as store:
        erase(folder, store, subject="customer-1")
        back = Add(IDS[4:8], X[4:8], Y[4:8], "customer-1")
        with pytest.raises(ValueError, match="reason"):
            store.readmit("customer-1", reason="")
        with pytest.raises(ValueError, match="reason holds an id or a subject"):
            store.readmit("customer-1", reason="customer-1 has asked")
        with pytest.raises(ValueError, match="1 of 2 names are not on"):
            store.readmit(["customer-1", "customer-2"], reason="a new contract")
        assert store.readmit("customer-1", IDS[4:8], reason="a new contract") == 5
        entry = store.history()[-1]
        assert (entry.kind, entry.samples) == ("readmit", 5)
        store.apply(back)
        assert store.head.digest() == new_head().add(X, Y).digest()
    with opened(folder) as store:
        assert store.head.digest() == new_head().add(X, Y).digest()


def test_a_crash_before_the_removal_commits_leaves_the_entry(folder: Path) -> None:
    """The entry is on the disk before the sample is gone: a crash in between loses neither, and the removal is repeated."""
    filled(folder).close()

    def crash() -> None:
        store = opened(folder)
        store.requests.open("customer-1", request_id="R-1")
        store._db.commit = lambda: os._exit(9)  # type: ignore[method-assign]
        store.apply(Remove(subject="customer-1"), request="R-1")

    process = multiprocessing.get_context("fork").Process(target=crash)
    process.start()
    process.join()
    assert process.exitcode == 9
    with opened(folder) as store:
        assert store.find(subject="customer-1") == IDS[4:8]
        assert store.suppression.held() == IDS[4:8]
        assert store.requests.get("R-1").state == "received"
        store.apply(Remove(subject="customer-1"), request="R-1")
        assert store.suppression.held() == []


def test_without_the_key_no_guess_can_be_tested(folder: Path) -> None:
    """An attacker with store and list, who knows every candidate and tries whatever is in the files as a key."""
    random = torch.Generator().manual_seed(3)
    everybody = [f"customer-{i}" for i in range(6)]
    with filled(folder) as store:
        erased = [everybody[int(torch.randint(6, (1,), generator=random))]]
        erase(folder, store, subject=erased[0])
        gone = [i for i, s in zip(IDS, SUBJECTS, strict=True) if s == erased[0]]
    content = b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix not in (".key", ".json"))
    with sqlite3.connect(folder / "erased.list") as db:
        entries = [row[0] for row in db.execute("SELECT tag FROM entries")]
        values = [row[0] for row in db.execute("SELECT value FROM list")]
    assert len(entries) == 5
    known = [bytes(32), b"", *(v.encode() for v in values), *(bytes.fromhex(v) for v in values if len(v) in (32, 64))]
    for name in (*erased, *gone):
        assert name.encode() not in content
        for text in (
            name,
            f"id\0{name}",
            f"subject\0{name}",
            *(f"torchlssvm-suppression-1\0{k}\0{name}" for k in ("id", "subject")),
        ):
            tried = [hashlib.sha256(text.encode()).digest(), *(hmac.digest(k, text.encode(), "sha256") for k in known)]
            assert not set(tried) & set(entries)
    # all that is left is the entries' own bytes: for who was erased they look as for everybody else
    used = SuppressionList(folder / "erased.list", suppression_key(folder / "suppression.key"))
    assert [used.tag("subject", s) in entries for s in everybody] == [s in erased for s in everybody]


def test_a_list_that_is_cut_short_or_altered_lets_nobody_in(folder: Path) -> None:
    """One byte of one entry is enough, with the structure of the file as it was."""
    path = folder / "erased.list"
    with filled(folder) as store:
        erase(folder, store, subject="customer-1")
    good = path.read_bytes()
    with sqlite3.connect(path) as db:
        (tag,) = db.execute("SELECT tag FROM entries LIMIT 1").fetchone()
    place = good.index(tag) + len(tag) - 1
    altered = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
    key = folder / "suppression.key"
    for wrong in (altered, good[:-1], good[:4096], good[:100], b""):
        path.write_bytes(wrong)
        with SampleStore(folder / "store", suppression_key=key) as store:
            with pytest.raises(StoreError, match=r"damaged|no suppression list"):
                store.apply(Add(["new"], X[:1], Y[:1], "customer-9"))
            assert len(store) == N - 4
    path.write_bytes(good)
    with SampleStore(folder / "store", suppression_key=key) as store:
        store.apply(Add(["new"], X[:1], Y[:1], "customer-9"))
        assert len(store) == N - 3


def test_an_old_copy_with_erased_samples_is_noticed_and_cleaned(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = folder / "suppression.key"
    filled(folder).close()
    shutil.copytree(folder / "store", folder / "backup")
    with SampleStore(folder / "store", suppression_key=key) as store:
        request = store.requests.open("customer-1").id
        store.erase(request=request, receipt=folder / "r.json", compact=True)
        gone = store.head.digest()
    shutil.rmtree(folder / "store")
    shutil.copytree(folder / "backup", folder / "store")
    with pytest.warns(SuppressedWarning, match="4 samples"):
        store = SampleStore(folder / "store", suppression_key=key)
    with store:
        assert store.stats()["returned"] == 4
        assert any("suppression apply" in line for line in waiting_work(store))
    with pytest.warns(SuppressedWarning, match="key"), SampleStore(folder / "store", readonly=True):
        pass  # without the key nobody can tell who: that is said
    monkeypatch.setenv("TORCHLSSVM_SUPPRESSION_KEY", str(key))
    assert main(["stats", str(folder / "store")]) == 0
    assert "erased on request" in capsys.readouterr().err
    command = ["suppression", "apply", str(folder / "store"), "--receipt", str(folder / "again.json"), "--compact"]
    assert main([*command, "--certificate", str(folder / "c.json")]) == 0
    capsys.readouterr()
    with SampleStore(folder / "store", suppression_key=key) as store:
        assert (store.head.digest(), store.returned) == (gone, [])
        assert store.history()[-1].kind == "remove"
    certificate = Certificate.load(folder / "c.json")
    assert certificate.erased == 4
    assert certificate.compacted
    assert main(["stats", str(folder / "store")]) == 0
    assert "erased on request" not in capsys.readouterr().err
