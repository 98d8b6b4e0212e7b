"""Sphinx settings of the documentation. The build opens no connection.

.venv/bin/sphinx-build -W -n -b html docs docs/_build/html && .venv/bin/python docs/check_site.py docs/_build/html
"""

import socket
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_ext")]

import inventories  # noqa: E402
from docutils import nodes  # noqa: E402

from torchlssvm import __version__  # noqa: E402

connect = socket.socket.connect


def connect_to_this_machine(self: socket.socket, address: Any) -> None:
    """Refuse connections to other machines: the build needs none."""
    if isinstance(address, tuple) and address[0] not in ("localhost", "127.0.0.1", "::1"):
        raise ConnectionError(f"the documentation is built without a connection; something wanted {address[0]}")
    connect(self, address)


socket.socket.connect = connect_to_this_machine  # type: ignore[method-assign, assignment]

project = "torchlssvm"
author = "torchlssvm contributors"
copyright = "torchlssvm contributors, MIT licence"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "plain_docstrings",
    "existing_names",
    "module_code",
    "mathml",
]
exclude_patterns = ["_build"]
highlight_language = "none"  # formulas in docstrings
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r".*\b_[A-Za-z]\w*"),  # private types in a signature
    ("py:class", r"(T|P|R|optional|np\..*)"),  # type variables
]
suppress_warnings = [
    "toc.not_included",  # a page may be found by links alone
]

# Markdown
myst_enable_extensions = ["deflist", "colon_fence", "dollarmath"]
myst_heading_anchors = 3

# Docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
maximum_signature_line_length = 96
add_module_names = False

# Names of other libraries, from inventories of just what is named here
intersphinx_mapping = inventories.mapping(DOCS / "inventories", DOCS / "_build" / "inventories")

# Pages
html_theme = "furo"
html_title = f"torchlssvm {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"sidebar_hide_name": False, "navigation_with_keys": False}


def trim_blocks(app: Any, doctree: Any) -> None:
    """Leave out the empty line with which an example ends in Markdown, where the tests need it."""
    for block in list(doctree.findall(nodes.literal_block)):
        trimmed = nodes.literal_block(block.astext().rstrip(), block.astext().rstrip(), **block.attributes)
        if trimmed.rawsource != block.rawsource:
            block.replace_self(trimmed)


def setup(app: Any) -> None:
    """Connect what is defined here."""
    app.connect("doctree-read", trim_blocks)
