"""A network by name, or a module, with a head on it; or no network at all, for data that are features already."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchlssvm.backbones import build
from torchlssvm.linear import head_class
from torchlssvm.linear.attach import AttachedClassifier, attach

IDENTITY, RANDOM = "identity", "random"


def classifier(
    backbone: str | nn.Module,
    num_classes: int,
    weights: str | None,
    in_features: int | None,
    feature_map: nn.Module | None,
    head: nn.Module | str | None,
    options: dict[str, Any],
) -> AttachedClassifier:
    """A head on a network, with a feature map in between if there is one."""
    if isinstance(backbone, str) and backbone == IDENTITY:
        if in_features is None and feature_map is None:
            raise ValueError(f"backbone {IDENTITY!r} takes data that are features: give in_features, their number")
        backbone = nn.Flatten(1)
        in_features = in_features or int(feature_map.in_features)  # type: ignore[union-attr, arg-type]
    elif isinstance(backbone, str) and weights is None:
        raise ValueError(
            f"{backbone} needs weights: a member of torchvision's enum such as 'DEFAULT', 'pretrained' (timm), a file, 'auto', "
            "or 'random' for a network whose features mean little"
        )
    model = build(backbone, None if weights == RANDOM else weights) if isinstance(backbone, str) else backbone
    if feature_map is None:
        return attach(model, num_classes, head, in_features=in_features, **options)
    plain = attach(model, num_classes, in_features=in_features)
    width = int(feature_map.out_features)  # type: ignore[arg-type]
    through = nn.Sequential(plain.backbone, nn.Flatten(1), feature_map)
    made = head if isinstance(head, nn.Module) else head_class(head or "lssvm")(width, num_classes, **options)
    return AttachedClassifier(through, made, width)
