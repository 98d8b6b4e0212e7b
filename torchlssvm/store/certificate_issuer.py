"""Issues certificates of erased samples, and lists the checkpoints that may still contain these samples."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchlssvm._version import __version__
from torchlssvm.audit.certificate import Certificate, public_choices
from torchlssvm.audit.checks import FileState
from torchlssvm.errors import NotForgottenError, StoreError
from torchlssvm.functional.grid import FixedPoint, grid_to_fields
from torchlssvm.linear import LinearHead
from torchlssvm.statistics.statistics import ROW_OPTIONS
from torchlssvm.store.database import ADAPTED_NOTE, NETWORK_NOTE, NOTE_PREFIX, Database
from torchlssvm.store.journal import Entry, Journal, now
from torchlssvm.store.sample_table import SampleTable
from torchlssvm.store.snapshots import MAX_SNAPSHOT_BYTES, Snapshots
from torchlssvm.untrusted import FileHashes

URL_MARK = "://"
"""Part of the name of a file that is elsewhere (``s3://...``)."""


def lasting_name(path: Any) -> str:
    """Return the absolute path. A URL is returned unchanged."""
    return str(path) if URL_MARK in str(path) else str(Path(path).absolute())


def is_there(name: str) -> bool:
    """Return False if a local file no longer exists. Files at other locations count as existing."""
    return URL_MARK in name or Path(name).exists()


class CertificateIssuer:
    """Issues certificates for the current state of a store, and keeps the list of checkpoints of its head."""

    def __init__(self, db: Database, table: SampleTable, journal: Journal, snapshots: Snapshots):
        self.db, self.table, self.journal, self.snapshots = db, table, journal, snapshots

    def issue(
        self, event_ids: Iterable[str], head: Any, choices: dict[str, str], requests: list[dict[str, str]]
    ) -> Certificate:
        """Issue an unsigned certificate of events, for the head as it is in the open view.

        ``choices`` are choices that the caller made from data, in addition to those that the store knows. ``requests`` are the
        requests that the events answer.
        """
        entries = [self._entry(event_id) for event_id in event_ids]
        if not entries:
            raise ValueError("event_id is empty: name at least one event")
        other = next((e for e in entries if e.kind not in ("remove", "request")), None)
        if other is not None:
            raise ValueError(
                f"a certificate is for erasures, and the event {other.event_id!r} is of the kind {other.kind!r}"
            )
        for entry in entries:
            names = self.db.get(f"{NOTE_PREFIX}{ADAPTED_NOTE}/{entry.event_id}", None)
            if names is not None:
                raise NotForgottenError(
                    f"no certificate for the event {entry.event_id!r}: the head has forgotten {', '.join(names)}, but the "
                    "network was trained on them. Adapt the network again without them, and add the samples left to a new "
                    "store with it"
                )
        state, options, compacted = map(self.db.get, ("state", "head", "compacted"))
        last = max(entry.position for entry in entries)
        key = self.journal.opening(state["position"])
        if state["digest"] is not None and key is None:
            raise StoreError(f"{self.db.path} is damaged: the key of position {state['position']} is missing")
        made = public_choices(head, key) if isinstance(head, LinearHead) and head._choices.made else {}
        network = self.db.get(NOTE_PREFIX + NETWORK_NOTE, None)
        if network is not None:
            made["network"] = {"state": "given", "how": network}
        return Certificate(
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
            commitment=None if key is None else hmac.digest(key, state["digest"].encode(), "sha256").hex(),
            position=state["position"],
            chain=state["chain"],
            grid=self.grid(),
            fingerprint=self.db.get("fingerprint") or None,
            shape=self.shape(),
            samples=state["samples"],
            compacted=compacted >= last,
            scope={
                "choices": head_choices(options, head, self.target_grid())
                | made
                | {name: {"state": "stated", "how": how} for name, how in choices.items()},
                "snapshots": self.snapshots.names_before(last),
                "checkpoints": self.checkpoints_before(last),
            },
            library=f"torchlssvm {__version__}",
            time=now(),
            files={} if key is None else self.file_commitments(key),
            requests=requests,
        )

    def recorded(self, certificate: Certificate) -> bool | None:
        """Compare a certificate's commitment with that of the journal; return None if the journal has no commitment."""
        entry = self.journal.at(certificate.position)
        if entry is None or entry.mac is None:
            return None
        return entry.mac.hex() == certificate.commitment

    def grid(self) -> dict[str, Any] | None:
        """Return the grids of features and of numbers, and how rows are normalized, in the form used in a certificate.

        Raises StoreError if a head made from the store's options would use a different grid than the stored rows.
        """
        options = self.db.get("head")
        fields = grid_to_fields(self.table.codec.grid)
        rows = list(fields.values()) or None
        if "in_features" in options and options.get("grid") not in ("auto", rows):
            raise StoreError(f"the store is damaged: the grid of its head is not that of its rows, {rows}")
        made_ready = {name: options[name] for name in ROW_OPTIONS if name in options}
        return (fields | grid_to_fields(None, self.target_grid()) | made_ready) or None

    def target_grid(self) -> FixedPoint | None:
        """Return the grid of float targets; None for classes and labels, which need no choice."""
        is_number = self.db.get("head").get("targets") != "multilabel"
        return self.table.codec.target_grid if is_number else None

    def shape(self) -> dict[str, int]:
        """Return the numbers of features and classes in the form used in a certificate."""
        return {"features": self.table.codec.J, "classes": self.table.codec.K}

    def file_commitments(self, key: bytes) -> dict[str, str]:
        """Commit to each snapshot and checkpoint of the current state: HMAC(key, "file " || SHA-256 of its bytes).

        Files of earlier states get no commitment, because its key could be used to test guesses about samples erased since
        then.
        """
        since = self.journal.last_change()
        paths = {str(p.name): p for p in self.snapshots.paths() if self.snapshots.position(p) >= since}
        paths |= {name: Path(name) for name, at in self.checkpoints().items() if at >= since}
        hashes = FileHashes(MAX_SNAPSHOT_BYTES)
        found = {name: hashes.sha256(path) for name, path in sorted(paths.items()) if URL_MARK not in name}
        return {name: file_commitment(key, digest) for name, digest in found.items() if digest is not None}

    def compare_files(self, certificate: Certificate, key: bytes | None) -> dict[str, FileState]:
        """Compare the files that a certificate names with its commitments."""
        hashes = FileHashes(MAX_SNAPSHOT_BYTES)
        found = {}
        for name, commitment in certificate.files.items():
            path = self.db.path.parent / name  # an absolute path is not changed by the join
            if not os.path.exists(path):  # also False for a name that is too long
                found[name] = FileState.GONE
            elif key is None:
                found[name] = FileState.UNTESTABLE
            elif (digest := hashes.sha256(path)) is None:
                found[name] = FileState.TOO_LARGE
            else:
                found[name] = FileState.SAME if file_commitment(key, digest) == commitment else FileState.CHANGED
        return found

    def _entry(self, event_id: str) -> Entry:
        entry = self.journal.of(event_id)
        if entry is None:
            raise StoreError(f"the journal of {self.db.path.parent} has no event {event_id!r}")
        return entry

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def register(self, path: Any, position: int) -> None:
        """Record that a file contains the head of a journal position."""
        with self.db.transaction():
            self.db.put("checkpoints", self.checkpoints() | {lasting_name(path): position})

    def forget(self, path: Any) -> None:
        """Remove a file from the list of checkpoints."""
        with self.db.transaction():
            gone = lasting_name(path)
            self.db.put("checkpoints", {name: at for name, at in self.checkpoints().items() if name != gone})

    def checkpoints(self) -> dict[str, int]:
        """The registered files, each with the journal position of its head."""
        known: dict[str, int] = self.db.get("checkpoints", {})
        return known

    def checkpoints_before(self, position: int) -> list[str]:
        """Registered checkpoints that precede the last erasure up to a position and that still exist."""
        erasure = self.journal.last_erasure(position)
        return [name for name, at in sorted(self.checkpoints().items()) if at < erasure and is_there(name)]


def file_commitment(key: bytes, digest: bytes) -> str:
    """HMAC(key, "file " || SHA-256 of the file's bytes)."""
    return hmac.digest(key, b"file " + digest, "sha256").hex()


def head_choices(
    options: dict[str, Any], head: Any, target_grid: FixedPoint | None = None
) -> dict[str, dict[str, str]]:
    """The options that were specified for a head, as far as the store knows them. ``target_grid``: in use."""
    out = {}
    if "rho" in options:
        out["rho"] = {"state": "kept", "how": f"{head.rho!r}, declared unchanged by the erasure"}
    for name in ("grid",) if target_grid is None else ("grid", "target_grid"):
        if options.get(name) == "auto":
            out[name] = {"state": "kept", "how": "automatic, from the first samples"}
        elif options.get(name) is not None:
            out[name] = {"state": "given", "how": "before any data"}
    return out
