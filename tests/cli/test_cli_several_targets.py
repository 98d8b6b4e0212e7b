"""The command line with several labels for each sample, and with numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.cli_tools import ADD, GRID, J, K, Shell, write
from torchlssvm import LSSVMHead

INIT = ["init", "s", "--in-features", J, "--classes", "ant,bee,cow", "--grid", "16", "--rho", 0.5]


@pytest.mark.parametrize(
    ("targets", "weight"), [("multilabel", None), ("regression", None), ("multilabel", "balanced")]
)
def test_a_store_from_init_to_the_certificate(shell: Shell, targets: str, weight: str | None) -> None:
    x, _, subjects = write(shell.folder)
    y = (x[:, :K] > 0.3).astype(np.int64) if targets == "multilabel" else np.round(x[:, :K] * 64) / 64
    np.save(shell.folder / "y.npy", y)
    shell(*INIT, "--targets", targets, *([] if weight is None else ["--class-weight", weight]))
    shell(*ADD)
    assert shell.json("stats", "s")["targets"] == targets
    keep = np.array([s != "person-07" for s in subjects])
    gone = shell.json("remove", "s", "--subject", "person-07", "--compact", "--certificate", "c.json")
    head = LSSVMHead(J, K, rho=0.5, grid=GRID, targets=targets, class_weight=weight)
    head.add(torch.from_numpy(x), torch.from_numpy(y)).remove(torch.from_numpy(x[~keep]), torch.from_numpy(y[~keep]))
    assert gone["digest"] == head.digest()
    assert shell.json("verify", "c.json", "--store", "s", "--allow-unsigned")["verified"] is True
    found = shell.json("classify", "s", "--features", "x.npy")["predictions"]
    answers = head.predict(torch.from_numpy(x))
    if targets == "multilabel":
        names = [
            ";".join(n for n, on in zip(("ant", "bee", "cow"), row, strict=True) if on) for row in answers.tolist()
        ]
        assert [row["labels"] for row in found] == names
    else:
        assert [[row[n] for n in ("ant", "bee", "cow")] for row in found] == pytest.approx(np.array(answers), abs=1e-9)
    assert "several labels or numbers" in shell("classify", "s", "--features", "x.npy", "--labels", "y.npy", code=2)
    assert targets in shell("relabel", "s", "--id", "s1", "--label", "cow", code=1)
    look = ["preview", "s", "--subject", "person-08", "--features", "x.npy"]
    if targets == "multilabel":
        found = shell.json(*look, "--labels", "y.npy")
        assert found["accuracy_before"] == pytest.approx(float((answers.numpy() == y).mean()))
        assert f"of {answers.numel()} predictions" in shell(*look)
    else:
        assert targets in shell(*look, "--labels", "y.npy", code=1)
    np.save(shell.folder / "one.npy", y[:, 0])
    assert shell(*look, "--labels", "one.npy", code=1)
    assert "several labels or numbers" in shell("set", "s", "--add-classes", "dog", code=1)
    assert "labels" in shell("report", "s", "--out", "r.html", code=1)


@pytest.mark.parametrize("targets", ["multilabel", "regression"])
def test_one_label_or_number_per_sample(shell: Shell, targets: str) -> None:
    """Its value may be a text; a name is none."""
    x, _, _ = write(shell.folder)
    y = (x[:, 0] > 0.3).astype(np.int64) if targets == "multilabel" else np.round(x[:, 0] * 64) / 64
    shell("init", "s", "--in-features", J, "--classes", 1, "--grid", "16", "--rho", 0.5, "--targets", targets)
    file = shell.folder / "y.csv"
    file.write_text("id,label\n" + "".join(f"x.npy:{i},{value}\n" for i, value in enumerate(y.tolist())))
    shell("add", "s", "--features", "x.npy", "--labels", "y.csv")
    head = LSSVMHead(J, 1, rho=0.5, grid=GRID, targets=targets).add(torch.from_numpy(x), torch.from_numpy(y))
    assert shell.json("stats", "s")["digest"] == head.digest()
    new = 1 - y[:1] if targets == "multilabel" else y[:1] + 0.5
    shell("relabel", "s", "--id", "x.npy:0", "--label", str(new[0]))
    head.relabel(torch.from_numpy(x[:1]), torch.from_numpy(y[:1]), torch.from_numpy(new))
    assert shell.json("stats", "s")["digest"] == head.digest()
    for bad in ("ant", "nan"):
        assert shell("relabel", "s", "--id", "x.npy:0", "--label", bad, code=1)
    if targets == "multilabel":
        assert "multilabel" in shell("relabel", "s", "--id", "x.npy:0", "--label", "2.5", code=1)
    assert shell.json("stats", "s")["digest"] == head.digest()


def test_options_for_classes_are_refused(shell: Shell) -> None:
    assert "MarginHead" in shell(*INIT, "--targets", "multilabel", "--head", "margin", code=1)
    assert "class_weight" in shell(*INIT, "--targets", "regression", "--class-weight", "balanced", code=1)
