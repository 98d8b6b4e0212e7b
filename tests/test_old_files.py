"""Files of earlier versions: they load and give what they gave then (``tests/fixtures/write.py`` wrote them)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torchlssvm import IncrementalSVM, KernelLSSVM, LagrangianSVM, LSSVMHead
from torchlssvm.distributed import Delta, merge
from torchlssvm.kernels import RBF

OLD = Path(__file__).parent / "fixtures" / "v0_1_0"
EXPECTED: dict[str, Any] = json.loads((OLD / "expected.json").read_text())
spec = importlib.util.spec_from_file_location("fixtures_write", OLD.parent / "write.py")
assert spec is not None
assert spec.loader is not None
written = importlib.util.module_from_spec(spec)
spec.loader.exec_module(written)
X, Y = written.samples()


def load(name: str) -> dict[str, Any]:
    return torch.load(OLD / name, weights_only=True)


def test_a_head_is_what_it_was() -> None:
    head = written.head()
    head.load_state_dict(load("head.pt"))
    assert head.digest() == EXPECTED["digest"] == written.head().add(X, Y).digest()
    torch.testing.assert_close(head(X), torch.tensor(EXPECTED["scores"], dtype=torch.float64))
    without = head.remove(X[:4], Y[:4]).digest()
    assert without == written.head().add(X[4:], Y[4:]).digest()


@pytest.mark.parametrize(
    ("name", "options"), [("head_ovo", {"multiclass": "ovo"}), ("head_compact", {"statistics": False})]
)
def test_other_forms_of_a_head_load(name: str, options: dict[str, Any]) -> None:
    head = LSSVMHead(written.J, written.K, **options)
    head.load_state_dict(load(f"{name}.pt"))
    torch.testing.assert_close(head(X), LSSVMHead(written.J, written.K, **options).add(X, Y)(X))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("kernel_lssvm", KernelLSSVM), ("lagrangian_svm", LagrangianSVM), ("incremental_svm", IncrementalSVM)],
)
def test_kernel_machines_load(name: str, kind: Any) -> None:
    machine = kind(RBF(sigma=2.0))
    machine.load_state_dict(load(f"{name}.pt"))
    torch.testing.assert_close(machine(X), torch.tensor(EXPECTED[name], dtype=torch.float64))
    machine.remove(machine.ids[:2])
    assert len(machine.ids) == len(X) - 2


def test_a_delta_is_merged() -> None:
    head = merge(written.head(), Delta.load(OLD / "delta.pt"))
    assert head.digest() == EXPECTED["digest"]


def test_a_lightning_checkpoint() -> None:
    pytest.importorskip("lightning", reason="needs torchlssvm[lightning]")
    from torchlssvm.lightning import LSSVMModule

    saved = torch.load(OLD / "lightning.ckpt", weights_only=False)
    backbone = torch.nn.Sequential(
        torch.nn.Linear(written.J, written.J), torch.nn.ReLU(), torch.nn.Linear(written.J, written.K)
    )
    module = LSSVMModule(backbone, num_classes=written.K)
    module.load_state_dict(saved["state_dict"])
    module.on_load_checkpoint(saved)
    assert module.head.n == len(X)
