"""Exit codes, interruption, pipes, missing packages, and the progress bar."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_tools import Shell, write
from tests.support.faults import Failing, replaced
from torchlssvm import cli
from torchlssvm.cli import store
from torchlssvm.cli.console import progress
from torchlssvm.cli.store_access import Settings
from torchlssvm.errors import GridError, RemovalError, StoreBusyError, StoreError, VerificationError

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    "init", "add", "remove", "relabel", "preview", "verify", "history", "stats", "compact", "export", "keygen", "demo",
]  # fmt: skip


def python_m(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment, "cwd": folder}
    return subprocess.Popen([sys.executable, "-m", "torchlssvm", *arguments], **{**pipes, **options})


def test_every_command_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", text, re.M) for name in COMMANDS)
    assert "exit codes: 0 " in text
    for name in COMMANDS:
        with pytest.raises(SystemExit) as leaving:
            cli.main([name, "--help"])
        assert leaving.value.code == 0
        assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [(VerificationError("x"), 3), (StoreBusyError("x"), 4), (StoreError("x"), 1), (RemovalError("x"), 1), (GridError("x"), 1),
     (ValueError("x"), 1), (FileNotFoundError(2, "No such file", "x"), 1), (KeyboardInterrupt(), 130)],
)  # fmt: skip
@pytest.mark.parametrize("as_json", [False, True])
def test_exit_codes(error: BaseException, code: int, as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with replaced(store, "open_store", Failing(error)):
        assert cli.main(["stats", "s", *(["--json"] if as_json else [])]) == code
    out, err = capsys.readouterr()
    assert err.startswith("torchlssvm: error: ")
    assert err.count("\n") == 1
    assert (json.loads(out)["error"]["exit_code"] == code) if as_json else (out == "")


def test_a_message_of_many_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    with replaced(store, "open_store", Failing(ValueError("one\n  two\n\nthree"))):
        assert cli.main(["stats", "s"]) == 1
    assert capsys.readouterr().err == "torchlssvm: error: one two three\n"


@pytest.mark.parametrize(("package", "extra"), [("cryptography", "audit"), ("torchvision", "vision")])
def test_a_missing_package_is_named(
    package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    shell = Shell(capsys, tmp_path)
    command = (
        ["keygen", tmp_path / "k"]
        if extra == "audit"
        else ["init", tmp_path / "s", "--classes", 2, "--backbone", "resnet18"]
    )
    assert f"pip install 'torchlssvm[{extra}]'" in shell(*command, code=1)
    assert not list(tmp_path.iterdir())


def test_an_unknown_missing_module_is_a_bug() -> None:
    missing = Failing(ModuleNotFoundError("no", name="elsewhere"))
    with replaced(store, "open_store", missing), pytest.raises(ModuleNotFoundError):
        cli.main(["stats", "s"])


# -- real processes ----------------------------------------------------------------------------------------------------


def test_a_bad_file_in_a_real_process(tmp_path: Path) -> None:
    with python_m(tmp_path, "verify", "missing.json", "--json") as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (1, "torchlssvm: error: missing.json: No such file or directory\n")
    assert json.loads(out)["error"]["type"] == "FileNotFoundError"


def test_ctrl_c_in_a_real_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, _, _ = write(tmp_path)
    shell = Shell(capsys, tmp_path)
    store = tmp_path / "s"
    shell("init", store, "--in-features", 5, "--classes", 3, "--grid", "16")
    lines = "".join(",".join(map(str, [*row, i % 3])) + "\n" for i, row in enumerate(x.tolist() * 500))
    (tmp_path / "long.csv").write_text(lines)
    from torchlssvm.store import SampleStore

    def listen() -> None:  # what runs in the background of a shell is started with Ctrl-C ignored, and hands that down
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    command = ("add", "s", "--features", "long.csv", "--labels", "-1", "--batch-size", "2")
    with python_m(tmp_path, *command, preexec_fn=listen) as process:
        deadline = time.monotonic() + 60
        with SampleStore(store, readonly=True) as reader:
            while len(reader) < 10 and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "torchlssvm: error: interrupted; what was done before is kept\n")
    assert 10 <= shell.json("stats", store)["samples"] < 30_000
    assert len(shell.json("history", store)["events"]) == shell.json("stats", store)["samples"] / 2


def test_whoever_reads_may_leave(tmp_path: Path) -> None:
    with python_m(tmp_path, "--help") as process:
        assert process.stdout is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()


# -- the bar -----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("installed", [True, False])
def test_the_bar(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, with tqdm; its line is cleared at the end. Elsewhere, with --json and without tqdm there is none."""
    if installed:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setattr("torchlssvm.cli.console.find_spec", lambda _: None)
    for stream, as_json in ((Terminal(), False), (Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress(Namespace(json=as_json), "adding", 1000) as advance:
            advance(500)
        shown = installed and not as_json and stream.isatty()
        assert ("adding" in stream.getvalue()) is shown
        assert stream.getvalue().split("\r")[-1].strip() == ""


# -- names of classes --------------------------------------------------------------------------------------------------


def test_names_and_labels() -> None:
    kept = Settings()
    kept.learn_names(["0", "2"], 3)
    assert kept.classes == []  # numbers stand for themselves
    kept.learn_names(["bees", "ants"], 3)
    kept.learn_names(["ants", "wasps"], 3)
    assert kept.classes == ["bees", "ants", "wasps"]
    assert [kept.label(t, 3) for t in ("ants", "2", " 1 ", "1.0")] == [1, 2, 1, 1]
    with pytest.raises(ValueError, match="would make 4 classes"):
        kept.learn_names(["flies"], 3)
    with pytest.raises(ValueError, match="neither a class nor a number"):
        kept.label("flies", 3)
    assert kept.classes == ["bees", "ants", "wasps"]
