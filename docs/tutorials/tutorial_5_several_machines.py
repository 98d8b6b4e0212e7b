"""
Several machines
================

A head is determined by sums over its samples, so each machine can learn its own share of the data. Added together,
the sums of all machines equal, bit for bit, the sums that one machine would compute from all the data.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

from torchlssvm import LSSVMHead
from torchlssvm.distributed import Delta, merge

folder = Path(tempfile.mkdtemp())
digits = load_digits()
x, y = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)


def empty() -> LSSVMHead:
    return LSSVMHead(64, 10, grid=2.0)  # one grid for all


alone = empty().add(x, y)

# %%
# In one process
# --------------
#
# If two heads share a grid, you can merge them with ``+=`` and split them with ``-=``.

head = empty()
for part in torch.randperm(len(x)).chunk(7):
    head += empty().add(x[part], y[part])
print("seven parts make the whole:", head.digest() == alone.digest())

# %%
# Each machine contributes a matrix of sums. This code draws the matrices and their total:

figure, axes = plt.subplots(1, 4, figsize=(8, 2.2))
sums = [x[part].T @ x[part] for part in torch.arange(len(x)).chunk(3)]
for axis, total, name in zip(
    axes,
    [*sums, sum(sums)],
    ["machine 1", "machine 2", "machine 3", "sum"],
    strict=True,
):
    axis.imshow(total, cmap="viridis")
    axis.set(title=name, xticks=[], yticks=[])
figure.tight_layout()

# %%
# Machines that are never online together
# ---------------------------------------
#
# If machines are never online together, they can exchange files. A node writes its changes to a file (a delta), and
# the receiver merges the file. The receiver refuses a delta that it has already merged, so no sample is counted
# twice.

node = empty().add(x[:900], y[:900])
Delta.take(node).save(folder / "node.delta")

center = empty().add(x[900:], y[900:])
merge(center, Delta.load(folder / "node.delta"))
print("center has all:", center.digest() == alone.digest())

try:
    merge(center, Delta.load(folder / "node.delta"))
except Exception as error:
    print(f"{type(error).__name__}: {str(error)[:140]}")

# %%
# A process group
# ---------------
#
# Under torchrun, ``sync`` gives every rank the same head. If ``sync`` fails on one rank, no head changes. This script
# runs on two ranks, each with its own share of the data. Then rank 1 removes a sample that rank 0 had added.

script = folder / "ranks.py"
script.write_text(
    """
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torchlssvm import LSSVMHead
from torchlssvm.distributed import sync

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
digits = load_digits()
x, y = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)

head = LSSVMHead(64, 10, grid=2.0)
head.add(x[rank::world], y[rank::world])
sync(head)
if rank == 1:
    head.remove(x[:1], y[:1])
sync(head)
with open(f"{rank}.digest", "w") as file:
    file.write(head.digest())
dist.destroy_process_group()
"""
)
options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
subprocess.run(
    [*torchrun, script], cwd=folder, check=True, capture_output=True, timeout=300
)
digests = {path.read_text() for path in folder.glob("*.digest")}
print(
    "both ranks have the head that never saw sample 0:",
    digests == {empty().add(x[1:], y[1:]).digest()},
)

# %%
# Only sums travel between machines, never samples. But the sum of a single sample *is* that sample. With ``sync(head,
# min_samples=20)``, a machine refuses to send the sums of a class with fewer than 20 distinct samples. This is not
# differential privacy.
