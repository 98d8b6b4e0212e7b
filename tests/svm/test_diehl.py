"""The incremental SVM against Diehl's own Matlab code, run by Octave.

DIEHL_SVM names a folder with his "Incremental SVM Learning in MATLAB" (svmtrain.m, perturbc.m, svmloo.m, ...). He adds 1e-3 to
the diagonal of the kernel matrix; with that in a precomputed kernel both solve the same problem, one sample after the other.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits

from tests.svm.truth import rbf
from torchlssvm import IncrementalSVM

JITTER = 1e-3
SCRIPT = """
X = dlmread('x.csv')'; y = dlmread('y.csv'); scale = dlmread('scale.csv');
t = cputime; [a, b] = svmtrain(X, y, 10, 5, scale); t1 = cputime - t;
t = cputime; [e, c, g] = svmloo; t2 = cputime - t;
dlmwrite('first.csv', [[a; b], [g; 0]], 'precision', '%.17g');
[a, b] = perturbc(100);
[e, c, g] = svmloo;
dlmwrite('second.csv', [[a; b], [g; 0]], 'precision', '%.17g');
dlmwrite('seconds.csv', [t1 t2]);
"""


def one_by_one(K, y):
    svm = IncrementalSVM("precomputed", C=10.0)
    for i in range(len(K)):
        svm.add(torch.from_numpy(K[i : i + 1, : i + 1]), torch.tensor([int(y[i])]))
    return svm


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "breast cancer"])
def test_the_same_solution_and_leave_one_out_as_diehls_code(name, tmp_path):
    code = os.environ.get("DIEHL_SVM")
    if not code or not (Path(code) / "svmtrain.m").is_file():
        pytest.skip("DIEHL_SVM does not name a folder with Diehl's svmtrain.m")
    if not shutil.which("octave-cli"):
        pytest.skip("octave-cli is not installed")
    if name == "digits":
        x, y = load_digits(return_X_y=True)
        x, y = x[:400] / 16, y[:400] % 2
    else:
        x, y = load_breast_cancer(return_X_y=True)
        x, y = ((x - x.mean(0)) / x.std(0))[:300], y[:300]
    gamma = 1 / (x.shape[1] * x.var())
    np.savetxt(tmp_path / "x.csv", x, delimiter=",", fmt="%.17g")
    np.savetxt(tmp_path / "y.csv", 2 * y - 1, fmt="%d")
    np.savetxt(tmp_path / "scale.csv", [1 / (2 * gamma)], fmt="%.17g")
    (tmp_path / "script.m").write_text(f"warning('off', 'all'); addpath('{code}');" + SCRIPT)
    subprocess.run(["octave-cli", "--no-gui", "script.m"], cwd=tmp_path, capture_output=True, timeout=1200, check=False)

    K = rbf(x, x, gamma) + JITTER * np.eye(len(x))
    one_by_one(K[:60, :60], y[:60]).leave_one_out()  # compile
    start = time.process_time()
    svm = one_by_one(K, y)
    taken = [time.process_time() - start]
    for C, file in ((10.0, "first"), (100.0, "second")):
        svm.set_C(C)
        truth = np.loadtxt(tmp_path / f"{file}.csv", delimiter=",")
        start = time.process_time()
        margin = svm.leave_one_out().margin.numpy()
        taken.append(time.process_time() - start)
        differences = {
            "alpha": np.abs(svm.alpha.numpy() - truth[:-1, 0]).max() / C,
            "b": abs(svm.b - truth[-1, 0]),
            "leave-one-out g": np.abs(margin - truth[:-1, 1]).max(),
        }
        print(f"{name}, C = {C:g}:", {key: f"{value:.0e}" for key, value in differences.items()})
        assert max(differences.values()) < 1e-9
    theirs = np.loadtxt(tmp_path / "seconds.csv", delimiter=",")
    print(f"seconds one by one {theirs[0]:.1f} and {taken[0]:.2f}, leave-one-out {theirs[1]:.1f} and {taken[1]:.3f}")
    assert taken[0] < theirs[0]
    assert taken[1] < theirs[1]
