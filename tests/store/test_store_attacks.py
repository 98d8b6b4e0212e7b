"""What comes back, or stays behind, in a store: older copies, hard links, forms of Unicode, names in event ids, gaps."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import stat
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support import store_file
from torchlssvm import FixedPoint, LSSVMHead, MarginHead, attach, verify
from torchlssvm.audit import ErasureReceipt
from torchlssvm.corrections import DeadLetters
from torchlssvm.distributed import Delta
from torchlssvm.errors import StoreError, SuppressedError
from torchlssvm.events import Add, Remove
from torchlssvm.export import export_onnx, export_program, freeze, save_safetensors
from torchlssvm.hub import save_pretrained
from torchlssvm.linear.attach import draw_confusion
from torchlssvm.store import SampleStore
from torchlssvm.store.erasure.erasure import check_absence

J, N = 4, 12
X, Y = torch.randn(N, J, generator=torch.Generator().manual_seed(3)), torch.arange(N) % 2
IDS = [f"photo-{i:03d}" for i in range(N)]
NFC, NFD = "Zo\u00eb", "Zoe\u0308"


def new_head() -> LSSVMHead:
    return LSSVMHead(J, 2, grid=FixedPoint(8.0))


def nested(levels: int) -> list[object]:
    out: list[object] = []
    for _ in range(levels):
        out = [out]
    return out


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SampleStore]:
    with SampleStore(tmp_path / "store", head=new_head()) as opened:
        opened.apply(Add(IDS, X, Y, ["u42"] * 2 + [None] * (N - 2)))
        yield opened


@pytest.mark.parametrize("damage", ["missing", "empty", "flipped"])
def test_an_older_copy_without_its_witness_is_refused(store: SampleStore, tmp_path: Path, damage: str) -> None:
    shutil.copytree(store.path, tmp_path / "older")
    store.apply(Remove(subject="u42"))
    store.close()
    witness = (store.path / "acknowledged").read_bytes()
    flipped = bytes([witness[20] ^ 1])
    shutil.rmtree(store.path)
    (tmp_path / "older").rename(store.path)
    (store.path / "acknowledged").unlink()
    if damage != "missing":
        left = b"" if damage == "empty" else witness[:20] + flipped + witness[21:]
        (store.path / "acknowledged").write_bytes(left)
    with pytest.raises(StoreError, match="acknowledged"):
        SampleStore(store.path)
    with SampleStore(store.path, accept_rollback=True) as back:
        assert [entry.kind for entry in back.history()] == ["add", "rollback"]
        assert back.head.n == N
    with SampleStore(store.path) as again:  # once is enough
        assert again.position == 2


def test_a_list_that_was_put_back_is_noticed_however_much_was_entered_since(tmp_path: Path) -> None:
    shared = {"suppression_list": tmp_path / "erased.list", "suppression_key": bytes(range(32))}

    def erased(store: SampleStore, name: str) -> None:
        request = store.requests.open(ids=[name])
        store.apply(Remove(ids=[name]), request=request.id)

    with (
        SampleStore(tmp_path / "one", head=new_head(), **shared) as one,  # type: ignore[arg-type]
        SampleStore(tmp_path / "two", head=new_head(), **shared) as two,  # type: ignore[arg-type]
    ):
        for store in (one, two):
            store.apply(Add(IDS, X, Y))
        shutil.copy(tmp_path / "erased.list", tmp_path / "backup")
        erased(one, IDS[0])
        with pytest.raises(SuppressedError):
            one.apply(Add([IDS[0]], X[:1], Y[:1]))
        shutil.copy(tmp_path / "backup", tmp_path / "erased.list")
        for name in IDS[4:8]:
            erased(two, name)
        with pytest.raises(StoreError, match="older copy"):
            one.apply(Add([IDS[0]], X[:1], Y[:1]))


def test_forms_of_unicode_are_one_name(store: SampleStore) -> None:
    store.apply(Add(["a", f"{NFD}-1"], X[:2], Y[:2], [NFC, NFD]))
    assert store.find(subject=NFD) == store.find(subject=NFC) == ["a", f"{NFC}-1"]
    assert f"{NFD}-1" in store
    assert len(store.find(subject=NFD)) == 2
    with pytest.raises(ValueError, match="already"):
        store.apply(Add([f"{NFC}-1"], X[:1], Y[:1]))
    receipt = store.apply(Remove(subject=NFD))
    certificate = store.certificate(receipt.event_id)
    assert certificate.covers(f"{NFD}-1", receipt.nonces[f"{NFC}-1"])
    assert store.requests.open(subjects=NFD).named("subject") == [NFC]


def test_a_writer_takes_a_hard_linked_copy_for_its_own(store: SampleStore, tmp_path: Path) -> None:
    shutil.copytree(store.path, tmp_path / "linked", copy_function=os.link)
    with SampleStore(tmp_path / "linked") as linked:
        linked.apply(Add(["theirs"], X[:1], Y[:1]))
        store.apply(Remove(subject="u42"))
        assert len(linked) == N + 1
    assert len(store) == N - 2
    store.close()
    for name, held in (("store", N - 2), ("linked", N + 1)):
        with SampleStore(tmp_path / name) as opened:
            assert opened.recompute() == (held, opened.head.digest())


def test_compaction_leaves_neither_gaps_nor_the_order_of_samples(store: SampleStore) -> None:
    view = store.dataset()
    store.apply(Remove(ids=[IDS[2], IDS[7]]))
    held = dict(zip(store.find(), store.get(store.find()).x, strict=True))
    store.compact()
    assert store_file.read(store.path, "SELECT seq FROM samples ORDER BY seq") == [(k + 1,) for k in range(N - 2)]
    for entry in store.history():
        assert entry.commitment_list == sorted(entry.commitment_list)
    assert store.find() == [i for i in IDS if i not in (IDS[2], IDS[7])]
    assert all(torch.equal(sample.x, held[sample.id]) for sample in store)
    assert torch.equal(view[3][0], held[IDS[3]])  # by its id, whatever number its row has now
    store.apply(Add(["new"], X[:1], Y[:1]))
    assert store.recompute() == (N - 1, store.head.digest())


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_others_cannot_read_a_store_in_a_folder_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o755)
    SampleStore(tmp_path / "s", head=new_head()).close()
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700


def test_weights_after_a_compaction_carry_nothing_of_the_erased(store: SampleStore, tmp_path: Path) -> None:
    guest = torch.randn(1, J, generator=torch.Generator().manual_seed(9))
    with SampleStore(tmp_path / "never", head=new_head()) as never:
        never.apply(Add(IDS, X, Y))
        store.head.refresh()
        store.apply(Add(["guest"], guest, [0], "guest-7"))
        _ = store.head.w, store.head.P
        store.apply(Remove(subject="guest-7"))
        store.compact()
        never.compact()
        assert torch.equal(store.head.state_dict()["w"], never.head.state_dict()["w"])


@pytest.mark.parametrize("kind", [LSSVMHead, MarginHead])
def test_a_rho_chosen_before_another_handle_erased_is_chosen_again(tmp_path: Path, kind: type) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(40) % 2
    x = torch.randn(40, J, generator=generator) + y[:, None]
    guest = 4 * torch.randn(1, J, generator=generator)
    with SampleStore(tmp_path / "store", head=kind(J, 2, grid=FixedPoint(32.0))) as first:
        first.apply(Add([f"s{i}" for i in range(40)], x, y))
        first.apply(Add(["guest"], guest, [0], "guest-7"))
        first.head.predict(x[:1])
        with SampleStore(tmp_path / "store") as second:
            second.apply(Remove(subject="guest-7"))
        first.head.predict(x[:1])
        first.compact()
        never = kind(J, 2, grid=FixedPoint(32.0)).add(x, y)
        never.predict(x[:1])
        assert first.head.rho == never.rho
        assert first.head.choices["rho"].rule


@pytest.mark.parametrize("given", ["argument", "environment"])
def test_a_backup_older_than_the_suppression_list_needs_the_list(
    store: SampleStore, tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.backup(tmp_path / "backup")
    key, where = bytes(range(32)), tmp_path / "erased.list"
    if given == "environment":
        monkeypatch.setenv("TORCHLSSVM_SUPPRESSION_KEY", key.hex())
    store.close()
    with SampleStore(store.path, suppression_list=where, suppression_key=key) as opened:
        request = opened.requests.open("u42")
        opened.apply(Remove(subject="u42"), request=request.id)
    with pytest.raises(StoreError, match="suppression_list"):
        SampleStore.from_backup(
            tmp_path / "backup", tmp_path / "new", suppression_key=key if given == "argument" else None
        )
    assert not (tmp_path / "new").exists()
    path, again = SampleStore.from_backup(
        tmp_path / "backup", tmp_path / "new", suppression_key=key, suppression_list=where
    )
    assert again is not None
    with SampleStore(path, suppression_key=key) as restored:
        assert not restored.find(subject="u42")


def test_a_calibration_on_groups_is_verified_as_such(store: SampleStore) -> None:
    store.calibrate(keep=True, groups="subject")
    erased = store.apply(Remove(subject="u42"))
    certificate = store.certificate(erased.event_id)
    verify(certificate, head=store.head, store=store, allow_unsigned=True)


def test_invisible_characters_do_not_hide_a_name(store: SampleStore) -> None:
    with pytest.raises(ValueError, match="event_id"):
        store.apply(Remove(ids=[IDS[3]], event_id=f"erase-{IDS[3][:4]}\u200b{IDS[3][4:]}"))


# -- names in texts that are kept ----------------------------------------------------------------------------------------

NAME = "Zo\u00eb-Kr\u00fcger"


def spellings(name: str) -> set[str]:
    forms = {unicodedata.normalize(form, text) for form in ("NFC", "NFD") for text in (name, name.casefold())}
    return forms | {json.dumps(form)[1:-1] for form in forms}


def assert_nowhere(name: str, *places: Path) -> None:
    files = [f for place in places for f in (place.rglob("*") if place.is_dir() else [place]) if f.is_file()]
    assert len(files) >= len(places)
    for file in files:
        held = file.read_bytes()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            held += base64.b64decode(json.loads(held)["payload"])
        for spelling in spellings(name):
            assert spelling.encode() not in held, (file.name, spelling)


def test_events_of_one_call_may_name_samples_of_each_other(store: SampleStore, tmp_path: Path) -> None:
    store.apply(Add(["alice-1", f"{NAME}-1"], X[:2], Y[:2], ["alice-k", NAME]))
    events = [Remove(subject="alice-k", event_id=f"before {NAME}"), Remove(subject=NAME, event_id="after alice-k")]
    done = store.apply(events, keep_receipt=True)
    for removal, other in zip(done, (NAME, "alice-k"), strict=True):
        store.write_receipt([removal.event_id], tmp_path / f"{other}.json")
        assert_nowhere(other, tmp_path / f"{other}.json")
    store.compact()
    certificate = store.certificate([e.event_id for e in events])
    certificate.save(tmp_path / "certificate.json")
    verify(certificate, store=store, allow_unsigned=True)
    assert certificate.covers(f"{NAME}-1", done[1].nonces[f"{NAME}-1"])
    store.close()
    for name in (NAME, "alice-k"):
        assert_nowhere(name, store.path, tmp_path / "certificate.json")


def test_ids_and_reasons_from_before_a_person_came_name_nobody_after_the_erasure(
    store: SampleStore, tmp_path: Path
) -> None:
    first = Remove(ids=IDS[4:5], event_id=f"room for {NAME}")
    request = store.requests.open(ids=IDS[5:6], request_id=f"case {NAME}", reason=f"as {NAME} wrote", operator=NAME)
    store.apply(first)
    store.apply(Remove(ids=IDS[5:6]), request=request.id)
    store.write_receipt(store.receipts.unwritten(), tmp_path / "before.json")
    before = store.certificate([request.id, first.event_id, *store.requests.get(request.id).events])
    assert ErasureReceipt.load(tmp_path / "before.json").check(before).facts["request"] == request.id
    assert before.requests[0]["reason"] == f"as {NAME} wrote"

    store.apply(Add(["new"], X[:1], Y[:1], NAME))
    store.erase(NAME, receipt=tmp_path / "receipt.json", compact=True, certificate=tmp_path / "certificate.json")
    assert store.apply(first).applied is False  # the store still knows the event
    assert store.requests.get(f"case {NAME}").events
    after = store.certificate([f"case {NAME}", first.event_id, *store.requests.get(request.id).events])
    after.save(tmp_path / "after.json")
    for certificate in (before, after):
        verify(certificate, store=store, allow_unsigned=True)
        certified = check_absence(store, certificate, ErasureReceipt.load(tmp_path / "before.json"))["receipt"]
        assert certified.facts["unnamed_request"] is False
    store.close()
    assert_nowhere(NAME, store.path, *(tmp_path / f"{name}.json" for name in ("certificate", "after", "receipt")))


def test_a_request_can_be_answered_although_its_reason_names_a_sample_added_later(store: SampleStore) -> None:
    request = store.requests.open("u42", reason="see scan-7 and Art. 17")
    store.apply(Add(["scan-7"], X[:1], Y[:1], "u42"))
    assert store.erase(request=request.id).samples == 3
    assert "scan-7" not in store.requests.get(request.id).reason


def test_a_store_that_lost_the_key_of_its_event_ids_is_damaged(store: SampleStore) -> None:
    with store._db.transaction():
        store._db.put("state", {name: value for name, value in store._db.get("state").items() if name != "id_key"})
    store.close()
    with pytest.raises(StoreError), SampleStore(store.path) as opened:
        opened.apply(Remove(ids=IDS[:1], event_id="a"))


@pytest.mark.parametrize(
    "write",
    [
        lambda store, path: store.backup(path),
        lambda store, path: SampleStore.from_backup(store.backup(path.parents[1] / "copy"), path),
        lambda store, path: SampleStore(path, head=new_head()),
        lambda store, path: store.write_receipt(store.receipts.unwritten(), path),
        lambda store, path: store.certificate(store.history()[-1].event_id).save(path),
        lambda store, path: store.opening().save(path),
        lambda store, path: Delta.take(new_head().add(X, Y)).save(path),
        lambda store, path: attach(torch.nn.Linear(J, J), 2, in_features=J).add(X, Y).save(path),
        lambda store, path: save_safetensors(freeze(new_head().add(X, Y)), path),
        lambda store, path: export_program(freeze(new_head().add(X, Y)), X, path),
        lambda store, path: export_onnx(freeze(new_head().add(X, Y)), X, path),
        lambda store, path: save_pretrained(new_head().add(X, Y), path),
        lambda store, path: DeadLetters(path),
        lambda store, path: draw_confusion(torch.eye(2), None, path),
    ],
)
def test_nothing_else_is_written_into_the_folder_of_a_store(
    store: SampleStore, write: Callable[[SampleStore, Path], object]
) -> None:
    """Compaction would leave it there, and copies of the store would contain it."""
    store.apply(Remove(subject="u42"), keep_receipt=True)
    before = sorted(store.path.iterdir())
    with pytest.raises(ValueError, match="inside the store"):
        write(store, store.path / "inner")
    assert sorted(store.path.iterdir()) == before


@pytest.mark.parametrize("name", ["offered.until-compaction", "offered.until-compaction.0a1b2c3d.tmp"])
def test_compaction_removes_files_that_a_crash_left(store: SampleStore, name: str) -> None:
    (store.path / name).write_text("u42")
    store.apply(Remove(subject="u42"))
    store.compact()
    assert not (store.path / name).exists()


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}, {1: 2, "1": 3}, {"a": {1, 2}}, nested(40)])
def test_a_note_that_is_not_json_is_refused(store: SampleStore, value: object) -> None:
    with pytest.raises(ValueError, match="JSON"):
        store.set_note("score", value)
    with pytest.raises(ValueError, match="JSON"):
        store.apply(Remove(subject="u42"), notes={"score": value})
    assert (store.notes(), len(store)) == ({}, N)


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.requests.open("u42", received=5),
        lambda store: store.requests.open("u42", received="0001-01-01T00:00:00+23:00"),
        lambda store: store.requests.open("u42", received="9999-12-31"),
        lambda store: store.add_classes(10**12),
        lambda store: store.leave_one_out(groups={IDS[0]: [1]}),
        lambda store: store.opening("x"),
        lambda store: store.opening(99),
        lambda store: store.batches(0),
        lambda store: store.batches(-1),
    ],
)
def test_wrong_arguments_are_named(store: SampleStore, ask: Callable[[SampleStore], object]) -> None:
    before = store.position, store.head.num_classes
    with pytest.raises(ValueError, match=r"must be|is a text|in the future|at most"):
        ask(store)
    assert (store.position, store.head.num_classes) == before
