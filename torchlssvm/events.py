"""Describe corrections of data as plain values: the samples to add, remove, relabel or replace, and an event id.

An event does not depend on a head or a store. Its fields are checked when you create it, and ``SampleStore.apply`` applies it.
You can convert an event to primitives (for JSON, a queue or a checkpoint) and back:

>>> event = Relabel(ids=["a", "b"], y=[3, 1], event_id="e1")
>>> to_primitives(event)
{'kind': 'relabel', 'event_id': 'e1', 'ids': ['a', 'b'], 'y': [3, 1]}
>>> from_primitives(to_primitives(event)) == event
True

An event is applied once: applying it again with the same event id changes nothing. For this purpose, a store records a keyed
hash of each event id, not the id itself ( :meth:`SampleStore.recorded_id <torchlssvm.store.SampleStore.recorded_id>`).
Nevertheless, do not put the names of samples or subjects into an event id, because whoever has the store can test whether an
event id was used.

Pass sample ids as text or integers; an integer is converted to its digits. Wherever a list is accepted, you can pass a tensor,
a NumPy array, or a pandas Series or DataFrame.

A head without a store does not keep its samples, so its events must carry them as they were added: ``x`` and ``y`` of a
Remove, ``x`` and ``y_old`` of a Relabel, ``x_old`` and ``y_old`` of a Replace. A store keeps the samples and ignores these
fields, except ``y_old`` of a Relabel: it refuses the event if a sample has another label.
"""

from __future__ import annotations

import base64
import re
import secrets
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional import checks

__all__ = ["Add", "Event", "Relabel", "Remove", "Replace", "from_primitives", "to_primitives"]

LONGEST_NAME = 512
"""Most characters of an id, a subject or an event id: they are indexed, and event ids are kept permanently."""

CPU = torch.device("cpu")

TELLING_CHARACTERS = 4
"""Least length of a name that is searched for inside an event id; shorter names occur in any text."""

TELLING_HEX_DIGITS = 12
"""The same for 32 hex digits, random or a hash: four of them are found in there by chance, twelve are not (1e-13)."""

LONGEST_TEXT = 2000
"""Most characters of a free text, such as the reason of a request: a paragraph."""

WORDS = re.compile(r"\w+(?:[.@+-]\w+)*")
"""Words of a free text: letters, digits and the signs that names and addresses have inside."""

PARTS_OF_WORDS = re.compile(r"[^\W_]+")

RANDOM_ID = re.compile("[0-9a-f]{32}")
"""An event id of 128 random bits, as :func:`new_event_id` makes it."""


def new_event_id() -> str:
    """A random event id: 128 bits as hex."""
    return secrets.token_hex(16)


def casefolded(text: str) -> str:
    """Normalize a text for comparing names, so that case and the form of Unicode do not matter.

    >>> casefolded("Zoe\u0308") == casefolded("ZO\u00cb")
    True
    """
    if text.isascii():
        return text.lower()
    text = "".join(c for c in text if unicodedata.category(c) != "Cf")  # zero-width characters and the like
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def holds_name(text: str, names: Iterable[str | None]) -> bool:
    """True if a text contains one of the given ids and subjects, in any case and any form of Unicode.

    Long names are searched for anywhere in the text, but short names are compared only with its words and parts of words.
    Punctuation between the words of a name is ignored.

    >>> holds_name("erase-U42", ["u42"]), holds_name("house-keeping", ["us"]), holds_name("for AnnaBerg", ["Anna Berg"])
    (True, False, True)
    """
    least = TELLING_HEX_DIGITS if RANDOM_ID.fullmatch(text) else TELLING_CHARACTERS
    within = casefolded(text)
    parts = PARTS_OF_WORDS.findall(within)
    words = {within, *WORDS.findall(within), *parts}
    letters, shortest = "".join(filter(str.isalnum, within)), min(map(len, parts), default=0)
    for name in names:
        if name is not None:
            wanted = casefolded(name)
            if wanted in words or (len(name) >= least and wanted in within):
                return True
            if len(wanted) <= shortest or wanted.isalnum():
                continue
            bare = "".join(filter(str.isalnum, wanted))
            if len(bare) >= least and not bare.isdecimal() and bare in letters:
                spaced = r"[\W_]*".join(map(re.escape, bare))
                if re.search(rf"(?<![^\W_]){spaced}(?![^\W_])", within):
                    return True
    return False


def tells_of(text: str, names: Iterable[str | None]) -> bool:
    """Like :func:`holds_name`, for free text. Short numbers are allowed, because dates and legal references contain them."""
    return holds_name(text, (n for n in names if n and not (n.isdecimal() and len(n) < TELLING_CHARACTERS)))


def check_free_text(text: Any, what: str, names: Iterable[str | None]) -> str:
    """Check a text that is kept after an erasure. ValueError unless it is printable and contains none of the names."""
    if not isinstance(text, str) or len(text) > LONGEST_TEXT or not text.isprintable():
        raise ValueError(
            f"{what} must be one line of at most {LONGEST_TEXT} printable characters; got {str(text)[:80]!r}"
        )
    if tells_of(text, names):
        raise ValueError(
            f"{what} holds an id or a subject of those concerned: it is kept after the erasure. Write it without their names. "
            "Nothing was changed."
        )
    return text


def check_event_id(event_id: str, names: Iterable[str | None]) -> None:
    """Raise ValueError if an event id contains a sample id or a subject: its hash stays in the journal after an erasure."""
    if holds_name(event_id, names):
        raise ValueError(
            "event_id holds an id or the subject of its samples: it stays in the journal after an erasure, as a hash for "
            "which whoever has the store can test. Choose another, or none for a random one. Nothing was changed."
        )


def check_text(value: Any, name: str) -> str:
    """Check an id or a subject and return it as a ``str`` in Unicode form NFC. An integer is converted to its digits.

    Unicode has several ways to write the same name, and NFC makes them equal.
    """
    if isinstance(value, str):
        value = str.__str__(value)  # numpy's texts and enumerations are written as the text they hold
        value = unicodedata.normalize("NFC", value)
    elif isinstance(value, int | np.integer) and not isinstance(value, bool):
        value = str(int(value))
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME or "\0" in value:
        raise ValueError(
            f"{name} must be a text of 1 to {LONGEST_NAME} characters without a NUL, or an int; got {str(value)[:80]!r} "
            f"({type(value).__name__})"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} cannot be written as UTF-8: {value[:80]!r}") from None
    return value


def as_list(value: Any) -> list[Any] | None:
    """Return a list, tensor, array, Series or one-column DataFrame as a list, with None for missing values; otherwise None."""
    if hasattr(value, "to_numpy"):
        array = value.to_numpy()
        absent = np.asarray(value.isna()).reshape(-1) if hasattr(value, "isna") else np.zeros(array.size, bool)
        if array.ndim == 2 and array.shape[1] != 1:
            return None
        return [None if gone else v for v, gone in zip(array.reshape(-1).tolist(), absent.tolist(), strict=True)]
    if isinstance(value, Tensor | np.ndarray):
        value = value.tolist()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return None
    return list(value)


def check_ids(value: Any) -> tuple[str, ...]:
    """Check sample ids: a non-empty sequence without duplicates."""
    listed = as_list(value)
    if listed is None:
        raise ValueError(f"ids must be a list of texts or ints, one for each sample; got {value!r}")
    ids = tuple(check_text(i, "an id") for i in listed)
    if not ids:
        raise ValueError("ids is empty: an event concerns at least one sample")
    if len(set(ids)) < len(ids):
        seen: set[str] = set()
        twice = next(i for i in ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
        raise ValueError(f"ids holds {twice!r} twice: each sample has an id of its own")
    return ids


def check_features(value: Any, count: int | None) -> Tensor:
    """Check features x (B, J): finite numbers, one row for each id."""
    x = value.detach() if isinstance(value, Tensor) else checks.as_tensor(value, "x", CPU)
    if x.ndim != 2 or (count is not None and x.shape[0] != count):
        rows = "B" if count is None else count
        raise ValueError(f"x must have shape ({rows}, J), one row for each id; got {tuple(x.shape)}")
    x = checks.features(x, x.shape[1], x.device)
    if checks.not_finite(x):
        checks.raise_not_finite("x", x)
    return x


def check_targets(value: Any, count: int | None) -> Tensor:
    """Check labels (B,) or float targets (B, K). For a subject, one label for all its samples is also allowed."""
    y = value.detach() if isinstance(value, Tensor) else checks.as_tensor(value, "y", CPU)
    if y.is_complex() or y.ndim > 2 or (y.ndim == 0 and count is not None):
        raise ValueError(
            f"y must be labels (B,) or targets (B, K), one for each id; got shape {tuple(y.shape)}, {y.dtype}"
        )
    if count is not None and y.shape[0] != count:
        raise ValueError(f"ids and y differ in length: {count} ids, y has shape {tuple(y.shape)}")
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        checks.raise_not_finite("y", y)
    return y


class EventBase:
    """Base of the four events, which checks their fields and compares events by value."""

    kind: ClassVar[str]
    growth: ClassVar[int] = 0
    """By how much the number of samples changes, for each sample of the event."""
    erases: ClassVar[bool] = True
    """True if the samples as they were are gone after the event."""
    old_fields: ClassVar[tuple[str, str]]
    """Names of the fields that carry features and targets as they were added."""
    event_id: str
    y: Any

    @property
    def new_y(self) -> Any:
        """The targets after the event."""
        return self.y

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_id(self) -> None:
        """Check the event id against ids and subject, which are checked by then."""
        self._set("event_id", check_text(self.event_id, "event_id"))
        ids, subject = getattr(self, "ids", None), getattr(self, "subject", None)
        check_event_id(self.event_id, [*(ids or ()), *([subject] if isinstance(subject, str) else subject or ())])

    def _check_samples(self) -> int | None:
        """Check that either ids or a subject is given; return the number of samples if it is known."""
        ids, subject = getattr(self, "ids", None), getattr(self, "subject", None)
        if (ids is None) == (subject is None):
            raise ValueError(f"{type(self).__name__} needs either ids or a subject, and not both")
        if ids is not None:
            self._set("ids", check_ids(ids))
            return len(self.ids)  # type: ignore[attr-defined]
        self._set("subject", check_text(subject, "subject"))
        return None

    def _check_held(self, count: int | None) -> None:
        """Check samples as they were added: either both features and targets, or neither. They require ids."""
        features, targets = self.old_fields
        x, y = getattr(self, features), getattr(self, targets)
        if x is None and y is None:
            return
        if x is None or y is None or count is None:
            raise ValueError(
                f"{type(self).__name__} carries samples as they were added: it needs ids, {features} and {targets}"
            )
        self._set(features, check_features(x, count))
        self._set(targets, check_targets(y, count))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return to_primitives(self) == to_primitives(other)  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Add(EventBase):
    """Learn samples.

    Args:
        ids: (B,) ids of the samples.
        x: (B, J) features.
        y: (B,) labels or (B, K) targets.
        subject: owner of the samples: one name for all, or one name or None per sample.
        fingerprint: hash of the network that computed the features (see :mod:`torchlssvm.backbone_hash`). A store that is bound
            to another network refuses the samples.
    """

    kind: ClassVar[str] = "add"
    growth: ClassVar[int] = 1
    erases: ClassVar[bool] = False

    ids: Any
    x: Any
    y: Any
    subject: Any = None
    fingerprint: str | None = None
    event_id: str = field(default_factory=new_event_id)

    def __post_init__(self) -> None:
        self._set("ids", check_ids(self.ids))
        self._set("x", check_features(self.x, len(self.ids)))
        self._set("y", check_targets(self.y, len(self.ids)))
        if self.fingerprint is not None:
            self._set("fingerprint", check_text(self.fingerprint, "fingerprint"))
        if self.subject is not None:
            self._set("subject", self._check_subject(self.subject))
        self._check_id()

    def _check_subject(self, subject: Any) -> str | tuple[str | None, ...]:
        if isinstance(subject, str | int | np.integer):
            return check_text(subject, "subject")
        listed = as_list(subject)
        if listed is None:
            raise ValueError(f"subject must be a text, or a list with one for each id; got {subject!r}")
        names = tuple(None if s is None else check_text(s, "subject") for s in listed)
        if len(names) != len(self.ids):
            raise ValueError(f"ids and subject differ in length: {len(self.ids)} ids, {len(names)} subjects")
        return names

    @property
    def subjects(self) -> tuple[str | None, ...]:
        """The subject of each sample (B)."""
        one = self.subject is None or isinstance(self.subject, str)
        return (self.subject,) * len(self.ids) if one else self.subject


@dataclass(frozen=True, eq=False)
class Remove(EventBase):
    """Unlearn and erase samples by id, or all samples of a subject. Without a store, also pass x and y as they were added."""

    kind: ClassVar[str] = "remove"
    growth: ClassVar[int] = -1
    old_fields: ClassVar[tuple[str, str]] = ("x", "y")

    ids: Any = None
    subject: Any = None
    x: Any = None
    y: Any = None
    event_id: str = field(default_factory=new_event_id)

    def __post_init__(self) -> None:
        self._check_held(self._check_samples())
        self._check_id()


@dataclass(frozen=True, eq=False)
class Relabel(EventBase):
    """Change the labels or targets of samples, given by ids or by subject.

    For a subject, pass one label per sample, in the order in which the samples were added, or a single label for all of them.
    Without a store, also pass x and y_old as they were added. With a store, y_old is optional and needs ids: the store raises
    RemovalError if a sample no longer has this label.
    """

    kind: ClassVar[str] = "relabel"
    old_fields: ClassVar[tuple[str, str]] = ("x", "y_old")

    y: Any
    ids: Any = None
    subject: Any = None
    x: Any = None
    y_old: Any = None
    event_id: str = field(default_factory=new_event_id)

    def __post_init__(self) -> None:
        count = self._check_samples()
        self._set("y", check_targets(self.y, count))
        if self.x is None and self.y_old is not None and count is not None:  # for a store
            self._set("y_old", check_targets(self.y_old, count))
        else:
            self._check_held(count)
        self._check_id()


@dataclass(frozen=True, eq=False)
class Replace(EventBase):
    """Replace the features of samples with x (B, J), and the labels if you pass y. Ids, subject and commitments stay the same.

    Without a store, also pass x_old and y_old as they were added.
    """

    kind: ClassVar[str] = "replace"
    old_fields: ClassVar[tuple[str, str]] = ("x_old", "y_old")

    x: Any
    y: Any = None
    ids: Any = None
    subject: Any = None
    x_old: Any = None
    y_old: Any = None
    event_id: str = field(default_factory=new_event_id)

    def __post_init__(self) -> None:
        count = self._check_samples()
        self._set("x", check_features(self.x, count))
        if self.y is not None:
            self._set("y", check_targets(self.y, self.x.shape[0]))
        self._check_held(count)
        self._check_id()

    @property
    def new_y(self) -> Any:
        """The targets after the event: the old targets, unless y was passed."""
        return self.y_old if self.y is None else self.y


Event: TypeAlias = Add | Remove | Relabel | Replace
EVENT_CLASSES: dict[str, type[Event]] = {made.kind: made for made in get_args(Event)}


def to_primitives(event: Event) -> dict[str, Any]:
    """Convert the event to a dict of strings, numbers and lists.

    Features become base64 of little-endian numbers, with a shape.
    """
    out: dict[str, Any] = {"kind": event.kind, "event_id": event.event_id}
    for name in ("ids", "subject", "fingerprint", "y", "x", "y_old", "x_old"):
        value = getattr(event, name, None)
        if value is None:
            continue
        if name.startswith("x") or (name.startswith("y") and value.ndim == 2):
            out[name] = _pack(value)
        else:
            out[name] = (
                value.tolist() if isinstance(value, Tensor) else list(value) if isinstance(value, tuple) else value
            )
    return out


def from_primitives(data: Mapping[str, Any]) -> Event:
    """Create an event from :func:`to_primitives`, or with plain lists as features. Raises ValueError for anything else."""
    if not isinstance(data, Mapping) or data.get("kind") not in list(EVENT_CLASSES):
        found = data.get("kind") if isinstance(data, Mapping) else type(data).__name__
        raise ValueError(f"not an event: its kind must be one of {', '.join(EVENT_CLASSES)}; got {found!r}")
    made = EVENT_CLASSES[data["kind"]]
    known = {f.name for f in fields(made)}
    unknown = sorted(str(k) for k in data if k != "kind" and k not in known)
    if unknown:
        raise ValueError(f"a {data['kind']} event has no field {unknown[0]!r}; it has {', '.join(sorted(known))}")
    values: dict[str, Any] = {k: _unpack(v, k) if isinstance(v, Mapping) else v for k, v in data.items() if k != "kind"}
    try:
        return made(**values)
    except TypeError as error:  # a field is missing
        raise ValueError(f"not a {data['kind']} event: {error}") from None


SAVED_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}


def _pack(value: Tensor) -> dict[str, Any]:
    name = str(value.dtype).removeprefix("torch.")
    if name not in SAVED_DTYPES:
        name = "float64" if value.is_floating_point() else "int64"
    array = value.to("cpu", SAVED_DTYPES[name]).contiguous().numpy()
    data = base64.b64encode(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()).decode("ascii")
    return {"dtype": name, "shape": list(value.shape), "data": data}


def _unpack(value: Mapping[str, Any], name: str) -> Tensor:
    try:
        dtype = np.dtype(str(value["dtype"])).newbyteorder("<")
        if value["dtype"] not in SAVED_DTYPES:
            raise ValueError(f"dtype {value['dtype']!r} is not one of {', '.join(SAVED_DTYPES)}")
        array = np.frombuffer(base64.b64decode(value["data"], validate=True), dtype=dtype)
        return torch.from_numpy(array.reshape([int(n) for n in value["shape"]]).astype(dtype.newbyteorder("=")))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from None
