"""``LabelAudit``: finds labels that look wrong, and writes them as events that a person can edit and apply."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from torchlssvm.analysis.label_errors import from_scores
from torchlssvm.corrections.head_samples import hash_samples
from torchlssvm.events import Event, Relabel, Remove, to_primitives
from torchlssvm.files import refuse_in_store, replacement
from torchlssvm.functional import checks
from torchlssvm.functional.modes import exactly
from torchlssvm.lightning import ranks
from torchlssvm.lightning.head_lookup import check_interval, find_head, log_metrics
from torchlssvm.lightning.learner import Learner
from torchlssvm.linear import LinearHead
from torchlssvm.linear.linear_head import targets_of
from torchlssvm.sample_adapter import SampleAdapter


@dataclass(frozen=True)
class Suspect:
    """A sample whose label looks wrong: its leave-one-out margin, its label, and the label that the head predicts."""

    id: str
    margin: float
    label: int
    suggested: int


class LabelAudit(Callback):
    """After an epoch, rank the current samples by their leave-one-out margin and write the most suspicious ones as events.

    The file has one event per line, preceded by a comment with the reason. Edit the file, then pass it to
    :class:`~torchlssvm.lightning.DataCorrection`. Each audit overwrites the file.

    Args:
        path: the JSONL file.
        fraction: the largest share of samples to write. Only samples for which another label scores higher are written.
        action: ``"relabel"`` (to the best label) or ``"remove"``.
        every: how often to audit, in epochs.
        head: dotted path of the head in the LightningModule.
        samples: a function that returns (ids, x (n, J), y (n,)) of the current samples; for a kernel machine, in the order of
            its ``ids``. Default: the samples in the store of an ``LSSVMModule``. Without a store, samples are kept in memory
            during training, and the events carry them.

    >>> LabelAudit("suspects.jsonl", fraction=0.05).suspects
    []
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fraction: float = 0.1,
        action: str = "relabel",
        every: int = 1,
        head: str = "head",
        samples: Callable[[], tuple[list[str], Tensor, Tensor]] | None = None,
    ):
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {fraction!r}")
        self.action = checks.one_of(action, "action", ("relabel", "remove"))
        self.path, self.fraction, self.every = Path(path), fraction, check_interval(every, "every")
        self.head, self.samples = head, samples
        self.suspects: list[Suspect] = []
        self._learner: Learner | None = None
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the samples, or start to collect them while they are learned."""
        targets = targets_of(find_head(pl_module, self.head))
        if targets != "classes":
            raise ValueError(
                f"LabelAudit ranks samples with one class each, this head has targets={targets!r}: call "
                "find_label_errors(head, x, y, ids) for several labels"
            )
        learner = getattr(pl_module, "learner", None)
        self._learner = learner if isinstance(learner, Learner) else None
        if self.samples is None and self._learner is None:
            raise ValueError("LabelAudit needs the samples: give samples=, a function that returns (ids, x, y)")
        if self.samples is None and self._learner is not None and self._learner.path is None:
            self._learner.observers.append(self._keep)

    def _keep(self, ids: list[str] | None, x: Tensor, y: Tensor) -> None:
        if ids is None:
            raise ValueError(
                "LabelAudit names samples by id: give batches (x, y, ids), e.g. of torchlssvm.lightning.Indexed"
            )
        self._kept.update(zip(ids, zip(x, y, strict=True), strict=True))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Audit every ``every`` epochs. A trial run (``fast_dev_run``) leaves the file as it is."""
        if (trainer.current_epoch + 1) % self.every == 0 and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.audit(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop collecting samples, and drop those in memory."""
        if self._learner is not None and self._keep in self._learner.observers:
            self._learner.observers.remove(self._keep)
        self._kept.clear()

    def audit(self, trainer: Trainer, pl_module: LightningModule) -> list[Suspect]:
        """Rank the samples and write the file, on the first rank only."""
        head = find_head(pl_module, self.head)
        bring_up_to_date = getattr(pl_module, "bring_up_to_date", None)
        if callable(bring_up_to_date):
            bring_up_to_date()  # the callback's turn comes before the module's
        kept = {name: value for part in ranks.gather(self._kept) for name, value in part.items()}

        def work() -> list[Suspect]:
            ids, x, y = self._held(kept)
            if not ids:
                return []
            learner = self._learner if self.samples is None else None
            numbers = learner.corrector.machine_ids(ids) if learner else None
            found = from_scores(scores_without(head, x, y, numbers).cpu(), y.cpu(), ids)
            worst = found.suspects[: int(self.fraction * len(ids))].tolist()
            chosen = [Suspect(ids[i], float(found.margins[i]), int(y[i]), int(found.proposed[i])) for i in worst]
            stored = learner is not None and learner.store is not None
            self._write(chosen, {} if stored else {name: (x[k], y[k]) for k, name in enumerate(ids)})
            return chosen

        self.suspects = ranks.on_first(work)
        log_metrics(trainer, {"suspicious_labels": float(len(self.suspects))})
        pl_module.print(f"torchlssvm: {len(self.suspects)} labels look wrong, the worst first in {self.path}")
        return self.suspects

    def _held(self, kept: dict[str, tuple[Tensor, Tensor]]) -> tuple[list[str], Tensor, Tensor]:
        """Collect the current samples: given, from the store, or those kept that no event has changed since."""
        if self.samples is not None:
            return self.samples()
        assert self._learner is not None
        if self._learner.store is not None:
            parts = [(list(rows.ids), rows.x, rows.y) for rows in self._learner.store.batches()]
        else:
            hashes = self._learner.named.hashes
            one = {name: (x[None], y[None]) for name, (x, y) in kept.items()}
            parts = [([i], x, y) for i, (x, y) in one.items() if hashes.get(i) == hash_samples(x, y)[0]]
        if not parts:
            return [], torch.zeros(0), torch.zeros(0)
        return [i for ids, *_ in parts for i in ids], torch.cat([p[1] for p in parts]), torch.cat([p[2] for p in parts])

    def _write(self, chosen: list[Suspect], carried: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Write events for the suspects; with their samples, unless a store has these."""
        lines = [f"# {len(chosen)} suspicious labels, the worst first. Take out the lines that are right as they are."]
        for s in chosen:
            x, y = (part[None] for part in carried[s.id]) if carried else (None, None)
            event: Event = Remove(ids=[s.id], x=x, y=y)
            if self.action == "relabel":
                event = Relabel(ids=[s.id], y=torch.tensor([s.suggested]), x=x, y_old=y)
            lines.append(f"# {json.dumps(s.id)}: margin {s.margin:.3f}, label {s.label}, better {s.suggested}")
            lines.append(json.dumps(to_primitives(event)))
        refuse_in_store(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacement(self.path) as new:
            new.write_text("\n".join(lines) + "\n", encoding="utf-8")


@exactly
def scores_without(head: Any, x: Tensor, y: Tensor, numbers: list[int] | None = None) -> Tensor:
    """Compute scores (n, K) of each sample by the head without it.

    A head computes the scores from its statistics, and a kernel machine with ``leave_one_out()`` computes them from its
    solution. For any other machine, a copy unlearns each sample in turn and learns it again, which takes longer.
    """
    if isinstance(head, LinearHead):
        parts = zip(x.split(4096), y.split(4096), strict=True)  # bounds memory
        return torch.cat([head.leave_one_out(a.to(head.device), b.to(head.device)) for a, b in parts])
    held = head.ids.tolist()
    numbers = held if numbers is None else numbers
    if len(numbers) != len(x) or not set(numbers) <= set(held):
        raise ValueError(f"the samples are not those that are held: {len(x)} were given, {len(held)} are held")
    if callable(getattr(head, "leave_one_out", None)):
        places = {number: k for k, number in enumerate(held)}
        found, order = head.leave_one_out(), [places[number] for number in numbers]
        if isinstance(found, Tensor):
            return found[order]
        sign = 2 * y.to(found.margin) - 1  # an SVM of two classes: g + 1 = y f
        decision = sign * (found.margin[order] + 1)
        return torch.stack([-decision, decision], 1)
    samples, rows = SampleAdapter(copy.deepcopy(head)), []
    samples.ids = dict(enumerate(numbers))
    for k in range(len(x)):
        one = ([k], x[k : k + 1].to(head.ids.device), y[k : k + 1].to(head.ids.device))
        samples.remove(*one)
        rows.append(samples.machine(one[1]) if samples.count else x.new_zeros(1, head.num_classes))
        samples.add(*one)
    return torch.cat(rows)
