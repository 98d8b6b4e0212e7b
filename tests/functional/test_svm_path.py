"""The SVM's path in torch: against the certified machine, against libsvm's sets made exact, and unlearning."""

import numpy as np
import pytest
import torch

from tests.svm.truth import exact, kkt, rbf
from torchlssvm import IncrementalSVM
from torchlssvm.functional import svm_path
from torchlssvm.functional.svm_path import Machines, learn, unlearn
from torchlssvm.kernels import RBF

M = 8


def problem(seed: int):
    """Shared samples, and labels and bounds of M machines: a linear kernel, one on small integers (ties), RBF, copies."""
    rng = np.random.default_rng(seed)
    n, J = int(rng.integers(4, 30)), int(rng.integers(2, 5))
    x = rng.normal(size=(n, J))
    if seed % 4 == 1:
        x = np.round(2 * x)
    if seed % 4 == 3:
        x[n // 2 :] = x[: n - n // 2]
    K = x @ x.T if seed % 4 < 2 else rbf(x, x, 0.5)
    y = rng.choice([-1.0, 1.0], size=(M, n))
    C = 10.0 ** (rng.uniform(-6, 6, size=(M, 1)) if seed % 8 < 4 else rng.uniform(-1, 2, size=(M, 1)))
    return K, y, np.repeat(C, n, 1)


def close(first, second, scale):
    return np.abs(first - second).max() <= 1e-9 * scale


@pytest.mark.parametrize("block", range(8))
def test_machines_that_move_together_are_those_that_move_alone(block):
    for seed in range(block, 48, 8):
        K, y, u = problem(seed)
        machines = learn(Machines(*(torch.from_numpy(v) for v in (K, y, u))))
        assert int(machines.optimal().sum()) >= M - 1, seed  # what is left is for the certified fallback
        for k in np.flatnonzero(machines.optimal().numpy()):
            alpha, b = machines.alpha[k].numpy(), float(machines.b[k])
            scale = 1.0 + np.abs(K).max() * alpha.sum()
            assert kkt(K, y[k], u[k], alpha, b) < 1e-12 * scale
            other = IncrementalSVM("precomputed", C=float(u[k, 0]))
            other.add(K, (y[k] > 0).astype(int))
            assert close(K @ (alpha * y[k]), K @ (other.alpha.numpy() * y[k]), scale), seed


def test_equal_to_a_dense_solution():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    y = np.sign(x[:, 0] + 0.5 * rng.normal(size=60))
    K, u = rbf(x, x, 0.3), np.full(60, 4.0)
    machines = learn(Machines(*(torch.from_numpy(v) for v in (K, y[None], u[None]))))
    alpha, b = exact(K, y, u)
    np.testing.assert_allclose(machines.alpha[0], alpha, rtol=0, atol=1e-10)
    assert abs(float(machines.b[0]) - b) < 1e-10


def test_samples_unlearned_are_as_if_never_learned():
    K, y, u = (torch.from_numpy(v) for v in problem(2))
    gone = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    left = learn(Machines(K, y, torch.where(gone, 0.0, u)))
    machines = unlearn(learn(Machines(K, y, u.clone())), gone)
    both = machines.optimal() & left.optimal()
    assert int(both.sum()) >= M - 1
    f, want = ((m.y * m.alpha) @ K for m in (machines, left))
    scale = 1.0 + u.amax(1, keepdim=True) * K.abs().max()
    assert bool(((f - want).abs() <= 1e-9 * scale)[both].all())


def test_one_synchronisation_in_each_step(monkeypatch):
    """The host asks once in each step whether to go on, and nothing else."""
    asked, steps = [], []
    real, rates = torch.Tensor.tolist, svm_path.steps_to_bounds
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (asked.append(1), real(self))[1])
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a synchronisation"))
    monkeypatch.setattr(svm_path, "steps_to_bounds", lambda *given: (steps.append(1), rates(*given))[1])
    K, y, u = (torch.from_numpy(v) for v in problem(2))
    m = Machines(K, y, u)
    m.side = -m.side
    svm_path.follow(m, u)
    assert len(steps) == 2 * (len(asked) - 1) > 20


def test_leave_one_out_and_folds_of_a_machine_on_a_device(monkeypatch):
    from torchlssvm.svm import device_paths

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 3, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.5 * torch.randn(80, generator=generator) > 0).long()
    svm = IncrementalSVM(RBF(sigma=1.5), C=5.0).fit(x, y)
    margin, (values, error) = svm.leave_one_out().margin, svm.k_fold(5)
    monkeypatch.setattr(device_paths, "used_for", lambda solver: True)
    torch.testing.assert_close(svm.leave_one_out().margin, margin, rtol=0, atol=1e-9)
    by_device = svm.k_fold(5)
    torch.testing.assert_close(by_device[0], values, rtol=0, atol=1e-9)
    assert by_device[1] == error
