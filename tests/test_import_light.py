"""`import torchlssvm` needs torch and numpy only, and so does every public name."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = {
    "lightning",
    "pytorch_lightning",
    "torchvision",
    "sklearn",
    "matplotlib",
    "scipy",
    "numba",
    "pandas",
    "timm",
    "cryptography",
}


def modules_after(code: str) -> set[str]:
    """The names in sys.modules of a fresh interpreter that has run the code."""
    code += "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_import_pulls_in_no_optional_dependency() -> None:
    modules = modules_after("import torchlssvm")
    assert {"torch", "torchlssvm"} <= modules
    assert not OPTIONAL & modules


def test_every_public_name_resolves_without_one() -> None:
    modules = modules_after(
        "import torchlssvm\n"
        "names = torchlssvm.__all__\n"
        "assert len(set(names)) == len(names), 'a name stands twice in __all__'\n"
        "missing = [name for name in names if not hasattr(torchlssvm, name)]\n"
        "assert names and not missing, missing\n"
        "assert set(names) <= set(dir(torchlssvm))"
    )
    assert not OPTIONAL & modules
    assert not {f"torchlssvm.{glue}" for glue in ("lightning", "sklearn", "cli", "demo")} & modules
