"""
A head on a pretrained network
==============================

Take a network that was trained on other data, freeze it, and replace its last layer with a head. The head learns
in one pass.

The library ships no weights, so this tutorial first trains a small network on the digits 0 to 4 of scikit-learn.
This network stands in for a pretrained network such as ``torchvision.models.mobilenet_v2(weights="DEFAULT")``.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from torchlssvm import LSSVMHead, attach

torch.manual_seed(0)
digits = load_digits()
images = torch.from_numpy(digits.images).float()[:, None] / 16  # (1797, 1, 8, 8)
labels = torch.from_numpy(digits.target)

network = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(288, 5),
)
small = labels < 5
optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
for _ in range(40):
    optimizer.zero_grad()
    nn.functional.cross_entropy(network(images[small]), labels[small]).backward()
    optimizer.step()

# %%
# The head
# --------
#
# ``attach`` replaces the last linear layer with a head and freezes all other layers. You need no learning rate and no
# epochs, because one pass adds every image to the head's sums. When you first read the weights, the head chooses the
# ridge penalty rho and solves for the weights. The head learns all ten digits, although the network has never seen
# the digits 5 to 9.

test = torch.arange(len(labels)) % 5 == 0
clf = attach(network, num_classes=10, grid=64.0)
features = clf.features(images[~test])  # (1437, 288): what the head learns and unlearns
clf.head.add(features, labels[~test])
accuracy = (clf.predict(images[test]) == labels[test]).double().mean()
print(f"{len(features)} images learned, rho = {clf.head.rho:.3g}")
print(f"accuracy on {int(test.sum())} others: {accuracy:.1%}")

# %%
# Unlearning
# ----------
#
# After a removal, the head has the same state as a head that never saw the samples. The digest, a SHA-256 hash of the
# sums, shows this. After ``refresh``, which chooses rho again, the weights are equal too.

clf.head.remove(features[:100], labels[~test][:100])
never = LSSVMHead(288, 10, grid=64.0, rho="gcv").add(
    features[100:], labels[~test][100:]
)
print("same digest: ", clf.head.digest() == never.digest())
print("same weights:", torch.equal(clf.head.refresh().w, never.refresh().w))

# %%
# More data
# ---------
#
# In this example, samples arrive in batches of 240. After each batch, the head is the exact solution for all samples
# so far, so its accuracies form a learning curve.

head = LSSVMHead(288, 10, grid=64.0, rho="gcv")
test_features = clf.features(images[test])
seen, scores = [], []
for start in range(0, len(features), 240):
    head.add(features[start : start + 240], labels[~test][start : start + 240])
    head.refresh()  # chooses rho again
    seen.append(head.n)
    scores.append(float((head.predict(test_features) == labels[test]).double().mean()))

figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(seen, [100 * score for score in scores], marker="o", color="#0072B2")
axes.set(xlabel="images learned", ylabel="test accuracy in %")
axes.grid(alpha=0.3)
figure.tight_layout()

# %%
# Keep two things in mind. First, the network must stay frozen, because a network that keeps learning produces
# different features. Second, the network must not have been trained on data that you may have to erase. The network
# of this tutorial did see the digits 0 to 4. Removing one of them from the head does not change the network.
