"""The most helpful and most harmful samples, against retraining without each of them."""

import pytest
import torch
from torch import Tensor

from tests.conftest import solve_dense
from torchlssvm import FixedPoint, LSSVMHead

GRID = FixedPoint(16.0)
N, J, K, V = 60, 5, 3, 40


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    y, labels = torch.arange(N) % K, torch.arange(V) % K
    x, z = (torch.randn(len(t), J).double() + 5 * torch.nn.functional.one_hot(t, J) for t in (y, labels))
    given = y.clone()
    given[[4, 17]] = (given[[4, 17]] + 1) % K
    return GRID.snap(x), given, z, labels


def retrained(x: Tensor, y: Tensor, z: Tensor, labels: Tensor, on: str) -> float:
    w, b = solve_dense(x, y, K, rho=0.5)
    scores = z @ w + b
    if on == "accuracy":
        return float((scores.argmax(1) == labels).double().mean())
    return float((2 * torch.nn.functional.one_hot(labels, K) - 1 - scores).square().mean())


@pytest.mark.parametrize("on", ["loss", "accuracy"])
def test_the_ends_are_those_of_retraining(data, on) -> None:
    x, y, z, labels = data
    z = (
        z if on == "loss" else z + 4 * torch.randn(V, J, generator=torch.Generator().manual_seed(1))
    )  # some wrong by a little
    head = LSSVMHead(J, K, rho=0.5, grid=GRID).add(x, y)
    found = head.most_influential(x, y, z, labels, 8, on=on, ids=[f"s{i}" for i in range(N)])
    base = retrained(x, y, z, labels, on)
    keep = [torch.arange(N) != i for i in range(N)]
    worse = torch.tensor([retrained(x[k], y[k], z, labels, on) - base for k in keep], dtype=torch.float64)
    worse = worse if on == "loss" else -worse  # how much worse the model is without each sample
    assert torch.allclose(worse[found.helpful], found.help, rtol=0, atol=1e-8)
    assert torch.allclose(-worse[found.harmful], found.harm, rtol=0, atol=1e-8)
    for ends, amount in ((found.helpful, worse), (found.harmful, -worse)):
        assert 0 < len(ends) == min(8, int((amount > 1e-12).sum()))
        assert torch.allclose(amount[ends], amount.sort(descending=True).values[: len(ends)], rtol=0, atol=1e-8)
    assert (found.help > 0).all()
    assert (found.harm > 0).all()
    assert found.helpful_ids == tuple(f"s{i}" for i in found.helpful.tolist())
    assert found.harmful_ids == tuple(f"s{i}" for i in found.harmful.tolist())
    if on == "loss":
        assert {4, 17} <= set(found.harmful.tolist())  # the wrong labels
        assert len(found.helpful) == len(found.harmful) == 8


def test_groups_relabelling_and_adding(data) -> None:
    x, y, z, labels = data
    head = LSSVMHead(J, K, rho=0.5, grid=GRID).add(x, y)
    base = retrained(x, y, z, labels, "loss")
    users = [f"user {i // 12}" for i in range(N)]
    found = head.most_influential(x, y, z, labels, 5, groups=users)
    assert set(found.helpful_ids) | set(found.harmful_ids) == set(users)
    for name, amount in zip(found.harmful_ids, found.harm, strict=True):
        keep = torch.tensor([u != name for u in users])
        assert base - retrained(x[keep], y[keep], z, labels, "loss") == pytest.approx(float(amount), abs=1e-8)
    new = torch.where(torch.isin(torch.arange(N), torch.tensor([4, 17])), (y - 1) % K, (y + 1) % K)
    assert set(head.most_influential(x, y, z, labels, 2, "relabel", y_new=new).harmful.tolist()) == {4, 17}
    more, wrong = GRID.snap(z[:6]), (labels[:6] + 1) % K
    both = torch.cat([more, more]), torch.cat([labels[:6], wrong])
    found = head.most_influential(*both, z, labels, 12, "add")
    assert all(i >= 6 for i in found.harmful[:3].tolist())
    first = int(found.harmful[0])
    after = retrained(torch.cat([x, both[0][first][None]]), torch.cat([y, both[1][first][None]]), z, labels, "loss")
    assert after - base == pytest.approx(float(found.harm[0]), abs=1e-8)


def test_bad_questions(data) -> None:
    x, y, z, labels = data
    head = LSSVMHead(J, K, grid=GRID, rho=1.0).add(x, y)
    digest = head.digest()
    for match, options in (
        ("count must be an integer", {"count": 0}),
        ("on must be one of", {"on": "scores"}),
        ("what must be one of", {"what": "forget"}),
        ("x and ids differ in length", {"ids": range(3)}),
    ):
        with pytest.raises(ValueError, match=match):
            head.most_influential(x, y, z, labels, **options)
    with pytest.raises(ValueError, match="x_val holds no samples"):
        head.most_influential(x, y, x[:0], y[:0])
    assert head.digest() == digest
