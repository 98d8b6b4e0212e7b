"""Every head with every function that takes a head: it works, is refused by a named error, or is a method the head lacks.

A new head is a new column.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from torchlssvm import Add, CompactLSSVMHead, FixedPoint, LSSVMHead, MarginHead, Remove, SampleStore, attach
from torchlssvm.analysis.cross_validation import cross_validate
from torchlssvm.analysis.label_errors import find_label_errors
from torchlssvm.analysis.sliding_window import SlidingWindow
from torchlssvm.corrections.corrector import Corrector
from torchlssvm.distributed import Delta, merge
from torchlssvm.errors import StoreError
from torchlssvm.export import export_program, freeze

J, K, N = 5, 3, 60
X = torch.randn(N, J, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % K
X[torch.arange(N), Y] += 3
IDS = [f"s{i}" for i in range(N)]

HEADS: dict[str, Callable[[], Any]] = {
    "least squares": lambda: LSSVMHead(J, K, rho=1.0, grid=FixedPoint(16.0)),
    "margin": lambda: MarginHead(J, K, rho=1.0, grid=FixedPoint(16.0)),
    "compact": lambda: CompactLSSVMHead(J, K),
    "several labels": lambda: LSSVMHead(J, K, rho=1.0, grid=FixedPoint(16.0), targets="multilabel"),
    "numbers": lambda: LSSVMHead(J, K, rho=1.0, grid=FixedPoint(16.0), targets="regression"),
}
TARGETS = {"several labels": X[:, :K] > 0.5, "numbers": X[:, :K] - 2 * X[:, 1:2]}


def like(head: Any) -> Any:
    """An empty head of the same kind, with a grid of its own."""
    targets = getattr(head, "targets", "classes")
    return type(head)(J, K, rho=1.0, **({} if targets == "classes" else {"targets": targets}))


def left_out(head: Any, y: Tensor, folder: Path) -> None:
    truth = head.leave_one_out(X, y)[0]
    assert torch.allclose(truth, head.remove(X[:1], y[:1])(X[:1])[0], atol=1e-4)


def label_errors(head: Any, y: Tensor, folder: Path) -> None:
    wrong = y.clone()
    place: Any = 7 if y.ndim == 1 else (7, int(head(X[7:8]).abs().argmax()))
    wrong[place] = (wrong[7] + 1) % K if y.ndim == 1 else not wrong[place]
    found = find_label_errors(copy.deepcopy(head).relabel(X[7:8], y[7:8], wrong[7:8]), X, wrong, IDS)
    assert torch.equal(found.order[0], torch.tensor(place))
    assert found.events(1)[0].ids == ("s7",)
    assert found.events(1)[0].y.tolist() == y[7:8].tolist()


def influence(head: Any, y: Tensor, folder: Path) -> None:
    change = head.influence(X[:2], y[:2], X[10:15], on="scores")[0]
    before = head(X[10:15])
    assert torch.allclose(before + change, head.remove(X[:1], y[:1])(X[10:15]), atol=1e-4)


def calibrated(head: Any, y: Tensor, folder: Path) -> None:
    p = head.calibrate(X, y).predict_proba(X)
    if y.ndim == 1:
        assert torch.allclose(p.sum(1), torch.ones(N, dtype=torch.float64))
    else:
        assert ((p > 0.5) == y).double().mean() > 0.8


def rho_selected(head: Any, y: Tensor, folder: Path) -> None:
    path = head.select_rho([0.1, 1.0, 10.0])
    assert head.rho == path.rho
    assert head.choices["rho"].candidates == 3


def window(head: Any, y: Tensor, folder: Path) -> None:
    head.clear()
    slid, other = SlidingWindow(head, 40).add(X, y), SlidingWindow(like(head), 40).add(X[20:], y[20:])
    assert torch.allclose(slid.machine(X), other.machine(X), atol=1e-4)


def folds(head: Any, y: Tensor, folder: Path) -> None:
    head.clear()
    scores = cross_validate(head, X, y, folds=3, ids=IDS)
    if y.is_floating_point():
        assert torch.allclose(scores, y.double(), atol=0.5)
    else:
        assert ((scores.argmax(1) if y.ndim == 1 else scores > 0) == y).double().mean() > 0.7


def exported(head: Any, y: Tensor, folder: Path) -> None:
    plain = freeze(head, torch.float64)
    assert torch.allclose(plain(X.double()), head(X))
    assert torch.allclose(export_program(plain, X.double()).module()(X.double()), head(X))


def hub(head: Any, y: Tensor, folder: Path) -> None:
    from torchlssvm.hub import from_pretrained, save_pretrained

    save_pretrained(head, folder / "hub")
    assert torch.allclose(from_pretrained(folder / "hub")(X).double(), head(X), atol=1e-4)


def report(head: Any, y: Tensor, folder: Path) -> None:
    pytest.importorskip("jinja2")
    from torchlssvm.report import write_report

    head.clear()
    with SampleStore(folder / "store", head=head) as store:
        store.apply(Add(ids=IDS, x=X, y=y))
        write_report(store, folder / "page.html")
    assert "<html" in (folder / "page.html").read_text()


def stored(head: Any, y: Tensor, folder: Path) -> None:
    head.clear()
    with SampleStore(folder / "store", head=head) as store:
        store.apply(Add(ids=IDS, x=X, y=y))
        store.apply(Remove(ids=["s3"]))
        assert store.head.n == N - 1


def corrected(head: Any, y: Tensor, folder: Path) -> None:
    head.clear()
    Corrector(head).apply([Add(ids=IDS[:5], x=X[:5], y=y[:5])])
    assert head.n == 5


def attached(head: Any, y: Tensor, folder: Path) -> None:
    head.clear()
    clf = attach(torch.nn.Linear(J, 7), K, head).fit([(X, y)])
    assert torch.allclose(clf.predict(X), like(head).add(X, y).predict(X), atol=1e-4)
    assert clf.score(X, y) > 0.7


def drifted(head: Any, y: Tensor, folder: Path) -> None:
    assert head.drift() < 1e-9


def target_grid(head: Any) -> Any:
    statistics = getattr(head, "statistics", None)
    return "auto" if statistics is None else statistics.target_grid or "auto"


def exchanged(head: Any, y: Tensor, folder: Path) -> None:
    targets = getattr(head, "targets", "classes")
    other = LSSVMHead(J, K, rho=1.0, grid=FixedPoint(16.0), targets=targets, target_grid=target_grid(head)).add(
        X[:9], y[:9]
    )
    assert merge(head, Delta(other.statistics)).n == N + 9


def saved(head: Any, y: Tensor, folder: Path) -> None:
    torch.save(head.state_dict(), folder / "head.pt")
    fresh = like(head)
    fresh.load_state_dict(torch.load(folder / "head.pt", weights_only=True))
    assert torch.equal(fresh(X), head(X))


def not_a_number(head: Any, y: Tensor, folder: Path) -> None:
    bad = X.clone()
    bad[[4, 9], 2] = torch.nan
    for read in (head.predict, getattr(head, "predict_proba", head.predict)):
        with pytest.raises(ValueError, match="index 4"):
            read(bad)
    assert head(bad)[4].isnan().all()


def most_influential(head: Any, y: Tensor, folder: Path) -> None:
    change = head.influence(X, y, X[:9], y[:9])
    found = head.most_influential(X, y, X[:9], y[:9], 3, ids=IDS)
    assert found.helpful_ids == tuple(IDS[i] for i in change.argsort(descending=True)[:3].tolist())


def trained(head: Any, y: Tensor, folder: Path, make: Callable[[Any], Any]) -> Any:
    """A callback after a run of a module that learns each batch, which ends with all predictions."""
    pytest.importorskip("lightning")
    from tests.support.lightning_tools import quiet
    from torchlssvm import lightning

    head.clear()
    module = lightning.LSSVMModule("identity", K, in_features=J, head=head, targets=getattr(head, "targets", "classes"))
    callback, samples = make(lightning), lightning.Indexed(TensorDataset(X, y))
    trainer = quiet(folder, callbacks=[callback])
    trainer.fit(module, DataLoader(samples, 20))
    trainer.predict(module, DataLoader(samples, 20))
    return callback


def monitored(head: Any, y: Tensor, folder: Path) -> None:
    assert trained(head, y, folder, lambda lightning: lightning.DriftMonitor(every=1)).last < 1e-9


def event_applied(head: Any, y: Tensor, folder: Path) -> None:
    events = [Add(ids=["new"], x=X[:1] + 1, y=y[:1])]
    trained(head, y, folder, lambda lightning: lightning.DataCorrection(events))
    assert head.n == N + 1


def audited(head: Any, y: Tensor, folder: Path) -> None:
    callback = trained(head, y, folder, lambda lightning: lightning.LabelAudit(folder / "suspects.jsonl", fraction=0.1))
    assert all(0 <= int(suspect.id) < N for suspect in callback.suspects)


def predictions_written(head: Any, y: Tensor, folder: Path) -> None:
    trained(head, y, folder, lambda lightning: lightning.PredictionFile(folder / "file.csv"))
    assert len((folder / "file.csv").read_text().splitlines()) == N + 1


def beside_a_network(head: Any, y: Tensor, folder: Path, callback: Any) -> None:
    """Train a network by gradients, with a head and a callback beside it."""
    from lightning.pytorch import LightningModule

    from tests.support.lightning_tools import quiet

    class Network(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = torch.nn.Linear(J, J), head

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.backbone(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet(folder, callbacks=[callback]).fit(Network(), DataLoader(TensorDataset(X, y), 20))


def fitted_by_callback(head: Any, y: Tensor, folder: Path) -> None:
    pytest.importorskip("lightning")
    from torchlssvm.lightning import FitHead

    beside_a_network(head, y, folder, FitHead(features=lambda x: x))
    assert torch.allclose(head(X), like(head).add(X, y)(X), atol=1e-4)


def probed(head: Any, y: Tensor, folder: Path) -> None:
    pytest.importorskip("lightning")
    from torchlssvm.lightning import OnlineProbe

    name = {LSSVMHead: "lssvm", MarginHead: "margin"}.get(type(head), "compact")
    probe = OnlineProbe("backbone", K, head=name)
    beside_a_network(head, y, folder, probe)
    assert len(list(probe.window)) == 3


def agreed(head: Any, y: Tensor, folder: Path) -> None:
    from torchlssvm.distributed import sync

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    try:
        sync(head)
    finally:
        torch.distributed.destroy_process_group()
    assert head.n == N


WORKS = [
    left_out, label_errors, influence, calibrated, rho_selected, window, folds, exported, hub, report, stored, corrected,
    attached, drifted, exchanged, saved, not_a_number, agreed, most_influential, monitored, event_applied, audited,
    predictions_written, fitted_by_callback, probed,
]  # fmt: skip
REFUSED: dict[tuple[str, str], type[Exception]] = {
    # a margin head is not linear in its samples, so sums cannot be exchanged
    ("margin", "exchanged"): ValueError,
    ("margin", "agreed"): ValueError,
    # numbers have neither wrong labels nor probabilities, and a report is about classes
    ("numbers", "label_errors"): ValueError,
    ("numbers", "calibrated"): ValueError,
    ("numbers", "report"): ValueError,
    ("several labels", "report"): ValueError,
    # w and C know neither which samples are held nor their sums
    ("compact", "hub"): ValueError,
    ("compact", "report"): StoreError,
    ("compact", "stored"): StoreError,
    ("compact", "corrected"): ValueError,
    ("compact", "exchanged"): ValueError,
    ("compact", "agreed"): ValueError,
    ("compact", "monitored"): ValueError,
    ("compact", "event_applied"): ValueError,
    ("compact", "audited"): ValueError,
    ("compact", "predictions_written"): ValueError,
    ("compact", "probed"): ValueError,
    ("several labels", "audited"): ValueError,
    ("numbers", "audited"): ValueError,
}
NO_METHOD = {
    ("compact", "influence"): "influence",
    ("compact", "most_influential"): "most_influential",
    ("compact", "calibrated"): "calibrate",
    ("compact", "rho_selected"): "select_rho",
    ("compact", "drifted"): "drift",
}
"""Methods that a head does not have."""


@pytest.mark.parametrize("use", WORKS, ids=lambda use: use.__name__)
@pytest.mark.parametrize("kind", HEADS)
def test_every_head_with_every_function(kind: str, use: Callable[[Any, Tensor, Path], None], tmp_path: Path) -> None:
    y = TARGETS.get(kind, Y)
    head = HEADS[kind]().add(X, y)
    if (kind, use.__name__) in NO_METHOD:
        assert not hasattr(head, NO_METHOD[kind, use.__name__])
        return
    refusal = REFUSED.get((kind, use.__name__))
    if refusal is None:
        use(head, y, tmp_path)
        return
    before = head(X)
    with pytest.raises(refusal):
        use(head, y, tmp_path)
    if head.n:
        assert torch.equal(head(X), before)
