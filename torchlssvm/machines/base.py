"""What kernel machines share: samples by id, saving, copying and moving."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks
from torchlssvm.functional.modes import exactly
from torchlssvm.kernels import Kernel, as_kernel
from torchlssvm.machines import batch
from torchlssvm.machines.rows import Rows

if TYPE_CHECKING:
    from typing_extensions import Self

SAVED = ("rows", "targets", "ids", "solution", "options")


class KernelMachine(nn.Module):
    """State and plumbing. A subclass has ``_engine`` (made by ``_make_engine``), ``_outputs`` and ``_options``.

    A machine keeps the samples themselves: its files hold them, and those removed are erased from it at once.
    """

    _engine: Any
    format = "torchlssvm-machine-1"

    def __init__(self, kernel: Kernel | Callable[[Tensor, Tensor], Tensor], C: float, outputs: int, device: Any):
        super().__init__()
        self.kernel = as_kernel(kernel)
        self._C, self._outputs = checks.positive(C, "C"), outputs
        self._device = torch.empty(0, device=device).device
        self._next_id = 0

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def C(self) -> float:
        """The penalty of an error; larger fits closer. Setting it costs a solve."""
        return self._C

    @C.setter
    def C(self, value: float) -> None:
        value, old = checks.positive(value, "C"), self._C
        self._C = self._engine.C = value
        try:
            self.refresh()
        except ValueError:  # singular to machine precision
            self._C = self._engine.C = old
            raise

    @property
    def device(self) -> torch.device:
        """Where the state lives."""
        return self._device

    @property
    def in_features(self) -> int | None:
        """J, the width of the rows held; None while there are none."""
        return self._rows.x.shape[1] if self._rows.filled else None

    @property
    def n(self) -> int:
        """The number of samples held."""
        return len(self._rows)

    @property
    def capacity(self) -> int:
        """The number of samples there is room for before tensors change their shape (a compiled forward recompiles then)."""
        return self._rows.capacity

    @property
    def ids(self) -> Tensor:
        """The ids held (n,), int64, in the order in which they were given out; on the host."""
        return self._rows.ids

    @property
    def _rows(self) -> Rows:
        return self._engine.rows  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self._rows)

    def predict(self, x: Tensor) -> Tensor:  # (B, J) -> (B,)
        """The class with the highest score."""
        scores: Tensor = self(x)
        return scores.argmax(1)

    def _fitted(self) -> None:
        if not self._rows.filled:
            raise NotFittedError(f"the {type(self).__name__} holds no samples: call add(x, y) first")

    def refresh(self) -> Self:
        """Solve anew from the samples held."""
        if len(self):
            with torch.inference_mode(False), torch.no_grad():
                self._engine.solve()
        return self

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def _make_engine(self, rows: Rows, settings: dict[str, Any] | None = None) -> Any:
        raise TypeError(f"{type(self).__name__} must define _make_engine")

    def _new_rows(self, J: int) -> Rows:
        rows = Rows(J, self._outputs, self._device)
        rows.next_id = self._next_id
        return rows

    def _check(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        rows = batch.samples(x, self.kernel, self.in_features, self._device)
        return rows, self._targets(y, rows)

    def _targets(self, y: Any, rows: Tensor) -> Tensor:
        return batch.targets(y, rows, self._outputs)

    def _check_relabel(self, ids: Any, y: Any) -> tuple[list[int], Tensor]:
        found = self._rows.find(ids)
        return found, self._targets(y, self._rows.x.new_empty(len(found), 0))

    def _moved(self) -> None:
        """Move what a subclass keeps beside its engine."""

    def _names(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64)

    def _settings(self) -> dict[str, Any]:
        return {"format": self.format, "machine": type(self).__name__, "C": self._C}

    def _restore(self, settings: dict[str, Any]) -> None:
        self._C = checks.positive(settings["C"], "C")

    def _solution(self) -> Tensor:
        """What is saved so that scores come back to the bit, in the order of ids first."""
        raise TypeError(f"{type(self).__name__} must define _solution")

    def _resume(self, solution: Tensor) -> None:
        raise TypeError(f"{type(self).__name__} must define _resume")

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device with the module; the state stays float64 whatever ``.half()`` asks for."""
        del recurse
        device = fn(torch.empty(0, device=self._device)).device
        if device != self._device:
            self.kernel.to(device)
            self._engine.to(device)
            self._device = device
            self._moved()
        return self

    @exactly
    def _saved(self) -> dict[str, Tensor]:
        self._engine.tidy()
        rows, order = self._rows, self._rows.order()
        settings = json.dumps(self._settings() | {"next_id": self._rows.next_id}, sort_keys=True)
        return {
            "rows": rows.x[order].clone(),
            "targets": rows.y[order].clone(),
            "ids": rows.ids,
            "solution": self._solution().clone(),
            "options": torch.frombuffer(bytearray(settings.encode()), dtype=torch.uint8),
        }

    @exactly
    def _load(self, state: dict[str, Tensor]) -> None:
        """Take over a saved state, whole; ValueError, and nothing changed, if it is not one."""
        settings = json.loads(bytes(state["options"].tolist()).decode())
        if not isinstance(settings, dict) or settings.get("format") != self.format:
            raise ValueError(f"not the state of a kernel machine ({self.format})")
        if settings["machine"] != type(self).__name__:
            raise ValueError(f"the state is that of a {settings['machine']}, this is a {type(self).__name__}")
        x, y, ids = state["rows"], state["targets"], state["ids"].tolist()
        if x.ndim != 2 or tuple(y.shape) != (len(x), self._outputs) or len(ids) != len(x) or sorted(set(ids)) != ids:
            raise ValueError(
                f"rows {tuple(x.shape)}, targets {tuple(y.shape)} and {len(ids)} ids do not fit each other and "
                f"{self._outputs} outputs"
            )
        if not checks.is_fake(x, y, state["solution"]):
            for name in ("rows", "targets", "solution"):
                if not bool(torch.isfinite(state[name]).all()):
                    raise ValueError(f"the saved {name} hold NaN or inf: the state is damaged")
        rows = Rows(x.shape[1], self._outputs, self._device)
        rows.grow(len(x))
        if len(x):
            x, y = (t.to(device=self._device, dtype=torch.float64) for t in (x, y))
            rows.put(x, y, list(range(len(x))), ids)
        rows.next_id = int(settings["next_id"])
        before = self.__dict__.copy()
        try:
            self._restore(settings)
            self._next_id = rows.next_id
            self._engine = self._make_engine(rows, settings)
            self._resume(state["solution"].to(device=self._device, dtype=torch.float64))
        except Exception:
            self.__dict__.update(before)
            raise

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + k: v for k, v in self._saved().items()})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        mine = {k: state_dict[prefix + k] for k in SAVED if prefix + k in state_dict}
        others = {k: v for k, v in state_dict.items() if k.removeprefix(prefix) not in SAVED}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing = [prefix + k for k in SAVED if k not in mine]
        missing_keys += missing
        if not missing:
            try:
                self._load(mine)
            except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
                error_msgs.append(f"{type(self).__name__}: {error}")

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: nothing of a removed sample is in there."""
        with torch.inference_mode(False), torch.no_grad():
            self._engine.tidy()
            return self.__dict__.copy()

    def extra_repr(self) -> str:
        """Count and penalty."""
        return f"n={self.n}, C={self._C:g}"
