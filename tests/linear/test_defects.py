"""Defects that attacks found in linear heads, each with the rule that it broke."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torchlssvm import CompactLSSVMHead, LSSVMHead, MarginHead, NotFittedError, NumericalWarning, RemovalError
from torchlssvm.errors import OutOfMemoryError

X = torch.randn(90, 20, generator=torch.Generator().manual_seed(0))
Y = torch.arange(90) % 3
X[torch.arange(90), Y] += 2
GUEST = torch.randn(1, 20, generator=torch.Generator().manual_seed(1))

HEADS: dict[str, Callable[..., Any]] = {
    "least squares": lambda **o: LSSVMHead(20, 3, grid=64.0, **o),
    "margin": lambda **o: MarginHead(20, 3, grid=64.0, **o),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_pickle_holds_no_weights_from_before_a_removal(kind: str) -> None:
    head = HEADS[kind](rho=1.0).add(X, Y).add(GUEST, Y[:1])
    old = head.state_dict()["w"].clone()
    data = pickle.dumps(head.remove(GUEST, Y[:1]).refresh())
    assert old[0, 0].numpy().tobytes() not in data
    again = pickle.loads(data)
    assert torch.equal(again.w, head.w)
    assert not torch.equal(again.w, old)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("way", ["remove", "clear"])
@pytest.mark.parametrize("scale", [None, "std"])
def test_a_pickle_of_an_emptied_head_is_that_of_a_new_one(kind: str, way: str, scale: str | None) -> None:
    never, head = (HEADS[kind](rho=1.0, scale=scale) for _ in range(2))
    head.add(GUEST, Y[:1]).predict(GUEST)
    head.remove(GUEST, Y[:1]) if way == "remove" else head.clear()
    data, empty = (pickle.dumps(pickle.loads(pickle.dumps(h))) for h in (head, never))
    assert len(data) == len(empty)
    assert head.grid is not None
    for values in (
        GUEST,
        GUEST.double(),
        head.grid.snap(GUEST),
        head.grid.quantize(GUEST),
        head.grid.quantize(GUEST).long(),
    ):
        assert values[0, 3:6].numpy().tobytes() not in data


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("way", ["remove", "clear", "forget_class"])
def test_an_emptied_head_keeps_no_rho(kind: str, way: str) -> None:
    head = HEADS[kind](**({"per_class": True} if kind == "least squares" else {})).add(X, Y)
    head.predict(X)
    assert head.rho != 1.0
    if way == "remove":
        head.remove(X, Y)
    elif way == "clear":
        head.clear()
    else:
        for c in range(3):
            head.forget_class(c)
    assert head.config()["rho"] == 1.0
    never = HEADS[kind]().add(X[:60], Y[:60])
    head.add(X[:60], Y[:60])
    assert head.rho == never.rho


@pytest.mark.parametrize("scale", [None, "std"])
@pytest.mark.parametrize("make", [LSSVMHead, MarginHead])
def test_an_automatic_grid_that_is_too_coarse_says_so(scale: str | None, make: Any) -> None:
    x = X.double() + 1e8 if scale is None else torch.cat([X.double(), 1.7e9 + 1e6 * torch.randn(90, 1).double()], 1)
    with pytest.warns(NumericalWarning, match="steps"):
        make(x.shape[1], 3, scale=scale, rho=1.0).add(x, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(20, 3, scale=scale, rho=1.0).add(X, Y)


def test_leave_one_out_of_the_discriminant_warns_of_a_small_rho() -> None:
    x, y = torch.randn(30, 100, dtype=torch.float64), torch.arange(30) % 3
    head = LSSVMHead(100, 3, rule="lda", rho=1e-8, grid=8.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        _ = head.add(x, y).w
    with pytest.warns(NumericalWarning):
        head.leave_one_out(x, y)


QUESTIONS: dict[str, Callable[[LSSVMHead, Any, Any], Any]] = {
    "leave_one_out": lambda head, x, y: head.leave_one_out(x, y),
    "calibrate": lambda head, x, y: head.calibrate(x, y),
    "influence": lambda head, x, y: head.influence(x, y, X[:2], Y[:2]),
    "select_rho": lambda head, x, y: head.select_rho(None, "loo", x, y),
}


@pytest.mark.parametrize("rule", ["least_squares", "lda"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_about_samples_that_are_not_held_are_refused(question: str, rule: str) -> None:
    if rule == "lda" and question in ("influence", "select_rho"):
        return
    head = LSSVMHead(20, 3, rule=rule).add(X, Y)
    before = head.digest()
    for x, y in ((X + 0.01, Y), (X, (Y + 1) % 3), (torch.cat([X, X[:1]]), torch.cat([Y, Y[:1]]))):
        with pytest.raises(ValueError if question == "select_rho" else RemovalError):
            QUESTIONS[question](head, x, y)
    assert head.digest() == before
    QUESTIONS[question](head, X, Y)


def test_pairs_with_a_single_sample_leave_rho_to_the_others() -> None:
    head = LSSVMHead(20, 4, multiclass="ovo")
    y = Y[:31].clone()
    y[Y[:31] == 2] = 0
    y[0] = 2  # one sample of class 2, none of class 3
    head.add(X[:31], y)
    assert head.predict(X).shape == (90,)
    assert np.isfinite(head.rho)
    lonely = LSSVMHead(20, 4, multiclass="ovo").add(X[:2], torch.tensor([0, 1]))
    assert lonely.predict(X[:1]).shape == (1,)


def test_the_bound_of_saved_float_sums_is_of_the_samples_held() -> None:
    """A bound of all that went through them would be twice the largest square of a removed sample larger."""

    def bound(head: LSSVMHead) -> float:
        return float(json.loads(bytes(head.state_dict()["statistics.meta"].numpy()))["gross"])

    never, head = (LSSVMHead(20, 3, grid=None, rho=1.0).add(X, Y) for _ in range(2))
    head.add(1000 * GUEST, Y[:1]).remove(1000 * GUEST, Y[:1])
    assert bound(head) == pytest.approx(bound(never), rel=1e-6)


def reached(value: Any, seen: set[int]) -> list[torch.Tensor]:
    """Every tensor that can be reached from an object, with its whole storage."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())]
    inside = (
        [*dict.values(value)] if isinstance(value, dict) else value
    )  # not value.values(): LiveBuffers would be refreshed
    inside = inside if isinstance(inside, list | tuple | set) else []
    return [t for part in [*inside, *getattr(value, "__dict__", {}).values()] for t in reached(part, seen)]


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("rows", [1, 400], ids=["few", "many"])
def test_a_removed_row_is_not_in_memory(kind: str, rows: int) -> None:
    """Neither in the memory in which rows are put on the grid, nor in that of rows that wait."""
    head = HEADS[kind](rho=1.0).add(X, Y)
    x, y = (t.repeat(5, *[1] * (t.ndim - 1))[:rows] for t in (X + 1 / 64, Y))
    x[0] = GUEST[0]
    q = head.grid.quantize(GUEST)[0]

    def found() -> bool:
        tensors = [t.double() for t in reached(head, set())]
        return any(bool(((t[:-2] == q[4]) & (t[1:-1] == q[5]) & (t[2:] == q[6])).any()) for t in tensors if len(t) > 2)

    head.add(x, y)
    waits = found()
    head.predict(X)
    head.remove(x, y)
    head.predict(X)
    head.digest()
    assert not found()
    assert waits == (rows == 1 or kind == "margin")  # the search finds what is there


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("k", [10**12, 10**30])
@pytest.mark.parametrize("options", [{}, {"class_weight": "balanced"}], ids=str)
def test_too_many_classes_are_refused_and_the_head_goes_on(kind: str, k: int, options: dict[str, Any]) -> None:
    head = HEADS[kind](rho=1.0, **options).add(X, Y)
    before = head.digest(), head.predict(X)
    with pytest.raises(OutOfMemoryError):
        head.add_classes(k)
    assert head.num_classes == 3
    assert head.digest() == before[0]
    assert torch.equal(head.predict(X), before[1])


def test_an_empty_compact_head_leaves_nothing_out() -> None:
    with pytest.raises(NotFittedError):
        CompactLSSVMHead(20, 3).leave_one_out(X, Y)
