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

from torchlssvm import FixedPoint, GridError, LSSVMHead, NotFittedError, RemovalError, TorchLSSVMError

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
GRIDDED = [name for name, options in FORMS.items() if isinstance(options.get("grid"), FixedPoint)]


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


def twins(options: dict[str, Any], kind: str = "labels") -> tuple[LSSVMHead, LSSVMHead, Data]:
    """Two heads that hold the first N samples, and the samples: weights were read, then a few samples came in."""
    samples = data(kind)
    pair = [LSSVMHead(J, K, **({"rho": 1.0} | options)) for _ in range(2)]
    for head in pair:
        head.add(samples.x[: N - 3], samples.y[: N - 3])
        _ = head.w
        head.add(samples.x[N - 3 : N], samples.y[N - 3 : N])
    return *pair, samples


def numbers(head: LSSVMHead) -> tuple[list[Tensor], str | None]:
    """What may not change: sums and counts, or w, b and P; and the digest."""
    stats = head.statistics
    if stats is None:
        return [head.w.clone(), head.b.clone(), head.P.clone(), head.counts, torch.tensor(head.n)], None
    state = stats.state()
    return [state[k] for k in ("sums", "counts") if k in state] + [
        torch.tensor(head.n)
    ], head.digest() if stats.exact else None


def assert_untouched(head: LSSVMHead, twin: LSSVMHead) -> None:
    (mine, digest), (theirs, expected) = numbers(head), numbers(twin)
    assert digest == expected
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        if head.statistics.exact:
            assert torch.equal(a, b)
        else:  # float64 sums may have been formed in another order
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-10)


def assert_goes_on(head: LSSVMHead, options: dict[str, Any], samples: Data, dense: Callable[..., Any]) -> None:
    """The head, with the first N samples, learns five more, forgets two, and has the weights of a dense solve."""
    x, y = samples
    head.add(x[N : N + 5], y[N : N + 5])
    head.remove(x[4:6], y[4:6])
    keep = [i for i in range(N + 5) if i not in (4, 5)]
    kept = x[keep].double() if head.grid is None else head.grid.snap(x[keep])
    known = {k: v for k, v in options.items() if k in ("rho", "intercept", "class_weight", "multiclass")}
    w, b = dense(kept, y[keep], head.num_classes, **known)
    tolerance = 1e-9
    torch.testing.assert_close(head.w, w, rtol=0, atol=tolerance * float(w.abs().max()))
    torch.testing.assert_close(head.b, b, rtol=0, atol=tolerance)
    assert head.n == N + 3


def refused(call: Callable[[], Any], error: type[Exception], *words: str, note: str = "") -> None:
    """The call raises the error, and its message holds these words."""
    try:
        call()
    except error as caught:
        message = str(caught)
    else:
        pytest.fail(f"{note}: no {error.__name__}")
    missing = [word for word in words if word not in message]
    assert not missing, f"{note}: {missing} not in: {message}"


# -- samples that cannot be taken ------------------------------------------------------------------------------------------


class Bad(NamedTuple):
    """What is wrong with (x, y, weight), made from three good samples; the error; words of its message."""

    part: str
    spoil: Callable[[Tensor, Tensor], Any]
    error: type[Exception]
    words: tuple[str, ...]
    forms: list[str]
    targets: str = "labels"


def with_value(values: Tensor, value: float, *places: Any) -> Tensor:
    out = values.clone() if values.is_floating_point() else values.double()
    for place in places:
        out[place] = value
    return out


EVERY = list(FORMS)
PLAIN = ["grid", "float sums"]  # the forms that take float targets
BAD: dict[str, Bad] = {
    "x too narrow": Bad("x", lambda x, y: x[:, :-1], ValueError, ("(B, 56)", "(3, 55)"), EVERY),
    "x too wide": Bad("x", lambda x, y: torch.cat([x, x], 1), ValueError, ("(B, 56)", "(3, 112)"), EVERY),
    "one sample without its dimension": Bad("x", lambda x, y: x[0], ValueError, ("(B, 56)", "(56,)", "x[None]"), EVERY),
    "x of rank 3": Bad("x", lambda x, y: x[None], ValueError, ("(B, 56)", "(1, 3, 56)"), EVERY),
    "x complex": Bad("x", lambda x, y: x + 0j, ValueError, ("x must be", "complex64"), EVERY),
    "x is text": Bad("x", lambda x, y: "features", ValueError, ("x holds text",), EVERY),
    "fewer rows than labels": Bad("x", lambda x, y: x[:2], ValueError, ("(2, 56)", "(3,)", "x and y differ"), EVERY),
    "NaN in x": Bad(
        "x", lambda x, y: with_value(x, NAN, (1, 4), (2, 0)), ValueError, ("x holds 2 NaN", "index (1, 4)"), EVERY
    ),
    "inf in x": Bad(
        "x", lambda x, y: with_value(x, -INF, (2, 7)), ValueError, ("x holds 1 NaN or inf", "index (2, 7)"), EVERY
    ),
    "beyond the explicit grid": Bad(
        "x",
        lambda x, y: with_value(x, -9.0, (1, 1)),
        GridError,
        ("x holds", "9.0", "limit 8.0", "FixedPoint(limit=16.0)"),
        GRIDDED,
    ),
    "beyond 2^26 steps of the automatic grid": Bad(
        "x",
        lambda x, y: with_value(x, 300.0, (0, 1)),
        GridError,
        ("x holds", "300.0", "limit 256.0", "FixedPoint(limit=512.0)"),
        ["auto"],
    ),
    "squares beyond float64": Bad(
        "x",
        lambda x, y: with_value(x.double(), 1e200, (0, 1)),
        ValueError,
        ("x holds", "1e+200", "rescale"),
        ["float sums"],
    ),
    "fewer labels than rows": Bad("y", lambda x, y: y[:2], ValueError, ("(3, 56)", "(2,)", "x and y differ"), EVERY),
    "a scalar label": Bad("y", lambda x, y: y[0], ValueError, ("(3, 56)", "()", "x and y differ"), EVERY),
    "targets of another width": Bad(
        "y", lambda x, y: torch.zeros(3, 2), ValueError, ("(B, 3)", "(3, 2)", "(3, 56)"), EVERY
    ),
    "label too large": Bad("y", lambda x, y: torch.tensor([0, 3, 1]), ValueError, ("label 3", "0..2"), EVERY),
    "label negative": Bad("y", lambda x, y: torch.tensor([0, 2, -1]), ValueError, ("label -1", "0..2"), EVERY),
    "label one half": Bad("y", lambda x, y: torch.tensor([0.0, 1.5, 1.0]), ValueError, ("integers", "1.5"), EVERY),
    "labels as floats": Bad("y", lambda x, y: y.float(), ValueError, ("integers", "float32", "y.long()"), EVERY),
    "label NaN": Bad("y", lambda x, y: torch.tensor([0.0, NAN, 1.0]), ValueError, ("integers", "nan"), EVERY),
    "label inf": Bad("y", lambda x, y: torch.tensor([0.0, 1.0, INF]), ValueError, ("integers", "inf"), EVERY),
    "labels as text": Bad(
        "y",
        lambda x, y: ["cat", "dog", "cat"],
        ValueError,
        (
            "y holds text",
            "integer labels 0..K-1",
        ),
        EVERY,
    ),
    "truth values for three classes": Bad("y", lambda x, y: y > 0, ValueError, ("torch.bool", "(3,)"), EVERY),
    "targets where labels are held": Bad("y", lambda x, y: torch.zeros(3, K), ValueError, ("labels", "targets"), EVERY),
    "labels where targets are held": Bad(
        "y", lambda x, y: torch.tensor([0, 1, 2]), ValueError, ("holds values", "got labels", "(B, K)"), PLAIN, "values"
    ),
    "NaN in targets": Bad(
        "y",
        lambda x, y: with_value(y, NAN, (0, 2), (1, 1)),
        ValueError,
        ("y holds 2 NaN", "index (0, 2)"),
        PLAIN,
        "values",
    ),
    "target beyond its grid": Bad(
        "y",
        lambda x, y: with_value(y, 1e4, (0, 2)),
        GridError,
        ("y holds", "10000.0", "FixedPoint"),
        ["grid"],
        "values",
    ),
    "too few weights": Bad("weight", lambda x, y: torch.ones(2), ValueError, ("weight", "(3,)", "(2,)"), EVERY),
    "a weight per feature": Bad(
        "weight", lambda x, y: torch.ones_like(x), ValueError, ("weight", "(3,)", "(3, 56)"), EVERY
    ),
    "complex weights": Bad(
        "weight", lambda x, y: torch.ones(3) + 0j, ValueError, ("weight must be real", "complex64"), EVERY
    ),
    "NaN in weight": Bad(
        "weight", lambda x, y: torch.tensor([1.0, NAN, NAN]), ValueError, ("weight holds 2 NaN", "index 1"), EVERY
    ),
    "inf in weight": Bad(
        "weight",
        lambda x, y: torch.tensor([1.0, 1.0, INF]),
        ValueError,
        ("weight holds 1 NaN or inf", "index 2"),
        EVERY,
    ),
    "negative weight": Bad(
        "weight", lambda x, y: torch.tensor([1.0, -2.0, -1.0]), ValueError, ("2 negative", "-2.0", "index 1"), EVERY
    ),
    "fractional weight on a grid": Bad(
        "weight",
        lambda x, y: torch.tensor([1.0, 1.0, 0.5]),
        ValueError,
        ("1 fractional", "0.5", "index 2", "grid=None"),
        [*GRIDDED, "auto"],
    ),
    "x elsewhere": Bad("x", lambda x, y: x.to("meta"), RuntimeError, ("x is on meta", "on cpu", "x.to('cpu')"), EVERY),
    "y elsewhere": Bad("y", lambda x, y: y.to("meta"), RuntimeError, ("y is on meta", "on cpu", "y.to('cpu')"), EVERY),
    "weight elsewhere": Bad(
        "weight",
        lambda x, y: torch.ones(3, device="meta"),
        RuntimeError,
        ("weight is on meta", "on cpu", "weight.to('cpu')"),
        EVERY,
    ),
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
    """Every operation refuses them."""
    part, spoil, error, words, _, kind = BAD[bad]
    options = FORMS[form]
    head, twin, samples = twins(options, kind)
    x, y = samples.x[:3], samples.y[:3]
    spoilt = spoil(x, y)
    triple = (spoilt if part == "x" else x, spoilt if part == "y" else y, spoilt if part == "weight" else None)
    for name, (parts, call) in CALLS.items():
        if part in parts:
            refused(lambda call=call: call(head, triple, (x, y, None)), error, *words, note=name)
    assert_untouched(head, twin)
    assert_goes_on(head, options, samples, dense)


@pytest.mark.parametrize("form", EVERY)
def test_first_batch_may_be_bad(form: str, dense: Callable[..., Any]) -> None:
    """A refused first batch decides nothing: neither a grid, nor labels against targets."""
    options, samples = FORMS[form], data()
    head = LSSVMHead(J, K, **({"rho": 1.0} | options))
    for bad in ("NaN in x", "label too large", "negative weight", "x too wide", "weight elsewhere"):
        part, spoil, error, words, *_ = BAD[bad]
        x, y = 1000 * samples.x[:3] if form == "auto" else samples.x[:3], samples.y[:3]
        spoilt = spoil(x, y)
        args = (spoilt if part == "x" else x, spoilt if part == "y" else y, spoilt if part == "weight" else None)
        refused(lambda args=args: head.add(*args), error, *words)
        refused(lambda x=x: head(x), NotFittedError, "no samples", "add(x, y)")
    head.add(samples.x[:N], samples.y[:N])
    assert_goes_on(head, options, samples, dense)


@pytest.mark.parametrize("form", GRIDDED)
def test_the_limit_itself_is_on_the_grid(form: str) -> None:
    x = torch.full((2, J), 8.0)
    assert LSSVMHead(J, K, **({"rho": 1.0} | FORMS[form])).add(x, [0, 1]).remove(-x + 16.0, [0, 1]).n == 0


def test_outliers_are_no_error_for_the_automatic_grid() -> None:
    head, _, samples = twins({})
    head.add(torch.full((1, J), 256.0), [0])
    assert head.grid.limit == 4.0
    assert head.n == N + 1
    refused(lambda: head.add(torch.full((1, J), 256.1), [0]), GridError, "256.1")
    assert head.remove(torch.full((1, J), 256.0), [0]).digest() == twins({})[1].digest()
    del samples


@pytest.mark.parametrize("form", EVERY)
@pytest.mark.parametrize("argument", ["add", "remove"])
@pytest.mark.parametrize("value", [5, "ab c", (1,), (1, 2, 3, 4, 5)], ids=str)
def test_update_takes_tuples(form: str, argument: str, value: Any) -> None:
    head, twin, _ = twins(FORMS[form])
    refused(lambda: head.update(**{argument: value}), ValueError, f"{argument} must be (x, y)")
    assert_untouched(head, twin)


def test_update_of_an_empty_head_decides_once() -> None:
    """Labels in one half and targets in the other do not mix, even while nothing is decided yet."""
    samples = data()
    for options in ({}, {"grid": None}):
        head = LSSVMHead(J, K, **({"rho": 1.0} | options))
        mixed = {"add": (samples.x[:3], samples.y[:3]), "remove": (samples.x[:3], torch.zeros(3, K))}
        refused(lambda head=head, mixed=mixed: head.update(**mixed), ValueError, "labels", "values")
        assert head.add(samples.x[:3], torch.zeros(3, K)).n == 3


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (None, ("folds=2", "ids")),
        ([1, 2], ("3 rows", "2 ids")),
        (torch.arange(4), ("3 rows", "4 ids")),
        (7, ("ids", "7")),
    ],
    ids=["none", "too few", "too many", "a number"],
)
@pytest.mark.parametrize("call", ["add", "remove", "relabel"])
def test_folds_need_ids(call: str, ids: Any, words: tuple[str, ...]) -> None:
    samples = data()
    head, twin = (LSSVMHead(J, K, folds=2, rho=1.0).add(samples.x[:9], samples.y[:9], ids=range(9)) for _ in range(2))
    args = [samples.x[:3], samples.y[:3]] + ([samples.y[1:4]] if call == "relabel" else [])
    refused(lambda: getattr(head, call)(*args, ids=ids), ValueError, *words)
    assert_untouched(head, twin)
    assert head.remove(samples.x[:9], samples.y[:9], ids=range(9)).n == 0


@pytest.mark.parametrize("form", EVERY)
def test_samples_of_weight_zero_are_none(form: str, dense: Callable[..., Any]) -> None:
    samples = data()
    head = LSSVMHead(J, K, **({"rho": 1.0} | FORMS[form])).add(samples.x[:3] * 2, samples.y[:3], weight=torch.zeros(3))
    refused(lambda: head(samples.x), NotFittedError, "no samples")
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


@pytest.mark.parametrize("form", EVERY)
@pytest.mark.parametrize("call", REMOVALS)
def test_count_below_zero(call: str, form: str, dense: Callable[..., Any]) -> None:
    head, twin, samples = twins(FORMS[form])
    x = samples.x[:3].repeat(11, 1)
    y = torch.full((33,), 1)  # 30 are held
    words = ["count", "bit for bit", "Nothing was changed", "class 1"]
    if head.unchecked is None:
        words = ["row 0", "held with label 0", "bit for bit", "Nothing was changed"]
    refused(lambda: REMOVALS[call](head, x, y), RemovalError, *words)
    assert_untouched(head, twin)
    assert_goes_on(head, FORMS[form], samples, dense)


@pytest.mark.parametrize("form", EVERY)
@pytest.mark.parametrize("call", REMOVALS)
def test_an_empty_head_has_nothing_to_remove(call: str, form: str) -> None:
    head, samples = LSSVMHead(J, K, **({"rho": 1.0} | FORMS[form])), data()
    refused(lambda: REMOVALS[call](head, samples.x[:2], samples.y[:2]), RemovalError)
    assert head.n == 0
    refused(lambda: head(samples.x), NotFittedError, "no samples")
    if head.statistics.exact:
        assert head.digest() == LSSVMHead(J, K, **({"rho": 1.0} | FORMS[form])).digest()


@pytest.mark.parametrize("form", EVERY)
@pytest.mark.parametrize("rows", [1, 24, 300])
@pytest.mark.parametrize("read", [True, False], ids=["read", "unread"])
def test_diagonal_below_zero(form: str, rows: int, read: bool, dense: Callable[..., Any]) -> None:
    """Samples of a class that is held, with a feature larger than all held ones together: refused, in small and in bulk."""
    options, samples = FORMS[form], data()
    samples.x[:, 1] *= 0.01
    x, y = samples.x[:N].repeat(4, 1), samples.y[:N].repeat(4)
    head, twin = (LSSVMHead(J, K, **({"rho": 1.0} | options)).add(x, y) for _ in range(2))
    if read:
        _ = head.w, twin.w
    wrong = x[:rows].clone()
    wrong[-1, 1] = 3.0
    words: tuple[str, ...] = ("sum of squares",)
    if head.unchecked is None:
        words = (f"row {rows - 1} is not held",)
    refused(lambda: head.remove(wrong, y[:rows]), RemovalError, *words, "Nothing was changed")
    refused(lambda: head.update(add=(x[:2], y[:2]), remove=(wrong, y[:rows])), RemovalError, *words)
    refused(lambda: head.replace(wrong, y[:rows], x[:rows], y[:rows]), RemovalError, *words)
    assert_untouched(head, twin)
    head.remove(x[N:], y[N:])
    assert_goes_on(head, options, samples, dense)


def narrow(rows: int) -> Data:
    """Features that are nearly the same number J times over: a sample across that direction has a leverage above one."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 1, generator=generator) + 0.003 * torch.randn(rows, J, generator=generator)
    return Data(x.clamp(-4, 4), torch.arange(rows) % K)


def bogus(samples: Data, rows: int) -> Data:
    """Held samples, and a last one that was never there; counts and sums of squares do not show it."""
    x = samples.x[:rows].clone()
    x[-1] = 0.9 * torch.tensor([1.0, -1.0]).repeat(J // 2)
    return Data(x, samples.y[:rows])


READS: dict[str, Callable[[LSSVMHead, Tensor], Any]] = {
    "forward": lambda h, x: h(x),
    "predict": lambda h, x: h.predict(x),
}


@pytest.mark.parametrize("form", ["grid", "unchecked", "auto", "float sums", "balanced"])
@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("call", ["remove", "update"])
def test_not_positive_definite_is_found_at_once(form: str, rows: int, call: str, dense: Callable[..., Any]) -> None:
    """... and only that call is refused: what was acknowledged before, read or not, stays."""
    options, samples = FORMS[form] | {"rho": 0.01}, narrow(420)
    x, y = samples
    head, twin = (LSSVMHead(J, K, **({"rho": 1.0} | options)).add(x[:400], y[:400]) for _ in range(2))
    _ = head.w
    for h in (head, twin):
        h.add(x[400:402], y[400:402])
        h.remove(x[400:401], y[400:401])
        h.add(x[402:405], y[402:405])
    words = (f"row {rows - 1} is not held",) if head.unchecked is None else ("positive definite", "Nothing was changed")
    refused(lambda: REMOVALS[call](head, *bogus(samples, rows)), RemovalError, *words)
    assert_untouched(head, twin)
    head.remove(x[:40], y[:40])
    kept = torch.cat([x[40:400], x[401:405]])
    kept = kept.double() if head.grid is None else head.grid.snap(kept)
    labels = torch.cat([y[40:400], y[401:405]])
    w, _ = dense(kept, labels, K, rho=0.01, class_weight=options.get("class_weight"))
    torch.testing.assert_close(head.w, w, rtol=0, atol=1e-8 * float(w.abs().max()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [12, 300])
@pytest.mark.parametrize("unread", [False, True])
def test_everything_removed_but_not_what_was_held(form: str, rows: int, unread: bool) -> None:
    """Counts come to zero and sums do not; a legitimate removal before it stays, read or not."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(rows, J, generator=generator).clamp(-4, 4), torch.arange(rows) % K
    head, twin = (LSSVMHead(J, K, **({"rho": 1.0} | FORMS[form])).add(x, y) for _ in range(2))
    for h in (head, twin) if unread else ():
        h.remove(x[:3], y[:3])
    rest = slice(3 if unread else 0, None)
    words = ("row 0 is not held",) if head.unchecked is None else ("no sample would be left", "not be zero")
    refused(lambda: head.remove(x[rest] / 2, y[rest]), RemovalError, *words, "Nothing was changed")
    assert_untouched(head, twin)
    assert head.remove(x[rest], y[rest]).n == 0
    refused(lambda: head(x), NotFittedError)


def test_real_weights_come_to_zero() -> None:
    """0.1 + 0.2 + 0.3 - 0.1 - 0.2 - 0.3 is not zero in floating point; no sample is left all the same."""
    x, y = data()
    weight = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    head = LSSVMHead(J, K, grid=None, rho=1.0).add(x[:3], y[:3], weight)
    for i in (2, 0, 1):
        head.remove(x[i : i + 1], y[i : i + 1], weight[i : i + 1])
    assert head.n == pytest.approx(0, abs=1e-12)
    refused(lambda: head(x), NotFittedError, "no samples")


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
        lambda h, s: h.merge(
            LSSVMHead(J, K, **FINE, per_class=h.statistics.per_class).add(s.x[600:1200], s.y[600:1200])
        ),
    ],
    ids=["add", "weight", "update", "merge"],
)
def test_overflow_is_refused_before_it_happens(call: Callable[..., Any], options: dict[str, Any]) -> None:
    samples = heavy(1200)
    head, twin = (
        LSSVMHead(J, K, **FINE, **({"rho": 1.0} | options)).add(samples.x[:600], samples.y[:600]) for _ in range(2)
    )
    refused(
        lambda: call(head, samples),
        GridError,
        "overflow",
        "coarser grid",
        "FixedPoint(limit=1.0, bits=16)",
        "Nothing was changed",
    )
    assert_untouched(head, twin)
    for _ in range(3):  # what comes and goes does not fill the sums
        head.add(samples.x[600:900], samples.y[600:900])
        head.remove(samples.x[600:900], samples.y[600:900])
    assert_untouched(head, twin)
    diagonal = head.statistics.M.diagonal(dim1=-2, dim2=-1)[..., :-1]
    assert int(diagonal.reshape(-1, J)[:, 0].sum()) == 600 * 2**52


@pytest.mark.parametrize("options", [{}, {"per_class": True}], ids=["totals", "per class"])
@pytest.mark.parametrize(
    ("call", "left"),
    [
        (lambda h, s: h.remove(s.x[:700], s.y[:700]), 200),
        (lambda h, s: h.remove(s.x, s.y), 0),
        (
            lambda h, s: operator.isub(
                h, LSSVMHead(J, K, **FINE, per_class=h.statistics.per_class).add(s.x[:700], s.y[:700])
            ),
            200,
        ),
    ],
    ids=["remove", "remove all", "isub"],
)
def test_a_nearly_full_head_can_be_emptied(call: Callable[..., Any], left: int, options: dict[str, Any]) -> None:
    samples = heavy(900)
    head = LSSVMHead(J, K, **FINE, **({"rho": 1.0} | options)).add(*samples)
    call(head, samples)
    rest = LSSVMHead(J, K, **FINE, **({"rho": 1.0} | options)).add(samples.x[900 - left :], samples.y[900 - left :])
    assert head.n == left
    assert head.digest() == rest.digest()


def test_a_nearly_full_head_can_be_relabelled() -> None:
    x, y = heavy(900)
    head = LSSVMHead(J, K, **({"rho": 1.0} | FINE)).add(x, y).relabel(x[:700], y[:700], (y[:700] + 1) % K)
    assert (
        head.digest()
        == LSSVMHead(J, K, **({"rho": 1.0} | FINE)).add(x, torch.cat([(y[:700] + 1) % K, y[700:]])).digest()
    )


def test_a_weight_too_large_for_exact_sums() -> None:
    x, y = heavy(3)
    head = LSSVMHead(J, K, **({"rho": 1.0} | FINE))
    refused(lambda: head.add(x, y, weight=[1.0, 1e15, 1.0]), ValueError, "weight", "too large", "1000000000000000.0")
    assert head.add(x, y).n == 3


# -- reading ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", EVERY)
@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("read", ["forward", "predict"])
def test_predicting_without_data(form: str, emptied: bool, read: str) -> None:
    x, y = data()
    head = LSSVMHead(J, K, **({"rho": 1.0} | FORMS[form]))
    if emptied:
        head.add(x[:7], y[:7])
        _ = head.w
        head.remove(x[:4], y[:4]).remove(x[4:7], y[4:7])
    refused(lambda: READS[read](head, x), NotFittedError, "no samples", "add(x, y)")
    assert issubclass(NotFittedError, TorchLSSVMError)
    assert head.n == 0
    assert not head.w.any()
    head.add(x[:N], y[:N])
    assert head(x).shape == (len(x), K)


@pytest.mark.parametrize("form", EVERY)
@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.zeros(J), ValueError, ("(B, 56)", "(56,)", "x[None]")),
        (torch.zeros(2, J + 1), ValueError, ("(B, 56)", "(2, 57)")),
        (torch.zeros(1, 2, J), ValueError, ("(B, 56)", "(1, 2, 56)")),
        (torch.zeros(2, J) + 0j, ValueError, ("x must be", "complex64")),
        (torch.zeros(2, J, device="meta"), RuntimeError, ("x is on meta", "on cpu", "x.to('cpu')")),
        ("features", ValueError, ("x holds text",)),
    ],
    ids=["rank 1", "wide", "rank 3", "complex", "elsewhere", "text"],
)
@pytest.mark.parametrize("read", ["forward", "predict"])
def test_predicting_on_bad_features(
    form: str, read: str, x: Any, error: type[Exception], words: tuple[str, ...]
) -> None:
    head, twin, samples = twins(FORMS[form])
    refused(lambda: READS[read](head, x), error, *words)
    assert_untouched(head, twin)
    assert head(samples.x).isfinite().all()


@pytest.mark.cuda
def test_another_device_is_named_for_cuda() -> None:
    head = LSSVMHead(J, K, rho=1.0).add(torch.zeros(3, J), torch.zeros(3, dtype=torch.int64))
    there = torch.zeros(3, J, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
    for call in (lambda: head.add(*there), lambda: head.remove(*there), lambda: head(there[0])):
        refused(call, RuntimeError, "x is on cuda:0", "on cpu", "x.to('cpu')")
    gpu = LSSVMHead(J, K, device="cuda", rho=1.0).add(*there)
    refused(lambda: gpu(torch.zeros(3, J)), RuntimeError, "x is on cpu", "on cuda:0", "x.to('cuda:0')")
    refused(lambda: gpu.merge(head), ValueError, "device", "cuda", "cpu")


# -- options ---------------------------------------------------------------------------------------------------------------

NO_RHO = [0, 0.0, -1.0, NAN, INF, -INF, "1", None, True, 1j, torch.tensor(-1.0), torch.ones(2)]


@pytest.mark.parametrize("value", NO_RHO, ids=repr)
@pytest.mark.parametrize("form", ["grid"])
def test_rho_is_positive(value: Any, form: str, dense: Callable[..., Any]) -> None:
    refused(
        lambda: LSSVMHead(J, K, rho=value, **FORMS[form]),
        ValueError,
        "rho (or 'gcv') must be a finite number > 0",
        "got",
    )
    head, twin, samples = twins(FORMS[form])
    refused(lambda: setattr(head, "rho", value), ValueError, "rho (or 'gcv') must be a finite number > 0", "got")
    assert head.rho == 1.0
    assert_untouched(head, twin)
    assert_goes_on(head, FORMS[form], samples, dense)


@pytest.mark.parametrize("value", [2, 0.5, np.float32(0.5), np.int64(2), torch.tensor(0.5)], ids=repr)
def test_rho_may_be_any_real_number(value: Any) -> None:
    head = LSSVMHead(J, K, rho=value)
    assert head.rho == float(value)
    head.rho = value
    assert type(head.rho) is float


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"intercept": "fixed"}, ("intercept", "'free', 'penalized', 'none'", "'fixed'")),
        ({"intercept": None}, ("intercept", "'free', 'penalized', 'none'", "None")),
        ({"multiclass": "crammer"}, ("multiclass", "'ovr', 'ovo'", "'crammer'")),
        ({"class_weight": "auto"}, ("class_weight", "'balanced', 'complement'", "'auto'")),
        ({"class_weight": torch.ones(2)}, ("class_weight", "(3,)", "(2,)")),
        ({"class_weight": [1.0, 0.0, 1.0]}, ("class_weight", "> 0", "[1.0, 0.0, 1.0]")),
        ({"class_weight": [1.0, NAN, 1.0]}, ("class_weight", "finite", "nan")),
        ({"class_weight": {0: 1.0}}, ("class_weight", "'balanced', 'complement'", "dict")),
        ({"grid": "fine"}, ("grid", "FixedPoint", "'auto' or None", "'fine'")),
        ({"target_grid": "fine"}, ("target_grid", "FixedPoint", "'auto' or None", "'fine'")),
        ({"folds": -1}, ("folds", ">= 0", "-1")),
        ({"folds": 2.0}, ("folds", "int", "2.0")),
        ({"in_features": 0}, ("in_features", ">= 1", "0")),
        ({"in_features": "3"}, ("in_features", "int", "'3'")),
        ({"num_classes": 0}, ("num_classes", ">= 1", "0")),
        ({"num_classes": True}, ("num_classes", "int", "True")),
    ],
    ids=repr,
)
def test_unknown_options(options: dict[str, Any], words: tuple[str, ...]) -> None:
    options = {"in_features": J, "num_classes": K} | options
    refused(lambda: LSSVMHead(**({"rho": 1.0} | options)), ValueError, *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit": 0.0}, ("limit", "> 0", "0.0")),
        ({"limit": NAN}, ("limit", "finite", "nan")),
        ({"limit": 1.0, "bits": 27}, ("bits", "26", "27")),
        ({"limit": 1.0, "bits": 20, "headroom": 7}, ("headroom", "26", "7")),
        ({"limit": 1.0, "bits": 1.5}, ("bits", "int", "1.5")),
        ({"limit": 1e-300}, ("1e-300", "too small")),
    ],
    ids=repr,
)
def test_grids_that_cannot_be(options: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(lambda: FixedPoint(**options), ValueError, *words)


@pytest.mark.parametrize("options", [{"class_weight": "balanced"}, {"multiclass": "ovo"}], ids=repr)
def test_sums_per_class_cannot_be_declined(options: dict[str, Any]) -> None:
    refused(
        lambda: LSSVMHead(J, K, per_class=False, **({"rho": 1.0} | options)),
        ValueError,
        "per_class=False",
        "class_weight",
        "ovo",
    )


@pytest.mark.parametrize(
    "options", [{"class_weight": "balanced"}, {"multiclass": "ovo"}, {"per_class": True}], ids=repr
)
def test_sums_per_class_need_labels(options: dict[str, Any]) -> None:
    head = LSSVMHead(J, K, **({"rho": 1.0} | options))
    refused(lambda: head.add(data().x, torch.zeros(N + 10, K)), ValueError, "labels (B,)", "float targets")
    assert head.add(*data()).n == N + 10


def test_class_weight_needs_sums_per_class(dense: Callable[..., Any]) -> None:
    head, twin, samples = twins(FORMS["grid"])
    refused(lambda: setattr(head, "class_weight", "balanced"), ValueError, "class_weight", "per_class=True")
    refused(lambda: setattr(head, "class_weight", "blanced"), ValueError, "class_weight", "'balanced', 'complement'")
    assert head.class_weight is None
    assert_untouched(head, twin)
    assert_goes_on(head, FORMS["grid"], samples, dense)


# -- merging ---------------------------------------------------------------------------------------------------------------


def made(options: dict[str, Any], rows: slice) -> LSSVMHead:
    """A head of any shape with some samples."""
    options = {"in_features": J, "num_classes": K, "grid": FixedPoint(8.0)} | options
    targets = options.pop("targets", False)
    empty = options.pop("empty", False)
    head = LSSVMHead(**({"rho": 1.0} | options))
    x, y = data("values" if targets else "labels")
    ids = list(range(len(x)))[rows] if options.get("folds") else None
    return head if empty else head.add(x[rows, : head.in_features] * options.get("rho", 1.0), y[rows], ids=ids)


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "features": ({}, {"in_features": J - 1}, ("in_features", "56", "55")),
    "classes": ({}, {"num_classes": K + 1}, ("num_classes", "3", "4")),
    "intercept": ({}, {"intercept": "none"}, ("intercept", "'free'", "'none'")),
    "multiclass": ({"per_class": True}, {"multiclass": "ovo"}, ("multiclass", "'ovr'", "'ovo'")),
    "sums per class": ({}, {"per_class": True}, ("per_class", "False", "True")),
    "folds": ({}, {"folds": 2}, ("folds", "0", "2")),
    "grids": ({}, {"grid": FixedPoint(16.0)}, ("grid", "limit=8.0", "limit=16.0")),
    "bits": ({}, {"grid": FixedPoint(8.0, bits=18)}, ("grid", "bits=20", "bits=18")),
    "automatic grids": ({"grid": "auto"}, {"grid": "auto", "rho": 8.0}, ("grid", "limit=4.0", "limit=32.0")),
    "an automatic grid": ({}, {"grid": "auto"}, ("grid", "limit=8.0", "limit=4.0")),
    "no grid": ({}, {"grid": None}, ("exact", "True", "False")),
    "labels and targets": ({}, {"targets": True}, ("labels", "values")),
    "target grids": (
        {"targets": True, "target_grid": FixedPoint(8.0)},
        {"targets": True, "target_grid": FixedPoint(32.0)},
        ("grid", "limit=8.0", "limit=32.0"),
    ),
    "a grid not used yet": ({"empty": True}, {"grid": FixedPoint(16.0)}, ("grid", "limit=8.0", "limit=16.0")),
    "two grids not used yet": (
        {"empty": True},
        {"empty": True, "grid": FixedPoint(16.0)},
        ("grid", "limit=8.0", "limit=16.0"),
    ),
    "a target grid not used yet": (
        {"empty": True, "target_grid": FixedPoint(8.0)},
        {"targets": True, "target_grid": FixedPoint(32.0)},
        ("grid", "limit=8.0", "limit=32.0"),
    ),
}
MERGES: dict[str, Callable[[Any, Any], Any]] = {
    "merge": lambda a, b: a.merge(b),
    "+=": operator.iadd,
    "-=": operator.isub,
}


@pytest.mark.parametrize("call", MERGES)
@pytest.mark.parametrize("swap", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize("difference", OTHERS)
def test_merging_heads_that_differ(difference: str, swap: bool, call: str) -> None:
    first, second, words = OTHERS[difference]
    if swap:
        first, second = second, first
    head, twin = made(first, slice(0, 40)), made(first, slice(0, 40))
    other, other_twin = made(second, slice(0, 40)), made(second, slice(0, 40))
    refused(lambda: MERGES[call](head, other), ValueError, *words)
    assert_untouched(head, twin)
    assert_untouched(other, other_twin)
    more = made(first, slice(40, 60))
    both = made(first, slice(0, 60))
    assert_untouched(head.merge(more), both)


@pytest.mark.parametrize("call", MERGES)
@pytest.mark.parametrize("other", [3, None, torch.nn.Linear(J, K), {}], ids=["int", "None", "Linear", "dict"])
def test_merging_with_something_else(call: str, other: Any) -> None:
    head, twin, _ = twins(FORMS["grid"])
    refused(lambda: MERGES[call](head, other), ValueError, "LSSVMHead", type(other).__name__)
    assert_untouched(head, twin)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", ["more of a class", "larger", "others", "from nothing"])
def test_subtracting_what_is_not_there(form: str, wrong: str, dense: Callable[..., Any]) -> None:
    head, twin, samples = twins(FORMS[form])
    x, y = samples
    other = LSSVMHead(J, K, **({"rho": 1.0} | FORMS[form]))
    if wrong == "more of a class":
        other.add(x[:40], torch.ones(40, dtype=torch.int64))
    elif wrong == "larger":
        other.add(torch.full((29, J), 4.0), torch.zeros(29, dtype=torch.int64))
    elif wrong == "others":
        other.add(x[:1] * 0 + 4.0, y[:1]).add(x[:N] / 2, y[:N]).remove(x[:1] * 0 + 4.0, y[:1])  # on the same grid
    else:
        head, twin = LSSVMHead(J, K, **({"rho": 1.0} | FORMS[form])), LSSVMHead(J, K, **({"rho": 1.0} | FORMS[form]))
        other.add(x[:3], y[:3])
    refused(lambda: operator.isub(head, other), RemovalError, "not among those held")
    assert_untouched(head, twin)
    if head.n:
        assert_goes_on(head, FORMS[form], samples, dense)


# -- classes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [-1, 1.0, True, "2", None], ids=repr)
def test_add_classes_takes_a_number(k: Any, dense: Callable[..., Any]) -> None:
    head, twin, samples = twins(FORMS["grid"])
    refused(lambda: head.add_classes(k), ValueError, "k must be an int >= 0", repr(k))
    assert head.num_classes == K
    assert_untouched(head, twin)
    assert_goes_on(head.add_classes(2), FORMS["grid"], samples, dense)


def test_add_classes_and_a_tensor_of_weights(dense: Callable[..., Any]) -> None:
    options = {"grid": FixedPoint(8.0), "class_weight": torch.tensor([1.0, 2.0, 0.5])}
    head, twin, samples = twins(options)
    refused(lambda: head.add_classes(1), ValueError, "class_weight", "None first")
    assert_untouched(head, twin)
    head.class_weight = None
    head.add_classes(1).class_weight = torch.tensor([1.0, 2.0, 0.5, 1.0])
    assert_goes_on(head, options | {"class_weight": head.class_weight}, samples, dense)


@pytest.mark.parametrize("c", [-1, K, 1.0, True, "1", None, torch.tensor(1)], ids=repr)
def test_forget_class_takes_a_class(c: Any) -> None:
    head, twin, samples = twins({"grid": FixedPoint(8.0), "per_class": True})
    refused(lambda: head.forget_class(c), ValueError, "int", "0..2", repr(c))
    assert_untouched(head, twin)
    keep = samples.y[:N] != 1
    rest = LSSVMHead(J, K, grid=FixedPoint(8.0), per_class=True, rho=1.0).add(samples.x[:N][keep], samples.y[:N][keep])
    assert head.forget_class(1).digest() == rest.digest()


def test_forget_class_needs_sums_per_class(dense: Callable[..., Any]) -> None:
    head, twin, samples = twins(FORMS["grid"])
    refused(lambda: head.forget_class(1), ValueError, "per_class=True")
    assert_untouched(head, twin)
    assert_goes_on(head, FORMS["grid"], samples, dense)


def test_no_digest_without_a_grid() -> None:
    head, twin, _ = twins(FORMS["float sums"])
    refused(lambda: head.digest(), ValueError, "no digest without a grid", "grid='auto'")
    assert_untouched(head, twin)
    assert math.isfinite(head.drift())
