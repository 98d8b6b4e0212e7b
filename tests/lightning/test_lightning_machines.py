"""Every callback with every head and kernel machine of the library, in a module of one's own and in LSSVMModule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.support.lightning_tools import J, K, Network, Recorder, loader, quiet, samples
from torchlssvm import (
    CompactLSSVMHead,
    FixedPoint,
    IncrementalSVM,
    KernelLSSVM,
    LagrangianSVM,
    LSSVMHead,
    MarginHead,
    OneVsOne,
    OneVsRest,
)
from torchlssvm.errors import StoreError
from torchlssvm.events import Add, Relabel, Remove, Replace
from torchlssvm.kernels import RBF
from torchlssvm.lightning import (
    DataCorrection,
    DriftMonitor,
    FitHead,
    Indexed,
    LabelAudit,
    LSSVMModule,
    OnlineProbe,
    ResumableLoader,
)
from torchlssvm.lightning.label_audit import scores_without
from torchlssvm.store import SampleStore

N = 45


def rbf() -> RBF:
    return RBF(gamma=0.1)


HEADS: dict[str, Callable[[int], Any]] = {
    "LSSVMHead": lambda J: LSSVMHead(J, K, grid=FixedPoint(64.0)),
    "LSSVMHead, float sums": lambda J: LSSVMHead(J, K, grid=None),
    "MarginHead": lambda J: MarginHead(J, K, rho=30.0, grid=FixedPoint(64.0)),
    "KernelLSSVM": lambda J: KernelLSSVM(rbf(), num_classes=K),
    "LagrangianSVM": lambda J: LagrangianSVM(rbf()),
    "IncrementalSVM": lambda J: IncrementalSVM(rbf()),
    "OneVsRest of LagrangianSVM": lambda J: OneVsRest(LagrangianSVM(rbf()), K),
    "OneVsRest of IncrementalSVM": lambda J: OneVsRest(IncrementalSVM(rbf()), K),
    "OneVsRest of KernelLSSVM": lambda J: OneVsRest(KernelLSSVM(rbf()), K),
    "OneVsOne of IncrementalSVM": lambda J: OneVsOne(IncrementalSVM(rbf()), K),
}
every_head = pytest.mark.parametrize("name", HEADS)


def data(name: str, n: int = N) -> tuple[Tensor, Tensor]:
    x, y = samples(n)
    return x, y if HEADS[name](J).num_classes == K else y.clamp(max=1)


def alone(name: str, x: Tensor, y: Tensor) -> Any:
    head = HEADS[name](x.shape[1])
    head.add(x, y)
    return head


def assert_same(head: Any, other: Any, x: Tensor) -> None:
    if getattr(head, "statistics", None) is not None and head.statistics.exact:
        assert head.digest() == other.digest()
    torch.testing.assert_close(head(x).double(), other(x).double(), atol=1e-4, rtol=1e-4)


class Plain(LightningModule):
    """A module of somebody else: it has a head, and does something in its steps."""

    def __init__(self, head: Any):
        super().__init__()
        self.anything = torch.nn.Linear(J, 1)
        self.head = head

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.anything(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.head.n:
            self.head(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.anything.parameters(), lr=0.01)


@every_head
def test_fit_head(tmp_path: Path, name: str) -> None:
    x, y = data(name)
    net, ear = Network(HEADS[name](8)), Recorder()
    train = DataLoader(TensorDataset(x, y), batch_size=15)
    quiet(tmp_path, callbacks=[FitHead(when="epoch_end")], max_epochs=2, logger=ear.logger).fit(net, train)
    net.eval()
    with torch.no_grad():
        phi = net.backbone(x)
        assert_same(net.head, alone(name, phi, y), phi)
    assert ear.logger.said[-1]["head_samples"] == N


@every_head
def test_data_correction_in_a_module_of_ones_own(tmp_path: Path, name: str) -> None:
    """The head was filled by hand; a kernel machine's samples go by the ids it gave them."""
    x, y = data(name)
    head, ear = alone(name, x[:40], y[:40]), Recorder()
    events: list[Any] = [
        Add(ids=["new", "newer"], x=x[40:42], y=y[40:42]),
        Remove(ids=["7"], x=x[7:8], y=y[7:8]),
        Relabel(ids=["9"], x=x[9:10], y_old=y[9:10], y=1 - y[9:10].clamp(max=1)),
        Replace(ids=["new"], x_old=x[40:41], y_old=y[40:41], x=x[42:43], y=y[42:43]),
        Remove(ids=["newer"], x=x[41:42], y=y[41:42]),
        Remove(ids=["newer"], x=x[41:42], y=y[41:42]),  # gone: refused
    ]
    correction = DataCorrection(events, every=1, limit=2, dead_letters=tmp_path / "dead.jsonl")
    run = quiet(tmp_path, callbacks=[correction], logger=ear.logger)
    run.fit(Plain(head), DataLoader(TensorDataset(x, y), batch_size=9), DataLoader(TensorDataset(x, y), batch_size=9))
    keep = [i for i in range(40) if i != 7]
    labels = y.clone()
    labels[9] = 1 - int(y[9].clamp(max=1))
    assert_same(head, alone(name, torch.cat([x[keep], x[42:43]]), torch.cat([labels[keep], labels[42:43]])), x)
    assert [sum(getattr(r, kind) for r in correction.reports) for kind in ("applied", "refused")] == [5, 1]
    assert "newer" in json.loads((tmp_path / "dead.jsonl").read_text())["event"]["ids"]
    assert {"corrections/applied", "corrections/milliseconds"} <= ear.names


@every_head
@pytest.mark.parametrize("stored", [False, True])
def test_lssvm_module_with_corrections_and_an_audit(tmp_path: Path, name: str, stored: bool) -> None:
    """Two labels are wrong; the audit finds them, a person feeds its file back, and the head is that of the right labels."""
    x, y = data(name)
    x = x + 3 * torch.nn.functional.one_hot(y, J)
    wrong = y.clone()
    wrong[[4, 22]] = (y[[4, 22]] + 1) % int(y.max() + 1)
    file, store = tmp_path / "suspects.jsonl", str(tmp_path / "store") if stored else None

    def train() -> ResumableLoader:
        return ResumableLoader(Indexed(TensorDataset(x, wrong)), 15)

    def fresh() -> LSSVMModule:
        return LSSVMModule("identity", int(y.max() + 1), in_features=J, head=HEADS[name](J), store=store)

    audit = LabelAudit(file, fraction=0.1)
    quiet(tmp_path, callbacks=[audit]).fit(fresh(), train())
    assert {s.id for s in audit.suspects} == {"4", "22"}
    m, correction = fresh(), DataCorrection(file, every=3)
    run = quiet(tmp_path, callbacks=[correction])
    run.fit(m, train(), DataLoader(TensorDataset(x, y), batch_size=15))
    assert sum(r.applied for r in correction.reports) == 2
    assert_same(m.head, alone(name, x, y), x)
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = LSSVMModule.load_from_checkpoint(tmp_path / "a.ckpt", head=HEADS[name](J), weights_only=True)
    assert_same(again.head, m.head, x)
    if stored:
        with SampleStore(tmp_path / "store", head=HEADS[name](J)) as opened:
            assert_same(opened.head, m.head, x)


@every_head
def test_scores_without_a_sample_are_those_of_a_machine_that_never_saw_it(name: str) -> None:
    x, y = data(name, 24)
    head = alone(name, x, y)
    before = head(x).clone()
    found = scores_without(head, x, y)
    for i in (0, 5, 23):
        rest = [k for k in range(24) if k != i]
        torch.testing.assert_close(
            found[i].double(), alone(name, x[rest], y[rest])(x[i : i + 1])[0].double(), atol=2e-4, rtol=2e-4
        )
    assert torch.equal(head(x), before)  # asking changes nothing
    order = [5, 0, 23, *(k for k in range(24) if k not in (0, 5, 23))]
    if hasattr(head, "ids"):
        numbers = [head.ids.tolist()[k] for k in order]
        torch.testing.assert_close(
            scores_without(head, x[order], y[order], numbers), found[order], atol=1e-4, rtol=1e-4
        )
        with pytest.raises(ValueError, match="not those that are held"):
            scores_without(head, x[:3], y[:3])


@every_head
def test_drift_monitor(tmp_path: Path, name: str) -> None:
    x, y = data(name)
    head, ear = alone(name, x, y), Recorder()
    monitor = DriftMonitor(every=1, threshold=-1.0)
    run = quiet(tmp_path, callbacks=[monitor], logger=ear.logger)
    run.fit(Plain(head), DataLoader(TensorDataset(x, y), batch_size=15))
    assert monitor.last is not None
    assert 0 <= monitor.last < 1e-3
    assert monitor.refreshes == 4
    assert {"drift", "refreshes"} <= ear.names
    assert_same(head, alone(name, x, y), x)


def test_what_is_impossible_is_named(tmp_path: Path) -> None:
    class Bare(torch.nn.Module):
        n = 0

        def add(self) -> None: ...

        def remove(self) -> None: ...

    x, y = data("LSSVMHead")
    train = DataLoader(TensorDataset(x, y), batch_size=15)
    with pytest.raises(ValueError, match="Bare has neither drift"):
        quiet(tmp_path, callbacks=[DriftMonitor()]).fit(Plain(Bare()), train)
    with pytest.raises(ValueError, match="CompactLSSVMHead has neither drift"):
        quiet(tmp_path, callbacks=[DriftMonitor()]).fit(Plain(CompactLSSVMHead(J, K)), train)


class Judge(Callback):
    """What was there when the sanity check was over."""

    def __init__(self, ear: Recorder, head: Any):
        self.ear, self.head, self.seen = ear, head, None

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen = (self.head.n, list(self.ear.logger.said))


@every_head
def test_all_are_silent_during_sanity_checking(tmp_path: Path, name: str) -> None:
    x, y = data(name)
    head, ear = HEADS[name](J), Recorder()
    judge = Judge(ear, head)
    callbacks = [
        FitHead(when="validation", features=lambda x: x), DataCorrection([Add(ids=["a"], x=x[:1], y=y[:1])]), DriftMonitor(),
        LabelAudit(tmp_path / "a.jsonl", samples=lambda: ([], x, y)), judge,
    ]  # fmt: skip
    val = DataLoader(TensorDataset(x, y), batch_size=15)
    quiet(tmp_path, callbacks=callbacks, logger=ear.logger, num_sanity_val_steps=2).fit(Plain(head), val, val)
    assert judge.seen == (0, [])
    assert ear.logger.said


def test_checkpoints_of_a_module_of_ones_own_are_registered(tmp_path: Path) -> None:
    x, y = data("LSSVMHead")
    with SampleStore(tmp_path / "store", head=HEADS["LSSVMHead"](J)) as store:
        store.apply(Add(ids=[str(i) for i in range(N)], x=x, y=y))
        run = quiet(tmp_path, callbacks=[DataCorrection([], store=store)])
        run.fit(Plain(store.head), loader())
        run.save_checkpoint(tmp_path / "a.ckpt")
        receipt = store.apply(Remove(ids=["3"]))
        assert store.certificate(receipt.event_id).scope["checkpoints"] == [str(tmp_path / "a.ckpt")]


def test_the_head_of_a_store_is_not_fitted_beside_it(tmp_path: Path) -> None:
    x, y = data("LSSVMHead")
    with SampleStore(tmp_path / "store", head=HEADS["LSSVMHead"](J)) as store:
        store.apply(Add(ids=[str(i) for i in range(N)], x=x, y=y))
        with pytest.raises(StoreError, match="belongs to a store"):
            quiet(tmp_path, callbacks=[FitHead(features=lambda x: x)]).fit(Plain(store.head), loader(9))
        assert store.head.n == N


def test_checkpoints_are_registered_by_one_who_follows_a_store(tmp_path: Path) -> None:
    """It reads; somebody else writes."""
    x, y = data("LSSVMHead")
    with SampleStore(tmp_path / "store", head=HEADS["LSSVMHead"](J)) as store:
        store.apply(Add(ids=[str(i) for i in range(N)], x=x, y=y))
        with SampleStore(tmp_path / "store", head=HEADS["LSSVMHead"](J), readonly=True) as reader:
            run = quiet(tmp_path, callbacks=[DataCorrection(reader)])
            run.fit(Plain(reader.head), loader())
            run.save_checkpoint(tmp_path / "before.ckpt")
            receipt = store.apply(Remove(ids=["3"]))
            run.save_checkpoint(tmp_path / "after.ckpt")  # the reader's head follows before it is saved
            assert reader.head.digest() == store.head.digest()
        named = store.certificate(receipt.event_id).scope["checkpoints"]
        assert named == [str(tmp_path / "before.ckpt")]


def test_a_margin_head_by_its_name(tmp_path: Path) -> None:
    """Made by the module, chosen by name in the probe; the checkpoint makes it again without being told."""
    x, y = samples(N)
    m = LSSVMModule("identity", K, in_features=J, head="margin", rho="kfold", grid=64.0, head_options={"scale": "std"})
    probe = OnlineProbe("classifier.backbone", K, window=N, head="margin")
    run = quiet(tmp_path, callbacks=[probe])
    run.fit(m, loader(N), DataLoader(TensorDataset(x, y), batch_size=15))
    assert type(m.head) is type(probe.window.machine) is MarginHead
    fresh = MarginHead(J, K, rho=m.head.rho, scale="std", grid=FixedPoint(64.0)).add(x, y)
    assert m.head.digest() == fresh.digest()
    torch.testing.assert_close(m.head.w, fresh.w, rtol=1e-9, atol=1e-9)
    assert probe.accuracy == int((probe.window.machine.predict(x) == y).sum()) / N
    run.save_checkpoint(tmp_path / "m.ckpt")
    again = LSSVMModule.load_from_checkpoint(tmp_path / "m.ckpt", weights_only=True)
    assert again.head.digest() == fresh.digest()
    assert torch.equal(again.head(x), m.head(x))
    with pytest.raises(ValueError, match="'lssvm', 'margin', got 'svm'"):
        LSSVMModule("identity", K, in_features=J, head="svm")
