"""Events: checked when they are made, and the same after a trip through JSON."""

from __future__ import annotations

import json
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
    (lambda: Add(ids=["a", "b"], x=[["p", "q"]], y=[0, 1]), "cannot be read"),
    (lambda: Add(ids=["a", "b"], x=X, y=[0]), "differ in length"),
    (lambda: Add(ids=["a", "b"], x=X, y=0), "one for each id"),
    (lambda: Add(ids=["a", "b"], x=X, y=torch.tensor([0.0, float("inf")])), "NaN or inf"),
    (lambda: Add(ids=["a", "b"], x=X, y=[0, 1], subject=["u"]), "differ in length"),
    (lambda: Add(ids=["a", "b"], x=X, y=[0, 1], subject={"u": 1}), "subject must be"),
    (lambda: Add(ids=["a", "b"], x=X, y=[0, 1], event_id=""), "event_id"),
    (lambda: Remove(), "either"),
    (lambda: Remove(ids=["a"], subject="u"), "either"),
    (lambda: Remove(subject=["u"]), "subject"),
    (lambda: Remove(subject="alice", event_id="erase-alice"), "stays in the journal"),
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
