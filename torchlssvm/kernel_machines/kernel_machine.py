"""The parts that kernel machines share: samples by id, saving, copying and moving."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks
from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes
from torchlssvm.functional.modes import all_or_nothing, atomically, exactly
from torchlssvm.functional.module_state import device_after, load_saved, split_saved
from torchlssvm.kernel_machines.inverse import SOLVE_BYTES, KernelInverse
from torchlssvm.kernel_machines.sample_slots import SMALLEST_CAPACITY, SampleSlots
from torchlssvm.kernels import Kernel, as_kernel, input_checks

FORMAT = 1
"""Number of the format of a saved machine."""

SAVED_TENSORS = ("rows", "targets", "ids", "solution", "options")
"""The names of the tensors of a saved machine."""


class KernelMachine(nn.Module):
    """The base of :class:`KernelLSSVM` and :class:`LagrangianSVM`: samples by id, and the inverse of their kernel matrix.

    A machine keeps the samples themselves, so its files contain them. Removed samples are erased from the machine at once.
    """

    _solver: KernelInverse
    _bias: Any
    _carried = 0  # numbers that the machine keeps beside each sample
    _offset = 0.0  # constant added to the kernel

    def __init__(self, kernel: Kernel | Callable[[Tensor, Tensor], Tensor], C: Any, outputs: int, device: Any):
        super().__init__()
        self.kernel = as_kernel(kernel)
        self._outputs = outputs
        self._device = torch.empty(0, device=device).device
        self._C = self._check_C(C)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def C(self) -> Any:
        """The penalty of an error, a number or a tuple with one penalty per class. A larger penalty gives a closer fit."""
        return self._C if isinstance(self._C, float) else tuple(self._C.tolist())

    @property
    def device(self) -> torch.device:
        """The device of the state."""
        return self._device

    @property
    def in_features(self) -> int | None:
        """J, the width of the machine's rows; None while it has no samples."""
        return self._slots.x.shape[1] if self._slots.filled else None

    @property
    def n(self) -> int:
        """The number of samples in the machine."""
        return len(self._slots)

    @property
    def capacity(self) -> int:
        """The number of samples that fit before tensors change shape and a compiled forward recompiles."""
        return self._slots.capacity

    @property
    def ids(self) -> Tensor:
        """The ids of the machine's samples (n,), int64, in the order in which they were assigned; on the host."""
        return self._slots.ids

    @property
    def _slots(self) -> SampleSlots:
        return self._solver.slots

    def __len__(self) -> int:
        return len(self._slots)

    def predict(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """Return the class with the highest score (B,). Raises ValueError if a row contains NaN."""
        return checks.finite_scores(self(x)).argmax(1)

    def planned_bytes(self, n: int, J: int) -> int:
        """Estimate the peak memory, in bytes, of a solve with n samples of width J and of the updates after it.

        A solve needs the kernel matrix and its factor. The first updates compute the inverse, with room for up to 2 n samples.
        """
        room = max(SMALLEST_CAPACITY, 1 << (n - 1).bit_length())
        return 8 * room * J + max(SOLVE_BYTES * n**2, 8 * n**2 + 8 * room**2)

    def _fitted(self) -> None:
        if not self._slots.filled:
            raise NotFittedError(f"the {type(self).__name__} holds no samples: call add(x, y) first")

    # -- changing ------------------------------------------------------------------------------------------------------

    @atomically
    def add(self, x: Any, y: Any) -> Tensor:
        """Learn samples x (B, J) with labels y (B,), or targets (B, K) if the machine accepts them; return their ids (B,)."""
        return self._names(self._change([], *self._check(x, y)))

    @atomically
    def remove(self, ids: Any) -> Self:
        """Unlearn samples by id."""
        self._change(self._slots.find(ids), *self._slots.nothing)
        return self

    @atomically
    def update(self, add: tuple[Any, Any] | None = None, remove: Any = None) -> Tensor:
        """Add samples (x, y) and remove others by id in one step; return the ids of the added samples."""
        new = self._slots.nothing if add is None else self._check(*add)
        return self._names(self._change([] if remove is None else self._slots.find(remove), *new))

    @atomically
    def replace(self, ids: Any, x: Any, y: Any) -> Self:
        """Replace the samples that have these ids. The ids stay the same."""
        found = self._slots.find(ids)
        rows, targets = self._check(x, y)
        if rows.shape[0] != len(found):
            raise ValueError(f"x has {rows.shape[0]} rows for {len(found)} ids")
        before = self._slots.next_id
        new = self._change(found, rows, targets)
        self._slots.rename(new, found)
        self._slots.next_id = before
        return self

    @atomically
    def relabel(self, ids: Any, y: Any) -> Self:
        """Change the labels (or targets) of samples. The inverse changes only if C differs by class."""
        found = self._slots.find(ids)
        targets = self._targets(y, self._slots.x.new_empty(len(found), 0))
        if found:
            self._solver.retarget(found, targets)
        return self

    @atomically
    def set_C(self, C: Any) -> Self:
        """Change the penalty, which costs a solve. If the solve fails, nothing changes."""
        with all_or_nothing(self):
            self._C = self._check_C(C)
            self._solver = self._solver.copy(self.kernel)
            self._solver.set_C(self._C)
            self.refresh()
        return self

    @atomically
    def compute_inverse(self) -> Self:
        """Compute the inverse now, so that later updates run at full speed. After a bulk change this takes n^3 flops.

        Scores do not change.
        """
        self._solver.compute_inverse()
        return self

    @atomically
    def refresh(self) -> Self:
        """Solve again from the machine's samples."""
        if len(self):
            self._solver.solve()
        return self

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def _clear(self, J: int, next_id: int = 0) -> None:
        self._solver = KernelInverse(self.kernel, self._new_slots(J, next_id), self._C, self._offset)

    def _new_slots(self, J: int, next_id: int = 0) -> SampleSlots:
        return SampleSlots(J, self._outputs, self._device, self._carried, next_id)

    def _change(self, removed: list[int], x: Tensor, y: Tensor) -> list[int]:
        """Remove samples by id and add prepared rows x (k, J) with targets y (k, K); returns the ids of the added samples."""
        if not removed and not x.shape[0]:
            return []
        slots = self._slots
        if not slots.filled and slots.x.shape[1] != x.shape[1]:
            self._clear(x.shape[1], slots.next_id)
        out = self._solver.change(removed, x, y)
        if not self._slots.filled:
            self._clear(0, self._slots.next_id)
        return out

    def _check(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        rows = input_checks.samples(x, self.kernel, self.in_features, self._device)
        return self._prepare(rows), self._targets(y, rows)

    def _prepare(self, rows: Tensor) -> Tensor:
        """Rows as they are kept."""
        return rows

    def _targets(self, y: Any, rows: Tensor) -> Tensor:
        return input_checks.targets(y, rows, self._outputs)

    def _check_C(self, C: Any) -> float | Tensor:
        return checks.positive(C, "C")

    def _names(self, ids: list[int]) -> Tensor:
        return torch.arange(ids[0], ids[-1] + 1) if ids else torch.zeros(0, dtype=torch.int64)  # given out in turn

    def _settings(self) -> dict[str, Any]:
        kernel = type(self.kernel).__name__
        return {"format": FORMAT, "machine": type(self).__name__, "kernel": kernel, "C": self.C, "bias": self._bias}

    def _restore(self, settings: dict[str, Any]) -> None:
        if settings["bias"] != self._bias:
            raise ValueError(f"bias is {settings['bias']!r} in the saved machine and {self._bias!r} here")
        self._C = self._check_C(settings["C"])

    def _solution(self) -> Tensor:
        """Return the solution to save (n, m), in the order of ids. It restores scores to the bit."""
        return self._solver.h[self._slots.order()]

    def _resume(self, solution: Tensor) -> None:
        self._solver.h[self._slots.order()] = solution

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device with the module. The state stays float64, even after ``.half()``."""
        del recurse
        device = device_after(fn, self._device)
        if device != self._device:
            self.kernel.to(device)
            self._solver.to(device)
            self._device = device
        return self

    @exactly
    def _saved(self) -> dict[str, Tensor]:
        solution = self._solution().clone()  # first: it may close gaps
        slots, order = self._slots, self._slots.order()
        settings = json.dumps(self._settings() | {"next_id": self._slots.next_id}, sort_keys=True)
        return {
            "rows": slots.x[order],
            "targets": slots.y[order],
            "ids": slots.ids,
            "solution": solution,
            "options": bytes_to_tensor(settings.encode()),
        }

    @atomically
    def _load(self, state: dict[str, Tensor]) -> None:
        """Restore a saved state. If it is not valid, raise ValueError and change nothing."""
        settings = json.loads(tensor_to_bytes(state["options"]).decode())
        if not isinstance(settings, dict) or settings.get("format") != FORMAT:
            raise ValueError(f"not the state of a kernel machine in format {FORMAT}")
        if settings["machine"] != type(self).__name__:
            raise ValueError(f"the state is that of a {settings['machine']}, this is a {type(self).__name__}")
        kernel = type(self.kernel).__name__
        if settings["kernel"] != kernel:
            raise ValueError(
                f"the state belongs to a machine with the kernel {settings['kernel']}, but this one has {kernel}"
            )
        x, y, ids = state["rows"], state["targets"], state["ids"].tolist()
        if x.ndim != 2 or tuple(y.shape) != (len(x), self._outputs) or len(ids) != len(x) or sorted(set(ids)) != ids:
            raise ValueError(
                f"rows {tuple(x.shape)}, targets {tuple(y.shape)} and {len(ids)} ids do not fit each other and "
                f"{self._outputs} outputs"
            )
        for name in ("rows", "targets", "solution"):
            if not bool(torch.isfinite(state[name]).all()):
                raise ValueError(f"the saved {name} hold NaN or inf: the state is damaged")
        wanted = (len(x), self._outputs + 1 + self._carried)
        if state["solution"].shape != wanted:
            raise ValueError(f"solution has shape {tuple(state['solution'].shape)}, needed {wanted}")
        x, y, solution = (t.to(device=self._device, dtype=torch.float64) for t in (x, y, state["solution"]))
        with all_or_nothing(self):
            self._restore(settings)
            slots = self._new_slots(x.shape[1])
            slots.load(x, y, ids, int(settings["next_id"]))
            self._solver = KernelInverse(self.kernel, slots, self._C, self._offset)
            self._resume(solution)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + k: v for k, v in self._saved().items()})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        mine, others = split_saved(state_dict, prefix, SAVED_TENSORS)
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        load_saved(self, mine, prefix, SAVED_TENSORS, missing_keys, error_msgs)

    def __getstate__(self) -> dict[str, Any]:
        """Return the module without its solver, and the state as tensors, so that pickles do not depend on solver classes."""
        state = {name: value for name, value in self.__dict__.items() if name != "_solver"}
        return state | {"_saved_state": self._saved()}

    @exactly
    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        saved = state.pop("_saved_state")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._load(saved)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent machine with everything computed so far."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__ = {k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "_solver"}
        other._solver = self._solver.copy(other.kernel)
        return other

    def extra_repr(self) -> str:
        """Describe the machine by its number of samples and its penalty."""
        return f"n={self.n}, C={self._C:g}" if isinstance(self._C, float) else f"n={self.n}, C={self.C}"
