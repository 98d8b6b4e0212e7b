"""Stores and certificates as somebody with bad intentions would write them: every checksum that needs no secret is right."""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import json
import os
import random
import socket
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FILE = "samples.sqlite"
Craft = Callable[[Path], None]
"""Change a store folder."""


def crc(values: tuple[Any, ...], blob: bytes = b"") -> int:
    """The checksum of a record, as the store's documentation says it."""
    return zlib.crc32(blob, zlib.crc32(ascii(values).encode()))


@contextlib.contextmanager
def sql(store: Path) -> Iterator[sqlite3.Connection]:
    """The database of a store, opened without the library."""
    db = sqlite3.connect(store / FILE, isolation_level=None)
    try:
        yield db
    finally:
        db.close()


# -- records -----------------------------------------------------------------------------------------------------------


def record(name: str, text: str | bytes) -> Craft:
    """Another text in a record, with its right checksum."""

    def craft(store: Path) -> None:
        with sql(store) as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (name, text, crc((name, text))))

    return craft


def no_record(name: str) -> Craft:
    """A record that is missing."""

    def craft(store: Path) -> None:
        with sql(store) as db:
            db.execute("DELETE FROM meta WHERE name = ?", (name,))

    return craft


def change(name: str, **fields: Any) -> Craft:
    """Other values in a record that is an object; ``...`` leaves one out."""

    def craft(store: Path) -> None:
        with sql(store) as db:
            value = json.loads(db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()[0])
        value = {k: v for k, v in (value | fields).items() if v is not ...}
        record(name, json.dumps(value))(store)

    return craft


# -- rows and journal --------------------------------------------------------------------------------------------------

SAMPLE = ("seq", "id", "subject", "label", "target", "position", "added", "nonce", "checksum", "features")


def sample(which: int = 0, **values: Any) -> Craft:
    """Other values in the columns of a row, with its right checksum; -1: of all rows."""

    def craft(store: Path) -> None:
        with sql(store) as db:
            rows = db.execute(f"SELECT {', '.join(SAMPLE)} FROM samples ORDER BY seq").fetchall()
            for row in rows if which < 0 else [rows[which]]:
                new = dict(zip(SAMPLE, row, strict=True)) | values
                blob = new["features"]
                if "checksum" not in values:
                    head = tuple(new[n] for n in SAMPLE[:8])
                    new["checksum"] = crc(head, blob if isinstance(blob, bytes) else str(blob).encode())
                sets = ", ".join(f"{n} = ?" for n in SAMPLE)
                db.execute(f"UPDATE samples SET {sets} WHERE seq = ?", (*(new[n] for n in SAMPLE), row[0]))

    return craft


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def entry(at: int = 1, relink: bool = True, **values: Any) -> Craft:
    """Other values in an entry of the journal; the chain behind it, the state and the witness are made to fit."""

    def craft(store: Path) -> None:
        with sql(store) as db:
            sets = ", ".join(f"{name} = ?" for name in values)
            db.execute(f"UPDATE journal SET {sets} WHERE position = ?", (*values.values(), at))
        if relink:
            link_again(store)

    return craft


def link_again(store: Path) -> None:
    """Make the chain right again, as far as its values allow."""
    with sql(store) as db:
        chain = bytes(32)
        names = "position, event_id, kind, time, samples, commitments, mac"
        for p, e, k, t, n, c, m in db.execute(f"SELECT {names} FROM journal ORDER BY position").fetchall():
            body = {"position": p, "event_id": e, "kind": k, "time": t, "samples": n}
            body |= {"commitments": hashlib.sha256(c if isinstance(c, bytes) else b"").hexdigest()}
            body |= {"mac": m.hex() if isinstance(m, bytes) else m}
            with contextlib.suppress(TypeError):
                chain = hashlib.sha256(chain + canonical(body)).digest()
            db.execute("UPDATE journal SET chain = ? WHERE position = ?", (chain, p))
    change("state", chain=chain.hex())(store)
    (store / "acknowledged").unlink(missing_ok=True)


def execute(*statements: str) -> Craft:
    """SQL of any kind."""

    def craft(store: Path) -> None:
        with sql(store) as db:
            for statement in statements:
                db.execute(statement)

    return craft


def schema(statement: str) -> Craft:
    """The same, for the table of tables."""
    return execute("PRAGMA writable_schema = ON", statement)


# -- files -------------------------------------------------------------------------------------------------------------


def special(name: str, kind: str) -> Craft:
    """Something else in the place of a file of the store."""

    def craft(store: Path) -> None:
        for log in ("-wal", "-shm"):
            (store / (FILE + log)).unlink(missing_ok=True)
        (store / name).unlink(missing_ok=True)
        make_special(store / name, kind)

    return craft


SPECIAL = ("fifo", "folder", "zeros", "null", "loop", "socket", "sparse", "noise", "empty")


def make_special(path: Path, kind: str) -> None:
    """A name that is no regular file, or one with nothing good in it."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    elif kind == "null":
        path.symlink_to("/dev/null")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "noise":
        path.write_bytes(bytes(range(256)) * 64)
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 2**40)
    elif kind == "socket":
        here = Path.cwd()
        os.chdir(path.parent)  # the name of a socket may have 107 characters only
        try:
            socket.socket(socket.AF_UNIX).bind(path.name)
        finally:
            os.chdir(here)
    else:
        raise AssertionError(kind)


def content(name: str, data: bytes) -> Craft:
    """Other bytes in a file of the store."""
    return lambda store: (store / name).write_bytes(data) and None


def witness(text: bytes) -> Craft:
    """Another text in the witness, with its right checksum."""
    return content("acknowledged", (text + b" " + b"%08x" % crc((text,))).ljust(256))


def snapshot(data: bytes) -> Craft:
    """Other bytes in the snapshot, with the right SHA-256 at their end."""

    def craft(store: Path) -> None:
        path = next(store.glob("*.snapshot.pt"))
        path.write_bytes(data + hashlib.sha256(data).digest())

    return craft


def page_bomb(table: str) -> Craft:
    """A tree of pages that all have the same children: few bytes, and more rows than anybody could read.

    Each interior page of a table tree holds 4 bytes of a child's number and a key for each cell (SQLite's file format, 1.5).
    """

    def craft(store: Path) -> None:
        with sql(store) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            size = db.execute("PRAGMA page_size").fetchone()[0]
            root = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
            root = 1 if root is None else root[0]
        data = bytearray((store / FILE).read_bytes())
        offset = 100 if root == 1 else 0
        leaf = bytes(data[(root - 1) * size : root * size])
        depth, first = 15, len(data) // size + 1

        def interior(child: int, room: int, start: int) -> bytes:
            page, cells, pointers = bytearray(size), 100, []
            at = size
            for k in range(cells):
                cell = struct.pack(">I", child) + b"\x81" + bytes([k % 128])
                at -= len(cell)
                page[at : at + len(cell)] = cell
                pointers.append(at)
            page[start : start + 12] = struct.pack(">BHHHBI", 5, 0, cells, at, 0, child)
            for k, p in enumerate(pointers):
                page[start + 12 + 2 * k : start + 14 + 2 * k] = struct.pack(">H", p)
            return bytes(page)

        if offset:  # page 1 cannot be moved as it is: its cells stay where they are, its header moves to the front
            moved = bytearray(leaf)
            moved[:8] = leaf[100:108]
            count = struct.unpack(">H", leaf[103:105])[0]
            moved[8 : 8 + 2 * count] = leaf[108 : 108 + 2 * count]
            leaf = bytes(moved)
        pages = [leaf] + [interior(first + k, size, 0) for k in range(depth - 1)]
        top = bytearray(interior(first + depth - 1, size, offset))
        if offset:
            top[:100] = data[:100]
        data[(root - 1) * size : root * size] = top
        data += b"".join(pages)
        data[28:32] = struct.pack(">I", len(data) // size)
        (store / FILE).write_bytes(data)

    return craft


def loop_of_pages(store: Path) -> None:
    """A value of one gigabyte in a file of a few kilobytes that says it is longer: its overflow pages follow each other in a ring."""
    with sql(store) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = db.execute("PRAGMA page_size").fetchone()[0]
        db.execute("UPDATE samples SET features = zeroblob(?)", (3 * size,))
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray((store / FILE).read_bytes())
    pages = len(data) // size
    for number in range(2, pages + 1):  # an overflow page: the next one's number, then content of zeros
        at = (number - 1) * size
        if data[at + 4 : at + size] == bytes(size - 4) and 0 < struct.unpack(">I", data[at : at + 4])[0] <= pages:
            data[at : at + 4] = struct.pack(">I", number)
    (store / FILE).write_bytes(data)


# -- certificates ------------------------------------------------------------------------------------------------------


def flat(certificate: str) -> dict[str, Any]:
    """The fields of a certificate: those of its predicate, and the journal's hash from its subject."""
    statement = json.loads(base64.b64decode(json.loads(certificate)["payload"]))
    return statement["predicate"] | {"chain": statement["subject"][0]["digest"]["sha256"]}


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


def in_envelope(fields: bytes) -> bytes:
    """An unsigned certificate with these fields, in canonical JSON where they are JSON at all."""
    try:
        data = json.loads(fields, object_pairs_hook=once)
        chain = json.dumps(data.pop("chain", None))
        predicate = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, AttributeError, RecursionError, TypeError):
        predicate, chain = fields, json.dumps("0" * 64)
    text = b'{"_type":"https://in-toto.io/Statement/v1","predicate":%s,"predicateType":"urn:torchlssvm:erasure:v1","subject":[{"digest":{"sha256":%s},"name":"journal"}]}'
    payload = base64.b64encode(text % (predicate, chain.encode())).decode()
    return json.dumps({"payload": payload, "payloadType": "application/vnd.in-toto+json", "signatures": []}).encode()


def in_certificate(*path: Any, value: Any) -> Callable[[dict[str, Any]], bytes]:
    """Another value somewhere in a certificate; ``...`` leaves it out."""

    def craft(good: dict[str, Any]) -> bytes:
        data = json.loads(json.dumps(good))
        at = data
        for step in path[:-1]:
            at = at[step]
        if value is ...:
            del at[path[-1]]
        else:
            at[path[-1]] = value
        return json.dumps(data).encode()

    return craft


def raw(key: str, text: str) -> Callable[[dict[str, Any]], bytes]:
    """A text of JSON, or nearly so, in the place of a value."""

    def craft(good: dict[str, Any]) -> bytes:
        data = json.dumps(good | {key: "\0here"})
        return data.replace('"\\u0000here"', text).encode("utf-8", "surrogatepass")

    return craft


def mutate(value: Any, rng: random.Random) -> Any:
    """Change one thing somewhere in a structure of JSON."""
    value = copy.deepcopy(value)
    junk = [None, True, 0, -1, 1.5, "", "0" * 64, "\ud800", [], {}, [None], {"a": 1}, 10**30, "é", "x" * 5000]
    at = value
    while isinstance(at, dict | list) and at:
        key = rng.choice(sorted(at)) if isinstance(at, dict) else rng.randrange(len(at))
        if rng.random() < 0.5 or not isinstance(at[key], dict | list) or not at[key]:
            choice = rng.random()
            if choice < 0.15:
                del at[key]
            elif choice < 0.5 and isinstance(at[key], str) and at[key]:
                place = rng.randrange(len(at[key]))
                at[key] = at[key][:place] + rng.choice('0123456789abcdef"\\') + at[key][place + 1 :]
            elif choice < 0.6 and isinstance(at[key], int) and not isinstance(at[key], bool):
                at[key] += rng.choice([-1, 1])
            else:
                at[key] = rng.choice(junk)
            break
        at = at[key]
    return value
