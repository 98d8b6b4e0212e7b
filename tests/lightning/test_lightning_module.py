"""LSSVMModule: one pass, nothing counted twice, the store as the only truth, checkpoints that load anywhere."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.lightning_tools import (
    J,
    K,
    Recorder,
    Stop,
    indexed,
    interrupted,
    loader,
    module,
    quiet,
    samples,
    truth,
)
from torchlssvm.errors import GridError
from torchlssvm.events import Remove
from torchlssvm.features import RandomReLU
from torchlssvm.lightning import DataCorrection, Indexed, LabelAudit, LSSVMModule, PredictionFile, ResumableLoader
from torchlssvm.store import SampleStore


def test_one_pass_is_the_head_on_all_samples(tmp_path: Path) -> None:
    m, (x, y) = module(), samples()
    ear = Recorder()
    quiet(tmp_path, logger=ear.logger).fit(m, loader(), DataLoader(TensorDataset(x, y), batch_size=16))
    assert m.head.digest() == truth(x, y).digest()
    right = float((truth(x, y).predict(x) == y).float().mean())
    logged = {k: v for said in ear.logger.said for k, v in said.items()}
    assert logged["val_accuracy"] == pytest.approx(right, abs=1e-6)
    expected = truth(x, y).predict(x)
    recalls = [float((expected[y == k] == k).float().mean()) for k in range(K)]
    assert [logged[f"val_recall_{k}"] for k in range(K)] == pytest.approx(recalls, abs=1e-6)
    assert logged["val_recall"] == pytest.approx(sum(recalls) / K, abs=1e-6)
    assert (logged["n"], logged["rho"]) == (67, pytest.approx(truth(x, y).rho))


def test_a_second_epoch_counts_nothing_twice(tmp_path: Path, capsys: Any) -> None:
    x, y = samples()
    with_ids, without = module(), module()
    quiet(tmp_path, max_epochs=3).fit(with_ids, loader(shuffle=True))
    assert "not counted twice: " in capsys.readouterr().out
    quiet(tmp_path, max_epochs=2).fit(without, DataLoader(TensorDataset(x, y), batch_size=8))
    assert "first epoch only" in capsys.readouterr().out
    assert with_ids.head.digest() == without.head.digest() == truth(x, y).digest()


def test_sanity_checking_is_silent(tmp_path: Path) -> None:
    ear, (x, y) = Recorder(), samples()
    before: list[Any] = []

    class Look(Callback):
        def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
            before.append((pl_module.head.n, list(ear.logger.said)))

    val = DataLoader(TensorDataset(x, y), batch_size=16)
    quiet(tmp_path, logger=ear.logger, num_sanity_val_steps=2, callbacks=[Look()]).fit(module(), loader(), val)
    assert before == [(0, [])]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_every_precision_leaves_the_head_alone(tmp_path: Path, precision: str) -> None:
    """It sums in float64 what the network gave, in the precision of the network."""
    torch.manual_seed(0)
    x, y = samples(40)
    m = LSSVMModule(nn.Sequential(nn.Linear(J, 8), nn.ReLU(), nn.Linear(8, 5)), K, grid=64.0)
    quiet(tmp_path, precision=precision).fit(m, DataLoader(TensorDataset(x, y), batch_size=40))
    dtype = {"bf16-mixed": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}[precision]
    assert {p.dtype for p in m.classifier.backbone.parameters()} == {dtype}
    assert {m.head.w.dtype, m.head.P.dtype} == {torch.float64}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        phi = m.classifier.features(x.to(dtype))
    assert m.head.digest() == m.head.from_config(m.head.config()).add(phi, y).digest()


def test_a_feature_map_stands_between_network_and_head(tmp_path: Path) -> None:
    x, y = samples(30)
    lifted = LSSVMModule("identity", K, in_features=J, feature_map=RandomReLU(J, 50), grid=64.0)
    quiet(tmp_path).fit(lifted, loader(30))
    other = lifted.head.from_config(lifted.head.config()).add(RandomReLU(J, 50)(x), y)
    assert lifted.head.digest() == other.digest()


def test_rho_is_chosen_by_folds(tmp_path: Path) -> None:
    m = module(rho="kfold", head_options={"folds": 3})
    quiet(tmp_path).fit(m, loader())
    assert "kfold" in m.head.choices["rho"].method
    with pytest.raises(ValueError, match="needs weights"):
        LSSVMModule("mobilenet_v2", 2)


def test_what_is_validated_has_the_chosen_rho(tmp_path: Path) -> None:
    """Features so small that the head with rho = 1 would have weights of nothing."""
    x, y = samples()
    small = 1e-6 * x
    m, ear = LSSVMModule("identity", K, in_features=J), Recorder()
    data = DataLoader(TensorDataset(small, y), batch_size=16)
    trainer = quiet(tmp_path, logger=ear.logger, callbacks=[])
    trainer.fit(m, data, data)
    logged = next(said["val_accuracy"] for said in ear.logger.said if "val_accuracy" in said)
    chosen = m.head.rho
    assert logged == pytest.approx(float((m.head.predict(small) == y).float().mean()), abs=1e-6)
    m.head.rho = 2 * chosen
    trainer.validate(m, data, verbose=False)  # asked by itself it judges the head as it is
    assert m.head.rho == 2 * chosen


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_loads_everywhere(tmp_path: Path) -> None:
    x, y = samples()
    m = module(rho=0.5)
    trainer = quiet(tmp_path)
    trainer.fit(m, loader())
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    assert "classifier.head.w" in saved["state_dict"]
    assert not any("anchor" in name for name in saved["state_dict"])
    again = LSSVMModule.load_from_checkpoint(path, weights_only=True)
    assert again.head.digest() == truth(x, y).digest()
    assert again.head.rho == 0.5
    assert torch.equal(again.head.w, truth(x, y, rho=0.5).w)
    network = LSSVMModule(nn.Sequential(nn.Flatten(), nn.Linear(J, K)), K)
    trainer.fit(network, loader())
    trainer.save_checkpoint(path)
    again = LSSVMModule.load_from_checkpoint(
        path, backbone=nn.Sequential(nn.Flatten(), nn.Linear(J, K)), weights_only=True
    )
    assert again.head.digest() == network.head.digest()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("after", [1, 4, 8])
def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, shuffle: bool, after: int) -> None:
    x, y = samples()
    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True, save_top_k=0)
    interrupted(
        quiet(tmp_path, callbacks=[save, Stop(after + 1)], enable_checkpointing=True), module(), loader(shuffle=shuffle)
    )
    m = module()
    trainer = quiet(tmp_path)
    trainer.fit(m, loader(shuffle=shuffle), ckpt_path=str(tmp_path / "last.ckpt"), weights_only=True)
    assert m.head.digest() == truth(x, y).digest()
    assert torch.equal(m.head.refresh().w, truth(x, y).w)


def test_a_loader_that_starts_again_is_refused(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True, save_top_k=0)
    plain = DataLoader(indexed(), batch_size=8)
    interrupted(quiet(tmp_path, callbacks=[save, Stop(4)], enable_checkpointing=True), module(), plain)
    with pytest.raises(ValueError, match="ResumableLoader"):
        quiet(tmp_path).fit(module(), plain, ckpt_path=str(tmp_path / "last.ckpt"))


def test_files_hold_no_ids_in_clear_beyond_what_events_need(tmp_path: Path) -> None:
    data = Indexed(TensorDataset(*samples(10)), prefix="somebody@example.org/")
    with SampleStore(tmp_path / "store", head=module().head):
        pass
    m = module(store=str(tmp_path / "store"))
    quiet(tmp_path).fit(m, ResumableLoader(data, 4))
    assert b"somebody" not in (tmp_path / "store" / "offered.until-compaction").read_bytes()


# -- a store is the only truth -----------------------------------------------------------------------------------------


def test_training_goes_through_the_store(tmp_path: Path) -> None:
    x, y = samples()
    m = module(store=str(tmp_path / "store"))
    data = ResumableLoader(indexed(subjects=[i % 5 for i in range(67)]), 8)
    quiet(tmp_path, max_epochs=2).fit(m, data)
    assert m.store is None  # closed
    with SampleStore(tmp_path / "store") as store:
        assert store.head.digest() == m.head.digest() == truth(x, y).digest()
        assert len(store) == 67
        assert len(store.find(subject="3")) == 13
    with pytest.raises(ValueError, match="id for each sample"):
        quiet(tmp_path).fit(module(store=str(tmp_path / "store")), DataLoader(TensorDataset(x, y), batch_size=8))


def test_an_event_that_was_announced_but_not_applied_is_offered_again(tmp_path: Path) -> None:
    x, y = samples(16)
    m = module(store=str(tmp_path / "store"))
    quiet(tmp_path).fit(m, loader(16))
    file = tmp_path / "store" / "offered.until-compaction"
    whole = file.read_bytes()
    lost = whole.splitlines(keepends=True)[1].replace(b'"event_id": "', b'"event_id": "f')
    other = m.learner.__class__(m.head)
    for tail in (lost, lost[:20]):  # killed between the file and the store, and in the middle of writing the file
        file.write_bytes(whole + tail)
        other.open(str(tmp_path / "store"), m.classifier.backbone)
        assert len(other.seen.hashes) == 16
        other.close()
        assert file.read_bytes() == whole
    assert m.head.digest() == truth(x, y).digest()


@pytest.mark.parametrize("stored", [False, True])
def test_a_batch_that_failed_is_learned_when_it_comes_again(tmp_path: Path, stored: bool) -> None:
    """In the same process, as in a notebook."""
    x, y = samples()
    bad = x.clone()
    bad[12] = 1e6
    m = module(store=str(tmp_path / "store") if stored else None)
    with pytest.raises(GridError):
        quiet(tmp_path).fit(m, ResumableLoader(Indexed(TensorDataset(bad, y)), 8))
    quiet(tmp_path).fit(m, loader())
    assert m.head.digest() == truth(x, y).digest()


def test_after_compaction_nothing_tells_which_ids_were_offered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The list of offered ids would confirm a guess about an erased one: it goes, with its key."""
    folder = tmp_path / "store"
    quiet(tmp_path).fit(module(store=str(folder)), loader(16))
    file = folder / "offered.until-compaction"
    key, *records = [json.loads(line) for line in file.read_bytes().splitlines()]
    guess = hashlib.blake2b(b"3", digest_size=16, key=bytes.fromhex(key["key"])).hexdigest()
    assert any(guess in record["ids"] for record in records)  # before: the guess is confirmed
    with SampleStore(folder) as store:
        store.apply(Remove(ids=["3"]))
        store.compact()
    left = b"".join(path.read_bytes() for path in folder.iterdir())
    assert not file.exists()
    for secret in (key["key"].encode(), bytes.fromhex(key["key"]), guess.encode()):
        assert secret not in left
    m = module(store=str(folder))
    quiet(tmp_path).fit(
        m, loader(16)
    )  # ids that are held are not added again; the erased one is, and a warning says so
    assert "the store no longer knows which" in caplog.text
    assert m.head.n == 16


def test_a_trial_run_learns_nothing_into_the_store(tmp_path: Path) -> None:
    m, events = module(store=str(tmp_path / "store")), tmp_path / "events.jsonl"
    events.write_text('{"kind": "remove", "ids": ["3"], "event_id": "e"}\n')
    correction = DataCorrection(events, certificates=tmp_path / "certificates")
    files = LabelAudit(tmp_path / "suspects.jsonl"), PredictionFile(tmp_path / "predictions.csv")
    trial = quiet(tmp_path, fast_dev_run=True, callbacks=[correction, *files])
    trial.fit(m, loader())
    trial.predict(m, loader())
    assert not any((tmp_path / name).exists() for name in ("store", "suspects.jsonl", "predictions.csv"))
    assert correction.reports == []
    m = module(store=str(tmp_path / "store"))
    quiet(tmp_path, callbacks=[correction]).fit(m, loader())
    assert m.head.n == 66


def test_a_compiled_module_learns_as_the_module_does(tmp_path: Path) -> None:
    m = module()
    quiet(tmp_path).fit(torch.compile(m, backend="eager"), loader())
    assert m.head.digest() == truth(*samples()).digest()


@pytest.mark.parametrize("rewritten", [False, True])
def test_an_events_file_that_was_replaced_between_two_fits_is_read_from_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rewritten: bool
) -> None:
    """A file that is deleted and made again may have the inode of the old one, as one that is rewritten."""
    events = tmp_path / "events.jsonl"
    line = '{{"kind": "remove", "ids": ["{}"], "event_id": "{}"}}\n'
    for ids in (["1"], ["2", "4", "5"]):
        beside = events if rewritten else tmp_path / "new.jsonl"
        beside.write_text("".join(line.format(i, f"request {'abcdef'[int(i)]}") for i in ids))
        beside.replace(events)  # nothing happens to a file that was rewritten
        m = module(store=str(tmp_path / "store"))
        quiet(tmp_path, callbacks=[DataCorrection(events)]).fit(m, loader())
    assert m.head.n == 63
    assert "read from its start" in caplog.text
