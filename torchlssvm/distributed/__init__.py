"""Learning on several machines at once: sums are added, nothing else (Zhu et al., *Distributed Incremental wLPSVM Learning*).

A head's statistics are sums over samples, integers on a grid. Those of several sources are added, and the result is, bit for
bit, that of one machine with all the data, whatever the number of ranks, the split or the order (the paper's equations
(35) and (38); algorithm 4 is :class:`Delta`, algorithm 5 :func:`merge`, both together on torch.distributed :func:`sync`).

**Pending.** A head that takes part holds its sums and, beside them, those of what this rank changed since ranks last agreed:
a second ``Statistics``. ``sync`` adds up what is pending everywhere, checks the sum, and makes it the agreed state only
after every rank has accepted it: all or none. A second ``sync`` changes nothing. Between syncs a rank answers from what was
agreed on and its own changes. Ranks need no equal shares, or any share at all. No collective runs but in ``sync`` and
``reduce_to``: saving, reading and predicting on one rank alone wait for no other rank.

**Deltas.** What ``Delta.take`` takes stays pending in the head until it is handed over: saved, merged or committed. A save that
fails, or a delta that is dropped, loses nothing; a delta whose changes have left the head in another way is refused. Every
delta has a random id, and a receiver refuses an id it has.

**What survives a save.** Samples held, the number of syncs, ids of deltas merged; and what is pending, as long as it is
additions. Pending removals are left out, since totals minus pending changes would be the sample removed: such a head answers as
before, but ``sync``, ``take`` and ``discard`` refuse it until ``agree(head)``. Sync before a save, and before a copy.

**What is sent** are sums, never samples. But a sum of few samples gives samples away: the sums of one sample are the sample
(its class sum is the row itself), those of two give both up to a rotation, and the difference of two states that an observer
has seen is a sum too. A receiver of a sum can also test a guess. ``min_samples`` refuses to send sums of fewer distinct
samples in any class, whatever their weights; it is no differential privacy. Ranks also compare fingerprints of rows, and hashes
of ids where they are given, under a key that the group shares: a rank that guesses a sample can tell that another changed it.
Only samples changed since the last sync are compared. No delta holds such hashes.
"""

from torchlssvm.backbone_hash import fingerprint
from torchlssvm.distributed.delta import Delta, Status, agree, discard, merge, status
from torchlssvm.distributed.sync import reduce_to, sync

__all__ = ["Delta", "Status", "agree", "discard", "fingerprint", "merge", "reduce_to", "status", "sync"]
