"""Features averaged over fixed transforms of each sample, such as a picture and its mirror image."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchlssvm.backbone_hash import describe

VIEWS: dict[str, Callable[[Any], Any]] = {"flip": lambda images: images.flip(-1)}
"""Fixed transforms by name: "flip" is the mirror image."""


class Views(nn.Module):
    """Average the features of a batch and of fixed transforms of it.

    A transform must be deterministic, treat each sample independently of the batch, and leave its input unchanged. These
    properties are tested on the first batches. A random augmentation, for example, raises a ValueError, because it would give
    a sample new features each time, and the sample could never be removed.

    Args:
        module: a module that computes features (B, J) of a batch.
        views: a list of ``"flip"`` (the mirror image) and callables that take a batch and return a batch.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten())
        >>> images = torch.randn(2, 3, 5, 5)
        >>> both = Views(network, ["flip"])(images)
        >>> torch.allclose(both, (network(images) + network(images.flip(-1))).double() / 2)
        True
    """

    takes_batches = True  # a dict of tensors goes in as it is

    def __init__(self, module: nn.Module, views: Sequence[str | Callable[[Any], Any]]):
        super().__init__()
        if isinstance(views, str) or not isinstance(views, Sequence):
            raise ValueError(f"views must be a list such as ['flip'], got {views!r}")
        for view in views:
            if not callable(view) and view not in VIEWS:
                raise ValueError(f"views must be callables or among {', '.join(VIEWS)}, got {view!r}")
        self.module, self.views = module, tuple(views)
        self.groups: dict[str, slice] = getattr(module, "groups", {})
        self._tried = False

    def forward(self, batch: Any) -> Tensor:
        """Compute features (B, J), float64, as the mean over the batch and its transforms."""
        values = tensor_of(run(self.module, batch)).to(torch.float64)
        for view in self.views:
            values = values + tensor_of(run(self.module, self._transformed(batch, view)))
        if not torch.compiler.is_compiling():  # the size of a batch is not known then
            self._tried = self._tried or not isinstance(batch, Tensor) or len(batch) > 1
        return values / (1 + len(self.views))

    def _transformed(self, batch: Any, view: str | Callable[[Any], Any]) -> Any:
        if isinstance(view, str):
            if not isinstance(batch, Tensor):
                raise ValueError(f"the view {view!r} is for images, got a batch of type {type(batch).__name__}")
            return VIEWS[view](batch)
        if self._tried or torch.compiler.is_compiling():
            return view(batch)
        given = batch.clone() if isinstance(batch, Tensor) else None
        before, other_state = _random_states(), torch.random.get_rng_state()
        moved = view(batch)
        random_view = before != _random_states() or not torch.equal(other_state, torch.random.get_rng_state())
        if random_view or not _same(moved, view(batch)):
            raise ValueError(
                f"the view {view!r} is random. Features that are drawn again each time differ from those that were learned, so "
                "the sample could not be removed. Give fixed transforms; or add augmented copies as rows of their own to a "
                "store, all under one subject: they leave together"
            )
        if given is not None and not torch.equal(given, batch):
            batch.copy_(given)
            raise ValueError(f"the view {view!r} changes its input in place. Let it work on a copy, images.clone()")
        if given is not None and (len(moved) != len(batch) or not torch.equal(view(batch[:1]), moved[:1])):
            raise ValueError(
                f"the view {view!r} depends on the other samples of a batch, so that a sample would have other features beside "
                "other samples. Give a transform of each sample by itself"
            )
        return moved

    def check_described(self) -> None:
        """Raise ValueError if a store could not recognise one of the transforms in another process."""
        for view in self.views:
            if not isinstance(view, str):
                describe(view)

    def extra_repr(self) -> str:
        """The transforms by name."""
        return f"views={[view_name(view) for view in self.views]}"


def view_name(view: str | Callable[[Any], Any]) -> str:
    """Return a name that is the same in each process: the description of a callable, otherwise its name or that of its type."""
    if isinstance(view, str):
        return view
    try:
        return describe(view)
    except ValueError:  # fingerprint refuses it for a store
        return str(getattr(view, "__qualname__", type(view).__qualname__))


def run(module: nn.Module, batch: Any) -> Any:
    """Call a module with a batch, which is a tensor or a dict of arguments."""
    if isinstance(batch, Mapping) and not getattr(module, "takes_batches", False):
        return module(**batch)
    return module(batch)


def tensor_of(output: Any, width: int | None = None) -> Tensor:
    """Find the features in a network's output: a tensor, or the only tensor (B, J) of a dict. Raises ValueError otherwise."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        flat = {name: v for name, v in output.items() if isinstance(v, Tensor) and v.ndim == 2}
        fit = {name: v for name, v in flat.items() if width in (None, v.shape[1])}
        if len(fit) == 1:
            return next(iter(fit.values()))
        shapes = {name: tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for name, v in output.items()}
        raise ValueError(f"the network returns a dict with {shapes}: name the features, attach(..., output='name')")
    raise ValueError(
        f"the network must return a tensor of features (B, {width or 'J'}), it returned a {type(output).__name__}"
    )


class OutputKey(nn.Module):
    """One entry of the dict that a network returns."""

    takes_batches = True

    def __init__(self, module: nn.Module, key: str):
        super().__init__()
        self.module, self.key = module, key

    def forward(self, batch: Any) -> Tensor:
        """The entry of that name."""
        output = run(self.module, batch)
        if not isinstance(output, Mapping) or not isinstance(output.get(self.key), Tensor):
            names = sorted(output) if isinstance(output, Mapping) else type(output).__name__
            raise ValueError(f"the network returns no tensor under {self.key!r}; it returns {names}")
        value: Tensor = output[self.key]
        return value

    def extra_repr(self) -> str:
        """The name of the entry."""
        return repr(self.key)


class Columns(nn.Module):
    """Some columns of the features that a module computes. columns: (k,) numbers."""

    takes_batches = True
    columns: Tensor

    def __init__(self, module: nn.Module, columns: Tensor):
        super().__init__()
        self.module = module
        self.register_buffer("columns", columns)

    def forward(self, batch: Any) -> Tensor:
        """Features (B, k), in the order of the columns."""
        return tensor_of(run(self.module, batch)).flatten(1)[:, self.columns]

    def extra_repr(self) -> str:
        """The number of columns; the module's state has the columns."""
        return f"out_features={len(self.columns)}"


def _random_states() -> tuple[Any, Any]:
    """States of Python's and numpy's generators, in a form that can be compared."""
    state: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    name, keys, *rest = state
    return random.getstate(), (name, keys.tobytes(), *rest)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping):
        return all(_same(value, b[name]) for name, value in a.items())
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
