"""What the tests share: where the data is, which tests can run here, how hard hypothesis tries, and a dense truth."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator
from pathlib import Path

import hypothesis
import pytest
import torch
from torch import Tensor

from tests.support.dense import code, ridge
from tests.support.pretend_cuda import PretendCuda

hypothesis.settings.register_profile("ci", deadline=None, max_examples=30, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def missing_data(*files: str) -> str | None:
    """Why a test cannot have its data; None if it can. files: paths below the folder that TORCHLSSVM_DATA names."""
    folder = os.environ.get("TORCHLSSVM_DATA")
    if not folder:
        return "TORCHLSSVM_DATA is not set: it names the folder with the data sets"
    if not Path(folder).is_dir():
        return f"TORCHLSSVM_DATA={folder} is not a folder"
    absent = [name for name in files if not (Path(folder) / name).exists()]
    return f"TORCHLSSVM_DATA={folder} lacks {', '.join(absent)}" if absent else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what cannot run here. ``@pytest.mark.data("mnist/train.csv.gz")`` names the files that a test reads."""
    for marker in item.iter_markers("data"):
        if reason := missing_data(*marker.args):
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Run a test for CUDA on a device that computes on the CPU, where there is no GPU."""
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        with PretendCuda():
            return (yield)
    return (yield)


@pytest.fixture(scope="session")
def data_path() -> Path:
    """The folder with the data sets; the test is skipped without one."""
    if reason := missing_data():
        pytest.skip(reason)
    return Path(os.environ["TORCHLSSVM_DATA"])


@pytest.fixture(scope="session")
def dense() -> Callable[..., tuple[Tensor, Tensor]]:
    """Weights of any form of the head by dense least squares, without a line of the library."""
    return solve_dense


def solve_dense(
    x: Tensor,  # (n, J)
    y: Tensor,  # (n,) labels or (n, K) targets
    K: int,
    *,
    rho: float = 1.0,
    intercept: str = "free",
    class_weight: str | Tensor | None = None,
    multiclass: str = "ovr",
    weight: Tensor | None = None,  # (n,)
) -> tuple[Tensor, Tensor]:
    """w (J, K) and b (K,), or (J, pairs) and (pairs,) for "ovo": rho |w|^2 + sum d (w x + b - t)^2 at its smallest."""
    d = torch.ones(len(x), dtype=torch.float64) if weight is None else weight.double()
    if multiclass == "ovo":  # class i is +1, class j > i is -1, and each pair has its own balance
        parts = []
        for i, j in itertools.combinations(range(K), 2):
            keep = (y == i) | (y == j)
            part = class_weight[[i, j]] if isinstance(class_weight, Tensor) else class_weight
            two = (y[keep] == j).long()
            w, b = solve_dense(x[keep], two, 2, rho=rho, intercept=intercept, class_weight=part, weight=d[keep])
            parts.append((w[:, 0], b[0]))
        return torch.stack([p[0] for p in parts], 1), torch.stack([p[1] for p in parts])
    if y.ndim == 2:
        return ridge(x.double(), y.double(), rho, intercept, d)
    counts = torch.stack([d[y == k].sum() for k in range(K)])
    if isinstance(class_weight, Tensor):
        d = d * class_weight.double()[y]
    elif class_weight == "balanced":
        d = d * (counts.sum() / ((counts > 0).sum() * counts))[y]
    elif class_weight == "complement":
        d = d * (1 - counts / counts.sum())[y]
    return ridge(x.double(), code(y, K), rho, intercept, d)


def pytest_configure(config):
    """One thread for each test process: tensors are small here, and several processes share the cores."""
    torch.set_num_threads(1)
