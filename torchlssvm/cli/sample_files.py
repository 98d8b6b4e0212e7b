"""Samples from .npy, .pt, CSV and Parquet files, from texts and from images. Unreadable input raises a ValueError."""

from __future__ import annotations

import csv
import gzip
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torchlssvm.backbones import load_network, load_pt
from torchlssvm.linear.attach import AttachedClassifier, attach
from torchlssvm.linear.labelled_batches import TrainingBatch
from torchlssvm.store.database import DEFAULT_WEIGHTS
from torchlssvm.wording import counted

Values: TypeAlias = list[str] | Tensor
"""One value for each sample: texts, or numbers (n,) or (n, K)."""

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}

NAME_COLUMNS = "Use --labels, --ids or --subjects to name columns that are not features."


@dataclass(frozen=True)
class FileSamples:
    """The samples of a file or a folder. Their features are read batch by batch."""

    path: Path
    width: int  # number of features
    ids: list[str]
    y: list[int | float] | Tensor | None  # (n,) labels or (n, K) targets
    subjects: list[str | None] | None
    read: Callable[[slice], Any]  # features (B, J) of some samples, or the texts themselves

    def __len__(self) -> int:
        return len(self.ids)

    def batches(self, size: int) -> Iterator[TrainingBatch]:
        """Yield all samples, ``size`` at a time."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            y: Any = None if self.y is None else torch.as_tensor(self.y[part])
            subjects = None if self.subjects is None else self.subjects[part]
            yield TrainingBatch(self.read(part), y, self.ids[part], subjects)


def read_samples(
    path: Path,
    label_of: Callable[[str], int | float],
    *,
    labels: str | None = None,
    ids: str | None = None,
    subjects: str | None = None,
    text: str | None = None,
    by_position: bool = False,
) -> FileSamples:
    """Read a file of features, or of texts. The features of a .npy file stay on the disk until a batch is read.

    Args:
        path: a .npy or .pt file with an array (n, J), a CSV file (.csv, .csv.gz) or a Parquet file. For texts, a table or a
            file with a text on each line.
        label_of: a function that returns the label of a class name, or raises ValueError.
        labels: a file, or a column of the table by name or by number (from 0; negative numbers count from the end).
        ids: a file or a column, like ``labels`` (default: ``<file name>:<row from 0>``).
        subjects: a file or a column, like ``labels``.
        text: the column of the texts, or None to read features.
        by_position: whether lists without ids are in the order of the samples.
    """
    named = {"id": ids, "label": labels, "subject": subjects}
    lines: list[int] = []
    columns: dict[str, Values] = {}
    wanted = named if text is None else named | {"text": text}
    x: Any
    if path.suffix == ".parquet":
        x, columns = read_parquet(path, wanted)
    elif is_table(path):
        x, columns, lines = read_table(path, wanted)
    elif text is not None:
        with open_text(path) as file:
            columns["text"] = [line.strip() for line in file if line.strip()]
    elif path.suffix in (".npy", ".pt"):
        x = load_matrix(path)
    else:
        raise ValueError(f"{path}: features must be in a .npy, .pt, .csv, .csv.gz or .parquet file")
    x = columns["text"] if text is not None else x
    if not len(x):
        raise ValueError(f"{path} contains no samples")
    lines = lines if "label" in columns else []
    keys = [f"{path.name}:{i}" for i in range(len(x))]
    for name, value in named.items():  # ids first: the others may go by them
        if value is not None and name not in columns:
            columns[name] = read_column(Path(value), name, keys, path, by_position)
        if name == "id" and name in columns:
            keys = as_texts(columns[name])
    y: Any = columns.get("label")
    if isinstance(y, list):
        for i, given in enumerate(y):
            try:
                y[i] = label_of(given)
            except ValueError as error:
                place = f"{path}, line {lines[i]}" if lines else labels
                raise ValueError(f"{place}: {error}") from None
    width = 0 if text is not None else x.shape[1]
    return FileSamples(path, width, keys, y, as_subjects(columns.get("subject")), lambda part: x[part])


def as_texts(values: Values) -> list[str]:
    """Convert the values of a column to texts."""
    return [str(v) for v in values.tolist()] if isinstance(values, Tensor) else values


def as_subjects(values: Values | None) -> list[str | None] | None:
    """Convert the values of a column to subjects. An empty value becomes None."""
    return None if values is None else [name or None for name in as_texts(values)]


# -- arrays and tensors ------------------------------------------------------------------------------------------------


def load_array(path: Path) -> Any:
    """Load a .npy or .pt file. The data of a .npy file stay on the disk if torch has their type."""
    if path.suffix == ".pt":
        return load_pt(path)
    path.stat()  # raises the OSError of a missing file
    try:
        values = np.lib.format.open_memmap(path, mode="c")  # "c": torch wants an array that could be written to
    except OSError:
        raise
    except Exception as error:  # numpy's parser of the header raises errors of many kinds
        raise ValueError(f"{path} is not a complete .npy file: {error}") from None
    if values.dtype.kind in "US" and values.ndim == 1:
        return [v.decode() if isinstance(v, bytes) else str(v) for v in values.tolist()]
    if values.dtype.kind not in "fiub":
        raise ValueError(f"{path} must contain real numbers, or texts in one dimension; it has {values.dtype}")
    known = values.dtype.isnative and values.dtype.str[1:] in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1")
    if known:
        return torch.from_numpy(values)
    fits = values.dtype.kind in "iu" and not (values > 2**63 - 1).any()
    return torch.from_numpy(values.astype(np.int64 if fits else np.float64))


def load_matrix(path: Path) -> Tensor:
    """Load features (n, J) from a .npy or .pt file."""
    values = load_array(path)
    if not isinstance(values, Tensor) or values.layout != torch.strided or values.is_complex() or values.is_quantized:
        kind = getattr(values, "dtype", type(values).__name__)
        raise ValueError(f"{path} must contain one array of real numbers, got {kind}")
    if values.ndim != 2:
        raise ValueError(f"{path} must contain features of shape (n, J), got shape {tuple(values.shape)}")
    return values


def load_column(path: Path) -> Values:
    """Load one value for each sample from a .npy or .pt file: numbers as a tensor (n,) or (n, K), texts as a list."""
    values = load_array(path)
    if isinstance(values, list | tuple) and all(isinstance(v, str | int) for v in values):
        return [str(v) for v in values]
    if not isinstance(values, Tensor) or values.ndim not in (1, 2):
        shape = f" of shape {tuple(values.shape)}" if isinstance(values, Tensor) else ""
        raise ValueError(f"{path} must contain one value for each sample, got {type(values).__name__}{shape}")
    return values if values.is_floating_point() else values.long()


# -- tables ------------------------------------------------------------------------------------------------------------


def is_table(path: Path) -> bool:
    """Return True if the name is that of a CSV file."""
    return path.name.lower().endswith((".csv", ".csv.gz"))


def is_number(cell: str) -> bool:
    """Return True if a cell is a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


@contextmanager
def open_text(path: Path) -> Iterator[Iterator[str]]:
    """Open the lines of a text file, gzipped or not."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from None


def read_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row of a CSV file, gzipped or not. All rows must have the same length."""
    width = 0
    with open_text(path) as file:
        reader = csv.reader(file)
        for row in filter(None, reader):
            width = width or len(row)
            if len(row) != width:
                raise ValueError(f"{path}, line {reader.line_num}: {len(row)} columns instead of {width}")
            yield reader.line_num, [cell.strip() for cell in row]


def by_number(value: str | None, width: int) -> int | None:
    """Return the index of a column that is given by its number, or None for a name, a file or a number out of range."""
    try:
        place = int(value or "")
    except ValueError:
        return None
    return place % width if -width <= place < width and not Path(str(value)).exists() else None


def find_columns(path: Path, named: Mapping[str, str | None], first: Sequence[str], header: bool) -> dict[str, int]:
    """Find the named columns of a table. Raises ValueError for a value that is neither a column nor a file."""
    found = {}
    for name, value in named.items():
        place = first.index(value) if header and value in first else by_number(value, len(first))
        if place is not None:
            found[name] = place
        elif value is not None and not Path(value).exists():
            known = f"; its columns are {', '.join(first)[:200]}" if header else ""
            raise ValueError(f"{value!r} is neither a column of {path} nor a file{known}")
    return found


def is_header(first: Sequence[str], named: Iterable[str | None]) -> bool:
    """Return True if the first row is a header: a cell is not a number, and its column is not given by number."""
    numbered = {by_number(value, len(first)) for value in named}
    return not all(is_number(cell) for i, cell in enumerate(first) if i not in numbered)


def read_table(path: Path, named: Mapping[str, str | None]) -> tuple[Tensor, dict[str, Values], list[int]]:
    """Read a CSV file: the features (n, J), the named columns, and the line number of each sample."""
    rows = read_rows(path)
    number, first = next(rows, (0, []))
    if not first:
        raise ValueError(f"{path} is empty")
    header = is_header(first, named.values())
    places = find_columns(path, named, first, header)
    texts: dict[str, list[str]] = {name: [] for name in places}
    features = [c for c in range(len(first)) if c not in places.values() and "text" not in named]
    numbers, lines = array("d"), []
    for line, row in rows if header else chain([(number, first)], rows):
        try:
            numbers.extend([float(row[c]) for c in features])
        except ValueError:
            column = next(c for c in features if not is_number(row[c]))
            name = repr(first[column]) if header else str(column)
            raise ValueError(
                f"{path}, line {line}, column {name}: {row[column][:40]!r} is not a number. {NAME_COLUMNS}"
            ) from None
        for name, place in places.items():
            texts[name].append(row[place])
        lines.append(line)
    return torch.tensor(numbers, dtype=torch.float64).reshape(len(lines), len(features)), dict(texts), lines


def read_parquet(path: Path, named: Mapping[str, str | None]) -> tuple[Tensor, dict[str, Values]]:
    """Read the features (n, J) and the named columns of a Parquet file. A column of lists of numbers has several features."""
    path.stat()
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table as read

    try:
        table = read(path)
    except ArrowException as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from None
    places = find_columns(path, named, table.column_names, header=True)
    parts = [np.zeros((len(table), 0))]
    features = [] if "text" in named else range(table.num_columns)
    for column in (c for c in features if c not in places.values()):
        try:
            values = np.array(table.column(column).to_pylist(), dtype=np.float64)
        except (TypeError, ValueError):
            raise ValueError(
                f"{path}, column {table.column_names[column]!r} does not consist of numbers, or of lists of the same length. "
                f"{NAME_COLUMNS}"
            ) from None
        parts.append(values.reshape(len(table), -1))
    texts: dict[str, Values] = {}
    for name, place in places.items():
        texts[name] = ["" if v is None else str(v) for v in table.column(place).to_pylist()]
    return torch.from_numpy(np.hstack(parts)), texts


def read_by_id(path: Path, name: str) -> dict[str, str]:
    """Read a CSV file with the columns ``id`` and ``name``. Raises ValueError if an id occurs twice."""
    rows = read_rows(path)
    _, header = next(rows, (0, []))
    if not {"id", name} <= set(header):
        raise ValueError(
            f"{path} needs a header: its first line must name the columns id and {name}, for example 'id,{name}'"
        )
    key, value = header.index("id"), header.index(name)
    out: dict[str, str] = {}
    for line, row in rows:
        if row[key] in out:
            raise ValueError(f"{path}, line {line}: the id {row[key]!r} occurs twice")
        out[row[key]] = row[value]
    return out


def read_column(path: Path, name: str, ids: Sequence[str], source: Path, by_position: bool) -> Values:
    """Read labels, ids or subjects from a file, one value for each sample.

    A CSV file with the columns ``id`` and ``name`` is matched by id. A .npy or .pt file is in the order of the samples, and so
    are the lines of a text file with ``by_position``.
    """
    if path.suffix in (".npy", ".pt"):
        values = load_column(path)
    elif is_table(path) and len(next(read_rows(path), (0, []))[1]) > 1:
        by_id = read_by_id(path, name)
        missing = next((i for i in ids if i not in by_id), None)
        if missing is not None:
            raise ValueError(f"{path} has no {name} for the id {missing!r}")
        return [by_id[i] for i in ids]
    elif by_position:
        with open_text(path) as lines:
            values = [line.strip() for line in lines]
    else:
        raise ValueError(
            f"{path} is a list without ids: give a CSV file with the header id,{name}, or add --by-position if the list is in "
            "the order of the samples"
        )
    if len(values) != len(ids):
        raise ValueError(f"{path} has {len(values)} values of {name} for {counted(len(ids), 'sample')} of {source}")
    return values


# -- images ------------------------------------------------------------------------------------------------------------


def attach_named(name: str, weights: str, num_classes: int, head: Any = None, **options: Any) -> AttachedClassifier:
    """Attach a head to a network for images or texts that is given by name.

    Args:
        name: as for :func:`torchlssvm.attach`. Networks of timm are refused, because their preprocessing is not known.
        weights: a file with the network's state_dict (with or without the last layer), the folder of an encoder, or
            ``"default"`` for the published weights.
        num_classes: as for :func:`torchlssvm.attach`.
        head: as for :func:`torchlssvm.attach`.
        options: of :func:`torchlssvm.attach`.
    """
    if weights != DEFAULT_WEIGHTS:
        Path(weights).stat()
    model, preprocess = load_network(name, None if weights == DEFAULT_WEIGHTS else weights)
    if preprocess is None:
        raise ValueError(f"{name}: the command line takes networks of torchvision and encoders of transformers")
    return attach(model, num_classes, head, preprocess=preprocess, **options)


def find_images(folder: Path, labelled: bool) -> Mapping[str, Path]:
    """Return the images in a folder and its sub-folders, sorted by id. The id of an image is its path below the folder.

    Hidden files and folders are left out. If ``labelled``, every image must be in the sub-folder of its class. Otherwise
    ``folder`` may also be a single image.
    """
    if folder.is_file() and not labelled:
        return {folder.name: folder}
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    images = (p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
    found = sorted(p for p in images if not any(s.startswith(".") for s in p.relative_to(folder).parts))
    if not found:
        raise ValueError(f"{folder} contains no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    loose = next((p for p in found if p.parent == folder), None)
    if labelled and loose is not None:
        raise ValueError(f"{loose} is not in a sub-folder: the name of the sub-folder is the class of the image")
    return {p.relative_to(folder).as_posix(): p for p in found}
