"""Sparse rows are learned, removed and scored as their dense form, to the bit."""

import numpy as np
import pytest
import torch

from torchlssvm import FixedPoint, LSSVMHead, MarginHead, RemovalError, Statistics
from torchlssvm.distributed import agree
from torchlssvm.functional.row_normalization import normalized

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


def wide_rows(n=400, J=600, seed=0, share=0.02):
    """Rows that stay sparse: more than 2^17 numbers, less than a tenth of them not zero."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, J, generator=draw, dtype=torch.float64) * (torch.rand(n, J, generator=draw) < share)
    x[3] = 0.0  # a row without an entry
    return x, torch.arange(n) % 3


OPTIONS = [
    {"grid": 8.0},
    {"grid": FixedPoint(7.3, 18)},  # a resolution that is no power of two
    {"grid": "auto", "class_weight": "balanced"},
    {"grid": 8.0, "multiclass": "ovo"},
    {"grid": 8.0, "normalize": "sqrt"},
    {"grid": 8.0, "normalize": "l2"},
    {"grid": 8.0, "scale": "std"},
    {"grid": 8.0, "folds": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_many_sparse_rows_give_the_sums_of_dense_ones(options):
    x, y = wide_rows()
    weight = torch.arange(400) % 4  # some are zero
    ids = {"ids": range(400)} if "folds" in options else {}
    sparse, dense = LSSVMHead(600, 3, **({"rho": 1.0} | options)), LSSVMHead(600, 3, **({"rho": 1.0} | options))
    sparse.add(x.to_sparse(), y, weight, **ids)
    dense.add(x, y, weight, **ids)
    assert sparse.statistics == dense.statistics  # what is above the diagonal too
    assert sparse.digest() == dense.digest()
    torch.testing.assert_close(sparse(x.to_sparse()), dense(x))
    some = {"ids": range(300)} if "folds" in options else {}
    sparse.remove(x[:300], y[:300], weight[:300], **some)  # rows are recognised in either form
    dense.remove(x[:300].to_sparse(), y[:300], weight[:300], **some)
    rest = LSSVMHead(600, 3, **options | {"grid": sparse.grid})
    rest.add(x[300:], y[300:], weight[300:], **({"ids": range(300, 400)} if some else {}))
    assert sparse.digest() == dense.digest() == rest.digest()
    with pytest.raises(RemovalError, match="row 0 is not held"):
        sparse.remove(x[:300].to_sparse(), y[:300], **some)
    assert sparse.digest() == rest.digest()


@pytest.mark.parametrize("options", [{}, {"per_class": True}, {"folds": 2}], ids=str)
def test_rather_full_rows_go_some_at_a_time(options):
    x, y = wide_rows(2500, 80, share=0.2)
    weight = torch.arange(2500) % 3
    ids = {"ids": range(2500)} if "folds" in options else {}
    sparse = LSSVMHead(80, 3, grid=8.0, **({"rho": 1.0} | options)).add(x.to_sparse(), y, weight, **ids)
    dense = LSSVMHead(80, 3, grid=8.0, **({"rho": 1.0} | options)).add(x, y, weight, **ids)
    assert sparse.digest() == dense.digest()
    order = torch.randperm(2500, generator=torch.Generator().manual_seed(0))  # fingerprints belong to their rows
    ids = {"ids": order.tolist()} if ids else {}
    assert sparse.remove(x[order], y[order], weight[order], **ids).n == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_float_type_of_sparse_rows(dtype):
    x, y = wide_rows()
    x = x.to(dtype)
    assert (
        LSSVMHead(600, 3, grid=8.0, rho=1.0).add(x.to_sparse(), y).digest()
        == LSSVMHead(600, 3, grid=8.0, rho=1.0).add(x, y).digest()
    )


def test_sparse_rows_with_targets_and_large_weights():
    x, _ = wide_rows()
    draw = torch.Generator().manual_seed(1)
    y = torch.randn(400, 2, generator=draw, dtype=torch.float64)
    weight = torch.ones(400)
    weight[7] = 2.0**20  # split, since its products alone leave the exact range of float64
    both = [Statistics(600, 2, grid=8.0, target_grid=8.0).add(rows, y, weight) for rows in (x.to_sparse(), x)]
    assert both[0] == both[1]
    floats = [LSSVMHead(600, 2, grid=None, rho=1.0).add(rows, y, weight) for rows in (x.to_sparse(), x)]
    torch.testing.assert_close(floats[0].statistics.M, floats[1].statistics.M)


def test_sparse_rows_after_an_agreement():
    """What came since is summed on its own, and rows that wait are not lost."""
    x, y = wide_rows()
    other, labels = wide_rows(seed=1)
    head = agree(LSSVMHead(600, 3, grid=8.0, rho=1.0).add(other[:300], labels[:300]))
    head.add(other[300:305], labels[300:305]).add(x.to_sparse(), y).add(other[305:310], labels[305:310])
    new = Statistics(600, 3, grid=8.0).add(torch.cat([other[300:310], x]), torch.cat([labels[300:310], y]))
    assert head.pending.statistics == new
    truth = Statistics(600, 3, grid=8.0).add(other[:310], labels[:310])
    assert head.remove(x.to_sparse(), y).digest() == truth.digest()


def test_rows_that_are_not_well_formed():
    scipy_sparse = pytest.importorskip("scipy.sparse")
    x, y = wide_rows()
    place, values = x.to_sparse().coalesce().indices(), x.to_sparse().coalesce().values()
    twice = torch.cat([place, place], 1), torch.cat([values / 2, values / 2])  # each entry in two parts, out of order
    uncoalesced = torch.sparse_coo_tensor(*twice, x.shape, check_invariants=True)
    zeros = scipy_sparse.csr_array(x.numpy())
    zeros.data[::5] = 0.0  # kept as entries
    truth = LSSVMHead(600, 3, grid=8.0, rho=1.0).add(x, y)
    assert LSSVMHead(600, 3, grid=8.0, rho=1.0).add(uncoalesced, y).digest() == truth.digest()
    dense = LSSVMHead(600, 3, grid=8.0, rho=1.0).add(zeros.toarray(), y)
    assert LSSVMHead(600, 3, grid=8.0, rho=1.0).add(zeros, y).digest() == dense.digest()
    bad = scipy_sparse.csr_array(x.numpy())
    bad.data[11] = np.nan
    with pytest.raises(ValueError, match=r"x holds 1 NaN or inf value\(s\), the first at index \(\d+, \d+\)"):
        truth.add(bad, y)
    beyond = scipy_sparse.csr_array(x.numpy() * 100)
    with pytest.raises(ValueError, match="beyond the grid's limit"):
        truth.add(beyond, y)
    assert truth.n == 400
    assert scipy_sparse.csr_array((400, 600)).nnz == 0
    nothing = LSSVMHead(600, 3, grid=8.0, rho=1.0).add(scipy_sparse.csr_array((400, 600)), y)
    assert nothing.digest() == LSSVMHead(600, 3, grid=8.0, rho=1.0).add(torch.zeros(400, 600), y).digest()


@pytest.mark.parametrize("kind", ["l2", "sqrt"])
def test_sparse_rows_are_normalized_to_the_bit(kind):
    x, _ = wide_rows(60, 700, share=0.3)
    assert torch.equal(normalized(x.to_sparse(), kind).to_dense(), normalized(x, kind))


def test_sparse_rows_are_never_made_dense(monkeypatch):
    """Neither on the way in nor on the way out; two products of integers say that the sums are right."""
    scipy_sparse = pytest.importorskip("scipy.sparse")
    x = scipy_sparse.random_array((3000, 1200), density=0.005, rng=np.random.default_rng(0), format="csr")
    made = []
    monkeypatch.setattr(torch.Tensor, "to_dense", lambda *a, **k: made.append(1))
    head = LSSVMHead(1200, 2, grid=8.0, rho=1.0).add(x, torch.arange(3000) % 2)
    head.remove(x[:2000], torch.arange(2000) % 2)
    monkeypatch.undo()
    assert not made
    assert (
        head.digest() == LSSVMHead(1200, 2, grid=8.0, rho=1.0).add(x[2000:].toarray(), torch.arange(1000) % 2).digest()
    )
