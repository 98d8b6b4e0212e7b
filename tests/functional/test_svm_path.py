"""The SVM's path in torch: against the certified machine, against libsvm's sets made exact, and unlearning."""

import copy

import numpy as np
import pytest
import torch

from tests.support.pretend_cuda import PretendCuda
from tests.svm.truth import exact, kkt, rbf
from torchlssvm import IncrementalSVM, OneVsOne, OneVsRest
from torchlssvm.functional import svm_path
from torchlssvm.functional.svm_path import Machines, learn, unlearn
from torchlssvm.kernels import RBF, Linear
from torchlssvm.svm import device_paths

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


def test_64_machines_on_a_device_are_those_on_the_host(monkeypatch):
    """Equal values, with at most one synchronisation in each step: the host asks whether to go on, and nothing else."""
    steps, rates = [], svm_path.steps_to_bounds
    monkeypatch.setattr(svm_path, "steps_to_bounds", lambda *given: (steps.append(1), rates(*given))[1])
    K = torch.from_numpy(problem(2)[0])
    generator = torch.Generator().manual_seed(0)
    y = torch.where(torch.rand(64, len(K), generator=generator) > 0.5, 1.0, -1.0).double()
    u = torch.full_like(y, 4.0)
    host = Machines(K, y, u)
    host.side = -host.side
    svm_path.follow(host, u)
    steps.clear()
    with PretendCuda() as device:
        there = Machines(K.cuda(), y.cuda(), u.cuda())
        there.side, given = -there.side, u.cuda()
        with device.counting() as cost:
            svm_path.follow(there, given)
        alpha, b = there.alpha.cpu(), there.b.cpu()
    assert (
        20 < cost.synchronizations <= len(steps) // 2 + 1
    )  # steps are computed twice in each: for S, and for a null vector
    torch.testing.assert_close(alpha, host.alpha, rtol=0, atol=1e-9)
    torch.testing.assert_close(b, host.b, rtol=0, atol=1e-9)


def by_cvxopt(K, y, u):
    """The least value of 1/2 alpha^T Q alpha - sum alpha that cvxopt's interior-point method finds."""
    cvxopt = pytest.importorskip("cvxopt")
    n, C = len(y), u.max()
    options = {"show_progress": False, "abstol": 1e-12, "reltol": 1e-12, "feastol": 1e-12}
    box, ends = np.vstack([-np.eye(n), np.eye(n)]), np.concatenate([np.zeros(n), u / C])
    found = cvxopt.solvers.qp(
        *(cvxopt.matrix(v) for v in (C * K * np.outer(y, y), -np.ones(n), box, ends, y[None])),
        cvxopt.matrix(0.0), kktsolver="ldl", options=options,
    )  # fmt: skip
    return objective(K, y, np.clip(C * np.array(found["x"]).ravel(), 0.0, u))


def objective(K, y, alpha):
    return 0.5 * (y * alpha) @ K @ (y * alpha) - alpha.sum()


@pytest.mark.parametrize("block", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 25))])
def test_equal_to_cvxopt(block):
    """80 problems in each block: copies, ties, C from 1e-6 to 1e6. Conditions from their definition, objective by cvxopt."""
    for seed in range(10 * block, 10 * block + 10):
        K, y, u = problem(seed)
        machines = learn(Machines(*(torch.from_numpy(v.copy()) for v in (K, y, u))))
        certified = machines.optimal()
        assert int(certified.sum()) >= M - 1, seed  # of all 2,000 one is left for the certified fallback, at seed 209
        for k in range(M):
            svm = IncrementalSVM("precomputed", C=float(u[k, 0]))
            svm.add(K, (y[k] > 0).astype(int))
            alpha, b = svm.alpha.numpy(), svm.b
            scale = 1.0 + np.abs(K).max() * alpha.sum()
            assert kkt(K, y[k], u[k], alpha, b) < 1e-12 * scale
            if certified[k]:
                scores, there = K @ (alpha * y[k]), K @ (machines.alpha[k].numpy() * y[k])
                assert close(scores, there, scale), (seed, k)
                if ((alpha > 1e-9 * u[k]) & (alpha < (1 - 1e-9) * u[k])).any():  # b is unique, and with it g
                    assert close(scores + b, there + float(machines.b[k]), scale), (seed, k)
            if abs(y[k].sum()) < len(y[k]):
                value, other = objective(K, y[k], alpha), by_cvxopt(K, y[k], u[k])
                assert -1e-6 <= (value - other) / abs(value) <= 1e-9, (seed, k, value, other)  # cvxopt may stop above


def test_leave_one_out_and_folds_of_a_machine_on_a_device(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 3, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.5 * torch.randn(80, generator=generator) > 0).long()
    svm = IncrementalSVM(RBF(sigma=1.5), C=5.0).fit(x, y)
    margin, (values, error) = svm.leave_one_out().margin, svm.k_fold(5)
    monkeypatch.setattr(device_paths, "used_for", lambda rows: True)
    torch.testing.assert_close(svm.leave_one_out().margin, margin, rtol=0, atol=1e-9)
    by_device = svm.k_fold(5)
    torch.testing.assert_close(by_device[0], values, rtol=0, atol=1e-9)
    assert by_device[1] == error


def test_b_is_the_middle_of_its_interval_if_every_margin_vector_is_at_a_bound(monkeypatch):
    x = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
    svm = IncrementalSVM(Linear(), C=0.3).fit(x, (torch.arange(12) // 2) % 2)
    margin = svm.leave_one_out().margin
    monkeypatch.setattr(device_paths, "used_for", lambda rows: True)
    torch.testing.assert_close(svm.leave_one_out().margin, margin, rtol=0, atol=1e-9)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_solutions_for_several_C_are_those_of_fits(place):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(70, 3, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.7 * torch.randn(70, generator=generator) > 0).long()
    values = [0.01, 1.0, (0.5, 40.0), 300.0]
    with PretendCuda():
        svm = IncrementalSVM(RBF(sigma=1.5), C=5.0, record=True, device=place)
        ids = svm.add(x.to(place), y.to(place))
        svm.remove(ids[20:30])
        before, events = copy.deepcopy(svm.state_dict()), len(svm.trajectory)
        alpha, b = svm.solutions(values)
        keep = torch.cat([torch.arange(20), torch.arange(30, 70)])
        for k, C in enumerate(values):
            fitted = IncrementalSVM(RBF(sigma=1.5), C=C).fit(x[keep], y[keep])
            torch.testing.assert_close(alpha[k].cpu(), fitted.alpha, rtol=1e-9, atol=1e-9)
            assert abs(float(b[k]) - fitted.b) < 1e-9
        assert len(svm.trajectory) == events
        assert all(torch.equal(value, before[name]) for name, value in svm.state_dict().items())
    with pytest.raises(ValueError, match="at least one"):
        svm.solutions([])


@pytest.mark.parametrize("kind", ["rbf on a line", "copies", "ties"])
def test_a_machine_on_a_device_learns_and_unlearns_there(kind, monkeypatch):
    """Each walk waits once a step, and a few times more; answers and certificates are those of the host."""
    walks, follow = [], device_paths.follow_on_device

    def counted(*given):
        with device.counting() as cost:
            steps = follow(*given)
        walks.append((steps, cost.synchronizations))
        return steps

    monkeypatch.setattr(device_paths, "follow_on_device", counted)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 3)), torch.from_numpy(rng.integers(0, 2, 30))
    x = {"rbf on a line": x[:, :1], "copies": x[np.arange(30) % 20], "ties": np.round(2 * x)}[kind]
    x, kernel = torch.from_numpy(x), Linear() if kind == "ties" else RBF(gamma=2.0)
    machines = {}
    with PretendCuda() as device:
        for place in ("cpu", "cuda"):
            svm = machines[place] = IncrementalSVM(kernel, C=1e3, device=place)
            svm.add(x[:20].to(place), y[:20].to(place))
            for i in range(20, 25):
                svm.add(x[i : i + 1].to(place), y[i : i + 1].to(place))
            for i in range(5):
                svm.remove([i])
            violation = svm.kkt_violation()
            assert violation <= 256 * violation.bound
        scores = machines["cuda"](x.cuda()).cpu()
    assert sum(steps > 0 for steps, _ in walks) > 4
    assert all(waits <= steps + 6 for steps, waits in walks if steps)
    torch.testing.assert_close(scores, machines["cpu"](x), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("form", [OneVsRest, OneVsOne])
def test_machines_that_share_samples_on_a_device(form, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.4 * torch.randn(50, generator=generator) > 0).long() + (x[:, 1] > 0.3).long()
    scores, sizes, follow = [], [], device_paths.follow
    monkeypatch.setattr(device_paths, "follow", lambda m, rates: (sizes.append(len(m.y)), follow(m, rates))[1])
    for on_device in (True, False):
        monkeypatch.setattr(device_paths, "used_for", lambda rows, on_device=on_device: on_device)
        machine = form(IncrementalSVM(RBF(sigma=1.0), C=20.0), 3)
        machine.add(x[:40], y[:40])
        for i in range(40, 50):
            machine.add(x[i : i + 1], y[i : i + 1])
        for i in range(10):
            machine.remove([i])
        machine.relabel(machine.ids[:3], (y[10:13] + 1) % 3)
        scores.append(machine(x))
        assert all(one._solver.path.ahead is None for one in machine.machines)
    torch.testing.assert_close(*scores, rtol=0, atol=1e-9)
    assert sum(size > 1 for size in sizes) >= 20  # each change moves the machines together
    assert (
        sum(size == 1 for size in sizes) < 20
    )  # and few paths are followed alone: when the first samples arrive, and relabelling
