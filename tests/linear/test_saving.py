"""A head that was saved, pickled, copied or loaded is the head it was, and no sample is found in the file."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from torchlssvm import FixedPoint, LSSVMHead, NotFittedError, VerificationError
from torchlssvm.linear import checkpoint

J, K, N, MORE = 56, 3, 84, 9
GRID = FixedPoint(8.0)
WEIGHTS = torch.tensor([1.0, 2.0, 0.5])

FORMS: dict[str, dict[str, Any]] = {
    "free": {"grid": GRID, "rho": 0.7},
    "penalized": {"grid": GRID, "intercept": "penalized", "rho": 0.7},
    "none": {"intercept": "none"},
    "float sums": {"grid": None},
    "balanced": {"grid": GRID, "class_weight": "balanced"},
    "complement": {"grid": GRID, "class_weight": "complement", "intercept": "none"},
    "weights": {"grid": GRID, "class_weight": WEIGHTS, "intercept": "penalized"},
    "per class": {"per_class": True},
    "folds": {"grid": GRID, "folds": 3},
    "folds per class": {"grid": GRID, "folds": 2, "per_class": True},
    "ovo": {"grid": GRID, "multiclass": "ovo"},
    "ovo, penalized, balanced": {
        "grid": GRID,
        "multiclass": "ovo",
        "intercept": "penalized",
        "class_weight": "balanced",
    },
    "ovo, none, weights": {"grid": None, "multiclass": "ovo", "intercept": "none", "class_weight": WEIGHTS},
    "values": {"grid": GRID, "targets": "regression"},
    "several labels": {"grid": GRID, "targets": "multilabel"},
    "values, penalized": {"intercept": "penalized", "target_grid": FixedPoint(4.0), "targets": "regression"},
    "values, float sums": {"grid": None, "targets": "regression"},
}


class Data(NamedTuple):
    x: Tensor
    y: Tensor


def samples(form: str) -> Data:
    generator = torch.Generator().manual_seed(11)
    x = (torch.randn(N + MORE, J, generator=generator) + 0.4).clamp(-4, 4)
    targets = torch.randint(-512, 512, (N + MORE, K), generator=generator) / 256  # on any grid
    by_form = {"regression": targets, "multilabel": targets > 0.5, None: torch.arange(N + MORE) % K}
    return Data(x, by_form[FORMS[form].get("targets")])


def make(form: str) -> LSSVMHead:
    return LSSVMHead(J, K, **({"rho": 1.0} | FORMS[form]))


def call(head: LSSVMHead, name: str, data: Data, rows: range) -> LSSVMHead:
    """add or remove some of the samples, with ids if there are folds."""
    ids = rows if head.statistics.folds else None
    index = list(rows)
    return getattr(head, name)(data.x[index], data.y[index], ids=ids)


def head_in(state: str, form: str) -> tuple[LSSVMHead, set[int]]:
    """A head and the samples that it holds."""
    head, data = make(form), samples(form)
    if state == "empty":
        return head, set()
    call(head, "add", data, range(N))
    if state == "emptied":
        call(head, "remove", data, range(N))
        return head, set()
    if state == "unread":
        return head, set(range(N))
    _ = head.w
    if state == "read":
        return head, set(range(N))
    call(head, "remove", data, range(4, 7))
    if state == "pending":
        call(head, "add", data, range(N, N + 4))
        return head, set(range(N + 4)) - {4, 5, 6}
    assert state == "after a removal"
    return head, set(range(N)) - {4, 5, 6}


STATES = ["empty", "emptied", "unread", "read", "pending", "after a removal"]


def through_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def loaded(form: str, state: dict[str, Any]) -> LSSVMHead:
    head = make(form)
    assert not any(head.load_state_dict(state))
    return head


def nested(head: LSSVMHead, form: str) -> LSSVMHead:
    parents = [nn.Sequential(nn.Linear(J, J), nn.ModuleDict({"head": h})) for h in (head, make(form))]
    parents[1].load_state_dict(through_file(parents[0].state_dict()))
    return parents[1][1]["head"]


def over_another(head: LSSVMHead, form: str) -> LSSVMHead:
    other, data = make(form), samples(form)
    call(other, "add", data, range(30))
    _ = other.P
    call(other, "remove", data, range(3))
    other.rho = 9.0
    other.load_state_dict(head.state_dict())
    return other


COPIES: dict[str, Callable[[LSSVMHead, str], LSSVMHead]] = {
    "state_dict": lambda head, form: loaded(form, head.state_dict()),
    "file": lambda head, form: loaded(form, through_file(head.state_dict())),
    "over another": over_another,
    "inside a module": nested,
    "pickle": lambda head, form: pickle.loads(pickle.dumps(head)),
    "pickle, protocol 2": lambda head, form: pickle.loads(pickle.dumps(head, protocol=2)),
    "deepcopy": lambda head, form: copy.deepcopy(head),
}


def assert_bits(a: LSSVMHead, b: LSSVMHead, x: Tensor) -> None:
    """Equal to the bit, in all that can be read."""
    if a.statistics.exact:
        assert a.digest() == b.digest()
    assert a.n == b.n
    assert torch.equal(a.counts, b.counts)
    assert (a.rho, a.intercept, a.multiclass, a.grid, a.num_classes) == (
        b.rho,
        b.intercept,
        b.multiclass,
        b.grid,
        b.num_classes,
    )
    assert type(a.class_weight) is type(b.class_weight)
    if isinstance(a.class_weight, Tensor):
        assert torch.equal(a.class_weight, b.class_weight)
    else:
        assert a.class_weight == b.class_weight
    for name in ("w", "b", "C", "P", "weight", "bias"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    if a.n:
        assert torch.equal(a(x), b(x))


def truth(head: LSSVMHead, form: str, data: Data, held: set[int], dense: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    index = sorted(held)
    x = data.x[index].double() if head.grid is None else head.grid.snap(data.x[index])
    options = {k: v for k, v in FORMS[form].items() if k in ("intercept", "class_weight", "multiclass")}
    y = 2.0 * data.y[index] - 1.0 if data.y.dtype == torch.bool else data.y[index]
    return dense(x, y, K, rho=head.rho, **options)


def assert_close(head: Any, answer: tuple[Tensor, Tensor], note: str = "") -> None:
    w, b = answer
    torch.testing.assert_close(head.w, w, rtol=0, atol=1e-9 * float(w.abs().max()), msg=lambda m: f"{note}: {m}")
    torch.testing.assert_close(head.b, b, rtol=0, atol=1e-9, msg=lambda m: f"{note}: {m}")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("form", FORMS)
def test_a_copy_is_the_head_and_goes_on(form: str, state: str, dense: Callable[..., Any]) -> None:
    data = samples(form)
    answers: dict[float | None, tuple[Tensor, Tensor]] = {}
    for way, copied in COPIES.items():
        head, held = head_in(state, form)
        other = copied(head, form)
        assert_bits(other, head, data.x)
        if held:
            call(other, "add", data, range(N + 4, N + MORE))
            call(other, "remove", data, range(10, 13))
            others = (held | set(range(N + 4, N + MORE))) - {10, 11, 12}
        else:
            with pytest.raises(NotFittedError):
                other(data.x)
            call(other, "add", data, range(30))
            others = set(range(30))
        for rho in (head.rho, 1.5):
            other.rho = rho  # options are the copy's own
            if rho not in answers:
                answers[rho] = truth(other, form, data, others, dense)
            assert_close(other, answers[rho], way)
        assert head.rho != 1.5
        assert head.n == len(held)
        if held:
            if None not in answers:
                answers[None] = truth(head, form, data, held, dense)
            assert_close(head, answers[None], way)


@pytest.mark.parametrize("form", FORMS)
def test_a_state_dict_is_a_snapshot(form: str) -> None:
    """What is saved does not follow the head, and the head does not follow what was saved."""
    data = samples(form)
    head, _ = head_in("pending", form)
    state = head.state_dict()
    expected, twin = {name: getattr(head, name).clone() for name in "wbCP"}, loaded(form, state)
    call(head, "add", data, range(N + 4, N + MORE))
    _ = dict(head.named_buffers())
    assert_bits(loaded(form, state), twin, data.x)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    again = loaded(form, state)
    for value in state.values():
        value.zero_()
    assert_bits(again, twin, data.x)


@pytest.mark.parametrize("form", FORMS)
def test_only_plain_tensors_are_saved(form: str) -> None:
    state = head_in("pending", form)[0].state_dict()
    assert all(type(v) is Tensor and v.device.type == "cpu" for v in state.values())
    for name, value in state.items():  # torch.save writes a view's whole storage
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), name


# -- w, b, C and P are up to date, wherever somebody looks -----------------------------------------------------------------

LOOKS: dict[str, Callable[[LSSVMHead, nn.Module], dict[str, Tensor]]] = {
    "state_dict": lambda head, parent: {k: v for k, v in head.state_dict().items() if k in "wbCP"},
    "parent.state_dict": lambda head, parent: {
        k[2:]: v for k, v in parent.state_dict().items() if k[2:] in ("w", "b", "C", "P")
    },
    "named_buffers": lambda head, parent: dict(head.named_buffers()),
    "parent.named_buffers": lambda head, parent: {k[2:]: v for k, v in parent.named_buffers()},
    "buffers": lambda head, parent: dict(zip("wbC", head.buffers(), strict=True)),
    "parent.buffers": lambda head, parent: dict(zip("wbC", parent.buffers(), strict=True)),
    "get_buffer": lambda head, parent: {k: parent.get_buffer(f"1.{k}") for k in "wbC"},
    "attributes": lambda head, parent: {k: getattr(head, k) for k in "wbCP"},
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("form", ["free", "penalized", "balanced", "ovo", "values"])
def test_buffers_are_up_to_date(form: str, look: str, dense: Callable[..., Any]) -> None:
    data, head = samples(form), make(form)
    parent = nn.Sequential(nn.Identity(), head)
    held: set[int] = set()
    steps: list[tuple[str, range]] = [
        ("add", range(N)),
        ("add", range(N, N + 2)),
        ("remove", range(3)),
        ("remove", range(3, 60)),
    ]
    before = LOOKS[look](head, parent)
    assert not before["w"].any()
    for name, rows in steps:
        call(head, name, data, rows)
        held = held | set(rows) if name == "add" else held - set(rows)
        seen = LOOKS[look](head, parent)
        assert {"w", "b", "C"} <= set(seen)
        w, b = truth(head, form, data, held, dense)
        torch.testing.assert_close(seen["w"], w, rtol=0, atol=1e-9 * float(w.abs().max()))
        torch.testing.assert_close(seen["b"], b, rtol=0, atol=1e-9)
        assert torch.equal(seen["C"], torch.eye(head.P.shape[-1], dtype=torch.float64) - head.P)
        # C belongs to the same samples as w: (I - C) A = rho I, on the centred features
        if form == "free":
            x = data.x[sorted(held)].double() if head.grid is None else head.grid.snap(data.x[sorted(held)])
            one = torch.eye(J, dtype=torch.float64)
            A = (x - x.mean(0)).mT @ (x - x.mean(0)) + head.rho * one
            torch.testing.assert_close((one - seen["C"]) @ A, head.rho * one, rtol=0, atol=1e-9)


# -- no sample is in the file ----------------------------------------------------------------------------------------------


def traces(row: Tensor, head: LSSVMHead) -> Iterator[bytes]:
    """Three neighbouring features of a sample, in every way in which the library could hold them."""
    grid = head.grid or GRID
    steps = grid.quantize(row[None])[0]
    root = head.rho**0.5
    for values in (
        row.double(),
        row.float(),
        steps,
        steps.long(),
        steps.int(),
        grid.snap(row[None])[0],
        row.double() / root,
    ):
        yield from (values[i : i + 3].contiguous().numpy().tobytes() for i in (0, 17, J - 3))
    yield (grid.snap(row[None])[0] * (1 / root))[5:8].numpy().tobytes()
    yield (steps * (grid.resolution / root))[5:8].numpy().tobytes()


def found(row: Tensor, head: LSSVMHead, content: bytes) -> bool:
    return any(trace in content for trace in traces(row, head))


WRITES: dict[str, Callable[[LSSVMHead], bytes]] = {
    "state_dict": lambda head: saved_bytes(head.state_dict()),
    "module": lambda head: saved_bytes(nn.Sequential(nn.Identity(), head)),
    "pickle": lambda head: pickle.dumps(head),
    "deepcopy": lambda head: saved_bytes(everything(copy.deepcopy(head))),
}


def saved_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def everything(value: Any, seen: set[int] | None = None) -> list[Tensor]:
    """Every tensor that can be reached from an object, with its whole storage."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        whole = torch.empty(0, dtype=value.dtype)
        return [whole.set_(value.untyped_storage())] if value.device.type == "cpu" else []
    inside = (
        list(value.values())
        if isinstance(value, dict)
        else list(value)
        if isinstance(value, list | tuple | set)
        else []
    )
    return [t for part in [*inside, *vars(value).values()] for t in everything(part, seen)] if hasattr(value, "__dict__") else [
        t for part in inside for t in everything(part, seen)
    ]  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("few", [False, True], ids=["", "few"])
@pytest.mark.parametrize(
    "form", [f for f in FORMS if not FORMS[f].get("targets") and f not in ("complement", "balanced")]
)
def test_no_sample_is_written_out(form: str, few: bool, write: str) -> None:
    """Neither those that wait to be taken in, nor those removed, nor any other."""
    if few and "folds" in form:
        pytest.skip("the sums of a fold with one sample are that sample")
    data, head = samples(form), make(form)
    size = 9 if few else N  # few: at least three of each class, so that no sum is a sample
    call(head, "add", data, range(size))
    if not few:
        _ = head.w
    call(head, "add", data, range(size, size + 6))
    call(head, "remove", data, range(size, size + 3))
    rows = [0, *range(size - 2, size + 6)]
    content = WRITES[write](head)
    assert not [i for i in rows if found(data.x[i], head, content)]
    assert found(data.x[0], head, pickle.dumps(data.x))  # the search finds what is there


# -- what does not load ----------------------------------------------------------------------------------------------------


def edited(state: dict[str, Tensor], name: str, value: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {k: value(v.clone()) if k == name else v for k, v in state.items()}


def without(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {k: v for k, v in state.items() if k != name}


def bump(index: int) -> Callable[[Tensor], Tensor]:
    def change(value: Tensor) -> Tensor:
        value = value.contiguous()
        value.view(-1)[index] += 1
        return value

    return change


def rewritten(**changes: Any) -> Callable[[Tensor], Tensor]:
    def change(value: Tensor) -> Tensor:
        meta = json.loads(bytes(value.numpy()).decode()) | changes
        return torch.frombuffer(bytearray(json.dumps(meta, sort_keys=True).encode()), dtype=torch.uint8)

    return change


def noise(value: Tensor) -> Tensor:
    return torch.randint(0, 256, value.shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)


DAMAGED = (VerificationError, RuntimeError)
DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], tuple[str, ...]]] = {
    "one count is another": (lambda s: edited(s, "statistics.counts", bump(0)), ("damaged",)),
    "one sum is another": (lambda s: edited(s, "statistics.sums", bump(7)), ("damaged",)),
    "no sums": (lambda s: without(s, "statistics.sums"), ("damaged",)),
    "P of another shape": (lambda s: edited(s, "P", lambda v: v[..., :-1]), ("damaged",)),
    "one weight is another": (lambda s: edited(s, "solution.w", bump(0)), ("damaged",)),
    "a weight is NaN": (lambda s: edited(s, "solution.w", lambda v: v.fill_(float("nan"))), ("damaged",)),
    "no P": (lambda s: without(s, "P"), ("Missing key", '"P"')),
    "no options": (lambda s: without(s, "options"), ("Missing key", '"options"')),
    "no weights": (lambda s: without(s, "solution.w"), ("Missing key", '"solution.w"')),
    "no statistics": (lambda s: without(s, "statistics.meta"), ("Missing key", '"statistics.meta"')),
    "another rho": (lambda s: edited(s, "options", rewritten(rho=0.8)), ("damaged",)),
    "options are noise": (lambda s: edited(s, "options", noise), ("LSSVMHead",)),
    "options of another format": (
        lambda s: edited(s, "options", rewritten(format="torchlssvm-head-0")),
        ("format 2", "torchlssvm-head-0"),
    ),
    "statistics of another grid": (lambda s: edited(s, "statistics.meta", rewritten(bits=18)), ("damaged",)),
    "a linear layer's": (lambda s: dict(nn.Linear(J, K).state_dict()), ("Missing key", "Unexpected key", '"weight"')),
    "nothing": (lambda s: {}, ("Missing key", '"options"')),
}


def untouched_by(head: LSSVMHead, form: str, attempt: Callable[[], Any]) -> None:
    """The head is as it was, to the bit, and goes on."""
    data = samples(form)
    twin = copy.deepcopy(head)
    attempt()
    assert_bits(head, twin, data.x)
    for h in (head, twin):
        call(h, "add", data, range(N + 4, N + MORE))
    assert_bits(head, twin, data.x)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("form", ["free", "ovo", "per class"])
def test_damaged_states_are_refused(form: str, damage: str) -> None:
    spoil, words = DAMAGE[damage]
    state = spoil(head_in("pending", form)[0].state_dict())
    head = head_in("read", form)[0]

    def attempt() -> None:
        with pytest.raises(DAMAGED) as caught:
            head.load_state_dict(state)
        message = str(caught.value)
        missing = [word for word in words if not any(w in message for w in word.split("|"))]
        assert not missing, f"{missing} not in: {message}"

    untouched_by(head, form, attempt)


@pytest.mark.parametrize(
    "options",
    [
        {"rho": float("nan")}, {"rho": 0.0}, {"rho": -5.0}, {"rho": "x"}, {"rule": "evil"}, {"class_weight": "evil"},
        {"class_weight": [1.0, 2.0]}, {"class_weight": "balanced"}, {"made": [1]}, {"made": {"rho": {}}},
    ],
    ids=repr,
)  # fmt: skip
def test_options_that_no_head_has_are_refused_under_a_right_checksum(options: dict[str, Any]) -> None:
    state = head_in("read", "free")[0].state_dict()
    meta = json.loads(bytes(state["options"].numpy())) | options
    del meta["checksum"]
    tensors = {k: v for k, v in state.items() if k not in "wbC"} | {"options": checkpoint.pack(meta)}
    state["options"] = checkpoint.pack(meta | {"checksum": checkpoint.checksum(tensors)})
    head = head_in("read", "free")[0]

    def attempt() -> None:
        with pytest.raises(RuntimeError, match="LSSVMHead"):
            head.load_state_dict(state)

    untouched_by(head, "free", attempt)


@pytest.mark.parametrize(
    ("saved", "here", "words"),
    [
        ("free", "penalized", ("intercept", "'free'", "'penalized'")),
        ("none", "free", ("intercept", "'none'", "'free'")),
        ("per class", "ovo", ("multiclass", "'ovr'", "'ovo'")),
        ("free", "per class", ("per_class", "False", "True")),
        ("free", "folds", ("folds", "0", "3")),
        ("float sums", "free", ("exact", "False", "True")),
        ("free", "float sums", ("exact", "True", "False")),
    ],
)
def test_states_of_other_heads_are_refused(saved: str, here: str, words: tuple[str, ...]) -> None:
    state, head = head_in("read", saved)[0].state_dict(), head_in("read", here)[0]

    def attempt() -> None:
        with pytest.raises(RuntimeError) as caught:
            head.load_state_dict(state)
        assert not [w for w in words if w not in str(caught.value)], caught.value

    untouched_by(head, here, attempt)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"in_features": J + 1}, ("(57",)),
        ({"num_classes": K + 1}, ("(56, 4)",)),
        ({"grid": FixedPoint(16.0)}, ("grid", "limit=8.0", "limit=16.0")),
    ],
    ids=["features", "classes", "grid"],
)
def test_states_of_other_shapes_are_refused(options: dict[str, Any], words: tuple[str, ...]) -> None:
    data = samples("free")
    kind = {"in_features": J, "num_classes": K, "grid": GRID}
    state = LSSVMHead(**kind).add(*data).state_dict()
    head = LSSVMHead(**(kind | options))
    x = torch.zeros(4, head.in_features)
    head.add(x + torch.eye(4, head.in_features), [0, 1, 2, 0])
    before = head(x).clone(), head.P.clone()
    with pytest.raises(RuntimeError) as caught:
        head.load_state_dict(state)
    assert not [w for w in words if w not in str(caught.value)], caught.value
    assert torch.equal(head(x), before[0])
    assert torch.equal(head.P, before[1])
    assert head.n == 4


@pytest.mark.parametrize("form", ["free", "ovo"])
def test_not_strict(form: str) -> None:
    """Keys too many are passed over; with a key too few nothing is loaded, and the report says so."""
    data = samples(form)
    source, _ = head_in("pending", form)
    head, _ = head_in("read", form)
    untouched_by(head, form, lambda: assert_missing(head, without(source.state_dict(), "P"), "P"))
    untouched_by(head, form, lambda: assert_missing(head, dict(nn.Linear(J, K).state_dict()), "w"))
    surplus = source.state_dict() | {"surplus": torch.zeros(1)}
    assert not head.load_state_dict(surplus, strict=False).missing_keys
    with pytest.raises(RuntimeError, match=r"Unexpected key.*surplus"):
        head.load_state_dict(surplus)
    assert_bits(head, source, data.x)


def assert_missing(head: LSSVMHead, state: dict[str, Tensor], name: str) -> None:
    assert name in head.load_state_dict(state, strict=False).missing_keys
