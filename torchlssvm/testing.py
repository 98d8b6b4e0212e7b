"""A conformance suite for machines with exact ``add`` and ``remove``.

A machine is an ``nn.Module`` with ``add(x, y)``, ``remove``, ``relabel``, ``forward`` and ``predict``. Heads remove samples by
value, ``remove(x, y)``. Kernel machines remove samples by the ids that ``add`` returned, ``remove(ids)``. A
:class:`SampleAdapter` gives both kinds the same interface. Run one check or all of them::

    case = Case(lambda **kw: LSSVMHead(8, 3, grid=FixedPoint(8.0), **kw), x, y)
    check_machine(case)

or, with pytest, parametrize over :data:`CHECKS`. Every check compares the machine with one built from the remaining samples.
The comparison uses the digest if the machine has one, otherwise the scores up to ``tolerance``.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchlssvm.errors import NotFittedError, RemovalError
from torchlssvm.sample_adapter import SampleAdapter


@dataclass
class Case:
    """A machine to check: a function ``make(device=...)`` that creates it, samples x (n, J) and labels y (n,)."""

    make: Callable[..., Any]
    x: Tensor
    y: Tensor
    tolerance: float = 1e-9

    def fresh(self, index: Tensor | None = None) -> Loaded:
        """Return a machine that has learned the samples with these indices."""
        loaded = Loaded(self, self.make())
        if index is not None:
            loaded.add(index)
        return loaded


class Loaded:
    """A machine together with its samples, so that checks can refer to samples by index."""

    def __init__(self, case: Case, machine: Any):
        self.case, self.samples = case, SampleAdapter(machine)
        self.labels = case.y.clone()
        self.held: list[int] = []

    @property
    def machine(self) -> Any:
        """The machine under test."""
        return self.samples.machine

    def _named(self, index: Tensor) -> tuple[list[int], Tensor, Tensor]:
        return index.tolist(), self.case.x[index], self.labels[index]

    def add(self, index: Tensor) -> None:
        """Add the samples with these indices."""
        self.samples.add(*self._named(index))
        self.held += index.tolist()

    def remove(self, index: Tensor) -> None:
        """Remove the samples with these indices."""
        self.samples.remove(*self._named(index))
        self.held = [i for i in self.held if i not in set(index.tolist())]

    def relabel(self, index: Tensor, labels: Tensor) -> None:
        """Change the labels of the samples with these indices."""
        names, x, y = self._named(index)
        self.samples.relabel(names, labels, x, y)
        self.labels[index] = labels

    def state(self) -> Any:
        """Return the digest, if there is one, and the scores of all samples."""
        digest = self.machine.digest() if has_digest(self.machine) else None
        return digest, (self.machine(self.case.x).clone() if self.held else None)

    def truth(self) -> Loaded:
        """Return a machine that has only ever seen the current samples of this machine."""
        other = Loaded(self.case, self.case.make())
        other.labels = self.labels.clone()
        other.add(torch.tensor(sorted(self.held), dtype=torch.int64))
        return other


def has_digest(machine: Any) -> bool:
    """Return True if the machine has a digest."""
    if not hasattr(machine, "digest"):
        return False
    try:
        machine.digest()
    except ValueError:
        return False
    return True


def assert_same(a: Loaded, b: Loaded, exact: bool = False) -> None:
    """Assert equal digests (if there are any) and equal scores, up to the tolerance or to the bit."""
    digest_a, scores_a = a.state()
    digest_b, scores_b = b.state()
    if digest_a != digest_b:
        raise AssertionError(f"digests differ: {digest_a} and {digest_b}")
    if scores_a is None or scores_b is None:
        if scores_a is not scores_b:
            raise AssertionError("one machine holds samples and the other none")
        return
    error = float((scores_a - scores_b).abs().max() / scores_b.abs().max().clamp(min=1.0))
    if not error <= (0.0 if exact else a.case.tolerance):
        raise AssertionError(f"scores differ by {error:.2e}, allowed {0.0 if exact else a.case.tolerance:.0e}")


def _every(case: Case, generator_seed: int = 0) -> Tensor:
    return torch.randperm(len(case.x), generator=torch.Generator().manual_seed(generator_seed))


def check_add_then_remove_restores(case: Case) -> None:
    """Check that adding samples and removing them again restores the earlier state."""
    order = _every(case)
    some, others = order[: len(order) // 2], order[len(order) // 2 :]
    machine, before = case.fresh(some), case.fresh(some)
    machine.add(others)
    machine.state()
    machine.remove(others)
    assert_same(machine, before)


def check_order_and_partition(case: Case) -> None:
    """Check that the same samples in another order and in other batches give the same machine."""
    whole = case.fresh(torch.arange(len(case.x)))
    for seed, size in ((1, 1), (2, 7), (3, len(case.x) // 2 + 1)):
        parts = case.fresh()
        for part in _every(case, seed).split(size):
            parts.add(part)
        assert_same(parts, whole)


def check_removal_is_never_seen(case: Case) -> None:
    """Check that after removals, in any batches and any order, the machine equals one that never saw the samples."""
    order = _every(case, 4)
    machine = case.fresh(order)
    for size, part in zip((1, 2, 5, 1, 9), order.split([1, 2, 5, 1, 9, len(order) - 18]), strict=False):
        assert len(part) == size
        machine.remove(part)
        if size != 2:  # sometimes the state is not read in between
            assert_same(machine, machine.truth())
    assert_same(machine, machine.truth())


def check_relabel(case: Case) -> None:
    """Check that relabelling equals removing with the old label and adding with the new one, and that it can be undone."""
    order = _every(case, 5)
    machine, before = case.fresh(order), case.fresh(order)
    some = order[:6]
    old, classes = case.y[some].clone(), int(case.y.max()) + 1
    machine.relabel(some, (old + 1) % classes)
    assert_same(machine, machine.truth())
    machine.relabel(some, old)
    assert_same(machine, before)


def check_everything_removed(case: Case) -> None:
    """Check that an emptied machine behaves like a new one: it refuses to predict, and can learn again."""
    order = _every(case, 6)
    machine = case.fresh(order)
    machine.remove(order[:5])
    machine.remove(order[5:])
    _expect(NotFittedError, machine.machine, case.x)
    if has_digest(machine.machine) and machine.machine.digest() != case.make().digest():
        raise AssertionError("the digest of an emptied machine is not that of a new one")
    machine.add(order[:10])
    assert_same(machine, case.fresh(order[:10]))


def check_empty_batches(case: Case) -> None:
    """Check that adding or removing an empty batch changes nothing."""
    nothing = torch.zeros(0, dtype=torch.int64)
    machine, other = case.fresh(_every(case)), case.fresh(_every(case))
    machine.add(nothing)
    machine.remove(nothing)
    assert_same(machine, other, exact=True)
    fresh = case.fresh()
    fresh.add(nothing)
    _expect(NotFittedError, fresh.machine, case.x)


def check_failed_calls_change_nothing(case: Case) -> None:
    """Check that invalid input raises an error of the documented type and leaves the state unchanged."""
    for pending in (False, True):
        machine, other = case.fresh(torch.arange(4, 20)), case.fresh(torch.arange(4, 20))
        if pending:
            for loaded in (machine, other):
                loaded.remove(torch.tensor([5]))
        _expect_refusals(case, machine.machine)
        assert_same(machine, other, exact=True)


def _expect_refusals(case: Case, machine: Any) -> None:
    x, y = case.x[:3], case.y[:3]
    broken = x.clone()
    broken[1, 0] = float("nan")
    for bad_x, bad_y in ((x[:, :-1], y), (x[0], y), (x, y[:2]), (broken, y), (x, y - y - 1), (x, y + 0.5)):
        _expect(ValueError, machine.add, bad_x, bad_y)
    _expect(ValueError, machine.predict, broken)
    if hasattr(machine, "ids"):
        _expect(RemovalError, machine.remove, torch.tensor([10**9]))
        _expect(RemovalError, machine.relabel, torch.tensor([10**9]), y[:1])
    else:
        _expect(ValueError, machine.remove, x[:, :-1], y)
        _expect(RemovalError, machine.remove, case.x, case.y)  # more than it holds


def check_inputs_are_left_alone(case: Case) -> None:
    """Check that inputs are not written to, and that writing to them later does not change the machine."""
    x, y = case.x.clone(), case.y.clone()
    machine = case.fresh(torch.arange(0))
    machine.samples.add(range(len(x)), x, y)
    machine.held = list(range(len(x)))
    if not (torch.equal(x, case.x) and torch.equal(y, case.y)):
        raise AssertionError("add wrote to its input")
    x.fill_(99.0)
    y.zero_()
    assert_same(machine, case.fresh(torch.arange(len(x))))


def check_copies_and_files(case: Case) -> None:
    """Check that pickle, deepcopy and state_dict (with weights_only) keep all bits, and that the copies can be changed."""
    order = _every(case, 7)
    machine = case.fresh(order[:-6])
    machine.remove(order[:3])
    buffer = io.BytesIO()
    torch.save(machine.machine.state_dict(), buffer)
    buffer.seek(0)
    loaded = case.make()
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for twin in (loaded, pickle.loads(pickle.dumps(machine.machine)), copy.deepcopy(machine.machine)):
        other = Loaded(case, twin)
        other.held, other.samples.ids = list(machine.held), dict(machine.samples.ids)
        assert_same(other, machine, exact=True)
        other.add(order[-6:])
        other.remove(order[3:5])
        assert_same(other, other.truth())


def check_dtype_stays(case: Case) -> None:
    """Check that ``.half()`` and similar calls do not change the machine's own precision."""
    machine, other = case.fresh(_every(case)), case.fresh(_every(case))
    nn.ModuleList([machine.machine]).half()
    assert_same(machine, other, exact=True)
    machine.machine.to(torch.bfloat16)
    assert_same(machine, other, exact=True)


def check_inference_mode(case: Case) -> None:
    """Check that changes made in inference mode can be continued outside it."""
    order = _every(case, 8)
    machine = case.fresh()
    with torch.inference_mode():
        machine.add(order[:-4])
        machine.state()
        machine.remove(order[:2])
    machine.add(order[-4:])
    machine.remove(order[2:3])
    assert_same(machine, machine.truth())


CHECKS: list[Callable[[Case], None]] = [
    check_add_then_remove_restores,
    check_order_and_partition,
    check_removal_is_never_seen,
    check_relabel,
    check_everything_removed,
    check_empty_batches,
    check_failed_calls_change_nothing,
    check_inputs_are_left_alone,
    check_copies_and_files,
    check_dtype_stays,
    check_inference_mode,
]
"""All checks, in an order that finds simple mistakes first. The case needs at least 25 samples."""


def check_machine(case: Case) -> None:
    """Run every check on one case."""
    for check in CHECKS:
        check(case)


def _expect(kind: type[Exception], call: Callable[..., Any], *args: Any) -> None:
    try:
        call(*args)
    except kind:
        return
    except Exception as error:
        raise AssertionError(f"expected {kind.__name__}, got {type(error).__name__}: {error}") from error
    raise AssertionError(f"expected {kind.__name__}, got none")
