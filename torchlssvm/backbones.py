"""Load networks of torchvision and timm by name, with published weights or weights from a file, and transformers encoders."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchlssvm.features.last_layer import find_last_layer
from torchlssvm.features.texts import Tokenize, as_batch, load_encoder
from torchlssvm.untrusted import check_regular, load_tensors

__all__ = ["AUTO", "Pictures", "build", "load_network", "load_pt", "preprocessing"]

log = logging.getLogger("torchlssvm.backbones")

AUTO, TIMM_PREFIX = "auto", "timm/"


def build(name: str, weights: str | None = None) -> nn.Module:
    """Build a network including its last layer, e.g. ``mobilenet_v2`` of torchvision or ``timm/resnet18`` of timm.

    Pass ``weights`` as None (random), a member of torchvision's enum (``DEFAULT``, ``IMAGENET1K_V1``), ``pretrained`` for timm,
    or a file with a state_dict. If the last layer is missing in the file, or is for other classes, it stays random. ``"auto"``
    uses weights/<name>_imagenet.pt in the folder that TORCHLSSVM_DATA names, otherwise the published weights. If neither is
    available, a warning is issued and random weights are used.
    """
    if weights == AUTO:
        best = best_weights(name)
        try:
            return build(name, best)
        except OSError as error:
            if Path(best).exists():
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            log.warning(
                "no pretrained weights for %s (%s): random weights are used, so the features mean little", name, reason
            )
            torch.manual_seed(0)
            return build(name, None)
    file = weights is not None and (Path(weights).suffix in (".pt", ".pth", ".bin") or Path(weights).exists())
    try:
        model = _timm(name, weights, file) if name.startswith(TIMM_PREFIX) else _torchvision(name, weights, file)
    except (OSError, RuntimeError) as error:  # no network, or the download does not have its hash
        raise OSError(
            f"the weights of {name} cannot be loaded: {error}. Put a file with its state_dict at weights/{name}_imagenet.pt in "
            "the folder that TORCHLSSVM_DATA names, or give the file: torchlssvm.backbones.build(name, FILE), weights=FILE of "
            "an LSSVMModule, on the command line --weights FILE"
        ) from error
    if file:
        _read(model, name, Path(str(weights)))
    return model


def best_weights(name: str) -> str:
    """Return the file weights/<name>_imagenet.pt in the folder that TORCHLSSVM_DATA names, or the published weights."""
    local = Path(os.environ.get("TORCHLSSVM_DATA", ""), "weights", f"{name}_imagenet.pt")
    if os.environ.get("TORCHLSSVM_DATA") and local.exists():
        return str(local.absolute())
    return "pretrained" if name.startswith(TIMM_PREFIX) else "DEFAULT"


def load_network(name: str, weights: str | None = None, tokenizer: Any = None) -> tuple[nn.Module, Any]:
    """Load a network by name, and its preprocessing of images or texts (None for a timm network).

    The name decides which library loads the network: torchvision for the names it knows, timm for ``timm/<name>``, and
    transformers for any other name or a folder. Pass ``weights`` as for :func:`build`, or the new folder of an encoder that has
    moved. By default, the best weights available are loaded.
    """
    encoder = Path(name).is_dir() or "/" in name or ("-" in name and find_spec("torchvision") is None)
    known = [] if encoder else _classifiers()  # ModuleNotFoundError without torchvision, whose names have no "-"
    if name in known or name.startswith(TIMM_PREFIX):
        model = build(name, weights or best_weights(name))
        return model, Pictures(preprocessing(name)) if name in known else None
    similar = difflib.get_close_matches(name, known, 1, 0.85)
    if similar:
        raise ValueError(f"torchvision has no classifier {name!r}; did you mean {similar[0]!r}?")
    try:
        model, tokenizer = load_encoder(name if weights in (None, "DEFAULT") else weights, tokenizer)
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{name!r} is neither a classifier of torchvision (mobilenet_v2, resnet18...), nor one of timm, written "
            f"'timm/<name>', nor an encoder that transformers can load: {reason}"
        ) from error
    return model, Tokenize(tokenizer)


class Pictures:
    """Convert a list of PIL images or image paths to the input (B, 3, H, W) of a network.

    Images are rotated according to their EXIF data. Images with 16 or 32 bits are refused: scale them to 8 bits first.

    Args:
        transform: the preprocessing of one image.
    """

    def __init__(self, transform: Any):
        self.transform = transform

    def __call__(self, pictures: Iterable[Any]) -> Tensor:
        """Read and transform pictures."""
        return torch.stack([self._read(picture) for picture in as_batch(pictures)])

    def _read(self, picture: Any) -> Tensor:
        if hasattr(picture, "convert"):
            return self._input(picture)
        from PIL import Image

        try:
            with Image.open(picture) as image:
                return self._input(image)
        except Exception as error:  # the readers of image formats raise errors of many kinds
            raise ValueError(f"{picture} cannot be read as an image: {error}") from None

    def _input(self, picture: Any) -> Tensor:
        from PIL import ImageOps

        if picture.mode.startswith(("I", "F")):
            raise ValueError(
                f"a picture of mode {picture.mode!r} has 16 or 32 bits, and values above 255 would become white: scale it to "
                "8 bits first, all pictures by the same factor"
            )
        upright = ImageOps.exif_transpose(picture)
        return self.transform(upright.convert("RGB"))  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        """The preprocessing, which is part of a store's fingerprint."""
        return repr(self.transform)


def preprocessing(name: str) -> Any:
    """Return torchvision's preprocessing of images for this network."""
    return _weights_of(name).DEFAULT.transforms()


def _classifiers() -> list[str]:
    from torchvision import models

    return models.list_models(module=models)  # type: ignore[no-any-return]


def _weights_of(name: str) -> Any:
    from torchvision import models

    if name not in _classifiers():
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
