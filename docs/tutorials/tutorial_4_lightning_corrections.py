"""
Correcting data during a Lightning run
======================================

``LSSVMModule`` is a LightningModule without an optimizer: ``training_step`` adds samples, and one epoch is the whole
training. The callback ``DataCorrection`` reads events from a file that other programs append to, and applies each
event exactly once.
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
# Each line is an event. These two are in the file before the run begins, so they wait until their samples arrive.
# The batch that brings a sample and the event that removes or relabels it are then applied together.

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
# The store remembers the position in the file. A second run reads only what was appended since, and counts no
# sample twice.

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
# The digits that these events were about:

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
# From the shell: ``torchlssvm fit --config configs/events/file.yaml``. To use two processes, add
# ``--trainer.strategy ddp --trainer.devices 2``; the digest stays the same.
