"""Keep samples and their head durably in a folder, correct them by events, and erase samples with a receipt.

A store is a folder:

    samples.sqlite            the samples, the journal and the head's options (with its log: -wal, -shm)
    <position>.snapshot.pt    the head's statistics at a journal position, so that opening is fast
    acknowledged              the position last reported to a caller
    *.until-compaction        files of other modules that may mention erased samples; compaction deletes them
"""

from torchlssvm.store.erasure.access_report import AccessReport
from torchlssvm.store.erasure.erasure import check_absence
from torchlssvm.store.erasure.requests import ErasureRequest
from torchlssvm.store.erasure.suppression import SuppressionList, new_suppression_key, suppression_key
from torchlssvm.store.journal import Entry
from torchlssvm.store.sample_store import Compaction, Preview, SampleStore
from torchlssvm.store.sample_table import Sample, StoreDataset, StoredRows
from torchlssvm.store.snapshots import UNTIL_COMPACTION
from torchlssvm.store.transaction import EventResult

__all__ = [
    "UNTIL_COMPACTION",
    "AccessReport",
    "Compaction",
    "Entry",
    "ErasureRequest",
    "EventResult",
    "Preview",
    "Sample",
    "SampleStore",
    "StoreDataset",
    "StoredRows",
    "SuppressionList",
    "check_absence",
    "new_suppression_key",
    "suppression_key",
]
