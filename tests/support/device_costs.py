"""Synchronizations of the public operations on the pretended device.

    python -m tests.support.device_costs        # the table of docs/howto/cuda.md

Each operation is prepared (and run once on a twin, so that memory that is kept is there), then counted alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.pretend_cuda import Cost, PretendCuda
from torchlssvm import FixedPoint, IncrementalSVM, LSSVMHead
from torchlssvm.corrections.corrector import Corrector
from torchlssvm.events import Add, Remove
from torchlssvm.kernels import RBF

J, K, N = 64, 3, 400
"""Features, classes and samples of the heads that are counted."""
BURST = 1000
"""Events of a burst."""

Prepared = Callable[[], Any]


def samples(n: int = N, features: int = J, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of K classes on the device."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % K
    x = torch.randn(n, features, generator=generator)
    x[:, :K] += 2.0 * torch.nn.functional.one_hot(y, K)
    return x.clamp(-7, 7).cuda(), y.cuda()


def fitted(n: int = N, **options: Any) -> tuple[LSSVMHead, torch.Tensor, torch.Tensor]:
    """A head whose weights were read, and its samples."""
    x, y = samples(n)
    head = LSSVMHead(J, K, device="cuda", **({"grid": FixedPoint(8.0)} | options)).add(x, y)
    _ = head.w
    return head, x, y


def head_operation(
    run: Callable[[LSSVMHead, torch.Tensor, torch.Tensor], Any], **options: Any
) -> Callable[[], Prepared]:
    """An operation on a fitted head."""

    def prepare() -> Prepared:
        head, x, y = fitted(**options)
        return lambda: run(head, x, y)

    return prepare


def burst() -> Prepared:
    """1,000 events of one sample each, half of them removals, in one call of a Corrector."""
    x, y = samples(BURST)
    here, labels, half = x.cpu(), y.cpu(), BURST // 2
    corrector = Corrector(LSSVMHead(J, K, device="cuda", grid=FixedPoint(8.0)))
    first = range(half)
    corrector.apply([Add(ids=[str(i) for i in first], x=here[:half], y=labels[:half])])
    _ = corrector.head.w
    events: list[Any] = [Remove(ids=[str(i)], x=here[i : i + 1], y=labels[i : i + 1]) for i in first]
    events += [Add(ids=[str(i)], x=here[i : i + 1], y=labels[i : i + 1]) for i in range(half, BURST)]

    def run() -> Any:
        assert all(outcome.status == "applied" for outcome in corrector.apply(events))
        return corrector.head.w

    return run


def incremental_svm() -> Prepared:
    """148 samples of two classes that overlap; two more with wrong labels; one of the margin and one in error removed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 3, generator=generator)
    y = (x[:, 0] + 0.7 * torch.randn(150, generator=generator) > 0).long()
    x, y = x.cuda(), y.cuda()

    def run() -> Any:
        svm = IncrementalSVM(RBF(sigma=1.0), C=10.0, device="cuda")
        svm.add(x[:148], y[:148])
        svm.add(x[148:149], 1 - y[148:149])
        svm.add(x[149:150], 1 - y[149:150])
        svm.remove(svm.margin[:1])
        svm.remove(svm.error[:1])
        return svm.alpha

    return run


OPERATIONS: dict[str, Callable[[], Prepared]] = {
    "add 32 samples": head_operation(lambda h, x, y: h.add(x[:32], y[:32])),
    "add 300 samples": head_operation(lambda h, x, y: h.add(x[:300], y[:300])),
    "add 300 samples, sums per class": head_operation(lambda h, x, y: h.add(x[:300], y[:300]), per_class=True),
    "add one, read w": head_operation(lambda h, x, y: h.add(x[:1] * 0.5, y[:1]).w),
    "remove one": head_operation(lambda h, x, y: h.remove(x[:1], y[:1])),
    "remove one, read w": head_operation(lambda h, x, y: h.remove(x[:1], y[:1]).w),
    "remove 100, read w (a solve)": head_operation(lambda h, x, y: h.remove(x[:100], y[:100]).w),
    "relabel one, read w": head_operation(lambda h, x, y: h.relabel(x[:1], y[:1], (y[:1] + 1) % K).w),
    "scores of 32": head_operation(lambda h, x, y: h(x[:32])),
    "leave-one-out of 400": head_operation(lambda h, x, y: h.leave_one_out(x, y)),
    "leave-one-out of 3,000": head_operation(lambda h, x, y: h.leave_one_out(x, y), n=3000),
    "burst of 1,000 events, read w": burst,
    "IncrementalSVM: 150 samples, four updates": incremental_svm,
}


SYNCHRONIZATIONS: dict[str, int] = {
    "add 32 samples": 1,
    "add 300 samples": 1,
    "add 300 samples, sums per class": 1,
    "add one, read w": 2,
    "remove one": 2,
    "remove one, read w": 3,
    "remove 100, read w (a solve)": 3,
    "relabel one, read w": 3,
    "scores of 32": 0,
    "leave-one-out of 400": 4,
    "leave-one-out of 3,000": 4,
    "burst of 1,000 events, read w": 10,
    "IncrementalSVM: 150 samples, four updates": 50,
}
"""Times that an operation may wait for the device at most: checks once, rows to be removed once, and reading weights once."""


def measure(device: PretendCuda, name: str) -> Cost:
    """Cost of one operation."""
    OPERATIONS[name]()()
    run = OPERATIONS[name]()
    with device.counting() as cost:
        run()
    return cost


if __name__ == "__main__":
    with PretendCuda() as device:
        for name in OPERATIONS:
            print(f"| {name} | {measure(device, name).synchronizations} | {SYNCHRONIZATIONS[name]} |", flush=True)
