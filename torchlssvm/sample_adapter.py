"""One interface for removal: the caller names samples, and the adapter knows how the machine removes them.

Heads, statistics and deltas remove samples by value, ``remove(x, y)``. Kernel machines remove samples by the ids that ``add``
returned, ``remove(ids)``. :class:`SampleAdapter` controls both kinds by the caller's names. Corrections, sliding windows,
cross-validation, label audits, stores and the conformance suite therefore need only one implementation.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchlssvm.errors import RemovalError
from torchlssvm.functional.modes import all_or_nothing

__all__ = ["SampleAdapter"]

Names = Iterable[Hashable]


class SampleAdapter:
    """Adds, removes, relabels and replaces the samples of a machine under the caller's names.

    If the machine has ``ids``, or its ``add`` returns ids, samples are removed by id. Otherwise you have to pass x (B, ...)
    and y (B, ...) again, as they were added. Each call either completes, or raises an error and changes nothing.

    Args:
        machine: a head, ``Statistics``, a ``Delta``, a kernel machine, or anything with the same verbs.

    >>> from torchlssvm import KernelLSSVM, LSSVMHead
    >>> from torchlssvm.kernels import RBF
    >>> x, y = torch.randn(6, 4), torch.arange(6) % 2
    >>> for machine in (LSSVMHead(4, 2), KernelLSSVM(RBF(sigma=2.0))):
    ...     samples = SampleAdapter(machine)
    ...     samples.add("abcdef", x, y)
    ...     samples.remove("bd", x[[1, 3]], y[[1, 3]])
    ...     print(samples.by_ids, samples.count)
    False 4
    True 4
    """

    def __init__(self, machine: Any):
        self.machine = machine
        self.by_ids = hasattr(machine, "ids")
        self.ids: dict[Hashable, Any] = {}
        """The machine's id of each named sample; empty where the machine removes (x, y)."""

    @property
    def count(self) -> int:
        """Number of samples the machine holds, with or without a name; 0 if the machine does not report it."""
        for name in ("ids", "n"):
            value = getattr(self.machine, name, None)
            if value is not None:
                return int(value) if isinstance(value, int | float) else len(value)
        return len(self.machine) if hasattr(self.machine, "__len__") else 0

    def find(self, name: Hashable) -> Any:
        """Return the machine's id of a sample, or None.

        The name of a sample added directly to the machine is its id as text.
        """
        if name in self.ids or not (isinstance(name, str) and name.isdecimal()):
            return self.ids.get(name)
        number = int(name)
        return number if number in self.machine.ids.tolist() and number not in self.ids.values() else None

    def machine_ids(self, names: Names) -> Any:
        """Return the machine's ids of samples: an int64 tensor (B,), or a list if the ids are not numbers.

        Raises RemovalError for a name without an id.
        """
        names = listed(names)
        found = [self.find(name) for name in names]
        if None in found:
            raise RemovalError(f"no sample with the id {names[found.index(None)]!r} is held. Nothing was changed.")
        if not all(isinstance(i, int) for i in found):
            return found
        held = getattr(self.machine, "ids", None)
        device = held.device if isinstance(held, Tensor) else getattr(self.machine, "device", None)
        return torch.tensor(found, dtype=torch.int64, device=device)

    def add(self, names: Names, x: Tensor, y: Tensor) -> None:
        """Add samples under the caller's names."""
        self.exchange((names, x, y), None)

    def remove(self, names: Names, x: Tensor | None = None, y: Tensor | None = None) -> None:
        """Remove samples by the caller's names."""
        self.exchange(None, (names, x, y))

    def relabel(self, names: Names, labels: Tensor, x: Tensor | None = None, y: Tensor | None = None) -> None:
        """Change the labels of samples from y to ``labels`` (B, ...)."""
        if self.by_ids:
            self.machine.relabel(self.machine_ids(names), labels)
            return
        old_x, old_y, *extra = self._samples(names, x, y)
        self.machine.relabel(old_x, old_y, labels, *extra)

    def exchange(self, added: tuple[Any, ...] | None, removed: tuple[Any, ...] | None) -> None:
        """Add samples (names, x, y) and remove others as one change, in a single step if the machine has ``update``.

        ``removed`` may be (names,) for a machine that removes by ids.
        """
        new = None if added is None else self._samples(*added)
        old = None if removed is None else self._removal(*removed)
        given = None
        if new is not None and old is not None and callable(getattr(self.machine, "update", None)):
            given = self.machine.update(add=new, remove=old[0] if self.by_ids else old)
        else:
            if new is not None:
                given = self.machine.add(*new)

            def put_back() -> None:
                if new is not None:
                    self.machine.remove(*((given,) if self._are_ids(given) else new))

            with all_or_nothing(self.machine, put_back):
                if old is not None:
                    self.machine.remove(*old)
        if removed is not None and self.by_ids:
            for name in listed(removed[0]):
                self.ids.pop(name, None)
        if added is not None and self._are_ids(given):
            self.by_ids = True
            self.ids.update(zip(listed(added[0]), listed(given), strict=True))

    def clear(self) -> None:
        """Remove all samples from the machine, including those without a name."""
        if not self.by_ids:
            self.machine.clear()
        elif self.count:
            self.machine.remove(self.machine.ids.clone())
        self.ids.clear()

    def _are_ids(self, given: Any) -> bool:
        """True if the result of ``add`` consists of ids and is not the machine itself."""
        return given is not self.machine and (isinstance(given, Sequence) or hasattr(given, "tolist"))

    def _samples(self, names: Names, x: Tensor | None = None, y: Tensor | None = None) -> tuple[Any, ...]:
        """Arguments of ``add``: (x, y), and a weight of None and the names where the machine keeps sums per fold."""
        if x is None or y is None:
            raise ValueError(f"{type(self.machine).__name__} removes samples: give x and y as they were added")
        folds = getattr(getattr(self.machine, "statistics", self.machine), "folds", 0)
        return (x, y, None, listed(names)) if folds else (x, y)

    def _removal(self, names: Names, x: Tensor | None = None, y: Tensor | None = None) -> tuple[Any, ...]:
        """Arguments of ``remove``: (ids,) or those of ``add``."""
        return (self.machine_ids(names),) if self.by_ids else self._samples(names, x, y)


def listed(names: Any) -> list[Any]:
    """Names or ids as a list, tensors and arrays as Python numbers."""
    return list(names.tolist() if hasattr(names, "tolist") else names)
