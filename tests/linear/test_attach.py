"""attach: the right layer goes, the features are those it used to see, and the rest never moves again."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchlssvm import FixedPoint, RemovalError
from torchlssvm.linear.attach import AttachedClassifier, attach


class Recorder(nn.Module):
    """A head that writes down what it is asked."""

    def __init__(self, in_features: int | None = None, num_classes: int | None = None) -> None:
        super().__init__()
        if in_features is not None:
            self.in_features = in_features
        if num_classes is not None:
            self.num_classes = num_classes
        self.calls: list[tuple[Any, ...]] = []

    def add(self, x: Tensor, y: Tensor, **options: Any) -> Recorder:
        self.calls.append(("add", x, y, options))
        return self

    def remove(self, x: Tensor, y: Tensor, **options: Any) -> Recorder:
        self.calls.append(("remove", x, y, options))
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2] * 2

    def predict(self, x: Tensor) -> Tensor:
        return self(x).argmax(1)


class Named(nn.Module):
    """A convolution, BatchNorm, and a last linear layer under any name; `after` is applied to the scores in forward."""

    def __init__(self, name: str = "fc", after: Any = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.bn = nn.BatchNorm2d(6)
        self.name, self.after = name, after
        setattr(self, name, nn.Linear(6, 10))

    def forward(self, x: Tensor) -> Any:
        x = getattr(self, self.name)(torch.relu(self.bn(self.conv(x))).mean((2, 3)))
        return x if self.after is None else self.after(x)


def layer_input(model: nn.Module, path: str, images: Tensor) -> Tensor:
    """What goes into the layer at `path` when the untouched model runs in eval mode."""
    seen: list[Tensor] = []
    handle = model.get_submodule(path).register_forward_hook(lambda _module, args, _out: seen.append(args[0]))
    with torch.no_grad():
        model.eval()(images)
    handle.remove()
    return seen[0].clone()


def state(model: nn.Module) -> dict[str, Any]:
    """Everything attach could change: tensors, gradient flags, modes and the modules themselves."""
    return {
        "tensors": {k: (v.clone(), v.requires_grad) for k, v in [*model.named_parameters(), *model.named_buffers()]},
        "modules": {k: (m, m.training) for k, m in model.named_modules()},
    }


def assert_same_state(model: nn.Module, before: dict[str, Any]) -> None:
    after = state(model)
    assert after["modules"] == before["modules"]
    assert list(after["tensors"]) == list(before["tensors"])
    for name, (value, grad) in after["tensors"].items():
        value_before, grad_before = before["tensors"][name]
        assert torch.equal(value, value_before), name
        assert grad == grad_before, name


def small_network() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 100))


# ---------------------------------------------------------------------------------------------- torchvision and timm

TORCHVISION = [
    ("alexnet", "classifier.6", 4096, 64),
    ("convnext_tiny", "classifier.2", 768, 32),
    ("densenet121", "classifier", 1024, 32),
    ("efficientnet_b0", "classifier.1", 1280, 32),
    ("googlenet", "fc", 1024, 32),
    ("mnasnet0_5", "classifier.1", 1280, 32),
    ("mobilenet_v2", "classifier.1", 1280, 32),
    ("mobilenet_v3_small", "classifier.3", 1024, 32),
    ("regnet_y_400mf", "fc", 440, 32),
    ("resnet18", "fc", 512, 32),
    ("shufflenet_v2_x0_5", "fc", 1024, 32),
    ("squeezenet1_1", "classifier.1", 512, 32),
    ("swin_t", "head", 768, 32),
    ("vit_b_32", "heads.head", 768, 32),
]


@pytest.mark.parametrize(("name", "path", "width", "size"), TORCHVISION, ids=[case[0] for case in TORCHVISION])
def test_torchvision_features_are_the_inputs_of_the_old_layer(name: str, path: str, width: int, size: int) -> None:
    models = pytest.importorskip("torchvision.models")
    options: dict[str, Any] = {"image_size": size} if name == "vit_b_32" else {}
    if name == "googlenet":
        options = {"init_weights": False}
    torch.manual_seed(0)
    model = models.get_model(name, weights=None, **options)
    images = torch.randn(2, 3, size, size)
    expected = layer_input(model, path, images)
    if name == "squeezenet1_1":  # its layer is a convolution over an image that is pooled afterwards
        expected = nn.functional.adaptive_avg_pool2d(expected, 1).flatten(1)
    others = [key for key in model.state_dict() if not key.startswith(path + ".")]

    clf = attach(model.train(), 3, head=Recorder())

    assert clf.backbone is model
    assert clf.in_features == width
    assert isinstance(model.get_submodule(path), nn.Identity)
    assert list(model.state_dict()) == others
    got = clf.features(images)
    assert got.shape == (2, width)
    assert torch.equal(got, expected)
    assert not got.requires_grad
    assert not any(p.requires_grad for p in clf.parameters())

    buffers = {key: value.clone() for key, value in clf.named_buffers()}
    clf.train()
    clf(images)
    assert not any(module.training for module in clf.backbone.modules())
    assert all(torch.equal(value, buffers[key]) for key, value in clf.named_buffers())
    assert torch.equal(clf.features(images), expected)


@pytest.mark.parametrize(
    ("name", "num_classes", "width"),
    [
        # Its num_features is not what its classifier takes: a hidden layer lies between.
        ("mobilenetv3_small_050", 1000, 1024),
        ("mobilenetv3_small_050", 0, 1024),
        ("deit_tiny_distilled_patch16_224", 1000, 192),  # two classifiers
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_timm(name: str, num_classes: int, width: int, wrapped: bool) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=num_classes).eval()
    images = torch.randn(2, 3, *((224, 224) if "224" in name else (32, 32)))
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(images), pre_logits=True)
    clf = attach(nn.Sequential(nn.Identity(), model, nn.Softmax(1)) if wrapped else model, 3, head=Recorder())
    assert clf.in_features == width
    assert torch.equal(clf.features(images), expected)
    clf.train()
    assert torch.equal(clf.features(images), expected)


# ------------------------------------------------------------------------------------------- Sequential and own models


def sequential_cases() -> dict[str, tuple[nn.Module, str]]:
    def body() -> list[nn.Module]:
        return [nn.Flatten(), nn.Linear(12, 5), nn.ReLU()]

    relu = nn.ReLU()
    named = nn.Sequential()
    named.add_module("body", nn.Sequential(*body()))
    named.add_module("scores", nn.Linear(5, 7))
    return {
        "plain": (nn.Sequential(*body(), nn.Linear(5, 7)), "3"),
        "softmax": (nn.Sequential(*body(), nn.Linear(5, 7), nn.Softmax(1)), "3"),
        "several": (nn.Sequential(*body(), nn.Linear(5, 7), nn.Dropout(), nn.LogSoftmax(1), nn.Flatten()), "3"),
        "nested": (nn.Sequential(nn.Sequential(*body()), nn.Sequential(nn.Dropout(), nn.Linear(5, 7))), "1.1"),
        "nested-activation": (nn.Sequential(*body(), nn.Sequential(nn.Linear(5, 7), nn.ReLU()), nn.Sigmoid()), "3.0"),
        "activations-of-their-own": (nn.Sequential(*body(), nn.Linear(5, 7), nn.Sequential(nn.Softmax(1))), "3"),
        "shared-activation": (nn.Sequential(nn.Flatten(), nn.Linear(12, 5), relu, nn.Linear(5, 7), relu), "3"),
        "named": (named, "scores"),
        "no-bias": (nn.Sequential(*body(), nn.Linear(5, 7, bias=False)), "3"),
    }


@pytest.mark.parametrize("case", sequential_cases())
def test_sequential(case: str) -> None:
    torch.manual_seed(0)
    model, path = sequential_cases()[case]
    images = torch.randn(4, 3, 2, 2)
    expected = layer_input(model, path, images)
    clf = attach(model, 2, head=Recorder())
    assert isinstance(model.get_submodule(path), nn.Identity)
    assert torch.equal(clf.features(images), expected)
    assert expected.shape == (4, 5)
    assert torch.equal(clf.backbone(images), expected)  # nothing is left behind the layer


def test_bare_linear() -> None:
    linear = nn.Linear(4, 9)
    before = state(linear)
    clf = attach(linear, 2, head=Recorder())
    x = torch.randn(3, 4, requires_grad=True)
    assert torch.equal(clf.features(x), x)
    assert not clf.features(x).requires_grad
    assert clf.in_features == 4
    assert isinstance(clf.backbone, nn.Identity)
    assert_same_state(linear, before)


@pytest.mark.parametrize("name", ["fc", "fc3", "classifier", "head", "last_linear", "output", "_fc"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_layer_is_found_by_its_name(name: str, inside: bool) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Named(name)
            self.loss = nn.CrossEntropyLoss()

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    path = f"model.{name}" if inside else name
    model, images = Wrapper() if inside else Named(name), torch.randn(2, 3, 5, 5)
    expected = layer_input(model, path, images)
    clf = attach(model, 2, head=Recorder(), layer=path if inside and name == "_fc" else None)
    assert isinstance(model.get_submodule(path), nn.Identity)
    assert torch.equal(clf.features(images), expected)


class OwnForward(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x)) + 1


UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    "norm last": lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)),
    "statistics last": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False)),
    "PReLU last": lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU()),
    "own Sequential": lambda: OwnForward(nn.Linear(4, 3), nn.Linear(3, 2)),
    "no parameters": lambda: nn.Sequential(nn.Flatten(), nn.ReLU()),
    "empty": nn.Sequential,
    "convolution not pooled": lambda: nn.Sequential(nn.Conv2d(3, 4, 1)),
    "convolution not 1x1": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1)),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown_architecture_says_how_and_is_unchanged(case: str) -> None:
    model = UNKNOWN[case]()
    before = state(model)
    with pytest.raises(ValueError, match=r"attach\(backbone, num_classes, in_features=512\)") as error:
        attach(model, 2, head=Recorder())
    assert type(model).__name__ in str(error.value)
    assert_same_state(model, before)


def test_a_network_attached_twice_has_the_same_features() -> None:
    """A cell of a notebook that runs again must not take off the next layer."""
    network = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3), nn.Softmax(1))
    x = torch.randn(5, 6)
    first, second = attach(network, 2), attach(network, 2)
    assert first.in_features == second.in_features == 4
    assert torch.equal(first.features(x), second.features(x))


@pytest.mark.parametrize("after", [lambda x: x.log_softmax(1), lambda x: x / 2])
def test_a_softmax_written_in_forward_is_noticed(after: Any) -> None:
    clf = attach(Named("fc", after), 2, head=Recorder())
    for _ in range(2):  # again, as nothing was proven by the first
        with pytest.raises(ValueError, match=r"changes what comes out of 'fc'.*in_features=6"):
            clf.add(torch.randn(2, 3, 5, 5), torch.tensor([0, 1]))
    assert clf.head.calls == []
    assert attach(clf.backbone, 2, head=Recorder(), in_features=6).features(torch.randn(2, 3, 5, 5)).shape == (2, 6)


def test_a_layer_that_is_not_used_is_noticed() -> None:
    class Unused(Named):
        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.conv(x)).mean((2, 3))

    with pytest.raises(ValueError, match="does not use 'fc'"):
        attach(Unused(), 2, head=Recorder()).features(torch.randn(2, 3, 5, 5))


def test_nan_features_are_left_to_the_head() -> None:
    clf = attach(small_network(), 2, head=Recorder())
    assert clf.features(torch.full((2, 12), float("nan"))).isnan().all()


# ------------------------------------------------------------------------------------------------- a backbone by hand


def test_backbone_by_hand_is_used_as_it_is() -> None:
    backbone = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1))
    modules = list(backbone)
    clf = attach(backbone, 2, head=Recorder(), in_features=6)
    assert clf.backbone is backbone
    assert list(backbone) == modules
    assert not any(p.requires_grad for p in backbone.parameters())
    assert not backbone[1].training
    images = torch.randn(2, 3, 5, 5)
    assert torch.equal(clf.features(images), backbone(images).flatten(1))  # (B, J, 1, 1) -> (B, J)


@pytest.mark.parametrize(
    ("backbone", "fact"),
    [
        (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 100)), r"gave \(2, 100\).*\(B, 6\)"),
        (lambda: nn.Conv2d(3, 6, 3), r"gave \(2, 6, 3, 3\).*\(B, 6\)"),
        (lambda: Named("fc", lambda x: (x, x)), r"\(B, 6\).*tuple"),
    ],
)
def test_backbones_that_give_no_features(backbone: Any, fact: str) -> None:
    clf = attach(backbone(), 2, head=Recorder(), in_features=6)
    with pytest.raises(ValueError, match=fact):
        clf.add(torch.randn(2, 3, 5, 5), torch.zeros(2, dtype=torch.long))
    assert clf.head.calls == []


def test_dict_outputs_are_taken_by_key() -> None:
    images = torch.randn(2, 3, 5, 5)
    expected = attach(Named("fc"), 2, head=Recorder())
    only = attach(Named("fc", lambda x: {"logits": x, "map": x[:, :, None]}), 2, head=Recorder())
    only.backbone.load_state_dict(expected.backbone.state_dict())
    assert torch.equal(only.features(images), expected.features(images))

    def two(x: Tensor) -> dict[str, Tensor]:
        return {"a": x, "b": -x}

    with pytest.raises(ValueError, match="output='name'"):
        attach(Named("fc", two), 2, head=Recorder()).features(images)
    network = Named("fc", two)
    network.load_state_dict({**network.state_dict(), **expected.backbone.state_dict()})
    assert torch.equal(attach(network, 2, head=Recorder(), output="b").features(images), -expected.features(images))
    with pytest.raises(ValueError, match="'c'"):
        attach(Named("fc", two), 2, head=Recorder(), output="c").features(images)


# ------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"head": Recorder(in_features=7)}, ValueError, r"head\.in_features is 7.*in_features=\d"),
        ({"head": Recorder(num_classes=9)}, ValueError, r"head\.num_classes is 9.*num_classes=2"),
        ({"head": Recorder(), "rho": 2.0}, ValueError, r"\['rho'\].*not both"),
        ({"head": nn.Linear(5, 2)}, TypeError, "add and remove"),
        ({"head": Recorder}, TypeError, "add and remove"),
        ({"head": Recorder(), "in_features": 0}, ValueError, "in_features must be 1 or more, got 0"),
        ({"rho": -1.0}, ValueError, "rho"),
        ({"layer": "nothing"}, ValueError, "its linear layers are"),
        ({"layer": "0"}, ValueError, "Flatten"),
        ({"deterministic": -1}, ValueError, "deterministic must be"),
    ],
)
def test_bad_options_leave_the_model_unchanged(arguments: dict[str, Any], error: type, message: str) -> None:
    model = small_network()
    before = state(model)
    with pytest.raises(error, match=message):
        attach(model, 2, **arguments)
    assert_same_state(model, before)


def test_lazy_layer_is_refused_until_it_knows_its_width() -> None:
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(7))
    with pytest.raises(ValueError, match="lazy"):
        attach(model, 2, head=Recorder())
    model(torch.randn(2, 4))
    assert attach(model, 2, head=Recorder()).in_features == 4


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_network_is_refused() -> None:
    with pytest.raises(ValueError, match="TorchScript"):
        attach(torch.jit.script(small_network()), 2)


@pytest.mark.parametrize(("model", "error"), [(lambda x: x, TypeError), (nn.Linear(4, 9), ValueError)])
def test_a_module_and_a_number_of_classes_are_needed(model: Any, error: type) -> None:
    with pytest.raises(error, match="number of classes" if error is ValueError else r"nn\.Module.*function"):
        attach(model, None if error is ValueError else 2)


# --------------------------------------------------------------------------------------------------------- delegation


def make() -> tuple[AttachedClassifier, Recorder]:
    torch.manual_seed(0)
    head = Recorder(5, 2)
    return attach(small_network(), 2, head=head), head


def test_options_reach_the_head_with_the_features() -> None:
    clf, head = make()
    x, y = torch.randn(3, 12), torch.tensor([0, 1, 0])
    features = clf.features(x)
    clf.add(x, y, ids=["i", "j", "k"]).remove(x, y, weight=y)
    for call, name, options in zip(
        head.calls, ("add", "remove"), ({"ids": ["i", "j", "k"]}, {"weight": y}), strict=True
    ):
        assert call[0] == name
        assert torch.equal(call[1], features)
        assert call[2] is y
        assert call[3] == options
    assert torch.equal(clf(x), features[:, :2] * 2)
    assert torch.equal(clf.predict(x), features[:, :2].argmax(1))


# --------------------------------------------------------------------------------------- frozen, in eval mode for good


@pytest.mark.parametrize("how", ["classifier", "container", "backbone", "inner", "grandchild"])
def test_batchnorm_never_moves(how: str) -> None:
    clf, head = make()
    images = torch.randn(4, 12) * 9
    expected = clf.features(images)
    buffers = {key: value.clone() for key, value in clf.named_buffers()}
    assert buffers
    target = {
        "classifier": clf,
        "container": nn.ModuleDict({"deep": nn.Sequential(clf)}),
        "backbone": clf.backbone,
        "inner": clf.backbone[2],
        "grandchild": nn.Sequential(clf.backbone),
    }[how]
    target.train()
    assert torch.equal(clf.features(images), expected)
    clf.add(images, torch.tensor([0, 1, 0, 1]))
    assert all(torch.equal(value, buffers[key]) for key, value in clf.named_buffers())
    assert not any(module.training for module in clf.backbone.modules())
    assert head.training
    assert clf.train(False) is clf
    assert not head.training


def test_no_graph_under_any_mode() -> None:
    modes: list[bool] = []
    clf, _ = make()
    clf.backbone[1].register_forward_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    images = torch.randn(4, 12, requires_grad=True)
    expected = clf.features(images)
    assert not expected.requires_grad
    assert torch.is_grad_enabled()
    with torch.inference_mode():
        assert torch.equal(clf.features(images), expected)
    clf.backbone.requires_grad_(True)  # even if somebody thaws it
    assert not clf.features(images).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = clf.features(images)
    assert half.shape == expected.shape
    assert not half.requires_grad
    torch.testing.assert_close(half.float(), expected, rtol=0.05, atol=0.05)
    assert not any(modes)


def test_copies_pickles_and_checkpoints() -> None:
    clf, _ = make()
    images = torch.randn(3, 12)
    for other in (copy.deepcopy(clf), pickle.loads(pickle.dumps(clf))):
        assert torch.equal(other.features(images), clf.features(images))
        other.train()
        assert not any(module.training for module in other.backbone.modules())
    fresh, _ = make()
    nn.init.zeros_(fresh.backbone[1].weight)
    fresh.load_state_dict(clf.state_dict())
    assert torch.equal(fresh.features(images), clf.features(images))


def test_runs_on_a_device_that_is_not_there() -> None:
    with FakeTensorMode(), torch.device("cuda"):
        clf = attach(small_network(), 2, head=Recorder())
        x = clf.features(torch.randn(3, 12))
        assert x.shape == (3, 5)
        assert x.device.type == "cuda"


def test_compiled_features_are_the_same() -> None:
    clf, _ = make()
    images = torch.randn(3, 12)
    compiled = torch.compile(clf, backend="eager", fullgraph=True)
    assert torch.equal(compiled(images), clf(images))


# --------------------------------------------------------------------------------------------------- the default head


def separable(n: int = 60) -> tuple[AttachedClassifier, Tensor, Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1000))
    y = torch.arange(n) % 3
    images = 0.1 * torch.randn(n, 3, 2, 2) + 3 * nn.functional.one_hot(y, 3)[:, :, None, None]
    return attach(network, 3), images, y


def test_score_behind_a_progress_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    x, y = torch.randn(40, 8), torch.arange(40) % 2
    clf = attach(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), num_classes=2).add(x, y)
    loader = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 40, 8)]
    with contextlib.redirect_stderr(Terminal()) as shown:
        assert clf.score(loader, progress=True) == clf.score(x, y)
    assert "score " in shown.getvalue()
    assert "0 of 5" in shown.getvalue()


def test_default_head_corrections_are_exact() -> None:
    clf, images, y = separable()
    a, b = images.split(30)
    ya, yb = y.split(30)
    before = clf.add(a, ya).head.digest()
    assert clf.add(b, yb).head.digest() != before
    assert clf.remove(b, yb).head.digest() == before
    wrong = (yb + 1) % 3
    right = clf.add(b, yb).head.digest()
    assert clf.relabel(b, yb, wrong).head.digest() != right
    assert clf.relabel(b, wrong, yb).head.digest() == right
    assert clf.remove(b, yb).head.digest() == before


@pytest.mark.cuda
def test_the_head_is_on_the_device_of_the_model() -> None:
    clf = attach(small_network().to("cuda"), 2)
    clf.add(torch.randn(6, 12, device="cuda"), torch.zeros(6, dtype=torch.long, device="cuda"))
    assert clf(torch.randn(3, 12, device="cuda")).device.type == "cuda"


@pytest.mark.cuda
def test_what_moves_to_the_device_of_the_model() -> None:
    """Batches of a loader are moved and answers stay on the device; a tensor is left where it is, and refused there."""
    x, y = torch.randn(6, 12), torch.arange(6) % 2
    clf = attach(small_network().to("cuda"), 2)
    clf.add([(x, y)], progress=False)
    assert clf.predict([(x, y)]).device.type == "cuda"
    assert clf.features([(x, y)]).device.type == "cuda"
    assert 0 <= clf.score([(x, y)]) <= 1
    assert clf.score(x.to("cuda"), y) == clf.score([(x, y)])
    with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        clf.predict(x)


@pytest.mark.parametrize("deterministic", [True, 8])
def test_features_that_do_not_depend_on_the_batch(deterministic: bool | int) -> None:
    """MobileNetV2: 31 images are added, 4 of them removed in another batch and under autocast: the digest shows it."""
    torchvision = pytest.importorskip("torchvision", reason="needs torchlssvm[vision]")
    torch.manual_seed(0)
    images, y = torch.randn(31, 3, 64, 64), torch.arange(31) % 2
    network = torchvision.models.mobilenet_v2(weights=None)

    largest = float(attach(copy.deepcopy(network), 2).features(images).abs().max())  # small: the weights are random

    def made() -> Any:
        return attach(copy.deepcopy(network), 2, grid=FixedPoint(2 * largest), deterministic=deterministic)

    clf, rest = made(), made()
    try:
        clf.add(images, y)
    except RuntimeError as error:
        if deterministic is True:
            raise
        pytest.skip(f"this machine's convolutions depend on the place in a batch: {error}")
    rest.add(images[torch.arange(31) != 5][4:], y[torch.arange(31) != 5][4:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        clf.remove(images[[3, 0, 2, 1]], y[[3, 0, 2, 1]])
    clf.remove(images[5:6], y[5:6])
    assert clf.head.digest() == rest.head.digest()
    with pytest.raises(RemovalError, match="SampleStore"):
        clf.remove(images[:4], y[:4])


def test_features_of_another_batch_are_refused() -> None:
    """Whatever the bits are: either they are those that were added, or nothing is changed."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
    clf = attach(network, 2).add(torch.ones(8, 1, 8, 8).cumsum(0), torch.arange(8) % 2)
    digest = clf.head.digest()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RemovalError, match="Keep the features"):
        clf.remove(torch.ones(8, 1, 8, 8).cumsum(0)[:3], torch.arange(3) % 2)
    assert clf.head.digest() == digest


def test_a_backbone_whose_batches_mix_images_is_found_by_the_trial() -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) - x.flatten(1).mean(0)

    clf = attach(Mixing(), 2, in_features=4, deterministic=4)
    with pytest.raises(RuntimeError, match="deterministic=True"):
        clf.add(torch.randn(4, 4), torch.arange(4) % 2)


@pytest.mark.parametrize("layers", ["last", ["0", "1"]])
def test_a_classifier_is_shown_in_few_lines(layers, tmp_path):
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    clf = attach(network, classes=["ant", "bee"], layers=layers, grid=8.0, store=tmp_path / "store")
    assert len(repr(clf).splitlines()) <= 10
    assert "network: Sequential" in repr(clf)
    assert "ant, bee" in repr(clf)
    assert "store" in repr(clf)
