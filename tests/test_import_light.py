"""`import torchlssvm` loads next to nothing, and every public name needs torch and numpy only."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import torchlssvm

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
ERASURE = {"sqlite3", "torchlssvm.store", "torchlssvm.audit"}


def modules_after(code: str) -> set[str]:
    """The names in sys.modules of a fresh interpreter that has run the code."""
    code += "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("code", "most"),
    [
        ("import torchlssvm", 5),
        ("from torchlssvm import LSSVMHead", 60),
        ("from torchlssvm import KernelLSSVM", 60),
        ("from torchlssvm import IncrementalSVM", 60),
    ],
)
def test_what_an_import_loads(code: str, most: int) -> None:
    modules = modules_after(code)
    assert len([m for m in modules if m.partition(".")[0] == "torchlssvm"]) <= most
    assert not (OPTIONAL | ERASURE) & modules


def test_the_command_line_starts_without_torch() -> None:
    assert not {"torch", "numpy"} & modules_after("import torchlssvm.cli\ntorchlssvm.cli.build_parser()")


def test_every_public_name_resolves_without_one() -> None:
    modules = modules_after(
        "import torchlssvm\n"
        "names = torchlssvm.__all__\n"
        "assert len(set(names)) == len(names), 'a name stands twice in __all__'\n"
        "assert set(names) <= set(dir(torchlssvm))\n"
        "missing = [name for name in names if not hasattr(torchlssvm, name)]\n"
        "assert names and not missing, missing\n"
        "assert torchlssvm.errors.StoreError and not hasattr(torchlssvm, 'nothing')"
    )
    assert not OPTIONAL & modules
    assert not {f"torchlssvm.{glue}" for glue in ("lightning", "sklearn", "cli", "demo")} & modules


@pytest.mark.parametrize("package", ["torchlssvm", "torchlssvm.linear"])
def test_type_checkers_see_the_same_names(package: str) -> None:
    """The imports under TYPE_CHECKING, the table of lazy names and __all__ agree."""
    module = __import__(package, fromlist=["__all__"])
    tree = ast.parse(Path(module.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {(f.module, alias.name) for f in block.body if isinstance(f, ast.ImportFrom) for alias in f.names}
    call = next(n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "lazy_names")
    assert seen == {(home, name) for home, names in ast.literal_eval(call.args[1]).items() for name in names}
    assert {name for _, name in seen} == {*module.__all__} - {"__version__"}


def test_public_names_of_the_contract() -> None:
    heads = ["LSSVMHead", "MarginHead", "attach", "AttachedClassifier", "FixedPoint", "Statistics"]
    machines = ["KernelLSSVM", "LagrangianSVM", "IncrementalSVM", "OneVsRest", "OneVsOne"]
    erasure = ["SampleStore", "Add", "Remove", "Relabel", "Replace", "Certificate", "verify"]
    errors = ["TorchLSSVMError", "NotFittedError", "RemovalError", "GridError", "VerificationError", "NumericalWarning"]
    assert {*heads, *machines, *erasure, *errors} <= {*torchlssvm.__all__}
