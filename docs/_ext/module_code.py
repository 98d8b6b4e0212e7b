"""``module-code``: the functions and classes of a module as code, to stand beside the module's own derivation."""

import ast
import importlib
import inspect
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx


class ModuleCode(Directive):
    """Show a module's definitions, without its docstring and imports; with names, only those."""

    required_arguments = 1
    optional_arguments = 20
    has_content = False
    option_spec: ClassVar[dict[str, object]] = {}

    def run(self) -> list[nodes.Node]:
        """Return the code as a literal block, under a line that opens and closes it."""
        name, *chosen = self.arguments
        source = inspect.getsource(importlib.import_module(name))
        lines = source.splitlines()
        parts = []
        for node in ast.parse(source).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or (chosen and node.name not in chosen):
                continue
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            parts.append("\n".join(lines[first - 1 : node.end_lineno]))
        path = name.replace(".", "/") + ".py"
        block = nodes.literal_block("", "\n\n\n".join(parts), language="python")
        opened = nodes.raw("", f"<details open><summary>The code: <code>{path}</code></summary>", format="html")
        return [opened, block, nodes.raw("", "</details>", format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("module-code", ModuleCode)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
