"""The incremental SVM as the two-class machine of OneVsRest and OneVsOne: shared samples and kernel rows, nothing left behind."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

from torchlssvm import IncrementalSVM, KernelLSSVM, LagrangianSVM, OneVsOne, OneVsRest
from torchlssvm.errors import ConvergenceError
from torchlssvm.kernels import RBF, Deep
from torchlssvm.sklearn import IncrementalSVC, KernelLSSVMClassifier
from torchlssvm.testing import CHECKS, Case

FORMS = pytest.mark.parametrize("form", [OneVsRest, OneVsOne])


def points(n=90, seed=0):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y = torch.arange(n) % 3
    x[:, 0] += y
    return x, y


def machine(**options):
    return IncrementalSVM(RBF(sigma=1.0), C=5.0, **options)


@FORMS
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
def test_conforms(check, form):
    x, y = points(60)
    check(Case(lambda **kw: form(lambda: machine(**kw), 3), x.float(), y))


def separate(form, x, y, weight):
    """Decisions of machines that share nothing (tasks, B)."""
    out = []
    for task in form(machine(), 3).tasks:
        seen = torch.ones(len(y), dtype=bool) if form is OneVsRest else torch.isin(y, torch.tensor(task))
        svm = machine()
        svm.add(x[seen], (y[seen] == task[0]).long(), weight[seen])
        out.append(svm.decision(points(20, 1)[0]))
    return torch.stack(out, 1)


@FORMS
def test_machines_that_share_rows_are_those_that_do_not(form):
    x, y = points(150)
    weight = torch.rand(150, generator=torch.Generator().manual_seed(1)).double() + 0.5
    many = form(machine(), 3)
    ids = many.add(x[:100], y[:100], weight[:100])
    for i in range(100, 120):
        ids = torch.cat([ids, many.add(x[i : i + 1], y[i : i + 1], weight[i : i + 1])])
    many = pickle.loads(pickle.dumps(many))
    gone = list(range(0, 120, 7))
    for i in gone:
        many.remove(ids[i : i + 1])
    other = list(range(1, 120, 7))
    many.relabel(ids[other], (y[other] + 1) % 3)
    y[other] = (y[other] + 1) % 3
    many = copy.deepcopy(many)
    ids = torch.cat([ids, many.add(x[120:], y[120:], weight[120:])])
    kept = [i for i in range(150) if i not in gone]
    assert many.ids.tolist() == ids[kept].tolist()
    found = torch.stack([m.decision(points(20, 1)[0]) for m in many.machines], 1)
    torch.testing.assert_close(found, separate(form, x[kept], y[kept], weight[kept]), rtol=0, atol=1e-9)
    torch.testing.assert_close(many(points(20, 1)[0]), many._scores(found), rtol=0, atol=1e-12)
    assert max(m.kkt_violation() for m in many.machines) < 1e-11


def test_kernel_values_are_computed_once_for_all_machines():
    x, y = points(1500)
    one, many = machine().fit(x, (y == 0).long()), OneVsRest(machine(), 3)
    many.add(x, y)
    gram = many._gram
    assert gram.computed <= 1.5 * 1500**2
    assert all(m._solver.rows.gram is gram for m in many.machines)
    before = gram.computed
    ids = many.add(x[:1] + 0.1, y[:1])
    assert gram.computed - before <= 1.1 * one._solver.rows.gram.capacity  # one row
    before = gram.computed
    many.remove(ids)
    assert gram.computed == before


def test_pairs_of_many_classes_share_the_samples():
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pairs = OneVsOne(machine(), 12)
    pairs.add(x, torch.arange(120) % 12)
    assert len({id(m._solver.rows.gram) for m in pairs.machines}) == 1
    assert pairs._gram.computed <= pairs._gram.capacity**2


@FORMS
@pytest.mark.parametrize("verb", ["add", "remove", "relabel"])
def test_an_error_in_one_machine_changes_none(form, verb, monkeypatch):
    x, y = points()
    for failing in range(3):
        many, same = form(machine(), 3), form(machine(), 3)
        for m in (many, same):
            m.add(x[:60], y[:60])
        calls = {
            "add": lambda m: m.add(x[60:66], y[60:66]),
            "remove": lambda m: m.remove(list(range(0, 60, 5))),
            "relabel": lambda m: m.relabel([0, 1, 2, 10], [1, 2, 2, 0]),
        }
        solver, before = many.machines[failing]._solver, many(x)

        def fail(*args):
            raise ConvergenceError("injected")

        with monkeypatch.context() as planted:
            planted.setattr(solver, "check_optimality", fail)
            planted.setattr(solver, "_solve", fail)
            with pytest.raises(ConvergenceError):
                calls[verb](many)
        assert many.ids.tolist() == list(range(60))
        assert torch.equal(many(x), before)
        for m in (many, same):
            calls[verb](m)
        assert torch.equal(many.ids, same.ids)
        torch.testing.assert_close(many(x), same(x), rtol=0, atol=1e-9)


def test_a_changed_kernel_is_noticed_by_all_machines():
    x, y = points()
    many = OneVsRest(machine(), 3)
    many.add(x[:80], y[:80])
    many.machines[1].kernel.gamma = 2.0
    many.add(x[80:], y[80:])
    other = OneVsRest(IncrementalSVM(RBF(gamma=2.0), C=5.0), 3)
    other.add(x, y)
    torch.testing.assert_close(many(x), other(x), rtol=0, atol=1e-9)


def test_a_machine_with_a_kernel_of_its_own_keeps_its_own_rows():
    x, y = points()
    many = OneVsRest(machine(), 3)
    many.add(x[:80], y[:80])
    many.machines[1].set_kernel(RBF(gamma=2.0))
    many.remove(many.add(x[80:], y[80:])[:3])
    kept = [*range(80), *range(83, 90)]
    alone = IncrementalSVM(RBF(gamma=2.0), C=5.0).fit(x[kept], (y[kept] == 1).long())
    torch.testing.assert_close(many(x)[:, 1], alone.decision(x), rtol=0, atol=1e-9)


def test_a_network_is_run_once_for_all_machines():
    calls = []
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh()).double()
    network.register_forward_hook(lambda *_: calls.append(1))
    x, y = points()
    many = OneVsRest(IncrementalSVM(Deep(network, RBF(sigma=1.0))), 3)
    many.add(x[:60], y[:60])
    many.add(x[60:], y[60:])
    many(x)
    assert len(calls) == 3


MACHINES = {
    f"{form.__name__} of {kind.__name__}": lambda form=form, kind=kind: form(kind(RBF(sigma=1.0), C=5.0), 3)
    for form in (OneVsRest, OneVsOne)
    for kind in (IncrementalSVM, LagrangianSVM, KernelLSSVM)
} | {
    "IncrementalSVC": IncrementalSVC,
    "KernelLSSVMClassifier": KernelLSSVMClassifier,
    "KernelLSSVM": lambda: KernelLSSVM(RBF(sigma=1.0), num_classes=3),
}


@pytest.mark.parametrize("name", MACHINES)
def test_no_byte_of_a_removed_row_is_left(name):
    x, y = points(60)
    many = MACHINES[name]()
    if hasattr(many, "fit"):
        many.fit(x.numpy(), y.numpy()).partial_unfit([5, 17])
    else:
        ids = many.add(x, y)
        many = copy.deepcopy(many)
        many.remove(ids[[5, 17]])
    marks = [np.float64(v).tobytes() for v in x[[5, 17]].flatten().tolist()]

    def file(value):
        out = io.BytesIO()
        torch.save(value, out)
        return out.getvalue()

    files = [pickle.dumps(many), pickle.dumps(copy.deepcopy(many)), file(many)]
    if isinstance(many, torch.nn.Module):
        files.append(file(many.state_dict()))
    assert all(np.float64(x[0, 0]).tobytes() in data for data in files)  # a row that is held can be found
    assert not [mark for mark in marks for data in files if mark in data]
