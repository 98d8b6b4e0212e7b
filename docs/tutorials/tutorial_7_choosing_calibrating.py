"""
Choosing the regularization, calibrating probabilities
======================================================

This tutorial chooses the ridge penalty rho, estimates the test error, calibrates probabilities and detects unusual
inputs. A head computes all of this from its sums and one inverse, without training again and without held-out data.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

from torchlssvm import LSSVMHead
from torchlssvm.analysis.cross_validation import error_rate
from torchlssvm.features import RandomReLU
from torchlssvm.functional.calibration import expected_calibration_error
from torchlssvm.linear.diagnostics.uncertainty import leverage

digits = load_digits()
phi = RandomReLU(64, 300)(torch.from_numpy(digits.data).float() / 16)
y = torch.from_numpy(digits.target)
test = torch.arange(len(y)) % 2 == 1
x, y, test_x, test_y = phi[~test], y[~test], phi[test], y[test]
head = LSSVMHead(300, 10, rho=1.0).add(x, y)

# %%
# rho
# ---
#
# This code compares one hundred values of rho by two methods. Generalized cross-validation (GCV) needs only the sums
# of the head. Exact leave-one-out also needs the samples.

gcv = head.select_rho()
loo = head.select_rho(method="loo", x=x, y=y)
test_error = []
truth = 2 * torch.nn.functional.one_hot(test_y, 10) - 1
for rho in loo.rhos.tolist():
    head.rho = rho
    test_error.append(float((head(test_x) - truth).square().mean()))
head.rho = loo.rho

figure, axes = plt.subplots(figsize=(6, 3.2))
axes.loglog(
    gcv.rhos, gcv.errors / gcv.errors.min(), label="GCV, from sums", color="#0072B2"
)
axes.loglog(
    loo.rhos, loo.errors / loo.errors.min(), label="leave-one-out", color="#D55E00"
)
axes.loglog(
    loo.rhos,
    torch.tensor(test_error) / min(test_error),
    label="test set",
    color="#595959",
    linestyle="--",
)
axes.set(xlabel="rho", ylabel="squared error, relative", ylim=(0.98, 3))
axes.legend()
figure.tight_layout()
print(f"GCV chooses {gcv.rho:.3g}, leave-one-out {loo.rho:.3g}")

# %%
# Leave-one-out scores
# --------------------

scores = head.leave_one_out(x, y)
errors = {
    "training": error_rate(head(x), y),
    "leave-one-out": error_rate(scores, y),
    "test": error_rate(head(test_x), test_y),
}
print(", ".join(f"{name} error {error:.1%}" for name, error in errors.items()))

# %%
# Probabilities
# -------------
#
# With more than two classes, ``calibrate`` fits a temperature to the leave-one-out scores. These scores resemble
# scores of new inputs, because each sample is scored by a model that never saw the sample.

softmax = torch.softmax(head(test_x), 1)
calibrated = head.calibrate(x, y).predict_proba(test_x)
for name, p in (("softmax of scores", softmax), ("calibrated", calibrated)):
    print(f"{name:>18}: calibration error {expected_calibration_error(p, test_y):.3f}")

# %%
# The calibration depends on the samples, so any change to the samples invalidates it. Calibrate again after a
# removal:

head.remove(x[:10], y[:10])
print("calibrated still:", head.calibration is not None)
head.calibrate(x[10:], y[10:])
print("and again:       ", head.calibration is not None)

# %%
# Inputs that differ from the learned samples have a large leverage. You can use the leverage to detect such inputs:

noise = 5 * torch.randn(100, 300)
for name, inputs in (("test digits", test_x), ("noise", noise)):
    print(
        f"{name}: median relative leverage {leverage(head, inputs, relative=True).median():.2f}"
    )
