"""Imports go down only: every module of the package stands in a layer and imports from below it."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "torchlssvm"
ROOT = Path(__file__).resolve().parents[1] / PACKAGE

# From the bottom up. A trailing slash marks a sub-package; "__init__" is torchlssvm/__init__.py, the public names.
# A module imports from the rows below its own; from its own row only within its package, where the single files of a
# row count as one package (store.py may use events.py; linear/ may not use kernel_machines/).
LAYERS = [
    ["errors", "_version", "_lazy", "untrusted", "files", "canonical_json", "wording", "progress_bar", "schema"],
    ["functional/"],
    ["statistics/", "backbone_hash", "kernels/", "sample_adapter"],
    ["features/"],
    ["backbones"],
    ["linear/", "kernel_machines/", "svm/"],
    ["distributed/", "export"],
    ["events"],
    ["audit/", "analysis/"],
    ["store/"],
    ["corrections/"],
    ["__init__"],
    ["lightning/", "sklearn/", "report/", "spark", "hub", "adapt"],
    ["demo"],
    ["cli/"],
    ["__main__", "testing/"],
]
LEVEL = {name.rstrip("/"): level for level, row in enumerate(LAYERS) for name in row}
SUBPACKAGES = {name.rstrip("/") for row in LAYERS for name in row if name.endswith("/")}
# The highest row that may be imported, where that is not simply "below one's own": nothing uses testing, hence the top
# row, and testing itself checks the machines, not what is built on them.
CEILING = {"testing": LEVEL["linear"]}
# The imports that go up, inside a function: `attach(..., store=)` and `verify(..., store=)` open the store at a path.
UPWARD = {
    ("torchlssvm.linear.attach", "torchlssvm.store.attached_samples"),
    ("torchlssvm.audit.verification", "torchlssvm.store"),
}


def module_name(path: Path) -> str:
    parts = (PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def component(module: str) -> str:
    """The entry of the table that a module falls under: torchlssvm.linear.head -> linear."""
    return [*module.split("."), "__init__"][1]


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node, at any depth, but for what stands under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            child = ast.Module(body=child.orelse, type_ignores=[])
        yield child
        yield from runtime_nodes(child)


def imported_modules(source: str, module: str, is_init: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import from the package itself; names imported from it may be modules or not."""
    for node in runtime_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_init]
                base = ".".join(parents + ([base] if base else []))
            # `from torchlssvm import x` is the module x if the table has one, else a public name of __init__.
            names = [f"{base}.{a.name}" if base == PACKAGE and a.name in LEVEL else base for a in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            arg = node.args[0]
            names = [arg.value] if isinstance(arg, ast.Constant) and isinstance(arg.value, str) else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_names":
            texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            names = [text for text in texts if text.startswith(f"{PACKAGE}.")]
            names += [
                f"{module}.{n.value}" for k in node.keywords for n in ast.walk(k.value) if isinstance(n, ast.Constant)
            ]
        else:
            continue
        ours = [name for name in names if name.split(".")[0] == PACKAGE and (module, name) not in UPWARD]
        yield from ((node.lineno, name) for name in ours)


def violations(source: str, module: str, is_init: bool = False) -> list[str]:
    """What is wrong with one module's imports; empty when nothing is."""
    here = component(module)
    if here not in LEVEL:
        return [f"{module} is in no layer: give {here!r} a place in LAYERS of tests/test_layering.py"]
    found = []
    for line, target in imported_modules(source, module, is_init):
        there = component(target)
        if there not in LEVEL:
            found.append(f"{module}:{line} imports {target}, which is in no layer")
            continue
        same_package = here == there or not {here, there} & SUBPACKAGES
        below = LEVEL[there] < LEVEL[here] or (LEVEL[there] == LEVEL[here] and same_package)
        if not below or (here != there and LEVEL[there] > CEILING.get(here, len(LAYERS))):
            found.append(f"{module}:{line} imports {target}, which is not below {here!r}")
    return found


MODULES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_down_only(path: Path) -> None:
    assert violations(path.read_text(encoding="utf-8"), module_name(path), path.stem == "__init__") == []


def test_the_table_marks_the_subpackages() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} <= SUBPACKAGES


def test_no_cycles_between_components() -> None:
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        here = component(module_name(path))
        imports = imported_modules(path.read_text(encoding="utf-8"), module_name(path), path.stem == "__init__")
        graph.setdefault(here, set()).update(component(target) for _, target in imports if component(target) != here)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("components import each other: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("functional.update", "from torchlssvm.linear import LSSVMHead"),
        ("functional.update", "from .. import heads"),
        ("functional.update", "import torchlssvm.statistics as s"),
        ("functional.update", "from torchlssvm import LSSVMHead"),
        ("statistics", "def f():\n    from .linear import LSSVMHead"),
        ("statistics", "import importlib\nimportlib.import_module('torchlssvm.store')"),
        ("linear.head", "from ..kernel_machines import KernelLSSVM"),
        ("linear.head", "if TYPE_CHECKING:\n    pass\nelse:\n    from ..store import SampleStore"),
        ("sklearn", "from .lightning import FitHead"),
        ("cli", "from .testing import check"),
        ("testing", "from .store import SampleStore"),
        ("testing", "from torchlssvm import LSSVMHead"),
        ("linear.head", "from ..store.attached_samples import AttachedSamples"),
        ("linear.head", "lazy_names(__name__, {'torchlssvm.store': ['SampleStore']})"),
        ("linear.head", "from ..nowhere import x"),
        ("nowhere", "import torch"),
    ],
)
def test_a_bad_import_is_found(module: str, source: str) -> None:
    assert len(violations(source, f"{PACKAGE}.{module}")) == 1


@pytest.mark.parametrize("target", ["lightning", "sklearn", "cli", "testing"])
def test_the_root_stays_below_the_glue(target: str) -> None:
    assert violations(f"def __getattr__(name):\n    from .{target} import x", PACKAGE, is_init=True)
    assert violations(f"lazy_names(__name__, {{}}, modules=['{target}'])", PACKAGE, is_init=True)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("functional.update", "import torch\nfrom torchlssvm.errors import RemovalError\nfrom .solve import solve"),
        ("linear.head", "if TYPE_CHECKING:\n    from ..store import SampleStore\nfrom ..statistics import Statistics"),
        ("audit", "from .events import Add"),
        ("lightning.module", "import lightning\nfrom torchlssvm import LSSVMHead\nfrom ..store import SampleStore"),
        ("testing.checks", "from . import harness\nfrom ..statistics import Statistics"),
        ("__main__", "from .cli import main"),
    ],
)
def test_a_good_import_is_not(module: str, source: str) -> None:
    assert violations(source, f"{PACKAGE}.{module}") == []


def test_packages_resolve_relative_imports_from_themselves() -> None:
    source = "from .head import LSSVMHead\nfrom ..errors import RemovalError"
    assert violations(source, f"{PACKAGE}.linear", is_init=True) == []
    assert violations("from .store import SampleStore", PACKAGE, is_init=True) == []


def test_the_map_names_every_module():
    """Rows are | folder/, folder/ | `module`, ... |; "(files)" is the package's own folder."""
    page = (ROOT.parent / "docs" / "modules.md").read_text()
    rows = [line.split("|")[1:3] for line in page.split("## Rooms")[1].split("\n## ")[0].splitlines() if "`" in line]
    modules = {(path.parent.relative_to(ROOT).as_posix(), path.stem) for path in ROOT.rglob("*.py")}
    left = {(room, name) for room, name in modules if name not in ("__init__", "__main__")}
    for cell, text in rows:
        rooms = re.findall(r"([\w/]+)/", cell) or ["."]
        for name in re.findall(r"`(\w+)`", text):
            found = {(room, name) for room in rooms} & modules
            assert found, f"{cell.strip()} has no module {name}"
            left -= found
    assert sorted(left) == []
