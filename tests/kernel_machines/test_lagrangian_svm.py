"""LagrangianSVM: the solution of a QP solver, the paper's iteration and Newton's, warm and cold; and machines for many classes."""

import random

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.kernel_dense import lssvm, lsvm, rbf
from torchlssvm import (
    IncrementalSVM,
    KernelLSSVM,
    LagrangianSVM,
    LSSVMHead,
    NotFittedError,
    OneVsOne,
    OneVsRest,
    RemovalError,
)
from torchlssvm.errors import ConvergenceError
from torchlssvm.functional import lagrangian
from torchlssvm.kernel_machines.lagrangian import step_by_inverse, step_by_kernel
from torchlssvm.kernels import RBF, Linear, Polynomial

pytest.importorskip("scipy")
GENERATOR = torch.Generator().manual_seed(0)
POOL = torch.randn(200, 4, dtype=torch.float64, generator=GENERATOR)
LABELS = (POOL[:, 0] + 0.7 * torch.randn(200, dtype=torch.float64, generator=GENERATOR) > 0).long()
POOL[150:165] = POOL[:15]  # duplicates, some with the other label
SIGNS = (2 * LABELS - 1).double()


pytestmark = pytest.mark.usefixtures("updates_at_any_size")


def qp(rows, C, signs=SIGNS, bias="added"):
    K = rbf(POOL[rows], POOL[rows])
    return lsvm(K + 1.0 if bias == "added" else K, signs[rows], C)


def close(machine: LagrangianSVM, truth: torch.Tensor, tol: float = 1e-9) -> None:
    scale = truth.abs().max()
    assert float((machine.alpha - truth).abs().max() / scale) < tol


@pytest.mark.parametrize("bias", ["added", "augmented"])
@pytest.mark.parametrize("C", [1 / 200, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("solver", ["newton", "iteration"])
def test_equals_a_quadratic_program(C, bias, solver):
    if solver == "iteration" and C > 100:
        pytest.skip("hundreds of thousands of iterations")
    machine = LagrangianSVM(
        RBF(sigma=2.0), C=C, bias=bias, solver=solver, tol=1e-5 if solver == "newton" else 1e-10, max_iter=50_000
    )
    ids = machine.add(POOL, LABELS)
    truth = qp(range(200), C, bias=bias)
    close(machine, truth, 1e-9 if solver == "newton" else 1e-6)
    assert machine.kkt_violation() < 1e-9
    assert machine.iterations < (10 if C <= 100 else 20) or solver == "iteration"
    K = rbf(POOL, POOL) + (1.0 if bias == "added" else 0.0)
    torch.testing.assert_close(machine.decision(POOL), K @ (SIGNS * truth), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(machine(POOL), torch.stack([-machine.decision(POOL), machine.decision(POOL)], 1))
    torch.testing.assert_close(machine.b, (SIGNS * machine.alpha).sum() if bias == "added" else machine.b * 0)
    machine.remove(ids[:7])
    close(machine, qp(range(7, 200), C, bias=bias), 1e-9 if solver == "newton" else 1e-6)
    assert machine.iterations <= 6 or solver == "iteration"


def test_tolerance_is_what_was_asked_for():
    for tol in (1e-3, 1e-8):
        machine = LagrangianSVM(RBF(sigma=2.0), C=10.0, solver="iteration", tol=tol)
        machine.add(POOL, LABELS)
        assert machine.kkt_violation() <= 2 * tol


def test_the_papers_setting_takes_two_iterations():
    machine = LagrangianSVM(RBF(sigma=2.0), C=1 / 200, step=1.9 * 200, solver="iteration", bias="augmented")
    ids = machine.add(POOL, LABELS)
    _ = machine.alpha
    assert machine.iterations <= 2
    machine.remove(ids[:20])  # warm, equation (10)
    close(machine, qp(range(20, 200), 1 / 200, bias="augmented"), 1e-7)
    assert machine.iterations <= 3


def test_augmented_is_the_kernel_on_rows_with_a_constant():
    rows = torch.cat([POOL, -torch.ones(200, 1, dtype=torch.float64)], 1)
    for kernel in (Linear(), Polynomial(2, gamma=0.3), RBF(sigma=2.0)):
        machine = LagrangianSVM(kernel, C=2.0, bias="augmented")
        machine.add(POOL, LABELS)
        truth = lsvm(kernel(rows, rows), SIGNS, 2.0)
        close(machine, truth)
        torch.testing.assert_close(machine.decision(POOL), kernel(rows, rows) @ (SIGNS * truth), rtol=1e-8, atol=1e-8)
        assert machine.in_features == 4


def test_running_out_of_iterations_is_said_and_loses_nothing():
    machine = LagrangianSVM(RBF(sigma=2.0), C=100.0, solver="iteration", max_iter=5)
    machine.add(POOL, LABELS)
    with pytest.raises(ConvergenceError, match=r"max_iter=5.*samples are held"):
        machine(POOL)
    assert len(machine) == 200
    machine.solver = "newton"
    machine.max_iter = 50
    close(machine, qp(range(200), 100.0))


def test_newton_line_search_makes_the_objective_fall():
    """From a bad support the full step may overshoot: the value found must not be worse than where it started."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        n, C = 12, 10.0 ** float(torch.empty(1).uniform_(-1, 4, generator=generator))
        G = torch.randn(n, 3, dtype=torch.float64, generator=generator) * 3
        Q = G @ G.mT + torch.eye(n, dtype=torch.float64) / C

        def solve(inside, Q=Q, n=n):
            alpha = torch.zeros(n, dtype=torch.float64)
            if inside.any():
                alpha[inside] = torch.linalg.solve(
                    Q[inside][:, inside], torch.ones(int(inside.sum()), dtype=torch.float64)
                )
            z = Q @ alpha - 1
            z[inside] = 0.0
            return alpha, z

        guess = torch.rand(n, generator=generator) < 0.5
        result = lagrangian.newton(solve, guess, C, 50)
        assert result.converged
        assert float(lagrangian.violation(result.alpha, Q @ result.alpha - 1)) < 1e-7 * max(
            1.0, float(result.alpha.max())
        )
        assert (
            float(lagrangian.objective(result.alpha, result.z, C))
            <= float(lagrangian.objective(*solve(guess), C)) + 1e-9
        )


def test_both_sides_of_a_newton_step_agree():
    machine = LagrangianSVM(RBF(sigma=2.0), C=10.0)
    ids = machine.add(POOL, LABELS)
    machine.remove(ids[:3])
    y = SIGNS[3:]
    inside = torch.rand(197, generator=GENERATOR) < 0.6
    solver = machine._solver
    a = step_by_kernel(solver, y, inside.nonzero()[:, 0], (~inside).nonzero()[:, 0])
    b = step_by_inverse(solver, y, (~inside).nonzero()[:, 0])
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


class AnySequence(RuleBasedStateMachine):
    """add, remove, relabel, update, change C, save: always the QP's solution of what is held."""

    @initialize(start=st.sampled_from([1, 5, 60, 100]), C=st.sampled_from([0.05, 1.0, 30.0]))
    def start(self, start, C):
        self.C, self.labels = C, LABELS.clone()
        self.machine, self.held = LagrangianSVM(RBF(sigma=2.0), C=C), {}
        self.add(list(range(start)))

    def add(self, rows):
        self.held |= dict(zip(self.machine.add(POOL[rows], self.labels[rows]).tolist(), rows, strict=True))

    def free(self):
        return [r for r in range(200) if r not in self.held.values()]

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def adding(self, data):
        self.add(data.draw(st.lists(st.sampled_from(self.free()), max_size=30, unique=True)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def removing(self, data):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=40, unique=True))
        self.machine.remove(ids)
        self.held = {i: r for i, r in self.held.items() if i not in ids}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def relabelling(self, data):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=5, unique=True))
        for i in ids:
            self.labels[self.held[i]] = 1 - self.labels[self.held[i]]
        self.machine.relabel(ids, self.labels[[self.held[i] for i in ids]])

    @precondition(lambda self: self.held and self.free())
    @rule(data=st.data())
    def replacing(self, data):
        i, new = data.draw(st.sampled_from(sorted(self.held))), data.draw(st.sampled_from(self.free()))
        self.machine.replace([i], POOL[[new]], self.labels[[new]])
        self.held[i] = new

    @precondition(lambda self: self.held and self.free())
    @rule(data=st.data())
    def updating(self, data):
        gone = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=5, unique=True))
        new = data.draw(st.lists(st.sampled_from(self.free()), max_size=5, unique=True))
        ids = self.machine.update(add=(POOL[new], self.labels[new]), remove=gone).tolist()
        self.held = {i: r for i, r in self.held.items() if i not in gone} | dict(zip(ids, new, strict=True))

    @rule(C=st.sampled_from([0.05, 1.0, 30.0]))
    def changing_C(self, C):
        self.C = C
        self.machine.set_C(C)

    @rule()
    def saving(self):
        state = self.machine.state_dict()
        self.machine = LagrangianSVM(RBF(sigma=1.0))
        self.machine.load_state_dict(state)

    @invariant()
    def solved(self):
        if not hasattr(self, "machine"):
            return
        if not self.held:
            with pytest.raises(NotFittedError):
                self.machine(POOL)
            return
        rows = [self.held[i] for i in self.machine.ids.tolist()]
        close(self.machine, qp(rows, self.C, (2 * self.labels - 1).double()))
        assert self.machine.kkt_violation() < 1e-9


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(parent=settings(), stateful_step_count=8)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"C": 0.0}, "C must be"),
        ({"step": 0.0}, "step must be"),
        ({"C": 4.0, "step": 0.5}, "below 2/C = 0.5"),
        ({"tol": 0.0}, "tol must be"),
        ({"solver": "smo"}, "solver must be one of"),
        ({"bias": True}, "bias must be one of"),
    ],
)  # fmt: skip
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        LagrangianSVM(RBF(sigma=1.0), **options)


def test_changing_C_checks_the_step():
    machine = LagrangianSVM(RBF(sigma=2.0), C=1.0, step=1.5, solver="iteration")
    machine.add(POOL[:20], LABELS[:20])
    with pytest.raises(ValueError, match="below 2/C"):
        machine.set_C(10.0)
    assert machine.C == 1.0
    machine.set_C(0.5)
    close(machine, qp(range(20), 0.5), 1e-4)


def test_labels_only():
    machine = LagrangianSVM(RBF(sigma=2.0))
    with pytest.raises(ValueError, match="labels"):
        machine.add(POOL[:3], torch.randn(3, 2))
    with pytest.raises(ValueError, match=r"in 0\.\.1, got 2; .*OneVsRest"):
        machine.add(POOL[:3], torch.tensor([0, 1, 2]))


# -- many classes --------------------------------------------------------------------------------------------------------

CLASSES = torch.arange(200) % 3


def ovr(rows, labels, C=5.0):
    """Decisions of each class against the rest, by the QP solver."""
    K = rbf(POOL, POOL[rows]) + 1.0
    columns = []
    for k in range(3):
        s = torch.where(labels[rows] == k, 1.0, -1.0).double()
        columns.append(K @ (s * lsvm(K[rows], s, C)))
    return torch.stack(columns, 1)


def ovo(rows, labels, C=5.0):
    """The votes of pairs, by the QP solver: integers, and the class that wins."""
    rows = torch.tensor(rows)
    won = torch.zeros(200, 3)
    for i in range(3):
        for j in range(i + 1, 3):
            part = rows[(labels[rows] == i) | (labels[rows] == j)]
            if not len(part):
                continue
            K = rbf(POOL, POOL[part]) + 1.0
            s = torch.where(labels[part] == i, 1.0, -1.0).double()
            f = K @ (s * lsvm(K[part], s, C))
            won[:, i] += (f > 0).float()
            won[:, j] += (f < 0).float()
    return won


@pytest.mark.parametrize("form", [OneVsRest, OneVsOne])
def test_many_classes_through_adds_removes_and_relabels(form):
    machine, labels, held, rng = form(LagrangianSVM(RBF(sigma=2.0), C=5.0), 3), CLASSES.clone(), {}, random.Random(0)

    def check():
        rows = sorted(held.values())
        if form is OneVsRest:
            torch.testing.assert_close(machine(POOL), ovr(rows, labels), rtol=1e-7, atol=1e-7)
        else:
            assert torch.equal(machine(POOL).round().float(), ovo(rows, labels))

    for start in range(0, 90, 30):
        rows = list(range(start, start + 30))
        held |= dict(zip(machine.add(POOL[rows], labels[rows]).tolist(), rows, strict=True))
        gone = rng.sample(sorted(held), 8)
        machine.remove(torch.tensor(gone))
        held = {i: r for i, r in held.items() if i not in gone}
        some = rng.sample(sorted(held), 9)
        for i in some:
            labels[held[i]] = rng.randrange(3)
        machine.relabel(some, labels[[held[i] for i in some]])
        assert machine.ids.tolist() == sorted(held)
        check()
    alone = [i for i, r in held.items() if labels[r] == 2]
    machine.remove(alone)  # a class without samples
    held = {i: r for i, r in held.items() if i not in alone}
    check()
    assert (machine.predict(POOL) != 2).all()


def test_one_vs_rest_of_ls_svms_is_the_many_output_machine():
    one, many = (
        OneVsRest(lambda: KernelLSSVM(RBF(sigma=2.0), C=3.0), 3),
        KernelLSSVM(RBF(sigma=2.0), C=3.0, num_classes=3),
    )
    for machine in (one, many):
        machine.remove(machine.add(POOL, CLASSES)[:20])
    torch.testing.assert_close(one(POOL), many(POOL), rtol=1e-9, atol=1e-9)
    alpha, b = lssvm(
        rbf(POOL[20:], POOL[20:]), torch.where(CLASSES[20:, None] == torch.arange(3), 1.0, -1.0).double(), 3.0
    )
    torch.testing.assert_close(one(POOL), rbf(POOL, POOL[20:]) @ alpha + b, rtol=1e-9, atol=1e-9)


def test_many_classes_refuse_what_they_should():
    with pytest.raises(TypeError, match="decision"):
        OneVsRest(LSSVMHead(4, 2), 3)
    with pytest.raises(ValueError, match="two classes"):
        OneVsOne(KernelLSSVM(RBF(sigma=1.0), num_classes=3), 3)
    full = LagrangianSVM(RBF(sigma=1.0))
    full.add(POOL[:3], LABELS[:3])
    with pytest.raises(ValueError, match="must be empty"):
        OneVsRest(full, 3)
    with pytest.raises(ValueError, match="num_classes"):
        OneVsRest(LagrangianSVM(RBF(sigma=1.0)), 1)
    machine = OneVsOne(LagrangianSVM(RBF(sigma=2.0), C=5.0), 3)
    with pytest.raises(NotFittedError):
        machine(POOL)
    ids = machine.add(POOL[:20], CLASSES[:20])
    with pytest.raises(RemovalError):
        machine.remove([99])
    other = OneVsOne(LagrangianSVM(RBF(sigma=2.0)), 4)
    with pytest.raises(RuntimeError, match=r"3 classes|size|Missing"):
        other.load_state_dict(machine.state_dict())
    assert "num_classes=3" in repr(machine)
    assert machine.remove(ids[:1]).n == 19


# -- all or nothing ------------------------------------------------------------------------------------------------------

TWO_CLASSES = {
    "Lagrangian": lambda: LagrangianSVM(RBF(sigma=2.0), C=5.0),
    "LS-SVM": lambda: KernelLSSVM(RBF(sigma=2.0), C=5.0),
    "incremental": lambda: IncrementalSVM(RBF(sigma=2.0), C=5.0),
}
VERBS = {
    "add": lambda machine: machine.add(POOL[60:66], CLASSES[60:66]),
    "remove": lambda machine: machine.remove([0, 1, 2, 10]),
    "relabel": lambda machine: machine.relabel([0, 1, 2, 10], torch.tensor([1, 2, 2, 0])),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "kind", [k for k in TWO_CLASSES if k != "incremental"]
)  # it shares rows: tests/svm/test_multiclass.py
@pytest.mark.parametrize("form", [OneVsRest, OneVsOne])
def test_an_error_of_any_machine_changes_none(form, kind, verb):
    """Whichever of the machines fails, at whichever step: ids and scores stay, and the same call works the next time."""
    for failing in range(3):
        for inner in ("add", "remove", "relabel"):
            machine, truth = form(TWO_CLASSES[kind], 3), form(TWO_CLASSES[kind], 3)
            for m in (machine, truth):
                m.add(POOL[:60], CLASSES[:60])
            before, ids = machine(POOL), machine.ids
            called = []

            def fail(*args, called=called, **options):
                called.append(args)
                raise ConvergenceError("injected")

            setattr(machine.machines[failing], inner, fail)
            try:
                VERBS[verb](machine)
            except ConvergenceError:
                assert torch.equal(machine.ids, ids)
                assert torch.equal(machine(POOL), before)
            else:
                assert not called  # this machine had nothing to do
            delattr(machine.machines[failing], inner)
            if called:
                VERBS[verb](machine)
            VERBS[verb](truth)
            assert torch.equal(machine.ids, truth.ids)
            torch.testing.assert_close(machine(POOL), truth(POOL), rtol=1e-7, atol=1e-7)


# -- alpha >= 0, and how exact -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("solver", "C"), [("iteration", 1 / 200), ("iteration", 10.0), ("newton", 10.0), ("newton", 1e4), ("newton", 1e8)]
)
def test_alpha_is_never_negative(solver, C):
    machine = LagrangianSVM(RBF(sigma=2.0), C=C, solver=solver, max_iter=50_000)
    ids = machine.add(POOL, LABELS)
    assert float(machine.alpha.min()) >= 0.0
    machine.remove(ids[:40])
    assert float(machine.alpha.min()) >= 0.0


def exact(K, signs, C):
    """The QP's solution to 80 bits: the active set of a float64 solution, its equations refined with longer residuals."""
    Q = (signs[:, None] * K * signs).numpy().astype(np.longdouble) + np.eye(
        len(K), dtype=np.longdouble
    ) / np.longdouble(C)
    inside = np.flatnonzero(lsvm(K, signs, C).numpy() > 0)
    A, alpha = Q[np.ix_(inside, inside)], np.zeros(len(K), dtype=np.longdouble)
    factor = torch.linalg.cholesky(torch.from_numpy(A.astype(np.float64)))
    for _ in range(20):
        residual = torch.from_numpy((1 - A @ alpha[inside]).astype(np.float64))
        alpha[inside] += torch.cholesky_solve(residual[:, None], factor)[:, 0].numpy()
    z = Q @ alpha - 1
    assert alpha.min() >= 0
    assert z.min() > -1e-15 * float(abs(alpha).sum())  # it is the solution
    return torch.from_numpy(alpha.astype(np.float64))


@pytest.mark.parametrize("C", [1.0, 1e2, 1e4, 1e6])
def test_newton_is_exact_to_the_rounding_that_is_stated(C):
    machine = LagrangianSVM(RBF(sigma=2.0), C=C)
    ids = machine.add(POOL, LABELS)
    bound = torch.finfo(torch.float64).eps * 200 * C * 2.0  # eps n C max (K + 1)
    for rows in (slice(0, 200), slice(30, 200)):
        if rows.start:
            for i in ids[: rows.start]:
                machine.remove(i)
        truth = exact(rbf(POOL[rows], POOL[rows]) + 1.0, SIGNS[rows], C)
        error = float((machine.alpha - truth).abs().max() / truth.max())
        assert error <= max(bound, 1e-13), (error, bound)
