"""Find and detach the last linear layer of a classifier."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import nn

# The usual names of the last layer, or of a wrapped model, in a model. A number may follow (``fc2``).
_LAST_LAYER_NAMES = re.compile(r"(fc|classifier|heads?|linear|last_linear|logits|output|out|model|net|module)_?\d*")
# Packages whose layers without parameters may follow the last layer of a Sequential, because they change scores, not features.
_DROPPED_LAYER_MODULES = ("torch.nn.modules.activation", "torch.nn.modules.dropout", "torch.nn.modules.flatten")


class TakenOff(nn.Identity):
    """Stands where the last layer was, so that the network can be attached a second time. It looks like an ``nn.Identity``."""

    def __init__(self, in_features: int):
        super().__init__()
        self.in_features = in_features

    def _get_name(self) -> str:
        return "Identity"


class LastLayer(NamedTuple):
    """The location of the last layer, the width of its input, and the layers that are replaced by nn.Identity."""

    path: str
    in_features: int
    replaced: tuple[str, ...] = ()
    timm: bool = False  # ``path`` is a model that takes off its own classifier

    def take_off(self, model: nn.Module) -> None:
        """Replace the layer by ``nn.Identity``."""
        if self.timm:
            model.get_submodule(self.path).reset_classifier(0)  # type: ignore[operator]
        for path in self.replaced:
            parent, _, name = path.rpartition(".")
            instead = TakenOff(self.in_features) if path == self.path else nn.Identity()
            setattr(model.get_submodule(parent), name, instead)


def named_layer(model: nn.Module, path: str) -> LastLayer:
    """The layer with this name, which must be an ``nn.Linear`` or a 1x1 convolution."""
    try:
        layer = model.get_submodule(path)
    except AttributeError:
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise ValueError(
            f"{type(model).__name__} has no layer {path!r}; its linear layers are {', '.join(linear[-8:]) or 'none'}"
        ) from None
    if isinstance(layer, nn.Linear):
        return LastLayer(path, layer.in_features, (path,))
    if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1):
        return LastLayer(path, layer.in_channels, (path,))
    raise ValueError(f"layer={path!r} is a {type(layer).__name__}; attach replaces an nn.Linear or a 1x1 convolution")


def find_last_layer(model: nn.Module) -> LastLayer | None:
    """Find the last linear layer of a classifier. Returns None if the structure of the model does not show which layer it is.

    The last layer is the end of a Sequential, the last child with parameters if it has one of the usual names, or the only
    ``nn.Linear`` if no layer with parameters follows it. If ``attach`` has already taken the layer off, the function finds the
    place where it was.
    """
    for name, module in model.named_modules():
        if isinstance(module, TakenOff):
            return LastLayer(name, module.in_features)
    found = _last_layer(model)
    if found is None:
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        with_state = [name for name, module in model.named_modules() if module._parameters or module._buffers]
        if len(linear) == 1 and linear[0] and with_state[-1] == linear[0]:
            found = named_layer(model, linear[0])
    return found


def _last_layer(module: nn.Module, path: str = "", pooled: bool = False) -> LastLayer | None:
    if isinstance(module, nn.Linear):
        return LastLayer(path, module.in_features, (path,) if path else ())
    if isinstance(module, nn.Conv2d):  # a 1x1 convolution and a mean over the image is a linear layer (SqueezeNet)
        return (
            LastLayer(path, module.in_channels, (path,)) if path and pooled and module.kernel_size == (1, 1) else None
        )
    if callable(getattr(module, "reset_classifier", None)) and isinstance(getattr(module, "num_features", None), int):
        return LastLayer(path, _timm_width(module), timm=True)
    prefix = f"{path}." if path else ""
    dropped: list[str] = []
    tail: tuple[str, nn.Module] | None = None
    if type(module).forward is nn.Sequential.forward:
        pooled = pooled or any(map(_pools, module.children()))
        for name, child in reversed(module._modules.items()):
            if child is None or _pools(child):
                continue
            if not _is_dropped(child):
                tail = (name, child)
                break
            dropped.append(prefix + name)
    else:
        children = [(n, c) for n, c in module.named_children() if next(c.parameters(), None) is not None]
        tail = children[-1] if children and _LAST_LAYER_NAMES.fullmatch(children[-1][0]) else None
    last = _last_layer(tail[1], prefix + tail[0], pooled) if tail else None
    return last._replace(replaced=(*last.replaced, *dropped)) if last else None


def _is_dropped(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):
        return all(map(_is_dropped, module))
    without_parameters = next(module.parameters(), None) is None
    return isinstance(module, nn.Identity) or (type(module).__module__ in _DROPPED_LAYER_MODULES and without_parameters)


def _pools(module: nn.Module) -> bool:
    return isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1))


def _timm_width(model: Any) -> int:
    """Return the width of the classifier's input, which may differ from ``num_features``, or of the features if it has none."""
    classifier = model.get_classifier() if hasattr(model, "get_classifier") else None
    layer = classifier[0] if isinstance(classifier, (tuple, list)) else classifier  # distilled models have two
    widths = [(layer, "in_features"), (layer, "in_channels"), (model, "head_hidden_size"), (model, "num_features")]
    return next(width for owner, name in widths if isinstance(width := getattr(owner, name, None), int))
