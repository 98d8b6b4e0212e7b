"""HTML from the templates of this package. This module needs jinja2 (extra ``report``)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torchlssvm._version import __version__
from torchlssvm.errors import TorchLSSVMError
from torchlssvm.wording import counted


def render(template: str, **values: Any) -> str:
    """Fill in a template. All inserted values are escaped."""
    try:
        import jinja2
    except ImportError:
        raise TorchLSSVMError("pages need the package jinja2: pip install 'torchlssvm[report]'") from None
    folder = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    pages = jinja2.Environment(
        loader=folder, autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    pages.filters |= {"when": when, "counted": counted, "percent": percent, "signed": signed}
    return pages.get_template(template).render(version=__version__, **values)


def percent(value: Any, digits: int = 1) -> str:
    """Format a share as a percentage."""
    return "–" if math.isnan(value) else f"{100 * float(value):.{digits}f}%"


def signed(value: Any, form: str) -> str:
    """Format a number with a real minus sign."""
    return "–" if math.isnan(value) else f"{float(value):{form}}".replace("-", "\N{MINUS SIGN}")


def when(time: str) -> str:
    """Format a time of the journal for readers."""
    return f"{time[:10]} at {time[11:16]} UTC"
