"""Access report: the samples that a store holds of a subject, when they were added, and which files contain them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchlssvm.store.certificate_issuer import is_there
from torchlssvm.store.sample_table import Sample

if TYPE_CHECKING:
    from torchlssvm.store.erasure.requests import ErasureRequest
    from torchlssvm.store.sample_store import SampleStore


@dataclass(frozen=True)
class KnownFile:
    """An export or checkpoint with samples of the subject, the position of its head, and whether the file still exists."""

    path: str
    position: int
    samples: int
    found: bool


@dataclass(frozen=True)
class AccessReport:
    """Everything a store holds about one subject."""

    subject: str
    samples: list[Sample]
    """Each sample with the position of the event that added it; None if the journal does not show the position."""
    files: list[KnownFile]
    requests: list[ErasureRequest]

    @classmethod
    def of(cls, store: SampleStore, subject: str) -> AccessReport:
        """Create the report for one position of the store, even while other processes write."""
        with store.view():
            ids = store.find(subject=subject)
            added_at: dict[str, int] = {}
            for entry in store.history() if ids else []:
                if entry.kind == "add":
                    added_at |= dict.fromkeys(entry.commitment_list, entry.position)
            samples = []
            if ids:
                rows = store.get(ids)
                at = [added_at.get(commitment.hex()) for commitment in rows.commitments]
                samples = [replace(sample, position=position) for sample, position in zip(rows, at, strict=True)]
            files = []
            for path, position in sorted(store.certificates.checkpoints().items()):
                held = sum(s.position is None or s.position <= position for s in samples)
                if held:
                    files.append(KnownFile(path, position, held, is_there(path)))
            requests = [r for r in store.requests.all() if subject in r.named("subject")]
            return cls(subject, samples, files, requests)
