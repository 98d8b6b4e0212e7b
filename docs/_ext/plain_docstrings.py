"""Docstrings are plain text first: formulas are indented blocks, and |x|, a * b and x_ mean what they say.

This makes reStructuredText of them: an indented block becomes a literal block, signs that are no markup are escaped.
"""

import re

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

SETTINGS = Config(napoleon_numpy_docstring=False, napoleon_use_ivar=True)

SECTION = re.compile(r"(Args|Arguments|Attributes|Returns|Raises|Yields|Examples?|Notes?|Warnings?|References):\s*$")
ITEM = re.compile(r"\s*([-*]|\d+\.|\(\d+\)) ")
KEPT = re.compile(
    r"``.+?``"  # literals
    r"|:[\w:.-]+:`[^`]+`"  # roles
    r"|`[^`]+`_?"
    r"|\*\*[^*\s](?:[^*]*[^*\s])?\*\*"  # bold
    r"|(?<![\w*])\*[^*\s](?:[^*]*[^*\s])?\*(?![\w*])"  # emphasis
)
SIGNS = re.compile(r"[*|\\]|(?<=\w)_(?!\w)")


def escaped(line: str) -> str:
    """Return the line with signs escaped that would be taken for markup."""
    out, at = [], 0
    for kept in KEPT.finditer(line):
        out += [SIGNS.sub(r"\\\g<0>", line[at : kept.start()]), kept.group()]
        at = kept.end()
    return "".join([*out, SIGNS.sub(r"\\\g<0>", line[at:])])


def indent(line: str) -> int:
    """Return the number of spaces before the text."""
    return len(line) - len(line.lstrip())


def reworked(lines: list[str]) -> list[str]:
    """Return a docstring's lines as reStructuredText."""
    out: list[str] = []
    section = False  # between a Google section's head and the next unindented line
    literal = -1  # the indentation of the text before a literal block
    doctest = False
    for line in lines:
        text = line.strip()
        if not text:
            doctest = False
            out.append(line)
            continue
        depth = indent(line)
        if literal >= 0:
            if depth > literal:
                out.append(line)
                continue
            literal = -1
        if depth == 0:
            section = bool(SECTION.match(text))
        doctest = doctest or text.startswith(">>> ")
        if doctest or text.startswith(".. "):
            out.append(line)
            continue
        before = next((o for o in reversed(out) if o.strip()), "")
        opens = bool(out) and not out[-1].strip() and depth >= indent(before) + 4
        if opens and not section and before and not ITEM.match(before) and not before.lstrip().startswith(">>>"):
            literal = indent(before)
            while out and not out[-1].strip():
                out.pop()
            out += ["", " " * literal + "::", "", line]
            continue
        if section:  # several names of one description are one name for Sphinx
            line = re.sub(r"^( {4}\w+(?:, \w+)+)(?=:)", lambda names: names.group().replace(", ", ","), line)
        kept = line if section and depth == 0 else escaped(line)
        out.append(re.sub(r"(^ *|: )([A-Za-z])\.(?= |$)", r"\1\2\\.", kept))  # "K." alone would begin a list
        if text.endswith("::"):
            literal = depth
    return out


def rework(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Rework a docstring, then its Google sections. A colon in a property's first line does not end a type."""
    kind = "method" if what in ("property", "attribute", "data") else what
    lines[:] = GoogleDocstring(reworked(lines), SETTINGS, app, kind, name, obj, options).lines()


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the rework."""
    app.connect("autodoc-process-docstring", rework)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
