"""The option ``grid`` is a number, a FixedPoint, "auto" or None wherever there is one."""

import numpy as np
import pytest
import torch
from torch import nn

from torchlssvm import FixedPoint, LSSVMHead, MarginHead, Statistics, attach
from torchlssvm.functional.grid import as_grid, grid_to_text

X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2


def attached(J, K, grid):
    return attach(nn.Linear(J, 3), K, grid=grid).head


def estimator(J, K, grid):
    sklearn = pytest.importorskip("torchlssvm.sklearn")
    return sklearn.LSSVMClassifier(grid=grid).fit(X.double().numpy(), Y.numpy()).head_


def module(J, K, grid):
    lightning = pytest.importorskip("torchlssvm.lightning")
    return lightning.LSSVMModule("identity", K, in_features=J, grid=grid).head


MAKERS = [LSSVMHead, Statistics, attached, estimator, module]


@pytest.mark.parametrize("make", [*MAKERS, MarginHead])
def test_a_number_is_the_limit(make):
    for given in (8, 8.0, np.float32(8), FixedPoint(8.0), "8", "8:20"):
        assert make(6, 2, grid=given).grid == FixedPoint(8.0)


@pytest.mark.parametrize("make", MAKERS)
def test_auto_and_none(make):
    assert make(6, 2, grid="auto").grid in (None, FixedPoint.auto(float(X.abs().max())))
    assert make(6, 2, grid=None).grid is None


@pytest.mark.parametrize("given", [True, "wide", "8:x", -1.0, float("nan"), [8.0]])
@pytest.mark.parametrize("make", [*MAKERS, MarginHead])
def test_anything_else_is_named(make, given):
    with pytest.raises(ValueError, match=r"grid must be|limit must be"):
        make(6, 2, grid=given)


@pytest.mark.parametrize("given", [None, "auto", 3, FixedPoint(1 / 3, 17, 2)])
def test_text_keeps_a_grid(given):
    assert as_grid(grid_to_text(given)) == as_grid(given)


def test_a_module_keeps_its_grid_in_a_checkpoint(tmp_path):
    lightning = pytest.importorskip("torchlssvm.lightning")
    made = lightning.LSSVMModule("identity", 2, in_features=6, grid=FixedPoint(4.0, 16))
    again = lightning.LSSVMModule(**made.hparams)
    assert again.head.grid == FixedPoint(4.0, 16)
