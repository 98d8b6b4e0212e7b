"""Nobody is believed gone who is not: erasures that resume, old copies that are noticed, heads that follow."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from torchlssvm import Certificate, FixedPoint, LSSVMHead, MarginHead
from torchlssvm.audit import ErasureReceipt
from torchlssvm.cli import main
from torchlssvm.errors import RemovalError, StoreError, SuppressedWarning
from torchlssvm.events import Add, Relabel, Remove
from torchlssvm.report.findings import waiting_work
from torchlssvm.store import SampleStore, new_suppression_key

J, N = 6, 24
X, Y = torch.randn(N, J, generator=torch.Generator().manual_seed(3)), torch.arange(N) % 2
IDS, SUBJECTS = [f"photo-{i:03d}" for i in range(N)], [f"customer-{i // 4}" for i in range(N)]


def filled(path: Path, kind: Any = LSSVMHead, **options: Any) -> SampleStore:
    store = SampleStore(path, head=kind(J, 2, grid=FixedPoint(8.0), rho=1.0), **options)
    store.apply(Add(IDS, X, Y, SUBJECTS))
    return store


class Killed(BaseException):
    """Stands for kill -9."""


# -- an erasure that was killed is finished by the same call -------------------------------------------------------------


@pytest.mark.parametrize("step", ["refresh", "save", "mark_written", "compact", "certificate", "certified"])
def test_a_killed_erasure_is_finished_by_the_same_call(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path / "store")
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


def test_the_command_line_resumes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(tmp_path / "store") as store:
        request = store.requests.open("customer-1").id
        store.erase(request=request, receipt=tmp_path / "r.json")  # killed before the rest
    command = ["remove", str(tmp_path / "store"), "--request", request, "--compact"]
    command += ["--certificate", str(tmp_path / "c.json"), "--receipt", str(tmp_path / "r.json")]
    assert main(command) == 0
    assert Certificate.load(tmp_path / "c.json").compacted
    assert main(["request", "close", str(tmp_path / "store"), request]) == 0


def test_a_request_of_a_stranger_is_answered_only_where_nothing_is_left(tmp_path: Path) -> None:
    with filled(tmp_path / "store") as store:
        request = store.requests.open("customer-1").id
        store.apply(Remove(subject="customer-1"))  # without the request
        with pytest.raises(RemovalError, match="torchlssvm compact"):
            store.erase(request=request)
        store.compact()
        with pytest.raises(RemovalError, match="--answer"):
            store.erase(request=request)


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    with filled(tmp_path / "store") as store:
        (tmp_path / "c.json").write_text("mine")
        with pytest.raises(ValueError, match="exists already"):
            store.erase("customer-1", certificate=tmp_path / "c.json")
        assert (len(store), (tmp_path / "c.json").read_text()) == (N, "mine")


# -- an old copy ---------------------------------------------------------------------------------------------------------


def test_an_old_copy_with_erased_samples_is_noticed_and_cleaned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, listed = new_suppression_key(tmp_path / "key"), tmp_path / "erased.list"
    with filled(tmp_path / "store", suppression_list=listed, suppression_key=key) as store:
        pass
    shutil.copytree(tmp_path / "store", tmp_path / "backup")
    with SampleStore(tmp_path / "store", suppression_key=key) as store:
        request = store.requests.open("customer-1").id
        store.erase(request=request, receipt=tmp_path / "r.json", compact=True)
        gone = store.head.digest()
    shutil.rmtree(tmp_path / "store")
    shutil.copytree(tmp_path / "backup", tmp_path / "store")
    with pytest.warns(SuppressedWarning, match="4 samples"):
        store = SampleStore(tmp_path / "store", suppression_key=key)
    with store:
        assert store.stats()["returned"] == 4
        assert any("suppression apply" in line for line in waiting_work(store))
    with pytest.warns(SuppressedWarning, match="key"), SampleStore(tmp_path / "store", readonly=True):
        pass  # without the key nobody can tell who: that is said
    monkeypatch.setenv("TORCHLSSVM_SUPPRESSION_KEY", str(key))
    assert main(["stats", str(tmp_path / "store")]) == 0
    assert "erased on request" in capsys.readouterr().err
    command = ["suppression", "apply", str(tmp_path / "store"), "--receipt", str(tmp_path / "again.json"), "--compact"]
    assert main([*command, "--certificate", str(tmp_path / "c.json")]) == 0
    capsys.readouterr()
    with SampleStore(tmp_path / "store", suppression_key=key) as store:
        assert (store.head.digest(), store.returned) == (gone, [])
        assert store.history()[-1].kind == "remove"
    certificate = Certificate.load(tmp_path / "c.json")
    assert certificate.erased == 4
    assert certificate.compacted
    assert main(["stats", str(tmp_path / "store")]) == 0
    assert "erased on request" not in capsys.readouterr().err


# -- a head that was handed out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LSSVMHead, MarginHead])
def test_a_head_that_was_handed_out_follows_at_its_next_use(tmp_path: Path, kind: Any) -> None:
    writer = filled(tmp_path / "store", kind)
    reader = SampleStore(tmp_path / "store", readonly=True)
    head = reader.head
    head.predict(X)
    for event, rest in (
        (Remove(subject="customer-1"), [i for i in range(N) if not 4 <= i < 8]),
        (Add(["more"], X[4:5], Y[4:5]), [*range(4), *range(8, N), 4]),
    ):
        writer.apply(event)
        never = kind(J, 2, grid=FixedPoint(8.0), rho=1.0).add(X[rest], Y[rest])
        torch.testing.assert_close(head(X), never(X), rtol=1e-9, atol=1e-9)
        assert (head.digest(), head.n) == (never.digest(), len(rest))
    writer.apply(Relabel(ids=["more"], y=[1 - int(Y[4])]))
    assert head.digest() == writer.head.digest()
    with pytest.raises(StoreError, match="add_classes"):
        head.add_classes(1)
    writer.close()
    reader.close()
    assert head.predict(X).shape == (N,)  # a closed store leaves its head as it was


def test_following_an_erasure_reads_the_sums_that_the_writer_published(tmp_path: Path) -> None:
    n = 1500
    x, y = torch.randn(n, J), torch.arange(n) % 2
    with SampleStore(tmp_path / "store", head=LSSVMHead(J, 2, grid=FixedPoint(8.0), rho=1.0)) as writer:
        writer.apply(Add(range(n), x, y))
        with SampleStore(tmp_path / "store", readonly=True) as reader:
            head = reader.head
            assert head.n == n
            writer.apply(Remove(ids=[3]))
            reads: list[int] = []
            reader.table.on_read = reads.append
            assert head.n == n - 1
            assert head.digest() == writer.head.digest()
            assert reads == []
