"""Sparse rows are learned, removed and scored as their dense form, to the bit."""

import pytest
import torch

from torchlssvm import LSSVMHead, MarginHead

X = torch.randn(40, 9, generator=torch.Generator().manual_seed(0)) * (torch.arange(360).reshape(40, 9) % 4 == 0)
Y = torch.arange(40) % 3


@pytest.mark.parametrize("kind", [LSSVMHead, MarginHead])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_rows(kind):
    sparse = pytest.importorskip("scipy.sparse")
    truth = kind(9, 3, grid=8.0).add(X, Y)
    for form in (X.to_sparse_csr(), X.to_sparse(), sparse.csr_matrix(X.numpy()), sparse.csc_array(X.numpy())):
        head = kind(9, 3, grid=8.0).add(form, Y)
        assert head.digest() == truth.digest()
        torch.testing.assert_close(head(form), truth(X))
        assert head.remove(form, Y).n == 0
    with pytest.raises(ValueError, match=r"\(B, 9\)"):
        truth.add(sparse.csr_matrix(X[:, :5].numpy()), Y)


def test_bytes_are_named_beforehand():
    assert LSSVMHead(1000, 10).planned_bytes == 3 * 8 * 1000**2
    assert LSSVMHead(1000, 10, multiclass="ovo").planned_bytes == 12 * 8 * 1000**2
    assert LSSVMHead(1000, 10, statistics=False).planned_bytes == 2 * 8 * 1000**2
