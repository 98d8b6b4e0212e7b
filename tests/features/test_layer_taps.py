"""LayerTaps: which layers are found, how they are pooled, and that each feature is a function of one sample alone."""

import threading

import pytest
import torch
from torch import nn

from tests.support.networks import IMAGES, LABELS, Network, Tokens, network
from torchlssvm import attach
from torchlssvm.features import LayerTaps


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        ("last", ["stage2.0"]),
        ("blocks", ["stage1.0", "stage1.1", "stage2.0"]),
        ("all", ["stage1.0.relu", "stage1.0", "stage1.1.relu", "stage1.1", "stage2.0.relu", "stage2.0"]),
        (["stem", "stage?.0"], ["stem", "stage1.0", "stage2.0"]),
        ("stage1.0.relu", ["stage1.0.relu", "stage1.0.relu:2"]),
    ],
)
def test_layers_are_found(layers, taps):
    found = LayerTaps(network(), layers)
    assert list(found.groups) == taps
    assert found(IMAGES).shape == (12, found.out_features)


@pytest.mark.parametrize(
    ("name", "blocks", "J"), [("mobilenet_v2", 19, 2816), ("resnet18", 8, 1920), ("squeezenet1_1", 8, 2560)]
)
def test_blocks_of_torchvision(name, blocks, J):
    models = pytest.importorskip("torchvision", reason="torchvision is not installed").models
    taps = LayerTaps(getattr(models, name)(), "blocks")
    assert (len(taps.groups), taps.out_features) == (blocks, J)


def test_all_layers_of_mobilenet():
    """Outputs of blocks, and the expanded layer inside each block."""
    models = pytest.importorskip("torchvision", reason="torchvision is not installed").models
    taps = LayerTaps(models.mobilenet_v2(), "all", max_features=None)
    inside = [name for name in taps.groups if name.count(".") > 1]
    expanded = 32 + 96 + 2 * 144 + 3 * 192 + 4 * 384 + 3 * 576 + 3 * 960
    assert inside[1:] == [f"features.{i}.conv.1.2" for i in range(2, 18)]
    assert (len(taps.groups), taps.out_features) == (19 + 17, 2816 + expanded)


def test_pooling():
    """Mean, deviation and cells, as computed by hand from the layer's own output."""
    model = network()
    with torch.no_grad():
        value = model.stage1(model.stem(IMAGES)).double()
    taps = LayerTaps(model, ["stage1.1"], ("mean", "std", "grid2"), normalize=None)
    cells = nn.functional.adaptive_avg_pool2d(value, 2).flatten(1)
    truth = torch.cat([value.mean((2, 3)), value.std((2, 3), correction=0), cells], 1)
    torch.testing.assert_close(taps(IMAGES), truth, rtol=1e-12, atol=1e-12)
    unit = LayerTaps(model, ["stage1.1"], ("mean", "std", "grid2"))
    torch.testing.assert_close(unit(IMAGES), truth / truth.norm(dim=1, keepdim=True), rtol=1e-12, atol=1e-12)
    root = truth.sign() * truth.abs().sqrt()
    rooted = LayerTaps(model, ["stage1.1"], ("mean", "std", "grid2"), normalize="sqrt")
    torch.testing.assert_close(rooted(IMAGES), root / root.norm(dim=1, keepdim=True), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pool", ["mean", "std", "cls"])
def test_padding_does_not_count(pool):
    torch.manual_seed(2)
    taps = LayerTaps(Tokens().double(), "blocks", pool, example={"input_ids": torch.zeros(1, 3, dtype=torch.int64)})
    ids = torch.tensor([[1, 2, 3]])
    padded = {"input_ids": torch.tensor([[1, 2, 3, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}
    assert list(taps.groups) == ["layer.0", "layer.1"]
    left = {"input_ids": torch.tensor([[0, 0, 1, 2, 3]]), "attention_mask": torch.tensor([[0, 0, 1, 1, 1]])}
    for batch in (padded, left):
        torch.testing.assert_close(taps({"input_ids": ids}), taps(batch), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_nested_tensors_of_an_encoder_are_padded_again():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 16)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

        def forward(self, input_ids, attention_mask):
            return self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)

    ids = torch.randint(1, 10, (4, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(6) < torch.tensor([6, 4, 5, 3])[:, None]
    taps = LayerTaps(Encoder().eval(), example={"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    whole = taps({"input_ids": ids, "attention_mask": mask})
    alone = taps({"input_ids": ids[1:2, :4], "attention_mask": mask[1:2, :4]})
    torch.testing.assert_close(whole[1:2], alone, rtol=1e-5, atol=1e-6)


def test_pictures_that_are_not_square():
    """A layer with as many channels as rows is no layer with channels last."""
    taps = LayerTaps(network(), "blocks", ("mean", "std"))
    model, wide = network(), torch.randn(2, 3, 8, 12)
    with torch.no_grad():
        value = model.stage1[0](model.stem(wide)).double()
    assert value.shape == (2, 6, 6, 10)
    truth = torch.cat([value.mean((2, 3)), value.std((2, 3), correction=0)], 1)
    torch.testing.assert_close(taps(wide)[:, :12], nn.functional.normalize(truth), rtol=1e-6, atol=1e-7)


def test_a_budget_of_columns():
    """Groups share it by width, the sum is within it, and a row is projected to the same bits in any batch."""
    model = network()
    taps = LayerTaps(model, "all", ("mean", "std"), max_features=20)
    assert taps.out_features <= 20
    assert {s.stop - s.start for s in taps.groups.values()} == {3}
    values = taps(IMAGES)
    one = torch.cat([taps(image[None]) for image in IMAGES])
    torch.testing.assert_close(values, one, rtol=1e-5, atol=1e-6)  # the network's own rounding
    assert torch.equal(LayerTaps(network(), "all", ("mean", "std"), max_features=20)(IMAGES), values)
    assert not torch.equal(LayerTaps(network(), "all", ("mean", "std"), max_features=20, seed=1)(IMAGES), values)
    with pytest.raises(ValueError, match="max_features=5"):
        LayerTaps(model, "all", max_features=5)


def test_a_projection_keeps_distances():
    """Signs with M columns keep a squared length to within a few 1/sqrt(M)."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 2000, 1), nn.ReLU())
    whole, projected = (LayerTaps(model, "blocks", max_features=m)(IMAGES) for m in (None, 1000))
    assert projected.shape == (12, 1000)
    lengths = (whole[:1] - whole[1:]).norm(dim=1), (projected[:1] - projected[1:]).norm(dim=1)
    torch.testing.assert_close(lengths[1], lengths[0], rtol=0.2, atol=0.0)


@pytest.mark.parametrize("deterministic", [True, 4])
def test_a_head_on_taps_unlearns(deterministic):
    """Features have the same bits in batches of any size and order."""
    options = {"layers": "all", "pool": ("mean", "std"), "max_features": 24, "views": ("flip",)}
    options |= {"grid": 2.0, "deterministic": deterministic, "rho": 1.0}
    clf, never = attach(network(), 3, **options), attach(network(), 3, **options)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    parts = torch.cat([clf.features(images) for images in IMAGES[order].split(5)])
    assert torch.equal(parts, clf.features(IMAGES.to(memory_format=torch.channels_last))[order])
    clf.add(IMAGES, LABELS)
    never.add(IMAGES[4:], LABELS[4:])
    clf.remove(IMAGES[:4], LABELS[:4])
    assert clf.head.digest() == never.head.digest()


def test_the_network_is_frozen_and_saved():
    taps = LayerTaps(network().train(), "blocks", max_features=4)
    assert not taps.model.training
    assert not any(p.requires_grad for p in taps.parameters())
    assert taps.train().training
    assert not taps.model.training
    assert LayerTaps(network().bfloat16(), "blocks")(IMAGES.bfloat16()).dtype == torch.float64
    again = LayerTaps(Network(), "blocks", max_features=4)
    again.load_state_dict(taps.state_dict())
    assert torch.equal(again(IMAGES), taps(IMAGES))


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"layers": ["nothing"]}, "'nothing'"),
        ({"pool": "max"}, "'max'"),
        ({"pool": ()}, "pool"),
        ({"normalize": "std"}, "'std'"),
        ({"max_features": 0}, "max_features"),
    ],
)
def test_bad_options(options, fact):
    with pytest.raises(ValueError, match=fact):
        LayerTaps(network(), **options)


def test_what_has_no_layers():
    with pytest.raises(ValueError, match="no chain of blocks"):
        LayerTaps(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="example="):
        LayerTaps(nn.Sequential(nn.Flatten(), nn.ReLU()))
    with pytest.raises(ValueError, match="example="):
        LayerTaps(Tokens())
    with pytest.raises(ValueError, match=r"model\.module"):
        LayerTaps(nn.DataParallel(network()))
    taps = LayerTaps(network(), "blocks")
    taps.model.stage2.forward = lambda x: x
    with pytest.raises(ValueError, match=r"stage2\.0"):
        taps(IMAGES)


def test_threads_share_a_network() -> None:
    """Each thread gets the features of its own batch, whatever the others run through the same layers."""
    torch.manual_seed(0)
    network = nn.Sequential(*[nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()) for _ in range(6)])
    taps = LayerTaps(network, [str(i) for i in range(6)], example=torch.randn(2, 3, 16, 16))
    batches = [torch.randn(4, 3, 16, 16) for _ in range(3)]
    expected = [taps(x) for x in batches]
    wrong: list[int] = []

    def run(i: int) -> None:
        wrong.extend(i for _ in range(60) if not torch.allclose(taps(batches[i]), expected[i], atol=1e-6))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
