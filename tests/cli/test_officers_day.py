"""The day of a data protection officer, at the command line: every line of docs/tutorial_erasure.md, with what it prints."""

from __future__ import annotations

import doctest
import os
import re
import shlex
from pathlib import Path

import pytest

from tests.support.cli_tools import Shell
from torchlssvm.store.erasure.suppression_list import KEY_VARIABLE

pytest.importorskip("cryptography", reason="signatures need torchlssvm[audit]")
TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial_erasure.md"
JARGON = re.compile(r"\b(gram|logit|epoch|hyperparameter|tensor|gradient|loss|eigen\w*)\b", re.IGNORECASE)


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.S)


def commands() -> list[tuple[str, str]]:
    """The commands of the tutorial, each with what it is to print."""
    found = []
    for block in blocks("console"):
        for part in block.removeprefix("$ ").split("\n$ "):
            line, _, said = part.partition("\n")
            found.append((line, said))
    return found


def test_every_line_of_the_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(KEY_VARIABLE, "")
    (data,) = blocks("text")
    Path("visits.csv").write_text(data)
    shell, verbs = Shell(capsys, tmp_path), []
    for line, expected in commands():
        words = shlex.split(line)
        if words[0] == "export":
            monkeypatch.setenv(*words[1].split("=", 1))
            continue
        assert words[0] == "torchlssvm", line
        verbs.append(" ".join(w for w in words[1:3] if w.isalpha()))
        code, out, err = shell.run(*words[1:])
        assert (code == 0) == ("error:" not in expected), err
        said = out + err
        assert doctest.OutputChecker().check_output(expected.rstrip("\n"), said.rstrip("\n"), doctest.ELLIPSIS), (
            f"{line}\n{said}"
        )
        assert not JARGON.search(said), said
    wanted = ("request open", "preview shop", "remove shop", "compact shop", "certificate issue", "certificate show")
    assert {*wanted, "request close"} < set(verbs)
    page = Path("R-2026-17.html").read_text()
    assert "Example Ltd (signature checked)" in page
    assert "customer-33" not in page
    for file in (p for p in Path("shop").rglob("*") if p.is_file()):
        assert b"customer-33" not in file.read_bytes(), file
    assert os.stat("R-2026-17.receipt.json").st_mode & 0o077 == 0


def test_a_name_written_in_another_way_is_not_answered_with_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    Path("v.csv").write_text("id,who,kind,a\n1,Zo\u00eb  Berg,x,1\n2,Zo\u00eb  Berg,y,2\n", encoding="utf-8")
    shell = Shell(capsys, tmp_path)
    shell("init", "s", "--in-features", 1, "--classes", "x,y")
    shell("add", "s", "--features", "v.csv", "--ids", "id", "--subjects", "who", "--labels", "kind")
    assert "attention" in shell("show", "s", "--subject", "zoe\u0308 berg")
    assert "attention" in shell("request", "open", "s", "--subject", "Zoe\u0308 Berg")
    assert "attention" not in shell("show", "s", "--subject", "Zoe Berg")
