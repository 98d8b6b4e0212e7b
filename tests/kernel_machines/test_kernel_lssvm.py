"""KernelLSSVM against dense solves of equation (6), scikit-learn, and brute-force refits; and what it does at the edges."""

import copy
import io
import random
import warnings

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.kernel_dense import code, lssvm, rbf
from torchlssvm import (
    IncrementalSVM,
    KernelLSSVM,
    LagrangianSVM,
    NotFittedError,
    NumericalWarning,
    RemovalError,
    attach,
)
from torchlssvm.errors import OutOfMemoryError
from torchlssvm.functional import cost, memory
from torchlssvm.kernels import RBF, Custom, Deep, Linear, Polynomial

GENERATOR = torch.Generator().manual_seed(0)
POOL = torch.randn(260, 4, dtype=torch.float64, generator=GENERATOR)
POOL[200:220] = POOL[:20]  # duplicates
LABELS = torch.randint(3, (260,), generator=GENERATOR)


pytestmark = pytest.mark.usefixtures("updates_at_any_size")


def error(machine: KernelLSSVM, x: torch.Tensor, y: torch.Tensor, kernel=rbf) -> float:
    """The largest relative deviation of alpha and b from a dense solve. y: targets (n, K), in the order of ids."""
    alpha, b = lssvm(kernel(x, x), y, machine.C, machine.bias)
    scale = alpha.abs().max().clamp(min=1e-3)
    return max(float((machine.alpha - alpha).abs().max() / scale), float((machine.b - b).abs().max()))


def filled(n: int = 120, **options) -> tuple[KernelLSSVM, torch.Tensor]:
    machine = KernelLSSVM(RBF(sigma=2.0), **({"C": 5.0, "num_classes": 3} | options))
    return machine, machine.add(POOL[:n], LABELS[:n])


# -- any sequence of operations ------------------------------------------------------------------------------------------


class AnySequence(RuleBasedStateMachine):
    """add, remove, relabel, replace, update, change C, refresh, save and load: always the dense solution of what is held."""

    @initialize(
        kernel=st.sampled_from(["rbf", "linear"]),
        bias=st.booleans(),
        start=st.sampled_from([0, 3, 60, 110]),
        C=st.sampled_from([0.01, 1.0, 50.0]),
    )
    def start(self, kernel, bias, start, C):
        self.truth = rbf if kernel == "rbf" else lambda a, b: a @ b.mT
        self.make = lambda: KernelLSSVM(RBF(sigma=2.0) if kernel == "rbf" else Linear(), C=C, num_classes=3, bias=bias)
        self.machine, self.held = self.make(), {}
        if start:
            self.add(list(range(start)))

    def add(self, rows):
        ids = self.machine.add(POOL[rows], LABELS[rows]).tolist()
        assert not set(ids) & set(self.held)
        self.held |= {i: (r, int(LABELS[r])) for i, r in zip(ids, rows, strict=True)}

    def some(self, data, most):
        return data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=most, unique=True))

    @rule(rows=st.lists(st.integers(0, 259), max_size=70))
    def adding(self, rows):
        self.add(rows)

    @rule(row=st.integers(0, 259), times=st.integers(1, 70))
    def adding_one_by_one(self, row, times):
        for i in range(times):
            self.add([(row + i) % 260])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def removing(self, data):
        ids = self.some(data, len(self.held))
        self.machine.remove(ids)
        for i in ids:
            del self.held[i]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def removing_one_by_one(self, data):
        for i in self.some(data, 40):
            self.machine.remove(torch.tensor([i]))
            del self.held[i]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), label=st.integers(0, 2))
    def relabelling(self, data, label):
        ids = self.some(data, 10)
        self.machine.relabel(ids, torch.full((len(ids),), label))
        self.held |= {i: (self.held[i][0], label) for i in ids}

    @precondition(lambda self: self.held)
    @rule(data=st.data(), row=st.integers(0, 250))
    def replacing(self, data, row):
        ids = self.some(data, 5)
        rows = list(range(row, row + len(ids)))
        self.machine.replace(ids, POOL[rows], LABELS[rows])
        self.held |= {i: (r, int(LABELS[r])) for i, r in zip(ids, rows, strict=True)}

    @precondition(lambda self: self.held)
    @rule(data=st.data(), rows=st.lists(st.integers(0, 259), max_size=30))
    def updating(self, data, rows):
        gone = self.some(data, 30)
        ids = self.machine.update(add=(POOL[rows], LABELS[rows]), remove=gone).tolist()
        for i in gone:
            del self.held[i]
        self.held |= {i: (r, int(LABELS[r])) for i, r in zip(ids, rows, strict=True)}

    @rule(C=st.sampled_from([0.01, 1.0, 50.0]))
    def changing_C(self, C):
        self.machine.set_C(C)

    @rule()
    def refreshing(self):
        self.machine.refresh()

    @rule()
    def saving(self):
        state = self.machine.state_dict()
        self.machine = self.make()
        self.machine.load_state_dict(state)

    @rule()
    def copying(self):
        self.machine = copy.deepcopy(self.machine)

    @invariant()
    def dense(self):
        if not hasattr(self, "machine"):
            return
        assert self.machine.ids.tolist() == sorted(self.held)
        if not self.held:
            with pytest.raises(NotFittedError):
                self.machine(POOL)
            return
        rows = [self.held[i][0] for i in sorted(self.held)]
        y = code(torch.tensor([self.held[i][1] for i in sorted(self.held)]), 3)
        assert error(self.machine, POOL[rows], y, self.truth) < 1e-9


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(parent=settings(), stateful_step_count=12)


@pytest.mark.parametrize("always", [True, False])
def test_the_cost_rule_changes_no_answer(always, monkeypatch):
    monkeypatch.setattr(
        cost, "block_update_pays", lambda n, added, removed, inverse, gram: always and n > 0 and n + added > removed
    )
    rng, machine, held = random.Random(0), KernelLSSVM(RBF(sigma=2.0), C=5.0, num_classes=3), {}
    for _ in range(60):
        rows = [rng.randrange(260) for _ in range(rng.choice([1, 1, 3, 90]))]
        held |= dict(zip(machine.add(POOL[rows], LABELS[rows]).tolist(), rows, strict=True))
        gone = rng.sample(sorted(held), min(len(held) - 1, rng.choice([1, 2, 70])))
        machine.remove(gone)
        held = {i: r for i, r in held.items() if i not in gone}
        rows = list(held.values())
        assert error(machine, POOL[rows], code(LABELS[rows], 3)) < 1e-9


# -- leave one out, budget -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kernel", ["rbf", "linear"])
@pytest.mark.parametrize("updated", [False, True])
def test_leave_one_out_is_a_refit(kernel, bias, updated):
    truth = rbf if kernel == "rbf" else lambda a, b: a @ b.mT
    machine = KernelLSSVM(RBF(sigma=2.0) if kernel == "rbf" else Linear(), C=5.0, num_classes=3, bias=bias)
    ids = machine.add(POOL[:220], LABELS[:220])
    rows = list(range(20, 220)) if updated else list(range(220))
    if updated:
        machine.remove(ids[:20])
    rows, n = torch.tensor(rows), len(rows)
    K, y = truth(POOL[rows], POOL[rows]), code(LABELS[rows], 3)
    left_out = torch.empty(n, 3, dtype=torch.float64)
    for i in range(n):
        others = torch.arange(n) != i
        alpha, b = lssvm(K[others][:, others], y[others], 5.0, bias)
        left_out[i] = K[i, others] @ alpha + b
    torch.testing.assert_close(machine.leave_one_out(), left_out, rtol=1e-8, atol=1e-8)


def test_leave_one_out_needs_two_samples():
    machine = KernelLSSVM(RBF(sigma=1.0))
    with pytest.raises(NotFittedError):
        machine.leave_one_out()
    machine.add(POOL[:1], LABELS[:1] % 2)
    with pytest.raises(ValueError, match="two samples"):
        machine.leave_one_out()


def test_a_penalty_for_each_class_is_a_dense_solve():
    C = torch.tensor([0.5, 4.0, 30.0], dtype=torch.float64)
    machine = KernelLSSVM(RBF(sigma=2.0), C=C.tolist(), num_classes=3)
    labels = LABELS.clone()

    def check(rows):
        rows = torch.as_tensor(rows)
        K, y = rbf(POOL[rows], POOL[rows]), code(labels[rows], 3)
        ridge = torch.diag(1.0 / machine._C[labels[rows]])
        ones = torch.ones(len(rows), 1, dtype=torch.float64)
        M = torch.cat([torch.cat([ones.new_zeros(1, 1), ones.mT], 1), torch.cat([ones, K + ridge], 1)])
        solution = torch.linalg.solve(M, torch.cat([y.new_zeros(1, 3), y]))
        torch.testing.assert_close(machine.alpha, solution[1:], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(machine.b, solution[0], rtol=1e-9, atol=1e-9)

    ids = machine.add(POOL[:100], LABELS[:100])
    check(range(100))
    for i in ids[:30]:
        machine.remove(i)
    machine.add(POOL[100:140], LABELS[100:140])
    check(range(30, 140))
    labels[30:40] = (labels[30:40] + 1) % 3
    machine.relabel(ids[30:40], labels[30:40])
    check(range(30, 140))
    twin = KernelLSSVM(RBF(sigma=2.0), num_classes=3)
    twin.load_state_dict(machine.state_dict())
    assert twin.C == (0.5, 4.0, 30.0)
    assert torch.equal(twin(POOL), machine(POOL))
    machine.set_C((1.0, 2.0, 3.0))
    check(range(30, 140))
    for bad in ([1.0, 2.0], [1.0, 2.0, 0.0]):
        with pytest.raises(ValueError, match="C must be"):
            machine.set_C(bad)
    with pytest.raises(ValueError, match="labels"):
        machine.add(POOL[:1], torch.randn(1, 3))


def test_budget_removes_what_matters_least():
    machine = KernelLSSVM(RBF(sigma=2.0), C=5.0, num_classes=3, budget=30)
    held = dict(zip(machine.add(POOL[:30], LABELS[:30]).tolist(), range(30), strict=True))
    for r in range(30, 45):
        new = int(machine.add(POOL[r : r + 1], LABELS[r : r + 1]))
        held[new] = r
        ids = sorted(held)
        rows = torch.tensor([held[i] for i in ids])
        K, y = rbf(POOL[rows], POOL[rows]), code(LABELS[rows], 3)
        alpha, b = lssvm(K, y, 5.0)
        effects = []
        for i in range(len(ids)):  # how far a refit without i moves the scores at x_i
            others = torch.arange(len(ids)) != i
            a, c = lssvm(K[others][:, others], y[others], 5.0)
            effects.append(float(((K[i] @ alpha + b) - (K[i, others] @ a + c)).abs().max()))
        del held[ids[int(np.argmin(effects))]]
        assert machine.ids.tolist() == sorted(held)
    rows = list(held.values())
    assert error(machine, POOL[rows], code(LABELS[rows], 3)) < 1e-10


def test_budget_bounds_a_stream():
    machine = KernelLSSVM(RBF(sigma=2.0), C=5.0, num_classes=3, budget=40)
    ids = machine.add(POOL, LABELS)
    assert len(ids) == 260
    assert len(machine) == 40
    assert machine.capacity <= 128
    kept = machine.ids
    assert error(machine, POOL[kept], code(LABELS[kept], 3)) < 1e-10  # ids count from 0, like the rows
    again = KernelLSSVM(RBF(sigma=2.0), num_classes=3)
    again.load_state_dict(machine.state_dict())
    assert again.budget == 40


# -- others' answers -----------------------------------------------------------------------------------------------------


def test_parity_with_scikit_learn():
    kernel_ridge, linear_model = (
        pytest.importorskip("sklearn.kernel_ridge"),
        pytest.importorskip("sklearn.linear_model"),
    )
    x, y = POOL[:150].numpy(), np.random.default_rng(0).normal(size=(150, 2))
    probe = POOL[150:].numpy()
    for kernel, options in [
        (RBF(gamma=0.3), {"kernel": "rbf", "gamma": 0.3}),
        (Polynomial(2, gamma=0.5, coef0=1.0), {"kernel": "polynomial", "degree": 2, "gamma": 0.5, "coef0": 1.0}),
        (Linear(), {"kernel": "linear"}),
    ]:
        machine = KernelLSSVM(kernel, C=4.0, num_classes=2, bias=False)
        ids = machine.add(np.concatenate([probe[:20], x]), np.concatenate([np.ones((20, 2)), y]))
        machine.remove(ids[:20])
        theirs = kernel_ridge.KernelRidge(alpha=0.25, **options).fit(x, y)
        np.testing.assert_allclose(machine(torch.from_numpy(probe)).numpy(), theirs.predict(probe), atol=1e-8)
        np.testing.assert_allclose(machine.alpha.numpy(), theirs.dual_coef_, atol=1e-8)
    for bias in (True, False):
        machine = KernelLSSVM(Linear(), C=4.0, num_classes=2, bias=bias)
        machine.add(x + 100.0, y)
        ridge = linear_model.Ridge(alpha=0.25, fit_intercept=bias).fit(x + 100.0, y)
        np.testing.assert_allclose(
            machine(torch.from_numpy(probe + 100.0)).numpy(), ridge.predict(probe + 100.0), atol=1e-8
        )


# -- edges ---------------------------------------------------------------------------------------------------------------


def test_regression_targets():
    machine = KernelLSSVM(RBF(sigma=2.0), C=5.0, num_classes=1)
    values = POOL[:, 0].sin()
    ids = machine.add(POOL[:100], values[:100])
    machine.relabel(ids[:5], values[5:10])
    y = torch.cat([values[5:10], values[5:100]])[:, None]
    assert error(machine, POOL[:100], y) < 1e-10


@pytest.mark.parametrize("kernel", [RBF(sigma=2.0), Linear()])
def test_degenerate_data(kernel):
    def truth(x, y, C=1.0):
        alpha, b = lssvm(kernel(x, x), code(y, 3), C)
        return kernel(POOL, x) @ alpha + b

    one = torch.ones(80, 4, dtype=torch.float64)
    cases = {
        "one row": (POOL[:1], LABELS[:1]),
        "two rows": (POOL[:2], LABELS[:2]),
        "the same row 80 times": (POOL[:1].expand(80, 4), LABELS[:80]),
        "constant features": (one, LABELS[:80]),
        "zero features": (0 * one, LABELS[:80]),
        "one class": (POOL[:80], torch.ones(80, dtype=torch.int64)),
    }
    for name, (x, y) in cases.items():
        machine = KernelLSSVM(kernel, C=1.0, num_classes=3)
        machine.add(POOL[80:90], LABELS[80:90])
        ids = machine.add(x, y)
        machine.remove(machine.ids[:10])
        torch.testing.assert_close(machine(POOL), truth(x, y), rtol=1e-9, atol=1e-9, msg=name)
        for i in reversed(ids.tolist()):
            machine.remove(i)
        with pytest.raises(NotFittedError):
            machine(POOL)
        assert int(machine.add(POOL[:1, :2], LABELS[:1])) > int(ids[-1])  # as new, another width, but no id twice


def test_singular_to_machine_precision_is_helped_and_said():
    x = POOL[:3].repeat(20, 1)
    machine = KernelLSSVM(RBF(sigma=2.0), C=1e18)
    with pytest.warns(NumericalWarning, match="singular to machine precision"):
        machine.add(x, torch.arange(60) % 2)
    assert torch.isfinite(machine(POOL)).all()


def test_a_kernel_that_is_none_is_refused_and_nothing_changes():
    machine = KernelLSSVM(Custom(lambda a, b: a @ b.mT - 3.0), C=0.1)
    rows = 2 * torch.eye(4, dtype=torch.float64)  # [[1, -3], [-3, 1]] has the eigenvalue -2, which 1/C makes up for
    ids = machine.add(rows[:1], torch.tensor([0]))
    before = machine(POOL)
    with pytest.raises(ValueError, match="not positive semidefinite"):
        machine.add(0 * POOL[:6], LABELS[:6] % 2)
    assert torch.equal(machine(POOL), before)
    assert machine.ids.tolist() == ids.tolist()
    assert int(machine.add(rows[1:2], torch.tensor([1]))) == 1
    before = machine(POOL)
    with pytest.raises(ValueError, match="not positive semidefinite"):
        machine.set_C(10.0)
    assert machine.C == 0.1
    assert torch.equal(machine(POOL), before)


def test_a_kernel_that_overflows_is_refused_and_nothing_changes():
    for n in (5, 60):
        machine = KernelLSSVM(Polynomial(3), C=1.0)
        ids = machine.add(POOL[:n], LABELS[:n] % 2)
        machine.remove(ids[:1])
        before = machine(POOL)
        for k in (1, 3):
            with pytest.raises(ValueError, match="NaN or inf"):
                machine.add(POOL[:k] * 1e200, LABELS[:k] % 2)
            assert torch.equal(machine(POOL), before)


def test_near_duplicates_at_a_large_C_are_as_accurate_as_a_fit():
    x, rng = torch.cat([POOL[:100], POOL[:100] + 1e-9]), random.Random(0)
    machine, held = KernelLSSVM(RBF(sigma=2.0), C=1e6, num_classes=3), {}
    held |= dict(zip(machine.add(x[:150], LABELS[:150]).tolist(), range(150), strict=True))
    for _ in range(60):
        r = rng.randrange(200)
        held[int(machine.add(x[r : r + 1], LABELS[r : r + 1]))] = r
        i = rng.choice(sorted(held))
        machine.remove(i)
        del held[i]
    rows = list(held.values())
    alpha, b = lssvm(rbf(x[rows], x[rows]), code(LABELS[rows], 3), 1e6)
    truth = rbf(POOL, x[rows]) @ alpha + b
    assert float((machine(POOL) - truth).abs().max() / truth.abs().max()) < 1e-8


def test_drift_is_repaired_and_said_once():
    machine, ids = filled(200)
    machine.remove(ids[:1]).compute_inverse()
    machine._solver.U[:100, :100] *= 1 + 1e-6
    for i in ids[1:65]:
        machine.remove(i)
    with pytest.warns(NumericalWarning, match="drifted"):
        machine.remove(
            ids[65]
        )  # one more than wait: the first ones are added to the inverse, and the residual is checked
    machine.remove(ids[66:70])
    assert error(machine, POOL[70:200], code(LABELS[70:200], 3)) < 1e-10
    machine.remove(ids[70:71]).compute_inverse()
    machine._solver.U[:50, :50] *= 1 + 1e-6
    machine.remove(ids[71:72])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        machine.compute_inverse()
    assert error(machine, POOL[72:200], code(LABELS[72:200], 3)) < 1e-10


@pytest.mark.parametrize("kind", [KernelLSSVM, LagrangianSVM, IncrementalSVM])
def test_samples_of_any_layout(kind):
    x = torch.randn(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y, scores = (x[:, 0] > 0).long(), []
    for given in (x, x.to_sparse(), torch._neg_view(-x), x.T.contiguous().T, x.clone().requires_grad_(), x.tolist()):
        machine = kind(RBF(sigma=1.0))
        machine.add(given, y)
        scores.append(machine(x))
        assert torch.equal(scores[0], scores[-1])


def test_ids_must_be_known_and_given_once():
    machine, ids = filled(60)
    before = machine(POOL)
    for bad, kind in (
        (ids[:3] + 1000, RemovalError),
        ([1, 2, 1], RemovalError),
        (torch.tensor([0.5]), ValueError),
        (["a"], ValueError),
        ([-1], RemovalError),
    ):
        for call in (machine.remove, lambda i: machine.relabel(i, torch.zeros(len(i), dtype=torch.int64))):
            with pytest.raises(kind):
                call(bad)
    machine.remove(ids[:1])
    with pytest.raises(RemovalError, match="unknown"):
        machine.remove(ids[:1])
    machine.replace(ids[1:2], POOL[:1], LABELS[:1])
    with pytest.raises(ValueError, match="rows for"):
        machine.replace(ids[1:3], POOL[:1], LABELS[:1])
    assert not torch.equal(machine(POOL), before)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"C": 0.0}, "C must be"), ({"C": float("inf")}, "C must be"), ({"num_classes": 0}, "num_classes"), ({"bias": "free"}, "bias"), ({"budget": 1}, "budget")],
)  # fmt: skip
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        KernelLSSVM(RBF(sigma=1.0), **options)


# -- in the ecosystem ----------------------------------------------------------------------------------------------------


def test_capacity_doubles_and_forward_compiles_once():
    machine, _ = filled(100)
    compiled = torch.compile(machine, backend="eager", fullgraph=False)
    torch._dynamo.reset()
    capacities = {machine.capacity}
    with torch._dynamo.config.patch(error_on_recompile=True):
        for r in range(100, 128):
            torch.testing.assert_close(compiled(POOL), machine(POOL))
            machine.add(POOL[r : r + 1], LABELS[r : r + 1])
            capacities.add(machine.capacity)
    assert capacities == {128}
    for r in range(128, 250):
        machine.add(POOL[r : r + 1], LABELS[r : r + 1])
        capacities.add(machine.capacity)
    assert capacities == {128, 256}


def test_export_with_any_batch_size():
    machine, _ = filled(70)
    program = torch.export.export(
        machine, (POOL[:3],), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=2, max=4096)}}
    )
    torch.testing.assert_close(program.module()(POOL), machine(POOL), rtol=1e-12, atol=1e-12)


def test_scores_are_differentiable_in_x():
    for kernel in (RBF(sigma=2.0), Linear()):
        machine = KernelLSSVM(kernel, C=5.0, num_classes=3)
        machine.add(POOL[:50], LABELS[:50])
        assert torch.autograd.gradcheck(machine, (POOL[60:63].clone().requires_grad_(True),))


def test_attached_to_a_network():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 7))
    clf = attach(network, num_classes=3, head=KernelLSSVM(RBF(sigma=1.0), C=10.0, num_classes=3))
    images = torch.randn(40, 1, 4, 4)
    ids = clf.add(images, LABELS[:40])
    clf.head.remove(ids[:10])
    features = clf.features(images[10:]).double()
    alpha, b = lssvm(rbf(features, features, 1.0), code(LABELS[10:40], 3), 10.0)
    torch.testing.assert_close(
        clf(images), rbf(clf.features(images).double(), features, 1.0) @ alpha + b, rtol=1e-9, atol=1e-9
    )


def test_deep_kernel_keeps_features_and_takes_images():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh())
    machine = KernelLSSVM(Deep(network, RBF(sigma=1.0)), C=10.0, num_classes=3)
    images = torch.randn(60, 1, 4, 4)
    ids = machine.add(images, LABELS[:60])
    machine.remove(ids[:10])
    features = network(images).double()
    alpha, b = lssvm(rbf(features[10:], features[10:], 1.0), code(LABELS[10:60], 3), 10.0)
    torch.testing.assert_close(machine(images), rbf(features, features[10:], 1.0) @ alpha + b, rtol=1e-9, atol=1e-9)
    assert machine.in_features == 5
    twin = KernelLSSVM(Deep(copy.deepcopy(network), RBF(sigma=9.0)), C=1.0, num_classes=3)
    twin.load_state_dict(machine.state_dict())
    assert torch.equal(twin(images), machine(images))
    with pytest.raises(ValueError, match="batch"):
        machine.add(images[0, 0, 0], LABELS[:1])


def test_a_removed_sample_is_in_no_file():
    machine, ids = filled(100)
    secret = torch.full((1, 4), 1.2345678901234567, dtype=torch.float64)
    needle = secret.numpy().tobytes()
    i = machine.add(secret, torch.tensor([1]))
    for part in ("in", "out"):
        for write in (lambda m, f: torch.save(m.state_dict(), f), lambda m, f: torch.save(m, f)):
            file = io.BytesIO()
            write(machine, file)
            assert (needle in file.getvalue()) == (part == "in")
        if part == "in":
            machine.remove(i)
    machine.remove(ids[:50])
    file = io.BytesIO()
    torch.save(machine.state_dict(), file)
    assert len(file.getvalue()) < 50 * (4 + 3 + 3 + 1 + 4) * 8 + 8000  # trimmed, and without the inverse


def test_foreign_and_damaged_states_are_refused():
    machine, _ = filled(60)
    before = machine(POOL)
    state = machine.state_dict()
    for name, value, match in [
        ("rows", state["rows"][:-1], "do not fit"),
        ("ids", state["ids"].flip(0), "do not fit"),
        ("targets", state["targets"][:, :2], "do not fit"),
        ("solution", state["solution"] * float("nan"), "NaN"),
        ("solution", state["solution"][:, :1], "solution has shape"),
        ("options", state["options"][:-5], "KernelLSSVM"),
    ]:
        other, _ = filled(60)
        with pytest.raises(RuntimeError, match=match):
            other.load_state_dict(state | {name: value})
        assert torch.equal(other(POOL), before), name
    with pytest.raises(RuntimeError, match="bias is True"):
        filled(10, bias=False)[0].load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing"):
        machine.load_state_dict({k: v for k, v in state.items() if k != "rows"})


# -- what changes cost ---------------------------------------------------------------------------------------------------


def test_a_refused_part_of_a_batch_within_a_budget_changes_nothing():
    machine = KernelLSSVM(Polynomial(3), C=1.0, budget=40)
    machine.add(POOL[:40], LABELS[:40] % 2)
    before, ids = machine(POOL), machine.ids
    rows = POOL[40:60].clone()
    rows[15] *= 1e200
    with pytest.raises(ValueError, match="NaN or inf"):
        machine.add(rows, LABELS[40:60] % 2)
    assert torch.equal(machine.ids, ids)
    assert torch.equal(machine(POOL), before)
    assert machine.add(POOL[40:41], LABELS[40:41] % 2).tolist() == [40]


class Count(TorchDispatchMode):
    """Counts the flops of factorizations and inverses, of order n^3, and the operations of any kind."""

    def __init__(self):
        super().__init__()
        self.cubic, self.operations = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        self.operations += 1
        if name in ("linalg_cholesky_ex", "cholesky_inverse", "linalg_inv_ex", "linalg_eigh"):
            self.cubic += args[0].shape[-1] ** 3
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("bulk", ["add", "load", "C"])
def test_the_first_change_after_a_bulk_change_factors_nothing(bulk):
    """It solves with the factor; the inverse waits until 64 rows have come together."""
    machine, ids = filled(200)
    if bulk == "load":
        twin, _ = filled(0)
        twin.load_state_dict(machine.state_dict())
        machine = twin
        machine.add(POOL[:1], LABELS[:1])  # a file has neither factor nor inverse: the first change makes the factor
    elif bulk == "C":
        machine.set_C(2.0)
    with Count() as count:
        for r in range(200, 230):
            machine.add(POOL[r : r + 1], LABELS[r : r + 1])
        machine.remove(ids[:1])
        machine.remove(ids[1:5])
    assert count.cubic <= 4**3
    held = [*range(5, 200), *([0] if bulk == "load" else []), *range(200, 230)]
    assert error(machine, POOL[held], code(LABELS[held], 3)) < 1e-10


def test_a_copy_shares_the_inverse_until_it_changes():
    machine, ids = filled(200)
    machine.compute_inverse()
    U = machine._solver.U
    twin = copy.deepcopy(machine)
    assert twin._solver.U.data_ptr() == U.data_ptr()
    for i in ids[:100]:
        machine.remove(i)
    for r in range(200, 260):
        twin.add(POOL[r : r + 1], LABELS[r : r + 1])
    twin.compute_inverse()
    machine.compute_inverse()
    assert error(machine, POOL[100:200], code(LABELS[100:200], 3)) < 1e-10
    assert error(twin, POOL[:260], code(LABELS[:260], 3)) < 1e-10


def test_a_change_of_C_that_fails_leaves_C_as_it_was():
    x, y = torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 2
    fails = False

    def kernel(a, b):
        if fails:
            raise RuntimeError("no memory")
        return torch.exp(-torch.cdist(a, b).square())

    svm = KernelLSSVM(kernel, C=1.0)
    svm.add(x, y)
    before, fails = svm(x), True
    with pytest.raises(RuntimeError, match="no memory"):
        svm.set_C(50.0)
    fails = False
    assert svm.C == 1.0
    assert torch.equal(svm(x), before)


def test_exchanging_copies_at_a_large_C_keeps_the_digits():
    """Each copy nearly cancels: rounding errors grow by C in every exchange, unless the machine watches them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    y = (x[:, 0] > 0).long()
    machine = KernelLSSVM(RBF(sigma=2.0), C=1e3)
    ids = machine.add(x, y).tolist()
    q = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    for k in range(300):
        j = k % 200
        ids[j] = int(machine.update(add=(x[j : j + 1], y[j : j + 1]), remove=[ids[j]])[0])
        if k % 20 == 19:
            truth = copy.deepcopy(machine).refresh()(q)
            assert float((machine(q) - truth).abs().max() / truth.abs().max()) < 2e-10, k


def test_a_matrix_that_does_not_fit_is_refused_beforehand(monkeypatch):
    machine, _ = filled(60)
    before = machine(POOL)
    monkeypatch.setattr(memory, "CHECKED_BYTES", 0)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 16 * 160**2 - 1)
    with pytest.raises(OutOfMemoryError, match="160 samples"):
        machine.add(POOL[:100], LABELS[:100])
    assert torch.equal(machine(POOL), before)


def test_decision_is_the_score_of_class_1():
    machine, _ = filled(10, num_classes=3)
    with pytest.raises(ValueError, match="two classes"):
        machine.decision(POOL)
    two = KernelLSSVM(RBF(sigma=2.0))
    two.add(POOL[:10], LABELS[:10] % 2)
    torch.testing.assert_close(two.decision(POOL), two(POOL)[:, 1])
