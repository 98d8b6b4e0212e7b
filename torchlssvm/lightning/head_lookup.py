"""Helpers of the callbacks: find the head of a LightningModule and its features, freeze it, log metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from torchlssvm.lightning import ranks
from torchlssvm.linear.attach import AttachedClassifier


def find_head(module: LightningModule, path: str) -> Any:
    """Find the head, or kernel machine, at a dotted path; the head of what ``attach`` made, if that is there."""
    try:
        found = reduce(getattr, path.split("."), module)
    except AttributeError:
        raise ValueError(
            f"{type(module).__name__} has no {path!r}: say where its head is, e.g. head='classifier.head'"
        ) from None
    found = found.head if isinstance(found, AttachedClassifier) else found
    if not all(callable(getattr(found, verb, None)) for verb in ("add", "remove")):
        raise ValueError(f"{type(module).__name__}.{path} is no head: a {type(found).__name__} cannot add and remove")
    return found


def find_features(module: LightningModule, features: str | Callable[[Any], Tensor] | None) -> Callable[[Any], Tensor]:
    """Find what makes features (B, J) of inputs: a function, the name of a method or sub-module, or ``attach``'s own."""
    if callable(features) and not isinstance(features, str):
        return features
    own = getattr(module, "classifier", None)
    if features is None and isinstance(own, AttachedClassifier):
        return own.features
    name = features or "backbone"
    try:
        found: Any = reduce(getattr, name.split("."), module)
    except AttributeError:
        raise ValueError(
            f"{type(module).__name__} has no {name!r}: say what makes features of inputs, features=..."
        ) from None
    return found  # type: ignore[no-any-return]


class Frozen:
    """A module in eval mode without gradients for a while; the mode of each part is put back."""

    def __init__(self, module: nn.Module):
        self.modes = [(part, part.training) for part in module.modules()]
        self.no_grad = torch.no_grad()

    def __enter__(self) -> None:
        for part, _ in self.modes:
            part.training = False
        self.no_grad.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.no_grad.__exit__(*error)
        for part, mode in self.modes:
            part.training = mode


def log_metrics(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Log to every logger, from the first rank; also where ``self.log`` is not allowed."""
    if ranks.is_first():
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)


def check_interval(value: Any, name: str) -> int:
    """Check a number of batches or epochs: an int >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an int >= 1, got {value!r}")
    return value
