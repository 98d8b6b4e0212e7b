"""What modules share that keep a float64 state of their own beside parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def device_after(fn: Callable[[Tensor], Tensor], device: torch.device) -> torch.device:
    """The device to which ``nn.Module._apply(fn)`` moves tensors. The state follows it, but keeps its dtype."""
    return fn(torch.empty(0, dtype=torch.float64, device=device)).device


def split_saved(
    state_dict: dict[str, Any], prefix: str, names: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The saved tensors of these names, without the prefix, and everything else, for ``nn.Module``."""
    mine = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
    others = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in names}
    return mine, others


def load_saved(
    module: Any, mine: dict[str, Any], prefix: str, names: tuple[str, ...], missing_keys: list[str], errors: list[str]
) -> None:
    """Call the ``_load`` of a module with its saved tensors, and append problems to torch's lists."""
    missing = [prefix + name for name in names if name not in mine]
    missing_keys += missing
    if missing:
        return
    try:
        module._load(mine)
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        errors.append(f"{type(module).__name__}: {error}")
