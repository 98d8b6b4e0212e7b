"""``LabelAudit``: finds labels that look wrong, and writes them down as events that a person can edit and feed back."""

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

from torchlssvm.corrections.head_samples import HeadSamples, hash_samples
from torchlssvm.events import Event, Relabel, Remove, to_primitives
from torchlssvm.functional.modes import exactly
from torchlssvm.lightning import ranks
from torchlssvm.lightning.head_lookup import check_interval, find_head, log_metrics
from torchlssvm.lightning.learner import Learner
from torchlssvm.linear import LinearHead
from torchlssvm.sample_adapter import SampleAdapter

HeldSamples = tuple[list[str], Tensor, Tensor]
"""(ids, x (n, J), y (n,)) of the samples held."""


CHUNK_SAMPLES = 4096
"""Samples scored at a time: bounds memory, and is enough to keep a matrix product busy."""


@dataclass(frozen=True)
class Suspect:
    """A sample whose label looks wrong: its leave-one-out margin, its label, and the label that the head predicts."""

    id: str
    margin: float
    label: int
    suggested: int


class LabelAudit(Callback):
    """After an epoch, ranks the samples held by their leave-one-out margin and writes the most suspicious ones as events.

    The file has one event a line, with a comment before it that says why. Edit it, then give it to
    :class:`~torchlssvm.lightning.DataCorrection`. Each audit overwrites the file.

    Args:
        path: the JSONL file.
        fraction: the largest share of samples to write. Only samples for which another label scores higher are written.
        action: ``"relabel"`` (to the best label) or ``"remove"``.
        every: how often to audit, in epochs.
        head: where the head is in the LightningModule.
        samples: a function that returns (ids, x (n, J), y (n,)) of the samples held, for a kernel machine in the order of its
            ``ids``; by default they come from the store of an ``LSSVMModule``, or are kept in memory while it trains, and
            events then carry them.

    >>> LabelAudit("suspects.jsonl").state_key
    'LabelAudit(head=head, path=suspects.jsonl)'
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fraction: float = 0.1,
        action: str = "relabel",
        every: int = 1,
        head: str = "head",
        samples: Callable[[], HeldSamples] | None = None,
    ):
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {fraction!r}")
        if action not in ("relabel", "remove"):
            raise ValueError(f"action must be 'relabel' or 'remove', got {action!r}")
        self.path, self.fraction, self.action, self.every = Path(path), fraction, action, check_interval(every, "every")
        self.head, self.samples = head, samples
        self.suspects: list[Suspect] = []
        self.audits = 0
        self._learner: Learner | None = None
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def state_key(self) -> str:
        """Key of the state, one for each head and file."""
        return f"LabelAudit(head={self.head}, path={self.path})"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the samples, or start to collect them while they are learned."""
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
        """Audit every ``every`` epochs."""
        if (trainer.current_epoch + 1) % self.every == 0:
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
            ids, x, y, carried = self._held(kept)
            if not ids:
                return []
            ranked = rank_suspects(head, ids, x, y, self._machine_ids(ids))
            count = int(self.fraction * len(ranked))
            chosen = [s for s in ranked[:count] if s.margin < 0]
            self._write(chosen, {name: k for k, name in enumerate(ids)} if carried else None, x, y)
            return chosen

        self.suspects = ranks.on_first(work)
        self.audits += 1
        log_metrics(trainer, {"suspicious_labels": float(len(self.suspects))})
        pl_module.print(f"torchlssvm: {len(self.suspects)} labels look wrong, the worst first in {self.path}")
        return self.suspects

    def _machine_ids(self, ids: list[str]) -> list[int] | None:
        """Return a kernel machine's own ids; None for a head, and for samples given in the machine's order."""
        return None if self.samples is not None or self._learner is None else self._learner.corrector.machine_ids(ids)

    def _held(self, kept: dict[str, tuple[Tensor, Tensor]]) -> tuple[list[str], Tensor, Tensor, bool]:
        """Collect the samples held now: given, from the store, or those kept that no event has changed since."""
        if self.samples is not None:
            return (*self.samples(), True)
        learner = self._learner
        assert learner is not None
        if learner.store is not None:
            parts = list(learner.store.batches())
            ids = [name for rows in parts for name in rows.ids]
            if not ids:
                return [], torch.zeros(0), torch.zeros(0), False
            return ids, torch.cat([rows.x for rows in parts]), torch.cat([rows.y for rows in parts]), False
        held = learner.corrector.samples
        hashes = held.hashes if isinstance(held, HeadSamples) else {}
        ids = [name for name, (x, y) in kept.items() if hashes.get(name) == hash_samples(x[None], y[None])[0]]
        if not ids:
            return [], torch.zeros(0), torch.zeros(0), True
        return ids, torch.stack([kept[i][0] for i in ids]), torch.stack([kept[i][1] for i in ids]), True

    def _write(self, chosen: list[Suspect], places: dict[str, int] | None, x: Tensor, y: Tensor) -> None:
        lines = [f"# {len(chosen)} suspicious labels, the worst first. Take out the lines that are right as they are."]
        for s in chosen:
            carried: dict[str, Any] = {}
            if places is not None:
                k = places[s.id]
                carried = {"x": x[k : k + 1], ("y" if self.action == "remove" else "y_old"): y[k : k + 1]}
            event: Event = (
                Remove(ids=[s.id], **carried) if self.action == "remove"
                else Relabel(ids=[s.id], y=torch.tensor([s.suggested]), **carried)
            )  # fmt: skip
            name = json.dumps(s.id)
            lines += [
                f"# {name}: margin {s.margin:.3f}, label {s.label}, better {s.suggested}",
                json.dumps(to_primitives(event)),
            ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(beside, self.path)

    def state_dict(self) -> dict[str, Any]:
        """Number of audits so far."""
        return {"audits": self.audits}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of audits."""
        self.audits = state_dict["audits"]


def rank_suspects(head: Any, ids: list[str], x: Tensor, y: Tensor, numbers: list[int] | None = None) -> list[Suspect]:
    """Rank all samples, the most suspicious first, by s[y] - max s[other], s the scores of the head that never saw the sample.

    x (n, J), y (n,): samples that the head holds, as they were added. numbers: a kernel machine's own ids of them.
    """
    scores, labels = scores_without(head, x, y, numbers).cpu(), y.cpu()
    own = scores.gather(1, labels[:, None])[:, 0]
    best, suggested = scores.scatter(1, labels[:, None], -torch.inf).max(1)
    rows = zip(ids, (own - best).tolist(), labels.tolist(), suggested.tolist(), strict=True)
    return sorted((Suspect(*row) for row in rows), key=lambda s: (s.margin, s.id))


@exactly
def scores_without(head: Any, x: Tensor, y: Tensor, numbers: list[int] | None = None) -> Tensor:
    """Compute scores (n, K) of each sample by the head without it.

    A head answers from its statistics, a kernel machine with ``leave_one_out()`` from its solution; any other one unlearns
    each sample in turn, on a copy, and learns it again.
    """
    if isinstance(head, LinearHead):
        parts = zip(x.split(CHUNK_SAMPLES), y.split(CHUNK_SAMPLES), strict=True)
        return torch.cat([head.leave_one_out(a.to(head.device), b.to(head.device)) for a, b in parts])
    held = head.ids.tolist()
    numbers = held if numbers is None else numbers
    if len(numbers) != len(x) or not set(numbers) <= set(held):
        raise ValueError(f"the samples are not those that are held: {len(x)} were given, {len(held)} are held")
    if not callable(getattr(head, "leave_one_out", None)):
        return scores_by_removal(copy.deepcopy(head), x.to(head.ids.device), y.to(head.ids.device), numbers)
    places = {number: k for k, number in enumerate(held)}
    found, order = head.leave_one_out(), [places[number] for number in numbers]
    if isinstance(found, Tensor):
        return found[order]
    sign = 2 * y.to(found.margin) - 1  # an SVM of two classes: g + 1 = y f
    decision = sign * (found.margin[order] + 1)
    return torch.stack([-decision, decision], 1)


def scores_by_removal(machine: Any, x: Tensor, y: Tensor, numbers: list[int]) -> Tensor:
    """Compute the same scores by unlearning, for a machine without ``leave_one_out``."""
    samples = SampleAdapter(machine)
    samples.ids = dict(enumerate(numbers))
    rows = []
    for k in range(len(x)):
        one = ([k], x[k : k + 1], y[k : k + 1])
        samples.remove(*one)
        rows.append(machine(one[1]) if samples.count else x.new_zeros(1, machine.num_classes))
        samples.add(*one)
    return torch.cat(rows)
