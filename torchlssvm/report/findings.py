"""Findings of a report, as numbers: gathered from a store in a few passes over its samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchlssvm.analysis.label_errors import LabelErrors, from_scores
from torchlssvm.audit.certificate import Certificate
from torchlssvm.corrections.pending_events import PendingEvents
from torchlssvm.errors import StoreError, VerificationError
from torchlssvm.functional.calibration import expected_calibration_error, least_squares, reliability
from torchlssvm.functional.modes import exactly
from torchlssvm.functional.sample_identity import fold_of
from torchlssvm.linear import LinearHead, MarginHead
from torchlssvm.linear.diagnostics.calibration import Calibration, fit
from torchlssvm.linear.diagnostics.rho_selection import RhoPath
from torchlssvm.store import ErasureRequest, SampleStore
from torchlssvm.wording import counted, listed

log = logging.getLogger("torchlssvm.report")

JUDGING_SAMPLES = 4000
"""Samples of each half that the other half is judged on: enough for two digits of a mean error, few enough for memory."""


@dataclass(frozen=True)
class CertificateFile:
    """A certificate file and its main fields, not verified: ``torchlssvm verify`` does that."""

    file: str
    time: str
    erased: int
    signed: bool
    current: bool
    problem: str = ""


@dataclass(frozen=True)
class Findings:
    """The contents of a report; n samples, K classes."""

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
    harm: Tensor  # (n,), change of the loss on the other half if removed; NaN where not known
    drift: float
    history: list[Any]
    certificates: list[CertificateFile] = field(default_factory=list)
    requests: list[ErasureRequest] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)  # work that is to be done, in words
    compacted: int = 0  # position up to which bytes are destroyed

    @property
    def scores_width(self) -> int:
        """K, the number of classes."""
        return int(self.labels.scores.shape[1])

    @property
    def accuracy(self) -> float:
        """Accuracy of the leave-one-out scores."""
        return float((self.labels.proposed == self.labels.labels).double().mean())


@exactly
def gather(store: SampleStore, certificates: Any = None) -> Findings:
    """Gather the findings from a store whose head is an LSSVMHead with labels, or a MarginHead."""
    head = store.head
    if not isinstance(head, LinearHead):
        raise StoreError(
            f"a report needs a store with an LSSVMHead or a MarginHead; this one has a {type(head).__name__}"
        )
    if not len(store):
        raise StoreError(f"the store at {store.path} holds no samples: there is nothing to report")
    if head.num_classes < 2 or head.statistics.kind != "labels":
        raise ValueError("a report is about labels: it needs a head with statistics and at least two classes")
    ids, scores, labels = store.leave_one_out()
    squares: Any = head.least_squares() if isinstance(head, MarginHead) else head
    subjects: list[str | None] = []
    added: list[float] = []
    leverage: list[Tensor] = []
    for rows in store.batches():
        subjects += rows.subjects
        added += rows.added
        leverage.append(squares.leverage(rows.x.to(head.device), relative=True).cpu())
    calibration = head.calibration or fit(scores, labels, torch.ones_like(scores[:, 0]), None)
    probabilities, scores, labels = calibration(scores).cpu(), scores.cpu(), labels.cpu()
    # one against one: ranked by the worst pair, as store.label_errors does; probabilities are those of the votes
    found = from_scores(scores, labels, ids) if head.multiclass == "ovr" else store.label_errors()
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
        path=head.rho_path(),
        subjects=subjects,
        added=torch.tensor(added, dtype=torch.float64),
        leverage=torch.cat(leverage),
        harm=harm(store, head, ids),
        drift=head.drift(),
        history=history,
        certificates=list_certificates(certificates, history[-1].chain.hex()),
        requests=store.requests.all(),
        waiting=waiting_work(store),
        compacted=store.compacted,
    )


def waiting_work(store: SampleStore) -> list[str]:
    """Work that is to be done on a store, most urgent first, in words for those who answer requests."""
    requests = [r for r in store.requests.all() if r.open]
    out = [f"Request {r.id} is overdue by {counted(-r.days_left, 'day')}." for r in requests if r.overdue]
    last = max((e.position for e in store.history() if e.kind == "remove"), default=0)
    receipts = len(store.receipts.unwritten())
    if receipts:
        out.append(f"{counted(receipts, 'receipt')} of erasures not written to a file yet (torchlssvm receipt).")
    if last > store.compacted:
        out.append("Bytes of erased samples may still be in the files of the store (torchlssvm compact).")
    older = store.certificates.checkpoints_before(last)
    if older:
        out.append(f"{counted(len(older), 'file')} elsewhere older than the last erasure: {listed(older)}.")
    pending = len(list(PendingEvents(store)))
    if pending:
        out.append(f"{counted(pending, 'correction')} waiting for samples that have not come by (torchlssvm pending).")
    if store.suppression.path is None and last:
        out.append("No suppression list is in use: erased samples could be added again (torchlssvm suppression).")
    return out


def harm(store: SampleStore, head: Any, ids: Sequence[str]) -> Tensor:
    """Change of the squared error on one half of the samples if a sample of the other half were removed (n,).

    The halves are chosen by a hash of the ids; each sample is judged by a model of its half on samples of the other half, so
    nothing is judged on what it has learned. Negative: the model would be better without it. Exact, and nothing is refitted
    but two halves. NaN where a half has no samples.
    """
    half = torch.tensor(fold_of(ids, 2))
    out = torch.full((len(ids),), float("nan"), dtype=torch.float64)
    if head.multiclass == "ovo" or not 0 < int(half.sum()) < len(ids) or int(torch.bincount(half).min()) < 2:
        return out
    config = {name: 0 if name == "folds" else value for name, value in head.config().items()}
    models = [type(head).from_config(config, device=head.device) for _ in range(2)]
    judges: list[list[Tensor]] = [[], []]
    truths: list[list[Tensor]] = [[], []]
    start = 0
    for rows in store.batches():
        mine = half[start : start + len(rows)]
        start += len(rows)
        for h in range(2):
            x, y = rows.x[mine == h].to(head.device), rows.y[mine == h].to(head.device)
            if not len(x):
                continue
            if models[h].statistics.empty:
                models[h].statistics.decide("labels", head.grid, None)
            models[h].add(x, y)
            room = JUDGING_SAMPLES - sum(map(len, judges[h]))
            judges[h].append(x[:room].double())
            truths[h].append(y[:room])
    points, labels = [torch.cat(j) for j in judges], [torch.cat(t) for t in truths]
    start = 0
    for rows in store.batches():
        mine = half[start : start + len(rows)]
        for h in range(2):
            pick = (mine == h).nonzero()[:, 0]
            if len(pick):
                x, y = rows.x[pick].to(head.device), rows.y[pick].to(head.device)
                out[start + pick] = models[h].influence(x, y, points[1 - h], labels[1 - h]).cpu()
        start += len(rows)
    return out


def list_certificates(folder: Any, chain: str) -> list[CertificateFile]:
    """List the certificates (*.json) of a folder, oldest first; a file that is none is listed with the reason."""
    if folder is None:
        return []
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is not a folder with certificates")
    out = []
    for path in sorted(p for p in Path(folder).glob("*.json") if not p.name.endswith(".receipt.json")):
        try:
            c = Certificate.load(path)
        except VerificationError as error:
            out.append(CertificateFile(path.name, "", 0, False, False, str(error)))
            continue
        out.append(CertificateFile(path.name, c.time, c.erased, bool(c.signatures), c.chain == chain))
    return sorted(out, key=lambda r: r.time)
