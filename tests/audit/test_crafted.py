"""Crafted stores and certificates given to ``verify``: a named error, exit code 3, bounded time and memory."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import os
import pickle
import random
import resource
import shutil
import signal
import sqlite3
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import crafted as c
from tests.support.cli_tools import write
from torchlssvm import Certificate, VerificationError, cli, verify
from torchlssvm.distributed import Delta
from torchlssvm.untrusted import load_tensors

pytestmark = pytest.mark.skipif(os.name != "posix", reason="FIFOs and alarms are those of POSIX")


SECONDS = 60
"""Time for one verification: most take a tenth of a second."""


class Late(BaseException):
    """Not an Exception: nothing swallows it."""


@contextlib.contextmanager
def in_time(seconds: float = SECONDS) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Late(f"not done after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(*arguments: Any) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a command; an error is one line on stderr too."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), in_time():
        code = cli.main([*map(str, arguments), "--json"])
    said = json.loads(out.getvalue())
    if code:
        assert said["error"]["exit_code"] == code
        assert err.getvalue() == f"torchlssvm: error: {said['error']['message']}\n"
        assert len(err.getvalue()) < 2000
    return code, said


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store ``s`` with an erasure, its certificate ``c.json`` and its head ``h.pt``."""
    here, folder = Path.cwd(), tmp_path_factory.mktemp("good")
    os.chdir(folder)
    logging.disable(logging.CRITICAL)
    write(folder)
    columns = ["--labels", "y.npy", "--ids", "ids.txt", "--subjects", "subjects.txt", "--by-position"]
    assert run("init", "s", "--in-features", 5, "--classes", 3, "--grid", 16)[0] == 0
    assert run("add", "s", "--features", "x.npy", *columns)[0] == 0
    assert run("remove", "s", "--subject", "person-01", "--certificate", "c.json", "--compact")[0] == 0
    assert run("export", "s", "h.pt")[0] == 0
    os.chdir(here)
    yield folder
    logging.disable(logging.NOTSET)


@pytest.fixture
def place(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of them, in the current folder."""
    shutil.copytree(good / "s", tmp_path / "s")
    for name in ("c.json", "h.pt"):
        shutil.copy(good / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(code: int, said: dict[str, Any]) -> str:
    """The message of an error that is named and exits with 3."""
    assert code == 3, said
    assert said["error"]["type"] in ("VerificationError", "StoreError"), said
    return str(said["error"]["message"])


def check_store(*more: str) -> tuple[int, dict[str, Any]]:
    return run("verify", "c.json", "--store", "s", "--allow-unsigned", *more)


def test_the_good_ones_hold(place: Path) -> None:
    assert check_store("--exported-head", "h.pt")[0] == 0


# -- stores ------------------------------------------------------------------------------------------------------------

DEEP = "[" * 900 + "]" * 900
DEEPER = "[" * 200_000 + "]" * 200_000
HUGE = 10**30
LOST_PAGE = "UPDATE sqlite_master SET rootpage = {} WHERE name = 'samples'"
BAD_JSON = {
    "nested": DEEP, "nested deeper": DEEPER, "NaN": "NaN", "a list": "[]", "a number": "7", "text": '"x"', "empty": "", "no JSON": "{",
    "infinite": '{"position": Infinity}', "an empty object": "{}", "a number of 5,000 digits": "9" * 5000, "surrogate": '"\\ud800"',
}  # fmt: skip
BAD_FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "state": {"position": (..., None, -1, HUGE, True, 1.5, "zz", [1]), "samples": (..., HUGE), "digest": (..., "zz"), "chain": (None, "zz")},
    "head": {
        "type": (..., "Other"), "in_features": (..., -1, HUGE, 10**6, "5"), "num_classes": (0, 10**9, [3]), "rho": (-1, "1"), "folds": (10**9,),
        "grid": (["x", 1, 2], ["0x1p+99999", 20, 0], {}), "class_weight": ([1e400], {"a": 1}), "multiclass": ("x",),
        "unknown": (1,),
    },
    "rows": {"features": (..., 0, HUGE, "5", 4), "targets": (...,), "grid": ([1, 2], ["0x1p+4", 99, 0], ["0x1p+99999", 1, 1])},
}  # fmt: skip
BAD_CELLS: dict[str, tuple[Any, ...]] = {
    "id": (b"\xff\xfe",), "subject": (b"x",), "label": ("x", -1, 3, 2**62, None), "target": (b"12345678", "text"), "added": ("soon",),
    "nonce": ("text", b"", b"x" * 10_000), "features": (b"", b"12345", "text", b"x" * 1_000_003, b"\x7f" * 20), "checksum": ("x", 0),
}  # fmt: skip
BAD_ENTRIES: dict[str, tuple[Any, ...]] = {
    "event_id": (b"\xff",), "kind": (b"x",), "time": (b"x",), "samples": ("x", -1, 2**62), "commitments": (b"", "text", b"x" * 320_000), "mac": ("text",),
}  # fmt: skip


def all_of(*crafts: c.Craft) -> c.Craft:
    def craft(store: Path) -> None:
        for one in crafts:
            one(store)

    return craft


STORES: dict[str, c.Craft] = {
    **{f"record {name} missing": c.no_record(name) for name in ("state", "head", "rows", "fingerprint")},
    **{f"record state {what}": c.record("state", text) for what, text in BAD_JSON.items()},
    **{f"record {name} {what}": c.record(name, BAD_JSON[what]) for name in ("head", "rows", "chosen") for what in ("nested", "a list", "no JSON")},
    "record fingerprint a list": c.record("fingerprint", '["x"]'),
    "record state bytes": c.record("state", b"{}"),
    "duplicate key in the state": c.record("state", '{"position": 2, "position": 2, "samples": 55, "digest": null, "chain": ""}'),
    "state of another digest": c.change("state", digest="0" * 64),
    "state without a digest": c.change("state", digest=None),
    **{
        f"{name} {field} {value!r:.20}": c.change(name, **{field: value})
        for name, fields in BAD_FIELDS.items() for field, values in fields.items() for value in values
    },
    **{f"sample {field} {value!r:.20}": c.sample(**{field: value}) for field, values in BAD_CELLS.items() for value in values},
    "ten million classes": all_of(c.change("head", num_classes=10**7), c.change("rows", targets=10**7)),
    "fifty million pairs": all_of(c.change("head", num_classes=10**4, multiclass="ovo", per_class=True), c.change("rows", targets=10**4)),
    "a million folds": c.change("head", folds=10**6, per_class=True),
    "all rows with a target": c.sample(-1, target=b"12345678"),
    "not a number": c.sample(-1, target=b"\xff" * 24, label=None),
    **{f"entry {field} {value!r:.20}": c.entry(**{field: value}) for field, values in BAD_ENTRIES.items() for value in values},
    "a row is missing": c.execute("DELETE FROM samples WHERE seq = 1"),
    "an entry is missing": c.execute("DELETE FROM journal WHERE position = 1"),
    "an entry at a far position": c.execute("UPDATE journal SET position = 9223372036854775807 WHERE position = 2"),
    "an entry at a negative position": c.execute("UPDATE journal SET position = -7 WHERE position = 1"),
    "a short chain": c.entry(2, relink=False, chain=b"x"),
    # the schema
    "a view for a table": c.execute("DROP TABLE journal", "CREATE VIEW journal AS SELECT 1 AS position"),
    "an endless view": c.execute(
        "DROP TABLE meta",
        "CREATE VIEW meta AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS name, i AS value, 0 AS checksum FROM n",
    ),
    "one more table": c.execute("CREATE TABLE t (a)"),
    "a virtual table": c.execute("CREATE VIRTUAL TABLE f USING fts5(a)"),
    "a trigger": c.execute("CREATE TRIGGER t AFTER INSERT ON meta BEGIN DELETE FROM samples; END"),
    "an index with an expression": c.execute("CREATE INDEX i ON samples (abs(label))"),
    "a generated column": c.execute("ALTER TABLE samples ADD COLUMN g AS (hex(zeroblob(500000000)))"),
    "a column less": c.execute("ALTER TABLE samples DROP COLUMN added"),
    "a hidden table": c.schema("INSERT INTO sqlite_master VALUES ('table', 'x', 'x', 2, NULL)"),
    **{f"a schema that points to {page}": c.schema(LOST_PAGE.format(page)) for page in ("'x'", 100000, 1)},
    "two tables on one page": c.schema(LOST_PAGE.format("(SELECT rootpage FROM sqlite_master WHERE name = 'journal')")),
    "a schema that is no SQL": c.schema("UPDATE sqlite_master SET sql = 'CREATE TABLE' WHERE name = 'samples'"),
    "another application": c.execute("PRAGMA application_id = 7"),
    "another version": c.execute("PRAGMA user_version = 99"),
    "a rollback journal": c.execute("PRAGMA journal_mode = DELETE"),
    "endless samples": c.page_bomb("samples"),
    "an endless schema": c.page_bomb("sqlite_master"),
    "values in a ring": c.loop_of_pages,
    # files
    **{f"the database is {kind}": c.special(c.FILE, kind) for kind in c.SPECIAL},
    **{f"{name} is {kind}": c.special(c.FILE + name, kind) for name, kind in (("-wal", "fifo"), ("-shm", "folder"), ("-journal", "zeros"))},
    "witness of another event": c.witness(b'{"position":9,"chain":"00"}'),
    "witness of a far event": c.witness(b'{"position":1000000000000000000000000000000,"chain":"00"}'),
}  # fmt: skip
KEY = f"opening/{2:020d}"  # of the commitment
STORES |= {
    "key missing": c.no_record(KEY), "key nested": c.record(KEY, DEEP), "key an empty object": c.record(KEY, "{}"),
    "key no hex": c.change(KEY, key="zz"), "key short": c.change(KEY, key="00"), "another key": c.change(KEY, key="00" * 32),
}  # fmt: skip


@pytest.mark.parametrize("name", STORES)
def test_a_crafted_store(place: Path, name: str) -> None:
    STORES[name](place / "s")
    refused(*check_store())
    assert (place / "c.json").exists()


def pickled(value: Any) -> bytes:
    """A file of torch's with any pickle in it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value))
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def inflating(value: Any) -> bytes:
    """A file of torch's that is a thousand times larger when it is read."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(value))) as plain,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for item in plain.namelist():
            archive.writestr(item, plain.read(item))
    return file.getvalue()


HEADER = {"format": "torchlssvm-snapshot-1", "position": 2, "chain": "", "digest": ""}
FAST_ONLY: dict[str, c.Craft] = {
    **{f"a snapshot is {kind}": (lambda s, k=kind: c.special(next(s.glob("*.snapshot.pt")).name, k)(s)) for kind in ("fifo", "zeros", "sparse")},
    "a snapshot of a list": c.snapshot(saved([1])),
    "a snapshot of noise": c.snapshot(b"PK\x03\x04" + bytes(1000)),
    "a snapshot with code": c.snapshot(pickled(print)),
    "a snapshot without fields": c.snapshot(saved({"format": "torchlssvm-snapshot-1"})),
    "a snapshot at text": c.snapshot(saved(HEADER | {"position": "x", "statistics": {}})),
    "a snapshot without statistics": c.snapshot(saved(HEADER | {"statistics": None})),
    "a snapshot of wrong statistics": c.snapshot(saved(HEADER | {"statistics": {"meta": torch.zeros(3), "counts": 7}})),
    "a snapshot of endless sums": c.snapshot(saved(HEADER | {"statistics": {"sums": torch.zeros(1).expand(10**9, 10**9)}})),
    "a snapshot that inflates": c.snapshot(inflating(HEADER | {"statistics": {"sums": torch.zeros(10**8)}})),
    "a snapshot by a strange name": lambda s: (s / "٣.snapshot.pt").write_bytes(b"x") and None,
    **{f"a witness is {kind}": c.special("acknowledged", kind) for kind in ("fifo", "folder", "zeros")},
    "a witness of noise": c.content("acknowledged", b"\xff" * 300),
    "a witness that is nested": c.witness(b"[" * 200),
}  # fmt: skip


@pytest.mark.parametrize("name", FAST_ONLY)
def test_what_only_makes_opening_fast_is_not_needed(place: Path, name: str) -> None:
    """Snapshots are not the truth, and a witness may be missing: the rows are summed, and the certificate holds."""
    FAST_ONLY[name](place / "s")
    code, said = check_store()
    assert code == 0 or refused(code, said)
    if "snapshot" in name:
        assert code == 0


def test_a_journal_of_another_program_deletes_no_file(place: Path) -> None:
    """SQLite deletes the file that a rollback journal names as the one of several databases."""
    victim = place / "precious.txt"
    victim.write_bytes(b"\0")
    name = str(victim).encode()
    with c.sql(place / "s") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = 4096
    magic = bytes.fromhex("d9d505f920a163d7")
    head = (
        magic + (0).to_bytes(4, "big") * 2 + (1).to_bytes(4, "big") + (512).to_bytes(4, "big") + size.to_bytes(4, "big")
    )
    lock_page = 2**30 // size + 1
    total = sum(name) & 0xFFFFFFFF
    tail = lock_page.to_bytes(4, "big") + name + len(name).to_bytes(4, "big") + total.to_bytes(4, "big") + magic
    (place / "s" / (c.FILE + "-journal")).write_bytes(head.ljust(512, b"\0") + tail)
    refused(*check_store())
    assert victim.exists()


# -- certificates ------------------------------------------------------------------------------------------------------

Certify = Callable[[dict[str, Any]], bytes]
CERTIFICATES: dict[str, Certify] = {
    **{
        f"scope {what}": c.raw("scope", text)
        for what, text in {
            "NaN": "NaN", "infinite": "-Infinity", "nested": DEEP, "nested deeper": DEEPER, "nested objects": '{"a":' * 900 + "1" + "}" * 900,
            "5,000 digits": "9" * 5000, "float": "1e400", "truncated": "[", "control": '"\x01"', "NaN inside": '{"choices": {"a": NaN}}',
            "float inside": '{"choices": {"a": 1.5}}', "nested inside": '{"choices": ' + '{"a":' * 900 + "1" + "}" * 901,
        }.items()
    },
    "a key twice": lambda good: json.dumps(good).replace("{", '{"samples": 1, ', 1).encode(),
    "a key twice, inside": lambda good: json.dumps(good).replace('"kind"', '"kind": "add", "kind"', 1).encode(),
    **{
        f"{name} {value!r:.20}": c.in_certificate(name, value=value)
        for name in ("events", "commitment", "position", "chain", "grid", "shape", "samples", "compacted", "scope", "library", "time", "files", "requests", "fingerprint")
        for value in (..., 1.5)
    },
    "a field more": c.in_certificate("digest", value="0" * 64),
    **{
        f"event {name} {value!r:.20}": c.in_certificate("events", 0, name, value=value)
        for name in ("event_id", "kind", "position", "time", "samples", "commitments")
        for value in (..., [[]], 10**400)
    },
    "commitments of other texts": c.in_certificate("events", 0, "commitments", value=["x"] * 5),
    "choices a list": c.in_certificate("scope", "choices", value=["calibration"]),
    "checkpoints of objects": c.in_certificate("scope", "checkpoints", value=[{}]),
    "shape of texts": c.in_certificate("shape", value={"features": "x", "classes": None}),
    "one event twice": lambda good: json.dumps(good | {"events": good["events"] * 2, "position": 9}).encode(),
    "empty": lambda good: b"",
    "white space": lambda good: b" " * 1_000_000,
    "no UTF-8": lambda good: b"\xff\xfe{}",
    "UTF-16": lambda good: json.dumps(good).encode("utf-16") + b"\xd8",
    "a list": lambda good: b"[" + json.dumps(good).encode() + b"]",
    "two of them": lambda good: json.dumps(good).encode() * 2,
}  # fmt: skip


@pytest.mark.parametrize("name", CERTIFICATES)
def test_a_crafted_certificate(place: Path, name: str) -> None:
    data = c.in_envelope(CERTIFICATES[name](c.flat((place / "c.json").read_text())))
    (place / "c.json").write_bytes(data)
    refused(*run("verify", "c.json", "--allow-unsigned"))
    with pytest.raises(VerificationError):
        verify(data, allow_unsigned=True)


@pytest.mark.parametrize("event_id", ["x" * 100_000, "\ud800"])
def test_names_that_only_the_journal_can_refute(place: Path, event_id: str) -> None:
    craft = c.in_certificate("events", 0, "event_id", value=event_id)
    (place / "c.json").write_bytes(c.in_envelope(craft(c.flat((place / "c.json").read_text()))))
    assert run("verify", "c.json", "--allow-unsigned")[0] == 0
    refused(*check_store())


ENVELOPES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another type": lambda e: e | {"payloadType": "text/plain"},
    "no type": lambda e: {k: v for k, v in e.items() if k != "payloadType"},
    "a field more": lambda e: e | {"x": 1},
    "a payload of noise": lambda e: e | {"payload": "AAAA"},
    "a payload in another base64": lambda e: e | {"payload": e["payload"] + "\n"},
    "a payload of text": lambda e: e | {"payload": "é"},
    "a payload of a list": lambda e: e | {"payload": []},
    "signatures of text": lambda e: e | {"signatures": "x"},
    "signatures of numbers": lambda e: e | {"signatures": [1]},
    "a signature of 3 bytes": lambda e: e | {"signatures": [{"sig": "AAAA"}]},
    "a signature with a list as key id": lambda e: e | {"signatures": [{"sig": "A" * 86 + "==", "keyid": []}]},
    "a long key id": lambda e: e | {"signatures": [{"sig": "A" * 86 + "==", "keyid": "x" * 9999}]},
    "a key id that moves the cursor": lambda e: e | {"signatures": [{"sig": "A" * 86 + "==", "keyid": "\x1b[2J"}]},
    "white space in the payload": lambda e: e | {"payload": base64.b64encode(b" " + base64.b64decode(e["payload"])).decode()},
    "another predicate": lambda e: e | {"payload": base64.b64encode(base64.b64decode(e["payload"]).replace(b":v1", b":v2")).decode()},
    "another statement": lambda e: e | {"payload": base64.b64encode(base64.b64decode(e["payload"]).replace(b"/v1", b"/v0.1")).decode()},
    "two subjects": lambda e: e | {"payload": base64.b64encode(base64.b64decode(e["payload"]).replace(b'"subject":[', b'"subject":[{"digest":{"sha256":"00"},"name":"journal"},')).decode()},
}  # fmt: skip


@pytest.mark.parametrize("name", ENVELOPES)
def test_a_crafted_envelope(place: Path, name: str) -> None:
    data = ENVELOPES[name](json.loads((place / "c.json").read_text()))
    (place / "c.json").write_text(json.dumps(data))
    assert "not a certificate" in refused(*run("verify", "c.json", "--allow-unsigned"))


@pytest.mark.parametrize("kind", c.SPECIAL)
def test_certificate_head_and_key_are_regular_files(place: Path, kind: str) -> None:
    c.make_special(place / "other", kind)
    refused(*run("verify", "other", "--allow-unsigned"))
    with pytest.raises(VerificationError), in_time():
        Certificate.load("other")
    for option, expected in (("--exported-head", 3), ("--public-key", 1)):
        code, said = run("verify", "c.json", "--allow-unsigned", option, "other")
        assert code == expected, said


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["w", "sums"])
def test_tensors_that_claim_more_than_the_file_holds(place: Path, name: str, device: str) -> None:
    """A stride of 0, or a device without memory, makes 3 kB look like 3 GB: such a head or delta is refused before anything is allocated."""
    good = torch.load("h.pt", weights_only=True)
    wide = good | {
        "state_dict": good["state_dict"]
        | {name: torch.zeros(1, dtype=torch.float64, device=device).expand(20_000, 20_000)}
    }
    (place / "h.pt").write_bytes(saved(wide))
    assert (place / "h.pt").stat().st_size < 20_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "fewer bytes" in refused(*run("verify", "c.json", "--exported-head", "h.pt", "--allow-unsigned"))
    (place / "delta.pt").write_bytes(
        saved({"delta": torch.zeros(1, dtype=torch.uint8), name: wide["state_dict"][name]})
    )
    with pytest.raises(VerificationError, match="not a delta"):
        Delta.load(place / "delta.pt")
    with pytest.raises(ValueError, match="fewer bytes"):
        load_tensors(place / "delta.pt")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # kB


def test_names_of_files_steer_no_terminal_and_are_read_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Escape sequences and line breaks in names are shown as text; one large sparse file under many names is read once."""
    with open("large", "wb") as file:
        file.truncate(2**28)
    for i in range(40):
        os.link("large", f"large-{i}")
    flat, evil = c.flat((place / "c.json").read_text()), "x\x1b[1A\x1b[2K\n  compacted: yes"
    names = {f"../large-{i}": "0" * 64 for i in range(40)} | {evil: "0" * 64, "n" * 300: "0" * 64}
    scope = flat["scope"] | {"checkpoints": [evil]}
    (place / "c.json").write_bytes(
        c.in_envelope(json.dumps(flat | {"files": names, "scope": scope, "library": evil}).encode())
    )
    capsys.readouterr()
    for command in (
        ["verify", "c.json", "--store", "s", "--allow-unsigned"],
        ["certificate", "show", "c.json", "--store", "s"],
    ):
        with in_time(15):  # a second for one reading, half a minute for 40
            assert cli.main(command) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert r"\x1b[1A" in out
        assert sum(line.startswith("  compacted:") for line in out.splitlines()) == 1
    too_long = json.dumps(flat | {"files": {"n" * 5000: "0" * 64}}).encode()
    (place / "c.json").write_bytes(c.in_envelope(too_long))
    assert "not a certificate" in refused(*run("verify", "c.json", "--allow-unsigned"))


HEADS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "a list": lambda good: saved([1, 2]),
    "code": lambda good: pickled(print),
    "no config": lambda good: saved({k: v for k, v in good.items() if k != "config"}),
    "a config of text": lambda good: saved(good | {"config": "x"}),
    "a million features": lambda good: saved(good | {"config": good["config"] | {"in_features": 10**6}}),
    "features without end": lambda good: saved(good | {"config": good["config"] | {"in_features": 10**30}}),
    "a state of lists": lambda good: saved(good | {"state_dict": {k: [1] for k in good["state_dict"]}}),
    "a state of text": lambda good: saved(good | {"state_dict": "x"}),
    "no state": lambda good: saved(good | {"state_dict": {}}),
    "weights without end": lambda good: saved(
        good | {"state_dict": good["state_dict"] | {"w": torch.zeros(1).expand(10**9, 10**9)}}
    ),
    "inflating": lambda good: inflating(good | {"more": torch.zeros(10**8)}),
    "options that are nested": lambda good: saved(
        good | {"state_dict": good["state_dict"] | {"options": torch.frombuffer(bytearray(DEEPER.encode()), dtype=torch.uint8)}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_a_crafted_head(place: Path, name: str) -> None:
    good = torch.load("h.pt", weights_only=True)
    (place / "h.pt").write_bytes(HEADS[name](good))
    refused(*run("verify", "c.json", "--exported-head", "h.pt", "--allow-unsigned"))


# -- at random ---------------------------------------------------------------------------------------------------------

JUNK: list[Any] = [
    None, True, 0, -1, 2**31, 2**63 - 1, -(2**63), 1.5, "", "x", "0" * 64, "NaN", "[" * 2000, b"", b"\xff" * 3, b"x" * 32, b"x" * 5000,
]  # fmt: skip


def craft_at_random(store: Path, dice: random.Random) -> None:
    """Change a record, a cell or a file, with right checksums where there are some."""
    kind = dice.random()
    if kind < 0.4:
        with c.sql(store) as db:
            name, text = dice.choice(db.execute("SELECT name, value FROM meta ORDER BY name").fetchall())
        c.record(name, json.dumps(c.mutate(json.loads(text), dice)))(store)
    elif kind < 0.6:
        c.sample(dice.randrange(50), **{dice.choice(c.SAMPLE): dice.choice(JUNK)})(store)
    elif kind < 0.8:
        name = dice.choice(["position", "event_id", "kind", "time", "samples", "commitments", "mac", "chain"])
        c.entry(dice.choice([1, 2]), dice.random() < 0.5, **{name: dice.choice(JUNK)})(store)
    elif kind < 0.9:
        name = dice.choice(["type", "name", "tbl_name", "rootpage", "sql"])
        value = dice.choice(["NULL", "''", "0", "1", "2", "3", "-1", "999999", "'CREATE TABLE x (a)'", "x'ff'"])
        row = dice.randrange(1, 9)
        c.schema(f"UPDATE sqlite_master SET {name} = {value} WHERE rowid = {row}")(store)
    else:
        data = bytearray((store / c.FILE).read_bytes())
        for _ in range(dice.choice([1, 3, 30])):
            page = dice.randrange(len(data) // 4096) * 4096
            data[page + dice.randrange(dice.choice([12, 120, 4096]))] = dice.randrange(256)
        (store / c.FILE).write_bytes(data)


@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_stores_at_random(place: Path, count: int) -> None:
    dice, codes = random.Random(count), []
    shutil.copytree("s", "kept")
    for _ in range(count):
        shutil.rmtree("s")
        shutil.copytree("kept", "s")
        with contextlib.suppress(sqlite3.Error, OverflowError, StopIteration):  # what SQLite itself refuses to write
            craft_at_random(place / "s", dice)
        code, said = check_store()
        assert code == 0 or refused(code, said)
        codes.append(code)
    assert codes.count(3) > count / 3
