"""References to names that exist but have no page are shown without a link; names that do not exist stay warnings."""

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def found(name: str) -> bool:
    """Return True if the dotted name can be imported."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        try:
            for part in parts[end:]:
                value = getattr(value, part)
        except AttributeError:
            return ".".join(parts[end:]) in getattr(value, "__annotations__", {})
        return True
    return False


@cache
def sources() -> str:
    """Return the text of the whole package."""
    folder = Path(__file__).resolve().parents[2] / "torchlssvm"
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))


def imported(name: str) -> bool:
    """Return True if the package imports the name somewhere, perhaps for the type checker alone."""
    return name.isidentifier() and bool(re.search(rf"^ *from \S+ import .*\b{name}\b", sources(), re.MULTILINE))


def show_plainly(app: Sphinx, env: Any, node: Any, content: nodes.Element) -> nodes.Element | None:
    """Answer a reference that nothing else resolves."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].split("[")[0]
    module = node.get("py:module") or "torchlssvm"
    spaces = [module, f"{module}.{node.get('py:class')}", "typing", "builtins", *app.env.existing_modules]
    return (
        content if imported(target) or any(map(found, [target, *(f"{space}.{target}" for space in spaces)])) else None
    )


def skip_routing(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Leave out the set_..._request methods that scikit-learn makes."""
    return True if name.startswith("set_") and name.endswith("_request") else None


def note_module(app: Sphinx, what: str, name: str, obj: Any, options: object, lines: list[str]) -> None:
    """Keep the modules in which documented things are defined: their signatures use names from there."""
    app.env.existing_modules.add(getattr(obj, "__module__", None) or "torchlssvm")


def start(app: Sphinx) -> None:
    """Begin with the package alone."""
    app.env.existing_modules = {"torchlssvm", "torchlssvm.events", "torchlssvm.store"}


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the handlers."""
    app.connect("builder-inited", start)
    app.connect("missing-reference", show_plainly)
    app.connect("autodoc-skip-member", skip_routing)
    app.connect("autodoc-process-docstring", note_module)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
