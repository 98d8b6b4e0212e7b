"""``PredictionFile``: the predictions of a run, written to a table."""

from __future__ import annotations

import csv
import os
from collections import Counter
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from torchlssvm.files import refuse_in_store, replacement
from torchlssvm.lightning import ranks
from torchlssvm.linear.labelled_batches import check_names, parts_of
from torchlssvm.linear.linear_head import targets_of


class PredictionFile(Callback):
    """Write the predictions of ``trainer.predict`` to a CSV file, with one line per sample in the order of the data.

    The columns are the id of the sample (its number if batches have no ids), the predicted class (its name, if the module was
    made with ``classes``), and a score for each class. With ``targets="multilabel"``, the second column contains all predicted
    labels, separated by spaces, or their names, separated by semicolons. With ``targets="regression"``, it is empty, and the
    scores are the predicted numbers. With several ranks, the first rank writes the file. Samples that a distributed sampler
    repeats are written once.

    Args:
        path: the file to write. An existing file is replaced when all predictions have been computed.
        batch_names: the keys of batches that are dicts.

    >>> PredictionFile("predictions.csv").path.name
    'predictions.csv'
    """

    def __init__(self, path: str | os.PathLike[str] = "predictions.csv", batch_names: dict[str, str] | None = None):
        check_names(batch_names)
        self.path, self.names = Path(path), batch_names
        self._rows: list[tuple[int, int, str | None, list[float]]] = []
        self._seen: Counter[int] = Counter()  # samples of this rank so far, by loader

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start with an empty table."""
        self._rows, self._seen = [], Counter()

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:  # fmt: skip
        """Keep the scores of a batch, without the samples that a distributed sampler repeats."""
        if not isinstance(outputs, Tensor) or outputs.ndim != 2:
            raise ValueError("PredictionFile writes scores (B, K): predict_step must return them")
        loader = ranks.loader_at(trainer.predict_dataloaders, dataloader_idx)
        keep, start = ranks.without_padding(loader, batch_idx, len(outputs)), self._seen[dataloader_idx]
        self._seen[dataloader_idx] += len(outputs)
        ids = parts_of(batch, self.names)[2]
        ids = ids.tolist() if isinstance(ids, Tensor) else ids
        for k, scores in enumerate(outputs[:keep].detach().cpu().tolist()):
            number = (start + k) * ranks.count() + trainer.global_rank  # as a distributed sampler deals them out
            self._rows.append((dataloader_idx, number, None if ids is None else str(ids[k]), scores))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file, on the first rank, and print where it is. A trial run (``fast_dev_run``) leaves the file as it is."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        rows = sorted(row for part in ranks.gather(self._rows) for row in part)
        self._rows = []
        targets = targets_of(getattr(pl_module, "head", None))
        names = getattr(getattr(pl_module, "classifier", None), "classes", None)

        def write() -> None:
            refuse_in_store(self.path)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacement(self.path) as new, new.open("w", newline="", encoding="utf-8") as file:
                table = csv.writer(file)
                classes = len(rows[0][3]) if rows else 0
                known = [*(names or ()), *map(str, range(len(names or ()), classes))]
                table.writerow(["sample", "predicted", *(f"score_{k}" for k in range(classes))])
                for _, number, name, scores in rows:
                    best = known[max(range(classes), key=scores.__getitem__)] if targets == "classes" else ""
                    if targets == "multilabel":
                        best = (";" if names else " ").join(known[k] for k, score in enumerate(scores) if score > 0)
                    table.writerow([number if name is None else name, best, *(repr(s) for s in scores)])

        ranks.on_first(write)
        pl_module.print(f"torchlssvm: {len(rows)} predictions are in {self.path}")
