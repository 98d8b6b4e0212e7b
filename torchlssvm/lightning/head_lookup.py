"""Helpers of the callbacks: find the head of a LightningModule and its features, freeze it, log metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from torchlssvm.lightning import ranks
from torchlssvm.linear.attach import AttachedClassifier


def find_head(module: LightningModule, path: str) -> Any:
    """Find the head or kernel machine at a dotted path. If a classifier made by ``attach`` is there, return its head."""
    found = find_part(module, path, "where its head is, e.g. head='classifier.head'")
    found = found.head if isinstance(found, AttachedClassifier) else found
    if not all(callable(getattr(found, verb, None)) for verb in ("add", "remove")):
        raise ValueError(f"{type(module).__name__}.{path} is no head: a {type(found).__name__} cannot add and remove")
    return found


def find_features(module: LightningModule, features: str | Callable[[Any], Tensor] | None) -> Callable[[Any], Tensor]:
    """Find the function that computes features (B, J): a function, the name of a method or sub-module, or ``attach``'s own."""
    if callable(features) and not isinstance(features, str):
        return features
    own = getattr(module, "classifier", None)
    if features is None and isinstance(own, AttachedClassifier):
        return own.features
    found: Callable[[Any], Tensor] = find_part(module, features or "backbone", "what makes features, features=...")
    return found


def find_part(module: LightningModule, path: str, remedy: str) -> Any:
    """Find an attribute of a module by its dotted path."""
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError:
        raise ValueError(f"{type(module).__name__} has no {path!r}: say {remedy}") from None


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Put a module temporarily in eval mode without gradients. The mode of each part is restored afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def log_metrics(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Log to every logger from the first rank, even where ``self.log`` is not allowed."""
    if ranks.is_first():
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)


def check_interval(value: Any, name: str) -> int:
    """Check a number of batches or epochs: an int >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an int >= 1, got {value!r}")
    return value
