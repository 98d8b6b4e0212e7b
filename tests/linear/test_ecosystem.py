"""State that survives what PyTorch does to modules: overwritten buffers, autocast, inference mode, gradients, odd inputs."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchlssvm import FixedPoint, LSSVMHead

GRID = FixedPoint(8.0)


J, K, N, MORE = 56, 3, 80, 8

FORMS: dict[str, dict[str, Any]] = {
    "free": {"grid": GRID},
    "auto, penalized": {"intercept": "penalized"},
    "float sums": {"grid": None, "intercept": "none"},
    "balanced": {"grid": GRID, "class_weight": "balanced"},
    "ovo": {"grid": GRID, "multiclass": "ovo"},
}


def numbers() -> tuple[Tensor, Tensor]:
    """Multiples of 1/16 below 8, so that they are the same numbers in every floating type."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(-60, 64, (N + MORE, J), generator=generator) / 16
    x[0, 0] = 4.0
    return x, torch.arange(N + MORE) % K


def make(form: str) -> LSSVMHead:
    return LSSVMHead(J, K, **({"rho": 1.0} | FORMS[form]))


def learn(form: str) -> LSSVMHead:
    """A head with N samples: many at once, its weights read, then a few that wait."""
    x, y = numbers()
    head = make(form).add(x[: N - 3], y[: N - 3])
    _ = head.w
    return head.add(x[N - 3 : N], y[N - 3 : N])


def bits(head: LSSVMHead) -> dict[str, Any]:
    """Digest, weights and P."""
    exact = head.statistics.exact
    return {"digest": head.digest() if exact else None} | {
        name: getattr(head, name).clone() for name in ("w", "b", "P", "counts")
    }


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["digest"] == b["digest"]
    for name in ("w", "b", "P", "counts"):
        assert torch.equal(a[name], b[name]), name


def assert_true(head: LSSVMHead, form: str, held: list[int], dense: Callable[..., Any]) -> None:
    x, y = numbers()
    w, b = dense(
        x[held],
        y[held],
        K,
        **{k: v for k, v in FORMS[form].items() if k in ("intercept", "class_weight", "multiclass")},
    )
    torch.testing.assert_close(head.w, w, rtol=0, atol=1e-9 * float(w.abs().max()))
    torch.testing.assert_close(head.b, b, rtol=0, atol=1e-9)


def test_overwritten_buffers_change_nothing() -> None:
    """What DDP does, in one process: buffers are copies, and are published again."""
    head, (x, y) = learn("free"), numbers()
    w, scores = head.w.clone(), head(x).clone()
    for buffer in head.buffers():
        buffer.fill_(7.0)
    assert torch.equal(head(x), scores)
    assert torch.equal(head.w, w)
    head.w.data.fill_(7.0)  # past the version that torch counts
    assert torch.equal(head.w, w)
    head.register_buffer("w", torch.full_like(w, 7.0))
    assert torch.equal(head.w, w)
    reference = head.w
    head.remove(x[:4], y[:4])
    assert head.w is reference  # written in place: references held elsewhere stay valid


# -- modes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_weights_computed_in_inference_mode_can_be_differentiated_through(form: str) -> None:
    head, (x, _) = learn(form), numbers()
    with torch.inference_mode():
        head(x)
    x = x.clone().requires_grad_()
    head(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_bit_of_any_form(form: str, dtype: torch.dtype) -> None:
    x, y = numbers()
    plain = learn(form).add(x[N:], y[N:]).remove(x[:2], y[:2])
    with torch.autocast("cpu", dtype=dtype):
        head = learn(form).add(x[N:], y[N:]).remove(x[:2], y[:2])
        scores = head(x)
        inside = bits(head)
    assert scores.dtype == torch.float64
    assert torch.equal(scores, plain(x))
    assert_same(inside, bits(plain))
    assert_same(bits(head), bits(plain))


@pytest.fixture
def default_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def no_uninitialized_memory() -> Iterator[None]:
    """torch.empty gives NaN, and what has no deterministic implementation raises."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def whole_life(form: str) -> dict[str, Any]:
    x, y = (t.float() if t.is_floating_point() else t for t in numbers())
    head = learn(form)
    head.add(x[N:], y[N:]).remove(x[:2], y[:2]).relabel(x[2:4], y[2:4], y[3:5])
    head.update(add=(x[:1], y[:1]), remove=(x[5:7], y[5:7]))
    for start in range(10, 40, 10):
        _ = head.w
        head.remove(x[start : start + 10], y[start : start + 10])
    return bits(head)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("setting", ["default_float64", "no_uninitialized_memory"])
def test_global_settings_change_no_bit(form: str, setting: str, request: pytest.FixtureRequest) -> None:
    before = whole_life(form)
    request.getfixturevalue(setting)
    assert_same(whole_life(form), before)


class Through(nn.Module):
    """A layer that learns by gradient, and a head that does not."""

    def __init__(self, head: LSSVMHead):
        super().__init__()
        self.layer = nn.Linear(J, J)
        nn.init.eye_(self.layer.weight)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x))


# -- autograd and torch.func -----------------------------------------------------------------------------------------------

DIFFERENTIABLE = [form for form in FORMS if form != "ovo"]


@pytest.mark.parametrize("form", DIFFERENTIABLE)
def test_gradients_flow_through_the_head(form: str) -> None:
    head, (x, _) = learn(form), numbers()
    one = x[:4].double().requires_grad_()
    assert torch.autograd.gradcheck(head, one)
    weight = torch.randn(4, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (grad,) = torch.autograd.grad((head(one) * weight).sum(), one)
    torch.testing.assert_close(grad, weight @ head.weight)
    single = x[:4].clone().requires_grad_()
    head(single).sum().backward()
    assert single.grad.dtype == torch.float32


def test_votes_are_differentiable_in_their_margins() -> None:
    head, (x, _) = learn("ovo"), numbers()
    one = x[N:].double().requires_grad_()
    assert torch.autograd.gradcheck(head, one)


CAPTURED = "sums are brought up to date in place, which a torch.func transform refuses for a tensor from outside it"


@pytest.mark.parametrize(
    ("form", "read"),
    [(form, True) for form in DIFFERENTIABLE]
    + [
        pytest.param(
            form, False, marks=[pytest.mark.xfail(raises=RuntimeError, reason=CAPTURED)] if form == "balanced" else []
        )
        for form in DIFFERENTIABLE
    ],
)
def test_torch_func(form: str, read: bool) -> None:
    """Also when the weights are brought up to date inside the transform."""
    x = numbers()[0].double()

    def score() -> Callable[[Tensor], Tensor]:
        """Of one sample, by a head that nobody has looked at yet."""
        head = learn(form)
        if read:
            _ = head.w
        return lambda v: head(v[None])[0]

    expected = learn(form).weight
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(jacobian(score())(x[0]), expected, rtol=0, atol=1e-12)
    one = score()
    grads = torch.func.vmap(torch.func.grad(lambda v: one(v)[1]))(x[:5])
    torch.testing.assert_close(grads, expected[1].expand(5, J), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.func.vmap(score())(x), learn(form)(x), rtol=0, atol=1e-10)


def test_functional_call() -> None:
    """A module with a head can be called with other parameters; the head stays what it is."""
    model, (x, _) = Through(learn("free")), numbers()
    doubled = {name: 2 * p for name, p in model.named_parameters()}
    assert torch.equal(torch.func.functional_call(model, doubled, (x,)), model.head(2 * model.layer(x)))


@pytest.mark.parametrize("form", FORMS)
def test_a_head_is_the_last_layer_of_a_sequential(form: str) -> None:
    x, y = numbers()
    layer = nn.Linear(J, J)
    nn.init.eye_(layer.weight)
    model = nn.Sequential(layer, nn.Flatten(), make(form))
    assert not list(model[-1].parameters())
    with torch.no_grad():
        features = layer(x)
    model[-1].add(features, y)
    scores = model(x)
    assert scores.shape == (len(x), K)
    head = model[-1]
    if form != "ovo":
        same = nn.functional.linear(features.double(), head.weight, head.bias)
        torch.testing.assert_close(scores.detach(), same, rtol=0, atol=1e-12)
    nn.functional.cross_entropy(scores, y).backward()
    assert layer.weight.grad.abs().sum() > 0
    assert torch.equal(dict(model.named_buffers())["2.w"], head.w)
    before = bits(head)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.train()
    model.eval()
    assert_same(bits(head), before)
    assert not torch.equal(model(x), scores)  # the features moved, the head did not
    assert "LSSVMHead(in_features=56" in repr(model)


@pytest.mark.parametrize("form", FORMS)
def test_inputs_that_require_grad_are_taken_as_numbers(form: str) -> None:
    x, y = numbers()
    head, plain = make(form), make(form)
    layer = nn.Linear(J, J)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    graph = layer(x)  # equal to x, with a history
    assert graph.requires_grad
    weight = torch.ones(N, requires_grad=True)
    for h, a, m in ((head, graph, weight), (plain, x, weight.detach())):
        h.add(a[:N], y[:N], weight=m)
        _ = h.w
        h.add(a[N:], y[N:]).remove(a[:3], y[:3]).relabel(a[3:5], y[3:5], y[4:6]).update(
            add=(a[:1], y[:1]), remove=(a[8:9], y[8:9])
        )
    assert_same(bits(head), bits(plain))
    assert not any(t.requires_grad for t in (head.w, head.b, head.C, head.P))
    assert layer.weight.grad is None
    assert weight.grad is None


# -- inputs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_inputs_are_neither_written_to_nor_kept(form: str, dtype: torch.dtype) -> None:
    """Also those that wait to be taken in: what is done to a tensor after the call does not reach the head."""
    x, y = numbers()
    x = x.to(dtype)
    calls = [
        ("add", x[: N - 3], y[: N - 3]), ("add", x[N - 3 : N + 1], y[N - 3 : N + 1], torch.ones(4, dtype=torch.float64)),
        ("remove", x[:2], y[:2]), ("relabel", x[2:4], y[2:4], y[3:5]),
        ("replace", x[5:6], y[5:6], x[N + 2 : N + 3], y[N + 2 : N + 3]), ("__call__", x),
    ]  # fmt: skip
    heads = []
    for spoil in (False, True):
        head = make(form)
        for k, (verb, *tensors) in enumerate(calls):
            given = [t.clone() for t in tensors]
            getattr(head, verb)(*given)
            assert all(torch.equal(a, b) for a, b in zip(given, tensors, strict=True))  # not written to
            for t in given if spoil else []:
                t.fill_(1)
            _ = head.w if k == 0 else None
        heads.append(bits(head))
    assert_same(*heads)


def test_targets_are_neither_written_to_nor_kept() -> None:
    x = numbers()[0].double()
    y = x[:, :K].clone() / 2
    for options in ({"grid": GRID}, {"grid": None}):
        heads = []
        for spoil in (False, True):
            head = LSSVMHead(J, K, **({"rho": 1.0} | options)).add(x[:N], y[:N])
            _ = head.w
            more, targets = x[N:].clone(), y[N:].clone()
            head.add(more, targets)
            assert torch.equal(targets, y[N:])
            if spoil:
                more.zero_()
                targets.zero_()
            heads.append(bits(head))
        assert_same(*heads)


INTEGER = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", INTEGER)
@pytest.mark.parametrize("form", FORMS)
def test_features_may_be_integers(form: str, dtype: torch.dtype) -> None:
    x = torch.randint(0, 2 if dtype == torch.bool else 8, (N, J), generator=torch.Generator().manual_seed(0))
    y = numbers()[1][:N]
    head, plain = make(form).add(x.to(dtype), y), make(form).add(x.double(), y)
    head.remove(x.to(dtype)[:4], y[:4])
    plain.remove(x.double()[:4], y[:4])
    assert_same(bits(head), bits(plain))
    assert torch.equal(head(x.to(dtype)), plain(x.double()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_labels_may_be_any_integers(dtype: torch.dtype) -> None:
    x, y = numbers()
    assert make("free").add(x, y.to(dtype)).digest() == make("free").add(x, y).digest()


def test_two_classes_may_be_truth_values() -> None:
    x, y = numbers()
    heads = [LSSVMHead(J, 2, grid=GRID, rho=1.0).add(x, labels) for labels in (y > 0, (y > 0).long())]
    assert heads[0].digest() == heads[1].digest()


def test_an_expanded_sample_counts_as_often_as_it_is_there() -> None:
    x, y = numbers()
    expanded = make("free").add(x[:1].expand(5, J), y[:1].expand(5))
    assert expanded.digest() == make("free").add(x[:1], y[:1], weight=[5]).digest()


SAME: dict[str, Callable[[Tensor], Any]] = {
    "half": lambda t: t.half() if t.is_floating_point() else t,
    "bfloat16": lambda t: t.bfloat16() if t.is_floating_point() else t,
    "double": lambda t: t.double() if t.is_floating_point() else t.short(),
    "transposed": lambda t: t.mT.contiguous().mT if t.ndim == 2 else t,
    "every other row": lambda t: t.repeat_interleave(2, 0)[::2],
    "part of a wider one": lambda t: nn.functional.pad(t, (3, 4))[..., 3:-4],
    "numpy": lambda t: t.numpy(),
    "numpy, column-major": lambda t: np.asfortranarray(t.numpy().astype(np.float64 if t.ndim == 2 else np.int16)),
    "numpy, read-only and reversed": lambda t: read_only(t.numpy()[::-1].copy())[::-1],
    "list": lambda t: t.tolist(),
    "tuple": lambda t: tuple(map(tuple, t.tolist())) if t.ndim == 2 else tuple(t.tolist()),
    "list of arrays": lambda t: list(t.numpy()),
}


def read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


@pytest.mark.parametrize("kind", SAME)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy.ndarrays:UserWarning")
def test_the_same_numbers_in_any_form(form: str, kind: str, recwarn: pytest.WarningsRecorder) -> None:
    """Floating types, layouts in memory, arrays and lists."""
    x, y = numbers()
    give = SAME[kind]
    head, plain = make(form), make(form)
    for h, f in ((head, give), (plain, lambda t: t)):
        h.add(f(x[:N]), f(y[:N]))
        _ = h.w
        h.add(f(x[N:]), f(y[N:]), weight=f(torch.ones(MORE))).remove(f(x[:4]), f(y[:4]))
        h.relabel(f(x[5:6]), f(y[5:6]), f(y[6:7])).update(add=(f(x[:1]), f(y[:1])), remove=(f(x[7:8]), f(y[7:8])))
    assert_same(bits(head), bits(plain))
    torch.testing.assert_close(head(give(x)), plain(x), rtol=0, atol=1e-10)
    assert torch.equal(head.predict(give(x)), plain.predict(x))
    assert not [w for w in recwarn if "writable" in str(w.message)]


def test_python_numbers_keep_all_their_digits() -> None:
    """A list is float64, as numpy's would be: what came as one can be removed as the other."""
    x = [[0.1, 1 / 3], [2 / 3, 0.7]]
    for options in ({"grid": None}, {"grid": FixedPoint(1.0, bits=26)}):
        head = LSSVMHead(2, 2, **({"rho": 1.0} | options)).add(x, [0, 1], weight=[3, 2])
        other = LSSVMHead(2, 2, **({"rho": 1.0} | options)).add(np.array(x), np.array([0, 1]), weight=np.array([3, 2]))
        assert torch.equal(head.w, other.w)
        assert head.remove(np.array(x), [0, 1], weight=[3, 2]).n == 0


# -- merging, as operators -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["free", "float sums", "balanced", "ovo"])
def test_operators(form: str, dense: Callable[..., Any]) -> None:
    x, y = numbers()
    head, other = make(form).add(x[:50], y[:50]), make(form).add(x[50:N], y[50:N])
    copied = copy.deepcopy(other)
    assert operator.iadd(head, other) is head
    assert_true(head, form, list(range(N)), dense)
    assert_same(bits(other), bits(copied))
    other.add(x[N:], y[N:])  # nothing is shared
    assert_true(head, form, list(range(N)), dense)
    assert operator.isub(head, copied) is head
    assert_true(head, form, list(range(50)), dense)
    head += head
    assert head.n == 100
    head -= make(form).add(x[:50], y[:50])
    assert_true(head, form, list(range(50)), dense)
