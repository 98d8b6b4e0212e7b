"""What the tests of the command line share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchlssvm import FixedPoint, LSSVMHead, cli

N, J, K = 60, 5, 3
GRID = FixedPoint(16.0)
ADD = [
    "add", "s", "--features", "x.npy", "--labels", "y.npy", "--ids", "ids.txt", "--subjects", "subjects.txt", "--by-position",
]  # fmt: skip
"""Add the files of :func:`write` to the store s."""


class Shell:
    """Run commands in this process; each call checks that a failure is one line on stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path):
        self.capsys, self.folder = capsys, folder

    def __call__(self, *arguments: Any, code: int = 0) -> str:
        """What a command printed."""
        assert self.run(*arguments) == (code, self.out, self.err), self.err
        return self.out if code == 0 else self.err

    def run(self, *arguments: Any) -> tuple[int, str, str]:
        self.capsys.readouterr()
        try:
            code = cli.main([str(a) for a in arguments])
        except SystemExit as leaving:
            code = leaving.code
        self.out, self.err = self.capsys.readouterr()
        assert "Traceback" not in self.err
        if code not in (0, 2):
            assert self.err.startswith("torchlssvm: error: "), self.err
            assert self.err.count("\n") == 1, self.err
        return code, self.out, self.err

    def json(self, *arguments: Any, code: int = 0) -> Any:
        """What a command printed with --json: one object, for an error too."""
        self(*arguments, "--json", code=code)
        return json.loads(self.out)


def data(seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """x (N, J) float32, y (N,), subjects."""
    random = np.random.default_rng(seed)
    y = np.arange(N) % K
    x = random.normal(size=(N, J)).astype(np.float32)
    x[:, 0] += 2 * y
    return x, y, [f"person-{i % 12:02d}" for i in range(N)]


def write(folder: Path) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """The data as files: x.npy, y.npy, ids.txt, subjects.txt."""
    x, y, subjects = data()
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    (folder / "ids.txt").write_text("".join(f"s{i}\n" for i in range(N)))
    (folder / "subjects.txt").write_text("".join(f"{s}\n" for s in subjects))
    return x, y, subjects


def head_of(x: np.ndarray, y: np.ndarray) -> LSSVMHead:
    """A fresh head on samples: the truth that the store's digest is compared with."""
    return LSSVMHead(J, K, grid=GRID).add(torch.from_numpy(x), torch.from_numpy(y))
