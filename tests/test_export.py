"""Frozen heads: the same scores, nothing of the samples, and files that run without the library."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchlssvm import (
    IncrementalSVM,
    KernelLSSVM,
    LagrangianSVM,
    LSSVMHead,
    MarginHead,
    NotFittedError,
    OneVsOne,
    OneVsRest,
    attach,
)
from torchlssvm.export import export_onnx, export_program, freeze, load_safetensors, save_safetensors
from torchlssvm.kernels import RBF, Laplacian, Linear, Polynomial

X, Y = torch.randn(60, 5, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3


def machines() -> dict[str, Any]:
    out: dict[str, Any] = {
        f"{multiclass}-{intercept}": LSSVMHead(5, 3, multiclass=multiclass, intercept=intercept).add(X, Y)
        for multiclass in ("ovr", "ovo") for intercept in ("free", "penalized", "none")
    }  # fmt: skip
    out["margin"] = MarginHead(5, 3, rho=1.0).add(X, Y)
    out["margin-scaled and normalized"] = MarginHead(
        5, 3, rho=1.0, normalize="sqrt", scale="std", intercept="penalized"
    ).add(X, Y)
    for kernel in (RBF(gamma=0.2), Polynomial(2), Laplacian(sigma=2.0), Linear()):
        svm = KernelLSSVM(kernel, num_classes=3)
        svm.add(X, Y)
        svm.remove(svm.ids[:7])
        out[f"kernel-{type(kernel).__name__}"] = svm
    two: dict[str, Any] = {
        "lagrangian": LagrangianSVM(RBF(gamma=0.2)), "augmented": LagrangianSVM(RBF(gamma=0.2), bias="augmented"),
        "augmented-Linear": LagrangianSVM(Linear(), bias="augmented"), "path": IncrementalSVM(RBF(gamma=0.2)),
        "path-Linear": IncrementalSVM(Linear()),
    }  # fmt: skip
    for name, svm in two.items():
        svm.add(X, Y.clamp(max=1))
        svm.remove(svm.ids[:7])
        out[name] = svm
    for name, empty in (
        ("lagrangian", two["lagrangian"]),
        ("path", two["path"]),
        ("kernel", KernelLSSVM(Laplacian(1.0))),
    ):
        for form in (OneVsRest, OneVsOne):
            several = form(type(empty)(empty.kernel), 4)  # no sample has the last class
            several.add(X, Y)
            out[f"{form.__name__}-{name}"] = several
    return out


MACHINES = machines()


@pytest.mark.parametrize("name", MACHINES)
def test_a_frozen_head_gives_the_same_scores(name: str) -> None:
    frozen = freeze(MACHINES[name], torch.float64)
    torch.testing.assert_close(frozen(X.double()), MACHINES[name](X), atol=1e-6, rtol=1e-6)
    assert not any(p.requires_grad for p in frozen.parameters())


@pytest.mark.parametrize("name", MACHINES)
def test_torch_export_takes_any_batch(name: str, tmp_path: Path) -> None:
    frozen = freeze(MACHINES[name])
    export_program(frozen, X[:4], tmp_path / "m.pt2")
    program = torch.export.load(tmp_path / "m.pt2").module()
    for size in (1, 2, 7, 60):
        torch.testing.assert_close(program(X[:size]), frozen(X[:size]))


@pytest.mark.parametrize(
    "name", ["ovr-free", "ovo-free", "kernel-RBF", "kernel-Laplacian", "augmented", "OneVsOne-path", "OneVsRest-kernel"]
)
def test_onnx_agrees_with_torch(name: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    frozen = freeze(MACHINES[name])
    export_onnx(frozen, X[:4], tmp_path / "m.onnx")
    session = runtime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    for size in (1, 5, 60):
        scores = torch.from_numpy(session.run(["scores"], {"x": X[:size].numpy()})[0])
        torch.testing.assert_close(scores, frozen(X[:size]), atol=1e-4, rtol=1e-4)


def test_a_network_goes_along(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 9))
    images = torch.randn(20, 1, 8, 8)
    clf = attach(net, 2).add(images, torch.arange(20) % 2)
    frozen = freeze(clf)
    torch.testing.assert_close(frozen(images).double(), clf(images), atol=1e-5, rtol=1e-4)
    program = export_program(frozen, images[:2]).module()
    torch.testing.assert_close(program(images), frozen(images), atol=1e-5, rtol=1e-4)
    before = frozen(images).clone()
    clf.remove(images[:5], torch.arange(5) % 2)
    assert torch.equal(frozen(images), before)


def test_a_frozen_linear_head_holds_nothing_but_weights(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    head = MACHINES["ovr-free"]
    frozen = freeze(head)
    assert type(frozen) is nn.Linear
    assert set(frozen.state_dict()) == {"weight", "bias"}
    files = {
        "a.safetensors": lambda p: save_safetensors(frozen, p),
        "b.pt2": lambda p: export_program(frozen, X[:2], p),
    }
    for name, write in files.items():
        write(tmp_path / name)
    rows = X.double()
    gridded = head.grid.snap(rows)
    saved = [(tmp_path / name).read_bytes() for name in files] + [pickle.dumps(frozen)]
    for data in saved:  # neither a row nor a sum: not as float32, float64 or integers
        for values in (X, rows, gridded, head.statistics.grid.integers(rows)):
            for row in values:
                assert row.contiguous().numpy().tobytes() not in data
        for value in head.statistics.state().values():
            if value.numel() >= 5:
                assert value.contiguous().numpy().tobytes()[:40] not in data


@pytest.mark.parametrize("name", ["kernel-Linear", "augmented-Linear", "path-Linear"])
def test_of_the_linear_kernel_nothing_but_weights_remains(name: str) -> None:
    frozen = freeze(MACHINES[name], torch.float64)
    assert type(frozen) is nn.Linear
    data = pickle.dumps(frozen)
    assert not any(row.numpy().tobytes() in data for row in X.double())


@pytest.mark.parametrize("name", ["path", "OneVsRest-path", "lagrangian"])
def test_a_frozen_kernel_machine_holds_its_support_rows_and_no_others(name: str, tmp_path: Path) -> None:
    """What it predicts with: without ids or labels, and without the samples whose coefficient is zero."""
    machine = MACHINES[name]
    frozen = freeze(machine, torch.float64)
    assert set(frozen.state_dict()) == {"rows", "alpha", "b", "kernel._extra_state"}  # the last: gamma
    pytest.importorskip("safetensors")
    save_safetensors(frozen, tmp_path / "m.safetensors")
    state, _ = load_safetensors(tmp_path / "m.safetensors")
    assert torch.equal(state["rows"], frozen.rows)
    parts = list(machine.machines) if hasattr(machine, "machines") else [machine]
    alphas = [dict(zip(part.ids.tolist(), part.alpha.tolist(), strict=True)) for part in parts]
    held = sum(any(abs(alpha.get(i, 0.0)) > 0 for alpha in alphas) for i in machine.ids.tolist())
    assert len(frozen.rows) == held <= len(machine.ids)
    if name == "path":
        assert held < len(machine.ids)
    data = pickle.dumps(frozen)
    gone = X[:7] if name != "OneVsRest-path" else X[:0]  # these were removed
    assert not any(row.double().numpy().tobytes() in data for row in gone)


def test_safetensors_carry_metadata(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    path = tmp_path / "m.safetensors"
    frozen = freeze(MACHINES["ovr-free"])
    save_safetensors(frozen, path, {"classes": ["a", "b", "c"], "backbone": "mobilenet_v2"})
    state, metadata = load_safetensors(path)
    assert (metadata["classes"], metadata["backbone"]) == ('["a", "b", "c"]', "mobilenet_v2")
    again = nn.Linear(5, 3)
    again.load_state_dict(state)
    assert torch.equal(again(X), frozen(X))
    half = freeze(MACHINES["ovr-free"], torch.bfloat16)
    save_safetensors(half, path)
    assert torch.equal(load_safetensors(path)[0]["weight"], half.weight)
    with pytest.raises(ValueError, match="may not hold"):
        save_safetensors(frozen, path, {"format": "x"})
    (tmp_path / "bad").write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match="no safetensors file"):
        load_safetensors(tmp_path / "bad")


def test_what_cannot_be_frozen_is_said() -> None:
    with pytest.raises(NotFittedError, match="nothing to freeze"):
        freeze(LSSVMHead(3, 2))
    with pytest.raises(NotFittedError, match="nothing to freeze"):
        freeze(KernelLSSVM(RBF(gamma=1.0)))
    with pytest.raises(ValueError, match="freeze takes"):
        freeze(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="two rows or more"):
        export_program(nn.Linear(2, 2), torch.zeros(1, 2))


@pytest.mark.parametrize("kind", ["pt2", "onnx", "safetensors"])
@pytest.mark.parametrize("frozen_first", [False, True], ids=["direct", "frozen"])
@pytest.mark.parametrize("part", ["classifier", "head"])
def test_files_of_a_classifier_or_its_head_are_named_in_certificates_of_later_erasures(
    tmp_path: Path, kind: str, part: str, frozen_first: bool
) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 2))
    clf = attach(network, 2, store=tmp_path / "store")
    x = torch.randn(20, 1, 3, 3)
    clf.add(x, torch.arange(20) % 2, ids=range(20), subjects=[f"u{i % 4}" for i in range(20)])
    model, path = (clf if part == "classifier" else clf.head), tmp_path / f"m.{kind}"
    if frozen_first:
        model = freeze(model)
    first = clf.remove(subject="u0")
    if kind == "safetensors":
        save_safetensors(model, path)
    else:
        (export_onnx if kind == "onnx" else export_program)(
            model, x[:2] if part == "classifier" else clf.features(x[:2]), path
        )
    assert clf.store.certificates.checkpoints() == {str(path): first.position - frozen_first}
    later = clf.remove(subject="u1")
    assert str(path) in clf.store.certificate(later.event_id).scope["checkpoints"]
