"""Statistics: exact sums, the group laws, the digest."""

import hashlib
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchlssvm import FixedPoint, Statistics
from torchlssvm.functional import gram
from torchlssvm.statistics.accumulator import split_runs

GRID = FixedPoint(8.0)


def samples(n, J=5, K=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, J, generator=generator), torch.randint(K, (n,), generator=generator)


def python_sums(q, z):
    """Sums in Python's own integers: no overflow, no rounding."""
    rows, sides = [[int(v) for v in row] for row in q.tolist()], [[int(v) for v in row] for row in z.tolist()]
    J, R = q.shape[1], z.shape[1]
    M = [[sum(r[i] * r[j] for r in rows) for j in range(J)] for i in range(J)]
    V = [[sum(s[k] * r[j] for r, s in zip(rows, sides, strict=True)) for j in range(J)] for k in range(R)]
    return M, V


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [8.0, 5.3])  # a power of two, and not
def test_sums_equal_python_integers(dtype, limit):
    x, y = samples(40)
    x = x.to(dtype)
    grid = FixedPoint(limit)
    q = [[round(v / grid.resolution) for v in row] for row in x.double().tolist()]  # Python's division and rounding
    stats = Statistics(5, 3, grid=grid).add(x, y)
    M, _ = python_sums(torch.tensor(q), torch.ones(40, 1))
    assert stats.M[:-1, :-1].tolist() == M
    coded = 2 * torch.nn.functional.one_hot(y, 3) - 1
    _, V = python_sums(torch.tensor(q), coded)
    assert stats.V[:-1].T.tolist() == V
    assert stats.V[-1].tolist() == coded.sum(0).tolist()
    assert stats.M[-1, :-1].tolist() == torch.tensor(q).sum(0).tolist()
    assert int(stats.M[-1, -1]) == 40 == stats.n
    assert stats.counts.tolist() == torch.bincount(y, minlength=3).tolist()


def test_outliers_and_heavy_weights_stay_exact():
    """Values of 2^26 steps and multiplicities that leave float64's range are split, not rounded."""
    x, y = samples(30)
    x = x.double()
    first = x.clone()
    first[0, 0] = 1.0
    stats = Statistics(5, 3).add(first.clamp(-1, 1), y)  # resolution 2^-20
    assert stats.grid is not None
    assert stats.grid.resolution == 2.0**-20
    big = x.clone()
    big[3:9] *= 63 / big[3:9].abs().amax()
    weight = torch.ones(30)
    weight[4], weight[20] = 300, 70_001
    stats.add(big, y, weight=weight)
    rows = torch.cat([first.clamp(-1, 1), big])
    q = torch.tensor([[round(v / 2.0**-20) for v in row] for row in rows.tolist()])
    M = [[0] * 5 for _ in range(5)]
    for row, m in zip(q.tolist(), [1] * 30 + [int(w) for w in weight], strict=True):
        for i in range(5):
            for j in range(5):
                M[i][j] += m * row[i] * row[j]
    assert stats.M[:-1, :-1].tolist() == M
    stats.remove(big, y, weight=weight)
    assert stats == Statistics(5, 3, grid=stats.grid).add(first.clamp(-1, 1), y)


def test_runs_are_exact_chunks():
    bounds = np.array([2.0**52, 1.0, 2.0**52, 2.0**53, 5.0] + [2.0**42] * 3000)
    parts = split_runs(bounds)
    assert [p for part in parts for p in range(*part)] == list(range(len(bounds)))
    assert all(b - a == 1 or bounds[a:b].sum() <= gram.LARGEST_EXACT_INTEGER for a, b in parts)
    assert all(b - a <= 1024 for a, b in parts)


@pytest.mark.parametrize("J", [1, 2, 47, 48, 49, 100, 400, 785])
def test_packed_layout(J):
    generator = torch.Generator().manual_seed(J)
    rows = torch.randint(-9, 9, (20, J + 3), generator=generator).double()
    acc = torch.zeros(gram.packed_size(J, 3, product=True), dtype=torch.float64)
    gram.accumulate_(acc, rows, J)
    packed = gram.carry_(None, acc, J, 3, torch.float64)
    full = rows[:, :J].T @ rows[:, :J]
    assert torch.equal(gram.unpack(packed, J), full)
    assert torch.equal(gram.side_view(packed, J, 3), rows[:, J:].T @ rows[:, :J])
    assert torch.equal(gram.diagonal(packed, J), full.diagonal())
    lower = [int(full[i, j]) for i in range(J) for j in range(i + 1)]
    side = (rows[:, J:].T @ rows[:, :J]).reshape(-1).long().tolist()
    assert b"".join(gram.lower_bytes(packed.long(), J, 3)) == np.array(lower + side, dtype="<i8").tobytes()


def independent_digest(x, y, K, limit, bits, per_class):
    """The digest as an auditor would compute it: numpy, hashlib and the documented layout."""
    q = np.rint(np.asarray(x, dtype=np.float64) / (limit / 2**bits)).astype(np.int64)
    J = q.shape[1]
    header = {
        "format": "torchlssvm-statistics-1", "features": J, "classes": K, "folds": 0, "per_class": per_class,
        "kind": "labels", "limit": float(limit).hex(), "bits": bits, "headroom": 0,
    }  # fmt: skip
    outer = hashlib.sha256(json.dumps(header, sort_keys=True, separators=(",", ":")).encode())
    one_hot = np.eye(K, dtype=np.int64)[np.asarray(y)]
    groups = (
        [(q[y == k], np.ones((int((y == k).sum()), 1), np.int64)) for k in range(K)] if per_class else [(q, one_hot)]
    )
    for rows, z in groups:
        numbers = [(rows.T @ rows)[np.tril_indices(J)], (z.T @ rows).ravel(), (z.T @ z).ravel()]
        outer.update(hashlib.sha256(np.concatenate(numbers).astype("<i8").tobytes()).digest())
    return outer.hexdigest()


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("J", [1, 5, 130])
def test_digest_can_be_computed_without_us(per_class, J):
    x, y = samples(200, J)
    stats = Statistics(J, 3, grid=GRID, per_class=per_class).add(x, y)
    assert stats.digest() == independent_digest(x.numpy(), y.numpy(), 3, 8.0, 20, per_class)
    stats.remove(x[:50], y[:50])
    assert stats.digest() == independent_digest(x[50:].numpy(), y[50:].numpy(), 3, 8.0, 20, per_class)


def test_only_what_changed_is_hashed_again():
    x, y = samples(300, 5)
    stats = Statistics(5, 3, grid=GRID, per_class=True).add(x, y)
    before = stats.digest()
    hashes = dict(stats.group_hashes)

    def hashed_again():
        return [group for group, hash_ in stats.group_hashes.items() if hash_ is not hashes[group]]

    assert stats.digest() == before
    assert hashed_again() == []
    one = int((y == 1).nonzero()[0])
    stats.remove(x[one : one + 1], y[one : one + 1])
    assert stats.digest() != before
    assert hashed_again() == [1]


def test_digest_tells_grid_shape_and_data_apart():
    x, y = samples(20)
    digests = {
        Statistics(5, 3, grid=GRID).add(x, y).digest(),
        Statistics(5, 3, grid=FixedPoint(16.0)).add(x, y).digest(),
        Statistics(5, 3, grid=FixedPoint(8.0, bits=19)).add(x, y).digest(),
        Statistics(5, 4, grid=GRID).add(x, y).digest(),
        Statistics(5, 3, grid=GRID, per_class=True).add(x, y).digest(),
        Statistics(5, 3, grid=GRID).add(x, (y + 1) % 3).digest(),
        Statistics(5, 3, grid=GRID).add(x[1:], y[1:]).digest(),
        Statistics(5, 3, grid=GRID).digest(),
    }
    assert len(digests) == 8


counts = st.lists(st.integers(0, 29), max_size=40)


@given(a=counts, b=counts, c=counts, per_class=st.booleans(), folds=st.sampled_from([0, 3]), values=st.booleans())
@settings(max_examples=60, deadline=None)
def test_group_laws(a, b, c, per_class, folds, values):
    x, y = samples(30)
    if values:
        per_class, y = False, torch.randn(30, 3, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(30)

    def build(index):
        stats = Statistics(5, 3, grid=GRID, target_grid=GRID, per_class=per_class, folds=folds)
        return stats.add(x[index], y[index], ids=ids[index])

    A, B, C = build(a), build(b), build(c)
    zero = A.zero()
    assert A + B == B + A == build(a + b)
    assert (A + B) + C == A + (B + C)
    assert A + zero == A
    assert zero == A - A
    inverse = -A
    assert -inverse == A
    assert A - B == A + (-B)
    assert (A + B - B).digest() == A.digest()
    assert A.copy() == A


def test_empty_means_as_new():
    """With nothing held, nothing that the data decided is left: grid and kind are open again."""
    x, y = samples(10)
    stats = Statistics(5, 3)
    before = stats.digest()
    stats.add(x * 100, y)
    assert stats.grid is not None
    assert stats.remove(x * 100, y).digest() == before
    assert stats.grid is None
    assert stats.add(x, torch.randn(10, 3)).kind == "values"


def test_values_statistics():
    x, _ = samples(30)
    t = torch.randn(30, 2, generator=torch.Generator().manual_seed(5))
    stats = Statistics(5, 2, grid=GRID, target_grid=GRID).add(x, t)
    q, s = GRID.quantize(x).long(), GRID.quantize(t).long()
    assert torch.equal(stats.V, torch.cat([q, torch.ones(30, 1).long()], 1).T @ s)
    assert torch.equal(stats.T, (s * s).sum(0))


@pytest.mark.parametrize("outlier", [None, 8.0, 900.0])
def test_many_rows_at_once_sum_as_few_do(outlier):
    """A large batch, also with a row that is far out, has the sums of its parts."""
    x, y = samples(6000)
    if outlier:
        x[1234, 2] = outlier
    grid = FixedPoint(1024.0, bits=26)
    for per_class in (True, False):
        at_once = Statistics(5, 3, grid=grid, per_class=per_class).add(x, y)
        parts = Statistics(5, 3, grid=grid, per_class=per_class)
        for a in range(0, 6000, 500):
            parts.add(x[a : a + 500], y[a : a + 500])
        assert at_once.digest() == parts.digest() == independent_digest(x, y, 3, 1024.0, 26, per_class)
    for bad in (float("nan"), float("inf")):
        x[77, 1] = bad
        with pytest.raises(ValueError, match=r"1 NaN or inf value\(s\), the first at index \(77, 1\)"):
            Statistics(5, 3, grid=grid).add(x, y)
