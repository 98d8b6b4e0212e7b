"""Certificates of what was erased, and what ``verify`` asks of a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchlssvm._version import __version__
from torchlssvm.audit import verification as audit
from torchlssvm.audit.certificate import Certificate
from torchlssvm.errors import StoreError
from torchlssvm.events import as_list, check_text
from torchlssvm.linear import LSSVMHead
from torchlssvm.store.head_adapter import Linear, machine_for
from torchlssvm.store.journal import Entry, now
from torchlssvm.store.judged import Judged

REMOTE = "://"


def place(path: Any) -> str:
    """A file's name for good: absolute, unless it is elsewhere (``s3://...``)."""
    return str(path) if REMOTE in str(path) else str(Path(path).absolute())


def sizes(folder: Path) -> Iterator[int]:
    """The sizes of a folder's files; others may add and remove some meanwhile."""
    for path in folder.iterdir():
        try:
            if path.is_file():
                yield path.stat().st_size
        except FileNotFoundError:
            continue


class Certifying(Judged):
    """A store that gives account of itself."""

    def register_checkpoint(self, path: Any, position: int | None = None) -> None:
        """Remember that a file holds the head as it is now: certificates list it if it is older than an erasure.

        ``position``: of the journal, for a head as it was then.
        """
        with self._db.transaction():
            at = self.head_position if position is None else position
            self._db.put("checkpoints", self._db.get("checkpoints", {}) | {place(path): at})

    def forget_checkpoint(self, path: Any) -> None:
        """The file is gone."""
        with self._db.transaction():
            known = self._db.get("checkpoints", {})
            self._db.put("checkpoints", {name: at for name, at in known.items() if name != place(path)})

    def knows_checkpoint(self, path: Any) -> bool:
        """Whether a file is registered."""
        return place(path) in self._db.get("checkpoints", {})

    def _checkpoints_before(self, position: int) -> list[str]:
        """Known checkpoints from before the last erasure up to a position, that are still there."""
        row = self._db.one("SELECT max(position) FROM journal WHERE position <= ? AND kind <> 'add'", (position,))
        erasure = (row or (None,))[0] or 0
        known = self._db.get("checkpoints", {})
        return [path for path, at in sorted(known.items()) if at < erasure and (REMOTE in path or Path(path).exists())]

    # -- receipts ------------------------------------------------------------------------------------------------------

    def certificate(
        self, event_id: str | Sequence[str], key: Any = None, choices: dict[str, str] | None = None
    ) -> Certificate:
        """A certificate of one event, or of several, for the state the store is in now.

        ``key``: Ed25519, see :func:`torchlssvm.audit.private_key`; without one the certificate is unsigned. ``choices``: what
        else was chosen from data, e.g. ``{"calibration": "made again", "landmarks": "unchanged"}``.
        """
        with self.view():
            self._db.check_place()
            head = self.head
            machine = self._machine
            assert machine is not None
            if machine.touched:
                raise StoreError("the head was changed behind the store's back: store.restore() brings it back")
            names = [event_id] if isinstance(event_id, str | int) else as_list(event_id) or []
            entries = [self._entry_of(e) for e in dict.fromkeys(check_text(name, "event_id") for name in names)]
            if not entries:
                raise ValueError("event_id is empty: name at least one event")
            state = self._db.get("state")
            last = max(entry.position for entry in entries)
            codec = self._table.codec
            certificate = Certificate(
                events=[
                    {
                        "event_id": e.event_id,
                        "kind": e.kind,
                        "position": e.position,
                        "time": e.time,
                        "samples": e.samples,
                        "commitments": e.commitment_list,
                    }
                    for e in entries
                ],
                digest=state["digest"],
                position=state["position"],
                chain=state["chain"],
                grid=None
                if codec.grid is None
                else {"limit": codec.grid.limit.hex(), "bits": codec.grid.bits, "headroom": codec.grid.headroom},
                fingerprint=self.fingerprint,
                shape={"features": codec.J, "classes": codec.K},
                samples=state["samples"],
                compacted=self._db.get("compacted") >= last,
                scope={
                    "choices": self._choices(head) | (choices or {}),
                    "snapshots": [p.name for p in self._snapshots.paths() if self._snapshots.position(p) < last],
                    "checkpoints": self._checkpoints_before(last),
                },
                library=f"torchlssvm {__version__}",
                time=now(),
            )
            return certificate if key is None else audit.sign(certificate, key)

    def _entry_of(self, event_id: str) -> Entry:
        entry = self._journal.of(event_id)
        if entry is None:
            raise StoreError(f"the journal of {self.path} has no event {event_id!r}")
        self._journal.check_entry(entry)
        return entry

    def _choices(self, head: Any) -> dict[str, str]:
        """What the head's options owe to data, as far as the store can tell."""
        options = self._db.get("head")
        out = {}
        if "rho" in options:
            out["rho"] = f"{head.rho!r}, declared unchanged by the erasure"
        if options.get("grid") == "auto":
            out["grid"] = "automatic, from the first samples; unchanged by the erasure"
        elif options.get("grid") is not None:
            out["grid"] = "given before any data"
        return out | (head.choices if isinstance(head, LSSVMHead) else {})

    # -- for verify ----------------------------------------------------------------------------------------------------

    def check_structure(self) -> None:
        """SQLite's own check of the whole file; StoreError when a page, a row or an index is not where it should be."""
        self._db.check_structure()

    def recompute(self, erased: Iterable[str] = ()) -> tuple[int, str | None]:
        """Sum all rows anew: their number and digest. StoreError if a commitment of an erased sample is among them."""
        gone, count = set(erased), 0
        with self.view():
            self._db.check_structure()
            machine = self._machine
            exact = isinstance(machine, Linear) and machine.exact
            fresh = Linear(LSSVMHead.from_config(machine.head.config())) if exact and machine is not None else None
            for rows in self._table.batches():
                count += len(rows)
                if any(c.hex() in gone for c in rows.commitments):
                    raise StoreError("a sample that was erased is among the rows")
                if fresh is not None:
                    fresh.add_rows(rows, self._table.codec)
            return count, None if fresh is None else fresh.digest()

    def relearn(self, machine: Any) -> Any:
        """Let a machine forget what it holds and learn all rows of the store."""
        adapter = machine_for(machine)
        with self.view():
            adapter.clear()
            for rows in self.batches():
                adapter.add_rows(rows, self._table.codec)
        return machine

    def confirms(self, position: int, digest: str) -> bool | None:
        """Whether this was the digest after the event at a position; None if nobody can tell any more."""
        with self.view():
            entry = self._journal.at(position)
            return None if entry is None else self._journal.confirms(entry, digest)

    def stats(self) -> dict[str, Any]:
        """Numbers of the store, as primitives."""
        with self.view():
            return self._stats()

    def _stats(self) -> dict[str, Any]:
        self._table.load_codec()
        state, codec = self._db.get("state"), self._table.codec
        labels = self._db.all(
            "SELECT label, count(*) FROM samples WHERE label IS NOT NULL GROUP BY label ORDER BY label"
        )
        grid = codec.grid
        return {
            "path": str(self.path),
            "samples": len(self),
            "subjects": len(self.subjects()),
            "labels": {str(label): count for label, count in labels},
            "features": codec.J,
            "classes": codec.K,
            "resolution": None if grid is None else grid.resolution,
            "events": state["position"],
            "digest": state["digest"],
            "fingerprint": self.fingerprint,
            "compacted_at": self._db.get("compacted"),
            "bytes": sum(sizes(self.path)),
            "created": self._db.get("created"),
        }
