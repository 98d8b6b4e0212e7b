"""The callbacks: corrections that survive a kill, drift, probes, fits and audits, each with any module that has a head."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, TensorDataset

from tests.support.lightning_events import EXTRA, X, Y
from tests.support.lightning_tools import K, Network, Recorder, loader, module, quiet, truth
from torchlssvm import Certificate, LSSVMHead, TorchLSSVMError, verify
from torchlssvm.analysis.label_errors import find_label_errors
from torchlssvm.audit import ErasureReceipt
from torchlssvm.events import Add, Remove
from torchlssvm.lightning import DataCorrection, FitHead, LabelAudit, OnlineProbe
from torchlssvm.store import SampleStore

VAL = DataLoader(TensorDataset(X, Y), batch_size=16)


def test_what_was_done_is_logged(tmp_path: Path) -> None:
    ear, events = Recorder(), queue.Queue()
    x, y = EXTRA
    correction = DataCorrection(events, every=4)
    assert correction.state_key != DataCorrection("a.jsonl").state_key != DataCorrection("b.jsonl").state_key

    class Late(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                events.put(Add(ids=[f"n{i}" for i in range(30)], x=x, y=(y + 1) % K))
                events.put(17)

    trainer = quiet(tmp_path, max_epochs=2, logger=ear.logger, callbacks=[correction, Late()])
    m = module()
    trainer.fit(m, loader(), VAL)
    report = next(r for r in correction.reports)
    assert (report.applied, report.refused, report.samples) == (1, 1, 30)
    before = truth(X, Y)
    after = truth(torch.cat([X, x]), torch.cat([Y, (y + 1) % K]))
    assert report.accuracy_before == pytest.approx(float((before.predict(X) == Y).float().mean()))
    assert report.accuracy_after == pytest.approx(float((after.predict(X) == Y).float().mean()))
    assert report.accuracy_after < report.accuracy_before
    said = next(s for s in ear.logger.said if "corrections/applied" in s)
    assert said["corrections/samples"] == 30
    assert said["corrections/milliseconds"] > 0
    assert (tmp_path / "dead_letters.jsonl").exists()


def test_a_run_may_be_stopped_by_a_bad_event(tmp_path: Path) -> None:
    with pytest.raises(TorchLSSVMError, match="cannot be applied"):
        quiet(tmp_path, callbacks=[DataCorrection([Remove(ids=["z"])], on_error="raise")]).fit(module(), loader())


def test_removals_through_a_store_are_certified(tmp_path: Path) -> None:
    m = module(store=str(tmp_path / "store"))
    correction = DataCorrection([Remove(ids=["1", "2"])], every=9, certificates=tmp_path / "certificates")
    quiet(tmp_path, callbacks=[correction]).fit(m, loader())
    file, beside = sorted((tmp_path / "certificates").iterdir(), key=lambda path: ".receipt." in path.name)
    assert ErasureReceipt.load(beside).check(Certificate.load(file)).facts["ids"] == ["1", "2"]
    with SampleStore(tmp_path / "store") as store:
        assert verify(Certificate.load(file), store=store, allow_unsigned=True)
        store.compact()  # no receipt is waiting
    with pytest.raises(ValueError, match="need a store"):
        quiet(tmp_path, callbacks=[DataCorrection([], certificates=tmp_path)]).fit(module(), loader())


def test_two_stores_certify_into_one_folder(tmp_path: Path) -> None:
    """The same event id, and a file of somebody else under the name."""
    folder = tmp_path / "certificates"
    folder.mkdir()
    (folder / "request-a.json").write_text("mine")
    for name in ("a", "b"):
        correction = DataCorrection([Remove(ids=["1"], event_id="request-a")], certificates=folder)
        quiet(tmp_path, callbacks=[correction]).fit(module(store=str(tmp_path / name)), loader())
    assert (folder / "request-a.json").read_text() == "mine"
    for name, file in (("a", "request-a-2.json"), ("b", "request-a-3.json")):
        with SampleStore(tmp_path / name) as store:
            assert verify(Certificate.load(folder / file), store=store, allow_unsigned=True)
            assert store.note("uncertified") is None


def test_a_removal_that_was_applied_without_a_certificate_gets_one_when_it_comes_again(tmp_path: Path) -> None:
    events = [Remove(ids=["1"], event_id="a"), Remove(ids=["2"], event_id="b")]
    quiet(tmp_path, callbacks=[DataCorrection(events[:1])]).fit(module(store=str(tmp_path / "store")), loader())
    for time in range(2):  # the second time both have one
        folder = tmp_path / "certificates"
        correction = DataCorrection(iter([*events, events[0]]), certificates=folder)
        correction.name = f"source {time}"
        quiet(tmp_path, callbacks=[correction]).fit(module(store=str(tmp_path / "store")), loader())
        (path,) = (p for p in folder.iterdir() if ".receipt." not in p.name)
        certificate = Certificate.load(path)
        with SampleStore(tmp_path / "store") as store:
            assert {e["event_id"] for e in certificate.events} == {store.recorded_id("a"), store.recorded_id("b")}
            assert len(certificate.events) == 2
            assert verify(certificate, store=store, allow_unsigned=True)
            assert store.note("uncertified") is None


def test_the_head_follows_a_store_that_others_change(tmp_path: Path) -> None:
    m = module()
    with SampleStore(tmp_path / "s", head=m.head) as store:
        store.apply(Add(ids=[str(i) for i in range(67)], x=X, y=Y))

        class Other(Callback):
            def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
                if len(store) == 67:
                    with SampleStore(tmp_path / "s") as same:
                        same.apply(Remove(ids=["5", "6"]))

        correction = DataCorrection(store)
        trainer = quiet(tmp_path, callbacks=[correction, Other()])
        trainer.validate(m, VAL, verbose=False)
        trainer.validate(m, VAL, verbose=False)
        keep = torch.tensor([i not in (5, 6) for i in range(67)])
        assert m.head.digest() == truth(X[keep], Y[keep]).digest()
        assert [r.samples for r in correction.reports] == [2]


def test_fit_head_puts_every_mode_back(tmp_path: Path) -> None:
    net = Network()
    net.backbone[1].eval()
    modes: list[Any] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            modes.append([m.training for m in pl_module.backbone])

    quiet(tmp_path, callbacks=[FitHead(when="fit_start"), Look()]).fit(net, VAL)
    assert modes[0] == [True, False, True]
    assert net.head.n == 67


def test_a_probe_is_the_head_of_its_window(tmp_path: Path) -> None:
    net, probe, ear = Network(), OnlineProbe("backbone", K, window=20), Recorder()
    kept: list[Any] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            kept.extend(zip(probe_x[-1], args[1][1], strict=True))

    probe_x: list[Any] = []
    net.backbone.register_forward_hook(lambda m, i, o: probe_x.append(o.detach().clone()) if m.training else None)
    run = quiet(tmp_path, max_epochs=2, logger=ear.logger, num_sanity_val_steps=1, callbacks=[probe, Look()])
    run.fit(net, VAL, VAL)
    last = kept[-20:]
    window = probe.window
    grid = window.machine.grid
    alone = LSSVMHead(8, K, grid=grid, rho="gcv").add(
        torch.stack([x for x, _ in last]), torch.stack([y for _, y in last])
    )
    assert window.machine.digest() == alone.digest()
    net.eval()
    with torch.no_grad():
        right = float((alone.predict(net.backbone(X)) == Y).float().mean())
    assert probe.accuracy == pytest.approx(right)
    assert [s["probe_accuracy"] for s in ear.logger.said if "probe_accuracy" in s][-1] == pytest.approx(probe.accuracy)
    with pytest.raises(ValueError, match="has no module"):
        quiet(tmp_path, callbacks=[OnlineProbe("nowhere", K)]).fit(Network(), VAL)


def test_a_probe_moves_to_a_larger_grid(tmp_path: Path) -> None:
    probe = OnlineProbe("backbone", K, window=1000)

    class Grow(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            with torch.no_grad():
                pl_module.backbone[1].weight *= 1000

    quiet(tmp_path, callbacks=[probe, Grow()]).fit(Network(), VAL)
    assert probe.window.machine.n == 67


def test_an_audit_comes_after_the_choice_of_rho(tmp_path: Path) -> None:
    m, audit = module(), LabelAudit(tmp_path / "a.jsonl", fraction=1.0)
    quiet(tmp_path, callbacks=[audit]).fit(m, loader())
    chosen = truth(X, Y)
    assert m.head.rho == chosen.rho != 1.0
    expected = find_label_errors(chosen, X, Y)
    assert [int(s.id) for s in audit.suspects] == expected.suspects.tolist()
    assert [s.margin for s in audit.suspects] == pytest.approx(expected.margins[expected.suspects].tolist())


def test_a_callback_says_what_it_cannot_find(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="say where its head is"):
        quiet(tmp_path, callbacks=[FitHead(head="nowhere", when="fit_start")]).fit(Network(), VAL)
    with pytest.raises(ValueError, match="is no head"):
        quiet(tmp_path, callbacks=[FitHead(head="fc", when="fit_start")]).fit(Network(), VAL)
    with pytest.raises(ValueError, match="needs the samples"):
        quiet(tmp_path, callbacks=[LabelAudit(tmp_path / "a")]).fit(Network(), VAL)
    with pytest.raises(ValueError, match="when must be one of"):
        FitHead(when="sometimes")
    for bad in (0, True, 1.5):
        with pytest.raises(ValueError, match="every must be"):
            DataCorrection([], every=bad)
