"""Events that run compiled, one after the other, are those that Python would have made."""

import numpy as np
import pytest
import torch

from torchlssvm import IncrementalSVM
from torchlssvm.kernels import RBF, Linear, Polynomial
from torchlssvm.machines import svm_near, svm_run

pytest.importorskip("numba")


@pytest.fixture
def short_sight(monkeypatch):
    for name, value in {"FROM": 6, "LEAST": 8, "SHARE": 4}.items():
        monkeypatch.setattr(svm_near, name, value)


@pytest.fixture
def counted(monkeypatch):
    """How many events were made in runs."""
    counts = {"runs": 0, "events": 0, "left over": 0, "most": 0}
    real, replay = svm_run.Runner.run, svm_run.Runner._replay

    def run(self, loops):
        found = real(self, loops)
        counts["runs"] += 1
        counts["left over"] += found is not None and found[1] != "end"
        return found

    def noted(self, log):
        counts["events"] += len(log)
        counts["most"] = max(counts["most"], len(log))
        replay(self, log)

    monkeypatch.setattr(svm_run.Runner, "run", run)
    monkeypatch.setattr(svm_run.Runner, "_replay", noted)
    return counts


def points(n, d):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] + 0.4 * torch.randn(n, generator=generator) > 0).long()


def consistent(svm):
    """Lists, dictionaries and arrays of the sets say the same, and rows that are kept are rows of Q."""
    s, m = svm._engine.samples, svm._engine.margin
    assert {i: k for k, i in enumerate(m.position) if i >= 0} == m.slot
    assert sorted(m.free) == [k for k in range(1, m.top) if m.position[k] < 0]
    assert m.free[:1] == sorted(m.free)[:1]
    assert m.top == 1 or m.position[-1] >= 0
    np.testing.assert_array_equal(m.hused, [1.0] + [float(i >= 0) for i in m.position[1:]])
    np.testing.assert_array_equal(m.hat, [max(0, i) for i in m.position])
    np.testing.assert_array_equal(m.whole[2][m.top :], 0.0)
    rows = s.rows
    assert {i: int(rows.place[i]) for i in np.nonzero(rows.place >= 0)[0].tolist()} == rows.row_of
    assert not set(rows.free) & set(rows.row_of.values())
    assert len(rows.free) + len(rows.row_of) == len(rows.hheld)
    for i, row in rows.row_of.items():
        assert rows.hheld[row] == i
        assert row < rows.high
        torch.testing.assert_close(rows.rows[row, : s.n], s.block(torch.tensor([i]))[0], rtol=0, atol=1e-13)
    for i, slot in m.slot.items():
        torch.testing.assert_close(m.QS[slot, : s.n], s.block(torch.tensor([i]))[0], rtol=0, atol=1e-13)
    used = [0, *m.slot.values()]
    truth = torch.linalg.inv(m.A[used][:, used]) if len(used) > 1 else m.R[:1, :1]
    torch.testing.assert_close(m.R[used][:, used], truth, rtol=1e-6, atol=1e-6)


CASES = {
    "rbf": (RBF(sigma=2.0), 64, 2**20),
    "rbf, a short log": (RBF(sigma=2.0), 2, 2**20),
    "rbf, a small cache": (RBF(sigma=2.0), 64, 40_000),
    "rbf, no cache": (RBF(sigma=2.0), 64, 0),
    "linear": (Linear(), 64, 2**20),
    "polynomial": (Polynomial(degree=2), 64, 2**20),
    "polynomial, no cache": (Polynomial(degree=2), 64, 0),
}


@pytest.mark.parametrize(("kernel", "log", "cache"), list(CASES.values()), ids=list(CASES))
def test_the_same_events(kernel, log, cache, short_sight, counted, monkeypatch):
    x, y = points(150, 5)
    monkeypatch.setattr(svm_run, "LOG", log)
    answers = []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(svm_run.Runner, "runs", None)
        svm = IncrementalSVM(kernel, C=2.0, cache_bytes=cache).fit(x[:100], y[:100])
        trace = []
        for k in range(50):
            svm.add(x[100 + k : 101 + k], y[100 + k : 101 + k])
            consistent(svm)
            svm.remove([int(svm.ids[svm.alpha > 0][k % 7])])
            consistent(svm)
            assert svm.kkt_violation() < 1e-12
            trace.append(svm.events)
        answers.append((svm.ids, svm.alpha, svm(x), trace))
    assert torch.equal(answers[0][0], answers[1][0])
    torch.testing.assert_close(answers[0][2], answers[1][2], rtol=0, atol=1e-10)
    if not isinstance(kernel, Linear):  # n > d: alpha is not unique, and ties go either way
        torch.testing.assert_close(answers[0][1], answers[1][1], rtol=0, atol=1e-10)
        assert answers[0][3] == answers[1][3]
    if isinstance(kernel, RBF):
        assert counted["events"] > 40
        assert counted["left over"] > 5
        assert counted["most"] == 2 if log == 2 else counted["most"] > 2
