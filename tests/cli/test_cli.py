"""The command line: exit codes, one-line errors, and a demo whose numbers hold."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import torchlssvm
from tests.support.faults import Failing, replaced
from torchlssvm import LSSVMHead, cli, demo
from torchlssvm.store import SampleStore

ROOT = Path(__file__).resolve().parents[2]


def python_m(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchlssvm", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


# -- the command -------------------------------------------------------------------------------------------------------


def test_version_in_a_subprocess() -> None:
    run = python_m("--version")
    assert (run.returncode, run.stdout, run.stderr) == (0, f"torchlssvm {torchlssvm.__version__}\n", "")


def test_alone_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "demo" in capsys.readouterr().out


def test_a_bug_is_not_hidden() -> None:
    with replaced(demo, "run", Failing(ZeroDivisionError())), pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


# -- the demo ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def story() -> dict[str, Any]:
    pytest.importorskip("sklearn")
    return demo.tell(0)


def failures(story: dict[str, Any]) -> list[str]:
    return [step["name"] for step in story["steps"] if not step["passed"]]


def test_the_demo_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "folder"
    assert cli.main(["demo", "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["passed"] is said["bit_identical"] is True
    assert said["digest_after"] == said["digest_never_saw"] != said["digest_before"]
    samples = {step["name"]: step["samples"] for step in said["steps"]}
    assert samples["learn"] == samples["verify"] + samples["erase"] == 1297
    assert samples["certify"] == samples["erase"] > 0
    assert said["traces"] == 0
    assert said["signed"] is (find_spec("cryptography") is not None)
    assert {"signature", "journal", "erased", "rows", "state", "compacted", "files", "head", "rho"} == set(
        said["verification"]
    )
    assert said["chance"] == pytest.approx(0.2, abs=1e-3)
    assert said["precision"] > 0.8
    accuracy = {step["name"]: step["accuracy"] for step in said["steps"]}
    assert accuracy["learn"] < accuracy["correct"] < said["clean_accuracy"] + 0.02
    assert accuracy["erase"] == pytest.approx(accuracy["correct"], abs=0.02)
    assert said["picture"] == str(out / "torchlssvm_demo.png")
    assert (out / "torchlssvm_demo.png").read_bytes().startswith(b"\x89PNG")


def test_features_are_exact_and_on_the_grid() -> None:
    """The digests are those of every machine: no rounding in the features, none on the grid."""
    pytest.importorskip("sklearn")
    first, again = (demo.load(torch.Generator().manual_seed(0)) for _ in range(2))
    assert torch.equal(demo.new_head().grid.snap(first[1]), first[1].double())
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_a_failed_check_shows_and_exits_1(
    story: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    steps = [step | {"passed": False, "ms": 98765.4} for step in story["steps"]]
    failed = story | {"steps": steps, "passed": False, "digest_never_saw": "0" * 64}
    with replaced(demo, "tell", lambda real: lambda seed: failed):
        assert cli.main(["demo"]) == 1
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[1] for line in lines if "FAILED" in line]
    assert names == ["learn", "find", "correct", "erase", "certify", "verify", "compare"]
    assert max(map(len, lines)) <= 100
    assert lines[-1].endswith("equal: False")
    assert (tmp_path / demo.PICTURE_FILE).is_file()


def test_a_sample_left_behind_is_noticed() -> None:
    """In the head: by the certificate's verification, and by the head that never saw it."""
    pytest.importorskip("sklearn")
    with replaced(LSSVMHead, "remove", lambda real: lambda head, x, y, **more: real(head, x[1:], y[1:], **more)):
        facts = demo.tell(0)
    assert failures(facts) == ["verify", "compare"]
    assert list(facts["verification"]) == ["failed"]
    assert not facts["passed"]


def test_bytes_left_behind_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the files: by looking into them. The head itself is right, and the demo works without cryptography."""
    pytest.importorskip("sklearn")
    monkeypatch.setitem(sys.modules, "cryptography", None)
    compact = SampleStore.compact

    def careless(store: SampleStore) -> Any:
        done = compact(store)
        (store.path / "backup").write_text("user-17 wrote digit-0001")
        return done

    with replaced(SampleStore, "compact", lambda real: careless):
        facts = demo.tell(0)
    assert facts["traces"] >= 1
    assert failures(facts) == ["certify"]
    assert facts["signed"] is False
    assert max(map(len, demo.table(facts, Path("x.png")).splitlines())) <= 100
