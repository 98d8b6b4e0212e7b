"""Save and load classifiers in the format of the Hugging Face Hub: a folder with weights, a configuration and a model card.

The folder contains only the weights w and b of a linear head, unless you request statistics. Its model card names the grid,
the hash of the backbone and the number of erasures, but never a digest, because a digest could confirm a guess about an erased
sample. Uploads and downloads need ``torchlssvm[hub]``; a local folder needs only safetensors.

>>> import tempfile, torch
>>> from torchlssvm import LSSVMHead
>>> x, y = torch.randn(40, 4), torch.arange(40) % 2
>>> head = LSSVMHead(4, 2).add(x, y)
>>> folder = tempfile.mkdtemp()
>>> save_pretrained(head, folder)
>>> served = from_pretrained(folder)
>>> torch.allclose(served(x).double(), head(x), atol=1e-5)
True
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from torchlssvm import schema
from torchlssvm._version import __version__
from torchlssvm.backbone_hash import module_hash
from torchlssvm.canonical_json import loads
from torchlssvm.export import FlatFeatures, NormalizedLinear, PairVotes, freeze, load_safetensors, save_safetensors
from torchlssvm.features.description import describe_network
from torchlssvm.files import refuse_in_store
from torchlssvm.functional.checks import FLOAT_DTYPES
from torchlssvm.functional.row_normalization import ROW_NORMALIZATIONS
from torchlssvm.linear import LinearHead
from torchlssvm.linear.attach import AttachedClassifier, Features, NetworkOptions, make_features
from torchlssvm.linear.kinds import HEAD_TYPES
from torchlssvm.store import SampleStore
from torchlssvm.untrusted import read_regular

__all__ = ["from_pretrained", "save_pretrained"]

HUB_FILES = CONFIG_FILE, WEIGHTS_FILE, STATISTICS_FILE, CARD_FILE = (
    "config.json", "model.safetensors", "statistics.safetensors", "README.md",
)  # fmt: skip
"""Names of the files, as the hub expects them."""

HUB_FORMAT = "torchlssvm-hub-1"
"""The format of the configuration. It changes whenever the content of a folder changes incompatibly."""

MAX_CONFIG_BYTES = 2**24
"""Largest size of a configuration in bytes. The names of 100,000 classes need less."""


def save_pretrained(
    model: AttachedClassifier | LinearHead, folder: str | os.PathLike[str], *, statistics: bool = False,
    class_names: list[str] | None = None, store: SampleStore | None = None, repo_id: str | None = None,
    push_to_hub: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Write a head, or the head of an attached classifier, as a hub folder. Of the backbone, only the hash is written.

    Args:
        model: an ``LSSVMHead``, a ``MarginHead``, or a classifier that ``attach`` returned.
        folder: the folder to create. Files of an earlier save are replaced. An interrupted save cannot be read.
        statistics: also write the sums over the samples, so that samples can be added and removed later. **Someone who has the
            sums and some of the samples may learn something about the others.** A ``MarginHead`` writes the samples themselves.
        class_names: (K,) names for the card and the configuration. Default: the names of an attached classifier.
        store: the store of the samples, from which the number of erasures is read. Default: the store of an attached
            classifier. Certificates of later erasures list the written files.
        repo_id: the name on the hub, e.g. "user/model".
        push_to_hub: upload the files to ``repo_id``. If this call writes no statistics, statistics of an earlier upload are
            deleted on the hub.
        options: options of ``huggingface_hub.HfApi.upload_folder``.
    """
    head: Any = model.head if isinstance(model, AttachedClassifier) else model
    if not isinstance(head, LinearHead):
        raise ValueError(
            f"save_pretrained writes an LSSVMHead or a MarginHead; a {type(head).__name__} is made of its samples, and they do "
            "not belong on a hub"
        )
    if push_to_hub and repo_id is None:
        raise ValueError("push_to_hub needs repo_id, e.g. 'user/model'")
    if class_names is None and isinstance(model, AttachedClassifier) and len(model.classes or ()) == head.num_classes:
        class_names = model.classes
    names = None if class_names is None else check_names(class_names, head.num_classes)
    if store is None:
        store = model.store if isinstance(model, AttachedClassifier) else head._keeper  # type: ignore[assignment]
    followed = store is not None and store.head is head  # what other processes have erased is erased here too
    with head._lock:  # weights, sums and number of erasures of one state
        position = store.head_position if store is not None and followed else None
        frozen = freeze(head)  # NotFittedError without samples
        state, grid = head.state_dict() if statistics else {}, head.grid
    config: dict[str, Any] = {
        "format": HUB_FORMAT,
        "version": __version__,
        "head": type(head).__name__,
        "in_features": head.in_features,
        "num_classes": head.num_classes,
        "multiclass": head.multiclass,
        "normalize": head.normalize,
        "targets": head.targets,
        "grid": None if grid is None else {"limit": grid.limit, "resolution": grid.resolution},
        "backbone_hash": None,
        "network": None,
        "features": None,
        "erasures": None,
        "class_names": names,
        "statistics": statistics,
        "save": secrets.token_hex(16),  # in each file: files of two saves are not taken for one
    }
    if isinstance(model, AttachedClassifier):
        config["backbone_hash"], config["network"] = module_hash(model.backbone), model.network_options.saved()
        config["features"] = describe_network(model.backbone)
    if store is not None:
        erased = (entry.position for entry in store.history() if entry.kind == "remove")
        config["erasures"] = sum(position is None or at <= position for at in erased)
    place = Path(folder)
    refuse_in_store(place)
    place.mkdir(parents=True, exist_ok=True)
    (place / CONFIG_FILE).unlink(missing_ok=True)  # no model until all is written
    (place / STATISTICS_FILE).unlink(missing_ok=True)
    save_safetensors(frozen, place / WEIGHTS_FILE, {"save": config["save"]})
    if statistics:
        from safetensors.torch import save_file

        about = {"format": HUB_FORMAT, "config": json.dumps(head.config()), "save": config["save"]}
        tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
        save_file(tensors, place / STATISTICS_FILE, metadata=about)
    (place / CARD_FILE).write_text(model_card(config), encoding="utf-8")
    (place / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if store is not None and followed and not store.readonly:
        for name in (WEIGHTS_FILE, *([STATISTICS_FILE] if statistics else [])):
            store.register_checkpoint(place / name, position)
    if push_to_hub and repo_id is not None:
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(repo_id, exist_ok=True)
        own = {"allow_patterns": list(HUB_FILES), "delete_patterns": None if statistics else [STATISTICS_FILE]}
        api.upload_folder(repo_id=repo_id, folder_path=place, **own | options)


def check_names(names: Any, K: int) -> list[str]:
    """Raise ValueError unless there is a string as the name of each of the K classes."""
    listed = [] if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    if len(listed) != K or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"class_names must be a list of {K} names, each a string; got {names!r}")
    return listed


def from_pretrained(
    name: str | os.PathLike[str], backbone: nn.Module | None = None, *, statistics: bool = False, **options: Any
) -> nn.Module:
    """Load a model that :func:`save_pretrained` wrote, to score features or, with a backbone, images.

    Args:
        name: a folder, or the name of a model on the hub.
        backbone: the network as it was passed to ``attach`` (it is changed in place), or ``clf.backbone``. The hash of its
            weights must equal the hash in the configuration.
        statistics: return a head, or a classifier if you pass a backbone, to which you can add and from which you can remove
            samples. The model must have been saved with statistics.
        options: options of ``huggingface_hub.snapshot_download``, e.g. ``revision``.
    """
    place = Path(name)
    if not place.is_dir():
        if not isinstance(name, str) or place.is_absolute() or name.startswith(".") or name.count("/") > 1:
            raise FileNotFoundError(f"{name} is no folder here, and no name on the hub ('user/model')")
        from huggingface_hub import snapshot_download

        place = Path(snapshot_download(str(name), **options))
    config = read_config(place, name)
    expected = config["backbone_hash"]
    J = config["in_features"]
    try:
        how = NetworkOptions(**config.get("network") or {"in_features": J})
        if backbone is not None and expected is not None and module_hash(backbone) != expected:
            backbone = make_features(backbone, how).backbone
    except TypeError as error:
        raise ValueError(f"{name} describes a network by options that do not exist: {error}") from error
    if backbone is not None and expected is not None and module_hash(backbone) != expected:
        raise ValueError(f"the backbone is not the one that {name} was learned on: its hash is another")
    scores = read_head(place, config, name) if statistics else read_weights(place, config)
    if backbone is None:
        return scores
    if statistics:
        made = AttachedClassifier(Features(backbone, J, how), scores)
        made.classes = config.get("class_names")
        return made
    return nn.Sequential(backbone.requires_grad_(False), FlatFeatures(next(scores.parameters()).dtype), scores).eval()


CONFIG_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["format", "in_features", "num_classes", "multiclass", "normalize", "head", "backbone_hash"],
    "properties": {
        "format": {"const": HUB_FORMAT},
        "in_features": {"type": "integer", "minimum": 1},
        "num_classes": {"type": "integer", "minimum": 1},
        "multiclass": {"enum": ["ovr", "ovo"]},
        "normalize": {"enum": list(ROW_NORMALIZATIONS)},
        "head": {"enum": list(HEAD_TYPES)},
        "backbone_hash": {"type": ["string", "null"]},
        "network": {"type": ["object", "null"]},
        "class_names": {"type": ["array", "null"], "items": {"type": "string"}},
    },
}
"""The fields of a configuration that the program reads. The other fields are for people."""


def read_config(place: Path, name: Any) -> dict[str, Any]:
    """Read the configuration. Raises ValueError if the file is not a configuration."""
    try:
        config = loads(read_regular(place / CONFIG_FILE, MAX_CONFIG_BYTES))
        schema.check(config, CONFIG_SCHEMA)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} is no model that save_pretrained wrote: {error}") from error
    return dict(config)


def check_save(path: Path, metadata: Mapping[str, str], config: dict[str, Any]) -> None:
    """Raise ValueError if a file and the configuration are from different saves, because one was interrupted or replaced."""
    if metadata.get("save") != config.get("save"):
        raise ValueError(f"{path} and {CONFIG_FILE} are of two saves: save the model again")


def read_weights(place: Path, config: dict[str, Any]) -> nn.Module:
    """Read the frozen form of a head."""
    J, K, multiclass, normalize = (config[name] for name in ("in_features", "num_classes", "multiclass", "normalize"))
    state, metadata = load_safetensors(place / WEIGHTS_FILE)
    check_save(place / WEIGHTS_FILE, metadata, config)
    outputs = K * (K - 1) // 2 if multiclass == "ovo" else K
    weight = next((value for key, value in state.items() if key.endswith("weight")), None)
    fits = weight is not None and tuple(weight.shape) == (outputs, J) and metadata.get("normalize") == normalize
    if multiclass == "ovo":  # PairVotes takes as much memory as G of the file
        fits = fits and "G" in state and tuple(state["G"].shape) == (outputs, K)
    if weight is None or not fits:
        raise ValueError(f"{place / WEIGHTS_FILE} does not fit its configuration: {outputs} outputs of {J} features")
    dtype = weight.dtype
    if not all(v.dtype in FLOAT_DTYPES and bool(v.isfinite().all()) for v in state.values()):
        raise ValueError(f"{place / WEIGHTS_FILE} holds weights that are no finite numbers")
    linear = nn.Linear(J, outputs, dtype=dtype)
    if normalize is not None:
        linear = NormalizedLinear(J, outputs, normalize, dtype=dtype)
    model = PairVotes(linear, K) if multiclass == "ovo" else linear
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{place / WEIGHTS_FILE} does not fit its configuration: {error}") from error
    return model.requires_grad_(False).eval()


def read_head(place: Path, config: dict[str, Any], name: Any) -> nn.Module:
    """Read a head with its statistics."""
    path = place / STATISTICS_FILE
    if not path.exists():
        raise ValueError(f"{name} was saved without statistics: it can predict, but cannot learn or unlearn")
    try:
        state, metadata = load_safetensors(path, HUB_FORMAT)
        check_save(path, metadata, config)
        head = HEAD_TYPES[config["head"]].from_config(loads(metadata["config"]))
        head.load_state_dict(state)
        if (head.in_features, head.num_classes) != (config["in_features"], config["num_classes"]):
            raise ValueError("its shape is not that of the configuration")
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read as the statistics of a head: {error}") from error
    return head


def plain_text(name: str) -> str:
    """A name as it stands in a row of a Markdown table."""
    return "".join("\\" + c if c in "\\`*_{}[]<>#|" else c for c in " ".join(name.split()))


OUTPUTS = {"classes": "classes", "multilabel": "labels for each sample", "regression": "numbers"}


def model_card(config: dict[str, Any]) -> str:
    """The card of a model, as Markdown with the hub's header."""
    grid = config["grid"]
    rows = {
        "head": f"`{config['head']}`, {config['in_features']} features, {config['num_classes']} {OUTPUTS[config['targets']]}",
        "classes": None if config["class_names"] is None else ", ".join(map(plain_text, config["class_names"])),
        "grid": "none (float64 sums)"
        if grid is None
        else f"limit {grid['limit']:g}, resolution {grid['resolution']:.3g}",
        "backbone, SHA-256": f"`{config['backbone_hash']}`" if config["backbone_hash"] else "none: it takes features",
        "features": config["features"] and plain_text(config["features"]),
        "erasures so far": "not known, no store" if config["erasures"] is None else str(config["erasures"]),
        "statistics": "included: it can learn and unlearn" if config["statistics"] else "not included: weights only",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value is not None)
    task = "image-classification" if config["backbone_hash"] else "tabular-classification"
    return f"""---
library_name: torchlssvm
pipeline_tag: {task}
tags:
- torchlssvm
- svm
- machine-unlearning
---

# Classifier head with exact unlearning

| | |
|---|---|
{table}

```python
from torchlssvm.hub import from_pretrained

model = from_pretrained("this folder or repository"{", backbone" if config["backbone_hash"] else ""})
scores = model({"images" if config["backbone_hash"] else "features"})
```

After an erasure, a new version replaces this one. Older versions still contain the influence of the erased samples.
"""
