"""
Erase a user, from the request to the proof
===========================================

In this tutorial, a classifier learns from photos of several people, and one of these people asks to be erased. A
``SampleStore`` keeps the samples, the journal of changes and the head together. An erasure is one event in this store.
Afterwards, you can issue a certificate of the erasure that others can check.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

from torchlssvm import LSSVMHead, VerificationError, verify
from torchlssvm.audit import new_key
from torchlssvm.events import Add, Remove
from torchlssvm.store import SampleStore

folder = Path(tempfile.mkdtemp())
digits = load_digits()
x, y = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
ids = [f"photo-{i:04d}" for i in range(len(x))]
owners = [f"user-{i % 60}" for i in range(len(x))]

# %%
# Learn into a store
# ------------------
#
# A store is a folder. An event is durable when ``apply`` returns. After a crash, every acknowledged event is still
# there.

store = SampleStore(folder / "store", head=LSSVMHead(64, 10, grid=2.0))
store.apply(Add(ids=ids, x=x, y=y, subject=owners))
print(len(store), "samples of", len(set(owners)), "people")

# %%
# The request
# -----------
#
# First look at what the erasure would change. A preview itself changes nothing.

preview = store.preview(Remove(subject="user-42"), x=x, y=y)
print(f"{preview.samples} samples would go")

# %%
# Then erase the samples. The result contains nonces, random numbers with which you can later prove whose samples the
# certificate covers. Because the nonces reveal who was erased, keep them apart from the store, and destroy them when
# the erasure can no longer be disputed.

theirs = torch.tensor([owner == "user-42" for owner in owners])
before = (
    store.head(x[theirs]).gather(1, y[theirs, None]).clone()
)  # the scores of their own classes, while they are held
done = store.apply(Remove(subject="user-42"))
print(f"{len(done.nonces)} samples erased, journal position {done.position}")

# %%
# After a removal, the database file may still contain bytes of the erased samples. Compaction rewrites every file of
# the store, so that no byte of an erased sample remains.

store.compact()
left = b"".join(
    path.read_bytes() for path in sorted((folder / "store").iterdir()) if path.is_file()
)
print("an erased id is still in a file:", b"photo-0042" in left)

# %%
# The certificate
# ---------------
#
# The operator signs the certificate with an Ed25519 key. If you verify a certificate, get the public key from a
# source that you trust, never from the certificate. ``verify`` follows the journal, sums the remaining rows again and
# solves for the weights again.

public = new_key(folder / "key.pem")
certificate = store.certificate(done.event_id, key=folder / "key.pem")
report = verify(certificate, head=store.head, store=store, public_key=public)
for name, finding in report.checks.items():
    print(f"{name:>12}: {finding}")

# %%
# Only the holder of the nonces can tell whose samples the certificate covers:

nonce = done.nonces["photo-0042"]
print(certificate.covers("photo-0042", nonce), certificate.covers("photo-0043", nonce))

# %%
# False statements
# ----------------
#
# Verification fails if the text of the certificate was changed. It also fails for a head that still serves the old
# weights.

try:
    verify(
        replace(certificate, samples=certificate.samples + 1),
        head=store.head,
        store=store,
        public_key=public,
    )
except VerificationError as error:
    print(type(error).__name__, "-", str(error)[:150])

# %%
stale = LSSVMHead(64, 10, grid=2.0).add(x, y)  # still with the erased samples
try:
    verify(certificate, head=stale, store=store, public_key=public)
except VerificationError as error:
    print(type(error).__name__, "-", str(error)[:150])

# %%
# Compare with a head that never saw the user
# -------------------------------------------
#
# You do not have to trust the certificate. If you have the other samples, train a head on them and compare. The two
# heads are equal, bit for bit.

never = LSSVMHead(64, 10, grid=2.0).add(x[~theirs], y[~theirs])
print("same digest:", store.head.digest() == never.digest())
print("same scores:", torch.equal(store.head.refresh()(x), never.refresh()(x)))

figure, axes = plt.subplots(figsize=(4.5, 3.6))
at_never = never(x[theirs]).gather(1, y[theirs, None])
after = store.head(x[theirs]).gather(1, y[theirs, None])
axes.axline((0, 0), slope=1, color="#999999", linewidth=0.8)
axes.scatter(at_never, before, label="while held", color="#D55E00", s=22)
axes.scatter(at_never, after, label="after the erasure", color="#0072B2", s=22)
axes.set(
    xlabel="score by a head that never saw them", ylabel="score of their own class"
)
axes.legend()
figure.tight_layout()
store.close()
