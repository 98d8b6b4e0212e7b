"""Events: checked when they are made, and the same after a trip through JSON."""

from __future__ import annotations

import enum
import json
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchlssvm.events import Add, Event, Relabel, Remove, Replace, from_primitives, to_primitives

X = torch.arange(6.0).reshape(2, 3)

GOOD: list[Event] = [
    Add(ids=["a", "b"], x=X, y=[0, 1]),
    Add(ids=["a", "b"], x=X, y=torch.tensor([0, 1]), subject="u"),
    Add(ids=["a", "b"], x=X.double(), y=torch.tensor([[0.5, 1.0], [1.0, 2.0]]), subject=["u", None]),
    Add(ids=[1, 2], x=X.numpy(), y=np.array([0, 1]), fingerprint="f"),
    Add(ids=["a", "b"], x=X.tolist(), y=[0, 1]),
    Remove(ids=["a"]),
    Remove(subject="u"),
    Relabel(ids=["a", "b"], y=[1, 2]),
    Relabel(subject="u", y=3),
    Replace(ids=["a", "b"], x=X),
    Replace(ids=["a", "b"], x=X, y=[1, 1]),
    Replace(subject="u", x=X),
]


@pytest.mark.parametrize("event", GOOD, ids=lambda e: type(e).__name__)
def test_through_json_and_back(event: Event) -> None:
    again = from_primitives(json.loads(json.dumps(to_primitives(event))))
    assert again == event
    assert type(again) is type(event)
    assert again != Remove(ids=["other"])
    for name in ("x", "y"):
        mine, theirs = getattr(event, name, None), getattr(again, name, None)
        if mine is not None:
            assert torch.equal(mine.double(), theirs.double())
            assert mine.is_floating_point() == theirs.is_floating_point()


def test_ids_are_random_unless_given() -> None:
    assert Remove(ids=["a"]).event_id != Remove(ids=["a"]).event_id
    assert Remove(ids=["a"], event_id="mine").event_id == "mine"
    assert Add(ids=[7], x=X[:1], y=[0]).ids == ("7",)


class Name(enum.StrEnum):
    ADA = "ada"


class Text(str):
    def __str__(self) -> str:
        return "something else"


class Number(enum.IntEnum):
    SEVEN = 7


def test_ids_and_subjects_are_exact_texts() -> None:
    ids = [np.str_("a"), Name.ADA, Text("c"), Number.SEVEN, np.int32(8), 9]
    event = Add(ids=ids, x=torch.zeros(6, 3), y=[0] * 6, subject=ids, event_id=Text("e"))
    assert event.ids == event.subject == ("a", "ada", "c", "7", "8", "9")
    assert {type(s) for s in (*event.ids, *event.subject, event.event_id)} == {str}
    for one in (np.str_("ada"), Name.ADA, Text("ada")):
        event = Remove(subject=one)
        assert (event.subject, type(event.subject)) == ("ada", str)
    assert Add(ids=["a"], x=X[:1], y=[0], subject=np.int64(7)).subjects == ("7",)


def test_an_event_id_may_hold_what_any_text_holds() -> None:
    Remove(subject="bob", event_id="bobsleigh")  # three characters
    data = to_primitives(Remove(ids=[f"{i:04}" for i in range(10000)], event_id="0123456789abcdef0123456789abcdef"))
    assert from_primitives(data).event_id == data["event_id"]  # random or a hash: four digits are in there by chance


def test_arrays_are_taken_where_lists_are() -> None:
    plain = Add(ids=["3", "4"], x=X.double(), y=[0, 1], subject=["u", "v"], event_id="e")
    for dtype in (np.uint8, np.uint16, np.uint32, np.uint64, np.int16, ">i4", object):
        y = np.array([0, 1], dtype)
        assert Add(
            ids=np.array([3, 4], dtype), x=X.numpy()[:], y=y, subject=np.array(["u", "v"]), event_id="e"
        ).y.tolist() == [0, 1]
    backwards = X.numpy()[::-1, ::-1].astype(">f8")[::-1, ::-1]
    again = Add(
        ids=np.array(["3", "4"]), x=backwards, y=np.array([0, 1]), subject=np.array(["u", "v"], object), event_id="e"
    )
    assert again == plain
    with pytest.raises(ValueError, match="64 bits"):
        Relabel(ids=["a"], y=np.array([2**63], np.uint64))
    for bad in (np.array([["a"], ["b"]]), np.array([1.5, 2.5]), np.array([b"a", b"b"]), np.array("ab")):
        with pytest.raises(ValueError, match="id"):
            Add(ids=bad, x=X, y=[0, 1])


def test_pandas_is_taken_where_lists_are() -> None:
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    plain = Add(ids=["3", "4"], x=X.double(), y=[0, 1], subject=["u", None], event_id="e")
    frame = pd.DataFrame({"p": [0.0, 3.0], "q": [1, 4], "r": [2.0, 5.0]}, index=[7, 3])
    for kind in ("int64", "Int64", "uint16", "object", "category"):
        for ids in (
            pd.Series(["3", "4"], index=[9, 2]),
            pd.Series([3, 4], dtype=kind),
            pd.DataFrame({"id": ["3", "4"]}),
            pd.Index([3, 4], dtype=kind),  # whose isna() is an array
        ):
            y = pd.Series([0, 1], index=[5, 1], dtype=kind)
            assert Add(ids=ids, x=frame, y=y, subject=pd.Series(["u", None]), event_id="e") == plain
    assert Add(ids=[3, 4], x=frame.astype("Float64"), y=[0, 1], subject=pd.Series(["u", pd.NA]), event_id="e") == plain
    for bad in (pd.Series([3, None]), pd.DataFrame({"a": [3, 4], "b": [3, 4]}), pd.Series(["3", None])):
        with pytest.raises(ValueError, match="id"):
            Add(ids=bad, x=frame, y=[0, 1])
    with pytest.raises(ValueError, match=r"cannot be read|NaN"):
        Add(ids=[3, 4], x=frame, y=pd.Series([0, None], dtype="Int64"))
    with pytest.raises(ValueError, match="'cat'"):
        Add(ids=[3, 4], x=frame, y=pd.Series(["cat", "dog"]))


def test_plain_lists_are_read_too() -> None:
    event = from_primitives({"kind": "add", "ids": ["a"], "x": [[1, 2.5]], "y": [1]})
    assert isinstance(event, Add)
    assert torch.equal(event.x, torch.tensor([[1, 2.5]], dtype=torch.float64))


BAD: list[tuple[Any, str]] = [
    (lambda: Add(ids=[], x=X[:0], y=[]), "empty"),
    (lambda: Add(ids=["a", "a"], x=X, y=[0, 1]), "twice"),
    (lambda: Add(ids="ab", x=X, y=[0, 1]), "list"),
    (lambda: Add(ids=["a", ""], x=X, y=[0, 1]), "1 to"),
    (lambda: Add(ids=["a", 1.5], x=X, y=[0, 1]), "text"),
    (lambda: Add(ids=["a", True], x=X, y=[0, 1]), "text"),
    (lambda: Add(ids=["a", "b\0"], x=X, y=[0, 1]), "NUL"),
    (lambda: Add(ids=["a", "\ud800"], x=X, y=[0, 1]), "UTF-8"),
    (lambda: Add(ids=["a", "x" * 513], x=X, y=[0, 1]), "512"),
    (lambda: Add(ids=["a"], x=X, y=[0]), "one row for each id"),
    (lambda: Add(ids=["a"], x=X[0], y=[0]), "one row for each id"),
    (lambda: Add(ids=["a", "b"], x=X * float("nan"), y=[0, 1]), "NaN"),
    (lambda: Add(ids=["a", "b"], x=[["p", "q"]], y=[0, 1]), "x holds text, .p. for one; it must be numbers"),
    (lambda: Add(ids=["a", "b"], x=X, y=[0]), "differ in length"),
    (lambda: Add(ids=["a", "b"], x=X, y=0), "one for each id"),
    (lambda: Add(ids=["a", "b"], x=X, y=torch.tensor([0.0, float("inf")])), "NaN or inf"),
    (lambda: Add(ids=["a", "b"], x=X, y=[0, 1], subject=["u"]), "differ in length"),
    (lambda: Add(ids=["a", "b"], x=X, y=[0, 1], subject={"u": 1}), "subject must be"),
    (lambda: Add(ids=["a", "b"], x=X, y=[0, 1], event_id=""), "event_id"),
    (lambda: Remove(), "either"),
    (lambda: Remove(ids=["a"], subject="u"), "either"),
    (lambda: Remove(subject=["u"]), "subject"),
    (lambda: Add(ids=b"ab", x=X, y=[0, 1]), "list"),
    (lambda: Add(ids={"a": 1, "b": 2}, x=X, y=[0, 1]), "list"),
    (lambda: Add(ids=["a", np.bool_(True)], x=X, y=[0, 1]), "text"),
    (lambda: Remove(subject="alice", event_id="erase-alice"), "stays in the journal"),
    (lambda: Remove(subject="Alice", event_id="erase-aLICE-now"), "stays in the journal"),
    *((partial(Remove, subject="u42", event_id=e), "stays in the journal") for e in ("erase-u42", "a.u42.b", "\uff3542")),
    (lambda: Remove(subject="Straße 5", event_id="STRASSE 5"), "stays in the journal"),
    (lambda: Remove(ids=["b", "IMG_0001"], event_id="img_0001.jpg"), "stays in the journal"),
    (lambda: Add(ids=["a", "b"], x=X, y=[0, 1], subject=[None, "u4711"], event_id="U4711"), "stays in the journal"),
    (lambda: Add(ids=[2024, 2025], x=X, y=[0, 1], event_id="of-2025"), "stays in the journal"),
    (lambda: Relabel(ids=["photo"], y=[0], event_id="photo"), "stays in the journal"),
    (lambda: Replace(subject="alice", x=X, event_id="alice"), "stays in the journal"),
    (lambda: Remove(ids=["0123456789abcdef" * 2], event_id="0123456789abcdef" * 2), "stays in the journal"),
    (lambda: Relabel(y=[0]), "either"),
    (lambda: Relabel(ids=["a"], y=[0, 1]), "differ in length"),
    (lambda: Replace(ids=["a"], x=X), "one row for each id"),
    (lambda: Replace(ids=["a", "b"], x=X, y=[1]), "differ in length"),
    (lambda: from_primitives({}), "kind"),
    (lambda: from_primitives({"kind": "burn"}), "kind"),
    (lambda: from_primitives([]), "not an event"),  # type: ignore[arg-type]
    (lambda: from_primitives({"kind": "remove", "z": 1}), "no field 'z'"),
    (lambda: from_primitives({"kind": "add", "ids": ["a"]}), "not a add event"),
    (lambda: from_primitives({"kind": "add", "ids": ["a"], "y": [0], "x": {"dtype": "float32"}}), "x cannot be read"),
    (lambda: from_primitives({"kind": "add", "ids": ["a"], "y": [0], "x": {"dtype": "object", "shape": [1], "data": ""}}), "x cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_events_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=1000, deadline=None)
@given(
    st.sampled_from(GOOD),
    st.sampled_from(["kind", "event_id", "ids", "subject", "x", "y", "x_old", "y_old", "fingerprint", "z"]),
    json_values,
)
def test_whatever_a_field_holds_it_is_an_event_or_a_value_error(event: Event, name: str, value: Any) -> None:
    data = to_primitives(event) | {name: value}
    try:
        again = from_primitives(data)
    except ValueError:
        return
    json.dumps(to_primitives(again))
