"""Networks by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchlssvm import attach
from torchlssvm.backbones import build, preprocessing
from torchlssvm.cli import main
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


def test_attach_takes_the_names_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of TORCHLSSVM_DATA, pictures of PIL and files; a slip of the pen is not looked up on a hub."""
    from PIL import Image

    torch.manual_seed(2)
    saved = build("squeezenet1_1")
    (tmp_path / "weights").mkdir()
    torch.save(saved.state_dict(), tmp_path / "weights" / "squeezenet1_1_imagenet.pt")
    monkeypatch.setenv("TORCHLSSVM_DATA", str(tmp_path))
    clf = attach("squeezenet1_1", 2, classes=["ant", "bee"], store=tmp_path / "store")
    image = Image.new("RGB", (40, 30), (200, 90, 10))
    image.save(tmp_path / "a.png")
    with torch.no_grad():
        truth = saved.eval().features(preprocessing("squeezenet1_1")(image)[None]).mean((2, 3))
    for given in (image, [image], tmp_path / "a.png", [str(tmp_path / "a.png")]):
        torch.testing.assert_close(clf.features(given), truth, rtol=1e-4, atol=1e-5)
    clf.add([image, image.rotate(90)], ["ant", "bee"], ids=["a", "b"])
    clf.store.close()
    assert main(["classify", str(tmp_path / "store"), "--images", str(tmp_path / "a.png")]) == 0
    for name in ("squeezenet1-1", "squeezenet11"):
        with pytest.raises(ValueError, match="did you mean 'squeezenet1_1'"):
            attach(name, 2)


def test_a_name_that_nobody_knows(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"torchvision.*timm.*transformers"):
        attach(str(tmp_path / "empty"), 2)
