"""
Correcting data during a Lightning run
======================================

``LSSVMModule`` is a LightningModule without an optimizer. Its ``training_step`` adds samples to the head, and one
epoch completes the training. The ``DataCorrection`` callback reads events from a file that other programs append to,
and applies each event exactly once.
"""

import json
import logging
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
from lightning.pytorch import Trainer

from torchlssvm.lightning import DataCorrection, DigitsData, LSSVMModule

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
folder = Path(tempfile.mkdtemp())

# %%
# Events
# ------
#
# Each line of the file is an event. In this example, two events are in the file before the run begins. They wait
# until a batch contains their samples, and are applied together with this batch.

events = folder / "events.jsonl"
lines = [
    {"kind": "remove", "ids": ["train/7", "train/8"], "event_id": "request-1"},
    {"kind": "relabel", "ids": ["train/1000"], "y": [3], "event_id": "correction-1"},
]
_ = events.write_text("".join(json.dumps(line) + "\n" for line in lines))

# %%
# The run
# -------

module = LSSVMModule(
    "identity", 10, in_features=64, grid=4.0, store=str(folder / "store")
)
correction = DataCorrection(events, every=2, certificates=folder / "certificates")
quiet = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "accelerator": "cpu",
}
trainer = Trainer(
    max_epochs=1,
    callbacks=[correction],
    default_root_dir=folder,
    enable_checkpointing=False,
    **quiet,
)
trainer.fit(module, datamodule=DigitsData(batch_size=64))

applied = sum(report.applied for report in correction.reports)
print(f"{module.head.n} of 1,438 samples learned, {applied} events applied")
print(
    "certificates:",
    sorted(path.name for path in (folder / "certificates").iterdir())[:1],
    "...",
)

# %%
# Later events
# ------------
#
# The store remembers its position in the file. A second run reads only the events that were appended since the first
# run, and counts no sample twice.

with events.open("a") as file:
    _ = file.write(
        json.dumps({"kind": "remove", "ids": ["train/9"], "event_id": "request-2"})
        + "\n"
    )

module = LSSVMModule(
    "identity", 10, in_features=64, grid=4.0, store=str(folder / "store")
)
correction = DataCorrection(events, certificates=folder / "certificates")
trainer = Trainer(
    max_epochs=1,
    callbacks=[correction],
    default_root_dir=folder,
    enable_checkpointing=False,
    **quiet,
)
trainer.fit(module, datamodule=DigitsData(batch_size=64))
applied = sum(report.applied for report in correction.reports)
print(f"{module.head.n} samples held, {applied} new event applied")

# %%
# This code draws the digits that the events refer to:

digits = trainer.datamodule.train
figure, axes = plt.subplots(1, 4, figsize=(6, 2))
for axis, (i, what) in zip(
    axes,
    {7: "removed", 8: "removed", 9: "removed", 1000: "relabelled"}.items(),
    strict=True,
):
    axis.imshow(digits[i][0].reshape(8, 8), cmap="gray_r")
    axis.set(title=f"train/{i}\n{what}", xticks=[], yticks=[])
figure.tight_layout()

# %%
# You can run the same training from the shell with ``torchlssvm fit --config configs/events/file.yaml``. To use two
# processes, add ``--trainer.strategy ddp --trainer.devices 2``. The digest stays the same.
