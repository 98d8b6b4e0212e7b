"""Batches of labelled samples as data loaders give them: tuples or dictionaries, with or without ids and subjects."""

from __future__ import annotations

import difflib
import math
import operator
import os
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from torchlssvm.progress_bar import progress_bar
from torchlssvm.wording import listed

FIELD_NAMES: dict[str, tuple[str, ...]] = {
    "x": ("x", "image", "images", "pixel_values", "features", "inputs", "text", "texts", "sentence"),
    "y": ("y", "label", "labels", "target", "targets"),
    "ids": ("ids", "id"),
    "subjects": ("subjects", "subject"),
}
"""Names under which a dictionary may hold the four parts of a batch, including the names in common datasets."""


class TrainingBatch(NamedTuple):
    """A batch: inputs, labels (B,), and ids and subjects if it has them.

    Inputs are a tensor (B, ...), a list of texts or pictures, or a dict of tensors as a tokenizer returns it.
    """

    x: Any
    y: Tensor
    ids: list[str] | None
    subjects: list[str | None] | None


def check_names(names: Mapping[str, str] | None) -> dict[str, tuple[str, ...]]:
    """Names of the parts of a dictionary: the given and otherwise the usual names. Raises ValueError for an unknown part."""
    unknown = sorted(set(names or {}) - set(FIELD_NAMES))
    if unknown:
        raise ValueError(f"names are given for {', '.join(FIELD_NAMES)}; got {unknown}")
    return {part: (names[part],) if names and part in names else usual for part, usual in FIELD_NAMES.items()}


def class_numbers(y: Any, classes: Sequence[str] | None, targets: str = "classes") -> Any:
    """Labels as numbers, from names of classes (one, or a list, array or Series of names). Anything else is returned as it is.

    Raises ValueError for an unknown name, and for any name if ``targets`` is "multilabel" or "regression".

    >>> class_numbers(["dog", "cat"], ["cat", "dog"])
    [1, 0]
    """
    numeric = isinstance(y, Tensor) or getattr(getattr(y, "dtype", None), "kind", "O") in "biuf"
    values = y if numeric else [y] if isinstance(y, str) else y.tolist() if hasattr(y, "tolist") else y
    if numeric or not isinstance(values, list | tuple) or not any(isinstance(value, str) for value in values):
        return y
    if targets != "classes":
        text = next(value for value in values if isinstance(value, str))
        rows = "0 and 1 for each label" if targets == "multilabel" else "numbers"
        raise ValueError(
            f"y holds the name {text!r}; targets={targets!r} takes rows (B, K) of {rows}. Nothing was changed."
        )
    known = {name: number for number, name in enumerate(classes or ())}
    unknown = next((value for value in values if isinstance(value, str) and value not in known), None)
    if unknown is not None and not known:
        raise ValueError(
            f"{unknown!r} is the name of a class, but the classes have no names: attach(..., classes=[...])"
        )
    if unknown is not None:
        close = difflib.get_close_matches(unknown, known)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"the classes are {listed(list(known))}."
        raise ValueError(f"there is no class {unknown!r}; {hint} Nothing was changed.")
    others = [value for value in values if not isinstance(value, str | int | np.integer)]
    if others:
        raise ValueError(f"{others[0]!r} among names of classes is neither a name nor a number. Nothing was changed.")
    numbers = [known[value] if isinstance(value, str) else value for value in values]
    return numbers[0] if isinstance(y, str) else numbers


MOST_CLASSES = 2**24
"""Classes that a head may have after more were added: with one feature, it then takes about a gigabyte."""


def more_classes(more: Any, names: Sequence[str] | None, K: int) -> tuple[int, list[str] | None]:
    """The number of classes to add to K classes, and the names of all classes then; None if no class has a name.

    ``more`` is the number of new classes, or their names, or one name. Classes without a name are called by their numbers.

    >>> more_classes("cat", None, 2)
    (1, ['0', '1', 'cat'])
    """
    new = [more] if isinstance(more, str) else list(more) if isinstance(more, Iterable) else None
    number = isinstance(more, int | np.integer) and not isinstance(more, bool)
    if (new is None and not number) or not all(isinstance(name, str | int | np.integer) for name in new or ()):
        raise ValueError(f"classes to add are a number, a name or a list of names; got {more!r}. Nothing was changed.")
    count = int(more) if new is None else len(new)
    if count < 1:
        raise ValueError(f"give one or more classes to add, got {more!r}")
    if K + count > MOST_CLASSES:
        raise ValueError(f"a head has at most {MOST_CLASSES} classes; {K} and {count} more were asked for")
    if new is None and not names:
        return count, None
    digits = [str(label) for label in range(K + count)]
    known = [*(names or ()), *digits[len(names or ()) : K], *(digits[K:] if new is None else new)]
    known = [unicodedata.normalize("NFC", str(name)) for name in known]
    if len(set(known)) < len(known):
        raise ValueError(f"the classes would be {known}, and they need different names. Nothing was changed.")
    return count, known


def unpack(
    batch: Any, names: Mapping[str, str] | None = None, views: bool = False, classes: Sequence[str] | None = None,
    targets: str = "classes",
) -> TrainingBatch:  # fmt: skip
    """Unpack a batch (x, y), (x, y, ids) or (x, y, ids, subjects), or a dict such as {"image": x, "label": y}.

    ``names`` are the names of the parts of a dict, e.g. ``{"x": "photo"}``. With ``views`` a batch may have several views of
    the samples, in a list, ((x1, x2), y), or one by one, (x1, x2, y). Only the first view is used. ``classes`` are the names
    of the classes, by which labels may be given if ``targets`` is "classes".

    >>> unpack({"image": torch.zeros(2, 3), "label": torch.tensor([0, 1])}).y
    tensor([0, 1])
    """
    x, y, ids, subjects = parts_of(batch, names)
    if views and isinstance(x, list | tuple) and x:
        x = x[0]
    if views and isinstance(batch, list | tuple) and not is_labels(y):  # the views come one by one, then the labels
        y = next((part for part in batch if is_labels(part)), y)
    if views:
        ids = subjects = None  # ignore the other parts of the batch
    y = torch.tensor(class_numbers(y, classes, targets)) if is_texts(y) else y
    if not (isinstance(x, Tensor | Mapping) or is_listed(x)) or not isinstance(y, Tensor):
        found = f"a {type(batch).__name__}"
        if isinstance(batch, Mapping):
            found += f" of {list(batch)}"
        elif isinstance(batch, list | tuple):
            found += f" of {[type(part).__name__ for part in batch]}"
        raise ValueError(
            "a batch must be (x, y), (x, y, ids), (x, y, ids, subjects) or a dict of x (or 'image') and y (or 'label'), with "
            f"a tensor y, and x a tensor, a list of texts or pictures, or a dict of tokens; got {found}"
        )
    owners: list[str | None] | None = None
    if isinstance(subjects, str):
        owners = [subjects or None] * len(y)
    elif subjects is not None:
        owners = [None if _is_missing(s) else _text(s, "subjects") for s in _values(subjects, "subjects")]
    return TrainingBatch(x, y, None if ids is None else [_text(i, "ids") for i in _values(ids, "ids")], owners)


def parts_of(batch: Any, names: Mapping[str, str] | None = None) -> list[Any]:
    """Inputs, labels, ids and subjects of a tuple or dict, as they are; None for each missing part."""
    if isinstance(batch, list | tuple) and 2 <= len(batch) <= 4:
        return [*batch, None, None][:4]
    usual = check_names(names)
    if not isinstance(batch, Mapping):
        return [None] * 4
    parts = [next((batch[name] for name in known if name in batch), None) for known in usual.values()]
    if "input_ids" in batch and parts[0] is None:  # tokens: all tensors that belong to no other part
        taken = {name for part, known in usual.items() if part != "x" for name in known}
        parts[0] = {name: value for name, value in batch.items() if isinstance(value, Tensor) and name not in taken}
    return parts


def _values(part: Any, name: str) -> list[Any]:
    """Values of a list, tuple, tensor or array. Raises ValueError for a dict or a text, which would be split into letters."""
    if isinstance(part, str | bytes | Mapping) or not isinstance(part, Iterable):
        raise ValueError(f"{name} of a batch must be a list of texts or ints, one for each sample; got {part!r}")
    return list(part.tolist() if hasattr(part, "tolist") else part)


def _text(value: Any, name: str) -> str:
    """A name as text, or an int as its digits. Raises ValueError for anything else."""
    if isinstance(value, Tensor) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, str | int | np.integer):
        raise ValueError(f"{name} of a batch must be texts or ints, one for each sample; got {value!r} among them")
    return str(value)


def _is_missing(value: Any) -> bool:
    """True for None, an empty text and not-a-number, which tables contain for a sample without a subject."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def is_labels(part: Any) -> bool:
    """True for a tensor of integers (B,)."""
    return isinstance(part, Tensor) and part.ndim == 1 and not part.is_floating_point() and not part.is_complex()


def batches_of(
    loader: Any, device: torch.device, progress: bool, what: str, classes: Sequence[str] | None = None,
    targets: str = "classes",
) -> Iterator[TrainingBatch]:  # fmt: skip
    """Unpacked batches of a loader on a device, behind a progress bar if tqdm is installed and the output is a terminal."""
    if isinstance(loader, Tensor):
        raise ValueError(f"{what} takes images and labels, {what}(images, y), or batches of both, {what}(loader)")
    if hasattr(loader, "columns"):
        raise ValueError(
            f"{what} takes no table: pass its columns, clf.add(table['text'], table['label'], ids=table.index)"
        )
    if isinstance(loader, Dataset) or not isinstance(loader, Iterable) or isinstance(loader, str | Mapping | nn.Module):
        raise ValueError(
            f"{what} takes a DataLoader or batches (x, y), got a {type(loader).__name__}; of a dataset: "
            f"{what}(DataLoader(dataset, batch_size=64))"
        )
    for batch in with_progress_bar(loader, what) if progress else loader:
        part = unpack(batch, classes=classes, targets=targets)
        yield part._replace(x=to_device(part.x, device), y=part.y.to(device))


def is_loader(inputs: Any) -> bool:
    """True for a loader or a list of batches. False for one batch of inputs (a tensor, texts, tokens) and refused types."""
    if isinstance(inputs, list | tuple):
        first = inputs[0] if inputs else None
        return isinstance(first, Mapping) or (
            isinstance(first, list | tuple) and bool(first) and not isinstance(first[0], int | float)
        )
    if isinstance(inputs, Tensor | Mapping | str | Dataset | nn.Module) or hasattr(inputs, "shape"):
        return False
    return isinstance(inputs, Iterable)


def inputs_of(loader: Any, device: torch.device, progress: bool, what: str) -> Iterator[Any]:
    """Inputs of the batches of a loader on a device. Batches may have labels, which are ignored, or be inputs alone."""
    for batch in with_progress_bar(loader, what) if progress else loader:
        yield to_device(unpack_inputs(batch), device)


def unpack_inputs(batch: Any, names: Mapping[str, str] | None = None) -> Any:
    """The inputs of a batch with or without labels. ``names`` are the names of the parts of a dict."""
    if isinstance(batch, Mapping):
        x = parts_of(batch, names)[0]
        return batch if x is None else x
    labelled = isinstance(batch, list | tuple) and bool(batch) and not is_listed(batch)
    return batch[0] if labelled else batch


def first_samples(batch: TrainingBatch, count: int) -> TrainingBatch:
    """The first samples of a batch."""
    x, y, ids, subjects = batch
    x = {name: value[:count] for name, value in x.items()} if isinstance(x, Mapping) else x[:count]
    return TrainingBatch(x, y[:count], ids and ids[:count], subjects and subjects[:count])


def to_device(x: Any, device: torch.device) -> Any:
    """Inputs of a batch on a device: a tensor, or each tensor of a dict; texts stay as they are."""
    if isinstance(x, Mapping):
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in x.items()}
    return x.to(device) if isinstance(x, Tensor) else x


def is_texts(x: Any) -> bool:
    """True for a list or tuple of texts."""
    return isinstance(x, list | tuple) and bool(x) and all(isinstance(text, str) for text in x)


def is_listed(x: Any) -> bool:
    """Return True for a list or tuple of texts, of paths or of PIL images."""
    known = isinstance(x, list | tuple) and bool(x)
    return known and all(isinstance(item, str | os.PathLike) or hasattr(item, "convert") for item in x)


def with_progress_bar(batches: Any, what: str) -> Iterator[Any]:
    """Batches, counted by a progress bar."""
    with progress_bar(what, operator.length_hint(batches) or None) as count:
        for batch in batches:
            yield batch
            count(1)
