"""How :class:`IncrementalSVM` is saved, copied and moved: checkpoints hold tensors only, and fit a machine of any size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional.modes import exactly
from torchlssvm.machines.incremental_base import SVMBase

SAVED = ("x", "y", "weight", "u", "alpha", "sign", "slack", "ids", "margin", "R", "C", "numbers", "dropped")
"""What a checkpoint holds: per sample (in the order of positions), the margin vectors' positions and R, and numbers: b, next
id, whether reserve vectors were forgotten, whether the kernel is precomputed, events."""


class Saving(SVMBase):
    """State dicts, pickling, deepcopy, devices."""

    def _state(self) -> dict[str, Tensor]:
        s, m = self._engine.samples, self._engine.margin
        n, slots = s.n, list(m.slot.values())
        used = torch.tensor([0, *slots], device=self.device)
        state = {name: getattr(s, name).clone() for name in ("y", "weight", "u", "alpha", "sign", "slack")}
        state["x"] = s.x[:n, : n if s.precomputed else None].clone()
        state["ids"] = self._id_tensor(s.ids)
        state["margin"] = self._id_tensor(list(m.slot))
        state["R"] = m.R[used][:, used].clone()
        state["C"] = torch.tensor(self._C, dtype=torch.float64, device=self.device)
        state["dropped"] = self._id_tensor(sorted(self._dropped))
        numbers = [
            self.b,
            self._engine.next_id,
            self.inexact,
            s.precomputed,
            self._engine.walker.events,
        ]
        state["numbers"] = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        return state

    def _take_state(self, state: dict[str, Tensor], device: torch.device) -> None:
        def to(name: str) -> Tensor:
            value = state[name]
            return value.to(device) if not value.is_floating_point() else value.to(device, torch.float64)

        b, next_id, inexact, precomputed, events = state["numbers"].tolist()
        if bool(precomputed) != (self.kernel is None):
            raise ValueError("the checkpoint and the machine differ: one of them has precomputed kernel values")
        self._start(device)
        engine = self._engine
        s, m = engine.samples, engine.margin
        ids = state["ids"].tolist()
        vectors = {name: to(name) for name in ("y", "weight", "u", "alpha", "sign", "slack")}
        if ids:
            s.append(to("x"), ids, **vectors)
            m.fit_capacity()
        inside = to("margin")
        m.ha[0] = b
        if not m.build(inside, s.alpha[inside], b) and len(inside):
            engine.restore({"n": s.n, "vectors": s.snapshot(s.n), "slots": [], "b": b})
            engine.resolve()
        elif len(inside):
            k = m.top
            m.R[:k, :k] = to("R")
        m.ha[0] = b
        low, high = state["C"].tolist()
        self._C = (low, high)
        engine.next_id, self.inexact = int(next_id), bool(inexact)
        self._dropped = set(state["dropped"].tolist())
        engine.walker.events = int(events)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: value for name, value in self._state().items()})

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        present = [name for name in SAVED if prefix + name in state_dict]
        if present and len(present) < len(SAVED):
            errors.append(
                f"{prefix[:-1] or 'IncrementalSVM'}: the checkpoint lacks {sorted(set(SAVED) - set(present))}"
            )
        elif not present:
            missing.extend(prefix + name for name in SAVED)
        else:
            self._pending = {name: state_dict[prefix + name] for name in SAVED}
            if self.kernel is not None and prefix + "kernel._extra_state" in state_dict and not self.kernel.deep:
                self.kernel.set_extra_state(state_dict[prefix + "kernel._extra_state"])
            with torch.inference_mode(False), torch.no_grad():
                self._take_state(self._pending, self.device)
            del self._pending
        own = {k: v for k, v in state_dict.items() if k not in {prefix + name for name in SAVED}}
        super()._load_from_state_dict(own, prefix, metadata, strict, missing, unexpected, errors)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_engine"] = self._state() if self.n else None
        state["_support"], state["_next_id"] = None, self._engine.next_id
        return state

    @exactly
    def __setstate__(self, state: dict[str, Any]) -> None:
        saved, next_id = state.pop("_engine"), state.pop("_next_id")
        kept = {name: state[name] for name in ("_dropped", "inexact", "trajectory")}
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if saved is None:
            self._start(self.device)
        else:
            self._take_state(saved, self.device)
        self.__dict__.update(kept)
        self._engine.next_id = next_id

    def _apply(self, fn: Any, recurse: bool = True) -> SVMBase:
        """Devices move, the precision stays."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = fn(torch.empty(0, dtype=torch.float64, device=self.device)).device
        if device != self.device:
            self._take_state(self._state(), device)
        return self
