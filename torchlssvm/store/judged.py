"""What a store can say about its samples and its head: leave-one-out scores, wrong labels, a calibration that is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchlssvm.analysis.label_errors import LabelErrors, from_scores
from torchlssvm.errors import StoreBusyError, StoreError
from torchlssvm.functional.modes import exactly
from torchlssvm.store.head_adapter import Linear
from torchlssvm.store.opening import StoreBase


class Judged(StoreBase):
    """Questions about all samples at once, answered batch by batch."""

    def _linear(self, what: str) -> Any:
        head = self.head
        if not isinstance(self._machine, Linear):
            raise StoreError(f"{what} needs a store with an LSSVMHead; this one has a {type(head).__name__}")
        return head

    @exactly
    def leave_one_out(self, pairs: str = "votes") -> tuple[list[str], Tensor, Tensor]:
        """Ids, leave-one-out scores (n, K) and labels (n,) or targets (n, K) of all samples, in the order they were added.

        ``pairs``: see :meth:`torchlssvm.LSSVMHead.leave_one_out`.
        """
        with self.view():
            head = self._linear("leave_one_out")
            ids: list[str] = []
            scores: list[Tensor] = []
            labels: list[Tensor] = []
            for rows in self.batches():
                y = rows.y.to(head.device)
                ids += rows.ids
                scores.append(head.leave_one_out(rows.x.to(head.device), y, pairs=pairs))
                labels.append(y)
        if not ids:
            return ids, torch.zeros(0, head.num_classes, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        return ids, torch.cat(scores), torch.cat(labels)

    def label_errors(self) -> LabelErrors:
        """Samples ranked by how suspicious their labels are; ``apply(found.events(10))`` after somebody has looked."""
        ids, scores, labels = self.leave_one_out("least")
        return from_scores(scores, labels, ids)

    @exactly
    def calibrate(self, method: str | None = None) -> None:
        """Calibrate the head's probabilities on leave-one-out scores of all samples, and keep the result in the store.

        Events make a calibration void, since what they removed has shaped it; certificates say whether it was made again.
        """
        if self.readonly:
            raise StoreError(f"the store at {self.path} was opened for reading only")
        with self._db.held():
            head = self._linear("calibrate")
            _, scores, labels = self.leave_one_out()
            machine = self._machine
            assert machine is not None
            with self._db.transaction():
                if self._db.get("state")["position"] != self._position:
                    raise StoreBusyError(f"{self.path} was changed by another process meanwhile: calibrate again")
                self._stale = True  # until the calibration is kept
                head.calibrate_on(scores, labels, method)
                options = self._save_options(machine)
            self._options, self._stale = options, False
