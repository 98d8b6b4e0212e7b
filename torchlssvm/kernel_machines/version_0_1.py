"""Reading pickles of version 0.1.0, which name modules that are gone: ``torchlssvm.machines.lssvm`` and its neighbours.

Files of ``state_dict()`` name no module and need none of this. The parts of a machine of that version come back as plain
namespaces, of which only the samples are taken; the machine is then solved anew.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

from torch import Tensor

PICKLED_CLASSES = {"dual": ("Dual",), "inverse": ("Inverse",), "primal": ("Primal",), "rows": ("Rows",)}
"""Modules of version 0.1.0 and their classes that a pickled machine consists of."""

DROPPED_ATTRIBUTES = ("_alpha", "_seen", "_coefficients")
"""Attributes of a pickled LagrangianSVM that the machine no longer has: alpha is computed anew."""


def register(machines: dict[str, tuple[type, ...]]) -> None:
    """Make the module names of version 0.1.0 known to unpicklers. machines: the machines of each module."""
    for name in {**PICKLED_CLASSES, **machines}:
        module = ModuleType(f"torchlssvm.machines.{name}", "A module of version 0.1.0, for reading pickles.")
        for part in PICKLED_CLASSES.get(name, ()):
            setattr(module, part, SimpleNamespace)
        for machine in machines.get(name, ()):
            setattr(module, machine.__name__, machine)
        sys.modules.setdefault(module.__name__, module)


def samples(rows: SimpleNamespace) -> tuple[Tensor, Tensor, list[int]]:
    """Rows x (n, J), targets y (n, K) and ids (n,) of a pickled ``Rows``, in the order of ids."""
    slots = list(rows.slot_of.values())
    return rows.x[slots], rows.y[slots], list(rows.slot_of)
