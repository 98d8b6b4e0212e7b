"""Learn on several machines by adding sums (Zhu et al., *Distributed Incremental wLPSVM Learning*).

The statistics of a head are sums over samples, and if the head has a grid, these sums are integers. Adding the sums of several
machines therefore gives, bit for bit, the result of one machine with all the data, for any number of ranks, any split and any
order (the paper's equations (35) and (38)). :class:`Delta` is algorithm 4, :func:`merge` is algorithm 5, and :func:`sync`
combines both on torch.distributed.

**Pending.** Each participating head holds its sums and a second ``Statistics``: the changes that this rank made since the ranks
last agreed. ``sync`` adds up the pending changes of all ranks and checks the sum. The sum becomes the agreed state only after
every rank has accepted it: all or none. A second ``sync`` changes nothing. Between syncs a rank predicts from the agreed state
and its own changes. Shares may be unequal or empty. Only ``sync`` and ``reduce_to`` run collectives, so you can save, read and
predict on one rank without waiting for the others.

**Deltas.** The changes that ``Delta.take`` copies stay pending in the head until they are handed over: saved, merged or
committed. If a save fails or you drop the delta, nothing is lost. A delta is refused if its changes have left the head in
another way. Every delta has a random id, and a receiver refuses an id that it has merged before.

**Saving.** A saved head contains its samples' sums, the number of syncs, the ids of merged deltas, and pending additions.
Pending removals are not saved, because their difference from the totals would reveal the removed samples. A head saved with
pending removals predicts as before, but ``sync``, ``take`` and ``discard`` refuse it until you call ``agree(head)``. Sync
before you save or copy a head.

**Privacy.** Ranks send sums, never samples. However, a sum of few samples reveals them. The sums of one sample reveal the
sample (its class sum is the row), and the sums of two samples reveal both up to a rotation. The difference of two states that
an observer has seen is also a sum. A receiver of a sum can test a guess of a sample. Pass ``min_samples`` to refuse to send
sums of fewer distinct samples in any class, whatever their weights; this is not differential privacy. Ranks also compare keyed
hashes of the rows, and of the ids if you pass ids, that changed since the last sync. A rank that guesses a sample can therefore
tell that another rank changed it. No delta contains such hashes.
"""

from torchlssvm.backbone_hash import fingerprint
from torchlssvm.distributed.delta import Delta, Status, agree, discard, merge, status
from torchlssvm.distributed.sync import reduce_to, sync

__all__ = ["Delta", "Status", "agree", "discard", "fingerprint", "merge", "reduce_to", "status", "sync"]
