"""What a Lightning user tries first: monitors, dicts, views, files of predictions, and one line of what was done."""

import csv

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, TensorDataset

from tests.support.lightning_tools import J, K, loader, module, quiet, samples, truth
from torchlssvm import LSSVMHead, NotFittedError
from torchlssvm.lightning import Indexed, OnlineProbe, PredictionFile
from torchlssvm.lightning.ranks import without_padding
from torchlssvm.store import SampleStore


class Classifier(LightningModule):
    """A network that learns a little; its batches are whatever ``inputs`` makes of them."""

    def __init__(self, inputs=lambda batch: batch[0]):
        super().__init__()
        self.backbone, self.last, self.inputs = nn.Linear(J, 8), nn.Linear(8, K), inputs

    def training_step(self, batch, _):
        return self.last(self.backbone(self.inputs(batch))).square().mean()

    def validation_step(self, batch, _):
        self.last(self.backbone(self.inputs(batch)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


class Dicts(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"image": x, "label": y}


class Views(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (x, x + 100.0), y


class FlatViews(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, x + 100.0, y


def probe_truth(net, x, y):
    with torch.no_grad():
        head = LSSVMHead(8, K, rho="gcv").add(net.backbone(x), y)
        return float((head.predict(net.backbone(x)) == y).double().mean())


def test_the_probe_is_a_monitor(tmp_path):
    x, y = samples()
    probe = OnlineProbe("backbone", K)
    stop = EarlyStopping(monitor="probe_accuracy", mode="max", patience=0, min_delta=1.0)
    save = ModelCheckpoint(tmp_path, monitor="probe_accuracy", mode="max")
    trainer = quiet(tmp_path, max_epochs=6, callbacks=[probe, stop, save], enable_checkpointing=True)
    net = Classifier()
    data = DataLoader(TensorDataset(x, y), batch_size=16)
    trainer.fit(net, data, data)
    assert trainer.current_epoch == 2  # nothing gets better by 1.0
    assert float(trainer.callback_metrics["probe_accuracy"]) == pytest.approx(probe.accuracy)
    assert float(save.best_model_score) == pytest.approx(probe_truth(net, x, y), abs=0.05)


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        (Dicts, lambda b: b["image"]),
        (Views, lambda b: b[0][0]),
        (Views, lambda b: torch.cat(b[0])),
        (FlatViews, lambda b: torch.cat([b[0], b[1]])),
    ],
)
def test_the_probe_takes_dicts_and_views(tmp_path, kind, inputs):
    x, y = samples()
    net, probe = Classifier(inputs), OnlineProbe("backbone", K, window=len(x))
    data = DataLoader(kind(x, y), batch_size=16)
    quiet(tmp_path, callbacks=[probe]).fit(net, data, data)
    assert probe.accuracy == pytest.approx(probe_truth(net, x, y), abs=1e-9)


def test_names_of_dicts(tmp_path):
    x, y = samples()
    for names, batch in ((None, {"image": x, "label": y}), ({"x": "photo", "y": "kind"}, {"photo": x, "kind": y})):
        m = module(batch_names=names)
        trainer = quiet(tmp_path)
        data = DataLoader([batch], batch_size=None)
        trainer.fit(m, data)
        assert m.head.digest() == truth(x, y).digest()
        assert torch.equal(torch.cat(trainer.predict(m, data)), m.head(x))
    with pytest.raises(ValueError, match="names are given for"):
        module(batch_names={"picture": "x"})
    with pytest.raises(ValueError, match="'photo'"):
        quiet(tmp_path).fit(module(), DataLoader([{"photo": x, "kind": y}], batch_size=None))


def test_the_loss_is_the_squared_error(tmp_path):
    x, y = samples()
    m = module()
    trainer = quiet(tmp_path)
    trainer.fit(m, loader(), DataLoader(TensorDataset(x, y), batch_size=16))
    found = trainer.callback_metrics
    target = 2.0 * nn.functional.one_hot(y, K) - 1
    assert float(found["val_loss"]) == pytest.approx(float((m.head(x) - target).square().mean()), rel=1e-5)


def test_each_loader_has_its_own_metrics(tmp_path):
    x, y = samples()
    m, trainer = module(), quiet(tmp_path)
    wrong = (y + 1) % K
    given = [DataLoader(TensorDataset(x, labels), batch_size=16) for labels in (y, wrong)]
    trainer.fit(m, loader(), given)
    for stage, found in (("val", [trainer.callback_metrics]), ("test", trainer.test(m, given, verbose=False))):
        logged = {name: float(value) for part in found for name, value in part.items()}
        for index, labels in enumerate((y, wrong)):
            right = float((m.head.predict(x) == labels).float().mean())
            assert logged[f"{stage}_accuracy/dataloader_idx_{index}"] == pytest.approx(right, abs=1e-6)
    assert trainer.test(m, given[0], verbose=False)[0].keys() >= {"test_accuracy", "test_recall_0"}


def test_testing_an_empty_head_fails_with_a_reason(tmp_path):
    x, y = samples()
    data = DataLoader(TensorDataset(x, y), batch_size=16)
    with pytest.raises(NotFittedError, match="nothing to test"):
        quiet(tmp_path).test(module(), data, verbose=False)


def test_classes_have_names(tmp_path):
    x, y = samples()
    names = ["ant", "bee", "cow"]
    m = module(classes=names, store=str(tmp_path / "store"))
    trainer = quiet(tmp_path, callbacks=[PredictionFile(tmp_path / "p.csv")])
    trainer.fit(m, loader())
    trainer.predict(m, DataLoader(TensorDataset(x, y), batch_size=67))
    with open(tmp_path / "p.csv", newline="") as file:
        assert [row["predicted"] for row in csv.DictReader(file)] == [names[k] for k in m.head.predict(x)]
    with SampleStore(tmp_path / "store") as store:
        assert store.classes == names
    with pytest.raises(ValueError, match="'ant'"):
        quiet(tmp_path).fit(module(classes=names[::-1], store=str(tmp_path / "store")), loader())


class UnevenBatches(Sampler):
    """Batches of 5, 10 and so on, without an attribute that names their size."""

    def __iter__(self):
        return iter([list(range(5)), list(range(5, 15)), list(range(15, 67))])


def test_repeated_samples_of_a_distributed_sampler_are_recognized_or_refused():
    data = list(range(61))

    class Uneven(BatchSampler):
        pass

    for rank, real in ((0, 31), (1, 30)):
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
        even = DataLoader(data, batch_size=8, sampler=sampler)
        assert sum(without_padding(even, k, len(batch)) for k, batch in enumerate(even)) == real
        uneven = DataLoader(data, batch_sampler=Uneven(sampler, 8, False))
        with pytest.raises(ValueError, match="Uneven"):
            without_padding(uneven, 0, 8)
    assert (
        without_padding(
            DataLoader(data[:60], batch_sampler=Uneven(DistributedSampler(data[:60], 2, 0), 8, False)), 0, 5
        )
        == 5
    )


@pytest.mark.parametrize("batches", [{"batch_size": 16}, {"batch_sampler": UnevenBatches()}])
@pytest.mark.parametrize("ids", [False, True])
def test_predictions_are_written(tmp_path, ids, batches):
    x, y = samples()
    m = module()
    quiet(tmp_path).fit(m, loader())
    data = TensorDataset(x, y)
    trainer = quiet(tmp_path, callbacks=[PredictionFile(tmp_path / "out" / "p.csv")])
    trainer.predict(m, DataLoader(Indexed(data, "s") if ids else data, **batches), return_predictions=False)
    with open(tmp_path / "out" / "p.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["sample"] for row in rows] == [f"s{i}" if ids else str(i) for i in range(len(x))]
    assert [int(row["predicted"]) for row in rows] == m.head.predict(x).tolist()
    scores = torch.tensor([[float(row[f"score_{k}"]) for k in range(K)] for row in rows], dtype=torch.float64)
    torch.testing.assert_close(scores, m.head(x), rtol=1e-12, atol=1e-12)  # batches of other sizes: other last digits
