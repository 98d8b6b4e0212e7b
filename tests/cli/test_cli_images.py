"""Photographs through a named network: nothing is downloaded, the weights are a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.cli_tools import Shell
from torchlssvm import Certificate, LSSVMHead, audit
from torchlssvm.store import SampleStore

torchvision = pytest.importorskip("torchvision")
Image = pytest.importorskip("PIL.Image")

NAME = "squeezenet1_1"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random weights, once whole, once without the last layer, and others."""
    folder, out = tmp_path_factory.mktemp("weights"), {}
    for name, seed in (("whole", 0), ("other", 1)):
        torch.manual_seed(seed)
        state = torchvision.models.get_model(NAME, weights=None).state_dict()
        for value in state.values():  # the default initialization hardly tells images apart
            value += 0.05 * torch.randn(value.shape)
        out[name] = folder / f"{name}.pt"
        torch.save(state, out[name])
        if name == "whole":
            out["trunk"] = folder / "trunk.pt"
            torch.save({k: v for k, v in state.items() if not k.startswith("classifier")}, out["trunk"])
    return out


def photo(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((40, 50)).save(path)


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], weights: dict[str, Path]
) -> Shell:
    """A store "s" bound to the network, and a folder of 3 ants and 4 bees, one of them deeper."""
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(IDS):
        photo(tmp_path / "photos" / name, i)
    (tmp_path / "photos" / "bees" / "notes.txt").write_text("no image")
    (tmp_path / "photos" / ".hidden").mkdir()
    photo(tmp_path / "photos" / ".hidden" / "x.png", 99)
    shell = Shell(capsys, tmp_path)
    made = shell.json("init", "s", "--classes", 3, "--backbone", NAME, "--weights", weights["whole"], "--grid", "64")
    assert (made["features"], len(made["fingerprint"])) == (512, 64)
    return shell


ADD = ["add", "s", "--images", "photos"]
IDS = ["ants/1.png", "ants/2.JPG", "ants/3.bmp", "bees/1.png", "bees/2.png", "bees/3.png", "bees/far/4.png"]


def features_by_hand(state: Path, folder: Path) -> torch.Tensor:
    """The features without a line of the library: the trunk of the network, and the mean over the image."""
    model = torchvision.models.get_model(NAME, weights=None).eval()
    model.load_state_dict(torch.load(state, weights_only=True))
    preprocess = torchvision.models.get_model_weights(NAME).DEFAULT.transforms()
    images = torch.stack([preprocess(Image.open(folder / i).convert("RGB")) for i in IDS])
    with torch.no_grad():
        return model.features(images).mean((2, 3))


def test_images_become_the_samples_of_a_store(shell: Shell, weights: dict[str, Path]) -> None:
    (shell.folder / "who.csv").write_text(
        "id,subject\n" + "".join(f"{i},person-{n % 3}\n" for n, i in enumerate(reversed(IDS)))
    )
    said = shell.json(*ADD, "--subjects", "who.csv", "--batch-size", 3)
    assert (said["added"], said["events"]) == (7, 3)
    stats = shell.json("stats", "s")
    assert (stats["class_names"], stats["labels"], stats["backbone"]) == (["ants", "bees"], {"0": 3, "1": 4}, NAME)
    with SampleStore("s") as store:
        rows = store.get(IDS)
        assert store.find() == IDS
        assert rows.subjects == [f"person-{n % 3}" for n in reversed(range(7))]
        assert rows.y.tolist() == [0, 0, 0, 1, 1, 1, 1]
        truth = features_by_hand(weights["whole"], shell.folder / "photos").double()
        torch.testing.assert_close(rows.x, truth, rtol=1e-4, atol=1e-4)
        fresh = LSSVMHead(512, 3, grid=store.head.grid).add(rows.x, rows.y)
        assert store.head.digest() == fresh.digest()
    shell("remove", "s", "--subject", "person-1", "--certificate", "c.json", "--compact")
    shell("verify", "c.json", "--store", "s", "--allow-unsigned")
    assert Certificate.load(shell.folder / "c.json").fingerprint == stats["fingerprint"]


def test_classify_takes_folders_without_classes_and_single_images(shell: Shell) -> None:
    shell(*ADD)
    said = shell.json("classify", "s", "--images", "photos")["predictions"]
    assert [row["id"] for row in said] == IDS
    photo(shell.folder / "loose" / "a.png", 3)  # the same picture as bees/1.png
    (loose,) = shell.json("classify", "s", "--images", "loose")["predictions"]
    (single,) = shell.json("classify", "s", "--images", "photos/bees/1.png")["predictions"]
    assert (loose["id"], single["id"]) == ("a.png", "1.png")
    assert loose["class"] == single["class"] == said[3]["class"]
    assert loose["score"] == pytest.approx(said[3]["score"], rel=1e-4)


def test_the_fingerprint_is_that_of_network_and_preprocessing(shell: Shell, weights: dict[str, Path]) -> None:
    from torchlssvm import attach

    model = torchvision.models.get_model(NAME, weights=None)
    model.load_state_dict(torch.load(weights["whole"], weights_only=True))
    preprocess = torchvision.models.get_model_weights(NAME).DEFAULT.transforms()
    expected = audit.fingerprint(attach(model, 2).backbone, preprocess)
    assert shell.json("stats", "s")["fingerprint"] == expected
    shell(*ADD, "--weights", weights["trunk"])  # the last layer plays no part
    assert "fingerprint" in shell(*ADD, "--weights", weights["other"], code=1)


def test_attach_with_the_name_of_the_network_loads_the_weights_of_init(shell: Shell, weights: dict[str, Path]) -> None:
    from torchlssvm import attach
    from torchlssvm.backbones import load_network

    shell(*ADD)
    said = shell.json("classify", "s", "--images", "photos")["predictions"]
    pictures = [f"photos/{name}" for name in IDS]
    clf = attach(NAME, 3, store="s")
    assert clf.predict(pictures, names=True) == [row["class"] for row in said]
    clf.store.close()
    bare = torchvision.models.get_model(NAME, weights=None)
    bare.load_state_dict(torch.load(weights["whole"], weights_only=True))
    with pytest.raises(ValueError, match="preprocessing"):  # the fingerprint covers it
        attach(bare, 3, store="s")
    moved = shell.folder / "moved.pt"
    weights["whole"].rename(moved)
    try:
        with pytest.raises(FileNotFoundError, match="load_network"):
            attach(NAME, 3, store="s")
        network, preprocess = load_network(NAME, str(moved))
        clf = attach(network, 3, store="s", preprocess=preprocess)
        assert clf.predict(pictures, names=True) == [row["class"] for row in said]
        clf.store.close()
    finally:
        moved.rename(weights["whole"])


def test_again_and_with_one_more(shell: Shell) -> None:
    shell(*ADD)
    again = shell.json(*ADD, "--batch-size", 2)  # features differ in their last bits
    assert (again["added"], again["skipped"]) == (0, 7)
    photo(shell.folder / "photos" / "ants" / "0.png", 50)
    assert shell.json(*ADD)["added"] == 1
    photo(shell.folder / "photos" / "ants" / "1.png", 51)
    assert "'ants/1.png'" in shell(*ADD, code=1)
    (shell.folder / "photos" / "cows").mkdir()
    (shell.folder / "photos" / "ants" / "1.png").rename(shell.folder / "photos" / "cows" / "1.png")
    assert shell.json(*ADD)["added"] == 1
    assert shell.json("stats", "s")["class_names"] == ["ants", "bees", "cows"]


def test_features_from_a_file_need_the_fingerprint(shell: Shell) -> None:
    np.save("x.npy", np.zeros((2, 512), np.float32))
    np.save("y.npy", np.array([0, 1]))
    add = ["add", "s", "--features", "x.npy", "--labels", "y.npy"]
    message = shell(*add, code=1)
    mark = shell.json("stats", "s")["fingerprint"]
    assert mark in message
    assert "from another network" in shell(*add, "--fingerprint", "another", code=1)
    shell(*add, "--fingerprint", mark)
    assert shell.json("stats", "s")["samples"] == 2


def test_bad_folders(shell: Shell) -> None:
    (shell.folder / "empty").mkdir()
    photo(shell.folder / "loose" / "a.png", 0)
    for name in "abcd":
        photo(shell.folder / "many" / name / "1.png", 0)
    (shell.folder / "broken" / "ants").mkdir(parents=True)
    (shell.folder / "broken" / "ants" / "1.png").write_bytes((shell.folder / "photos/ants/1.png").read_bytes()[:60])
    for name, fact in {
        "nowhere": "nowhere",
        "empty": "no images",
        "loose": "a.png",
        "many": "4 classes",
        "broken": "1.png",
    }.items():
        assert fact in shell("add", "s", "--images", name, code=1)
    (shell.folder / "who.txt").write_text("a\n")
    assert "1 values of subject for 7" in shell(*ADD, "--subjects", "who.txt", "--by-position", code=1)
    assert shell.json("stats", "s")["samples"] == 0


def test_bad_networks(shell: Shell, weights: dict[str, Path]) -> None:
    (shell.folder / "noise.pt").write_bytes(b"noise")
    for name, given, fact in [
        ("resnet0", weights["whole"], "'resnet0'"), ("mobilenet_v2", weights["whole"], "does not fit"),
        (NAME, "noise.pt", "noise.pt"), (NAME, "missing.pt", "missing.pt"),
    ]:  # fmt: skip
        assert fact in shell("init", "t", "--classes", 2, "--backbone", name, "--weights", given, code=1)
    network = ["--backbone", NAME, "--weights", weights["whole"]]
    assert "512 features" in shell("init", "t", "--classes", 2, *network, "--in-features", 9, code=1)
    assert not (shell.folder / "t").exists()
    shell("init", "plain", "--in-features", 3, "--classes", 2)
    assert "--backbone" in shell("add", "plain", "--images", "photos", code=1)
