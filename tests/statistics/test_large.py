"""Many features: sums are kept once, and what does not fit is refused with the number of bytes."""

import re

import pytest
import torch

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.errors import OutOfMemoryError
from torchlssvm.functional import gram
from torchlssvm.statistics import accumulator


def story(**options):
    """Digest and weights after changes of every kind."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(900, 100, generator=generator).clamp(-7, 7), torch.arange(900) % 3
    weight = torch.arange(900) % 3 + 1
    head = LSSVMHead(100, 3, grid=FixedPoint(8.0), **options).add(x[:300], y[:300])
    _ = head.w
    head.add(x[300:340], y[300:340])
    _ = head.w
    head.add(x[340:], y[340:], weight[340:]).remove(x[:5], y[:5]).relabel(x[6:9], y[6:9], (y[6:9] + 1) % 3)
    head.remove(x[20:290], y[20:290])
    with pytest.raises(ValueError, match="not held"):
        head.remove(x[:700], y[:700])
    return head.digest(), head.w.clone(), head.statistics.M.clone()


@pytest.mark.parametrize("options", [{}, {"per_class": True}, {"class_weight": "balanced"}, {"scale": "std"}])
def test_sums_that_are_kept_once_are_the_same(options, monkeypatch):
    """The thresholds, lowered: nothing public shows which way sums are made."""
    digest, w, M = story(**options)
    monkeypatch.setattr(accumulator, "DIRECT_NUMBERS", 10)
    other = story(**options)
    assert other[0] == digest
    assert torch.equal(other[2], M)
    assert torch.allclose(other[1], w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("J", "R"), [(1, 0), (47, 1), (49, 3), (700, 2), (1500, 1)])
def test_products_added_strip_by_strip(J, R):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-50, 50, (37, J + R), generator=generator).double()
    times = torch.randint(1, 3, (37,), generator=generator).double()
    total = torch.zeros(gram.packed_size(J, R), dtype=torch.int64)
    gram.add_products_(total, rows, J, rows * times[:, None], -1.0)
    whole = rows.long()
    exact = -(whole * times.long()[:, None]).mT @ whole[:, :J]
    assert torch.equal(gram.unpack(total, J), exact[:J])
    assert torch.equal(gram.side_view(total, J, R), exact[J:])


def test_what_does_not_fit_says_how_much_it_needs():
    J = 300_000
    head = LSSVMHead(J, 2, grid=FixedPoint(8.0))
    with pytest.raises(OutOfMemoryError, match=r"needs [\d,]+ bytes on cpu, where [\d,]+ are free") as error:
        head.add(torch.zeros(2, J), torch.tensor([0, 1]))
    needed = int(re.search(r"needs ([\d,]+) bytes", str(error.value))[1].replace(",", ""))
    assert 12 * J * J < needed < 13 * J * J
    assert isinstance(error.value, MemoryError)
    assert head.n == 0
