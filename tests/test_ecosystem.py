"""State that survives what PyTorch does to modules: DDP, autocast, inference mode, gradients, odd inputs."""

import numpy as np
import pytest
import torch
from torch import nn

from torchlssvm import FixedPoint, LSSVMHead

GRID = FixedPoint(8.0)


def samples(n=60, J=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, J, generator=generator), torch.arange(n) % 3


class Network(nn.Module):
    """A trained layer, so that DDP accepts the module, and a head."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.head = LSSVMHead(8, 3, grid=GRID)

    def forward(self, x):
        return self.layer(x).sum() + 0 * self.head(x).sum()


def rank_main(rank, world, store, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    network = Network()
    x, y = samples()
    mine = slice(0, 40) if rank == 0 else slice(40, 60)  # uneven on purpose
    network.head.add(x[mine], y[mine])
    digest, scores = network.head.digest(), network.head(x).clone()
    ddp = nn.parallel.DistributedDataParallel(network)
    for _ in range(3):
        ddp(x).backward()  # each forward copies rank 0's buffers over this rank's
    after = network.head(x)
    held = network.head.n, network.head.digest() == digest, torch.equal(after, scores)
    network.head.remove(x[mine][:5], y[mine][:5])
    fresh = LSSVMHead(8, 3, grid=GRID).add(x[mine][5:], y[mine][5:])
    results[rank] = (
        *held,
        network.head.digest() == fresh.digest(),
        bool((network.head.w - fresh.w).abs().max() < 1e-12),
    )
    torch.distributed.destroy_process_group()


def test_ddp_buffer_broadcast_is_harmless(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(rank_main, (2, tmp_path / "store", results), nprocs=2)
        assert results[0] == (40, True, True, True, True)
        assert results[1] == (20, True, True, True, True)


@pytest.mark.parametrize("statistics", [True, False])
def test_overwritten_buffers_change_nothing(statistics):
    """What DDP does, in one process: buffers are copies, and are published again."""
    x, y = samples()
    head = LSSVMHead(8, 3, grid=GRID, statistics=statistics).add(x, y)
    w, scores = head.w.clone(), head(x).clone()
    for buffer in head.buffers():
        buffer.fill_(7.0)
    assert torch.equal(head(x), scores)
    assert torch.equal(head.w, w)
    reference = head.w
    head.remove(x[:4], y[:4])
    assert head.w is reference  # written in place: references held elsewhere stay valid


def test_autocast_changes_no_bit():
    x, y = samples()
    plain, cast = LSSVMHead(8, 3, grid=GRID).add(x, y), LSSVMHead(8, 3, grid=GRID)
    with torch.autocast("cpu", torch.bfloat16):
        cast.add(x, y)
        scores = cast(x)
        w = cast.w.clone()
    assert cast.digest() == plain.digest()
    assert torch.equal(scores, plain(x))
    assert torch.equal(w, plain.w)


def test_inference_mode_then_normal():
    x, y = samples()
    head = LSSVMHead(8, 3, grid=GRID)
    with torch.inference_mode():
        head.add(x[:50].clone(), y[:50].clone())
        head(x)
        head.remove(x[:3], y[:3])
        _ = head.C
    head.add(x[50:], y[50:]).remove(x[3:5], y[3:5])
    fresh = LSSVMHead(8, 3, grid=GRID).add(x[5:], y[5:])
    assert head.digest() == fresh.digest()
    assert torch.allclose(head.w, fresh.w, atol=1e-12)


def test_gradients_reach_the_input_but_not_the_head():
    x, y = samples()
    head = LSSVMHead(8, 3, grid=GRID).add(x.requires_grad_(), y)
    z = torch.randn(5, 8, requires_grad=True)
    head(z)[:, 1].sum().backward()
    assert torch.allclose(z.grad.double(), head.w[:, 1].expand(5, 8), atol=1e-6)
    assert list(head.parameters()) == []
    assert not head.w.requires_grad


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        lambda x: x.double(),
        lambda x: x.T.contiguous().T,
        lambda x: torch.cat([x, x], 1)[:, :8],
        lambda x: nn.Parameter(x),
    ],
    ids=["numpy", "lists", "float64", "column-major", "strided", "parameter"],
)
def test_the_same_values_in_any_form(change):
    x, y = samples()
    x = x.half().float()
    assert (
        LSSVMHead(8, 3, grid=GRID).add(change(x), y.numpy()).digest() == LSSVMHead(8, 3, grid=GRID).add(x, y).digest()
    )
    assert LSSVMHead(8, 3, grid=GRID).add(x.half(), y.int()).digest() == LSSVMHead(8, 3, grid=GRID).add(x, y).digest()


def test_integer_features():
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (60, 8), dtype=np.uint8))
    y = torch.arange(60) % 3
    grid = FixedPoint(256.0)
    assert LSSVMHead(8, 3, grid=grid).add(x, y).digest() == LSSVMHead(8, 3, grid=grid).add(x.float(), y).digest()


def test_in_a_sequential():
    x, y = samples()
    network = nn.Sequential(nn.ReLU(), LSSVMHead(8, 3, grid=GRID))
    network[1].add(network[0](x), y)
    assert network(x).shape == (60, 3)
    assert {"1.w", "1.b", "1.C"} <= set(dict(network.named_buffers()))
    assert torch.equal(dict(network.named_buffers())["1.w"], network[1].w)
