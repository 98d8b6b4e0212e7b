"""Events that come a second time: the same one again, which changes nothing, or another one under an id that is taken.

The journal keeps of an event its kind, its number of samples and a commitment to each, and nothing is kept besides. So what
can be compared is compared: kind and number; of samples that are still held, whether they are those of the entry; and of rows
that no later event has written, the content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchlssvm.events import Add, Event, Relabel, Remove, Replace
from torchlssvm.store.sample_table import ROWS_PER_BATCH, Codec, SampleTable, StoredRows


@dataclass(frozen=True)
class PastEvent:
    """An event that was applied: where, what it was, and the commitments to its samples, in no order."""

    position: int
    kind: str
    commitments: Sequence[bytes]


def check_repetition(table: SampleTable, event: Event, past: PastEvent) -> None:
    """ValueError unless an event can be the one that was applied under its id, and is still in effect."""
    if event.kind != past.kind:
        raise taken_id_error(event, past, f"it is a {event.kind}")
    if event.ids is not None and len(event.ids) != len(past.commitments):
        raise taken_id_error(event, past, f"it has {len(event.ids)}")
    seqs = table.of_subject(event.subject) if event.ids is None else list(table.held(event.ids).values())
    if isinstance(event, Remove):
        if seqs:
            raise taken_id_error(event, past, f"{len(seqs)} of its samples are in the store")
        return
    table.load_codec()
    known, wanted = 0, set(past.commitments)
    place = None if event.ids is None else {sample: k for k, sample in enumerate(event.ids)}
    for start in range(0, len(seqs), ROWS_PER_BATCH):
        rows = table.read(seqs[start : start + ROWS_PER_BATCH])
        found = [c in wanted for c in rows.commitments]
        known += sum(found)
        if place is not None and not all(found):
            sample = rows.ids[found.index(False)]
            raise taken_id_error(event, past, f"the sample {sample!r} that is held is another one, or was added since")
        same = [i for i in range(len(rows)) if found[i] and rows.positions[i] == past.position]
        if place is not None:
            at = [place[rows.ids[i]] for i in same]
        else:  # samples of a subject are meant in the order they were added, which is known while all are there
            at = [start + i for i in same] if len(seqs) == len(wanted) else []
        if at and not same_content(table.codec, event, at, rows, same):
            raise taken_id_error(event, past, "features, labels or subjects of its samples are others")
    if (seqs and not known) or (known < len(wanted) and table.count(wanted) > known):
        raise taken_id_error(event, past, "the samples it names are others")


def same_content(
    codec: Codec, event: Add | Relabel | Replace, at: list[int], rows: StoredRows, same: list[int]
) -> bool:
    """True if the samples ``at`` of an event are what the rows ``same`` hold, in the form they are stored in."""
    if isinstance(event, Add) and [event.subjects[k] for k in at] != [rows.subjects[i] for i in same]:
        return False
    if not isinstance(event, Relabel) and (
        max(at) >= len(event.x) or codec.encode(event.x[at].double()) != codec.encode(rows.x[same].double())
    ):
        return False
    if event.y is None:
        return True
    y = event.y.expand(max(at) + 1) if event.y.ndim == 0 else event.y
    return max(at) < len(y) and codec.labels_and_targets(y[at]) == codec.labels_and_targets(rows.y[same])


def taken_id_error(event: Event, past: PastEvent, why: str) -> ValueError:
    """The error for an event id that is taken."""
    return ValueError(
        f"the event id {event.event_id!r} was used before, at position {past.position}, for a {past.kind} of "
        f"{len(past.commitments)} samples, and this is not that event in effect: {why}. Give it an id of its own. Nothing was "
        "changed."
    )
