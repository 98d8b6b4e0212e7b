"""Events on a kernel machine as the head of a store: the same rules, without a digest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchlssvm import IncrementalSVM, KernelLSSVM, LagrangianSVM, OneVsRest, RemovalError, VerificationError, verify
from torchlssvm.errors import StoreError
from torchlssvm.events import Add, Relabel, Remove, Replace
from torchlssvm.kernels import RBF, Linear
from torchlssvm.store import SampleStore

J, N = 5, 40

MACHINES: dict[str, tuple[int, Callable[[], Any]]] = {
    "KernelLSSVM": (3, lambda: KernelLSSVM(RBF(sigma=2.0), C=2.0, num_classes=3)),
    "linear, primal": (3, lambda: KernelLSSVM(Linear(), C=2.0, num_classes=3)),
    "LagrangianSVM": (2, lambda: LagrangianSVM(RBF(sigma=2.0), C=2.0, tol=1e-10)),
    "OneVsRest": (3, lambda: OneVsRest(lambda: LagrangianSVM(RBF(sigma=2.0), C=2.0, tol=1e-10), 3)),
}


def data(K: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(N, J, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x.to(dtype), torch.arange(N) % K


def same(store: SampleStore, make: Callable[[], Any], x: torch.Tensor) -> bool:
    """The live machine and one that learned the surviving rows give the same scores."""
    fresh = make()
    for rows in store.batches(size=9):
        fresh.add(rows.x, rows.y)
    return torch.allclose(store.head(x), fresh(x), atol=1e-6)


@pytest.mark.parametrize("name", MACHINES)
def test_events_reach_the_machine(tmp_path: Path, name: str) -> None:
    K, make = MACHINES[name]
    x, y = data(K)
    users = [f"user-{i % 4}" for i in range(N)]
    with SampleStore(tmp_path / "s", head=make()) as store:
        assert store.apply(Add(ids=range(N), x=x, y=y, subject=users)).digest is None
        store.apply(Remove(subject="user-1", event_id="erasure"))
        assert same(store, make, x)
        store.apply([Relabel(ids=[0, 2], y=[1, 1]), Replace(ids=[3], x=x[:1] + 1, y=[1])])
        assert same(store, make, x)
        before = store.head(x)
        with pytest.raises(RemovalError):
            store.apply([Remove(ids=[4]), Relabel(ids=[6], y=[0]), Replace(ids=[7], x=x[:1]), Remove(subject="nobody")])
        assert torch.allclose(store.head(x), before, atol=1e-6)
        with pytest.raises(ValueError, match=r"shape|features"):
            store.apply(Add(ids=["n"], x=x[:1, :3], y=[0]))
        assert store.preview(Remove(subject="user-2"), x=x, y=y).samples == 10
        certificate = store.certificate("erasure")
        report = verify(certificate, head=store.head, store=store, allow_unsigned=True)
        assert report.checks["head"].facts["digest"] is False
        store.apply(Remove(ids=[8]))
        scores = store.head(x)
    with pytest.raises(StoreError, match="open it with one as head"):
        _ = SampleStore(tmp_path / "s").head
    with SampleStore(tmp_path / "s", head=make()) as store:
        assert torch.allclose(store.head(x), scores, atol=1e-6)
        assert len(store) == N - 11
        store.apply(Remove(subject="user-2"))
        assert same(store, make, x)


def test_a_machine_changed_behind_the_stores_back(tmp_path: Path) -> None:
    K, make = MACHINES["KernelLSSVM"]
    x, y = data(K, torch.float32)
    with SampleStore(tmp_path / "s", head=make()) as store:
        store.apply(Add(ids=range(N), x=x, y=y))
        assert store.get([0]).x.dtype == torch.float32  # kept as it came
        store.head.add(x[:1], y[:1])
        with pytest.raises(StoreError, match="behind the store's back"):
            store.apply(Remove(ids=[0]))
        store.restore()
        store.apply(Remove(ids=[0], event_id="e"))
        assert same(store, make, x)
        other = make()
        other.add(x, y)
        with pytest.raises(VerificationError, match="still holds 1 samples"):
            verify(store.certificate("e"), head=other, store=store, allow_unsigned=True)
    with pytest.raises(ValueError, match="does not fit the store"):
        SampleStore(tmp_path / "s", head=MACHINES["LagrangianSVM"][1]())


MORE_MACHINES = MACHINES | {"IncrementalSVM": (2, lambda: IncrementalSVM(RBF(sigma=2.0), C=2.0))}


@pytest.mark.parametrize("name", MORE_MACHINES)
def test_a_machine_that_still_holds_what_was_erased_does_not_verify(tmp_path: Path, name: str) -> None:
    """Also a sample without any influence on the scores: far from the margin, or twice the same."""
    K, make = MORE_MACHINES[name]
    x, y = data(K, torch.float64)
    x = torch.cat([x, x[:1] + (40.0 if name in ("IncrementalSVM", "LagrangianSVM") else 0.0)])
    y = torch.cat([y, y[:1]])
    with SampleStore(tmp_path / "s", head=make()) as store:
        store.apply(Add(ids=range(N + 1), x=x, y=y))
        store.apply(Remove(ids=[N], event_id="e"))
        certificate, ask = store.certificate("e"), {"store": store, "allow_unsigned": True}
        assert verify(certificate, head=store.head, **ask).checks["head"].facts["holds"] == "all"
        holding, relabelled = make(), make()
        holding.add(x, y)
        with pytest.raises(VerificationError, match="still holds 1 samples"):
            verify(certificate, head=holding, **ask)
        ids = relabelled.add(x[:N], y[:N])
        relabelled.relabel(ids[:1], (y[:1] + 1) % K)
        with pytest.raises(VerificationError, match="samples or labels"):
            verify(certificate, head=relabelled, **ask)
