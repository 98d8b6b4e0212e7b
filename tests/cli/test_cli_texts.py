"""Texts through a small encoder of transformers: nothing is downloaded, the encoder is a folder."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
import torch

from tests.support.cli_tools import Shell
from torchlssvm import attach

transformers = pytest.importorskip("transformers")

WORDS = ["card", "lost", "rate", "euro", "my", "the", "stolen", "exchange"]
TEXTS = ["my card", "the lost card", "my stolen card", "the rate", "euro exchange rate", "exchange my euro"]
LABELS = ["card"] * 3 + ["rate"] * 3


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a BERT of random weights and its tokenizer."""
    folder = tmp_path_factory.mktemp("encoder")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=16)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=5 + len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def write_files() -> None:
    Path("new.txt").write_text("\n".join(TEXTS) + "\n\n")
    rows = [*zip(range(6), TEXTS, LABELS, strict=True)]
    for name, column in (("new.csv", "text"), ("question.csv", "question")):
        with Path(name).open("w", newline="") as file:
            csv.writer(file).writerows([("nr", column, "intent"), *rows])


@pytest.mark.parametrize("made_by", ["init", "attach"])
def test_texts_are_learned_and_classified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], encoder: Path, made_by: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell(capsys, tmp_path)
    write_files()
    truth = attach(str(encoder), 2, classes=["card", "rate"], layers="blocks", grid=64.0)
    truth.add(TEXTS, LABELS)
    if made_by == "init":
        shell("init", "s", "--classes", "card,rate", "--backbone", encoder, "--layers", "blocks", "--grid", "64")
        shell("add", "s", "--text", "new.csv", "--labels", "intent", "--ids", "nr")
    else:
        made = attach(str(encoder), 2, classes=["card", "rate"], layers="blocks", grid=64.0, store="s")
        made.add(TEXTS, LABELS, ids=list("abcdef"))
        made.store.close()
    expected = truth.predict(TEXTS, names=True)
    for given in (["new.txt"], ["new.csv"], ["question.csv", "--text-column", "question"]):
        rows = list(csv.DictReader(io.StringIO(shell("classify", "s", "--text", *given))))
        assert [row["class"] for row in rows] == expected
    said = shell.json("classify", "s", "--text", "new.csv", "--labels", "intent", "--ids", "nr")
    assert said["accuracy"] == truth.score(TEXTS, LABELS)
    assert [row["id"] for row in said["predictions"]] == list("012345")
    Path("a.png").write_bytes(b"")
    assert "--text" in shell("classify", "s", "--images", "a.png", code=1)
    assert "'wrong'" in shell("classify", "s", "--text", "new.csv", "--text-column", "wrong", code=1)
    shell("classify", "s", "--features", "new.csv", "--text-column", "text", code=2)


def test_a_store_of_features_takes_no_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell(capsys, tmp_path)
    write_files()
    shell("init", "s", "--classes", "2", "--in-features", "3")
    assert "--backbone" in shell("classify", "s", "--text", "new.txt", code=1)
