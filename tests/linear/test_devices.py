"""Every operation keeps to the head's device.

The operations are compared with the CPU, by digest and by weights; without a GPU at hand on a device that computes on the CPU
and refuses what a GPU refuses.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchlssvm import FixedPoint, LSSVMHead, Statistics

K, FEW, BULK = 3, 4, 300
GRID = FixedPoint(8.0)

FORMS: dict[str, dict[str, Any]] = {
    "free": {"grid": GRID},
    "auto": {},
    "float sums": {"grid": None},
    "balanced": {"grid": GRID, "class_weight": "balanced"},
    "weights": {"grid": GRID, "class_weight": [1.0, 2.0, 0.5], "intercept": "penalized"},
    "folds per class": {"grid": GRID, "folds": 2, "per_class": True, "intercept": "none"},
    "ovo, balanced": {"grid": GRID, "multiclass": "ovo", "class_weight": "balanced", "intercept": "penalized"},
    "ovo, weights, float sums": {
        "grid": None,
        "multiclass": "ovo",
        "class_weight": [1.0, 2.0, 0.5],
        "intercept": "none",
    },
    "values, folds": {"grid": GRID, "targets": "regression", "folds": 2},
    "several labels": {"grid": GRID, "targets": "multilabel"},
    "several labels, balanced": {"grid": GRID, "targets": "multilabel", "class_weight": "balanced", "folds": 2},
}


class Samples:
    """Samples on a device, by row numbers, for the calls of a head."""

    def __init__(self, form: str, J: int, device: str):
        generator = torch.Generator().manual_seed(2)
        self.targets, self.folds = FORMS[form].get("targets"), FORMS[form].get("folds", 0)
        n = BULK + 2 * FEW
        self.x = (torch.randn(n, J, generator=generator) + 0.2).clamp(-4, 4).to(device)
        self.y = (torch.randn(n, K, generator=generator) if self.targets else torch.arange(n) % K).to(device)
        self.y = self.y > 0.5 if self.targets == "multilabel" else self.y
        self.new = (self.y + 1) % K if not self.targets else ~self.y if self.y.dtype == torch.bool else -self.y
        self.weight = (torch.arange(n) % 3 + 1).double().to(device)

    def __call__(self, rows: range, weight: bool = False) -> tuple[Any, Any, Any, Any]:
        part = slice(rows.start, rows.stop)
        return self.x[part], self.y[part], self.weight[part] if weight else None, rows if self.folds else None


def make(form: str, J: int, device: str) -> LSSVMHead:
    return LSSVMHead(J, K, device=device, **FORMS[form])


def filled(form: str, J: int, device: str) -> tuple[LSSVMHead, Samples]:
    """A head with many samples, whose weights were read, and a few more samples since."""
    head, samples = make(form, J, device), Samples(form, J, device)
    head.add(*samples(range(BULK)))
    _ = head.w
    return head.add(*samples(range(BULK, BULK + FEW))), samples


OLD, FRESH, MANY = range(FEW), range(BULK + FEW, BULK + 2 * FEW), range(BULK - 10)


def relabel(head: LSSVMHead, s: Samples, rows: range) -> LSSVMHead:
    x, y, _, ids = s(rows)
    return head.relabel(x, y, s.new[rows.start : rows.stop], ids=ids)


def like(head: LSSVMHead, form: str, s: Samples, rows: range) -> LSSVMHead:
    other = make(form, head.in_features, str(head.device))
    if FORMS[form].get("grid", "auto") == "auto":  # a grid is part of the data: start from the same batch
        other.add(*s(range(BULK))).remove(*s(range(rows.stop, BULK))).remove(*s(range(rows.start)))
        return other
    return other.add(*s(rows))


def reload(head: LSSVMHead, form: str) -> LSSVMHead:
    other = make(form, head.in_features, str(head.device))
    other.load_state_dict(head.state_dict())
    return other


Operation = Callable[[LSSVMHead, str, Samples], Any]
OPERATIONS: dict[str, Operation] = {
    "add one": lambda h, f, s: h.add(*s(range(FRESH.start, FRESH.start + 1))),
    "add few, weighted": lambda h, f, s: h.add(*s(FRESH, weight=True)),
    "add bulk": lambda h, f, s: h.add(*s(range(BULK))),
    "add nothing": lambda h, f, s: h.add(*s(range(0))),
    "remove few": lambda h, f, s: h.remove(*s(OLD)),
    "remove bulk": lambda h, f, s: h.remove(*s(MANY)),
    "remove pending": lambda h, f, s: h.remove(*s(range(BULK, BULK + FEW))),
    "update": lambda h, f, s: h.update(add=s(FRESH), remove=s(OLD)),
    "relabel": lambda h, f, s: relabel(h, s, OLD),
    "replace": lambda h, f, s: h.replace(*s(OLD)[:2], *s(FRESH)[:2]),
    "merge": lambda h, f, s: h.merge(like(h, f, s, OLD)),
    "+=": lambda h, f, s: operator.iadd(h, like(h, f, s, range(BULK))),
    "-=": lambda h, f, s: operator.isub(h, like(h, f, s, OLD)),
    "forget_class": lambda h, f, s: h.forget_class(1),
    "refresh": lambda h, f, s: h.refresh(),
    "rho": lambda h, f, s: setattr(h, "rho", 3.0),
    "forward, half": lambda h, f, s: h(s.x.half()),
    "buffers": lambda h, f, s: dict(h.named_buffers()),
    "state_dict": lambda h, f, s: {k: v for k, v in h.state_dict().items() if v.dtype != torch.uint8},
    "load_state_dict": lambda h, f, s: reload(h, f),
    "half": lambda h, f, s: nn.Sequential(h).half()[0],
    "statistics": lambda h, f, s: [h.statistics.M, h.statistics.V, h.statistics.T],
    "class_weight": lambda h, f, s: setattr(h, "class_weight", [3.0, 2.0, 1.0]),
    "inference mode": lambda h, f, s: torch.inference_mode()(lambda: h.add(*s(FRESH)))(),
    "add_classes": lambda h, f, s: (
        setattr(h, "class_weight", None) if isinstance(h.class_weight, Tensor) else h.add_classes(1)
    ),
}


def applies(operation: str, form: str) -> bool:
    options = FORMS[form]
    per_class = options.get("per_class") or options.get("class_weight") or options.get("multiclass") == "ovo"
    if operation in ("merge", "+=", "-=", "add_classes", "refresh", "statistics") and not options.get(
        "statistics", True
    ):
        return False
    if operation == "forget_class" and options.get("targets"):
        return False
    if operation in ("forget_class", "class_weight"):
        return bool(per_class) and options.get("statistics", True)
    return not (operation == "replace" and options.get("folds"))  # replace takes no ids


def tensors(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor that can be reached from an object."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in list(dict.values(value)):
            yield from tensors(part, seen)
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from tensors(part, seen)
    elif isinstance(value, nn.Module | Statistics) or type(value).__module__.startswith("torchlssvm"):
        yield from tensors(vars(value), seen)


def stray(value: Any) -> list[str]:
    return [f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in tensors(value) if t.device.type != "cuda"]


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Say in which operation an error happened."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def readings(head: LSSVMHead, x: Tensor) -> dict[str, Tensor]:
    out = {name: getattr(head, name) for name in ("w", "b", "C", "P", "weight", "bias", "counts")}
    return out | {"scores": head(x), "labels": head.predict(x)}


def compare(form: str, J: int, device: str) -> None:
    """Each operation on a device against the same on the CPU."""
    (start, samples), (cpu_start, reference) = filled(form, J, device), filled(form, J, "cpu")
    for operation in [o for o in OPERATIONS if applies(o, form)]:
        with named(operation):
            head, cpu = copy.deepcopy(start), copy.deepcopy(cpu_start)
            for h, s in ((head, samples), (cpu, reference)):
                result = OPERATIONS[operation](h, form, s)
                assert {t.device.type for t in tensors(result)} <= {h.device.type}
            assert {t.device.type for t in tensors(head)} == {torch.device(device).type}
            if head.statistics.exact:
                assert head.digest() == cpu.digest()
            assert head.n == cpu.n
            mine, theirs = readings(head, samples.x), readings(cpu, reference.x)
            for name, value in theirs.items():
                assert mine[name].device.type == torch.device(device).type
                if name != "labels":
                    scale = max(1.0, float(value.abs().max()))
                    torch.testing.assert_close(mine[name].cpu(), value, rtol=0, atol=1e-9 * scale)


SMALL = ["free"]


@pytest.mark.cuda
@pytest.mark.parametrize(("form", "J"), [*((form, 64) for form in FORMS), *((form, 8) for form in SMALL)])
def test_every_operation_on_a_gpu(form: str, J: int) -> None:
    """From 48 features on Theorem 1 is used."""
    compare(form, J if "ovo" not in form else 8, "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize(("form", "inside"), [*((form, False) for form in FORMS), ("free", True)])
def test_moving(form: str, inside: bool) -> None:
    """To the GPU and back, alone and as a part of a module: everything moves, and the head goes on there."""
    head, samples = filled(form, 56, "cpu")
    before = {k: v.clone() for k, v in readings(head, samples.x).items()}
    parent = nn.Sequential(nn.Identity(), head) if inside else head
    assert parent.to("cuda") is parent
    assert not stray(head)
    there = Samples(form, 56, "cuda")
    for name, value in readings(head, there.x).items():
        torch.testing.assert_close(value.cpu(), before[name], rtol=0, atol=1e-9)
    with pytest.raises(RuntimeError, match="x is on cpu"):
        head.add(*samples(FRESH))
    head.add(*there(FRESH)).remove(*there(FRESH))
    parent.cpu()
    assert {t.device.type for t in tensors(head)} == {"cpu"}
    torch.testing.assert_close(readings(head, samples.x)["w"], before["w"], rtol=0, atol=1e-9)


@pytest.mark.cuda
def test_an_empty_head_moves() -> None:
    head = make("free", 56, "cpu").cuda()
    assert not stray(head.add(*Samples("free", 56, "cuda")(range(BULK))))
