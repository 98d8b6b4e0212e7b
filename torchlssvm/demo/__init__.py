"""``torchlssvm demo``: learn, find wrong labels, correct them, erase a user, prove it. Each step is one exact call.

The data ships with scikit-learn: 1,797 digits of 8x8 pixels. The samples live in a store in a temporary folder.
"""

from __future__ import annotations

import json
from pathlib import Path

from torchlssvm.demo.data import Task, import_extra, load
from torchlssvm.demo.picture import draw
from torchlssvm.demo.report import summary, table
from torchlssvm.demo.scores import leave_one_out, margins, new_head
from torchlssvm.demo.story import DemoStep, Story

__all__ = [
    "PICTURE_FILE", "DemoStep", "Story", "Task", "draw", "leave_one_out", "load", "margins", "new_head", "run", "summary",
    "table",
]  # fmt: skip

PICTURE_FILE = "torchlssvm_demo.png"


def run(out: Path, seed: int, as_json: bool) -> int:
    """Tell the story, write the picture and print; 0 if every check holds, else 1."""
    import_extra("matplotlib", "matplotlib")  # before any work
    out.mkdir(parents=True, exist_ok=True)
    story, path = Story(load(seed)), out / PICTURE_FILE
    draw(story, path)
    print(json.dumps(summary(story, path), indent=2) if as_json else table(story, path))
    return 0 if story.passed else 1
