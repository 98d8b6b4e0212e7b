"""The numbers of a report, gathered from a store in a few passes over its samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchlssvm.analysis.label_errors import LabelErrors, from_scores
from torchlssvm.audit.certificate import Certificate
from torchlssvm.corrections.waiting_events import WaitingEvents
from torchlssvm.errors import StoreError, VerificationError
from torchlssvm.functional.calibration import expected_calibration_error, least_squares, reliability
from torchlssvm.functional.modes import exactly
from torchlssvm.functional.sample_identity import fold_of
from torchlssvm.linear import LinearHead, MarginHead
from torchlssvm.linear.diagnostics.calibration import Calibration, fit
from torchlssvm.linear.diagnostics.rho_selection import RhoPath
from torchlssvm.linear.diagnostics.uncertainty import leverage
from torchlssvm.linear.normal_equations import class_weights
from torchlssvm.store import ErasureRequest, SampleStore
from torchlssvm.wording import counted, listed

PASSES = 4
"""How often a report reads all samples: once for scores, once for columns, and twice for the harm of each sample."""

JUDGING_SAMPLES = 4000
"""The number of samples of each half on which the model of the other half is evaluated. It gives a mean error to two digits."""


@dataclass(frozen=True)
class CertificateFile:
    """The main fields of a certificate file. They are not verified here. Use ``torchlssvm verify`` for that."""

    file: str
    time: str
    erased: int
    signed: bool
    current: bool
    problem: str = ""


@dataclass(frozen=True, repr=False)
class Findings:
    """The contents of a report on n samples and K classes."""

    stats: dict[str, Any]
    head: dict[str, Any]
    choices: dict[str, str]
    labels: LabelErrors
    probabilities: Tensor  # (n, K), out of sample
    calibration: Calibration
    ece: tuple[float, float]  # before, after
    bins: tuple[Tensor, Tensor, Tensor]
    path: RhoPath
    subjects: list[str | None]
    added: Tensor  # (n,), seconds
    leverage: Tensor  # (n,), relative
    mean: Tensor  # (J,), of each feature
    spread: Tensor  # (J,), its standard deviation
    harm: Tensor  # (n,), change of the loss on the other half if removed; NaN where unknown
    drift: float
    history: list[Any]
    certificates: list[CertificateFile] = field(default_factory=list)
    requests: list[ErasureRequest] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)  # open tasks, in words
    compacted: int = 0  # position up to which bytes are destroyed

    def __repr__(self) -> str:
        suspicious = counted(len(self.labels.suspects), "suspicious label")
        size = f"{counted(len(self.added), 'sample')}, leave-one-out accuracy {self.accuracy:.1%}"
        return f"Findings({size}, {suspicious}, {counted(len(self.waiting), 'open task')})"

    @property
    def accuracy(self) -> float:
        """Accuracy of the leave-one-out scores."""
        return float((self.labels.proposed == self.labels.labels).double().mean())


@exactly
def gather(store: SampleStore, certificates: Any = None, groups: Any = None) -> Findings:
    """Gather the findings of a store with labels and an LSSVMHead or a MarginHead. Samples of a group are left out together."""
    head = store.head
    if not isinstance(head, LinearHead):
        raise StoreError(
            f"a report needs a store with an LSSVMHead or a MarginHead; the head of this store is a {type(head).__name__}"
        )
    if not len(store):
        raise StoreError(f"the store at {store.path} holds no samples, so there is nothing to report")
    if head.num_classes < 2 or head.statistics.kind != "labels":
        raise ValueError(
            "a report is about labels: the store must hold labels of at least two classes, not float targets"
        )
    ids, scores, labels = store.leave_one_out(groups=groups)
    squares: Any = head.least_squares() if isinstance(head, MarginHead) else head
    subjects: list[str | None] = []
    added: list[float] = []
    distances: list[Tensor] = []
    total, squared = torch.zeros(2, head.in_features, dtype=torch.float64)
    for rows in store.batches():
        subjects += rows.subjects
        added += rows.added
        x = rows.x.to(torch.float64)
        total, squared = total + x.sum(0), squared + x.square().sum(0)
        distances.append(leverage(squares, rows.x.to(head.device), relative=True).cpu())
    calibration = head.calibration or fit(scores, labels, torch.ones_like(scores[:, 0]), None)
    probabilities, scores, labels = calibration(scores).cpu(), scores.cpu(), labels.cpu()
    # One against one: ranked by the worst pair, as store.label_errors does. The probabilities are those of the votes.
    found = from_scores(scores, labels, ids) if head.multiclass == "ovr" else store.label_errors(groups)
    history = store.history()
    return Findings(
        stats=store.stats(),
        head={
            "rho": head.rho,
            "intercept": head.intercept,
            "multiclass": head.multiclass,
            "class_weight": head.class_weight,
        },
        choices={name: str(choice) for name, choice in head.choices.items()},
        labels=found,
        probabilities=probabilities,
        calibration=calibration,
        ece=(
            expected_calibration_error(least_squares(scores), labels),
            expected_calibration_error(probabilities, labels),
        ),
        bins=reliability(probabilities, labels),
        path=head.select_rho(apply=False),
        subjects=subjects,
        added=torch.tensor(added, dtype=torch.float64),
        leverage=torch.cat(distances),
        mean=total / len(ids),
        spread=(squared / len(ids) - (total / len(ids)).square()).clamp(min=0).sqrt(),
        harm=harm(store, head, ids),
        drift=head.drift(),
        history=history,
        certificates=list_certificates(certificates, history[-1].chain.hex()),
        requests=store.requests.all(),
        waiting=waiting_work(store),
        compacted=store.compacted,
    )


def waiting_work(store: SampleStore) -> list[str]:
    """List the open tasks of a store, most urgent first, in words for people who answer requests."""
    requests = [r for r in store.requests.all() if r.open]
    out = [f"Request {r.id} is overdue by {counted(-r.days_left, 'day')}." for r in requests if r.overdue]
    if store.returned:
        out.append(
            f"{counted(len(store.returned), 'sample')} held that were erased on request: erase them again (torchlssvm "
            "suppression apply)."
        )
    out += [f"Request {r.id} must be answered by {r.due}." for r in requests if not r.overdue]
    last = max((e.position for e in store.history() if e.kind == "remove"), default=0)
    receipts = len(store.receipts.unwritten())
    if receipts:
        out.append(f"{counted(receipts, 'erasure')} without a receipt file: run torchlssvm receipt.")
    if last > store.compacted:
        out.append("The store's files may still contain bytes of erased samples: run torchlssvm compact.")
    older = store.certificates.checkpoints_before(last)
    if older:
        out.append(f"{counted(len(older), 'file')} from before the last erasure outside the store: {listed(older)}.")
    waiting = len(WaitingEvents(store))
    if waiting:
        out.append(
            f"{counted(waiting, 'correction')} waiting for samples that have not arrived: see torchlssvm waiting."
        )
    if store.suppression.path is None and last:
        out.append("Erased samples could be added again: use a suppression list (torchlssvm suppression).")
    return out


def harm(store: SampleStore, head: Any, ids: Sequence[str]) -> Tensor:
    """Return, for each sample, how the squared error on other samples would change without it (n,).

    To measure effects on samples that a model has not seen, a hash of the ids divides the samples into two halves, and a model
    is fitted to each half. The effect of removing a sample from its model is then measured on the other half. A negative
    number means that the model would be better without the sample. Although only two models are fitted, the numbers are exact
    for the class weights of the half. They are NaN if a half has too few samples.
    """
    half = torch.tensor(fold_of(ids, 2))
    out = torch.full((len(ids),), float("nan"), dtype=torch.float64)
    if head.multiclass == "ovo" or not 0 < int(half.sum()) < len(ids) or int(torch.bincount(half).min()) < 2:
        return out
    config = {name: 0 if name == "folds" else value for name, value in head.config().items()}
    models = [type(head).from_config(config, device=head.device) for _ in range(2)]
    judges: list[list[Tensor]] = [[], []]
    truths: list[list[Tensor]] = [[], []]
    for _, h, x, y in half_batches(store, half, head.device):
        if models[h].statistics.empty:
            models[h].statistics.decide("labels", head.grid, None)
        models[h].add(x, y)
        room = JUDGING_SAMPLES - sum(map(len, judges[h]))
        judges[h].append(x[:room].double())
        truths[h].append(y[:room])
    if isinstance(
        head.class_weight, str
    ):  # class weights that depend on the counts would need a solve for each class in each batch
        for model in models:
            fixed: Any = class_weights(head.class_weight, model.counts.to(torch.float64))
            model.class_weight = torch.where(fixed > 0, fixed, 1.0)
    points, labels = [torch.cat(j) for j in judges], [torch.cat(t) for t in truths]
    for rows, h, x, y in half_batches(store, half, head.device):
        out[rows] = models[h].influence(x, y, points[1 - h], labels[1 - h]).cpu()
    return out


def half_batches(store: SampleStore, half: Tensor, device: Any) -> Iterator[tuple[Tensor, int, Tensor, Tensor]]:
    """Yield the row numbers, the half, the features and the labels of all samples, in batches from one half each."""
    start = 0
    for rows in store.batches():
        for h in range(2):
            mine = (half[start : start + len(rows)] == h).nonzero()[:, 0]
            if len(mine):
                yield start + mine, h, rows.x[mine].to(device), rows.y[mine].to(device)
        start += len(rows)


def list_certificates(folder: Any, chain: str) -> list[CertificateFile]:
    """List the certificates (*.json) of a folder, oldest first. A file that cannot be read is listed with the reason."""
    if folder is None:
        return []
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is not a folder: --certificates takes the folder that holds the certificates")
    out = []
    for path in sorted(p for p in Path(folder).glob("*.json") if not p.name.endswith(".receipt.json")):
        try:
            c = Certificate.load(path)
        except VerificationError as error:
            out.append(CertificateFile(path.name, "", 0, False, False, str(error)))
            continue
        out.append(CertificateFile(path.name, c.time, c.erased, bool(c.signatures), c.chain == chain))
    return sorted(out, key=lambda r: r.time)
