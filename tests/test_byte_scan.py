"""Nothing that any machine can save, pickle, copy or export contains a function of a sample that it has removed.

Machines on a grid: after the removal and ``refresh``, every file is byte for byte that of a machine that never saw the sample.
Machines in floating point: no file contains the row, its label's kernel values or its integers, for the removed sample no more
than for 200 candidates that nobody ever added, and the values in the file are those of the other machine to 1e-9.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import uuid
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchlssvm import (
    CompactLSSVMHead,
    FixedPoint,
    IncrementalSVM,
    KernelLSSVM,
    LagrangianSVM,
    LSSVMHead,
    MarginHead,
    OneVsOne,
    OneVsRest,
    attach,
)
from torchlssvm.export import export_onnx, export_program, freeze, save_safetensors
from torchlssvm.hub import save_pretrained
from torchlssvm.kernels import RBF
from torchlssvm.sklearn import IncrementalSVC, KernelLSSVMClassifier, LSSVMClassifier, LSSVMRegressor, MarginClassifier

J, K, N = 5, 3, 40
X = torch.randn(N, J, generator=torch.Generator().manual_seed(1))
Y = torch.arange(N) % K
X[torch.arange(N), Y] += 2
CANDIDATES = torch.randn(201, J, generator=torch.Generator().manual_seed(2))  # the first one is added and removed
GRID = FixedPoint(8.0)

GRID_HEADS: dict[str, Callable[[], Any]] = {
    "least squares": lambda: LSSVMHead(J, K, grid=GRID),
    "balanced": lambda: LSSVMHead(J, K, grid=GRID, rho=1.0, class_weight="balanced"),
    "pairs": lambda: LSSVMHead(J, K, grid=GRID, rho=1.0, multiclass="ovo"),
    "penalized": lambda: LSSVMHead(J, K, grid=GRID, rho=1.0, intercept="penalized"),
    "folds": lambda: LSSVMHead(J, K, grid=GRID, rho=1.0, folds=3),
    "scaled": lambda: LSSVMHead(J, K, grid=GRID, rho=1.0, scale="std", normalize="l2"),
    "discriminant": lambda: LSSVMHead(J, K, grid=GRID, rho=1.0, rule="lda"),
    "no membership": lambda: LSSVMHead(J, K, grid=GRID, rho=1.0, membership=False),
    "margin": lambda: MarginHead(J, K, grid=GRID, rho=1.0),
    "margin, balanced": lambda: MarginHead(J, K, grid=GRID, rho=1.0, class_weight="balanced"),
}
FLOAT_HEADS: dict[str, Callable[[], Any]] = {
    "float": lambda: LSSVMHead(J, K, grid=None, rho=1.0),
    "float, balanced": lambda: LSSVMHead(J, K, grid=None, rho=1.0, class_weight="balanced"),
    "compact": lambda: CompactLSSVMHead(J, K),
}
MACHINES: dict[str, Callable[[], Any]] = {
    "kernel": lambda: KernelLSSVM(RBF(sigma=2.0), num_classes=K),
    "lagrangian": lambda: OneVsRest(lambda: LagrangianSVM(RBF(sigma=2.0), tol=1e-12), K),
    "incremental": lambda: OneVsRest(lambda: IncrementalSVM(RBF(sigma=2.0)), K),
    "incremental, pairs": lambda: OneVsOne(lambda: IncrementalSVM(RBF(sigma=2.0)), K),
    "kernel, rest": lambda: OneVsRest(lambda: KernelLSSVM(RBF(sigma=2.0)), K),
}


def taught(machine: Any, guest: bool) -> Any:
    """A machine with N samples; with ``guest``, one more came and went, and every cache was filled in between."""
    if isinstance(machine, (KernelLSSVM, OneVsRest, OneVsOne)):
        ids = machine.add(X, Y)
        if guest:
            machine(X)
            (one,) = machine.add(CANDIDATES[:1], Y[:1])
            machine(X)
            machine.remove([int(one)])
        machine(X)
        assert len(machine.ids) == len(ids)
        return machine
    named = isinstance(machine, LSSVMHead) and machine.statistics.folds
    ids, one = ({"ids": [f"s{i}" for i in range(N)]}, {"ids": ["guest"]}) if named else ({}, {})
    machine.add(X, Y, **ids)
    if guest:
        machine(X)
        machine.add(CANDIDATES[:1], Y[:1], **one)(X)
        machine.remove(CANDIDATES[:1], Y[:1], **one)
    if not isinstance(machine, CompactLSSVMHead):
        machine.refresh()
    machine(X)
    return machine


def torch_bytes(value: Any) -> bytes:
    """The bytes of torch.save."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def pickled(value: Any) -> bytes:
    """The bytes of pickle without memory addresses, by which torch names storages."""
    return re.sub(rb"X[\x0a-\x10]\x00\x00\x00\d{10,16}q", b"Xq", pickle.dumps(value))


def folder_bytes(folder: Path) -> bytes:
    """The files of a folder. Files of safetensors write their metadata in a random order, here in the order of the alphabet."""
    out = b""
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            size = int.from_bytes(data[:8], "little")
            data = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True).encode() + data[8 + size :]
        out += path.name.encode() + data
    return out


def hub_bytes(head: Any, folder: Path) -> bytes:
    save_pretrained(head, folder)
    return folder_bytes(folder)


def program_bytes(head: Any, folder: Path) -> bytes:
    folder.mkdir()
    torch.export.save(export_program(freeze(head), X), folder / "head.pt2")
    with zipfile.ZipFile(folder / "head.pt2") as file:
        return b"".join(name.encode() + file.read(name) for name in sorted(file.namelist()))


def onnx_bytes(head: Any, folder: Path) -> bytes:
    folder.mkdir()
    export_onnx(freeze(head), X, folder / "head.onnx")
    return folder_bytes(folder)


def safetensors_bytes(head: Any, folder: Path) -> bytes:
    folder.mkdir()
    save_safetensors(freeze(head), folder / "head.safetensors")
    return folder_bytes(folder)


def attached_bytes(head: Any, folder: Path) -> bytes:
    network = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(J, K))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    folder.mkdir()
    attach(network, K, head).save(folder / "classifier.pt")
    return folder_bytes(folder)


WAYS: dict[str, Callable[[Any, Path], bytes]] = {
    "state_dict": lambda machine, folder: torch_bytes(machine.state_dict()),
    "module": lambda machine, folder: torch_bytes(machine),
    "pickle": lambda machine, folder: pickled(machine),
    "copy": lambda machine, folder: pickled(copy.deepcopy(machine)),
    "frozen": lambda machine, folder: torch_bytes(freeze(machine)),
    "safetensors": safetensors_bytes,
    "program": program_bytes,
    "onnx": onnx_bytes,
    "hub": hub_bytes,
    "attached": attached_bytes,
}


@pytest.fixture(autouse=True)
def secrets_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random ids and keys, in what every file may differ, are those of the test."""
    monkeypatch.setattr("torchlssvm.hub.secrets.token_hex", lambda size: "00" * size)
    monkeypatch.setattr("torchlssvm.linear.grid_rows.os.urandom", bytes)
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=0))


EXPORTS = ("safetensors", "program", "onnx")
"""Written from the frozen module, so that one machine of a kind is enough."""


def cases(kinds: Iterable[str], exported: tuple[str, ...]) -> list[tuple[str, str]]:
    """Every kind in every way; exports of the given kinds alone."""
    return [(kind, way) for kind in kinds for way in WAYS if way not in EXPORTS or kind in exported]


@pytest.mark.parametrize(("kind", "way"), cases(GRID_HEADS, ("least squares", "margin")))
def test_on_a_grid_a_file_is_that_of_a_head_that_never_saw_the_sample(kind: str, way: str, tmp_path: Path) -> None:
    saw, never = (WAYS[way](taught(GRID_HEADS[kind](), guest), tmp_path / str(guest)) for guest in (True, False))
    assert saw == never


def traces(row: Tensor) -> list[bytes]:
    """Bytes that would confirm that the row was there: its entries in any number format, and its kernel values."""
    kernel = RBF(sigma=2.0)
    values = torch.cat([row, row**2, row - X.mean(0), kernel(row[None].double(), X.double())[0]]).double()
    return [
        f(v) for v in values.tolist() for f in (lambda v: np.float64(v).tobytes(), lambda v: np.float32(v).tobytes())
    ]


def confirmed(data: bytes) -> int:
    """How many traces of the removed sample a file contains beyond those of the luckiest of 200 candidates."""
    hits = [sum(trace in data for trace in traces(row)) for row in CANDIDATES]
    return hits[0] - max(hits[1:])


@pytest.mark.parametrize(("kind", "way"), cases([*FLOAT_HEADS, *MACHINES], ("float", "kernel", "incremental, pairs")))
def test_in_floating_point_a_file_does_not_confirm_a_guess(kind: str, way: str, tmp_path: Path) -> None:
    make = (FLOAT_HEADS | MACHINES)[kind]
    machine = taught(make(), True)
    if way in ("hub", "attached") and "float" not in kind:
        with pytest.raises(ValueError, match="LSSVMHead"):
            WAYS[way](machine, tmp_path / "file")
        return
    assert confirmed(WAYS[way](machine, tmp_path / "file")) <= 0
    assert torch.allclose(machine(X), taught(make(), False)(X), rtol=0, atol=1e-9)


def test_the_scan_finds_a_sample_that_is_held() -> None:
    machine = KernelLSSVM(RBF(sigma=2.0), num_classes=K)
    machine.add(torch.cat([X, CANDIDATES[:1]]), torch.cat([Y, Y[:1]]))
    for way in ("state_dict", "module", "pickle", "copy", "frozen"):
        assert confirmed(WAYS[way](machine, Path())) >= J


ESTIMATORS: dict[str, Callable[[], Any]] = {
    "LSSVMClassifier": lambda: LSSVMClassifier(rho=1.0),
    "LSSVMClassifier, wide": lambda: LSSVMClassifier(rho=1.0),
    "LSSVMClassifier, float": lambda: LSSVMClassifier(rho=1.0, grid=None),
    "LSSVMRegressor": lambda: LSSVMRegressor(rho=1.0),
    "MarginClassifier": lambda: MarginClassifier(rho=1.0),
    "KernelLSSVMClassifier": lambda: KernelLSSVMClassifier(),
    "IncrementalSVC": lambda: IncrementalSVC(),
}


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_the_file_of_an_estimator_does_not_confirm_a_guess(kind: str) -> None:
    """A row comes and goes; in the wide case there are fewer samples than features, and rows are kept."""
    few = 4 if "wide" in kind else N
    x, y, guest = X[:few].double().numpy(), Y[:few].numpy(), CANDIDATES[:1].double().numpy()
    saw, never = (ESTIMATORS[kind]().fit(x, y) for _ in range(2))
    first = y[:1]
    if isinstance(saw, (KernelLSSVMClassifier, IncrementalSVC)):
        saw.partial_fit(guest, first)
        saw.partial_unfit(saw.ids_[-1:])
    else:
        saw.partial_fit(guest, first)
        saw.partial_unfit(guest, first)
    assert np.abs(saw.predict(x) - never.predict(x)).max() <= 1e-9
    for data in (pickle.dumps(saw), pickle.dumps(copy.deepcopy(saw))):
        assert confirmed(data) <= 0
