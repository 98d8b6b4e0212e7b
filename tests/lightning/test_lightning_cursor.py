"""A run with a store that is resumed: what was erased stays out, or the run is refused, and all else is learned."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import RandomSampler, Subset, TensorDataset

from tests.support.lightning_tools import Stop, indexed, interrupted, loader, module, quiet, samples, truth
from torchlssvm.corrections.seen_samples import SeenSamples
from torchlssvm.errors import StoreError
from torchlssvm.events import Relabel, Remove, Replace
from torchlssvm.lightning import DataCorrection, Indexed, ResumableLoader
from torchlssvm.store import SampleStore, new_suppression_key

ERASED = (3, 40)  # learned in batches 0 and 5; the checkpoint that is resumed is from before batch 2


def without(*gone: int) -> str:
    x, y = samples()
    keep = torch.tensor([i not in gone for i in range(67)])
    return truth(x[keep], y[keep]).digest()


def stopped(folder: Path, train: Any, after: int = 6, epoch: int = 0, **options: Any) -> Path:
    """A run over a store that stops after so many batches; returns its checkpoint from before batch 2."""
    save = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    run = quiet(folder, callbacks=[save, Stop(after, epoch)], enable_checkpointing=True, **options)
    interrupted(run, module(store=str(folder / "store")), train)
    return folder / "step=2.ckpt"


def erase(folder: Path, *ids: int, order: str) -> None:
    """By somebody else, between two runs."""
    with SampleStore(folder / "store") as store:
        for step in order.split():
            if step == "erase":
                store.apply(Remove(ids=[str(i) for i in ids]))
            else:
                store.compact()


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_checkpoint_from_before_an_erasure_brings_nothing_back(tmp_path: Path, shuffle: bool) -> None:
    """The data set still has the erased samples; one was in the checkpoint, one came after it."""
    start = stopped(tmp_path, loader(shuffle=shuffle))
    with SampleStore(tmp_path / "store") as store:
        held = {int(i) for i in store.find()}
    first = int(loader(shuffle=shuffle).dataset[next(iter(loader(shuffle=shuffle).sampler))][2])
    gone = {first, max(held - {first})}
    erase(tmp_path, *gone, order="erase")
    for epochs in (1, 2):  # the second time the run is over, and the old checkpoint is used once more
        m = module(store=str(tmp_path / "store"))
        quiet(tmp_path, max_epochs=epochs).fit(m, loader(shuffle=shuffle), ckpt_path=str(start))
        assert m.head.digest() == without(*gone)
    again = module(store=str(tmp_path / "store"))
    again.setup("predict")
    again.on_predict_start()
    assert again.head.digest() == m.head.digest()
    again.teardown("predict")


@pytest.mark.parametrize("order", ["erase compact", "compact erase", "compact erase compact"])
def test_a_run_is_not_resumed_when_nothing_tells_which_samples_were_erased(tmp_path: Path, order: str) -> None:
    start = stopped(tmp_path, loader())
    erase(tmp_path, *ERASED, order=order)
    with SampleStore(tmp_path / "store") as store:
        before = store.head.digest()
    with pytest.raises(StoreError, match="could learn them again"):
        quiet(tmp_path).fit(module(store=str(tmp_path / "store")), loader(), ckpt_path=str(start))
    with SampleStore(tmp_path / "store") as store:
        assert store.head.digest() == before


def test_a_suppression_list_lets_the_run_resume(tmp_path: Path) -> None:
    new_suppression_key(tmp_path / "key")
    listed = {"suppression_list": str(tmp_path / "list"), "suppression_key": str(tmp_path / "key")}
    save = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    m = module(store=str(tmp_path / "store"), **listed)
    interrupted(quiet(tmp_path, callbacks=[save, Stop(6)], enable_checkpointing=True), m, loader())
    with SampleStore(tmp_path / "store", **listed) as store:
        store.requests.open(ids=["3", "40"], request_id="R-1")
        receipt = store.apply(Remove(ids=["3", "40"]), request="R-1")
        store.write_receipt([receipt.event_id], tmp_path / "receipt.json")
        store.compact()
    m = module(store=str(tmp_path / "store"), **listed)
    quiet(tmp_path).fit(m, loader(), ckpt_path=str(tmp_path / "step=2.ckpt"))
    assert m.head.digest() == without(*ERASED)


def test_a_run_that_began_on_a_compacted_store(tmp_path: Path) -> None:
    """What it was offered while the store held it is remembered, though it added nothing of it."""
    with SampleStore(tmp_path / "store", head=module().head):
        pass
    quiet(tmp_path).fit(module(store=str(tmp_path / "store")), loader())
    with SampleStore(tmp_path / "store") as store:
        store.compact()

    class Erase(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 0:
                pl_module.store.apply(Remove(ids=["3"]))

    m = module(store=str(tmp_path / "store"))
    quiet(tmp_path, max_epochs=2, callbacks=[Erase()]).fit(m, loader())
    assert m.head.digest() == without(3)


def test_a_new_run_cannot_know_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start = stopped(tmp_path, loader())
    erase(tmp_path, *ERASED, order="erase compact")
    keep = [i for i in range(67) if i not in ERASED]
    m = module(store=str(tmp_path / "store"))
    with caplog.at_level(logging.WARNING):
        quiet(tmp_path).fit(m, ResumableLoader(Subset(indexed(), keep), 8))
    assert "the store no longer knows which" in caplog.text
    assert m.head.digest() == without(*ERASED)  # they have left the data set
    loaded = type(m).load_from_checkpoint(start, weights_only=True)
    quiet(tmp_path).fit(loaded, loader())  # weights of a checkpoint, but a run of its own
    assert loaded.head.digest() == without()


def test_another_sample_under_a_known_id_is_refused(tmp_path: Path) -> None:
    """Rounding is passed over, and so is what an event has changed since."""
    x, y = samples()
    corrections = [Relabel(ids=["5"], y=[(int(y[5]) + 1) % 3]), Replace(ids=["6"], x=x[7:8] + 1)]
    run = quiet(tmp_path, max_epochs=2, callbacks=[DataCorrection(corrections)])
    run.fit(module(store=str(tmp_path / "store")), loader())
    label, features = y.clone(), x.clone()
    label[9], features[9] = (y[9] + 1) % 3, x[9] + 1
    for data, fact in (((x * (1 + 1e-7), y), None), ((x, label), "'9'.*label"), ((features, y), "'9'.*features")):
        again = ResumableLoader(Indexed(TensorDataset(*data)), 8)
        context = nullcontext() if fact is None else pytest.raises(ValueError, match=fact)
        with context:
            quiet(tmp_path).fit(module(store=str(tmp_path / "store")), again)
        with SampleStore(tmp_path / "store") as store:
            assert len(store) == 67


def other_order(kind: str) -> Any:
    data = indexed()
    if kind == "seed":
        return ResumableLoader(data, 8, shuffle=True, seed=1)
    if kind == "sequential":
        return ResumableLoader(data, 8)
    if kind == "batch size":
        return ResumableLoader(data, 4, shuffle=True)
    if kind == "fewer samples":
        return ResumableLoader(Indexed([data.dataset[i] for i in range(60)]), 8, shuffle=True)
    return ResumableLoader(data, 8, sampler=RandomSampler(data))


@pytest.mark.parametrize("kind", ["seed", "sequential", "batch size", "fewer samples", "random"])
def test_other_batches_in_the_middle_of_an_epoch_are_refused(kind: str) -> None:
    first, other = loader(shuffle=True), other_order(kind)
    batches = iter(first)
    for _ in range(2):
        next(batches)
    with pytest.raises(ValueError, match="other batches"):
        other.load_state_dict(first.state_dict())
    list(batches)
    other.load_state_dict(first.state_dict())  # at the end of an epoch any loader will do
    assert sum(len(y) for _, y, _ in other) == len(other.dataset)


def test_two_modules_of_one_process_cannot_be_linked_by_the_ids_they_saw() -> None:
    seen = [SeenSamples(), SeenSamples()]
    for one in seen:
        one.record(["a", "b"])
    assert seen[0].hashes.isdisjoint(seen[1].hashes)


def test_a_checkpoint_of_another_store_is_refused(tmp_path: Path) -> None:
    start = stopped(tmp_path, loader())
    with pytest.raises(StoreError, match="has no record of the run"):
        quiet(tmp_path).fit(module(store=str(tmp_path / "other")), loader(), ckpt_path=str(start))
    unstored = tmp_path / "unstored.ckpt"
    run = quiet(tmp_path)
    run.fit(module(), loader())
    run.save_checkpoint(unstored)
    with pytest.raises(StoreError, match="has no record of the run"):
        quiet(tmp_path, max_epochs=2).fit(module(store=str(tmp_path / "store")), loader(), ckpt_path=str(unstored))


def test_certificates_name_the_checkpoints_of_a_run(tmp_path: Path) -> None:
    """Those from before the erasure, that are still there; also one that was saved when the run was over."""
    store_at, late = str(tmp_path / "store"), tmp_path / "late.ckpt"
    save = ModelCheckpoint(
        tmp_path / "kept", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max", save_last=True
    )

    class Erase(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if args[2] == 6:
                receipt = pl_module.store.apply(Remove(ids=["3"], event_id="first"))
                found.append(pl_module.store.certificate(receipt.event_id).scope["checkpoints"])

    found: list[Any] = []
    m = module(store=store_at)
    run = quiet(tmp_path, callbacks=[save, Erase()], enable_checkpointing=True)
    run.fit(m, loader())
    kept = sorted(str(path) for path in (tmp_path / "kept").iterdir())
    assert [Path(path).name for path in kept] == ["epoch=0-step=6.ckpt", "epoch=0-step=8.ckpt", "last.ckpt"]
    assert [sorted(Path(path).name for path in paths) for paths in found] == [
        ["epoch=0-step=4.ckpt", "epoch=0-step=6.ckpt", "last.ckpt"]
    ]
    run.save_checkpoint(late)
    with SampleStore(store_at) as store:
        assert store.certificate("first").scope["checkpoints"] == kept[:1]  # step 8 and last came after the erasure
        assert (
            str(tmp_path / "kept" / "epoch=0-step=4.ckpt") not in store.certificates.checkpoints()
        )  # Lightning removed it
        second = store.apply(Remove(ids=["4"]))
        assert store.certificate(second.event_id).scope["checkpoints"] == sorted([*kept, str(late)])
        assert store.compact().checkpoints == sorted([*kept, str(late)])
        late.unlink()
        assert store.certificate(second.event_id).scope["checkpoints"] == kept


def test_a_checkpoint_that_was_not_finished_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    path, m = tmp_path / "a.ckpt", module(store=str(tmp_path / "store"))
    run = quiet(tmp_path)
    run.fit(m, loader())
    whole = TorchCheckpointIO.save_checkpoint

    def dies(self: Any, checkpoint: Any, path: Any, *args: Any) -> None:
        Path(path).write_bytes(b"the first half")
        raise OSError("no space")

    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", dies)
    with pytest.raises(OSError, match="no space"):
        run.save_checkpoint(path)
    with SampleStore(tmp_path / "store") as store:
        receipt = store.apply(Remove(ids=["3"]))
        assert store.certificate(receipt.event_id).scope["checkpoints"] == [str(path)]
    run.fit(m, loader())  # the head without 3
    with pytest.raises(OSError, match="no space"):
        run.save_checkpoint(path)
    with SampleStore(tmp_path / "store") as store:  # the old content may still be there
        assert store.certificate(receipt.event_id).scope["checkpoints"] == [str(path)]
    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", whole)
    run.save_checkpoint(path)
    with SampleStore(tmp_path / "store") as store:
        assert store.certificate(receipt.event_id).scope["checkpoints"] == []


def test_certificates_inside_the_store_are_refused_before_anything_is_learned(tmp_path: Path) -> None:
    m = module(store=str(tmp_path / "store"))
    inside = DataCorrection([Remove(ids=["3"])], certificates=tmp_path / "store" / "certificates")
    with pytest.raises(ValueError, match="inside the store"):
        quiet(tmp_path, callbacks=[inside]).fit(m, loader())
    with SampleStore(tmp_path / "store") as store:
        assert (len(store), (store.path / "certificates").exists()) == (0, False)
