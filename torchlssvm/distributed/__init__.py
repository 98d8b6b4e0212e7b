"""Learning on several machines by adding sums (Zhu et al., *Distributed Incremental wLPSVM Learning*).

A head's statistics are sums over samples, integers on a grid. Adding the sums of several machines gives, bit for bit, the
result of one machine with all the data, for any number of ranks, any split and any order (the paper's equations (35) and
(38); algorithm 4 is :class:`Delta`, algorithm 5 :func:`merge`, both together on torch.distributed :func:`sync`).

**Pending.** Each participating head holds its sums and a second ``Statistics``: the changes of this rank since the ranks last
agreed. ``sync`` adds up what is pending everywhere, checks the sum, and makes it the agreed state only after every rank has
accepted it: all or none. A second ``sync`` changes nothing. Between syncs a rank answers from what was agreed on and its own
changes. Shares may be unequal or empty. Only ``sync`` and ``reduce_to`` run collectives: you can save, read and predict on
one rank without waiting for the others.

**Deltas.** The changes that ``Delta.take`` copies stay pending in the head until they are handed over: saved, merged or
committed. If a save fails or you drop the delta, nothing is lost. A delta is refused if its changes have left the head in
another way. Every delta has a random id, and a receiver refuses an id that it has merged before.

**What survives a save.** The samples held, the number of syncs, the ids of merged deltas, and pending additions. Pending
removals are not saved, since their difference from the totals would reveal the removed samples. A head saved with pending
removals predicts as before, but ``sync``, ``take`` and ``discard`` refuse it until you call ``agree(head)``. Sync before you
save or copy a head.

**What is sent** are sums, never samples. But a sum of few samples reveals them: the sums of one sample are the sample (its
class sum is the row itself), those of two give both up to a rotation, and the difference of two states that an observer has
seen is a sum too. A receiver of a sum can also test a guess. ``min_samples`` refuses to send sums of fewer distinct samples
in any class, whatever their weights; this is not differential privacy. Ranks also compare fingerprints of rows, and hashes of
ids where they are given, under a key that the group shares: a rank that guesses a sample can tell that another changed it.
Only samples changed since the last sync are compared. No delta holds such hashes.
"""

from torchlssvm.backbone_hash import fingerprint
from torchlssvm.distributed.delta import Delta, Status, agree, discard, merge, status
from torchlssvm.distributed.sync import reduce_to, sync

__all__ = ["Delta", "Status", "agree", "discard", "fingerprint", "merge", "reduce_to", "status", "sync"]
