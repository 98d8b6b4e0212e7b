"""What `add` and `preview` read: .npy, .pt and CSV give the same store, and no bad file gives a traceback."""

from __future__ import annotations

import csv
import gzip
import io
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.cli_tools import N, Shell, head_of, write
from torchlssvm.cli.sample_files import is_header, read_column, read_samples
from torchlssvm.store import SampleStore


def csv_text(header: bool = True) -> str:
    x, y, subjects = write(Path())
    lines = [
        ",".join([f"s{i}", *map(repr, map(float, x[i])), subjects[i], ("ant", "bee", "cow")[y[i]]]) for i in range(N)
    ]
    return "\n".join(["who,f0,f1,f2,f3,f4,person,kind", *lines] if header else lines) + "\n"


# -- the same samples in every form ------------------------------------------------------------------------------------


def test_every_form_gives_the_same_head(empty: Shell) -> None:
    x, y, subjects = write(empty.folder)
    torch.save(torch.tensor(x), "x.pt")
    torch.save(torch.tensor(y), "y.pt")
    np.save("big.npy", x.astype(">f8"))
    np.save("names.npy", np.array(["ant", "bee", "cow"])[y])
    np.save("numbers.npy", np.arange(N))
    Path("x.csv").write_text(csv_text())
    Path("x.csv.gz").write_bytes(gzip.compress(csv_text(header=False).encode()))
    Path("y.txt").write_text("".join(f"{k}.0\n" for k in y))
    rows = np.random.default_rng(0).permutation(N)
    Path("y.csv").write_text("id,label,subject\n" + "".join(f"s{i},{y[i]},{subjects[i]}\n" for i in rows))
    forms = {
        "npy": ["--features", "x.npy", "--labels", "y.npy"],
        "pt": ["--features", "x.pt", "--labels", "y.pt"],
        "big-endian": ["--features", "big.npy", "--labels", "names.npy", "--ids", "numbers.npy"],
        "csv": ["--features", "x.csv", "--labels", "kind", "--ids", "who", "--subjects", "person"],
        "csv.gz": ["--features", "x.csv.gz", "--labels", "-1", "--ids", "0", "--subjects", "6"],
        "text": ["--features", "x.npy", "--labels", "y.txt", "--ids", "ids.txt", "--subject", "all", "--by-position"],
        "by id": [
            "--features",
            "x.npy",
            "--labels",
            "y.csv",
            "--ids",
            "ids.txt",
            "--subjects",
            "y.csv",
            "--by-position",
        ],
    }
    for name, arguments in forms.items():
        empty("init", name, "--in-features", 5, "--classes", "ant,bee,cow", "--grid", "16")
        said = empty.json("add", name, *arguments, "--batch-size", 17)
        assert said["digest"] == head_of(x, y).digest(), name
    for name in ("csv", "csv.gz", "by id"):
        with SampleStore(name) as store:
            assert store.find() == [f"s{i}" for i in range(N)]
            assert [sample.subject for sample in store] == subjects
    with SampleStore("text") as store:
        assert store.subjects() == {"all": N}
    with SampleStore("npy") as store:
        assert store.find()[:2] == ["x.npy:0", "x.npy:1"]
        assert store.subjects() == {}


def test_other_types_of_numbers(empty: Shell) -> None:
    x = np.random.default_rng(0).integers(-8, 8, size=(N, 5))
    y = np.arange(N) % 3
    for i, kind in enumerate(["i1", "u2", "u8", "f2", "f4", "f8", "g", "i8"]):
        np.save("t.npy", np.abs(x).astype(kind))
        np.save("y.npy", y.astype(kind if kind[0] in "iu" else "i8"))
        empty("init", f"s{i}", "--in-features", 5, "--classes", 3, "--grid", "16")
        said = empty.json("add", f"s{i}", "--features", "t.npy", "--labels", "y.npy")
        assert said["digest"] == head_of(np.abs(x).astype("f8"), y).digest()
    for i, dtype in enumerate([torch.bfloat16, torch.int32]):
        torch.save(torch.tensor(x).to(dtype), "t.pt")
        empty("init", f"t{i}", "--in-features", 5, "--classes", 3, "--grid", "16")
        said = empty.json("add", f"t{i}", "--features", "t.pt", "--labels", "y.npy")
        assert said["digest"] == head_of(x.astype("f8"), y).digest()


def test_npy_is_mapped_not_loaded(tmp_path: Path) -> None:
    big = np.lib.format.open_memmap(tmp_path / "big.npy", mode="w+", dtype="f4", shape=(200_000, 64))  # 51 MB
    big[-1] = 7
    big.flush()
    tracemalloc.start()
    for x, _, ids, _ in read_samples(tmp_path / "big.npy", int).batches(1024):
        last = ids[-1], float(x[-1, 0])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert last == ("big.npy:199999", 7.0)
    assert peak < 25e6


# -- bad files ---------------------------------------------------------------------------------------------------------


def bad_npy(change: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, change(write(Path())[0]), allow_pickle=True)
    return buffer.getvalue()


BAD: dict[str, Any] = {
    "missing.npy": None,
    "x.txt": b"1 2 3",
    "empty.npy": b"",
    "noise.npy": b"\x93NUMPY\x01\x00\xff\xff{{{{",
    "half.npy": lambda: bad_npy(lambda x: x)[:-100],
    "header.npy": lambda: bad_npy(lambda x: x)[:40],
    "flat.npy": lambda: bad_npy(lambda x: x[:, 0]),
    "wide.npy": lambda: bad_npy(lambda x: x[:, :4]),
    "short.npy": lambda: bad_npy(lambda x: x[:-1]),
    "none.npy": lambda: bad_npy(lambda x: x[:0]),
    "nan.npy": lambda: bad_npy(lambda x: np.where(x == x[40, 2], np.nan, x)),
    "huge.npy": lambda: bad_npy(lambda x: x * 1e6),
    "text.npy": lambda: bad_npy(lambda x: x.astype(str)),
    "complex.npy": lambda: bad_npy(lambda x: x.astype(complex)),
    "objects.npy": lambda: bad_npy(lambda x: x.astype(object)),
    "zip.npy": b"PK\x03\x04 something",
    "empty.pt": b"",
    "noise.pt": b"\x80\x02nonsense",
    "zip.pt": b"PK\x03\x04 something",
    "empty.csv": b"",
    "header.csv": b"a,b,c,d,e\n",
    "text.csv": b"a,b,c,d,e\n1,2,3,4,5\n1,2,many,4,5\n",
    "ragged.csv": b"1,2,3,4,5\n1,2,3,4\n",
    "binary.csv": b"\xff\xfe\x00\x01\x02",
    "nul.csv": b"1,2,3,4,5\n1,\x00,3,4,5\n",
    "quote.csv": b'1,2,3,4,"5\n' + b"1" * 200_000,
    "plain.csv.gz": b"1,2,3,4,5\n",
    "half.csv.gz": lambda: gzip.compress(csv_text().encode())[:-200],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_features(empty: Shell, name: str) -> None:
    content = BAD[name]
    if content is not None:
        Path(name).write_bytes(content() if callable(content) else content)
    assert name in empty("add", "s", "--features", name, "--labels", "y.npy", code=1)
    empty("preview", "s", "--id", "s0", "--features", name, code=1)
    assert empty.json("history", "s")["events"] == []


def test_a_pickle_is_not_run(empty: Shell) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path("boom").touch, ())

    torch.save({"x": Bomb()}, "bomb.pt")
    empty("add", "s", "--features", "bomb.pt", "--labels", "y.npy", code=1)
    np.save("bomb.npy", np.array([Bomb()] * N), allow_pickle=True)
    empty("add", "s", "--features", "x.npy", "--labels", "bomb.npy", code=1)
    assert not Path("boom").exists()


@pytest.mark.parametrize(
    ("option", "content", "fact"),
    [
        ("--labels", "0\n1\n", "2 values"), ("--labels", "dog\n" * N, "'dog'"), ("--labels", "3\n" * N, "label 3"),
        ("--labels", "-1\n" * N, "label -1"), ("--labels", "0.5\n" * N, "'0.5'"), ("--labels", "inf\n" * N, "'inf'"),
        ("--labels", "\n" * N, "''"), ("--ids", "a\n" * N, "'a' occurs twice"),
        ("--ids", "\n".join(map(str, range(N - 1))) + "\n\n", "must be a text"), ("--ids", "a\n", "1 values"),
        ("--subjects", "a\n", "1 values"), ("--subjects", ("a" * 600 + "\n") * N, "512"),
    ],
)  # fmt: skip
def test_bad_columns(empty: Shell, option: str, content: str, fact: str) -> None:
    Path("column.txt").write_text(content)
    columns = {"--labels": "y.npy", "--ids": "ids.txt", option: "column.txt"}
    words = [word for pair in columns.items() for word in pair]
    assert fact in empty("add", "s", "--features", "x.npy", "--by-position", *words, code=1)
    assert empty.json("history", "s")["events"] == []


def test_a_wrong_column_is_named(empty: Shell) -> None:
    Path("x.csv").write_text(csv_text())
    assert "'sort' is neither a column" in empty("add", "s", "--features", "x.csv", "--labels", "sort", code=1)
    message = empty("add", "s", "--features", "x.csv", "--labels", "kind", code=1)
    assert "line 2, column 'who': 's0' is not a number" in message
    Path("x.csv").write_text(csv_text().replace("cow", "dog"))
    columns = ["--labels", "kind", "--ids", "who", "--subjects", "person"]
    assert "line 4: 'dog' is neither" in empty("add", "s", "--features", "x.csv", *columns, code=1)
    Path("y.csv").write_text("id,label\ns0,0\ns0,1\n")
    assert "'s0' occurs twice" in empty("add", "s", "--features", "x.npy", "--labels", "y.csv", code=1)
    Path("y.csv").write_text("id,label\ns0,0\n")
    assert "no label for the id 'x.npy:0'" in empty("add", "s", "--features", "x.npy", "--labels", "y.csv", code=1)


def test_a_bad_batch_leaves_the_ones_before(empty: Shell) -> None:
    x, y, _ = write(empty.folder)
    x[45, 1] = 1e9
    np.save("x.npy", x)
    message = empty("add", "s", "--features", "x.npy", "--labels", "y.npy", "--batch-size", 20, code=1)
    assert "x.npy:40 to x.npy:59" in message
    assert "(40 samples added before it)" in message
    assert empty.json("stats", "s")["digest"] == head_of(x[:40], y[:40]).digest()


@pytest.mark.parametrize(
    "arguments",
    [
        "--features x.npy", "--labels y.npy", "--features x.npy --images .", "--images . --labels y.npy",
        "--images . --ids ids.txt", "--features x.npy --labels y.npy --subject a --subjects b", "--images . --fingerprint f",
        "--features x.npy --labels y.npy --batch-size 0", "--features x.npy --labels y.npy --weights w",
    ],
)  # fmt: skip
def test_options_that_do_not_go_together(empty: Shell, arguments: str) -> None:
    assert "error: " in empty("add", "s", *arguments.split(), code=2)


@pytest.mark.parametrize(
    "command",
    ["add ? --features x.npy --labels y.npy", "remove ? --id a", "relabel ? --id a --label 0", "preview ? --id a",
     "history ?", "stats ?", "compact ?", "export ? out.pt"],
)  # fmt: skip
def test_no_store_there(shell: Shell, command: str) -> None:
    Path("folder").mkdir()
    Path("foreign").mkdir()
    Path("foreign/samples.sqlite").write_bytes(b"SQLite format 3\0" + b"\x01" * 4096)
    for place in ("nowhere", "x.npy", "folder", "foreign"):
        said = shell.json(*command.replace("?", place).split(), code=1)
        assert said["error"]["type"] in ("StoreError", "NotADirectoryError")
    assert not Path("out.pt").exists()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    name=st.sampled_from(["x.npy", "x.pt", "x.csv", "x.csv.gz"]),
    flips=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, 4000) | st.none(),
)
def test_damaged_files_end_in_success_or_one_line(tmp_path: Path, name: str, flips: Any, cut: int | None) -> None:
    """Bytes changed and cut off anywhere: the readers give samples or a ValueError or OSError, nothing else."""
    x, y = write(tmp_path)[:2]
    path = tmp_path / name
    if name.endswith(".pt"):
        torch.save(torch.tensor(x), path)
    elif ".csv" in name:
        text = "\n".join(",".join(map(str, [*row, k])) for row, k in zip(x.tolist(), y.tolist(), strict=True)).encode()
        path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    raw = bytearray(path.read_bytes())[: len(path.read_bytes()) if cut is None else cut]
    for at, value in flips:
        if at < len(raw):
            raw[at] = value
    path.write_bytes(raw)
    labels = "5" if ".csv" in name else str(tmp_path / "y.npy")
    try:
        source = read_samples(path, lambda text: int(float(text)), labels=labels)
        read = [x for x, *_ in source.batches(16)]
    except (ValueError, OSError):
        return
    assert sum(map(len, read)) == len(source)
    assert all(part.shape[1] == source.width for part in read)


@pytest.mark.parametrize(
    ("text", "named", "header"),
    [
        ("1,2,3\n", (), False), ("a,b,c\n", (), True), ("1,2,cow\n", ("-1",), False), ("1,2,cow\n", (), True),
        ("0,1,label\n", ("label",), True), ("0,1,label\n", ("-1",), False), ("s0,1,cow\n", ("0", "2"), False),
        ("id,f0,kind\n", ("0", "2"), True), ("0,1,2\n", ("2",), False),
    ],
)  # fmt: skip
def test_no_sample_is_taken_for_a_header(text: str, named: tuple[str], header: bool) -> None:
    assert is_header(text.strip().split(","), named) is header


def test_columns_by_position(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2,3\n4,5,6\n")
    read = read_samples(tmp_path / "a.csv", int, labels="-1", ids="0")
    assert (read.read(slice(None)).tolist(), read.y, read.ids) == ([[2.0], [5.0]], [3, 6], ["1", "4"])
    torch.save(["a", "b"], tmp_path / "c.pt")
    assert read_column(tmp_path / "c.pt", "id", ["?", "?"], tmp_path, False) == ["a", "b"]
    torch.save({"a": 1}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="dict"):
        read_column(tmp_path / "c.pt", "id", [], tmp_path, False)


# -- classify, Parquet, lists of classes ------------------------------------------------------------------------------


def test_classify_predicts_without_learning(filled: Shell) -> None:
    x, y, _ = write(filled.folder)
    before = filled.json("stats", "s")
    with SampleStore("s", readonly=True) as store:
        scores = store.head(torch.tensor(x))
    names = [("ant", "bee", "cow")[k] for k in scores.argmax(1)]
    rows = list(csv.DictReader(io.StringIO(filled("classify", "s", "--features", "x.npy"))))
    assert [row["class"] for row in rows] == names
    assert [row["id"] for row in rows] == [f"x.npy:{i}" for i in range(N)]
    np.testing.assert_allclose([float(row["score"]) for row in rows], scores.amax(1), rtol=1e-6)

    columns = ["--labels", "y.npy", "--ids", "ids.txt", "--by-position", "--scores"]
    filled("classify", "s", "--features", "x.npy", "--labels", "y.npy")
    assert len(filled.out.splitlines()) == N + 1
    assert f"accuracy {(scores.argmax(1).numpy() == y).mean():.2%}" in filled.err
    said = filled.json("classify", "s", "--features", "x.npy", *columns, "--batch-size", 7)
    assert said["accuracy"] == float((scores.argmax(1).numpy() == y).mean())
    assert said["predictions"][3]["id"] == "s3"
    np.testing.assert_allclose([p["score bee"] for p in said["predictions"]], scores[:, 1], rtol=1e-6)
    for name in ("p.csv", "p.json"):
        filled("classify", "s", "--features", "x.npy", "--out", name)
        assert (filled.folder / name).stat().st_mode & 0o777 == 0o600
        assert "--force" in filled("classify", "s", "--features", "x.npy", "--out", name, code=1)
    assert [r["class"] for r in csv.DictReader(io.StringIO(Path("p.csv").read_text()))] == names
    filled("classify", "s", "--features", "x.npy", "--out", "p.txt", code=2)
    x[5, 2] = np.nan
    np.save("nan.npy", x)
    assert "'nan.npy:5'" in filled("classify", "s", "--features", "nan.npy", code=1)
    assert filled.json("stats", "s") == before


def test_parquet_is_read_like_csv(empty: Shell) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    x, y, subjects = write(empty.folder)
    names = ["ant", "bee", "cow"]
    columns = {"who": [f"s{i}" for i in range(N)], "f0": x[:, 0], "rest": x[:, 1:].tolist()}
    table = pyarrow.table(columns | {"kind": [names[k] for k in y], "person": subjects})
    parquet.write_table(table, "x.parquet")
    empty("add", "s", "--features", "x.parquet", "--ids", "who", "--labels", "kind", "--subjects", "person")
    Path("x.csv").write_text(csv_text())
    again = empty.json("add", "s", "--features", "x.csv", "--ids", "who", "--labels", "kind", "--subjects", "person")
    assert (again["added"], again["skipped"]) == (0, N)  # compared, and equal
    assert "'person'" in empty("add", "s", "--features", "x.parquet", "--ids", "who", "--labels", "kind", code=1)
    Path("bad.parquet").write_bytes(b"PAR1")
    assert "bad.parquet" in empty("add", "s", "--features", "bad.parquet", "--labels", "kind", code=1)


def test_classes_come_from_a_file_and_stores_are_local(shell: Shell) -> None:
    Path("names.txt").write_text("ant\nbee\ncow, spotted\n")
    shell("init", "s", "--in-features", 2, "--classes", "@names.txt")
    assert shell.json("stats", "s")["class_names"] == ["ant", "bee", "cow, spotted"]
    shell("init", "t", "--in-features", 2, "--classes", "@nowhere.txt", code=2)
    shell("init", "s3://bucket/store", "--in-features", 2, "--classes", 2, code=1)
    assert not Path("s3:").exists()
