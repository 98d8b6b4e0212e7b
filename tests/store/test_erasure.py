"""Erasure means erasure: no byte, no hash and no digest is left that answers "was X in it?"."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import store_file
from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.errors import StoreBusyError
from torchlssvm.events import Add, Relabel, Remove, Replace
from torchlssvm.store import SampleStore

J, K, N = 48, 3, 120
SUBJECT = "Ada Lovelace, 10 December 1815"


def new_head(**options: object) -> LSSVMHead:
    return LSSVMHead(J, K, **({"grid": FixedPoint(8.0)} | options))  # type: ignore[arg-type]


def filled(path: Path, **options: object) -> tuple[SampleStore, torch.Tensor, torch.Tensor, list[str]]:
    """A store with 12 samples of one subject among 120, in several events, snapshots and all."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, J, generator=generator), torch.arange(N) % K
    ids = [f"photograph-{i:05d}" for i in range(N)]
    subjects = [SUBJECT if i % 10 == 3 else f"somebody else {i % 7}" for i in range(N)]
    store = SampleStore(path, head=new_head(**options), snapshot_rows=30)
    for start in range(0, N, 20):
        part = slice(start, start + 20)
        store.apply(Add(ids=ids[part], x=x[part], y=y[part], subject=subjects[part]))
    store.apply(Relabel(ids=[ids[3], ids[13]], y=[2, 2]))
    store.apply(Replace(ids=[ids[23]], x=x[:1] + 1))
    return store, x, y, ids


def traces(folder: Path, needles: dict[str, bytes]) -> dict[str, list[str]]:
    """Which needles are found in which files."""
    found: dict[str, list[str]] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for name, needle in needles.items():
                if needle in content:
                    found.setdefault(name, []).append(path.name)
    return found


def needles_of(store: SampleStore, ids: list[str]) -> dict[str, bytes]:
    """Ids, subject, nonces and pieces of the features as they are written."""
    rows = store.get(ids)
    out = {f"id {i}": i.encode() for i in ids} | {"subject": SUBJECT.encode()}
    out |= {f"nonce of {i}": n for i, n in zip(ids, rows.nonces, strict=True)}
    written = dict(store_file.read(store.path, "SELECT id, features FROM samples"))
    for i in ids:
        data = written[i]
        out |= {f"features of {i} from {at}": data[at : at + 12] for at in range(0, len(data) - 12, 12)}
    return out


@pytest.mark.parametrize("options", [{}, {"per_class": True}, {"grid": None}], ids=str)
def test_no_byte_is_left(tmp_path: Path, options: dict[str, object]) -> None:
    store, x, y, ids = filled(tmp_path / "store", **options)
    erased = store.find(subject=SUBJECT)
    needles = needles_of(store, erased)
    assert set(traces(tmp_path, needles)) == set(needles)  # the test can find them
    store.apply(Remove(subject=SUBJECT))
    assert [p for p in tmp_path.rglob("*.snapshot.pt") if p.name < f"{store.position:012d}"] == []
    store.compact()
    torch.save(store.head.state_dict(), tmp_path / "head.pt")
    assert traces(tmp_path, needles) == {}
    store.close()
    assert traces(tmp_path, needles) == {}
    if "grid" not in options:
        kept = [i for i in range(N) if ids[i] not in erased]
        never = new_head(**options).add(x[kept], y[kept])
        with SampleStore(tmp_path / "store") as again:
            assert again.head.digest() == never.digest()
            assert torch.equal(again.head.refresh().w, never.refresh().w)
    assert len(list((tmp_path / "store").glob("*.snapshot.pt"))) == ("grid" not in options)


def test_before_compaction_the_certificate_says_so(tmp_path: Path) -> None:
    store, *_ = filled(tmp_path / "store")
    torch.save(store.head.state_dict(), tmp_path / "head.pt")
    store.register_checkpoint(tmp_path / "head.pt")
    store.register_checkpoint(tmp_path / "gone.pt")
    receipt = store.apply(Remove(subject=SUBJECT))
    before = store.certificate(receipt.event_id)
    assert not before.compacted
    assert before.scope["snapshots"] == []  # sums of before an erasure are removed at once
    assert before.scope["checkpoints"] == [str(tmp_path / "head.pt")]
    report = store.compact()
    assert report.checkpoints == [str(tmp_path / "head.pt")]
    after = store.certificate(receipt.event_id)
    assert after.compacted
    assert after.scope["snapshots"] == []
    store.register_checkpoint(tmp_path / "head.pt")  # written anew
    assert store.certificate(receipt.event_id).scope["checkpoints"] == []
    store.apply(Remove(ids=store.find()[:1], event_id="later"))
    assert not store.certificate("later").compacted
    assert store.certificate(receipt.event_id).compacted
    store.close()


def test_an_open_reader_keeps_the_log_and_compaction_says_so(tmp_path: Path) -> None:
    filled(tmp_path / "store")[0].close()
    store = SampleStore(tmp_path / "store", timeout=0.05)
    needles = needles_of(store, store.find(subject=SUBJECT))
    reader = SampleStore(tmp_path / "store", readonly=True)
    with reader.view():
        assert len(reader) == N
        receipt = store.apply(Remove(subject=SUBJECT))
        with pytest.raises(StoreBusyError, match="not compacted"):
            store.compact()
        assert traces(tmp_path, needles)
        assert not store.certificate(receipt.event_id).compacted
    store.compact()
    assert traces(tmp_path, needles) == {}
    assert store.certificate(receipt.event_id).compacted
    reader.close()
    store.close()


def test_no_row_is_wider_because_of_an_erased_one(tmp_path: Path) -> None:
    """Two stores with the same samples at the end, one of which once held an outlier in the same event."""
    sizes = []
    for outlier in (0.0, 7.0):
        x = torch.full((3, J), 2.0**-10)
        x[1] = outlier
        with SampleStore(tmp_path / f"{outlier}", head=new_head()) as store:
            store.apply(Add(ids=["a", "b", "c"], x=x, y=[0, 1, 2]))
            store.apply(Remove(ids=["b"]))
            assert torch.equal(store.get(["a"]).x, x[:1].double())
            rows = store_file.read(store.path, "SELECT id, length(features) FROM samples ORDER BY seq")
            sizes.append(rows)
    assert sizes[0] == sizes[1] == [("a", 2 * J), ("c", 2 * J)]


@pytest.mark.parametrize(
    "steps", [0, 1, -1, 127, -128, 128, -129, 32767, -32768, 32768, -32769, 2**23 - 1, -(2**23), 2**23]
)
def test_every_width_is_read_back(tmp_path: Path, steps: int) -> None:
    grid = FixedPoint(2.0**26, bits=26)
    with SampleStore(tmp_path / "s", head=LSSVMHead(J, K, grid=grid)) as store:
        x = torch.zeros(4, J, dtype=torch.float64)
        x[1, 5], x[2] = steps, steps
        store.apply(Add(ids=list("abcd"), x=x, y=[0, 1, 2, 0]))
        assert torch.equal(store.get(list("abcd")).x, x)
        least = next(w for w in (1, 2, 3, 4) if -(1 << 8 * w - 1) <= steps < 1 << 8 * w - 1)
        assert [r[0] for r in store_file.read(store.path, "SELECT length(features) FROM samples ORDER BY seq")] == [
            J,
            least * J,
            least * J,
            J,
        ]


def test_an_auditor_computes_the_digest_without_the_library(tmp_path: Path) -> None:
    store, *_ = filled(tmp_path / "store")
    store.apply(Remove(subject=SUBJECT))
    digest = store.head.digest()
    store.close()
    script = Path(__file__).parents[1] / "support" / "auditor.py"
    assert "torchlssvm" not in "".join(line for line in script.read_text().splitlines() if "import" in line)
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store")], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == digest
