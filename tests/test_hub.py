"""A folder of the hub: weights only unless asked, nothing that confirms a guess, and what does not fit is named."""

import json
import sys
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import nn

from tests.support.faults import Failing, replaced
from torchlssvm import FixedPoint, KernelLSSVM, LSSVMHead, MarginHead, NotFittedError, attach
from torchlssvm.events import Remove
from torchlssvm.kernels import RBF
from torchlssvm.linear.checkpoint import checksum
from torchlssvm.store import SampleStore

pytest.importorskip("safetensors")
from safetensors.torch import save_file

from torchlssvm import hub
from torchlssvm.hub import from_pretrained, save_pretrained

X, Y = torch.randn(60, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3


@pytest.mark.parametrize(
    "head",
    [
        LSSVMHead(6, 3, grid=8.0, rho=1.0),
        LSSVMHead(6, 3, multiclass="ovo", rho=1.0),
        LSSVMHead(6, 3, normalize="l2", scale="std", rho=1.0),
        LSSVMHead(6, 3, grid=None, rho=1.0),
        MarginHead(6, 3),
    ],
)
def test_weights_only_unless_asked(tmp_path, head):
    head.add(X, Y)
    save_pretrained(head, tmp_path, statistics=True)
    again = from_pretrained(tmp_path, statistics=True)
    assert torch.equal(again(X), head(X))
    assert type(again) is type(head)
    again.remove(X[:5], Y[:5])
    save_pretrained(head, tmp_path)  # the sums of the earlier save go
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    served = from_pretrained(tmp_path)
    assert torch.allclose(served(X).double(), head(X).double(), atol=1e-5)
    assert not any(p.requires_grad for p in served.parameters())
    with pytest.raises(ValueError, match="without statistics"):
        from_pretrained(tmp_path, statistics=True)
    if head.grid is not None:
        everything = b"".join(p.read_bytes() for p in tmp_path.iterdir())
        assert head.digest().encode() not in everything


def test_a_classifier_with_its_backbone(tmp_path):
    network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 9))
    clf = attach(network, 3, grid=FixedPoint(64.0), store=tmp_path / "store")
    clf.add(X, Y, ids=range(60), subjects=[f"u{i % 5}" for i in range(60)])
    before = clf.head.digest()
    clf.remove(subject="u2")
    save_pretrained(clf, tmp_path / "hub", class_names=["ant", "bee", "cat"], statistics=True)
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "| erasures so far | 1 |" in card
    assert "ant, bee, cat" in card
    assert "limit 64" in card
    for name in ("README.md", "config.json"):
        text = (tmp_path / "hub" / name).read_text()
        assert clf.head.digest() not in text
        assert before not in text
    served = from_pretrained(tmp_path / "hub", clf.backbone)
    assert torch.allclose(served(X).double(), clf(X), atol=1e-5)
    learner = from_pretrained(tmp_path / "hub", clf.backbone, statistics=True)
    assert torch.equal(learner(X), clf(X))
    with pytest.raises(ValueError, match="its hash is another"):
        from_pretrained(tmp_path / "hub", nn.Linear(6, 5))
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config | {"network": {"layers": 5}}))
    with pytest.raises(ValueError, match="options that do not exist"):
        from_pretrained(tmp_path / "hub", nn.Linear(6, 5))
    save_pretrained(clf.head, tmp_path / "head", store=clf.store)
    assert "| erasures so far | 1 |" in (tmp_path / "head" / "README.md").read_text()
    clf.store.close()


def test_what_is_refused(tmp_path):
    with pytest.raises(NotFittedError):
        save_pretrained(LSSVMHead(6, 3, rho=1.0), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    head = LSSVMHead(6, 3, rho=1.0).add(X, Y)
    with pytest.raises(ValueError, match="made of its samples"):
        save_pretrained(KernelLSSVM(RBF(sigma=1.0)), tmp_path / "a")
    with pytest.raises(ValueError, match="3 names"):
        save_pretrained(head, tmp_path / "a", class_names=["x"])
    with pytest.raises(ValueError, match="repo_id"):
        save_pretrained(head, tmp_path / "a", push_to_hub=True)
    save_pretrained(head, tmp_path / "a")
    config = tmp_path / "a" / "config.json"
    saved = json.loads(config.read_text())
    for change, words in (
        ({"num_classes": 4}, "does not fit"),
        ({"format": "x"}, "format"),
        ({"in_features": "x"}, "no model"),
        ({"in_features": 6.5}, "in_features is 6.5"),
        ({"in_features": -1}, "in_features is -1"),
        ({"in_features": 10**12}, "does not fit"),  # and no memory is taken for them
        ({"num_classes": 10**6, "multiclass": "ovo"}, "does not fit"),
        ({"normalize": "foo"}, "normalize is 'foo'"),
        ({"normalize": "l2"}, "does not fit"),
        ({"head": "Linear"}, "head is 'Linear'"),
    ):
        config.write_text(json.dumps(saved | change))
        with pytest.raises(ValueError, match=words):
            from_pretrained(tmp_path / "a")
    config.write_text(json.dumps(saved))
    weights = tmp_path / "a" / "model.safetensors"
    kept = weights.read_bytes()
    for damaged in (kept[:-1] + bytes([kept[-1] ^ 1]), kept[:-9] + bytes([kept[-9] ^ 64]) + kept[-8:]):
        weights.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged"):
            from_pretrained(tmp_path / "a")
    for value in (torch.full((3, 6), torch.nan), torch.ones(3, 6, dtype=torch.int8)):
        state = {"weight": value, "bias": torch.zeros(3)}
        about = {"format": "torchlssvm-frozen-1", "checksum": checksum(state), "save": saved["save"]}
        save_file(state, weights, metadata=about)
        with pytest.raises(ValueError, match="no finite numbers"):
            from_pretrained(tmp_path / "a")
    pairs = {"linear.weight": torch.zeros(499 * 250, 6), "linear.bias": torch.zeros(499 * 250)}
    about["checksum"] = checksum(pairs)
    save_file(pairs, weights, metadata=about)
    config.write_text(json.dumps(saved | {"num_classes": 500, "multiclass": "ovo"}))
    with pytest.raises(ValueError, match="does not fit"):  # before memory is taken for the matrix of pairs
        from_pretrained(tmp_path / "a")
    for text in ("{", "[]", "[" * 100_000):
        config.write_text(text)
        with pytest.raises(ValueError, match="no model that save_pretrained wrote"):
            from_pretrained(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="no folder here"):
        from_pretrained(tmp_path / "nowhere")
    for names in ("abc", [0, 1, 2], 3):
        with pytest.raises(ValueError, match="each a string"):
            save_pretrained(head, tmp_path / "b", class_names=names)
    save_pretrained(head, tmp_path / "b", class_names=["a|b", "c\n# d", "`e`"])
    assert "| classes | a\\|b, c \\# d, \\`e\\` |\n" in (tmp_path / "b" / "README.md").read_text()


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("name", ["save_safetensors", "model_card"])
def test_an_interrupted_save_is_no_model(tmp_path, statistics, name):
    """Neither the files of one save beside those of another, nor the sums of an earlier one."""
    save_pretrained(LSSVMHead(6, 3, normalize="l2", rho=1.0).add(X, Y), tmp_path, statistics=True)
    old = (tmp_path / "config.json").read_text()
    head = LSSVMHead(6, 3, rho=1.0).add(X, Y)
    for late in (False, True):
        with pytest.raises(KeyboardInterrupt), replaced(hub, name, Failing(KeyboardInterrupt(), late=late)):
            save_pretrained(head, tmp_path, statistics=statistics)
        with pytest.raises(ValueError, match="no model that save_pretrained wrote"):
            from_pretrained(tmp_path)
    assert statistics or not (tmp_path / "statistics.safetensors").exists()
    (tmp_path / "config.json").write_text(old)
    with pytest.raises(ValueError, match="are of two saves"):
        from_pretrained(tmp_path)


def test_what_another_process_erased_is_not_in_the_files(tmp_path):
    clf = attach(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 9)), 3, grid=64.0, rho=1.0, store=tmp_path / "store")
    clf.add(X, Y, ids=range(60), subjects=[f"u{i % 5}" for i in range(60)])
    with SampleStore(tmp_path / "store") as other:  # as another process has it
        done = other.apply(Remove(subject="u1"))
    save_pretrained(clf.head, tmp_path / "hub", store=clf.store, statistics=True)
    features = clf.backbone(X)
    kept = torch.arange(60) % 5 != 1
    truth = LSSVMHead(5, 3, grid=64.0, rho=1.0).add(features[kept].detach(), Y[kept])
    assert from_pretrained(tmp_path / "hub", statistics=True).digest() == truth.digest()
    torch.testing.assert_close(from_pretrained(tmp_path / "hub")(features).double(), truth(features), atol=1e-5, rtol=0)
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["erasures"] == 1
    assert not clf.store.certificate(done.event_id).scope["checkpoints"]  # the files are of the state after it
    later = clf.remove(subject="u2")
    stale = clf.store.certificate(later.event_id).scope["checkpoints"]
    assert sorted(name.rsplit("/", 1)[1] for name in stale) == ["model.safetensors", "statistics.safetensors"]
    clf.store.close()


def test_only_its_own_files_are_uploaded(tmp_path):
    """Files that lie beside them stay here, and sums of an earlier version do not stay there."""
    (tmp_path / "secret.txt").write_text("mine")
    head, files = (
        LSSVMHead(6, 3, rho=1.0).add(X, Y),
        ["config.json", "model.safetensors", "statistics.safetensors", "README.md"],
    )
    for statistics, gone in ((False, ["statistics.safetensors"]), (True, None)):
        there = MagicMock()
        with patch.dict(sys.modules, {"huggingface_hub": there}):
            options = {"push_to_hub": True, "repo_id": "user/model", "revision": "main"}
            save_pretrained(head, tmp_path, statistics=statistics, **options)
        there.HfApi().create_repo.assert_called_once_with("user/model", exist_ok=True)
        there.HfApi().upload_folder.assert_called_once_with(
            repo_id="user/model", folder_path=tmp_path, revision="main", allow_patterns=files, delete_patterns=gone
        )
