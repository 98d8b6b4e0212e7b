"""Attach a head to a pretrained network: the head replaces the last linear layer, and the rest is frozen."""

from __future__ import annotations

import copy
import itertools
import operator
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from torchlssvm.backbone_hash import module_hash
from torchlssvm.backbones import load_network
from torchlssvm.errors import NotFittedError, VerificationError
from torchlssvm.features.last_layer import LastLayer, find_last_layer, named_layer
from torchlssvm.features.layer_taps import LayerTaps, unchanged_on_error
from torchlssvm.features.texts import Tokenize, as_batch, is_encoder
from torchlssvm.features.views import Columns, OutputKey, Views, run, tensor_of, view_name
from torchlssvm.files import refuse_in_store, replacement
from torchlssvm.functional.checks import finite_scores, is_fake, truth
from torchlssvm.functional.conformal import misfit, threshold
from torchlssvm.functional.modes import all_or_nothing
from torchlssvm.functional.several_targets import confusion_by_label, f1_score, r2_score
from torchlssvm.linear.column_selection import Selection, check_columns, check_head, restrict
from torchlssvm.linear.discriminant_rule import FEATURES_PER_CLASS, LIFTED_FEATURES, is_masked
from torchlssvm.linear.head import LSSVMHead
from torchlssvm.linear.kinds import HEAD_TYPES, head_class
from torchlssvm.linear.labelled_batches import (
    TrainingBatch,
    batches_of,
    class_numbers,
    inputs_of,
    is_loader,
    is_texts,
    more_classes,
    to_device,
)
from torchlssvm.linear.linear_head import LinearHead, targets_of
from torchlssvm.sample_adapter import SampleAdapter
from torchlssvm.untrusted import load_tensors
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.store.attached_samples import AttachedSamples

CLASSIFIER_FORMAT = "torchlssvm-classifier-1"
"""Format of a saved classifier; it changes when files can no longer be read as before."""

MOST_ROUNDING = 0.05
"""How far features of a sample may be from those beside other samples, as a share of the largest one. bfloat16 keeps 1 %."""


def attach(
    model: nn.Module | str,
    num_classes: int | None = None,
    head: nn.Module | str | None = None,
    *,
    layers: str | Sequence[str] = "last",
    pool: str | Sequence[str] | None = None,
    max_features: int | None = 4096,
    views: Sequence[str | Callable[[Any], Any]] = (),
    feature_map: nn.Module | None = None,
    columns: Any = None,
    layer: str | None = None,
    output: str | None = None,
    tokenizer: Any = None,
    preprocess: Callable[[Any], Any] | None = None,
    in_features: int | None = None,
    deterministic: bool | int = False,
    store: Any = None,
    classes: Sequence[str] | None = None,
    **head_options: Any,
) -> AttachedClassifier:
    """Replace the last linear layer of a network with a head that learns by adding samples, and freeze the rest.

    ``attach`` finds the last layer of torchvision and timm classifiers and of an ``nn.Sequential``, including a nested one,
    and also removes a Softmax, Dropout or Flatten after that layer. In other models, it looks for an ``nn.Linear`` or a pooled
    1x1 convolution that is the last registered layer with parameters and has a common name (``fc``, ``classifier``,
    ``head``...), or for the only ``nn.Linear``. If this fails, name the layer in ``layer``. A transformers encoder has no such
    layer, so its features are the last hidden states, averaged over the tokens of each text.

    **The model passed in is changed**: the layer becomes ``nn.Identity``, all parameters are frozen, and every module is put in
    eval mode. If ``attach`` raises an error, the model stays unchanged. A bare ``nn.Linear`` also stays unchanged, and the
    features are the inputs of that layer.

    Args:
        model: the network, a :class:`~torchlssvm.features.LayerTaps`, or the name of a network: a torchvision name
            (``"mobilenet_v2"``), a timm name (``"timm/resnet18"``), or the name or folder of a transformers encoder. A named
            network is loaded with the weights file that ``store`` names, otherwise with published weights. It accepts lists of
            PIL images, image paths or texts as batches. If you pass ``in_features``, the model must already return features and
            is used unchanged.
        num_classes: K, the number of classes. May be omitted if you pass ``classes``. With ``targets="multilabel"``, the number
            of labels; with ``targets="regression"``, the number of values to predict.
        head: ``"lssvm"`` or None for an ``LSSVMHead``, ``"margin"`` for a ``MarginHead``, or a module with ``add``, ``remove``
            and ``forward``, such as a kernel machine.
        layers: ``"last"`` (the input of the last layer), ``"blocks"`` (the output of every block), ``"all"`` (also the widest
            activation inside each block), or a list of module names or patterns, e.g. ``["features.1?", "conv1"]``. Several
            layers are more accurate, and unlearning stays exact (see :doc:`/features`).
        pool: how to pool the positions of a layer: one or several of ``"mean"``, ``"std"``, ``"cls"`` and ``"grid2"``. See
            :class:`~torchlssvm.features.LayerTaps`. Default: ``"mean"``, or the network's own pooling with ``layers="last"``.
        max_features: the largest number of columns when several layers are tapped; None for no limit. Layers are reduced to
            this limit by a fixed random projection.
        views: fixed transforms: ``("flip",)`` for the mirror image, or callables. The features of a sample are averaged over
            the sample and its transforms, both in learning and in prediction. Random augmentation is refused. With a store, a
            callable must be known by name in other processes: a function of a module, a ``functools.partial`` of one, a module,
            or an object with a ``__repr__`` of its own.
        feature_map: a module with ``out_features`` between network and head, e.g. ``torchlssvm.features.RandomReLU``.
        columns: the feature columns to use, as indices, a slice or a mask. Default: all. See
            :meth:`AttachedClassifier.restrict`.
        layer: name of the layer to replace, e.g. ``"_fc"``.
        output: key of the features, if the network returns a dict.
        tokenizer: the tokenizer of an encoder. You can then pass lists of texts wherever images are accepted.
        preprocess: a callable that converts a batch that is neither a tensor nor a dict to the input of the network. With a
            store, the same rule applies as for ``views``.
        in_features: J, the number of features, for a backbone that returns features of shape (B, J) or (B, J, 1, 1).
        deterministic: True to compute features one image at a time, or a fixed batch size. The features of an image then do
            not depend on the rest of its batch, so you can remove the image later. See :class:`AttachedClassifier`.
        store: folder of a :class:`~torchlssvm.store.SampleStore`, which is created or opened. The store keeps the features of
            every sample, so that ``clf.remove(subject="u42")`` is exact for any batch size. An existing store supplies the
            options that you do not pass. You may pass a different ``rho``, ``class_weight`` or ``rule``; any other difference
            is refused.
        classes: names of the classes, in label order. A store keeps the names. See ``predict(images, names=True)``.
        head_options: options of the new head, e.g. ``targets="multilabel"`` for several labels per image or
            ``targets="regression"`` for numbers. ``rho`` defaults to ``"gcv"`` (see :class:`~torchlssvm.LSSVMHead`); a
            ``MarginHead`` chooses rho by k-fold. The head is created on the device of the model.

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
    if classes is not None:
        classes = _class_names(classes, num_classes)
        num_classes = len(classes)
    if num_classes is None:
        raise ValueError("give the number of classes, attach(model, 2), or their names, classes=['ant', 'bee']")
    network, source, prepare = _load_network(model, tokenizer, preprocess, store)
    given = None if isinstance(head, nn.Module) else set(head_options)
    if store is not None and not isinstance(head, nn.Module):
        from torchlssvm.store.attached_samples import stored_options  # imported only if there is a store

        head, head_options = stored_options(store, head, head_options)
    how = NetworkOptions(layers, pool, max_features, tuple(views), feature_map, layer, output, in_features, columns)
    with unchanged_on_error(network):
        features = make_features(network, how)
        made = AttachedClassifier(
            features,
            new_head(head, features, num_classes, head_options),
            deterministic=deterministic,
            preprocess=prepare,
        )
        made.source = source
        if store is None:
            made.classes = classes
            return made
        made.join(store, given)
        if classes is not None and not made.store.classes:
            made.store.name_classes(classes)
        elif classes is not None and made.store.classes[: len(classes)] != classes:  # classes may have been added since
            raise ValueError(f"the classes of {made.store} are {made.store.classes}, not {classes}")
        return made


def _class_names(classes: Sequence[str], num_classes: int | None) -> list[str]:
    if isinstance(classes, str):
        raise ValueError(f"classes must be a list of names, got the text {classes!r}: pass [{classes!r}, ...]")
    names = [str(name) for name in classes]
    if num_classes not in (None, len(names)) or len(set(names)) < len(names):
        raise ValueError(f"classes must be {num_classes or len(names)} different names, got {names}")
    return names


def _load_network(
    model: nn.Module | str, tokenizer: Any, preprocess: Callable[[Any], Any] | None, store: Any
) -> tuple[nn.Module, str | None, Callable[[Any], Any] | None]:
    """The network, its name if it was given by name, and what turns pictures or texts into its input."""
    if isinstance(model, str):
        weights = None
        if store is not None:
            from torchlssvm.store.attached_samples import stored_weights  # imported only if there is a store

            weights = stored_weights(store, model)
        network, prepared = load_network(model, weights, tokenizer)
        return network, model, preprocess or prepared
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, or the name of a network; got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("a TorchScript module cannot be frozen: give the nn.Module that it was made of")
    if tokenizer is not None and preprocess is not None:
        raise ValueError("give tokenizer or preprocess, not both: preprocess may call the tokenizer")
    return model, None, preprocess if tokenizer is None else Tokenize(tokenizer)


class NetworkOptions(NamedTuple):
    """The options with which :func:`attach` computes features, under the names of its arguments."""

    layers: str | Sequence[str] = "last"
    pool: str | Sequence[str] | None = None
    max_features: int | None = 4096
    views: tuple[str | Callable[[Any], Any], ...] = ()
    feature_map: nn.Module | None = None
    layer: str | None = None
    output: str | None = None
    in_features: int | None = None
    columns: Any = None

    @property
    def tapped(self) -> bool:
        """Whether hooks read the features from inner layers."""
        return self.layers != "last" or self.pool is not None

    def saved(self) -> dict[str, Any]:
        """The options as primitives. Callables are saved by name, so that :meth:`AttachedClassifier.load` can ask for them."""
        named = self._replace(views=tuple(map(view_name, self.views)), feature_map=None)._asdict()
        return {name: list(v) if isinstance(v, tuple | list) else v for name, v in named.items()}


class Features(NamedTuple):
    """A network as :func:`make_features` leaves it.

    ``proven`` is a module and the name of the ``nn.Identity`` in it that replaced its last layer. The first batch then shows
    whether ``forward`` does more after this layer without a module, such as a softmax.
    """

    backbone: nn.Module  # returns features, (B, J) or (B, J, 1, 1)
    width: int  # J
    how: NetworkOptions
    proven: tuple[nn.Module, str] | None = None

    @property
    def device(self) -> torch.device | None:
        """The device on which the features are computed; None for a network without tensors."""
        tensors = [*self.backbone.buffers(), *self.backbone.parameters()]  # the last one is where the features come out
        return tensors[-1].device if tensors else None

    def restrict(self, columns: Tensor) -> Features:
        """Some columns (k,) of the features. Layers without such a column are no longer tapped."""
        before = self.how.columns
        kept = columns if before is None else torch.tensor(before)[columns]
        how, width = self.how._replace(columns=kept.tolist()), len(columns)
        backbone = self.backbone
        if isinstance(backbone, Columns):
            columns = backbone.columns.cpu()[columns]
            backbone = backbone.module
        taps = backbone.module if isinstance(backbone, Views) else backbone
        if isinstance(taps, LayerTaps):
            groups = {name: torch.arange(taps.out_features)[group] for name, group in taps.groups.items()}
            used = {name: group for name, group in groups.items() if torch.isin(group, columns).any()}
            part, left = taps.only(used), torch.cat(list(used.values()))
            backbone = Views(part, backbone.views) if isinstance(backbone, Views) else part
            columns = torch.searchsorted(left, columns)
            if columns.equal(torch.arange(len(left))):
                return Features(backbone, width, how)
        return Features(Columns(backbone, columns.to(self.device or "cpu")), width, how)


def make_features(model: nn.Module, how: NetworkOptions) -> Features:
    """Replace the last layer of a network, or tap its layers, and add views, a feature map and columns."""
    if how.tapped and (how.in_features is not None or how.layer is not None or how.output is not None):
        raise ValueError("layers and pool read the network by hooks: leave out in_features, layer and output")
    J, last, backbone = _find_features(model, how)
    if J < 1:
        raise ValueError(f"in_features must be 1 or more, got {J} (a lazy layer knows its width after one batch)")
    proven = None
    if last is not None:
        last.take_off(model)
        if isinstance(model, nn.Linear):
            backbone = nn.Identity()
        if last.path and not last.timm and not isinstance(backbone, LayerTaps):
            proven = (backbone, last.path)
    if how.output is not None:
        backbone = OutputKey(backbone, how.output)
    if how.views:
        backbone = Views(backbone, how.views)
    if how.feature_map is not None:
        if not hasattr(how.feature_map, "out_features"):
            raise ValueError(
                f"feature_map needs out_features, the number of columns that it returns; {type(how.feature_map).__name__} has "
                "none. Set feature_map.out_features, or pass a module such as torchlssvm.features.RandomReLU"
            )
        backbone, J = nn.Sequential(backbone, nn.Flatten(1), how.feature_map), int(how.feature_map.out_features)  # type: ignore[arg-type]
    made = Features(backbone, J, how._replace(columns=None), proven)
    if how.columns is None:
        return made
    return made.restrict(check_columns(how.columns, J, torch.device("cpu")))._replace(proven=proven)


def _find_features(model: nn.Module, how: NetworkOptions) -> tuple[int, LastLayer | None, nn.Module]:
    """Width of the features, the layer to replace, and the module that returns the features: the model, or its taps."""
    if how.tapped:
        most = None if how.layers == "last" else how.max_features
        taps = LayerTaps(model, how.layers, how.pool or "mean", max_features=most)
        last = find_last_layer(model)  # its weights are not used, and would be part of the network's hash
        if last is not None and any(name.startswith(last.replaced or (last.path,)) for name in taps.taps):
            last = None
        return taps.out_features, last, taps
    if how.in_features is not None:
        return how.in_features, None, model
    inner = model.module if isinstance(model, Views) else model
    if isinstance(inner, LayerTaps):
        return inner.out_features, None, model
    if isinstance(model, Views):
        raise ValueError("give the width of the features with Views: attach(views, num_classes, in_features=512)")
    last = find_last_layer(model) if how.layer is None else named_layer(model, how.layer)
    if last is not None:
        return last.in_features, last, model
    if is_encoder(model):
        taps = LayerTaps(model, "last", max_features=None)
        return taps.out_features, None, taps
    raise ValueError(
        f"cannot tell which layer of {type(model).__name__} is the last linear one. Name it, layer='name'; or replace it by "
        "nn.Identity() yourself, so that the model gives its features, and pass their width: "
        "attach(backbone, num_classes, in_features=512) for a backbone that gives (B, 512)"
    )


def new_head(head: Any, features: Features, num_classes: int, options: dict[str, Any]) -> nn.Module:
    """A head of this kind for the features, or the given head, which must fit them."""
    if head is None or isinstance(head, str):
        kind = head_class(head or "lssvm")
        usual = {"device": features.device} | ({"rho": "gcv"} if kind is LSSVMHead else {})
        made = kind(features.width, num_classes, **usual | options)
        one_vs_rest = kind is LSSVMHead and made.multiclass == "ovr" and made.targets == "classes"
        if one_vs_rest and is_masked(num_classes, features.width) and features.how.feature_map is None:
            lifted = max(LIFTED_FEATURES, FEATURES_PER_CLASS * num_classes)
            warnings.warn(
                f"{num_classes} classes meet {features.width} features. Often more accurate: more layers (layers='blocks'), a "
                f"random lift (feature_map=RandomReLU({features.width}, {lifted}) from torchlssvm.features), or head='margin'",
                stacklevel=3,
            )
        return made
    if not isinstance(head, nn.Module) or not all(callable(getattr(head, verb, None)) for verb in ("add", "remove")):
        raise TypeError(f"head must be an nn.Module with add and remove, got {head!r}")
    if options:
        raise ValueError(f"{sorted(options)} are for the head attach makes: pass them, or head=, but not both")
    for name, wanted in (("in_features", features.width), ("num_classes", num_classes)):
        has = getattr(head, name, wanted)
        if isinstance(has, int) and has != wanted:
            raise ValueError(f"head.{name} is {has}, but the model and the call say {name}={wanted}")
    return head


class AttachedClassifier(nn.Module):
    """A frozen ``backbone`` and a ``head`` that learns from the features of the backbone. Create one with :func:`attach`.

    Pass images wherever the head accepts features: ``clf.add(images, y)`` is the same as ``clf.head.add(clf.features(images),
    y)``. Use ``clf.head`` for all other methods. A kernel machine removes samples by id: ``ids = clf.add(images, y)``, then
    ``clf.head.remove(ids)``. The backbone always stays in eval mode, so ``.train()`` does not change BatchNorm layers.

    To remove a sample, you need the features that were added, bit for bit; any other features are refused. But the same image
    can produce slightly different features next to other images, in another batch size, under autocast, on another device or
    with another number of threads. So keep the features, use a store, or set ``deterministic``. ``deterministic=True`` passes
    images through the backbone one by one, outside autocast. ``deterministic=32`` uses batches of 32 and pads the last batch;
    a trial on the first batch checks that the position and the neighbours of an image do not change the features. Both
    settings still require the same device and number of threads.

    A store (``attach(..., store=folder)``) keeps the features of each sample under the sample's id. Add samples with
    ``clf.add(images, y, ids=ids, subjects=subjects)``, and remove them with ``clf.remove(subject="u42")`` or
    ``clf.remove(ids=["a"])``. ``clf.store`` issues certificates. A copy or pickle of the classifier has no store.
    """

    def __init__(
        self, features: Features, head: nn.Module, *, deterministic: bool | int = False,
        preprocess: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not isinstance(deterministic, int) or deterministic < 0:
            raise ValueError(f"deterministic must be False, True or a batch size >= 1, got {deterministic!r}")
        self.backbone = features.backbone.requires_grad_(False).eval()
        self.head: Any = head  # a module; its methods are its own
        self.in_features, self.network_options = features.width, features.how
        self.preprocess = preprocess
        self._unproven = None if features.proven is None else [features.proven]  # in a list: it is part of the backbone
        self._batch_size = int(deterministic)
        self._tried = self._batch_size == 1
        self.source: str | None = None
        """The name of the network, if :func:`attach` was given a name. A store keeps it for the command line."""
        self._classes: list[str] | None = None
        self.samples: AttachedSamples | None = None
        """The samples in a store, if there is one."""

    def __repr__(self) -> str:
        """The network by its name, the width of the features, the head and the store."""
        network = self.backbone[0] if self.network_options.feature_map is not None else self.backbone  # type: ignore[index]
        while isinstance(network, OutputKey | Views | Columns | LayerTaps):
            network = next(network.children())
        lines = [f"network: {type(network).__name__}, frozen", f"features: {self.in_features}", f"head: {self.head!r}"]
        lines += [f"classes: {', '.join(self.classes)[:100]}"] if self.classes else []
        lines += [f"store: {self.store}"] if self.store is not None else []
        return "\n  ".join(["AttachedClassifier(", *lines]) + "\n)"

    @property
    def store(self) -> Any:
        """The :class:`~torchlssvm.store.SampleStore` that keeps the samples, or None."""
        return None if self.samples is None else self.samples.store

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes, in label order; None if the classes have no names."""
        return self._classes if self.samples is None else self.samples.store.classes or None

    @classes.setter
    def classes(self, names: list[str] | None) -> None:
        self._classes = names

    def join(self, store: Any, given: Collection[str] | None = None) -> Self:
        """Keep every sample in a store from now on: a folder, which is created or opened, or a store of this head.

        ``given`` names the options that you set yourself (None: all); an existing store supplies the other options.
        """
        if self.samples is not None and store not in (self.store, str(self.store.path), self.store.path):
            raise ValueError(f"this classifier keeps its samples in {self.store} already, it cannot have {store!r} too")
        if self.samples is None:
            from torchlssvm.store.attached_samples import AttachedSamples  # the one import that goes up, when asked for

            self.samples = AttachedSamples(store, self, given)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling and copying. Open files stay with the original."""
        return {**self.__dict__, "samples": None}

    @property
    def device(self) -> torch.device:
        """Device of the backbone, to which images are moved. A backbone without weights uses the device of the head."""
        tensors = [*self.backbone.parameters(), *self.backbone.buffers()]
        place: torch.device = tensors[0].device if tensors else getattr(self.head, "device", torch.device("cpu"))
        return place

    def train(self, mode: bool = True) -> AttachedClassifier:
        """Set the mode of the head; the backbone stays in eval mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    def features(self, images: Any, progress: bool = False) -> Tensor:
        """Return the features (B, J) of images, computed without gradients.

        Args:
            images: a tensor of shape (B, ...), a dict of tensors from a tokenizer, a list of texts if the classifier has a
                tokenizer, or a loader. Labels of a loader are ignored. :meth:`predict`, :meth:`predict_proba`,
                :meth:`predict_set`, :meth:`score` and :meth:`confusion_matrix` accept the same inputs.
            progress: show a progress bar while a loader is read.
        """
        return self._in_batches(self._features, images, progress, "features")

    def _in_batches(self, ask: Callable[[Any], Any], images: Any, progress: bool, what: str) -> Tensor:
        """Ask about one batch, or about each batch of a loader and join the answers."""
        if not is_loader(images):
            answer: Tensor = ask(images)
            return answer
        answers = [ask(x) for x in inputs_of(images, self.device, progress, what)]
        if not answers:
            raise ValueError("the loader gave no batch: an iterator is used up after one pass")
        return torch.cat(answers)

    @torch.no_grad()
    def _features(self, images: Any) -> Tensor:
        if any(module.training for module in self.backbone.modules()):
            self.backbone.eval()
        if self.preprocess is not None:
            images = as_batch(images)
            if isinstance(images, list | tuple) and not images:
                raise ValueError("the batch is empty: give at least one text or picture")
        phi = self._in_fixed_batches(images) if self._batch_size else self._pass(self._ready(images))
        phi = tensor_of(phi, self.in_features)
        if not (self._tried or torch.compiler.is_compiling() or is_fake(phi) or len(phi) < 2):
            self._try_alone(images, phi)
        shape = tuple(phi.shape)
        phi = phi.flatten(1) if phi.ndim > 2 else phi
        if phi.ndim != 2 or phi.shape[1] != self.in_features:
            raise ValueError(
                f"the backbone gave {shape}, the head takes (B, {self.in_features}): either the input has another shape than "
                "the samples learned, or the backbone does not end in its features, one vector for each image"
            )
        return phi.detach()

    def _ready(self, images: Any) -> Any:
        """Convert a batch to the backbone's input. Raises ValueError, with a remedy, for unsupported types."""
        if isinstance(images, Mapping):
            listed = [name for name, value in images.items() if isinstance(value, list)]
            if listed:
                raise ValueError(
                    f"{listed[0]!r} is a list; the network takes tensors: tokenizer(texts, padding=True, return_tensors='pt')"
                )
            return to_device(images, self.device)
        if not isinstance(images, Tensor):
            if self.preprocess is None:
                one = images[0] if isinstance(images, list | tuple) and images else images
                raise ValueError(
                    f"images must be a tensor (B, ...), got {type(images).__name__} of {type(one).__name__}: use torch.stack "
                    "or torch.from_numpy, attach(model, num_classes, tokenizer=tokenizer) for texts, or preprocess= for files"
                )
            return to_device(self.preprocess(images), self.device)
        if images.dtype == torch.uint8 and any(p.is_floating_point() for p in self.backbone.parameters()):
            raise ValueError(
                "images are uint8 (0 to 255), and the network takes floats as it was trained on: use the transform of its "
                "weights, or images.float() / 255 where that is all it had"
            )
        single = images.ndim == 3 and any(isinstance(m, nn.Conv2d) for m in self.backbone.modules())
        return images[None] if single else images

    def _pass(self, images: Any) -> Any:
        """Run the backbone on one batch."""
        if self._unproven is not None and not torch.compiler.is_compiling():
            network, last_layer = self._unproven[0]
            output = self._prove(images, network, last_layer)
            if network is self.backbone:
                return output
        return run(self.backbone, images)

    def _in_fixed_batches(self, images: Any) -> Any:
        """Run the backbone on batches of one size, outside autocast, so that an image always gives the same bits."""
        size = self._batch_size
        with torch.autocast(self.device.type, enabled=False):
            if not isinstance(images, Tensor):
                if size > 1:
                    raise ValueError(
                        f"deterministic={size} is for tensors: texts in one batch are padded to the longest of them, which "
                        "changes bits. Use deterministic=True, or a store"
                    )
                rows = [self._pass(self._ready(row)) for row in single_rows(images)]
                return torch.cat([tensor_of(row, self.in_features) for row in rows])
            images = self._ready(images)
            if images.shape[0] == 0:
                return self._pass(images)
            images = images.clone(memory_format=torch.contiguous_format)  # the order in memory changes bits too
            if not self._tried:
                self._try_fixed_batches(images)
            parts = [self._pass(fill_batch(part, size))[: len(part)] for part in images.split(size)]
            return torch.cat(parts)

    def _try_alone(self, images: Any, phi: Tensor) -> None:
        """Raise ValueError if a sample by itself has features other than phi (B, ...), by more than rounding."""
        self._tried = True
        first = images[:1] if isinstance(images, Tensor) else next(iter(single_rows(images)), None)
        alone = None if first is None else tensor_of(self._pass(self._ready(first)), self.in_features)
        if alone is None or alone.shape != phi[:1].shape:
            return
        if bool((alone[0] - phi[0]).abs().amax() > MOST_ROUNDING * phi[0].abs().amax()):
            self._tried = False
            raise ValueError(
                f"{type(self.backbone).__name__} computes different features for a sample alone than in a batch: it mixes "
                "the samples of a batch (as a BatchNorm without running statistics does), ignores the attention mask, or is "
                "random. Samples could not be removed exactly. Unless it is random, pass deterministic=True, which computes "
                "them one by one"
            )

    def _try_fixed_batches(self, images: Tensor) -> None:
        """Raise RuntimeError if the place in a batch, or the other images, change a bit of an image's features."""
        batch = fill_batch(images, self._batch_size)[: self._batch_size]
        plain, places = self._pass(batch), torch.arange(len(batch), device=batch.device)
        alone = torch.cat([batch[:1], torch.zeros_like(batch[1:])])
        moved = all(torch.equal(self._pass(batch[order]), plain[order]) for order in (places.flip(0), places.roll(1)))
        if not moved or not torch.equal(self._pass(alone)[0], plain[0]):
            raise RuntimeError(
                f"in batches of {self._batch_size}, the features of an image depend on its position or on the other images: "
                "use deterministic=True (one image at a time), keep the features, or keep the samples in a SampleStore"
            )
        self._tried = True

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores (B, K) of the head for ``images`` (B, ...)."""
        features = self._features(images)
        self._follow()
        scores: Tensor = self.head(features)
        return scores

    def _follow(self) -> None:
        """Take in what other processes have written to the store, also where ``torch.compile`` runs this module."""
        if self.samples is not None and not torch.compiler.is_exporting():
            self._follow_store()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # each call asks the store: a compiled graph would ask once
    def _follow_store(self) -> None:
        assert self.samples is not None
        self.samples.follow()

    @property
    def targets(self) -> str:
        """What the head predicts: "classes", "multilabel" or "regression"."""
        return targets_of(self.head)

    def predict(self, images: Any, names: bool = False, progress: bool = False, thresholds: Any = None) -> Any:
        """Predict the classes (B,) of ``images`` (B, ...) or of a loader. ``names=True`` returns a list of B class names.

        With ``targets="multilabel"``, returns booleans (B, K), or a list of B lists of names; ``thresholds`` is one number, or
        one number per label (K,). With ``targets="regression"``, returns numbers (B, K), or (B,) if K = 1.
        """
        if names and self.targets == "regression":
            raise ValueError('names=True needs classes or labels: with targets="regression", predict returns numbers')
        if names and self.classes is None:
            raise ValueError("the classes have no names: attach(model, 2, classes=['ant', 'bee'])")
        more = {} if thresholds is None else {"thresholds": thresholds}
        labels = self._in_batches(
            lambda x: self._ask("predict", self._features(x), **more), images, progress, "predict"
        )
        if not names or not self.classes:
            return labels
        if labels.ndim == 2:
            return [list(itertools.compress(self.classes, row)) for row in labels.tolist()]
        named = dict(enumerate(self.classes))  # fewer than the classes, where a number of classes was added
        return [named.get(label, str(label)) for label in labels.tolist()]

    def predict_set(self, images: Any, level: float = 0.9, *, groups: Any = None, reject: bool = False) -> Tensor:
        """Return sets of classes, booleans (B, K), that contain the true class with probability ``level``.

        This is a conformal prediction: the sets are computed from the leave-one-out scores of the samples in the store (see
        :mod:`torchlssvm.functional.conformal`) and follow every change of the samples. The probability is an average over new
        samples from the same distribution.

        Args:
            images: (B, ...), or a loader.
            level: a number between 0 and 1.
            groups: ``"subject"``, or a dict that maps ids to groups. Use groups if samples of one group are similar; see
                :meth:`SampleStore.leave_one_out <torchlssvm.store.SampleStore.leave_one_out>`.
            reject: return one class per sample (B,) instead of a set, and -1 where the set does not have exactly one class.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must be between 0 and 1, got {level!r}")
        if self.samples is None:
            raise ValueError("predict_set needs the samples, and only a store keeps them: attach(..., store=folder)")
        own = self.samples.left_out_misfits(groups)
        scores = finite_scores(self._in_batches(self, images, False, "predict_set"))
        sets = misfit(scores) <= threshold(own, level)
        if not reject:
            return sets
        return torch.where(sets.sum(1) == 1, sets.to(torch.int64).argmax(1), -1)

    def confusion_matrix(
        self, images: Any, y: Tensor | None = None, *, plot: str | os.PathLike[str] | None = None
    ) -> Tensor:
        """Count samples by label (row) and predicted class (column). Returns a matrix (K, K).

        With ``targets="multilabel"``, returns one 2 x 2 matrix per label, of shape (K, 2, 2), like scikit-learn's
        ``multilabel_confusion_matrix``.

        Args:
            images: (B, ...), or a loader that also yields the labels.
            y: (B,) labels, or (B, K) for ``"multilabel"``.
            plot: file to draw the matrix to, e.g. ``"confusion.png"``. Needs matplotlib and ``targets="classes"``.
        """
        K, targets = int(self.head.num_classes), self.targets
        if targets == "regression":
            raise ValueError(
                'a confusion matrix counts classes or labels, and targets="regression" has neither: use score'
            )
        if targets == "multilabel" and plot is not None:
            raise ValueError('plot draws one matrix of classes; targets="multilabel" has one matrix for each label')
        y, predicted = self._judged(images, y, False, "confusion_matrix")
        if targets == "multilabel":
            return confusion_by_label(y, predicted)
        if not 0 <= int(y.min()) <= int(y.max()) < K:
            raise ValueError(f"labels must be in 0..{K - 1}, got {y.min().item()} to {y.max().item()}")
        counts = torch.bincount(y * K + predicted, minlength=K * K).view(K, K)
        if plot is not None:
            draw_confusion(counts, self.classes, plot)
        return counts

    def predict_proba(self, images: Any, progress: bool = False) -> Tensor:
        """Return class probabilities (B, K) for ``images`` (B, ...) or a loader, calibrated on leave-one-out scores.

        With ``targets="multilabel"``, each label has a probability, and the probabilities of a sample do not sum to one.

        With a store, the first call calibrates, and the store then keeps the calibration up to date. Without a store, call
        :meth:`calibrate` before the first prediction and after each change of the samples.
        """
        return self._in_batches(self._probabilities, images, progress, "predict_proba")

    def _probabilities(self, images: Any) -> Tensor:
        features = self._features(images)
        try:
            probabilities: Tensor = self._ask("predict_proba", features)
        except NotFittedError:  # no calibration yet, or an erasure by another thread has ended it
            if self.samples is None and SampleAdapter(self.head).count:
                raise NotFittedError(
                    "these scores are not calibrated for the samples added: call clf.calibrate(loader) with these samples, or "
                    "keep them in a store, attach(..., store=folder), which calibrates by itself"
                ) from None
            if self.samples is None or self.samples.store.readonly:
                raise
            self.calibrate()
            probabilities = self._ask("predict_proba", features)
        return probabilities

    def calibrate(self, images: Any = None, y: Tensor | None = None, method: str | None = None) -> Self:
        """Calibrate probabilities on the leave-one-out scores of all samples. Returns self.

        Args:
            images: (B, ...), or a loader: the samples that were added. Omit if the classifier has a store.
            y: (B,), the labels of the images. Omit for a loader or a store.
            method: see :meth:`torchlssvm.LSSVMHead.calibrate`.
        """
        if self.samples is not None:
            self.samples.store.calibrate(method)
            return self
        if images is None:
            raise ValueError("calibrate needs the samples that were added: calibrate(images, y) or calibrate(loader)")
        batches = self._batches(images, y, False, "calibrate")
        parts = [(self.features(part.x), torch.as_tensor(part.y, device=self.device)) for part in batches]
        self._ask("calibrate", *map(torch.cat, zip(*parts, strict=True)), method)
        return self

    def score(self, images: Any, y: Tensor | None = None, progress: bool = False, average: str = "micro") -> float:
        """Return the accuracy on ``images`` (B, ...) with labels ``y`` (B,), or on all batches of a loader.

        With ``targets="multilabel"``, returns F1: over all pairs of a sample and a label (``average="micro"``), or the mean
        over the labels (``average="macro"``). With ``targets="regression"``, returns R^2, averaged over the K outputs.
        """
        y, predicted = self._judged(images, y, progress, "score")
        if self.targets == "regression":
            return r2_score(y, predicted)
        if self.targets == "multilabel":
            return f1_score(y, predicted, average)
        return int((predicted == y).sum()) / len(y)

    def _labels(self, y: Any) -> Any:
        """Labels as numbers, from numbers or names of classes."""
        return class_numbers(y, self.classes, self.targets)

    def _batches(self, images: Any, y: Any, progress: bool, what: str) -> Iterable[TrainingBatch]:
        """Labelled batches: images and their labels y, or the batches of a loader."""
        if y is not None:
            return [TrainingBatch(images, self._labels(y), None, None)]
        return batches_of(images, self.device, progress, what, self.classes, self.targets)

    def _judged(self, images: Any, y: Any, progress: bool, what: str) -> tuple[Tensor, Tensor]:
        """Labels (n,) or targets (n, K) of all samples, and predictions of the same shape."""
        pairs = []
        for part in self._batches(images, y, progress, what):
            predicted = self.predict(part.x)
            pairs.append((truth(part.y, predicted, self.targets), predicted))
        if not sum(len(labels) for labels, _ in pairs):
            raise ValueError(f"there are no samples for {what}")
        labels, predictions = map(torch.cat, zip(*pairs, strict=True))
        return labels, predictions

    def fit(self, loader: Any, progress: bool = True) -> Self:
        """Learn all samples of a loader in one pass. A second ``fit`` starts from an empty head. Returns self.

        Without a store, an error leaves the head unchanged. With a store, each batch is saved as soon as it is learned. To
        continue after an error, call ``clf.add(loader)``, because ``fit`` refuses a store that already holds samples.

        Args:
            loader: a DataLoader, or an iterable of batches: (x, y), (x, y, ids), (x, y, ids, subjects), or dicts with keys such
                as "image" and "label". A store requires ids. ``subjects`` names the owner of each sample. Do not use random
                augmentation.
            progress: show a progress bar in a terminal or notebook, if tqdm is installed.
        """
        if isinstance(loader, Tensor) or is_texts(loader):
            raise ValueError("fit takes a DataLoader or batches: fit([(x, y)]); to add one batch, add(x, y)")
        if self.samples is not None:
            if len(self.store):
                raise ValueError(
                    f"{self.store} holds {counted(len(self.store), 'sample')}, and fit starts empty: clf.add(loader) adds to "
                    "them (it skips ids that the store already holds); for another classifier use another folder"
                )
            self.add(loader, progress=progress)
        else:
            self._learn(loader, progress, anew=True)
        self._finish_fit()
        return self

    def add(
        self, images: Any, y: Tensor | None = None, *, ids: Any = None, subjects: Any = None, progress: bool = True,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Add ``images`` (B, ...) with labels ``y`` (B,), or all batches of a loader: ``clf.add(loader)``.

        Returns self, or the ids if the head returns ids. Without a store, an error while a loader is read leaves the head
        unchanged. With a store, the loader is added batch by batch, and samples whose ids the store already holds are skipped.

        Args:
            images: (B, ...), a DataLoader, or an iterable of batches as for :meth:`fit`.
            y: (B,) class numbers, or a list of class names if the classes have names.
            ids: (B,) sample ids. Required with a store.
            subjects: (B,) owners of the samples, or one owner for all of them. Requires a store.
            progress: show a progress bar while a loader is read.
            options: for ``head.add``.
        """
        if y is None and self.samples is None:
            return self._learn(images, progress)
        if self.samples is not None:
            if options:
                raise ValueError(
                    f"with a store, add takes ids= and subjects=, not {', '.join(options)}: a store holds each sample once"
                )
            if y is not None:
                self.samples.add(self.features(images), self._labels(y), ids, subjects)
                return self
            for part in self._batches(images, None, progress, "add"):
                self.samples.add(self.features(part.x), part.y, part.ids, part.subjects, more=True)
            self.samples.store.recalibrate()
            return self
        if subjects is not None:
            raise ValueError(
                "subjects are kept in a store: attach(..., store=folder), or clf.join(folder) before samples"
            )
        named = {} if ids is None else {"ids": ids}
        return self._ask("add", self.features(images), self._labels(y), **options, **named)

    def _learn(self, loader: Any, progress: bool, anew: bool = False) -> Any:
        """Learn all batches of a loader, or none, without a store: in an empty head, or in a second one and a merge."""
        head = self.head
        samples = SampleAdapter(head)
        aside: Any = None
        if samples.count and isinstance(head, LinearHead):
            aside = type(head).from_config(head.config(), device=head.device)
            if not anew and head.statistics.exact:
                chosen = head.statistics.choices
                aside.statistics.decide(chosen.kind, chosen.grid, chosen.target_grid)
        kept = copy.deepcopy(head.state_dict()) if aside is None and samples.count else None
        machine: Any = head if aside is None else aside
        learned: list[Any] = []

        def put_back() -> None:
            if kept is not None:
                head.load_state_dict(kept)
            elif aside is None:
                samples.clear()

        with all_or_nothing(head, put_back):
            if anew and aside is None:
                samples.clear()
            for part in self._batches(loader, None, progress, "fit" if anew else "add"):
                if part.subjects is not None:
                    warnings.warn(
                        "subjects of the samples are not kept without a store, and nothing can be removed by them later: "
                        "attach(..., store=folder)",
                        stacklevel=3,
                    )
                named = {"ids": part.ids} if getattr(machine, "statistics", None) is not None and part.ids else {}
                learned.append(machine.add(self.features(part.x), part.y, **named))
            if anew and not learned:
                raise ValueError(
                    "the loader gave no batch, so there is nothing to fit: an iterator is used up after one pass"
                )
        if aside is not None:
            with head._lock:
                if anew:
                    head.clear()
                head.merge(aside)
        if not learned or learned[0] is machine:
            return self
        return torch.cat(learned) if isinstance(learned[0], Tensor) else [i for ids in learned for i in ids]

    def remove(
        self, images: Tensor | None = None, y: Tensor | None = None, *, ids: Any = None, subject: Any = None,
        receipt: str | os.PathLike[str] | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Remove samples from the head. With a store, pass ``subject`` or ``ids``; otherwise pass the samples as added.

        Returns an :class:`~torchlssvm.store.EventResult` with a store, and self without one.

        Args:
            images: (B, ...), the images to remove if there is no store. Their features must equal the features that were added,
                bit for bit.
            y: (B,), the labels that the images were added with.
            ids: (B,) ids of samples in the store.
            subject: remove all samples of this subject from the store. If you pass a list of subjects, a list of results is
                returned.
            receipt: file to write the erasure receipt to, before the bytes can be destroyed. Requires a store.
            options: further arguments for ``head.remove``.
        """
        named = subject is not None or (ids is not None and images is None)
        if named and self.samples is None:
            raise ValueError(
                "removal by subject or ids needs the samples, and only a store keeps them: attach(..., store=folder). Without "
                "one: clf.remove(images, y)"
            )
        if self.samples is not None:
            if images is not None or options:
                raise ValueError("the store knows its samples: clf.remove(subject='u42') or clf.remove(ids=['a', 'b'])")
            return self.samples.remove(ids, subject, receipt)
        if images is None or y is None:
            raise ValueError("remove takes the images and labels that were added: clf.remove(images, y)")
        return self._ask(
            "remove", self.features(images), self._labels(y), **options, **({} if ids is None else {"ids": ids})
        )

    def add_classes(self, classes: int | Sequence[str]) -> Self:
        """Add classes, given as a name, a list of names or a number. A store records the change in its journal.

        If you pass names and the existing classes have no names, each existing class is named after its number.
        """
        if self.samples is not None:
            self.samples.store.add_classes(classes)
            return self
        more, names = more_classes(classes, self.classes, self.head.num_classes)
        self.head.add_classes(more)
        self.classes = names
        return self

    def restrict(self, columns: Any, store: Any = None) -> AttachedClassifier:
        """Return a new classifier that uses only some feature columns and has learned the same samples.

        The original classifier does not change.

        Args:
            columns: indices (k,), a slice, a mask (J,), or the result of ``select`` or ``select_groups`` for ``clf.head``
                (:mod:`torchlssvm.linear.column_selection`), which also sets rho and scale.
            store: folder of a new store for the new classifier; it must not exist or must be empty. All samples of the original
                store are copied. If an error occurs, the folder is removed.
        """
        self._follow()
        check_head(self.head)
        if self.head.normalize == "l2":
            raise ValueError(
                "normalize='l2' divides a row by its length over all columns, which some columns do not determine"
            )
        if isinstance(columns, Selection):
            if columns.source is not self.head:
                raise ValueError("the columns were selected for another head: select again for clf.head")
            head, numbers = copy.deepcopy(columns.head), columns.best.columns.cpu()
        else:
            numbers = check_columns(columns, self.in_features, torch.device("cpu"))
            head = restrict(self.head, numbers.to(self.head.device))
        features = Features(self.backbone, self.in_features, self.network_options).restrict(numbers)
        made = AttachedClassifier(features, head, deterministic=self._batch_size, preprocess=self.preprocess)
        made.source, made.classes = self.source, self.classes
        if store is not None:
            if self.samples is None:
                raise ValueError("a store needs the samples, and this classifier has no store from which to copy them")
            made.head = type(head).from_config(head.config(), device=head.device)
            folder = Path(store)
            if folder.exists() and any(folder.iterdir()):  # samples in it would join those that are copied
                raise ValueError(f"{folder} is not empty: give the folder of a new store")
            try:
                made.join(folder)
                assert made.samples is not None
                made.samples.copy(self.store, numbers, head)
            except BaseException:
                if made.samples is not None:
                    made.store.close()
                shutil.rmtree(folder, ignore_errors=True)
                raise
        return made

    def relabel(
        self, images: Tensor | None = None, y_old: Tensor | None = None, y_new: Any = None, *, ids: Any = None
    ) -> Any:
        """Change the labels of samples from ``y_old`` (B,) to ``y_new`` (B,).

        With a store, pass ``ids`` and ``y_new``. Without a store, pass ``images`` (B, ...), ``y_old`` and ``y_new``. Pass
        labels as class numbers, or as names if the classes have names.
        """
        y_old, y_new = self._labels(y_old), self._labels(y_new)
        if self.samples is not None:
            if ids is None or images is not None or y_new is None:
                raise ValueError("the store knows its samples: clf.relabel(ids=['a', 'b'], y_new=[3, 1])")
            return self.samples.relabel(ids, y_new)
        if images is None or y_old is None or y_new is None:
            raise ValueError(
                "relabel takes images and labels as added, and the new labels: clf.relabel(images, y_old, y_new)"
            )
        return self._ask("relabel", self.features(images), y_old, y_new)

    def _finish_fit(self) -> None:
        """Choose rho and other data-dependent options again, and solve, at the end of a fit."""
        if self.samples is not None:
            self.samples.store.refresh()
        elif SampleAdapter(self.head).count and isinstance(self.head, LinearHead):
            self.head.refresh()

    def save(self, path: str | os.PathLike[str], backbone: bool = True) -> None:
        """Save the head, its statistics and the backbone weights to a file. ``backbone=False`` leaves out the weights.

        The file still contains the statistics of samples that you remove later. A store lists the file in its certificates.
        """
        kind = type(self.head).__name__
        if kind not in HEAD_TYPES:
            raise ValueError(
                f"save writes an LSSVMHead or a MarginHead; a {kind} is saved by torch.save(clf.head.state_dict())"
            )
        self._follow()
        position = None if self.samples is None else self.samples.store.head_position  # before the head is read
        saved = {
            "format": CLASSIFIER_FORMAT,
            "head": {"type": kind, "config": self.head.config(), "state": self.head.state_dict()},
            "in_features": self.in_features,
            "deterministic": self._batch_size,
            "classes": self.classes,
            "network": self.network_options.saved(),
            "backbone": {"hash": module_hash(self.backbone), "state": self.backbone.state_dict() if backbone else None},
        }
        refuse_in_store(path)
        with replacement(path) as new, new.open("wb") as file:
            torch.save(saved, file)
        if self.samples is not None:
            self.samples.store.register_checkpoint(path, position)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: nn.Module | str, store: Any = None, *, views: Sequence[Any] | None = None,
        feature_map: nn.Module | None = None, tokenizer: Any = None, preprocess: Callable[[Any], Any] | None = None,
    ) -> AttachedClassifier:  # fmt: skip
        """Load a classifier that :meth:`save` wrote into a model of the same architecture.

        The file records which layers were tapped and how, but it does not contain your own objects, so pass them again. If the
        file has no backbone weights, the model must have the same weights as the saved one.

        Args:
            path: the file. Only tensors and primitives are read from it.
            model: the network or its name as given to :func:`attach`, or the backbone of the classifier. The model is changed.
            store: folder of the store that keeps the samples. The head is then restored from the store.
            views: as given to :func:`attach`. Required if they include callables.
            feature_map: as given to :func:`attach`.
            tokenizer: as given to :func:`attach`.
            preprocess: as given to :func:`attach`.
        """
        try:
            saved = load_tensors(path)
            if not isinstance(saved, Mapping) or saved.get("format") != CLASSIFIER_FORMAT:
                raise VerificationError(f"{path} is not a classifier file written by save")
            about, network = saved["head"], saved["backbone"]
            head = HEAD_TYPES[about["type"]].from_config(about["config"])
            how, J = NetworkOptions(**saved["network"]), int(saved["in_features"])
            deterministic, classes = int(saved["deterministic"]), saved["classes"]
            if store is None:
                head.load_state_dict(about["state"])
        except (
            pickle.UnpicklingError,
            EOFError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:
            raise VerificationError(f"{path} cannot be read as a classifier: {error}") from error
        model, source, prepare = _load_network(model, tokenizer, preprocess, store)
        if model.state_dict().keys() == (network["state"] or {}).keys() or module_hash(model) == network["hash"]:
            features = Features(model, J, how)  # the backbone itself
        else:
            features = make_features(model, how._replace(views=tuple(views or how.views), feature_map=feature_map))
        fitting = new_head(head.to(features.device or "cpu"), features, head.num_classes, {})
        made = cls(features, fitting, deterministic=deterministic, preprocess=prepare)
        if network["state"] is not None:
            try:
                made.backbone.load_state_dict(network["state"])
            except RuntimeError as error:
                raise ValueError(
                    f"{path} was saved with another network than {type(model).__name__}: {error}"
                ) from error
        if module_hash(made.backbone) != network["hash"]:
            with_weights = network["state"] is not None
            raise ValueError(
                f"{path} was saved with another network: {type(model).__name__} has other layers or another dtype"
                + ("" if with_weights else ", or other weights, and the file is without the weights of its own")
                + ". Give the model that it was attached to"
            )
        made.source, made.classes = source, classes
        return made if store is None else made.join(store)

    def _ask(self, verb: str, *args: Any, **options: Any) -> Any:
        if verb in ("predict", "predict_proba"):
            self._follow()
        answer = getattr(self.head, verb)(*args, **options)
        return self if answer is self.head else answer

    def _prove(self, images: Any, network: nn.Module, last_layer: str) -> Any:
        """Run the network and return its output, which must be the value of the Identity at ``last_layer``."""
        seen: list[Tensor] = []
        layer = network.get_submodule(last_layer)
        handle = layer.register_forward_hook(lambda _module, _args, value: seen.append(value))
        try:
            phi = run(network, images)
        finally:
            handle.remove()
        # A different shape means pooling, or is refused because of its width.
        comparable = bool(seen) and isinstance(phi, Tensor) and phi.shape == seen[-1].shape and not is_fake(phi)
        if not seen or (comparable and not torch.allclose(phi, seen[-1].to(phi), 0.0, 0.0, equal_nan=True)):
            what = "changes what comes out of" if seen else "does not use"
            raise ValueError(
                f"{type(network).__name__}.forward {what} {last_layer!r}, which attach took for its last layer. "
                "Name the last layer, layer='name', or make a backbone that ends in its features and pass their width: "
                f"attach(backbone, num_classes, in_features={self.in_features})"
            )
        self._unproven = None
        return phi


def draw_confusion(counts: Tensor, classes: Sequence[str] | None, path: str | os.PathLike[str]) -> None:
    """Draw a confusion matrix (K, K) to a file."""
    from matplotlib.figure import Figure

    refuse_in_store(path)
    K = len(counts)
    shares = counts.to(torch.float64) / counts.sum(1, keepdim=True).clamp(min=1)
    size = max(4.0, 0.35 * K + 1.5)
    figure = Figure(figsize=(size, size), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares.cpu().numpy(), cmap="Blues", vmin=0.0, vmax=1.0)
    names = list(classes or map(str, range(K)))
    axes.set_xticks(range(K), names, rotation=90 if max(map(len, names)) > 2 else 0)
    axes.set_yticks(range(K), names)
    axes.set(xlabel="predicted", ylabel="label")
    for row, column in counts.nonzero().tolist() if K <= 20 else ():
        color = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, str(int(counts[row, column])), ha="center", va="center", color=color, fontsize=8)
    figure.savefig(path, dpi=120)


def single_rows(batch: Any) -> Iterator[Any]:
    """Each sample of a batch of texts, or of a dict of tensors, as a batch of one, without the tokens that its mask hides."""
    if not isinstance(batch, Mapping):
        yield from (batch[i : i + 1] for i in range(operator.length_hint(batch)))
        return
    mask, B = batch.get("attention_mask"), next((len(v) for v in batch.values() if isinstance(v, Tensor) and v.ndim), 0)
    for i in range(B):
        shown = mask[i].bool() if isinstance(mask, Tensor) else None
        row = dict(batch)
        for name, value in batch.items():
            if isinstance(value, Tensor) and value.ndim and len(value) == B:  # others are of the whole batch
                row[name] = value[i : i + 1]
                if shown is not None and value.ndim == 2 and value.shape[1] == len(shown):
                    row[name] = row[name][:, shown]
        yield row


def fill_batch(part: Tensor, size: int) -> Tensor:
    """Fill a batch up to ``size`` images with copies of the first one. part: (B, ...)."""
    missing = size - len(part)
    return part if missing <= 0 else torch.cat([part, part[:1].expand(missing, *part.shape[1:])])
