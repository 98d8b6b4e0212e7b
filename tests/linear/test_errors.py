"""Bad input gets an error that names it, and leaves no trace: every kind of it, for every operation and form of the head.

Each test works on a pair of heads with one history. One gets the bad call; afterwards it must equal the other, by digest (or,
without one, by its numbers), and go on to the answer of a dense solve.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from torchlssvm import FixedPoint, GridError, LSSVMHead, NotFittedError, RemovalError

NAN, INF = float("nan"), float("inf")
J, K, N = 56, 3, 90  # J is large enough for Theorem 1, so that rows wait to be taken in

FORMS: dict[str, dict[str, Any]] = {
    "grid": {"grid": FixedPoint(8.0)},
    "unchecked": {"grid": FixedPoint(8.0), "membership": False},
    "auto": {},
    "float sums": {"grid": None},
    "balanced": {"grid": FixedPoint(8.0), "class_weight": "balanced"},
    "ovo": {"grid": FixedPoint(8.0), "multiclass": "ovo", "intercept": "penalized"},
}


class Data(NamedTuple):
    x: Tensor
    y: Tensor


def data(kind: str = "labels") -> Data:
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(N + 10, J, generator=generator) + 0.3).clamp(-4, 4)
    x[0, 0] = 4.0  # so that the automatic grid has the limit 4
    y = torch.arange(N + 10) % K
    return Data(
        x, y if kind == "labels" else torch.randint(-512, 512, (N + 10, K), generator=generator) / 256
    )  # on any grid


def made(options: dict[str, Any]) -> LSSVMHead:
    return LSSVMHead(J, K, **({"rho": 1.0} | options))


def twins(options: dict[str, Any], kind: str = "labels") -> tuple[LSSVMHead, LSSVMHead, Data]:
    """Two heads that hold the first N samples, and the samples: weights were read, then a few samples came in."""
    samples = data(kind)
    pair = [made(options) for _ in range(2)]
    for head in pair:
        head.add(samples.x[: N - 3], samples.y[: N - 3])
        _ = head.w
        head.add(samples.x[N - 3 : N], samples.y[N - 3 : N])
    return *pair, samples


def assert_untouched(head: LSSVMHead, twin: LSSVMHead) -> None:
    """Sums, counts and digest are equal; float64 sums may have been formed in another order."""
    assert head.n == twin.n
    if head.statistics.exact:
        assert head.digest() == twin.digest()
        return
    mine, theirs = head.statistics.state(), twin.statistics.state()
    for key in ("sums", "counts"):
        if key in mine:
            torch.testing.assert_close(mine[key], theirs[key], rtol=1e-13, atol=1e-10)


def assert_goes_on(head: LSSVMHead, options: dict[str, Any], samples: Data, dense: Callable[..., Any]) -> None:
    """The head, with the first N samples, learns five more, forgets two, and has the weights of a dense solve."""
    x, y = samples
    head.add(x[N : N + 5], y[N : N + 5])
    head.remove(x[4:6], y[4:6])
    keep = [i for i in range(N + 5) if i not in (4, 5)]
    kept = x[keep].double() if head.grid is None else head.grid.snap(x[keep])
    known = {k: v for k, v in options.items() if k in ("rho", "intercept", "class_weight", "multiclass")}
    w, b = dense(kept, y[keep], head.num_classes, **known)
    torch.testing.assert_close(head.w, w, rtol=0, atol=1e-9 * float(w.abs().max()))
    torch.testing.assert_close(head.b, b, rtol=0, atol=1e-9)
    assert head.n == N + 3


def refused(call: Callable[[], Any], error: type[Exception], fact: str = "", note: str = "") -> None:
    """The call raises the error, and its message holds the fact."""
    with pytest.raises(error) as caught:
        call()
    assert fact in str(caught.value), note


# -- samples that cannot be taken ------------------------------------------------------------------------------------------


class Bad(NamedTuple):
    """What is wrong with (x, y, weight), made from three good samples; the error; a fact in its message."""

    part: str
    spoil: Callable[[Tensor, Tensor], Any]
    error: type[Exception]
    fact: str
    forms: tuple[str, ...] = ("grid", "float sums", "balanced")
    targets: str = "labels"


def with_value(values: Tensor, value: float, *places: Any) -> Tensor:
    out = values.clone() if values.is_floating_point() else values.double()
    for place in places:
        out[place] = value
    return out


VALUES: tuple[Any, ...] = (("grid", "float sums"), "values")  # the forms that take float targets
BAD: dict[str, Bad] = {
    "x too narrow": Bad("x", lambda x, y: x[:, :-1], ValueError, "(3, 55)"),
    "one sample without its dimension": Bad("x", lambda x, y: x[0], ValueError, "x[None]"),
    "x of rank 3": Bad("x", lambda x, y: x[None], ValueError, "(1, 3, 56)"),
    "x complex": Bad("x", lambda x, y: x + 0j, ValueError, "complex64"),
    "x is text": Bad("x", lambda x, y: "features", ValueError, "text"),
    "fewer rows than labels": Bad("x", lambda x, y: x[:2], ValueError, "(2, 56)"),
    "NaN in x": Bad("x", lambda x, y: with_value(x, NAN, (1, 4), (2, 0)), ValueError, "index (1, 4)", tuple(FORMS)),
    "inf in x": Bad("x", lambda x, y: with_value(x, -INF, (2, 7)), ValueError, "index (2, 7)"),
    "beyond the explicit grid": Bad(
        "x", lambda x, y: with_value(x, -9.0, (1, 1)), GridError, "limit=16.0", ("grid", "unchecked", "balanced", "ovo")
    ),
    "beyond 2^26 steps of the automatic grid": Bad(
        "x", lambda x, y: with_value(x, 300.0, (0, 1)), GridError, "limit=512.0", ("auto",)
    ),
    "squares beyond float64": Bad(
        "x", lambda x, y: with_value(x.double(), 1e200, (0, 1)), ValueError, "1e+200", ("float sums",)
    ),
    "a scalar label": Bad("y", lambda x, y: y[0], ValueError, "(3, 56)"),
    "targets of another width": Bad("y", lambda x, y: torch.zeros(3, 2), ValueError, "(3, 2)"),
    "label too large": Bad("y", lambda x, y: torch.tensor([0, 3, 1]), ValueError, "label 3", tuple(FORMS)),
    "label negative": Bad("y", lambda x, y: torch.tensor([0, 2, -1]), ValueError, "label -1"),
    "labels as floats": Bad("y", lambda x, y: y.float(), ValueError, "y.long()"),
    "label NaN": Bad("y", lambda x, y: torch.tensor([0.0, NAN, 1.0]), ValueError, "nan"),
    "labels as text": Bad("y", lambda x, y: ["cat", "dog", "cat"], ValueError, "text"),
    "truth values for three classes": Bad("y", lambda x, y: y > 0, ValueError, "torch.bool"),
    "targets where labels are held": Bad("y", lambda x, y: torch.zeros(3, K), ValueError, "targets"),
    "labels where targets are held": Bad("y", lambda x, y: torch.tensor([0, 1, 2]), ValueError, "(B, K)", *VALUES),
    "NaN in targets": Bad("y", lambda x, y: with_value(y, NAN, (0, 2)), ValueError, "index (0, 2)", *VALUES),
    "target beyond its grid": Bad(
        "y", lambda x, y: with_value(y, 1e4, (0, 2)), GridError, "10000.0", ("grid",), "values"
    ),
    "too few weights": Bad("weight", lambda x, y: torch.ones(2), ValueError, "(2,)"),
    "a weight per feature": Bad("weight", lambda x, y: torch.ones_like(x), ValueError, "(3, 56)"),
    "complex weights": Bad("weight", lambda x, y: torch.ones(3) + 0j, ValueError, "complex64"),
    "NaN in weight": Bad("weight", lambda x, y: torch.tensor([1.0, NAN, NAN]), ValueError, "index 1"),
    "inf in weight": Bad("weight", lambda x, y: torch.tensor([1.0, 1.0, INF]), ValueError, "index 2"),
    "negative weight": Bad("weight", lambda x, y: torch.tensor([1.0, -2.0, -1.0]), ValueError, "-2.0"),
    "fractional weight on a grid": Bad(
        "weight", lambda x, y: torch.tensor([1.0, 1.0, 0.5]), ValueError, "grid=None", ("grid", "auto", "balanced")
    ),
    "x elsewhere": Bad("x", lambda x, y: x.to("meta"), RuntimeError, "x.to('cpu')"),
    "y elsewhere": Bad("y", lambda x, y: y.to("meta"), RuntimeError, "y.to('cpu')"),
    "weight elsewhere": Bad("weight", lambda x, y: torch.ones(3, device="meta"), RuntimeError, "weight.to('cpu')"),
}

Triple = tuple[Any, Any, Any]
CALLS: dict[str, tuple[tuple[str, ...], Callable[[LSSVMHead, Triple, Triple], Any]]] = {
    "add": (("x", "y", "weight"), lambda h, bad, good: h.add(*bad)),
    "remove": (("x", "y", "weight"), lambda h, bad, good: h.remove(*bad)),
    "update, added": (("x", "y", "weight"), lambda h, bad, good: h.update(add=bad, remove=good)),
    "update, removed": (("x", "y", "weight"), lambda h, bad, good: h.update(add=good, remove=bad)),
    "relabel": (("x", "y", "weight"), lambda h, bad, good: h.relabel(bad[0], bad[1], good[1], bad[2])),
    "relabel, new label": (("y",), lambda h, bad, good: h.relabel(good[0], good[1], bad[1])),
    "replace, old": (("x", "y"), lambda h, bad, good: h.replace(bad[0], bad[1], good[0], good[1])),
    "replace, new": (("x", "y"), lambda h, bad, good: h.replace(good[0], good[1], bad[0], bad[1])),
}


@pytest.mark.parametrize(("bad", "form"), [(name, form) for name, bad in BAD.items() for form in bad.forms])
def test_bad_samples(bad: str, form: str, dense: Callable[..., Any]) -> None:
    """Every operation refuses them, and so does a head that is asked for scores."""
    part, spoil, error, fact, _, kind = BAD[bad]
    options = FORMS[form]
    head, twin, samples = twins(options, kind)
    x, y = samples.x[:3], samples.y[:3]
    spoilt = spoil(x, y)
    triple = (spoilt if part == "x" else x, spoilt if part == "y" else y, spoilt if part == "weight" else None)
    for name, (parts, call) in CALLS.items():
        if part in parts:
            refused(lambda call=call: call(head, triple, (x, y, None)), error, fact, note=name)
    if bad in (
        "x too narrow",
        "one sample without its dimension",
        "x of rank 3",
        "x complex",
        "x is text",
        "x elsewhere",
    ):
        refused(lambda: head(spoilt), error, fact)
        refused(lambda: head.predict(spoilt), error, fact)
    assert_untouched(head, twin)
    assert_goes_on(head, options, samples, dense)


@pytest.mark.parametrize("form", FORMS)
def test_first_batch_may_be_bad(form: str, dense: Callable[..., Any]) -> None:
    """A refused first batch decides nothing: neither a grid, nor labels against targets."""
    options, samples = FORMS[form], data()
    head = made(options)
    for bad in ("NaN in x", "label too large", "negative weight", "weight elsewhere"):
        part, spoil, error, fact, *_ = BAD[bad]
        x, y = 1000 * samples.x[:3] if form == "auto" else samples.x[:3], samples.y[:3]
        spoilt = spoil(x, y)
        args = (spoilt if part == "x" else x, spoilt if part == "y" else y, spoilt if part == "weight" else None)
        refused(lambda args=args: head.add(*args), error, fact)
        refused(lambda x=x: head(x), NotFittedError, "add(x, y)")
    head.add(samples.x[:N], samples.y[:N])
    assert_goes_on(head, options, samples, dense)


def test_the_limit_itself_is_on_the_grid() -> None:
    x = torch.full((2, J), 8.0)
    assert made(FORMS["grid"]).add(x, [0, 1]).remove(-x + 16.0, [0, 1]).n == 0


def test_outliers_are_no_error_for_the_automatic_grid() -> None:
    head, twin, _ = twins({})
    head.add(torch.full((1, J), 256.0), [0])
    assert head.grid.limit == 4.0
    assert head.n == N + 1
    refused(lambda: head.add(torch.full((1, J), 256.1), [0]), GridError, "256.1")
    assert head.remove(torch.full((1, J), 256.0), [0]).digest() == twin.digest()


@pytest.mark.parametrize("argument", ["add", "remove"])
@pytest.mark.parametrize("value", [5, "ab c", (1,), (1, 2, 3, 4, 5)], ids=str)
def test_update_takes_tuples(argument: str, value: Any) -> None:
    head, twin, _ = twins(FORMS["grid"])
    refused(lambda: head.update(**{argument: value}), ValueError, f"{argument} must be (x, y)")
    assert_untouched(head, twin)


def test_update_of_an_empty_head_decides_once() -> None:
    """Labels in one half and targets in the other do not mix, even while nothing is decided yet."""
    samples = data()
    for options in ({}, {"grid": None}):
        head = made(options)
        mixed = {"add": (samples.x[:3], samples.y[:3]), "remove": (samples.x[:3], torch.zeros(3, K))}
        refused(lambda head=head, mixed=mixed: head.update(**mixed), ValueError, "values")
        assert head.add(samples.x[:3], torch.zeros(3, K)).n == 3


@pytest.mark.parametrize(
    ("ids", "fact"), [(None, "folds=2"), ([1, 2], "2 ids"), (torch.arange(4), "4 ids"), (7, "7")], ids=str
)
@pytest.mark.parametrize("call", ["add", "remove", "relabel"])
def test_folds_need_ids(call: str, ids: Any, fact: str) -> None:
    samples = data()
    head, twin = (made({"folds": 2}).add(samples.x[:9], samples.y[:9], ids=range(9)) for _ in range(2))
    args = [samples.x[:3], samples.y[:3]] + ([samples.y[1:4]] if call == "relabel" else [])
    refused(lambda: getattr(head, call)(*args, ids=ids), ValueError, fact)
    assert_untouched(head, twin)
    assert head.remove(samples.x[:9], samples.y[:9], ids=range(9)).n == 0


@pytest.mark.parametrize("form", FORMS)
def test_samples_of_weight_zero_are_none(form: str, dense: Callable[..., Any]) -> None:
    samples = data()
    head = made(FORMS[form]).add(samples.x[:3] * 2, samples.y[:3], weight=torch.zeros(3))
    refused(lambda: head(samples.x), NotFittedError)
    head.remove(samples.x[:3], samples.y[:3], weight=[0, 0, 0])
    head.add(samples.x[:N], samples.y[:N], weight=torch.ones(N))
    head.add(samples.x[:4], samples.y[:4], weight=[0, 0, 0, 0])
    assert_goes_on(head, FORMS[form], samples, dense)


# -- removing what is not there --------------------------------------------------------------------------------------------

REMOVALS: dict[str, Callable[[LSSVMHead, Tensor, Tensor], Any]] = {
    "remove": lambda h, x, y: h.remove(x, y),
    "update": lambda h, x, y: h.update(remove=(x, y)),
    "relabel": lambda h, x, y: h.relabel(x, y, (y + 1) % K),
    "replace": lambda h, x, y: h.replace(x, y, x, (y + 1) % K),
}


@pytest.mark.parametrize("form", FORMS)
def test_count_below_zero(form: str, dense: Callable[..., Any]) -> None:
    head, twin, samples = twins(FORMS[form])
    empty = made(FORMS[form])
    x = samples.x[:3].repeat(11, 1)
    y = torch.full((33,), 1)  # 30 are held
    fact = "row 0" if head.unchecked is None else "class 1"
    for name, call in REMOVALS.items():
        refused(lambda call=call: call(head, x, y), RemovalError, fact, note=name)
        refused(lambda call=call: call(empty, x[:2], y[:2]), RemovalError, note=name)
    assert_untouched(head, twin)
    assert_untouched(empty, made(FORMS[form]))
    refused(lambda: empty(samples.x), NotFittedError)
    assert_goes_on(head, FORMS[form], samples, dense)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "read"), [(1, True), (300, True), (24, False)])
def test_diagonal_below_zero(form: str, rows: int, read: bool, dense: Callable[..., Any]) -> None:
    """Samples of a class that is held, with a feature larger than all held ones together: refused, in small and in bulk."""
    options, samples = FORMS[form], data()
    samples.x[:, 1] *= 0.01
    x, y = samples.x[:N].repeat(4, 1), samples.y[:N].repeat(4)
    head, twin = (made(options).add(x, y) for _ in range(2))
    if read:
        _ = head.w, twin.w
    wrong = x[:rows].clone()
    wrong[-1, 1] = 3.0
    fact = f"row {rows - 1} is not held" if head.unchecked is None else "sum of squares"
    refused(lambda: head.remove(wrong, y[:rows]), RemovalError, fact)
    refused(lambda: head.update(add=(x[:2], y[:2]), remove=(wrong, y[:rows])), RemovalError, fact)
    refused(lambda: head.replace(wrong, y[:rows], x[:rows], y[:rows]), RemovalError, fact)
    assert_untouched(head, twin)
    head.remove(x[N:], y[N:])
    assert_goes_on(head, options, samples, dense)


@pytest.mark.parametrize("form", ["grid", "unchecked", "auto", "float sums", "balanced"])
@pytest.mark.parametrize("rows", [1, 300])
def test_not_positive_definite_is_found_at_once(form: str, rows: int, dense: Callable[..., Any]) -> None:
    """... and only that call is refused: what was acknowledged before, read or not, stays.

    The features are nearly the same number J times over: a sample across that direction has a leverage above one, and counts and
    sums of squares do not show it.
    """
    options, generator = FORMS[form] | {"rho": 0.01}, torch.Generator().manual_seed(5)
    x = torch.randn(420, 1, generator=generator) + 0.003 * torch.randn(420, J, generator=generator)
    x, y = x.clamp(-4, 4), torch.arange(420) % K
    head, twin = (made(options).add(x[:400], y[:400]) for _ in range(2))
    _ = head.w
    for h in (head, twin):
        h.add(x[400:402], y[400:402])
        h.remove(x[400:401], y[400:401])
        h.add(x[402:405], y[402:405])
    wrong = x[:rows].clone()
    wrong[-1] = 0.9 * torch.tensor([1.0, -1.0]).repeat(J // 2)
    fact = f"row {rows - 1} is not held" if head.unchecked is None else "positive semidefinite"
    for call in ("remove", "update"):
        refused(lambda call=call: REMOVALS[call](head, wrong, y[:rows]), RemovalError, fact)
    assert_untouched(head, twin)
    head.remove(x[:40], y[:40])
    kept = torch.cat([x[40:400], x[401:405]])
    kept = kept.double() if head.grid is None else head.grid.snap(kept)
    labels = torch.cat([y[40:400], y[401:405]])
    w, _ = dense(kept, labels, K, rho=0.01, class_weight=options.get("class_weight"))
    torch.testing.assert_close(head.w, w, rtol=0, atol=1e-8 * float(w.abs().max()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "unread"), [(12, False), (300, True)])
def test_everything_removed_but_not_what_was_held(form: str, rows: int, unread: bool) -> None:
    """Counts come to zero and sums do not; a legitimate removal before it stays, read or not."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(rows, J, generator=generator).clamp(-4, 4), torch.arange(rows) % K
    head, twin = (made(FORMS[form]).add(x, y) for _ in range(2))
    for h in (head, twin) if unread else ():
        h.remove(x[:3], y[:3])
    rest = slice(3 if unread else 0, None)
    fact = "row 0 is not held" if head.unchecked is None else "not be zero"
    refused(lambda: head.remove(x[rest] / 2, y[rest]), RemovalError, fact)
    assert_untouched(head, twin)
    assert head.remove(x[rest], y[rest]).n == 0
    refused(lambda: head(x), NotFittedError)


def test_real_weights_come_to_zero() -> None:
    """0.1 + 0.2 + 0.3 - 0.1 - 0.2 - 0.3 is not zero in floating point, but no sample is left."""
    x, y = data()
    weight = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    head = made({"grid": None}).add(x[:3], y[:3], weight)
    for i in (2, 0, 1):
        head.remove(x[i : i + 1], y[i : i + 1], weight[i : i + 1])
    assert head.n == pytest.approx(0, abs=1e-12)
    refused(lambda: head(x), NotFittedError)


# -- the sums themselves ---------------------------------------------------------------------------------------------------

FINE = {"grid": FixedPoint(1.0, bits=26)}  # one sample of ones is 2^52 in each sum: int64 holds about a thousand


def heavy(rows: int) -> Data:
    generator = torch.Generator().manual_seed(1)
    return Data(torch.randint(0, 2, (rows, J), generator=generator) * 2.0 - 1.0, torch.arange(rows) % K)


@pytest.mark.parametrize("options", [{}, {"per_class": True}], ids=["totals", "per class"])
@pytest.mark.parametrize(
    "call",
    [
        lambda h, s: h.add(s.x[600:1200], s.y[600:1200]),
        lambda h, s: h.add(s.x[:1], s.y[:1], weight=[600]),
        lambda h, s: h.update(add=(s.x[600:1200], s.y[600:1200]), remove=(s.x[:5], s.y[:5])),
        lambda h, s: h.merge(made(FINE | {"per_class": h.statistics.per_class}).add(s.x[600:1200], s.y[600:1200])),
    ],
    ids=["add", "weight", "update", "merge"],
)
def test_overflow_is_refused_before_it_happens(call: Callable[..., Any], options: dict[str, Any]) -> None:
    samples = heavy(1200)
    head, twin = (made(FINE | options).add(samples.x[:600], samples.y[:600]) for _ in range(2))
    refused(lambda: call(head, samples), GridError, "FixedPoint(limit=1.0, bits=16)")
    assert_untouched(head, twin)
    for _ in range(3):  # what comes and goes does not fill the sums
        head.add(samples.x[600:900], samples.y[600:900])
        head.remove(samples.x[600:900], samples.y[600:900])
    assert_untouched(head, twin)
    diagonal = head.statistics.M.diagonal(dim1=-2, dim2=-1)[..., :-1]
    assert int(diagonal.reshape(-1, J)[:, 0].sum()) == 600 * 2**52


@pytest.mark.parametrize("options", [{}, {"per_class": True}], ids=["totals", "per class"])
def test_a_nearly_full_head_can_be_emptied_and_relabelled(options: dict[str, Any]) -> None:
    x, y = heavy(900)
    new = torch.cat([(y[:700] + 1) % K, y[700:]])
    full = [made(FINE | options).add(x, y) for _ in range(3)]
    rest = made(FINE | options).add(x[700:], y[700:]).digest()
    assert full[0].remove(x[:700], y[:700]).digest() == rest
    assert full[0].remove(x[700:], y[700:]).n == 0
    assert operator.isub(full[1], made(FINE | options).add(x[:700], y[:700])).digest() == rest
    if not options:
        assert full[2].relabel(x[:700], y[:700], new[:700]).digest() == made(FINE).add(x, new).digest()


def test_a_weight_too_large_for_exact_sums() -> None:
    x, y = heavy(3)
    head = made(FINE)
    refused(lambda: head.add(x, y, weight=[1.0, 1e15, 1.0]), ValueError, "1000000000000000.0")
    assert head.add(x, y).n == 3


# -- reading ---------------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_another_device_is_named_for_cuda() -> None:
    head = made({}).add(torch.zeros(3, J), torch.zeros(3, dtype=torch.int64))
    there = torch.zeros(3, J, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
    for call in (lambda: head.add(*there), lambda: head.remove(*there), lambda: head(there[0])):
        refused(call, RuntimeError, "x.to('cpu')")
    gpu = made({"device": "cuda"}).add(*there)
    refused(lambda: gpu(torch.zeros(3, J)), RuntimeError, "x.to('cuda:0')")
    refused(lambda: gpu.merge(head), ValueError, "device")


# -- options ---------------------------------------------------------------------------------------------------------------

NO_RHO = [0, 0.0, -1.0, NAN, INF, -INF, "1", None, True, 1j, torch.tensor(-1.0), torch.ones(2)]


@pytest.mark.parametrize("value", NO_RHO, ids=repr)
def test_rho_is_positive(value: Any) -> None:
    refused(lambda: made({"rho": value}), ValueError, "finite number > 0")
    head, twin, _ = twins(FORMS["grid"])
    refused(lambda: setattr(head, "rho", value), ValueError, "finite number > 0")
    assert head.rho == 1.0
    assert torch.equal(head.w, twin.w)
    assert_untouched(head, twin)


@pytest.mark.parametrize("value", [2, 0.5, np.float32(0.5), np.int64(2), torch.tensor(0.5)], ids=repr)
def test_rho_may_be_any_real_number(value: Any) -> None:
    head = LSSVMHead(J, K, rho=value)
    assert head.rho == float(value)
    head.rho = value
    assert type(head.rho) is float


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"intercept": "fixed"}, "'fixed'"),
        ({"intercept": None}, "None"),
        ({"multiclass": "crammer"}, "'crammer'"),
        ({"class_weight": "auto"}, "'auto'"),
        ({"class_weight": torch.ones(2)}, "(2,)"),
        ({"class_weight": [1.0, 0.0, 1.0]}, "[1.0, 0.0, 1.0]"),
        ({"class_weight": [1.0, NAN, 1.0]}, "nan"),
        ({"class_weight": {0: 1.0}}, "dict"),
        ({"class_weight": "balanced", "per_class": False}, "per_class=False"),
        ({"multiclass": "ovo", "per_class": False}, "per_class=False"),
        ({"grid": "fine"}, "'fine'"),
        ({"target_grid": "fine"}, "'fine'"),
        ({"folds": -1}, "-1"),
        ({"folds": 2.0}, "2.0"),
        ({"in_features": 0}, "in_features"),
        ({"in_features": "3"}, "'3'"),
        ({"num_classes": 0}, "num_classes"),
        ({"num_classes": True}, "True"),
    ],
    ids=repr,
)
def test_unknown_options(options: dict[str, Any], fact: str) -> None:
    refused(lambda: LSSVMHead(**({"in_features": J, "num_classes": K, "rho": 1.0} | options)), ValueError, fact)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"limit": 0.0}, "limit"),
        ({"limit": -1.0}, "-1.0"),
        ({"limit": "1"}, "'1'"),
        ({"limit": NAN}, "nan"),
        ({"limit": 1.0, "bits": 27}, "27"),
        ({"limit": 1.0, "bits": 20, "headroom": 7}, "headroom"),
        ({"limit": 1.0, "bits": 1.5}, "1.5"),
        ({"limit": 1e-300}, "1e-300"),
        ({"limit": 1e308}, "1e+308"),
    ],
    ids=repr,
)
def test_grids_that_cannot_be(options: dict[str, Any], fact: str) -> None:
    refused(lambda: FixedPoint(**options), ValueError, fact)


@pytest.mark.parametrize(
    "options", [{"class_weight": "balanced"}, {"multiclass": "ovo"}, {"per_class": True}], ids=repr
)
def test_sums_per_class_need_labels(options: dict[str, Any]) -> None:
    head = made(options)
    refused(lambda: head.add(data().x, torch.zeros(N + 10, K)), ValueError, "labels (B,)")
    assert head.add(*data()).n == N + 10


def test_class_weight_and_forget_class_need_sums_per_class() -> None:
    head, twin, _ = twins(FORMS["grid"])
    refused(lambda: setattr(head, "class_weight", "balanced"), ValueError, "per_class=True")
    refused(lambda: setattr(head, "class_weight", "blanced"), ValueError, "'blanced'")
    refused(lambda: head.forget_class(1), ValueError, "per_class=True")
    assert head.class_weight is None
    assert torch.equal(head.w, twin.w)
    assert_untouched(head, twin)


# -- merging ---------------------------------------------------------------------------------------------------------------


def part(options: dict[str, Any], rows: slice) -> LSSVMHead:
    """A head of any shape with some samples."""
    options = {"in_features": J, "num_classes": K, "grid": FixedPoint(8.0), "rho": 1.0} | options
    targets = options.pop("targets", False)
    empty = options.pop("empty", False)
    head = LSSVMHead(**options)
    x, y = data("values" if targets else "labels")
    ids = list(range(len(x)))[rows] if options.get("folds") else None
    return head if empty else head.add(x[rows, : head.in_features] * options["rho"], y[rows], ids=ids)


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "features": ({}, {"in_features": J - 1}, "in_features"),
    "classes": ({}, {"num_classes": K + 1}, "num_classes"),
    "intercept": ({}, {"intercept": "none"}, "intercept"),
    "multiclass": ({"per_class": True}, {"multiclass": "ovo"}, "multiclass"),
    "sums per class": ({}, {"per_class": True}, "per_class"),
    "folds": ({}, {"folds": 2}, "folds"),
    "grids": ({}, {"grid": FixedPoint(16.0)}, "limit=16.0"),
    "bits": ({}, {"grid": FixedPoint(8.0, bits=18)}, "bits=18"),
    "automatic grids": ({"grid": "auto"}, {"grid": "auto", "rho": 8.0}, "limit=32.0"),
    "an automatic grid": ({}, {"grid": "auto"}, "limit=4.0"),
    "no grid": ({}, {"grid": None}, "exact"),
    "labels and targets": ({}, {"targets": True}, "values"),
    "target grids": (
        {"targets": True, "target_grid": FixedPoint(8.0)},
        {"targets": True, "target_grid": FixedPoint(32.0)},
        "limit=32.0",
    ),
    "a grid not used yet": ({"empty": True}, {"grid": FixedPoint(16.0)}, "limit=16.0"),
    "a target grid not used yet": (
        {"empty": True, "target_grid": FixedPoint(8.0)},
        {"targets": True, "target_grid": FixedPoint(32.0)},
        "limit=32.0",
    ),
}
MERGES = (LSSVMHead.merge, operator.iadd, operator.isub)


@pytest.mark.parametrize("swap", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize("difference", OTHERS)
def test_merging_heads_that_differ(difference: str, swap: bool) -> None:
    first, second, fact = OTHERS[difference]
    if swap:
        first, second = second, first
    head, twin = part(first, slice(0, 40)), part(first, slice(0, 40))
    other, other_twin = part(second, slice(0, 40)), part(second, slice(0, 40))
    for merge in MERGES:
        refused(lambda merge=merge: merge(head, other), ValueError, fact)
    assert_untouched(head, twin)
    assert_untouched(other, other_twin)
    assert_untouched(head.merge(part(first, slice(40, 60))), part(first, slice(0, 60)))


@pytest.mark.parametrize("other", [3, None, torch.nn.Linear(J, K), {}], ids=["int", "None", "Linear", "dict"])
def test_merging_with_something_else(other: Any) -> None:
    head, twin, _ = twins(FORMS["grid"])
    for merge in MERGES:
        refused(lambda merge=merge: merge(head, other), ValueError, type(other).__name__)
    assert_untouched(head, twin)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", ["more of a class", "larger", "others", "from nothing"])
def test_subtracting_what_is_not_there(form: str, wrong: str, dense: Callable[..., Any]) -> None:
    head, twin, samples = twins(FORMS[form])
    x, y = samples
    other = made(FORMS[form])
    if wrong == "more of a class":
        other.add(x[:40], torch.ones(40, dtype=torch.int64))
    elif wrong == "larger":
        other.add(torch.full((29, J), 4.0), torch.zeros(29, dtype=torch.int64))
    elif wrong == "others":
        other.add(x[:1] * 0 + 4.0, y[:1]).add(x[:N] / 2, y[:N]).remove(x[:1] * 0 + 4.0, y[:1])  # on the same grid
    else:
        head, twin = made(FORMS[form]), made(FORMS[form])
        other.add(x[:3], y[:3])
    refused(lambda: operator.isub(head, other), RemovalError, "not among the current samples")
    assert_untouched(head, twin)
    if head.n:
        assert_goes_on(head, FORMS[form], samples, dense)


# -- classes ---------------------------------------------------------------------------------------------------------------


def test_add_classes_takes_a_number(dense: Callable[..., Any]) -> None:
    head, twin, samples = twins(FORMS["grid"])
    for k in (-1, 1.0, True, "2", None):
        refused(lambda k=k: head.add_classes(k), ValueError, repr(k))
    assert head.num_classes == K
    assert_untouched(head, twin)
    assert_goes_on(head.add_classes(2), FORMS["grid"], samples, dense)


def test_add_classes_and_a_tensor_of_weights(dense: Callable[..., Any]) -> None:
    options = {"grid": FixedPoint(8.0), "class_weight": torch.tensor([1.0, 2.0, 0.5])}
    head, twin, samples = twins(options)
    refused(lambda: head.add_classes(1), ValueError, "class_weight")
    assert_untouched(head, twin)
    head.class_weight = None
    head.add_classes(1).class_weight = torch.tensor([1.0, 2.0, 0.5, 1.0])
    assert_goes_on(head, options | {"class_weight": head.class_weight}, samples, dense)


def test_forget_class_takes_a_class() -> None:
    options = {"grid": FixedPoint(8.0), "per_class": True}
    head, twin, samples = twins(options)
    for c in (-1, K, 1.0, True, "1", None, torch.tensor(1)):
        refused(lambda c=c: head.forget_class(c), ValueError, repr(c))
    assert_untouched(head, twin)
    keep = samples.y[:N] != 1
    assert head.forget_class(1).digest() == made(options).add(samples.x[:N][keep], samples.y[:N][keep]).digest()


def test_no_digest_without_a_grid() -> None:
    head, twin, _ = twins(FORMS["float sums"])
    refused(lambda: head.digest(), ValueError, "grid='auto'")
    assert_untouched(head, twin)
    assert math.isfinite(head.drift())
