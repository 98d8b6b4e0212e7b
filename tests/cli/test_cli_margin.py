"""The command line with a MarginHead: the same commands, the same digests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.cli_tools import ADD, GRID, J, K, N, Shell, write
from torchlssvm import MarginHead
from torchlssvm.errors import StoreBusyError
from torchlssvm.store import SampleStore


def test_a_store_with_a_margin_head(shell: Shell) -> None:
    x, y, subjects = write(shell.folder)
    shell("init", "s", "--in-features", J, "--classes", "ant,bee,cow", "--grid", "16", "--head", "margin", "--rho", 0.5)
    shell(*ADD)
    shell("export", "s", "all.pt")
    assert shell.json("stats", "s")["head"] == "MarginHead"
    looked = shell.json("preview", "s", "--subject", "person-07", "--features", "x.npy", "--labels", "y.npy")
    keep = np.array([s != "person-07" for s in subjects])
    assert (looked["samples"], looked["remaining"]) == (N - keep.sum(), keep.sum())
    shell("relabel", "s", "--id", "s1", "--label", "cow")
    y[1] = 2
    gone = shell.json("remove", "s", "--subject", "person-07", "--compact", "--certificate", "c.json")
    fresh = MarginHead(J, K, rho=0.5, grid=GRID).add(torch.from_numpy(x[keep]), torch.from_numpy(y[keep]))
    assert gone["digest"] == fresh.digest()
    verify = ["verify", "c.json", "--store", "s", "--allow-unsigned"]
    assert "active match" in shell.json(*verify)["checks"]["head"]
    shell("export", "s", "rest.pt")
    assert shell.json(*verify, "--exported-head", "rest.pt")["verified"] is True
    assert "learned others" in shell(*verify, "--exported-head", "all.pt", code=3)
    with SampleStore(shell.folder / "s") as store:
        torch.testing.assert_close(store.head.w, fresh.w, rtol=1e-12, atol=1e-12)
    page = shell.json("report", "s", "--out", "r.html")
    scores = fresh.leave_one_out(torch.from_numpy(x[keep]), torch.from_numpy(y[keep]))
    right = float((scores.argmax(1) == torch.from_numpy(y[keep])).double().mean())
    assert page["accuracy"] == pytest.approx(right, abs=1e-12)
    assert "cross-validation in five folds" in (shell.folder / "r.html").read_text()


@pytest.mark.parametrize("method", ["kfold", "loo"])
def test_rho_is_chosen_once(shell: Shell, method: str) -> None:
    x, y, _ = write(shell.folder)
    margin = ["--in-features", J, "--classes", K, "--grid", "16", "--head", "margin"]
    assert "margin" in shell("init", "s", *margin, "--rho", "gcv", code=2)
    shell("init", "s", *margin)
    shell(*ADD)
    assert "MarginHead takes a number or kfold or loo" in shell("set", "s", "--rho", "gcv", code=2)
    head = MarginHead(J, K, rho=1.0, grid=GRID).add(torch.from_numpy(x), torch.from_numpy(y))
    rho = head.select_rho(method=method).rho
    assert shell.json("set", "s", "--rho", method)["rho"] == rho
    with SampleStore(shell.folder / "s", readonly=True) as store:
        assert store.head.rho == rho
    chosen = f"{rho!r}, chosen by {method} out of 9 values, made"
    assert shell.json("stats", "s")["rho"] == f"{chosen} for the current samples"
    shell("remove", "s", "--subject", "person-07", "--certificate", "c.json")
    verify = ["verify", "c.json", "--store", "s", "--allow-unsigned"]
    assert shell.json(*verify)["outcomes"]["rho"] == "kept"
    page = shell("certificate", "show", "c.json", "--store", "s")
    assert "Settings chosen before the erasure and kept: rho." in page


def test_while_rho_is_chosen_other_writers_wait(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    write(shell.folder)
    shell("init", "s", "--in-features", J, "--classes", K, "--grid", "16", "--head", "margin")
    shell(*ADD)
    select_rho = MarginHead.select_rho

    def slow(head: MarginHead, **options: str) -> object:
        with SampleStore(shell.folder / "s", timeout=0.05) as other, pytest.raises(StoreBusyError):
            other.set_rho(0.125)
        return select_rho(head, **options)

    monkeypatch.setattr(MarginHead, "select_rho", slow)
    shell("set", "s", "--rho", "kfold")
    assert "kfold" in shell.json("stats", "s")["rho"]
