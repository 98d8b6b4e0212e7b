"""Networks by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchlssvm.backbones import build
from torchlssvm.lightning import LSSVMModule

pytest.importorskip("torchvision")


@pytest.mark.parametrize(("name", "width"), [("squeezenet1_1", 512), ("timm/resnet10t", 512), ("resnet18", 512)])
def test_a_network_by_name(name: str, width: int) -> None:
    if name.startswith("timm"):
        pytest.importorskip("timm")
    module = LSSVMModule(name, 3, weights="random")
    assert module.head.in_features == width
    module.classifier.add(torch.randn(4, 3, 64, 64), torch.tensor([0, 1, 2, 0]))
    assert module(torch.randn(2, 3, 64, 64)).shape == (2, 3)


def test_weights_from_a_file(tmp_path: Path) -> None:
    torch.manual_seed(1)
    saved = build("squeezenet1_1")
    torch.save(saved.state_dict(), tmp_path / "w.pt")
    module = LSSVMModule("squeezenet1_1", 3, weights=str(tmp_path / "w.pt"))
    key = "features.0.weight"
    assert torch.equal(module.classifier.backbone.state_dict()[key], saved.state_dict()[key])


def test_a_file_need_not_have_the_last_layer(tmp_path: Path) -> None:
    """It goes anyway: it may be missing, or be for other classes; all else must be there."""
    saved = build("resnet18").state_dict()
    body = {key: value for key, value in saved.items() if not key.startswith("fc.")}
    other = body | {"fc.weight": torch.zeros(7, 512), "fc.bias": torch.zeros(7)}
    file = tmp_path / "w.pt"
    for state in (body, other):
        torch.save(state, file)
        module = LSSVMModule("resnet18", 3, weights=str(file))
        assert torch.equal(module.classifier.backbone.state_dict()["conv1.weight"], saved["conv1.weight"])
    for state, message in (
        ({key: value for key, value in body.items() if key != "conv1.weight"}, "lacks conv1.weight"),
        (body | {"extra": torch.zeros(1)}, "has the unknown extra"),
        (body | {"conv1.weight": torch.zeros(2)}, "does not fit resnet18"),
        ([1, 2], "is not a state_dict"),
    ):
        torch.save(state, file)
        with pytest.raises(ValueError, match=message):
            LSSVMModule("resnet18", 3, weights=str(file))
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="no file of tensors"):
        LSSVMModule("resnet18", 3, weights=str(file))


@pytest.mark.parametrize(
    ("name", "weights", "message"),
    [
        ("nothing", "random", "torchvision has no classifier"),
        ("resnet18", "IMAGENET9", "has no weights"),
        ("timm/resnet10t", "IMAGENET1K_V1", "weights of a timm model"),
        ("identity", None, "give in_features"),
    ],
)
def test_what_there_is_not_is_said(name: str, weights: str | None, message: str) -> None:
    if name.startswith("timm"):
        pytest.importorskip("timm")
    with pytest.raises(ValueError, match=message):
        LSSVMModule(name, 3, weights=weights)
