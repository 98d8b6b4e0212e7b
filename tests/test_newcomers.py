"""What docs/start.md says to users of the shell is so: every line, with what it prints. Its Python blocks are doctests."""

import doctest
import re
import shlex
from pathlib import Path

import pytest

from tests.support.cli_tools import Shell

pytest.importorskip("cryptography", reason="signatures need torchlssvm[audit]")
START = Path(__file__).parents[1] / "docs" / "start.md"


def test_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    text = START.read_text(encoding="utf-8")
    (table,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    (block,) = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    Path("visits.csv").write_text(table)
    shell = Shell(capsys, tmp_path)
    for part in block.removeprefix("$ ").split("\n$ "):
        line, _, expected = part.partition("\n")
        code, out, err = shell.run(*shlex.split(line)[1:])
        assert code == 0, err
        assert doctest.OutputChecker().check_output(expected.strip(), (out + err).strip(), doctest.ELLIPSIS), out + err
