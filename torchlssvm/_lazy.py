"""Packages whose names are imported at their first use (PEP 562), so that a program loads only the modules it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Collection[str]], modules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: the package's ``__name__``.
        homes: a mapping from each module to the public names that it defines.
        modules: modules of the package that are available as attributes without an explicit import.
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    home_of |= {name: f"{package}.{name}" for name in modules}

    def get_attribute(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        module = import_module(home_of[name])
        value = module if name in modules else getattr(module, name)
        setattr(sys.modules[package], name, value)  # the next use does not come here
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return get_attribute, list_names
