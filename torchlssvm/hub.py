"""Classifiers in the form of the Hugging Face hub: a folder with weights, a configuration and a model card.

Weights only, unless statistics are asked for: of a linear head nothing but w and b can then be read. The card names the grid,
the hash of the backbone and the number of erasures, and never a digest: that would confirm a guess about a sample once it is
erased. Needs ``torchlssvm[hub]``; a folder on this machine needs safetensors only.

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
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchlssvm._version import __version__
from torchlssvm.backbone_hash import module_hash
from torchlssvm.export import NormalizedLinear, PairVotes, freeze, load_safetensors, save_safetensors
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.linear import AttachedClassifier, LinearHead
from torchlssvm.linear.kinds import HEAD_TYPES
from torchlssvm.store import SampleStore

__all__ = ["from_pretrained", "save_pretrained"]

CONFIG_FILE, WEIGHTS_FILE, STATISTICS_FILE, CARD_FILE = (
    "config.json", "model.safetensors", "statistics.safetensors", "README.md",
)  # fmt: skip
"""Names of the files, as the hub knows them."""

HUB_FORMAT = "torchlssvm-hub-1"
"""Format of the configuration; it changes when folders can no longer be read as before."""


def save_pretrained(
    model: AttachedClassifier | LinearHead, folder: str | os.PathLike[str], *, statistics: bool = False,
    class_names: list[str] | None = None, store: SampleStore | None = None, repo_id: str | None = None,
    push_to_hub: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Write a head, or the head of an attached classifier, as a folder of the hub; the backbone stays out, its hash is in.

    Args:
        model: an ``LSSVMHead`` or ``MarginHead``, or what ``attach`` returned.
        folder: is made; files of an earlier save are replaced.
        statistics: write the sums too, with which samples can be added and removed later. **They are sums over the samples: who
            has some of them may learn something of the others.** A ``MarginHead`` writes its samples themselves.
        class_names: (K,), for the card and the configuration.
        store: of the samples, which knows the number of erasures; that of a classifier is used by itself.
        repo_id: name on the hub, e.g. "user/model".
        push_to_hub: upload the folder to ``repo_id``.
        options: of ``huggingface_hub.HfApi.upload_folder``.
    """
    head: Any = model.head if isinstance(model, AttachedClassifier) else model
    if not isinstance(head, LinearHead):
        raise ValueError(
            f"save_pretrained writes an LSSVMHead or a MarginHead; a {type(head).__name__} is made of its samples, and they do "
            "not belong on a hub"
        )
    if push_to_hub and repo_id is None:
        raise ValueError("push_to_hub needs repo_id, e.g. 'user/model'")
    if class_names is not None and len(class_names) != head.num_classes:
        raise ValueError(f"class_names must have {head.num_classes} names, got {len(class_names)}")
    store = store if store is not None or not isinstance(model, AttachedClassifier) else model.store
    frozen = freeze(head)  # NotFittedError without samples
    config = {
        "format": HUB_FORMAT,
        "version": __version__,
        "head": type(head).__name__,
        "in_features": head.in_features,
        "num_classes": head.num_classes,
        "multiclass": head.multiclass,
        "normalize": head.normalize,
        "grid": describe_grid(head.grid),
        "backbone_hash": module_hash(model.backbone) if isinstance(model, AttachedClassifier) else None,
        "erasures": None if store is None else sum(entry.kind == "remove" for entry in store.history()),
        "class_names": class_names,
        "statistics": statistics,
    }
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    save_safetensors(frozen, place / WEIGHTS_FILE)
    if statistics:
        from safetensors.torch import save_file

        state = {name: value.detach().cpu().contiguous().clone() for name, value in head.state_dict().items()}
        save_file(state, place / STATISTICS_FILE, metadata={"format": HUB_FORMAT, "config": json.dumps(head.config())})
    else:
        (place / STATISTICS_FILE).unlink(missing_ok=True)  # of an earlier save: not asked for now
    (place / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (place / CARD_FILE).write_text(model_card(config), encoding="utf-8")
    if push_to_hub and repo_id is not None:
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(repo_id, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=place, **options)


def from_pretrained(
    name: str | os.PathLike[str], backbone: nn.Module | None = None, *, statistics: bool = False, **options: Any
) -> nn.Module:
    """Read what :func:`save_pretrained` wrote: scores of features, or of images behind the backbone.

    Args:
        name: a folder, or the name of a model on the hub.
        backbone: makes features of images, as ``clf.backbone`` does; it must be the one of the configuration, by its hash.
        statistics: return the head itself (or a classifier, with a backbone), which can add and remove samples. Only for a
            model that was saved with them.
        options: of ``huggingface_hub.snapshot_download``, e.g. ``revision``.
    """
    place = Path(name)
    if not place.is_dir():
        from huggingface_hub import snapshot_download

        place = Path(snapshot_download(str(name), **options))
    try:
        config = json.loads((place / CONFIG_FILE).read_text(encoding="utf-8"))
        J, K = int(config["in_features"]), int(config["num_classes"])
        known = config["format"] == HUB_FORMAT and config["multiclass"] in ("ovr", "ovo")
        normalize, expected = config["normalize"], config["backbone_hash"]
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is no model that save_pretrained wrote: {error}") from error
    if not known:
        raise ValueError(f"{name} is of a format that this version does not read: {config['format']!r}")
    if backbone is not None and expected is not None and module_hash(backbone) != expected:
        raise ValueError(f"the backbone is not the one that {name} was learned on: its hash is another")
    scores = read_head(place, name) if statistics else read_weights(place, J, K, config["multiclass"], normalize)
    if backbone is None:
        return scores
    if statistics:
        return AttachedClassifier(backbone, scores, J)
    return nn.Sequential(backbone.requires_grad_(False), nn.Flatten(1), scores).eval()


def read_weights(place: Path, J: int, K: int, multiclass: str, normalize: str | None) -> nn.Module:
    """Read the frozen form of a head."""
    state, _ = load_safetensors(place / WEIGHTS_FILE)
    outputs = K * (K - 1) // 2 if multiclass == "ovo" else K
    dtype = next(iter(state.values())).dtype
    linear = nn.Linear(J, outputs, dtype=dtype)
    if normalize is not None:
        linear = NormalizedLinear(J, outputs, normalize, dtype=dtype)
    model = PairVotes(linear, K) if multiclass == "ovo" else linear
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{place / WEIGHTS_FILE} does not fit its configuration: {error}") from error
    return model.requires_grad_(False).eval()


def read_head(place: Path, name: Any) -> nn.Module:
    """Read a head with its statistics."""
    from safetensors import SafetensorError, safe_open

    path = place / STATISTICS_FILE
    if not path.exists():
        raise ValueError(f"{name} was saved without statistics: it can be asked, and cannot learn or unlearn")
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            saved = json.loads((file.metadata() or {})["config"])
            state: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        kind = json.loads((place / CONFIG_FILE).read_text(encoding="utf-8"))["head"]
        head = HEAD_TYPES[kind].from_config(saved)
        head.load_state_dict(state)
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read as the statistics of a head: {error}") from error
    return head


def describe_grid(grid: FixedPoint | None) -> dict[str, float] | None:
    """Limit and resolution of a grid; None for float64 sums."""
    return None if grid is None else {"limit": grid.limit, "resolution": grid.resolution}


def model_card(config: dict[str, Any]) -> str:
    """The card of a model, as Markdown with the hub's header."""
    grid = config["grid"]
    rows = {
        "head": f"`{config['head']}`, {config['in_features']} features, {config['num_classes']} classes",
        "classes": None if config["class_names"] is None else ", ".join(config["class_names"]),
        "grid": "none (float64 sums)"
        if grid is None
        else f"limit {grid['limit']:g}, resolution {grid['resolution']:.3g}",
        "backbone, SHA-256": f"`{config['backbone_hash']}`" if config["backbone_hash"] else "none: it takes features",
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

After an erasure a new version takes the place of this one; older versions still hold what was erased.
"""
