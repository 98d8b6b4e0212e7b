"""Networks by name: torchvision's, timm's, or none at all for data that are features already."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchlssvm.heads import AttachedClassifier, LSSVMHead, attach

log = logging.getLogger("torchlssvm.lightning")

IDENTITY, AUTO = "identity", "auto"


def build(name: str, weights: str | None = None) -> nn.Module:
    """A network with its last layer: ``mobilenet_v2`` of torchvision, ``timm/resnet18`` of timm.

    weights: None (random), a member of torchvision's enum (``DEFAULT``, ``IMAGENET1K_V1``), ``pretrained`` for timm, a file
    with a state_dict, or ``"auto"``: weights/<name>_imagenet.pt in the folder that TORCHLSSVM_DATA names, else torchvision's
    default, else random ones, and a warning.
    """
    if weights == AUTO:
        return _best(name)
    file = weights is not None and (Path(weights).suffix in (".pt", ".pth", ".bin") or Path(weights).exists())
    if name.startswith("timm/"):
        import timm

        if weights not in (None, "pretrained") and not file:
            raise ValueError(f"weights of a timm model are 'pretrained', a file or None; got {weights!r}")
        model: nn.Module = timm.create_model(name.removeprefix("timm/"), pretrained=weights == "pretrained")
    else:
        from torchvision import models

        if name not in models.list_models(module=models):
            raise ValueError(
                f"torchvision has no classifier {name!r}; it has e.g. mobilenet_v2, resnet18. A model of timm is "
                f"'timm/<name>', and {IDENTITY!r} takes data that are features"
            )
        enum = models.get_model_weights(name)
        if weights is not None and not file and weights != "DEFAULT" and weights not in enum.__members__:
            allowed = ", ".join(["DEFAULT", *enum.__members__])
            raise ValueError(f"{name} has no weights {weights!r}: give one of {allowed}, a file, or None")
        model = models.get_model(name, weights=None if file or weights is None else enum[weights])
    if file:
        model.load_state_dict(torch.load(str(weights), map_location="cpu", weights_only=True))
    return model


def _best(name: str) -> nn.Module:
    """The best weights to be had."""
    local = Path(os.environ.get("TORCHLSSVM_DATA", ""), "weights", f"{name}_imagenet.pt")
    if os.environ.get("TORCHLSSVM_DATA") and local.exists():
        return build(name, str(local))
    try:
        return build(name, "pretrained" if name.startswith("timm/") else "DEFAULT")
    except (OSError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        log.warning(
            "no pretrained weights for %s (%s): random ones stand in for them, features mean little", name, reason
        )
        torch.manual_seed(0)
        return build(name, None)


def classifier(
    backbone: str | nn.Module,
    num_classes: int,
    weights: str | None,
    in_features: int | None,
    feature_map: nn.Module | None,
    head: nn.Module | None,
    options: dict[str, Any],
) -> AttachedClassifier:
    """A head on a network, with a feature map in between if there is one."""
    if isinstance(backbone, str) and backbone == IDENTITY:
        if in_features is None and feature_map is None:
            raise ValueError(f"backbone {IDENTITY!r} takes data that are features: give in_features, their number")
        backbone = nn.Flatten(1)
        in_features = in_features or int(feature_map.in_features)  # type: ignore[union-attr, arg-type]
    model = build(backbone, weights) if isinstance(backbone, str) else backbone
    if feature_map is None:
        return attach(model, num_classes, head, in_features=in_features, **options)
    plain = attach(model, num_classes, in_features=in_features)
    width = int(feature_map.out_features)  # type: ignore[arg-type]
    through = nn.Sequential(plain.backbone, nn.Flatten(1), feature_map)
    return AttachedClassifier(through, LSSVMHead(width, num_classes, **options) if head is None else head, width)
