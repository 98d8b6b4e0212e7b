"""Every config opens with its command, is parsed, and runs on the digits that ship with scikit-learn."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("jsonargparse")

from torchlssvm.cli import main
from torchlssvm.lightning import Cifar10Data, FolderData

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "configs").rglob("*.yaml"))
SMALL = {  # so that a network takes seconds
    "configs/data/cifar10.yaml": ["--data.init_args.size", "32", "--data.init_args.limit", "100"],
    "configs/data/hymenoptera.yaml": ["--data.init_args.size", "32", "--data.init_args.limit", "100"],
    "configs/model/squeezenet.yaml": ["--data.init_args.limit", "100"],
    "configs/model/random_features.yaml": ["--model.feature_map.init_args.out_features", "200"],
}
QUIET = [f"--trainer.{name}=false" for name in ("enable_progress_bar", "enable_model_summary", "logger")]


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without data, weights or a network."""

    def offline(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network in a test")

    monkeypatch.delenv("TORCHLSSVM_DATA", raising=False)
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", offline)
    for name in ("torchvision._internally_replaced_utils", "torchvision.models._api"):
        monkeypatch.setattr(f"{name}.load_state_dict_from_url", offline, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_runs_on_a_fresh_machine(config: str, fresh: Path, caplog: Any, capsys: Any) -> None:
    opening = (ROOT / config).read_text().splitlines()
    assert opening[0].startswith("# ")
    assert any(line == f"#   torchlssvm fit --config {config}" for line in opening[1:4])
    if config == "configs/events/file.yaml":
        (fresh / "events.jsonl").write_text(
            '{"kind": "remove", "ids": ["train/7"]}\n{"kind": "remove", "ids": ["nobody"]}\n'
        )
    with caplog.at_level(logging.INFO):
        for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
            logging.getLogger(name).propagate = True
        code = main(["fit", "--config", str(ROOT / config), *QUIET, *SMALL.get(config, [])])
    assert code == (1 if config == "configs/events/file.yaml" else 0)  # an event for a sample that never comes
    assert "scikit-learn's digits" in caplog.text
    if "identity" not in "".join(opening):
        assert "random weights are used" in caplog.text
    checkpoints = list(fresh.rglob("*.ckpt"))
    assert len(checkpoints) == 1
    state = torch.load(checkpoints[0], weights_only=True)["state_dict"]
    assert any(name.startswith("classifier.head.") for name in state)
    if config == "configs/events/file.yaml":
        assert list((fresh / "certificates").iterdir())
        assert "have not arrived: 1 event," in capsys.readouterr().out
        assert main(["waiting", str(fresh / "store")]) == 0
        assert "'nobody'" in capsys.readouterr().out
    if config == "configs/events/audit.yaml":
        events = [json.loads(t) for t in (fresh / "suspects.jsonl").read_text().splitlines() if not t.startswith("#")]
        assert len(events) > 200


def test_a_checkpoint_is_judged_from_the_command_line(fresh: Path, capsys: Any) -> None:
    base = ["--config", str(ROOT / "configs/base.yaml"), *QUIET]
    assert main(["fit", *base]) == 0
    path = str(next(fresh.rglob("*.ckpt")))
    for stage in ("validate", "test"):
        assert main([stage, *base, "--ckpt_path", path]) == 0
        said = capsys.readouterr().out
        accuracy = float(re.search(rf"{'val' if stage == 'validate' else 'test'}_accuracy\D+([\d.]+)", said).group(1))
        assert accuracy > 0.9
    assert main(["predict", *base, "--ckpt_path", path]) == 0


@pytest.mark.data("hymenoptera", "weights/mobilenet_v2_imagenet.pt")
def test_photographs_of_ants_and_bees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """48 + 48 photographs in folders, a pretrained network, one pass: 45 of 48 right when this was written."""
    monkeypatch.chdir(tmp_path)
    few = ["--data.init_args.size", "160", "--data.init_args.limit", "48", *QUIET]
    base = ["--config", str(ROOT / "configs/data/hymenoptera.yaml"), *few]
    assert main(["fit", *base]) == 0
    capsys.readouterr()
    path = next(tmp_path.rglob("*.ckpt"))
    assert main(["validate", *base, "--ckpt_path", str(path)]) == 0
    accuracy = float(re.search(r"val_accuracy\D+([\d.]+)", capsys.readouterr().out).group(1))
    assert 43 / 48 <= accuracy < 1
    held = torch.load(path, weights_only=True)["state_dict"]
    assert held["classifier.head.w"].shape == (1280, 10)


def test_missing_data_are_an_error_unless_something_may_stand_in(fresh: Path) -> None:
    for data in (FolderData("hymenopterra"), Cifar10Data()):
        with pytest.raises(FileNotFoundError, match="there is no"):
            data.setup("fit")
    data = FolderData("hymenopterra", stand_in=True, limit=20)
    data.setup("fit")
    assert len(data.train) == 20


def test_a_wrong_option_is_a_wrong_command_line(fresh: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        main(["fit", "--config", str(ROOT / "configs/base.yaml"), "--model.colour", "red"])
    assert left.value.code == 2
    assert "colour" in capsys.readouterr().err
