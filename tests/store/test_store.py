"""The sample store: rows, events, head and journal move together or not at all."""

from __future__ import annotations

import copy
import enum
import io
import operator
import pickle
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.store_file import relearned, write_locked
from torchlssvm import FixedPoint, GridError, LSSVMHead, MarginHead, RemovalError
from torchlssvm.analysis.label_errors import find_label_errors
from torchlssvm.distributed import Delta
from torchlssvm.distributed import merge as merge_deltas
from torchlssvm.errors import StoreBusyError, StoreError
from torchlssvm.events import Add, Relabel, Remove, Replace
from torchlssvm.export import freeze
from torchlssvm.linear.column_selection import restrict
from torchlssvm.linear.data_choices import ChoiceState
from torchlssvm.linear.diagnostics.uncertainty import uncertainty
from torchlssvm.store import SampleStore

J, K, N = 7, 3, 40


def data(n: int = N, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, J, generator=generator), torch.arange(n) % K


def ids_of(n: int = N) -> list[str]:
    return [f"sample-{i}" for i in range(n)]


def users_of(n: int = N) -> list[str]:
    return [f"user-{i % 5}" for i in range(n)]


def new_head(**options: Any) -> LSSVMHead:
    return LSSVMHead(J, K, **({"grid": FixedPoint(8.0)} | options))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SampleStore]:
    x, y = data()
    with SampleStore(tmp_path / "store", head=new_head()) as opened:
        opened.apply(Add(ids=ids_of(), x=x, y=y, subject=users_of(), event_id="first"))
        yield opened


def agree(store: SampleStore) -> bool:
    return store.head.digest() == relearned(store).digest() and len(store) == store.head.n


# -- events ------------------------------------------------------------------------------------------------------------


def test_rows_are_what_the_head_summed(store: SampleStore) -> None:
    x, y = data()
    rows = store.get(ids_of()[::-1])
    assert torch.equal(rows.x.flip(0), FixedPoint(8.0).snap(x))
    assert torch.equal(rows.y.flip(0), y)
    assert rows.subjects[::-1] == users_of()
    assert agree(store)


def test_receipts(store: SampleStore) -> None:
    receipt = store.apply(Remove(subject="user-1", event_id="erasure"))
    assert (receipt.kind, receipt.samples, receipt.position, receipt.applied) == ("remove", 8, 2, True)
    assert receipt.digest == store.head.digest()
    assert len(receipt.nonces) == 8
    assert "applied" in str(receipt)
    certificate = store.certificate("erasure")
    assert all(certificate.covers(i, n) for i, n in receipt.nonces.items())
    assert not certificate.covers("sample-1", "00" * 32)
    nonce = bytes.fromhex(receipt.nonces["sample-1"])
    assert not certificate.covers(
        "1", nonce + b"sample-"
    )  # nonce and id are bound: neither lends the other its letters
    assert not certificate.covers("sample-1", nonce[:-1])


def test_every_event_can_be_repeated(store: SampleStore) -> None:
    x, y = data(seed=1)
    events: list[Any] = [
        Add(ids=["n1", "n2"], x=x[:2], y=y[:2], subject=["u", None]),
        Relabel(ids=["n1", "sample-0"], y=[2, 1]),
        Relabel(subject="user-3", y=2),
        Relabel(subject="user-4", y=[k % K for k in range(8)]),
        Replace(ids=["sample-5"], x=x[:1]),
        Replace(ids=["sample-6"], x=x[1:2], y=[1]),
        Remove(ids=["sample-2"]),
        Remove(subject="user-1"),
    ]
    for event in events:
        first, again = store.apply([event, event])
        assert (first.applied, again.applied, again.position) == (True, False, first.position)
        assert not store.apply(event).applied
    position = store.position
    assert [r.applied for r in store.apply(events)] == [False] * len(events)
    store.apply(Remove(ids=["n1", "sample-3"]))  # erased since: nothing of it can be compared
    assert [r.applied for r in store.apply(events)] == [False] * len(events)
    assert store.position == position + 1
    assert agree(store)


def test_a_reused_event_id_with_other_content_is_an_error(store: SampleStore, tmp_path: Path) -> None:
    x, _ = data(seed=1)
    store.apply(Add(ids=["n1", "n2"], x=x[:2], y=[0, 1], subject="u", event_id="added"))
    store.apply(Relabel(ids=["sample-0"], y=[2], event_id="labelled"))
    store.apply(Relabel(subject="user-3", y=2, event_id="labelled all"))
    store.apply(Replace(ids=["sample-4"], x=x[:1], event_id="replaced"))
    store.apply(Remove(ids=["sample-2"], event_id="erased"))
    store.apply(Remove(subject="user-1", event_id="erased all"))
    before = (store.head.digest(), store.position, len(store))
    others: list[Any] = [
        Remove(ids=["n1", "n2"], event_id="added"),
        Add(ids=["n1"], x=x[:1], y=[0], subject="u", event_id="added"),
        Add(ids=["n1", "n3"], x=x[:2], y=[0, 1], subject="u", event_id="added"),
        Add(ids=["n3", "n4"], x=x[:2], y=[0, 1], subject="u", event_id="added"),
        Add(ids=["n2", "n1"], x=x[:2], y=[0, 1], subject="u", event_id="added"),
        Add(ids=["n1", "n2"], x=x[1:3], y=[0, 1], subject="u", event_id="added"),
        Add(ids=["n1", "n2"], x=x[:2, :4], y=[0, 1], subject="u", event_id="added"),
        Add(ids=["n1", "n2"], x=x[:2], y=[0, 2], subject="u", event_id="added"),
        Add(ids=["n1", "n2"], x=x[:2], y=[[0.5] * K] * 2, subject="u", event_id="added"),
        Add(ids=["n1", "n2"], x=x[:2], y=[0, 1], subject="v", event_id="added"),
        Add(ids=["n1", "n2"], x=x[:2], y=[0, 1], event_id="added"),
        Relabel(ids=["sample-0"], y=[1], event_id="labelled"),
        Relabel(ids=["sample-5"], y=[2], event_id="labelled"),
        Relabel(ids=["nobody"], y=[2], event_id="labelled"),
        Relabel(subject="user-3", y=1, event_id="labelled all"),
        Relabel(subject="user-2", y=2, event_id="labelled all"),
        Relabel(subject="user-9", y=2, event_id="labelled all"),
        Relabel(subject="user-3", y=[2, 2], event_id="labelled all"),
        Replace(ids=["sample-4"], x=x[1:2], event_id="replaced"),
        Replace(ids=["sample-5"], x=x[:1], event_id="replaced"),
        Remove(ids=["sample-0"], event_id="erased"),
        Remove(subject="user-2", event_id="erased"),
        Remove(subject="user-2", event_id="erased all"),
    ]
    for event in others:
        with pytest.raises(ValueError, match=r"was used before, at position \d"):
            store.apply(event)
        with pytest.raises(ValueError, match="was used before"):
            store.apply([Relabel(ids=["sample-7"], y=[0]), event])
        assert (store.head.digest(), store.position, len(store)) == before
    assert agree(store)


def test_a_removal_whose_samples_are_there_again_is_not_repeated(store: SampleStore) -> None:
    x, y = data(seed=1)
    store.apply(Remove(ids=["sample-2"], event_id="one"))
    store.apply(Remove(subject="user-1", event_id="all"))
    store.apply(Add(ids=["sample-2", "new"], x=x[:2], y=y[:2], subject=[None, "user-1"]))
    for event in (Remove(ids=["sample-2"], event_id="one"), Remove(subject="user-1", event_id="all")):
        with pytest.raises(ValueError, match="are in the store"):
            store.apply(event)
    with pytest.raises(ValueError, match="are in the store"):
        store.apply(
            [Remove(ids=["new"], event_id="e"), Add(ids=["new"], x=x[:1], y=y[:1]), Remove(ids=["new"], event_id="e")]
        )
    assert "new" in store
    assert agree(store)


def test_an_event_id_may_not_name_what_the_store_finds(store: SampleStore) -> None:
    for event in (
        Remove(ids=["sample-3"], event_id="for USER-3"),  # its subject
        Remove(subject="user-3", event_id="Sample-8"),  # one of its samples
        Relabel(ids=["sample-3"], y=[0], event_id="user-3"),
    ):
        with pytest.raises(ValueError, match="stays in the journal"):
            store.apply(event)
    assert store.position == 1
    assert agree(store)


def test_odd_ids_and_labels_are_readable_for_ever(tmp_path: Path) -> None:
    class Name(enum.StrEnum):
        ADA = "ada"

    x, _ = data(4)
    ids = [np.str_("a"), Name.ADA, np.int64(3), "plain"]
    with SampleStore(tmp_path / "s", head=LSSVMHead(J, 2, grid=FixedPoint(8.0))) as store:
        store.apply(Add(ids=ids, x=x, y=torch.tensor([True, False, True, False]), subject=ids))
        store.apply(Relabel(ids=[Name.ADA], y=np.array([True])))
        store.apply(Replace(ids=[np.str_("a")], x=x[2:3], y=np.array([False])))
        assert agree(store)
    with SampleStore(tmp_path / "s") as store:
        assert store.find() == ["a", "ada", "3", "plain"]
        assert store.get(ids).y.tolist() == [0, 1, 1, 0]
        assert store.find(subject=Name.ADA) == store.find(subject=np.str_("ada")) == ["ada"]
        assert store.find(subject=3) == ["3"]  # type: ignore[arg-type]
        assert Name.ADA in store
        assert np.int64(3) in store
        assert True not in store
        assert store.recompute() == (4, store.head.digest())
        store.apply(Remove(ids=np.array(["a", "3"])))
        store.apply(Remove(subject=Name.ADA))
        assert store.find() == ["plain"]


def test_a_list_is_all_or_nothing(store: SampleStore) -> None:
    assert store.apply([]) == []
    x, y = data(seed=2)
    before = (store.head.digest(), store.position, len(store), store.subjects())
    good: list[Any] = [
        Add(ids=["new-1", "new-2"], x=x[:2], y=y[:2], subject="new"),
        Replace(ids=["new-1"], x=x[5:6], y=[2]),
        Relabel(ids=["sample-5"], y=[0]),
        Remove(subject="user-2"),
        Relabel(ids=["new-2"], y=[0]),
        Remove(ids=["new-1"]),
    ]
    bad: list[tuple[Any, type[Exception]]] = [
        ("no", ValueError),
        (Remove(ids=["nobody"]), RemovalError),
        (Remove(subject="user-2"), RemovalError),
        (Add(ids=["sample-0"], x=x[:1], y=y[:1]), ValueError),
        (Add(ids=["new-3"], x=x[:1] * 1e6, y=y[:1]), GridError),
        (Add(ids=["new-3"], x=x[:1], y=[K]), ValueError),
        (Add(ids=["new-3"], x=x[:1, :3], y=[0]), ValueError),
        (Relabel(ids=["sample-6"], y=[K]), ValueError),
        (Replace(ids=["sample-6"], x=x[:1] * 1e6), GridError),
        (Replace(ids=["sample-6"], x=x[:1, :2]), ValueError),
        (Relabel(subject="user-3", y=[0, 1]), ValueError),
    ]
    for event, error in bad:
        for count in range(len(good) + 1):
            if isinstance(event, Remove) and event.subject and count < 4:
                continue  # user-2 is still there
            with pytest.raises(error):
                store.apply([*good[:count], event])
            assert (store.head.digest(), store.position, len(store), store.subjects()) == before
            assert agree(store)
    store.apply(good)
    assert agree(store)
    assert "new-2" in store
    assert "new-1" not in store


def test_samples_that_one_call_adds_and_removes_are_never_durable(store: SampleStore, tmp_path: Path) -> None:
    x, y = data(6, seed=2)
    never, held = store.head.digest(), len(store)
    both = [Add(ids=list("abcdef"), x=x, y=y, subject=["u1"] * 4 + [None] * 2), Remove(subject="u1")]
    with pytest.raises(RemovalError):
        store.apply([*both, Remove(ids=["e", "f", "nobody"])])
    assert (store.head.digest(), store.position, len(store)) == (never, 1, held)
    receipts = store.apply([*both, Remove(ids=["f", "e"])])
    assert [(r.samples, r.position) for r in receipts] == [(6, 2), (4, 3), (2, 4)]
    assert store.head.digest() == never
    assert store.recompute() == (held, never)
    with SampleStore(tmp_path / "store", readonly=True) as reader:
        assert len(reader) == held
        assert reader.find(subject="u1") == []
    certificate = store.certificate(receipts[1].event_id)
    assert certificate.covers("a", receipts[1].nonces["a"])


def test_emptied_and_filled_again_on_another_grid(tmp_path: Path) -> None:
    x, y = data()
    with SampleStore(tmp_path / "s", head=LSSVMHead(J, K)) as store:
        store.apply(Add(ids=ids_of(), x=x, y=y))
        first = store.head.grid
        with pytest.raises(
            RemovalError
        ):  # taken back: the grid is that of the first batch, not of what comes back first
            store.apply([Remove(ids=ids_of()), Remove(ids=["sample-1"])])
        assert store.head.grid == first
        assert agree(store)
        store.apply(Remove(ids=ids_of()))
        assert len(store) == 0
        assert store.head.n == 0
        store.apply(Add(ids=ids_of(), x=x * 1000, y=y))
        assert store.head.grid != first
        assert agree(store)
    with SampleStore(tmp_path / "s") as store:
        assert agree(store)


def test_automatic_grid_survives_a_rebuild(tmp_path: Path) -> None:
    x, y = data()
    with SampleStore(tmp_path / "s", head=LSSVMHead(J, K)) as store:
        store.apply(Add(ids=["small"], x=x[:1] / 20, y=y[:1]))
        store.apply(Add(ids=ids_of(), x=x, y=y))
        store.apply(Remove(ids=["small"]))
        grid, digest = store.head.grid, store.head.digest()
    for path in (tmp_path / "s").glob("*.snapshot.pt"):
        path.unlink()
    with SampleStore(tmp_path / "s") as store:
        assert "rebuilt" in store.live.recovery
        assert (store.head.grid, store.head.digest()) == (grid, digest)


@pytest.mark.parametrize(
    "options",
    [
        {"class_weight": "balanced"},
        {"multiclass": "ovo"},
        {"folds": 4},
        {"grid": FixedPoint(8.0, bits=26)},
        {"class_weight": torch.tensor([1.0, 2.0, 3.0])},
    ],
    ids=str,
)
def test_every_form_of_head(tmp_path: Path, options: dict[str, Any]) -> None:
    x, y = data()
    with SampleStore(tmp_path / "s", head=new_head(**options)) as store:
        store.apply(Add(ids=ids_of(), x=x, y=y, subject=users_of()))
        store.apply([Remove(subject="user-0"), Relabel(ids=["sample-1"], y=[2]), Replace(ids=["sample-2"], x=x[:1])])
        assert agree(store)
        digest, scores = store.head.digest(), store.head(x)
    with SampleStore(tmp_path / "s") as store:
        assert store.head.digest() == digest
        assert torch.allclose(store.head(x), scores, atol=1e-10)
        assert agree(store)


@pytest.mark.parametrize(("grid", "width"), [(None, K), ("auto", 1), (FixedPoint(64.0), K)], ids=str)
def test_float_targets(tmp_path: Path, grid: Any, width: int) -> None:
    x, _ = data()
    y = torch.randn(N, width, generator=torch.Generator().manual_seed(3))
    with SampleStore(tmp_path / "s", head=LSSVMHead(J, width, grid=grid)) as store:
        store.apply(Add(ids=ids_of(), x=x, y=y[:, 0] if width == 1 else y, subject=users_of()))
        store.apply([Remove(subject="user-0"), Relabel(ids=["sample-1"], y=y[:1])])
        scores = store.head(x)
        if grid is not None:
            assert agree(store)
    with SampleStore(tmp_path / "s") as store:
        assert torch.allclose(store.head(x), scores, atol=1e-9)
        assert store.get(["sample-1"]).y.shape == (1, width)


# -- opening -----------------------------------------------------------------------------------------------------------


def test_closed_and_opened(store: SampleStore, tmp_path: Path) -> None:
    store.apply(Remove(subject="user-1"))
    digest, head = store.head.digest(), store.head
    store.close()
    with SampleStore(tmp_path / "store") as again:
        assert again.head is not head
        assert again.head.digest() == digest
        assert "loaded the snapshot" in again.live.recovery
        assert agree(again)
    given = new_head()
    with SampleStore(tmp_path / "store", head=given) as again:
        assert again.head is given
        assert given.digest() == digest
    with SampleStore(tmp_path / "store", head=given) as again:  # in step already
        assert again.head is given


def test_opened_without_a_clean_stop(store: SampleStore, tmp_path: Path) -> None:
    x, y = data(seed=4)
    store.close()
    for events, done in [
        ([Add(ids=["n1", "n2"], x=x[:2], y=y[:2])], "rolled the snapshot at position 1 forward to 2 by 2 rows"),
        ([Remove(ids=["n1"]), Add(ids=["n3"], x=x[2:3], y=y[2:3])], "rebuilt the head from 42 rows at position 4"),
    ]:
        running = SampleStore(tmp_path / "store")
        running.apply(events)
        digest = running.head.digest()
        running._db.close()  # as a killed process leaves it
        again = SampleStore(tmp_path / "store")
        assert (again.live.recovery, again.head.digest()) == (done, digest)
        assert agree(again)
        again._db.close()  # without writing a snapshot


def test_the_options_of_the_head_are_kept(store: SampleStore, tmp_path: Path) -> None:
    store.head.rho = 0.125
    store.close()
    with SampleStore(tmp_path / "store") as again:
        assert again.head.rho == 0.125
    with SampleStore(tmp_path / "store", head=new_head(rho=3.0)) as again:
        assert again.head.rho == 3.0
        assert agree(again)


def test_a_late_close_writes_nothing_over_a_newer_state(store: SampleStore, tmp_path: Path) -> None:
    path = tmp_path / "store"
    other = SampleStore(path)
    other.head.rho = 0.25
    other.calibrate()
    newer = other.head.calibration
    other.close()
    store.close()  # has seen nothing of it
    with SampleStore(path) as again:
        assert again.head.rho == 0.25
        assert str(again.head.calibration) == str(newer)
    # both have set an option: what is in the store stays
    old, new = SampleStore(path), SampleStore(path)
    old.head.rho, new.head.rho = 3.0, 0.5
    new.apply(Remove(subject="user-1"))
    new.calibrate()
    newer, digest = new.head.calibration, new.head.digest()
    new.close()
    with pytest.warns(UserWarning, match=r"rho=3\.0"):
        old.close()
    with SampleStore(path) as again, SampleStore(path) as other:
        assert (again.head.rho, again.head.digest()) == (0.5, digest)
        assert str(again.head.calibration) == str(newer)
        other.apply(Remove(subject="user-2"))  # the calibration of older samples is void
    with SampleStore(path) as again:
        assert again.head.calibration is None
        assert again.head.choices["calibration"].state is ChoiceState.STALE


@pytest.mark.parametrize("closes", [False, True])
def test_options_that_are_lost_to_another_writer_are_reported(store: SampleStore, tmp_path: Path, closes: bool) -> None:
    store.head.rho = 50.0
    with SampleStore(tmp_path / "store") as other:
        other.apply(Remove(subject="user-1"))
    with pytest.warns(UserWarning, match=r"rho=50\.0"):
        store.close() if closes else store.apply(Remove(subject="user-2"))
    with SampleStore(tmp_path / "store") as again:
        assert again.head.rho != 50.0


def test_a_handle_that_closes_last_does_not_bring_back_the_calibration_of_older_samples(
    store: SampleStore, tmp_path: Path
) -> None:
    store.calibrate()
    with SampleStore(tmp_path / "store") as other:
        other.apply(Remove(subject="user-1"))
    store.close()
    with SampleStore(tmp_path / "store") as again:
        assert again.head.choices["calibration"].state is ChoiceState.STALE


def test_options_set_by_another_handle_are_taken_over(store: SampleStore, tmp_path: Path) -> None:
    with SampleStore(tmp_path / "store") as other:
        other.head.rho = 0.25
    assert store.head.rho == 0.25
    with SampleStore(tmp_path / "store") as other:
        other.head.rho = 0.5
        other.calibrate()
        values = other.head.calibration.values
    store.apply([])
    assert store.head.rho == 0.5
    assert torch.equal(store.head.calibration.values, values)
    store.head.rho = 2.0
    store.apply(Remove(subject="user-1"))
    with SampleStore(tmp_path / "store", readonly=True) as reader:
        assert reader.head.rho == 2.0


def test_a_closed_store_says_so(store: SampleStore) -> None:
    head = store.head
    store.close()
    store.close()
    for use in (
        lambda: store.apply(Remove(ids=["sample-0"])),
        lambda: store.head,
        lambda: len(store),
        lambda: store.history(),
        lambda: store.certificate("first"),
        lambda: store.compact(),
        lambda: store.preview(Remove(ids=["sample-0"])),
    ):
        with pytest.raises(StoreError, match="closed"):
            use()
    assert head.n == N


def test_nothing_is_written_inside_a_view(store: SampleStore, tmp_path: Path) -> None:
    with SampleStore(tmp_path / "store") as other, store.view():
        assert len(store) == N
        other.apply(Remove(subject="user-1"))
        assert (len(store), store.position, store.head.n) == (N, 1, N)  # one state
        for write in (
            lambda: store.apply(Remove(ids=["sample-0"])),
            lambda: store.set_note("a", 1),
            lambda: store.compact(),
            lambda: store.calibrate(),
        ):
            with pytest.raises(StoreError, match="inside a view"):
                write()
        assert len(store) == N
    assert (len(store), store.head.n) == (N - 8, N - 8)
    assert agree(store)


def test_refusals_on_opening(store: SampleStore, tmp_path: Path) -> None:
    store.close()
    x, y = data()
    with pytest.raises(ValueError, match="intercept"):
        SampleStore(tmp_path / "store", head=new_head(intercept="none"))
    with pytest.raises(ValueError, match="num_classes"):
        SampleStore(tmp_path / "store", head=LSSVMHead(J, K + 1, grid=FixedPoint(8.0)))
    with pytest.raises(ValueError, match="grid"):
        SampleStore(tmp_path / "store", head=LSSVMHead(J, K, grid=FixedPoint(4.0)))
    with pytest.raises(StoreError, match="not those of the store"):
        SampleStore(tmp_path / "store", head=new_head().add(x, y.flip(0)))
    with pytest.raises(StoreError, match="no store"):
        SampleStore(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(StoreError, match="already has samples"):
        SampleStore(tmp_path / "fresh", head=new_head().add(x, y))
    with pytest.raises(StoreError, match="drives an LSSVMHead"):
        SampleStore(tmp_path / "other", head=torch.nn.Linear(2, 2))
    with pytest.raises(StoreError, match="no removals"):
        SampleStore(tmp_path / "other", head=new_head(grid=None, scale="std"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    with pytest.raises(StoreError, match="not empty"):
        SampleStore(tmp_path / "full", head=new_head())
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["letter.txt"]
    with pytest.raises(StoreError, match="not empty and not a store"):
        SampleStore(tmp_path / "full" / "letter.txt", head=new_head())


def test_foreign_and_newer_files(store: SampleStore, tmp_path: Path) -> None:
    store.close()
    file = tmp_path / "store" / "samples.sqlite"
    with sqlite3.connect(file) as db:
        db.execute("PRAGMA user_version = 3")
    db.close()
    content = file.read_bytes()
    with pytest.raises(StoreError, match="format 3"):
        SampleStore(tmp_path / "store")
    assert file.read_bytes() == content
    for name, junk in (("text", b"hello" * 1000), ("empty", b"")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "samples.sqlite").write_bytes(junk)
        with pytest.raises(StoreError):
            SampleStore(tmp_path / name)
        assert (tmp_path / name / "samples.sqlite").read_bytes() == junk
    (tmp_path / "other").mkdir()
    db = sqlite3.connect(tmp_path / "other" / "samples.sqlite")
    db.execute("CREATE TABLE mine (a)")
    db.commit()
    db.close()
    content = (tmp_path / "other" / "samples.sqlite").read_bytes()
    with pytest.raises(StoreError, match="another program"):
        SampleStore(tmp_path / "other", head=new_head())
    assert (tmp_path / "other" / "samples.sqlite").read_bytes() == content


def test_bound_to_a_network(tmp_path: Path) -> None:
    x, y = data()
    with SampleStore(tmp_path / "s", head=new_head(), fingerprint="resnet") as store:
        store.apply(Add(ids=["a"], x=x[:1], y=y[:1]))
        store.apply(Add(ids=["b"], x=x[1:2], y=y[1:2], fingerprint="resnet"))
        with pytest.raises(ValueError, match="from another network"):
            store.apply(Add(ids=["c"], x=x[2:3], y=y[2:3], fingerprint="vit"))
        assert len(store) == 2
    with pytest.raises(ValueError, match="bound to the network"):
        SampleStore(tmp_path / "s", fingerprint="vit")
    with SampleStore(tmp_path / "s") as store:
        assert store.fingerprint == "resnet"
        with pytest.raises(ValueError, match="Pass the fingerprint"):
            store.apply(Add(ids=["c"], x=x[2:3], y=y[2:3]))
        store.apply(Add(ids=["c"], x=x[2:3], y=y[2:3], fingerprint="resnet"))
        store.apply(Remove(ids=["a"]))
        assert agree(store)
    with SampleStore(tmp_path / "later", head=new_head()) as store:
        store.apply(Add(ids=["a"], x=x[:1], y=y[:1], fingerprint="vit"))
        assert store.fingerprint == "vit"
    with SampleStore(tmp_path / "never", head=new_head()) as store:
        store.apply(Add(ids=["a"], x=x[:1], y=y[:1]))
        with pytest.raises(ValueError, match="from another network"):
            store.apply(Add(ids=["b"], x=x[1:2], y=y[1:2], fingerprint="vit"))


# -- several at once ---------------------------------------------------------------------------------------------------


def test_a_head_changed_behind_the_stores_back_is_refused(store: SampleStore) -> None:
    x, y = data()
    before = store.head.digest()
    store.head.add(x[:1], y[:1])
    with pytest.raises(StoreError, match="behind the store's back"):
        store.apply(Remove(ids=["sample-0"]))
    with pytest.raises(StoreError, match="behind the store's back"):
        store.certificate("first")
    assert len(store) == N
    store.restore()
    assert store.head.digest() == before
    store.head.refresh()  # changes no sample
    store.head.rho = 2.0
    store.apply(Remove(ids=["sample-0"]))
    assert agree(store)


def test_a_writer_waits_no_longer_than_it_is_told(store: SampleStore, tmp_path: Path) -> None:
    impatient = SampleStore(tmp_path / "store", timeout=0.05)
    with write_locked(store.path), pytest.raises(StoreBusyError, match="in use"):
        impatient.apply(Remove(ids=["sample-0"]))
    impatient.apply(Remove(ids=["sample-0"]))
    impatient.close()


def test_readers(store: SampleStore, tmp_path: Path) -> None:
    reader = SampleStore(tmp_path / "store", readonly=True)
    assert len(reader) == N
    with pytest.raises(StoreError, match="reading only"):
        reader.apply(Remove(ids=["sample-0"]))
    store.apply(Remove(subject="user-0"))
    assert len(reader) == N - 8
    assert reader.head.digest() == store.head.digest()
    assert (
        [s.id for s in reader]
        == store.find()
        == [i for i, u in zip(ids_of(), users_of(), strict=True) if u != "user-0"]
    )
    assert store.find(label=1, subject="user-1") == [
        i for i in store.find(label=1) if i in store.find(subject="user-1")
    ]
    assert store.subjects() == {f"user-{u}": 8 for u in range(1, 5)}
    sample = next(iter(reader))
    assert (sample.id, sample.subject, int(sample.y)) == ("sample-1", "user-1", 1)
    assert sample.added > 1e9
    reader.close()


def test_dataset_view(store: SampleStore) -> None:
    view = store.dataset()
    assert len(view) == N
    x, y = zip(*DataLoader(view, batch_size=16, num_workers=2), strict=True)
    rows = next(iter(store.batches()))
    assert torch.equal(torch.cat(x), rows.x)
    assert torch.equal(torch.cat(y), rows.y)
    assert torch.equal(view[-1][0], rows.x[-1])
    with pytest.raises(IndexError):
        view[N]
    store.apply(Remove(ids=["sample-0"]))
    with pytest.raises(RemovalError, match="sample-0"):
        view[0]


# -- looking ahead -----------------------------------------------------------------------------------------------------


def test_preview_tells_and_changes_nothing(store: SampleStore) -> None:
    x, y = data(200, seed=7)
    digest, version = store.head.digest(), store.position
    preview = store.preview(Remove(subject="user-1"), x=x, y=y)
    assert (preview.samples, preview.remaining) == (8, N - 8)
    assert (store.head.digest(), store.position, len(store)) == (digest, version, N)
    before = store.head.predict(x)
    store.apply(Remove(subject="user-1"))
    after = store.head.predict(x)
    assert preview.flips == int((before != after).sum()) > 0
    assert preview.accuracy_before == pytest.approx(float((before == y).double().mean()))
    assert preview.accuracy_after == pytest.approx(float((after == y).double().mean()))
    with pytest.raises(RemovalError):
        store.preview(Remove(subject="nobody"))
    nothing = store.preview(Remove(ids=store.find()), x=x, y=y)
    assert (nothing.flips, nothing.accuracy_after, nothing.remaining) == (200, None, 0)
    assert store.preview(Remove(ids=["sample-0"])).flips is None
    assert agree(store)


def test_events_larger_than_a_batch(tmp_path: Path) -> None:
    """Rows are read and written 1,024 at a time; an event is one thing all the same."""
    n = 2500
    x, y = data(n)
    with SampleStore(tmp_path / "s", head=new_head(), snapshot_rows=2000) as store:
        store.apply(Add(ids=range(n), x=x, y=y, subject="all"))
        before = store.head.digest()
        events = [Relabel(subject="all", y=2), Replace(subject="all", x=x.flip(0), y=y), Remove(ids=range(0, n, 2))]
        with pytest.raises(RemovalError):
            store.apply([*events, Remove(subject="nobody")])
        assert (store.head.digest(), len(store), store.position) == (before, n, 1)
        with pytest.raises(ValueError, match="2501"):
            store.apply(Relabel(subject="all", y=[0] * 2501))
        store.apply(events)
        assert agree(store)
        assert torch.equal(store.get([1, 3]).x, FixedPoint(8.0).snap(x.flip(0)[[1, 3]]))
        assert store.apply(Remove(subject="all")).samples == n // 2
        assert len(store) == 0


def test_notes(store: SampleStore, tmp_path: Path) -> None:
    assert store.notes() == {}
    store.set_note("mine", {"a": [1, 2]})
    assert store.update_note("mine", lambda value: value | {"b": 3}) == {"a": [1, 2], "b": 3}
    store.close()
    with SampleStore(tmp_path / "store") as again:
        assert again.notes() == {"mine": {"a": [1, 2], "b": 3}}
        assert (again.note("mine"), again.note("other")) == ({"a": [1, 2], "b": 3}, None)


def test_notes_are_written_with_the_events_or_not_at_all(store: SampleStore) -> None:
    store.apply([], notes={"place": 1})
    assert store.note("place") == 1
    store.apply(Add(ids=["n"], x=torch.zeros(1, J), y=torch.zeros(1, dtype=torch.int64)), notes={"place": 2})
    assert store.note("place") == 2
    with pytest.raises(RemovalError):
        store.apply(Remove(ids=["nobody"]), notes={"place": 3})
    with pytest.raises(ValueError, match="JSON"):  # what cannot be written takes the events back, too
        store.apply(Remove(ids=["n"]), notes={"place": object()})
    assert store.note("place") == 2
    assert "n" in store
    assert agree(store)


@pytest.mark.parametrize("kind", [LSSVMHead, MarginHead])
def test_a_head_that_was_handed_out_follows_at_its_next_use(tmp_path: Path, kind: Any) -> None:
    x, y = data()
    options: dict[str, Any] = {"grid": FixedPoint(8.0), "rho": 1.0}
    writer = SampleStore(tmp_path / "s", head=kind(J, K, **options))
    writer.apply(Add(ids_of(), x, y, users_of()))
    reader = SampleStore(tmp_path / "s", readonly=True)
    head = reader.head
    head.predict(x)
    others = [i for i in range(N) if i % 5 != 1]
    for event, rest in ((Remove(subject="user-1"), others), (Add(["more"], x[1:2], y[1:2]), [*others, 1])):
        writer.apply(event)
        never = kind(J, K, **options).add(x[rest], y[rest])
        torch.testing.assert_close(head(x), never(x), rtol=1e-9, atol=1e-9)
        assert (head.digest(), head.n) == (never.digest(), len(rest))
    writer.apply(Relabel(ids=["more"], y=[2]))
    assert head.digest() == writer.head.digest()
    with pytest.raises(StoreError, match="add_classes"):
        head.add_classes(1)
    writer.close()
    reader.close()
    assert head.predict(x).shape == (N,)  # a closed store leaves its head as it was


def plain(value: Any) -> Any:
    """What a property, a copy or a file of a head tells, in a form that can be compared."""
    if isinstance(value, LSSVMHead | MarginHead):
        return plain(value(data()[0]))
    if isinstance(value, torch.Tensor):
        return [round(v, 6) for v in value.double().flatten().tolist()]
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def saved_and_loaded(head: Any) -> Any:
    file = io.BytesIO()
    torch.save(head.state_dict(), file)
    file.seek(0)
    again = type(head).from_config(head.config())
    again.load_state_dict(torch.load(file, weights_only=True))
    return again


COPIES: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda head: pickle.loads(pickle.dumps(head)),
    "merged": lambda head: type(head).from_config(head.config()).merge(head),
    "buffers": lambda head: dict(head.named_buffers()),
    "state_dict": lambda head: {name: head.state_dict()[name] for name in ("w", "b")},
    "frozen": lambda head: freeze(head).weight,
    "saved": saved_and_loaded,
    "columns": lambda head: restrict(head, slice(0, 3)).digest() if isinstance(head, LSSVMHead) else None,
    "moved": lambda head: head.to("cpu").double(),
    "uncertainty": lambda head: uncertainty(head, data()[0]) if isinstance(head, LSSVMHead) else None,
    "leave_one_out": lambda head: head.leave_one_out(*(t[[0, 2, 3]] for t in data())),
    "label errors": lambda head: find_label_errors(head, *(t[[0, 2, 3]] for t in data())).scores,
}


@pytest.mark.parametrize("kind", [LSSVMHead, MarginHead])
def test_whatever_is_used_first_knows_of_an_erasure_in_another_process(tmp_path: Path, kind: Any) -> None:
    x, y = data()
    config: dict[str, Any] = {"grid": FixedPoint(8.0), "rho": 1.0}
    properties = [n for n in dir(kind) if isinstance(getattr(kind, n), property) and n[0] != "_"]
    doors = {n: operator.attrgetter(n) for n in ("w", "b", *properties)} | COPIES
    rest = [i for i in range(N) if i % 5 != 1]
    never = kind(J, K, **config).add(x[rest], y[rest])
    with SampleStore(tmp_path / "s", head=kind(J, K, **config)) as writer:
        for name, use in doors.items():
            if name in ("samples", "unchecked"):  # rows under hidden keys; the head of a store checks no rows
                continue
            writer.apply(Remove(ids=writer.find())) if len(writer) else None
            writer.apply(Add(ids_of(), x, y, users_of()))
            with SampleStore(tmp_path / "s", readonly=True) as reader:
                head = reader.head
                head.predict(x), head.w
                writer.apply(Remove(subject="user-1"))
                assert plain(use(head)) == plain(use(never)), name


def test_following_an_erasure_reads_the_sums_that_the_writer_published(tmp_path: Path) -> None:
    n = 1500
    with SampleStore(tmp_path / "s", head=new_head(rho=1.0)) as writer:
        writer.apply(Add(range(n), *data(n)))
        with SampleStore(tmp_path / "s", readonly=True) as reader:
            head = reader.head
            assert head.n == n
            writer.apply(Remove(ids=[3]))
            reads: list[int] = []
            reader.table.on_read = reads.append
            assert head.n == n - 1
            assert head.digest() == writer.head.digest()
            assert reads == []


def test_sums_of_others_are_not_merged_into_the_head_of_a_store(store: SampleStore) -> None:
    other = LSSVMHead.from_config(store.head.config())
    before = store.head.digest()
    for merge in (store.head.merge, lambda head: merge_deltas(store.head, Delta.take(head))):
        with pytest.raises(StoreError, match=r"store\.apply"):
            merge(other)
    assert store.head.digest() == before
