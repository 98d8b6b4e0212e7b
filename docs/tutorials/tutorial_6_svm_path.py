"""
The exact SVM and its path
==========================

``IncrementalSVM`` is a support vector machine with hinge loss. To learn or unlearn a sample, it changes the coefficient
alpha of the sample step by step, while all other samples keep satisfying the Kuhn-Tucker conditions. The result equals
training from scratch, to machine precision.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.svm import SVC

from torchlssvm import IncrementalSVM
from torchlssvm.kernels import RBF

generator = torch.Generator().manual_seed(3)
y = torch.arange(80) % 2
x = torch.randn(80, 2, generator=generator, dtype=torch.float64) + 1.6 * y[:, None]

# %%
# Learn one by one
# ----------------
#
# Pass ``record=True`` to record every event. An event occurs each time a sample becomes a margin, error or reserve
# vector.

svm = IncrementalSVM(RBF(sigma=1.5), C=5.0, record=True)
for i in range(len(x)):
    svm.add(x[i : i + 1], y[i : i + 1])
print(f"{len(svm.trajectory)} events")
print(
    f"{len(svm.margin)} margin, {len(svm.error)} error, {len(svm.reserve)} reserve vectors"
)
print(f"largest violation of the conditions: {svm.kkt_violation():.1e}")

svc = SVC(C=5.0, gamma=1 / (2 * 1.5**2), tol=1e-10).fit(x, y)
difference = abs(svc.decision_function(x) - svm.decision(x).numpy()).max()
print(f"scikit-learn's SVC, trained on all at once, differs by {difference:.1e}")

# %%
# The next code block plots the coefficients. Each line is the alpha of one sample, and bends where a sample moves from
# one set to another.

alpha = torch.zeros(len(svm.trajectory), len(x), dtype=torch.float64)
for t, step in enumerate(svm.trajectory):
    alpha[t, step.ids] = step.alpha
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.plot(alpha, linewidth=0.8)
axes.set(xlabel="event", ylabel="alpha")
figure.tight_layout()

# %%
# Unlearn, and leave one out
# --------------------------
#
# ``leave_one_out`` scores each sample by a machine without that sample. It unlearns only the support vectors, because
# samples with alpha = 0 do not affect the solution.

estimate = svm.leave_one_out()
print(f"leave-one-out error, exact: {estimate.error.double().mean():.1%}")

svm.remove(svm.error[:3])
print(f"{svm.n} samples left, largest violation {svm.kkt_violation():.1e}")

# %%
# The path of C
# -------------
#
# Between two breakpoints, alpha is linear in C, so the breakpoints describe the solution for every C.

path = svm.set_C(0.05).regularization_path(50.0)
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.semilogx(path.C, path.alpha / path.C[:, None], linewidth=0.8)
axes.set(xlabel="C", ylabel="alpha / C")
figure.tight_layout()
print(f"{len(path.C)} breakpoints between C = 0.05 and C = 50")
