"""Damaged files on the command line: success or one line, JSON either way, never a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli_tools import ADD, write
from torchlssvm import cli

VERIFY = ["verify", "c.json", "--store", "s", "--allow-unsigned"]
VERIFY_HEAD = ["verify", "c.json", "--exported-head", "h.pt", "--opening", "o.json", "--allow-unsigned"]
OPENING = ["certificate", "opening", "s", "o.json"]
ON_STORE = [
    VERIFY, ADD, ["stats", "s"], ["history", "s"], ["compact", "s"], ["remove", "s", "--id", "s3"],
    ["relabel", "s", "--id", "s2", "--label", "0"], ["export", "s", "o.jsonl", "--format", "jsonl", "--force"],
    ["preview", "s", "--subject", "person-02", "--features", "x.npy", "--labels", "y.npy"],
]  # fmt: skip


def run(*arguments: str) -> int:
    """A command with --json; its output is checked whatever comes of it."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([*arguments, "--json"])
    said = json.loads(out.getvalue())
    if code:
        assert said["error"]["exit_code"] == code
        assert err.getvalue() == f"torchlssvm: error: {said['error']['message']}\n"
    return code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store "good" with an erasure, its certificate and its head."""
    here, there = Path.cwd(), tmp_path_factory.mktemp("fuzz")
    os.chdir(there)
    logging.disable(logging.CRITICAL)  # what the store says when it recovers is not the question here
    write(there)
    assert run("init", "s", "--in-features", "5", "--classes", "3", "--grid", "16") == 0
    assert run(*ADD) == run("remove", "s", "--subject", "person-01", "--certificate", "c.json", "--compact") == 0
    assert run(*OPENING) == run("export", "s", "h.pt") == run(*VERIFY) == run(*VERIFY_HEAD) == 0
    shutil.copytree("s", "good")
    yield there
    logging.disable(logging.NOTSET)
    os.chdir(here)


def damage(raw: bytes, dice: random.Random) -> bytes:
    """Some bytes changed; at times the end cut off."""
    out = bytearray(raw)
    for _ in range(dice.choice([1, 1, 2, 5, 40])):
        if out:
            out[dice.randrange(len(out))] = dice.randrange(256)
    return bytes(out if dice.random() < 0.8 else out[: dice.randrange(len(out) + 1)])


@pytest.mark.parametrize(("name", "command"), [("c.json", VERIFY), ("h.pt", VERIFY_HEAD)])
def test_a_damaged_certificate_or_head(folder: Path, name: str, command: list[str]) -> None:
    dice, good = random.Random(0), (folder / name).read_bytes()
    shutil.rmtree("s", ignore_errors=True)
    shutil.copytree("good", "s")
    codes = []
    try:
        for _ in range(60):
            (folder / name).write_bytes(damage(good, dice))
            codes.append(run(*command))
    finally:
        (folder / name).write_bytes(good)
    assert set(codes) <= {0, 1, 3}
    assert codes.count(0) < 30  # an unsigned certificate may have another time, a file unused bytes


@pytest.mark.slow
def test_a_damaged_store(folder: Path) -> None:
    dice = random.Random(0)
    codes = []
    for _ in range(1000):
        shutil.rmtree("s", ignore_errors=True)
        shutil.copytree("good", "s")
        file = dice.choice(sorted(Path("s").iterdir()))
        file.write_bytes(damage(file.read_bytes(), dice))
        command = dice.choice(ON_STORE)
        codes.append((command[0], run(*command)))
    assert {code for _, code in codes} <= {0, 1, 3}
    assert {code for name, code in codes if name == "verify"} == {0, 3}
    assert all(code in (0, 1) for name, code in codes if name != "verify")
