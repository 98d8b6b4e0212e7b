"""The description, in a certificate, of the network that computes the features."""

from __future__ import annotations

from torch import nn

from torchlssvm.backbone_hash import module_hash
from torchlssvm.features.layer_taps import LayerTaps
from torchlssvm.features.views import Columns, OutputKey, Views, view_name


def describe_network(backbone: nn.Module) -> str:
    """Describe a backbone in words: its layers, pooling, projection and views, and the hash of its weights.

    >>> describe_network(nn.Sequential(nn.Linear(4, 3)))[:38]
    'Sequential, the features it returns; S'
    """
    said = [f"SHA-256 {module_hash(backbone)}"]
    if isinstance(backbone, Columns):
        said.insert(0, f"{len(backbone.columns)} of the columns")
        backbone = backbone.module
    if isinstance(backbone, nn.Sequential) and len(backbone) == 3 and isinstance(backbone[1], nn.Flatten):
        said.insert(0, f"then {backbone[2]!r}")
        backbone = backbone[0]
    if isinstance(backbone, Views):
        said.insert(0, f"averaged over each sample and its views {', '.join(map(view_name, backbone.views))}")
        backbone = backbone.module
    if isinstance(backbone, OutputKey):
        return "; ".join([f"{type(backbone.module).__name__}, its output {backbone.key!r}", *said])
    if not isinstance(backbone, LayerTaps):
        return "; ".join([f"{type(backbone).__name__}, the features it returns", *said])
    taps, wide = backbone, sum(backbone.in_widths.values())
    steps = [f"{type(taps.model).__name__}, layers {', '.join(taps.taps)}", f"pooled by {', '.join(taps.pool)}"]
    if taps.normalize is not None:
        steps.append(f"each layer normalized ({taps.normalize})")
    if taps.out_features < wide:
        steps.append(f"{wide} columns projected to {taps.out_features} by random signs of seed {taps.seed}")
    return "; ".join([*steps, *said])
