"""Networks of torchvision and timm by name, with published weights or weights from a file."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchlssvm.features.last_layer import find_last_layer
from torchlssvm.untrusted import check_regular, load_tensors

__all__ = ["AUTO", "build", "load_pt", "preprocessing"]

log = logging.getLogger("torchlssvm.backbones")

AUTO, TIMM_PREFIX = "auto", "timm/"

FROM_FILE = "Give a file with its state_dict: weights=FILE (on the command line --weights FILE)"
"""Way out where weights cannot be downloaded."""


def build(name: str, weights: str | None = None) -> nn.Module:
    """Build a network including its last layer, e.g. ``mobilenet_v2`` of torchvision or ``timm/resnet18`` of timm.

    ``weights`` may be None (random), a member of torchvision's enum (``DEFAULT``, ``IMAGENET1K_V1``), ``pretrained`` for timm,
    or a file with a state_dict. If the last layer is missing in the file, or is for other classes, it stays random. ``"auto"``
    takes weights/<name>_imagenet.pt in the folder that TORCHLSSVM_DATA names, otherwise the published weights. If neither is
    available, it issues a warning and uses random weights.
    """
    if weights == AUTO:
        return _best(name)
    file = weights is not None and (Path(weights).suffix in (".pt", ".pth", ".bin") or Path(weights).exists())
    try:
        model = _timm(name, weights, file) if name.startswith(TIMM_PREFIX) else _torchvision(name, weights, file)
    except (OSError, RuntimeError) as error:  # no network, or the download does not have its hash
        raise OSError(f"the weights of {name} cannot be loaded: {error}. {FROM_FILE}") from error
    if file:
        _read(model, name, Path(str(weights)))
    return model


def preprocessing(name: str) -> Any:
    """Return torchvision's preprocessing of images for this network."""
    return _weights_of(name).DEFAULT.transforms()


def _weights_of(name: str) -> Any:
    from torchvision import models

    if name not in models.list_models(module=models):
        raise ValueError(
            f"torchvision has no classifier {name!r}; it has e.g. mobilenet_v2, resnet18, squeezenet1_1. With LSSVMModule, a "
            "model of timm is 'timm/<name>', and 'identity' takes data that are features"
        )
    return models.get_model_weights(name)


def _torchvision(name: str, weights: str | None, file: bool) -> nn.Module:
    from torchvision import models

    enum = _weights_of(name)
    if weights is not None and not file and weights != "DEFAULT" and weights not in enum.__members__:
        allowed = ", ".join(["DEFAULT", *enum.__members__])
        raise ValueError(f"{name} has no weights {weights!r}: give one of {allowed}, a file, or None")
    model: nn.Module = models.get_model(name, weights=None if file or weights is None else enum[weights])
    return model


def _timm(name: str, weights: str | None, file: bool) -> nn.Module:
    import timm

    if weights not in (None, "pretrained") and not file:
        raise ValueError(f"weights of a timm model are 'pretrained', a file or None; got {weights!r}")
    model: nn.Module = timm.create_model(name.removeprefix(TIMM_PREFIX), pretrained=weights == "pretrained")
    return model


def _read(model: nn.Module, name: str, path: Path) -> None:
    """Read the weights of all layers except the last one, which is replaced anyway."""
    state = load_pt(path)
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{path} is not a state_dict: a dict of tensors by name is expected")
    last = find_last_layer(model)
    goes = tuple(f"{layer}." for layer in last.replaced) if last is not None else ()
    wanted = {key for key in model.state_dict() if not key.startswith(goes)}
    kept = {key: value for key, value in state.items() if not key.startswith(goes)}
    for what, keys in (("lacks", wanted - set(kept)), ("has the unknown", set(kept) - wanted)):
        if keys:
            raise ValueError(f"{path} does not fit {name}: it {what} {min(keys)} ({len(keys)} such)")
    try:
        model.load_state_dict(kept, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit {name}: {error}") from None


def load_pt(path: Path) -> Any:
    """Load plain data that ``torch.save`` wrote."""
    path.stat()
    try:
        check_regular(path)
        return load_tensors(path)
    except OSError:
        raise
    except Exception as error:  # torch's reader raises errors of many kinds
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise ValueError(f"{path} is no file of tensors that can be loaded safely: {reason}") from None


def _best(name: str) -> nn.Module:
    """Return the best weights that torchvision offers."""
    local = Path(os.environ.get("TORCHLSSVM_DATA", ""), "weights", f"{name}_imagenet.pt")
    if os.environ.get("TORCHLSSVM_DATA") and local.exists():
        return build(name, str(local))
    try:
        return build(name, "pretrained" if name.startswith(TIMM_PREFIX) else "DEFAULT")
    except OSError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        log.warning(
            "no pretrained weights for %s (%s): random ones stand in for them, features mean little", name, reason
        )
        torch.manual_seed(0)
        return build(name, None)
