"""Fixtures of the command line's tests: a folder with files, an empty store, a filled one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli_tools import ADD, J, Shell, write


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """A folder with the files of :func:`write`, which is the current one."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    return Shell(capsys, tmp_path)


@pytest.fixture
def empty(shell: Shell) -> Shell:
    """A store "s" without samples."""
    shell("init", "s", "--in-features", J, "--classes", "ant,bee,cow", "--grid", "16")
    return shell


@pytest.fixture
def filled(empty: Shell) -> Shell:
    """A store "s" with all samples, ids s0, s1, ..., in three events."""
    empty(*ADD, "--batch-size", 25)
    return empty
