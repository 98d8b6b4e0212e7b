"""A head on a pretrained network: the last linear layer goes, the rest is frozen, the head learns from its features."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchlssvm.functional.checks import is_fake
from torchlssvm.linear.kinds import head_class

# The attributes behind which models keep their last layer, or the model they wrap; a number may follow (``fc2``).
_KNOWN = re.compile(r"(fc|classifier|heads?|linear|last_linear|logits|output|out|model|net|module)_?\d*")
# Modules whose layers without parameters may follow the last layer of a Sequential: they shape scores, not features.
_DROPPED = ("torch.nn.modules.activation", "torch.nn.modules.dropout", "torch.nn.modules.flatten")


def attach(
    model: nn.Module,
    num_classes: int,
    head: nn.Module | str | None = None,
    *,
    in_features: int | None = None,
    deterministic: bool | int = False,
    **head_options: Any,
) -> AttachedClassifier:
    """Replace the last linear layer of ``model`` by a head that is fitted by adding samples, and freeze the rest.

    The layer is found in torchvision's and timm's classifiers, in an ``nn.Sequential`` (nested, or with a Softmax,
    Dropout or Flatten behind the layer, which goes too), and in any model whose last registered layer with parameters
    is an ``nn.Linear``, or a 1x1 convolution that is pooled, behind a usual name (``fc``, ``classifier``, ``head``...).

    **The model passed in is changed**: the layer becomes ``nn.Identity``, no parameter requires a gradient any more,
    and every part is put in eval mode. When an error is raised the model is as it was. A bare ``nn.Linear`` is left
    alone: the features are then its inputs.

    Args:
        model: the network, or with ``in_features`` a backbone that already gives features; that one is used as it is.
        num_classes: K, the number of classes.
        head: a module with ``add``, ``remove`` and ``forward``, e.g. a kernel machine; None or ``"lssvm"`` makes an
            ``LSSVMHead``, ``"margin"`` a ``MarginHead``.
        in_features: J, the width of the features, for a backbone whose output they are: (B, J) or (B, J, 1, 1).
        deterministic: True computes features one image at a time, a number in batches of just so many (after a trial), so that
            what an image gives does not depend on the images beside it, and can be removed later. See ``AttachedClassifier``.
        head_options: passed on to the head that is made on the device of the model.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torchlssvm.linear.attach import attach
        >>> _ = torch.manual_seed(0)
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1000))
        >>> clf = attach(network, num_classes=2)
        >>> images, y = torch.randn(20, 1, 8, 8), torch.arange(20) % 2
        >>> images[y == 1] += 3
        >>> clf = clf.add(images, y)
        >>> clf(images).shape
        torch.Size([20, 2])
        >>> bool((clf.predict(images) == y).all())
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    _check_deterministic(deterministic)
    kind = head_class(head or "lssvm") if head is None or isinstance(head, str) else None
    if isinstance(head, nn.Module) and head_options:
        raise ValueError(f"{sorted(head_options)} are for the head attach makes: pass them, or head=, but not both")
    last = find_last(model) if in_features is None else None
    J = last.in_features if last else in_features
    if J is None:
        raise ValueError(
            f"cannot tell which layer of {type(model).__name__} is the last linear one. Replace it by nn.Identity() "
            "yourself, so that the model gives its features, and pass their width: "
            "attach(backbone, num_classes, in_features=512) for a backbone that gives (B, 512)"
        )
    if J < 1:
        raise ValueError(f"in_features must be 1 or more, got {J} (a lazy layer knows its width after one batch)")
    if kind is not None:
        tensors = [*model.buffers(), *model.parameters()]  # the last one is where the features come out
        head = kind(J, num_classes, **{"device": tensors[-1].device if tensors else None, **head_options})
    head = _checked_head(head, J, num_classes)
    # Every check is behind us: from here on the model changes.
    if last is None:
        return AttachedClassifier(model, head, J, deterministic=deterministic)
    if last.timm:
        model.get_submodule(last.path).reset_classifier(0)  # type: ignore[operator]
    for path in last.replaced:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, nn.Identity())
    if isinstance(model, nn.Linear):
        return AttachedClassifier(nn.Identity(), head, J, deterministic=deterministic)
    return AttachedClassifier(model, head, J, None if last.timm else last.path, deterministic)


class AttachedClassifier(nn.Module):
    """A frozen ``backbone`` and a ``head`` that learns from its features; made by ``attach``, which has an example.

    The backbone is in eval mode for good: ``.train()`` here, on a module around it or on the backbone does not move
    its BatchNorm. Images go in wherever the head takes features, and the head's own methods do the rest:
    ``clf.add(images, y)`` is ``clf.head.add(clf.features(images), y)``. What is not here is on ``clf.head``; a kernel
    machine, which removes by id, is asked there: ``ids = clf.add(images, y)``, then ``clf.head.remove(ids)``.

    To remove a sample its features must be, to the bit, those that were added; others are refused. A network gives an image
    other last bits beside other images, in batches of another size, under autocast, on another device or with another number
    of threads. So keep the features, or a ``SampleStore``. With ``deterministic=True`` images go through the backbone one by
    one and outside autocast; ``deterministic=32`` takes batches of 32, the last one filled up, if a trial on the first batch
    shows that neither place nor neighbours change a bit. Device and threads must then still be the same.

    Args:
        backbone: gives features, (B, J) or (B, J, 1, 1).
        head: has ``add``, ``remove`` and ``forward``.
        in_features: J.
        last_layer: where in the backbone an ``nn.Identity`` stands for the last layer; the first batch then shows
            whether something that is not a module (a softmax in ``forward``) comes behind it.
        deterministic: False, True, or the size of all batches that go through the backbone.
    """

    def __init__(
        self, backbone: nn.Module, head: nn.Module, in_features: int, last_layer: str | None = None,
        deterministic: bool | int = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.backbone = backbone.requires_grad_(False).eval()
        self.head: Any = head  # a module; its methods are its own
        self.in_features = in_features
        self._unproven = last_layer
        _check_deterministic(deterministic)
        self._batch_size = int(deterministic)
        self._tried = self._batch_size <= 1

    def train(self, mode: bool = True) -> AttachedClassifier:
        """Set the mode of the head; the backbone stays in eval mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Features (B, J) that the backbone makes of ``images`` (B, ...), without a graph."""
        if any(module.training for module in self.backbone.modules()):
            self.backbone.eval()
        phi = self._in_fixed_batches(images) if self._batch_size else self._pass(images)
        if not isinstance(phi, Tensor):
            raise ValueError(f"the backbone must give a tensor (B, {self.in_features}), it gave a {type(phi).__name__}")
        shape = tuple(phi.shape)
        phi = phi.flatten(1) if phi.ndim > 2 else phi
        if phi.ndim != 2 or phi.shape[1] != self.in_features:
            raise ValueError(
                f"the backbone gave {shape}, the head takes (B, {self.in_features}): "
                "the backbone must end in its features, without a classifier and pooled to one vector an image"
            )
        return phi.detach()

    def _pass(self, images: Tensor) -> Any:
        """Run the backbone on one batch."""
        if self._unproven is None or torch.compiler.is_compiling():
            return self.backbone(images)
        return self._first_pass(images, self._unproven)

    def _in_fixed_batches(self, images: Tensor) -> Any:
        """Run the backbone on batches of one size, outside autocast, so that an image always gives the same bits."""
        size = self._batch_size
        if not isinstance(images, Tensor) or images.shape[0] == 0:
            return self._pass(images)
        with torch.autocast(images.device.type, enabled=False):
            if not self._tried:
                self._try_fixed_batches(images)
            parts = [self._pass(filled(part, size))[: len(part)] for part in images.split(size)]
        return torch.cat(parts)

    def _try_fixed_batches(self, images: Tensor) -> None:
        """RuntimeError if the place in a batch, or the images beside it, change a bit of an image's features."""
        batch = filled(images, self._batch_size)[: self._batch_size]
        plain = self._pass(batch)
        for order in (torch.arange(len(batch)).flip(0), torch.arange(len(batch)).roll(1)):
            order = order.to(batch.device)
            if not torch.equal(self._pass(batch[order]), plain[order]):
                raise RuntimeError(
                    f"in batches of {self._batch_size} the backbone gives an image other bits at another place: use "
                    "deterministic=True (one image at a time), keep the features, or keep the samples in a SampleStore"
                )
        beside = batch.clone()
        beside[1:] = 0
        if not torch.equal(self._pass(beside)[0], plain[0]):
            raise RuntimeError(
                f"in batches of {self._batch_size} the backbone gives an image other bits beside other images: use "
                "deterministic=True (one image at a time), keep the features, or keep the samples in a SampleStore"
            )
        self._tried = True

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the head for ``images`` (B, ...): (B, K)."""
        scores: Tensor = self.head(self.features(images))
        return scores

    def predict(self, images: Tensor) -> Tensor:
        """Classes of ``images`` (B, ...): (B,)."""
        classes: Tensor = self._ask("predict", self.features(images))
        return classes

    def add(self, images: Tensor, y: Tensor, **options: Any) -> Any:
        """Add ``images`` (B, ...) with labels ``y`` (B,). Returns self, or the ids from a head that gives ids."""
        return self._ask("add", self.features(images), y, **options)

    def remove(self, images: Tensor, y: Tensor, **options: Any) -> Any:
        """Remove ``images`` (B, ...) that were added with the labels ``y`` (B,)."""
        return self._ask("remove", self.features(images), y, **options)

    def update(self, add: tuple[Tensor, Tensor] | None = None, remove: tuple[Tensor, Tensor] | None = None) -> Any:
        """Add and remove in one step; each is a pair of images (B, ...) and labels (B,)."""
        pairs = {"add": add, "remove": remove}
        changes = {verb: (self.features(pair[0]), pair[1]) for verb, pair in pairs.items() if pair is not None}
        return self._ask("update", **changes)

    def relabel(self, images: Tensor, y_old: Tensor, y_new: Tensor) -> Any:
        """Give ``images`` (B, ...), added with the labels ``y_old`` (B,), the labels ``y_new`` (B,)."""
        return self._ask("relabel", self.features(images), y_old, y_new)

    def replace(self, images_old: Tensor, y_old: Tensor, images_new: Tensor, y_new: Tensor) -> Any:
        """Put ``images_new`` (B, ...) with the labels ``y_new`` (B,) in the place of ``images_old`` with ``y_old``."""
        return self._ask("replace", self.features(images_old), y_old, self.features(images_new), y_new)

    def _ask(self, verb: str, *args: Any, **options: Any) -> Any:
        answer = getattr(self.head, verb)(*args, **options)
        return self if answer is self.head else answer

    def _first_pass(self, images: Tensor, last_layer: str) -> Any:
        """Run the backbone once with an eye on the Identity at ``last_layer``: its value must be what comes out."""
        seen: list[Tensor] = []
        layer = self.backbone.get_submodule(last_layer)
        handle = layer.register_forward_hook(lambda _module, _args, value: seen.append(value))
        try:
            phi = self.backbone(images)
        finally:
            handle.remove()
        # Another shape is pooling, or is refused by its width.
        comparable = bool(seen) and isinstance(phi, Tensor) and phi.shape == seen[-1].shape and not is_fake(phi)
        if not seen or (comparable and not torch.allclose(phi, seen[-1].to(phi), 0.0, 0.0, equal_nan=True)):
            what = "changes what comes out of" if seen else "does not use"
            raise ValueError(
                f"{type(self.backbone).__name__}.forward {what} {last_layer!r}, which attach took for its last layer. "
                "Make a backbone that ends in its features and pass their width: "
                f"attach(backbone, num_classes, in_features={self.in_features})"
            )
        self._unproven = None
        return phi


def filled(part: Tensor, size: int) -> Tensor:
    """A batch of at least ``size`` images: copies of the first one fill it up. part: (B, ...)."""
    missing = size - len(part)
    return part if missing <= 0 else torch.cat([part, part[:1].expand(missing, *part.shape[1:])])


def _check_deterministic(value: Any) -> None:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"deterministic must be False, True or a batch size >= 1, got {value!r}")


class Last(NamedTuple):
    """Location of the last layer, the width of its input, and the layer that becomes nn.Identity."""

    path: str
    in_features: int
    replaced: tuple[str, ...] = ()
    timm: bool = False  # ``path`` is a model that takes off its own classifier


def find_last(module: nn.Module, path: str = "", pooled: bool = False) -> Last | None:
    """Go down to the last layer: the tail of a Sequential, else the last child with parameters if its name is known."""
    if isinstance(module, nn.Linear):
        return Last(path, module.in_features, (path,) if path else ())
    if isinstance(module, nn.Conv2d):  # a 1x1 convolution and a mean over the image is a linear layer (SqueezeNet)
        return Last(path, module.in_channels, (path,)) if path and pooled and module.kernel_size == (1, 1) else None
    if callable(getattr(module, "reset_classifier", None)) and isinstance(getattr(module, "num_features", None), int):
        return Last(path, _timm_width(module), timm=True)
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
        tail = children[-1] if children and _KNOWN.fullmatch(children[-1][0]) else None
    last = find_last(tail[1], prefix + tail[0], pooled) if tail else None
    return last._replace(replaced=(*last.replaced, *dropped)) if last else None


def _is_dropped(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):
        return all(map(_is_dropped, module))
    without_parameters = next(module.parameters(), None) is None
    return isinstance(module, nn.Identity) or (type(module).__module__ in _DROPPED and without_parameters)


def _pools(module: nn.Module) -> bool:
    return isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1))


def _timm_width(model: Any) -> int:
    """Width of the classifier's input, which ``num_features`` need not be; of the output if made with ``num_classes=0``."""
    classifier = model.get_classifier() if hasattr(model, "get_classifier") else None
    layer = classifier[0] if isinstance(classifier, (tuple, list)) else classifier  # distilled models have two
    widths = [(layer, "in_features"), (layer, "in_channels"), (model, "head_hidden_size"), (model, "num_features")]
    return next(width for owner, name in widths if isinstance(width := getattr(owner, name, None), int))


def _checked_head(head: Any, in_features: int, num_classes: int) -> nn.Module:
    if not isinstance(head, nn.Module) or not all(callable(getattr(head, verb, None)) for verb in ("add", "remove")):
        raise TypeError(f"head must be an nn.Module with add and remove, got {head!r}")
    for name, wanted in (("in_features", in_features), ("num_classes", num_classes)):
        has = getattr(head, name, wanted)
        if isinstance(has, int) and has != wanted:
            raise ValueError(f"head.{name} is {has}, but the model and the call say {name}={wanted}")
    return head
