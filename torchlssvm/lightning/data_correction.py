"""``DataCorrection``: additions, removals and corrections of data that arrive during a run."""

from __future__ import annotations

import itertools
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from torchlssvm.audit.certificate import Certificate
from torchlssvm.corrections.corrector import UNCERTIFIED_NOTE, Corrector
from torchlssvm.corrections.event_sources import DeadLetters, FileSource, Item, as_source
from torchlssvm.corrections.waiting_events import EventOutcome, EventStatus
from torchlssvm.errors import StoreBusyError, StoreDiskError, TorchLSSVMError, VerificationError
from torchlssvm.files import refuse_in_store
from torchlssvm.lightning import ranks
from torchlssvm.lightning.checkpoint_registry import register_with
from torchlssvm.lightning.head_lookup import check_interval, find_head, log_metrics
from torchlssvm.lightning.learner import Learner, change_on_first
from torchlssvm.linear.labelled_batches import unpack
from torchlssvm.linear.linear_head import targets_of
from torchlssvm.sample_adapter import SampleAdapter
from torchlssvm.store import SampleStore
from torchlssvm.wording import counted

log = logging.getLogger("torchlssvm.lightning")


@dataclass(frozen=True)
class CorrectionReport:
    """Counts for one reading of the source. Accuracies are measured on validation features; None before validation."""

    applied: int
    repeated: int
    refused: int
    waiting: int
    samples: int
    accuracy_before: float | None
    accuracy_after: float | None
    milliseconds: float


class DataCorrection(Callback):
    """Apply events from a source to the head while training or validation runs, each event exactly once and on all ranks.

    The callback reads the source before the first batch, after each ``every`` training batches, before each validation, and at
    the end of each epoch and of the training. You find the results in the log and in ``reports``. The position in the source
    is saved with the head, in the store or, without a store, in the checkpoint, so that a restart continues where the run
    ended.

    If an ``LSSVMModule`` has not learned the samples of an event yet, the event waits. When a batch brings the samples,
    learning the batch and applying the event are one change ( :mod:`torchlssvm.corrections.corrector`). The result therefore
    does not depend on when an event arrives, nor on the order and the rank in which the samples arrive. Events that still wait
    when the run ends are printed and wait for the next run. ``torchlssvm fit`` then exits with code 1, as it does after
    refused events.

    With a store (``store``, or the store of an ``LSSVMModule``), Remove and Relabel name samples by id or subject. Without a
    store, they have to carry the samples as they were added. If the source itself is a store, the head follows the changes
    that other processes make to it.

    Args:
        source: a JSONL file that may still be written to, a queue, an iterable of events, a source of
            :mod:`torchlssvm.corrections.event_sources`, or a :class:`~torchlssvm.store.SampleStore`.
        every: how often to read the source, in training batches.
        store: a store with the head of this module.
        head: dotted path of the head in the LightningModule.
        limit: the largest number of events to read at a time.
        dead_letters: JSONL file for events that cannot be applied, with the reason. Default: ``dead_letters.jsonl`` in the
            Trainer's ``default_root_dir``.
        on_error: ``"continue"``, or ``"raise"`` to stop the run at the first event that cannot be applied.
        certificates: folder for the certificates of removals. Requires a store. Next to each certificate, a receipt with the
            names of the erased people is written.
        key: Ed25519 key to sign the certificates with.
        keep: the number of validation samples whose features are kept in memory, to measure accuracy before and after events.

    >>> DataCorrection("events.jsonl", every=10).state_key
    'DataCorrection(head=head, source=events.jsonl)'
    """

    def __init__(
        self,
        source: Any,
        every: int = 1,
        store: Any = None,
        *,
        head: str = "head",
        limit: int = 4096,
        dead_letters: str | os.PathLike[str] | None = None,
        on_error: str = "continue",
        certificates: str | os.PathLike[str] | None = None,
        key: Any = None,
        keep: int = 2048,
    ):
        if on_error not in ("continue", "raise"):
            raise ValueError(f"on_error must be 'continue' or 'raise', got {on_error!r}")
        self.every, self.limit, self.keep = check_interval(every, "every"), check_interval(limit, "limit"), keep
        self.follows = isinstance(source, SampleStore)
        self.given_store: SampleStore | None = source if self.follows else store
        self.source = None if self.follows else as_source(source)
        self.name = source if isinstance(source, str | os.PathLike) else type(source).__name__
        self.head, self.on_error, self.key = head, on_error, key
        self.dead_letters = None if dead_letters is None else DeadLetters(dead_letters)
        self.certificates = None if certificates is None else Path(certificates)
        self.position = 0
        self.reports: list[CorrectionReport] = []
        self._told = 0  # reports that the line at the end of a fit has covered
        self.refused = 0
        """Events of the last fit that could not be applied."""
        self.corrector: Corrector | None = None
        self._learner: Learner | None = None
        self._saved: dict[str, Any] = {}
        self._features: list[tuple[Tensor, Tensor]] = []
        self._captured: Tensor | None = None
        self._hook: Any = None
        self._dry = False

    @property
    def state_key(self) -> str:
        """Key of the state, one for each head and source."""
        return f"DataCorrection(head={self.head}, source={self.name})"

    # -- when ----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Determine the file for refused events. The rest is done later, because a module opens its store in its own setup."""
        self.corrector = None
        self._dry = bool(getattr(trainer, "fast_dev_run", False))  # a trial run takes no events
        self.dead_letters = self.dead_letters or DeadLetters(Path(trainer.default_root_dir) / "dead_letters.jsonl")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the position in the source and apply new events. Checkpoints are registered with the store, if you gave one."""
        if self._dry:
            return
        self.begin(pl_module)
        self.refused = 0
        if self.given_store is not None:
            register_with(trainer, self.given_store)
        self.look(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Read the source every ``every`` batches."""
        if (args[2] + 1) % self.every == 0:
            self.look(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the source, so that the corrected head is validated, and start to record the inputs of the head."""
        if trainer.sanity_checking:
            return
        self.look(trainer, pl_module)
        self._features = []
        head = find_head(pl_module, self.head)
        if self.keep and isinstance(head, torch.nn.Module):
            self._hook = head.register_forward_pre_hook(self._capture)

    def _capture(self, module: Any, inputs: Any) -> None:
        self._captured = inputs[0].detach()

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Keep the features of this batch."""
        x, self._captured = self._captured, None
        if x is None or sum(len(part) for part, _ in self._features) >= self.keep:
            return
        y = unpack(args[1]).y
        self._features.append((x.clone(), y[: len(x)].clone()))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop recording the inputs of the head."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the events that waited until all samples have arrived."""
        self.look(trainer, pl_module, final=trainer.is_last_batch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the events that arrived until the end, and print the number of refused events."""
        while self.look(trainer, pl_module, final=True) is not None and isinstance(self.source, FileSource):
            pass  # until the end of the file, which may hold more events than one look reads
        names = ("applied", "samples", "repeated", "waiting", "refused")
        totals = {name: sum(getattr(r, name) for r in self.reports[self._told :]) for name in names}
        self._told = len(self.reports)
        if any(totals.values()):
            totals["waiting at first"] = totals.pop(
                "waiting"
            )  # those whose samples have arrived since are among the applied
            done = ", ".join(f"{n} {words}" for words, n in totals.items() if n or words == "applied")
            pl_module.print(f"torchlssvm: corrections of {self.name}: {done}")
        if self.refused and self.dead_letters is not None:
            pl_module.print(
                f"torchlssvm: {counted(self.refused, 'event')} not applied: see the reasons in {self.dead_letters.path}"
            )

    # -- what ----------------------------------------------------------------------------------------------------------

    def begin(self, pl_module: LightningModule) -> Corrector:
        """Find the head and its store, and go to the position in the source that matches the head."""
        learner = getattr(pl_module, "learner", None)
        head = find_head(pl_module, self.head)
        self._learner = learner if isinstance(learner, Learner) and learner.head is head else None
        if self._learner is not None and self.given_store is None:
            corrector = self._learner.corrector
        else:
            corrector = Corrector(head, self.given_store)
            if self.given_store is not None and self.given_store.head is not head:
                raise ValueError("the store drives another head: open it with SampleStore(path, head=module.head)")
            corrector.load_state_dict(self._saved.get("corrector", {}))
        store = corrector.store
        if self.certificates is not None and ranks.share(store is None):
            raise ValueError("certificates need a store: only a store knows which samples were erased")
        if self.certificates is not None:
            refuse_in_store(self.certificates)
        place = self._saved if store is None or self.follows else store.note(self.state_key) or {}
        cursor = place.get("cursor", 0)
        corrector.certified = self.certificates is not None
        if self.source is not None and self.source.cursor != cursor and ranks.is_first():
            self.source.seek(cursor)
        if isinstance(self.source, FileSource):
            self.source.identity = place.get("file")
        if store is not None and not (self.follows and self.position):
            self.position = cursor if self.follows and cursor else store.position
        self.corrector = corrector
        return corrector

    def look(self, trainer: Trainer, pl_module: LightningModule, final: bool = False) -> CorrectionReport | None:
        """Apply new events; return None if there were none. ``final`` means that the pass over the samples is over."""
        if self._dry:
            return None
        corrector = self.corrector or self.begin(pl_module)
        head = corrector.head
        items = ranks.on_first(lambda: [] if self.source is None else self.source.read(self.limit))
        news = ranks.share(corrector.store is not None and corrector.store.position != self.position)
        waiting = final and any(not p.refused for p in corrector.queue.unanswered)
        uncertified = corrector.certified and corrector.store is not None and corrector.store.note(UNCERTIFIED_NOTE)
        has_work = ranks.share(bool(waiting or corrector.answered or uncertified))
        if not items and not (self.follows and news) and not has_work:
            return None
        before, start = self._accuracy(head), time.perf_counter()
        outcomes = self._apply(corrector, items, final)
        if not outcomes:
            return None
        spent = 1000 * (time.perf_counter() - start)
        counts = Counter(outcome.status for outcome in outcomes)
        self.refused += counts[EventStatus.REFUSED]
        changed = sum(o.samples for o in outcomes if o.status in (EventStatus.APPLIED, EventStatus.WATCHED))
        report = CorrectionReport(
            applied=counts[EventStatus.APPLIED], repeated=counts[EventStatus.REPEATED], refused=counts[EventStatus.REFUSED],
            waiting=counts[EventStatus.WAITING], samples=changed, accuracy_before=before,
            accuracy_after=self._accuracy(head), milliseconds=spent,
        )  # fmt: skip
        log_metrics(trainer, {f"corrections/{k}": float(v) for k, v in asdict(report).items() if v is not None})
        self.reports.append(report)
        return report

    def _apply(self, corrector: Corrector, items: list[Item], final: bool) -> list[EventOutcome]:
        """Apply events on the first rank, which holds all samples, and send the result to the other ranks."""
        if self._learner is not None:
            self._learner.synchronize()
        else:
            ranks.add_up(corrector.head)
        stored = ranks.share(corrector.store is not None)
        return change_on_first(corrector, lambda: self._work(corrector, items, final), stored)

    def _work(self, corrector: Corrector, items: list[Item], final: bool) -> list[EventOutcome]:
        store = corrector.store
        outcomes = corrector.follow(self.position) if self.follows else []
        events = [item.event for item in items if item.event is not None]
        try:
            results = iter(corrector.apply(events))
        except (StoreBusyError, StoreDiskError) as error:  # they stay in the source until the next look
            log.warning("the store cannot be written, %d events wait: %s", len(events), error)
            if self.source is not None and store is not None:
                self.source.seek((store.note(self.state_key) or {}).get("cursor", 0))
            return outcomes
        told = [
            (item, EventOutcome("", "", 0, EventStatus.REFUSED, item.reason) if item.event is None else next(results))
            for item in items
        ]
        if final:
            corrector.apply_waiting(final=True)
        for item, outcome in [*told, *corrector.take_answered()]:
            outcomes.append(outcome)
            if outcome.status is EventStatus.REFUSED and self.dead_letters is not None:
                self.dead_letters.write(item, outcome.reason)
            if outcome.status is EventStatus.REFUSED and item.event is not None:
                corrector.give_up(item.event)
        if store is not None:
            self._note_repeated(store, outcomes)
            if self.source is not None:
                store.set_note(self.state_key, self._place())
            self.position = store.position
            self._certify(store)
        refused = next((o for o in outcomes if o.status is EventStatus.REFUSED), None)
        if refused is not None and self.on_error == "raise":
            raise TorchLSSVMError(f"event {refused.event_id!r} cannot be applied: {refused.reason}")
        return outcomes

    def _certify(self, store: SampleStore) -> None:
        """Certify all removals without a certificate, including those of a run that was killed before it could do so."""
        removed = store.note(UNCERTIFIED_NOTE)
        if self.certificates is not None and removed:
            self.certificates.mkdir(parents=True, exist_ok=True)
            name = file_name(removed)
            recorded, known = {store.recorded_id(e) for e in removed}, {e.event_id for e in store.history()}
            waiting = [e for e in store.receipts.unwritten() if e in recorded]
            if waiting:  # first, so that no certificate is without a receipt
                paths = numbered(self.certificates, name, ".receipt.json")
                store.write_receipt(waiting, next(path for path in paths if not path.exists()))
            for path in numbered(self.certificates, name, ".json"):
                before = certified_events(path)
                if not path.exists() or (before and known.issuperset(before)):
                    break  # a certificate of the same events is written again, but not one of another store
            store.certificate(list(dict.fromkeys([*before, *removed])), key=self.key).save(path)
            store.set_note(UNCERTIFIED_NOTE, None)

    def _note_repeated(self, store: SampleStore, outcomes: list[EventOutcome]) -> None:
        """Note repeated removals for a certificate unless they have one, because the first run may have had no folder."""
        again = [o.event_id for o in outcomes if o.status is EventStatus.REPEATED and o.kind == "remove"]
        if self.certificates is None or not again:
            return
        done = {e for path in self.certificates.glob("*.json") for e in certified_events(path)}
        done.update(store.recorded_id(e) for e in store.note(UNCERTIFIED_NOTE) or [])
        missing = [e for e in dict.fromkeys(again) if store.recorded_id(e) not in done and store.has_applied(e)]
        if missing:
            store.update_note(UNCERTIFIED_NOTE, lambda noted: [*(noted or []), *missing])

    def _accuracy(self, head: Any) -> float | None:
        """Share of right answers, of several labels the share of right labels; None for numbers."""
        right = total = 0
        judged = SampleAdapter(head).count and targets_of(head) != "regression"
        for x, y in self._features if judged else []:
            right += int((head.predict(x) == y).sum())
            total += y.numel()
        sums = ranks.gather((right, total))
        whole = sum(t for _, t in sums)
        return sum(r for r, _ in sums) / whole if whole else None

    # -- what goes into a checkpoint -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position in the source, and the applied events if neither a store nor the module keeps them."""
        own = self.corrector if self._learner is None else None
        return self._place() | {"corrector": {} if own is None else own.state_dict()}

    def _place(self) -> dict[str, Any]:
        """The position in the source and, for a file, the identity of the file."""
        if self.source is None:
            return {"cursor": self.position}
        return {"cursor": self.source.cursor, "file": getattr(self.source, "identity", None)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state when training starts. The head is loaded with the module."""
        self._saved = dict(state_dict)


def file_name(events: Sequence[str]) -> str:
    """The name of the files of some events: the id of the first, and how many more there are."""
    more = f"-and-{len(events) - 1}-more" if len(events) > 1 else ""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", events[0])[:80] + more


def numbered(folder: Path, name: str, ending: str) -> Iterator[Path]:
    """Yield the files of this name, name-2, name-3 and so on."""
    return (folder / f"{name}{n}{ending}" for n in itertools.chain([""], (f"-{n}" for n in itertools.count(2))))


def certified_events(path: Path) -> list[str]:
    """List the events of a certificate; empty if the file is missing or is not a certificate."""
    try:
        return [event["event_id"] for event in Certificate.load(path).events]
    except (OSError, VerificationError):
        return []
