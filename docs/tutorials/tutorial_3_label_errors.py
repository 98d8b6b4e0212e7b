"""
Finding and correcting wrong labels
===================================

A label is suspicious if a model that was trained without the sample predicts another label. A least-squares head
computes the scores of all these leave-one-out models from a single solve, so you can rank a whole data set quickly,
without thresholds or folds.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

from torchlssvm import LSSVMHead
from torchlssvm.analysis.label_errors import find_label_errors
from torchlssvm.features import RandomReLU

torch.manual_seed(0)
digits = load_digits()
x, truth = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
test = torch.arange(len(x)) % 4 == 0
x, truth, test_x, test_truth = x[~test], truth[~test], x[test], truth[test]

wrong = torch.rand(len(x)) < 0.1  # every tenth label is made wrong
given = torch.where(wrong, (truth + torch.randint(1, 10, truth.shape)) % 10, truth)

# %%
# Ranking
# -------
#
# Random ReLU features let a linear head follow curved class boundaries. The features of a sample are identical, bit
# for bit, on every machine.

features = RandomReLU(64, 500)
phi, test_phi = features(x), features(test_x)
head = LSSVMHead(500, 10, rho=1.0).add(phi, given)
head.select_rho()
found = find_label_errors(head, phi, given, ids=range(len(x)))

ranked = wrong[found.order].double()
print(f"{int(wrong.sum())} of {len(x)} labels are wrong")
for count in (20, int(wrong.sum())):
    print(f"among the {count} most suspicious: {ranked[:count].mean():.0%} wrong")

# %%
# This code draws the most suspicious digits, each with its given label and the proposed one:

figure, axes = plt.subplots(2, 6, figsize=(7, 3))
for axis, i in zip(axes.flat, found.order.tolist(), strict=False):
    axis.imshow(x[i].reshape(8, 8), cmap="gray_r")
    axis.set_title(f"{int(given[i])}, rather {int(found.proposed[i])}", fontsize=9)
    axis.axis("off")
figure.tight_layout()

# %%
# Correcting
# ----------
#
# In practice, look at the suspicious samples before you change a label. In this example the true labels are known, so
# the code uses them as if a person had checked each sample. ``relabel`` is exact: afterwards the head equals a head
# that learned the corrected labels from the start.


def accuracy() -> float:
    return float((head.predict(test_phi) == test_truth).double().mean())


before = accuracy()
looked_at = found.suspects
head.relabel(phi[looked_at], given[looked_at], truth[looked_at])
print(f"{len(looked_at)} labels looked at")
print(f"accuracy {before:.1%} before, {accuracy():.1%} after")

corrected = given.clone()
corrected[looked_at] = truth[looked_at]
again = LSSVMHead(500, 10, grid=head.grid, rho=1.0).add(phi, corrected)
print(
    "same digest as a head that was given these labels:",
    head.digest() == again.digest(),
)

# %%
# With a store, use ``store.label_errors()`` and ``store.apply(found.events(20))``. In a Lightning run, the
# ``LabelAudit`` callback writes proposals to a file. ``found.pred_probs`` has the format that cleanlab expects.
