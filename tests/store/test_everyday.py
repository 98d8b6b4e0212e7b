"""Everyday work with a store: calibrations that are kept, groups, ids that come again, new classes, backups, receipts."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchlssvm import Certificate, FixedPoint, LSSVMHead, MarginHead, attach
from torchlssvm.audit import ErasureReceipt
from torchlssvm.cli import main
from torchlssvm.errors import StoreError
from torchlssvm.events import Add, Remove
from torchlssvm.report import write_report
from torchlssvm.store import SampleStore, new_suppression_key

J, N = 5, 60
X, Y = torch.randn(N, J, generator=torch.Generator().manual_seed(5)), torch.arange(N) % 3
X[range(N), Y] += 2
IDS, SUBJECTS = [f"s{i}" for i in range(N)], [f"user-{i // 4:02d}" for i in range(N)]


def new_head(kind: Any = LSSVMHead, classes: int = 3) -> Any:
    return kind(J, classes, grid=FixedPoint(16.0), rho=1.0)


@pytest.fixture
def store(tmp_path: Path) -> SampleStore:
    made = SampleStore(tmp_path / "store", head=new_head())
    made.apply(Add(IDS, X, Y, SUBJECTS))
    return made


def test_the_history_prints_short_lines_without_hashes(store: SampleStore) -> None:
    with store as opened:
        opened.apply(Remove(ids=IDS[:2]))
        for entry in opened.history():
            shown = repr(entry)
            assert len(shown) < 300
            assert "\n" not in shown
            assert not any(
                repr(part) in shown or part.hex() in shown for part in [*entry.commitment_bytes, entry.chain]
            )
            assert (entry.kind in shown, repr(entry.time) in shown, str(entry.position) in shown) == (True, True, True)


# -- a calibration that is kept ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [None, "subject"])
def test_a_kept_calibration_is_that_of_a_store_that_never_saw_the_sample(
    tmp_path: Path, store: SampleStore, groups: str | None
) -> None:
    store.calibrate(keep=True, groups=groups)
    store.apply(Remove(subject="user-03", event_id="e1"))
    rest = [i for i in range(N) if SUBJECTS[i] != "user-03"]
    with SampleStore(tmp_path / "never", head=new_head()) as never:
        never.apply(Add([IDS[i] for i in rest], X[rest], Y[rest], [SUBJECTS[i] for i in rest]))
        never.calibrate(groups=groups)
        torch.testing.assert_close(store.head.predict_proba(X), never.head.predict_proba(X), rtol=1e-9, atol=1e-9)
    assert store.certificate("e1").scope["choices"]["calibration"]["state"] == "current"
    store.calibrate(keep=False)
    store.apply(Remove(ids=["s0"], event_id="e2"))
    assert store.certificate("e2").scope["choices"]["calibration"]["state"] == "void"


def test_with_attach_the_first_erasure_does_not_end_probabilities(tmp_path: Path) -> None:
    clf = attach(nn.Linear(J, 3), 3, store=tmp_path / "store", grid=FixedPoint(16.0))
    clf.add([(X[:30], Y[:30], IDS[:30], SUBJECTS[:30]), (X[30:], Y[30:], IDS[30:], SUBJECTS[30:])], progress=False)
    clf.store.calibrate()
    clf.remove(subject="user-01")
    assert clf.predict_proba(X).shape == (N, 3)


# -- groups --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LSSVMHead, MarginHead])
def test_scores_of_groups_are_those_of_a_head_without_the_group(tmp_path: Path, kind: Any) -> None:
    with SampleStore(tmp_path / "store", head=new_head(kind)) as store:
        mixed = [None if i % 7 == 0 else SUBJECTS[(i * 11) % N] for i in range(N)]
        store.apply(Add(IDS, X, Y, mixed))
        ids, scores, labels = store.leave_one_out(groups="subject")
        by_dict = store.leave_one_out(groups={i: s for i, s in zip(IDS, mixed, strict=True) if s})
        assert ids == IDS
        assert labels.tolist() == Y.tolist()
        torch.testing.assert_close(by_dict[1], scores)
        for k in (0, 1, 30):
            out = [i for i in range(N) if i == k or (mixed[k] is not None and mixed[i] == mixed[k])]
            rest = [i for i in range(N) if i not in out]
            never = new_head(kind).add(X[rest], Y[rest])
            held = store.get([IDS[k]]).x
            torch.testing.assert_close(scores[k], never(held)[0], rtol=1e-6, atol=1e-6)
        assert store.label_errors(groups="subject").scores.equal(scores)
        report = write_report(store, tmp_path / "r.html", groups="subject")
        assert report.labels.scores.equal(scores.cpu())


@pytest.mark.parametrize("order", [range(2 * N), [*range(0, 2 * N, 2), *range(1, 2 * N, 2)]], ids=["pairs", "apart"])
def test_rows_of_one_subject_that_are_alike_are_noticed(tmp_path: Path, store: SampleStore, order: Any) -> None:
    store.leave_one_out()  # rows of users that differ: no warning
    with SampleStore(tmp_path / "views", head=new_head()) as views:
        x = X.repeat_interleave(2, 0) + 0.01 * torch.randn(2 * N, J)
        views.apply(Add(range(1000, 2500), torch.randn(1500, J), torch.arange(1500) % 3))  # they have no subject
        views.apply(Add(order, x[[*order]], Y.repeat_interleave(2)[[*order]], [f"picture-{i // 2}" for i in order]))
        with pytest.warns(UserWarning, match="groups='subject'"):
            views.leave_one_out()


# -- an id that comes again ----------------------------------------------------------------------------------------------


def test_an_id_with_other_features_is_refused_and_rounding_is_passed_over(tmp_path: Path) -> None:
    clf = attach(nn.Linear(J, 3), 3, store=tmp_path / "store", grid=FixedPoint(16.0))
    clf.add(X, Y, ids=IDS)
    before = clf.head.digest()
    clf.add(X * (1 + 1e-5), Y, ids=IDS)
    clf.add([(X * (1 - 1e-5), Y, IDS)], progress=False)
    assert clf.head.digest() == before
    other = X.clone()
    other[7, 0] += 0.1
    for again in ((other, Y), (X, (Y + 1) % 3)):
        with pytest.raises(ValueError, match=r"'s[07]'"):
            clf.add(*again, ids=IDS)
        with pytest.raises(ValueError, match=r"'s[07]'"):
            clf.add([(*again, IDS)], progress=False)
    assert clf.head.digest() == before


def test_results_read_well_in_a_console(store: SampleStore) -> None:
    assert "1 sample," in str(store.apply(Remove(ids=["s0"])))
    done = store.compact()
    assert "\n" not in repr(done)
    assert len(repr(done)) < 100


# -- classes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LSSVMHead, MarginHead])
def test_classes_that_come_later_are_as_if_they_had_been_there(tmp_path: Path, kind: Any) -> None:
    with SampleStore(tmp_path / "store", head=new_head(kind)) as store:
        store.apply(Add(IDS, X, Y))
        with SampleStore(tmp_path / "store", readonly=True) as reader:
            head = reader.head
            assert head.num_classes == 3
            store.add_classes(["fox", "owl"])
            store.apply(Add(["new"], X[:1], [4]))
            whole = new_head(kind, 5).add(torch.cat([X, X[:1]]), torch.cat([Y, torch.tensor([4])]))
            assert head.digest() == store.head.digest() == whole.digest()
        for names in (["fox"], ["0"], [], 0):
            with pytest.raises(ValueError, match="classes"):
                store.add_classes(names)  # type: ignore[arg-type]
    with SampleStore(tmp_path / "store") as store:
        assert (store.classes, store.head.num_classes) == (["0", "1", "2", "fox", "owl"], 5)
        assert [entry.kind for entry in store.history()] == ["add", "classes", "add"]
        assert store.recompute()[1] == whole.digest()
        store.apply(Remove(ids=["new"], event_id="e"))
        store.compact()
        assert store.certificate("e").shape["classes"] == 5


def test_names_of_classes_in_a_classifier_and_on_the_command_line(tmp_path: Path) -> None:
    names = ["ant", "bee", "cat"]
    clf = attach(nn.Linear(J, 3), 3, store=tmp_path / "store", classes=names, grid=FixedPoint(16.0))
    clf.add(X, Y, ids=IDS)
    assert clf.predict(X[:4], names=True) == [names[k] for k in clf.predict(X[:4]).tolist()]
    clf.save(tmp_path / "clf.pt")
    clf.store.close()
    assert main(["set", str(tmp_path / "store"), "--add-classes", "fox"]) == 0
    with SampleStore(tmp_path / "store") as store:
        assert store.classes == [*names, "fox"]
    with pytest.raises(ValueError, match="classes"):
        attach(nn.Linear(J, 4), 4, store=tmp_path / "store", classes=["a", "b", "c", "d"], grid=FixedPoint(16.0))


@pytest.mark.parametrize("stored", [True, False])
def test_labels_by_name(tmp_path: Path, stored: bool) -> None:
    names, store = ["ant", "bee", "cat"], {"store": tmp_path / "store"} if stored else {}
    x, y = X.double(), [names[k] for k in Y.tolist()]
    whole = attach(nn.Identity(), 3, in_features=J, grid=FixedPoint(16.0)).add(x, Y)
    clf = attach(nn.Identity(), 3, in_features=J, classes=names, grid=FixedPoint(16.0), **store)
    ids = {"ids": IDS} if stored else {}
    clf.add(x[:40], y[:40], **{name: value[:40] for name, value in ids.items()})
    rest = (x[40:], y[40:], IDS[40:]) if stored else (x[40:], y[40:])
    clf.add([rest], progress=False)
    assert clf.head.digest() == whole.head.digest()
    assert clf.score(x, y) == clf.score(x, Y)
    with pytest.raises(ValueError, match="'cat'"):
        clf.add(x[:1], ["catt"], **({"ids": ["new"]} if stored else {}))
    whole.relabel(x[:1], [0], [2])
    clf.relabel(ids=["s0"], y_new=["cat"]) if stored else clf.relabel(x[:1], ["ant"], ["cat"])
    assert clf.head.digest() == whole.head.digest()
    with pytest.raises(ValueError, match="no names"):
        whole.add(x, y)
    if stored:
        assert clf.store.labels(["bee", 0]) == [1, 0]
        with pytest.raises(ValueError, match=r"store\.labels"):
            Add(["n"], X[:1], ["ant"])


def test_samples_are_found_by_the_name_of_their_class(tmp_path: Path) -> None:
    clf = attach(nn.Identity(), 3, in_features=J, classes=["ant", "bee", "cat"], store=tmp_path / "store")
    clf.add(X, Y, ids=IDS)
    assert clf.store.find(label="bee") == clf.store.find(label=1) == [i for i, k in zip(IDS, Y, strict=True) if k == 1]
    for bad in ("owl", 7, -1, 0.5, True, ["bee"]):
        with pytest.raises(ValueError, match=r"class|label"):
            clf.store.find(label=bad)  # type: ignore[arg-type]


def test_only_names_and_numbers_are_labels(tmp_path: Path) -> None:
    clf = attach(nn.Identity(), 3, in_features=J, classes=["ant", "bee", "cat"]).add(X, Y)
    for bad in (float("nan"), 1.7, None):
        for verb in (clf.score, clf.add):
            with pytest.raises(ValueError, match="among names"):
                verb(X[:2], ["ant", bad])


def test_names_of_classes_added_later_are_not_lost(tmp_path: Path) -> None:
    clf = attach(nn.Identity(), 2, in_features=J)
    clf.add_classes(["fox"]).add_classes(1)
    assert (clf.classes, clf.head.num_classes) == (["0", "1", "fox", "3"], 4)
    with pytest.raises(ValueError, match="different"):
        clf.add_classes("fox")
    assert clf.head.num_classes == 4


def test_a_store_that_grew_is_opened_by_the_call_that_made_it(tmp_path: Path) -> None:
    def opened(K: int = 2, names: Any = ("ant", "bee")) -> Any:
        return attach(nn.Identity(), K, in_features=J, classes=names, store=tmp_path / "store", grid=FixedPoint(16.0))

    clf = opened()
    clf.add(X, Y % 2, ids=IDS)
    with pytest.raises(ValueError, match="num_classes"):
        opened(1, ["ant"])  # nothing was added yet
    clf.add_classes(["fox"]).add(X[:1] + 1, ["fox"], ids=["f"])
    digest, answers = clf.head.digest(), clf.predict(X, names=True)
    clf.store.close()
    for again in (opened(), opened(3, ["ant", "bee", "fox"])):
        assert (again.head.digest(), again.predict(X, names=True)) == (digest, answers)
        assert again.classes == ["ant", "bee", "fox"]
        again.store.close()
    with pytest.raises(ValueError, match="classes of"):
        opened(2, ["ant", "wasp"])


# -- backups -------------------------------------------------------------------------------------------------------------


def test_a_backup_is_restored_without_those_who_were_erased_since(tmp_path: Path) -> None:
    key = new_suppression_key(tmp_path / "key")
    with SampleStore(
        tmp_path / "store", head=new_head(), suppression_list=tmp_path / "list", suppression_key=key
    ) as store:
        store.apply(Add(IDS, X, Y, SUBJECTS))
        assert main(["backup", str(tmp_path / "store"), str(tmp_path / "copy")]) == 0  # while it is open
        store.erase(request=store.requests.open("user-02").id, receipt=tmp_path / "r.json", compact=True)
        digest = store.head.digest()
        erasure = store.requests.all()[0].events[-1]
        assert store.certificate(erasure).scope["checkpoints"] == [str(tmp_path / "copy")]  # it holds the erased
    assert (tmp_path / "copy").stat().st_mode & 0o077 == 0
    restore = ["restore", str(tmp_path / "copy"), str(tmp_path / "again")]
    assert main(restore) == 1  # without the key nobody can tell who was erased
    assert not (tmp_path / "again").exists()
    assert main([*restore, "--suppression-key", str(key), "--certificate", str(tmp_path / "c.json")]) == 0
    assert Certificate.load(tmp_path / "c.json").erased == 4
    with SampleStore(tmp_path / "again", suppression_key=key) as again:
        assert (again.head.digest(), again.find(subject="user-02")) == (digest, [])
    assert main(["backup", str(tmp_path / "store"), str(tmp_path / "copy")]) == 1  # nothing is written over


def test_an_address_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "s3://bucket/store", "--in-features", "4", "--classes", "2"]) == 1
    with pytest.raises(StoreError, match="address"):
        SampleStore("gs://bucket", head=new_head())
    assert os.listdir(tmp_path) == []


# -- requests and receipts -----------------------------------------------------------------------------------------------


def test_a_request_id_may_not_hold_the_local_part_of_an_address(store: SampleStore) -> None:
    with pytest.raises(ValueError, match="request_id"):
        store.requests.open("jane.doe@example.org", request_id="R-jane.doe-1")
    assert store.requests.open("jane.doe@example.org", request_id="R-1").id == "R-1"


def test_several_subjects_are_removed_in_one_call_with_a_receipt(tmp_path: Path) -> None:
    clf = attach(nn.Linear(J, 3), 3, store=tmp_path / "store", grid=FixedPoint(16.0))
    clf.add(X, Y, ids=IDS, subjects=SUBJECTS)
    done = clf.remove(subject=["user-00", "user-01"], receipt=tmp_path / "r.json")
    assert [result.samples for result in done] == [4, 4]
    assert ErasureReceipt.load(tmp_path / "r.json").ids == IDS[:8]
    clf.store.compact()  # the receipt is written, so the bytes can go
    assert len(clf.store) == N - 8


@pytest.mark.parametrize("stored", [False, True])
def test_new_classes_have_names_of_their_own(tmp_path: Path, stored: bool) -> None:
    place = {"store": tmp_path / "store"} if stored else {}
    clf = attach(nn.Identity(), 2, in_features=J, **place)
    for bad in (["1"], "0", ["a", "a"], ["zoe\u0308", "zo\u00eb"], 1.5, True, None, [None], [], 0, -1):
        with pytest.raises(ValueError, match="classes"):
            clf.add_classes(bad)  # type: ignore[arg-type]
        assert (clf.head.num_classes, clf.classes) == (2, None)
    clf.add_classes(np.int64(1))  # type: ignore[arg-type]
    assert (clf.head.num_classes, clf.classes) == (3, None)
    clf.add_classes(np.array(["fox"])).add_classes(1)  # type: ignore[arg-type]
    assert (clf.head.num_classes, clf.classes) == (5, ["0", "1", "2", "fox", "4"])


def test_groups_are_found_by_ids_in_any_form(tmp_path: Path) -> None:
    names = [unicodedata.normalize("NFD", f"\u00e9{i}") for i in range(6)]
    x, y = torch.randn(12, J, generator=torch.Generator().manual_seed(5)).clamp(-4, 4), torch.arange(12) % 2
    with SampleStore(tmp_path / "forms", head=LSSVMHead(J, 2, grid=FixedPoint(8.0), rho=1.0)) as store:
        store.apply(Add([*range(6), *names], x, y))
        by_given = store.leave_one_out(groups={i: k // 3 for k, i in enumerate([*range(6), *names])})
        by_stored = store.leave_one_out(groups={i: k // 3 for k, i in enumerate(by_given[0])})
        assert torch.equal(by_given[1], by_stored[1])
        assert not torch.equal(by_given[1], store.leave_one_out()[1])
