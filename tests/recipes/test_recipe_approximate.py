"""The recipe of the approximate removal, on the digits that ship with scikit-learn."""

from pathlib import Path
from typing import Any

import pytest


def test_estimates_are_right(
    load_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "sklearn"):
        pytest.importorskip(name)
    datasets = pytest.importorskip("torchvision.datasets")

    def no_download(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no network in a test")

    monkeypatch.delenv("TORCHLSSVM_DATA", raising=False)
    monkeypatch.setattr(datasets, "MNIST", no_download)
    result = load_recipe("approximate_removal").main(["--draws", "8", "--out", str(tmp_path)])
    rows = [row for row in result["table"] if "error" in row]
    assert len(rows) >= 4
    for row in rows:
        assert row["worst"] <= 1.0
        if row["noise"] <= 0.01:
            assert row["estimate"] == pytest.approx(row["error"], rel=0.5)
    assert rows[0]["error"] < rows[0]["kept"]
    assert result["picture"].read_bytes().startswith(b"\x89PNG")
    assert "below its bound" in capsys.readouterr().out
