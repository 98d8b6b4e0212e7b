"""A folder of the hub: weights only unless asked, nothing that confirms a guess, and what does not fit is named."""

import json
import sys
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import nn

from torchlssvm import FixedPoint, KernelLSSVM, LSSVMHead, MarginHead, NotFittedError, attach
from torchlssvm.kernels import RBF

pytest.importorskip("safetensors")
from torchlssvm.hub import from_pretrained, save_pretrained

X, Y = torch.randn(60, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3


@pytest.mark.parametrize(
    "head",
    [
        LSSVMHead(6, 3, grid=8.0),
        LSSVMHead(6, 3, multiclass="ovo"),
        LSSVMHead(6, 3, normalize="l2", scale="std"),
        LSSVMHead(6, 3, grid=None),
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
    save_pretrained(clf.head, tmp_path / "head", store=clf.store)
    assert "| erasures so far | 1 |" in (tmp_path / "head" / "README.md").read_text()
    clf.store.close()


def test_a_folder_goes_to_the_hub_by_its_name(tmp_path):
    hub = MagicMock()
    with patch.dict(sys.modules, {"huggingface_hub": hub}):
        save_pretrained(LSSVMHead(6, 3).add(X, Y), tmp_path, push_to_hub=True, repo_id="user/model", revision="main")
    hub.HfApi().create_repo.assert_called_once_with("user/model", exist_ok=True)
    hub.HfApi().upload_folder.assert_called_once_with(repo_id="user/model", folder_path=tmp_path, revision="main")


def test_what_is_refused(tmp_path):
    with pytest.raises(NotFittedError):
        save_pretrained(LSSVMHead(6, 3), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    head = LSSVMHead(6, 3).add(X, Y)
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
    ):
        config.write_text(json.dumps(saved | change))
        with pytest.raises(ValueError, match=words):
            from_pretrained(tmp_path / "a")
    config.write_text("{")
    with pytest.raises(ValueError, match="no model that save_pretrained wrote"):
        from_pretrained(tmp_path / "a")
