"""The incremental SVM as the two-class machine of OneVsRest and OneVsOne."""

import pytest
import torch

from torchlssvm import IncrementalSVM
from torchlssvm.kernels import RBF
from torchlssvm.testing import CHECKS, Case

multiclass = pytest.importorskip("torchlssvm.kernel_machines.multiclass")


@pytest.mark.parametrize("form", ["OneVsRest", "OneVsOne"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
def test_conforms(check, form):
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(60) % 3
    x[:, 0] += y
    wrap = getattr(multiclass, form)
    check(Case(lambda **kw: wrap(lambda: IncrementalSVM(RBF(sigma=1.0), C=5.0, **kw), 3), x, y, by_ids=True))
