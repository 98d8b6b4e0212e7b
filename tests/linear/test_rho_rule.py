"""rho="gcv": chosen at the named moments only, from fixed candidates, and recorded."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.faults import Failing, replaced
from torchlssvm import FixedPoint, LSSVMHead, MarginHead, VerificationError, attach, verify
from torchlssvm.events import Add, Remove
from torchlssvm.linear.data_choices import ChoiceState
from torchlssvm.linear.diagnostics.rho_rule import LEAST_SAMPLES
from torchlssvm.store import SampleStore
from torchlssvm.store.database import Database

J, K, GRID = 12, 3, FixedPoint(64.0)


def samples(n=80, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % K
    x = torch.randn(n, J, generator=g)
    x[:, 0] += y
    return scale * x, y


def truth(head, x, y):
    """The largest power of two with the least GCV error, from a dense SVD in numpy, near-ties to the larger."""
    X = head.grid.snap(x).numpy() if head.grid else x.double().numpy()
    T = np.where(np.arange(K)[None] == y.numpy()[:, None], 1.0, -1.0)
    Xc, Tc, n = X - X.mean(0), T - T.mean(0), len(X)
    U, s, _ = np.linalg.svd(Xc, full_matrices=False)
    powers = 2.0 ** np.arange(-40, 30)
    errors = []
    for rho in powers:
        h = s**2 / (s**2 + rho)
        rss = ((Tc - U @ (h[:, None] * (U.T @ Tc))) ** 2).sum(0).mean() / n
        errors.append(rss / (1 - (h.sum() + 1) / n) ** 2)
    errors = np.array(errors)
    return powers[errors <= errors.min() * (1 + 1e-7)].max()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("grid", ["auto", None])
def test_the_choice_is_the_least_gcv_error(scale, grid):
    x, y = samples(scale=scale)
    head = LSSVMHead(J, K, rho="gcv", grid=grid).add(x, y)
    assert head.rho == truth(head, x, y)
    assert head.choices["rho"].state is ChoiceState.CURRENT
    plain = LSSVMHead(J, K, rho=head.rho, grid=grid).add(x, y)
    assert torch.equal(head.w, plain.w)
    assert "rho" not in plain.choices


@pytest.mark.parametrize(("n", "seed"), [(20, 3), (35, 2), (40, 0)])
def test_with_few_samples_the_choice_can_be_solved(n, seed):
    # As with 40 photographs and 1,280 features of very different sizes: GCV is nearly flat towards rho = 0. A rho too small to
    # be solved would issue a NumericalWarning, which is an error here.
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    x = (torch.randn(n, 640, generator=g) + 3 * y[:, None]).relu() * torch.logspace(-2, 1, 640)
    head = LSSVMHead(640, 2).add(x, y)
    assert head.rho > 0
    Xc = head.grid.snap(x).numpy() - head.grid.snap(x).numpy().mean(0)
    T = np.where(np.arange(2)[None] == y.numpy()[:, None], 1.0, -1.0)
    dual = Xc.T @ np.linalg.solve(Xc @ Xc.T + head.rho * np.eye(n), T - T.mean(0))
    np.testing.assert_allclose(head.w.numpy(), dual, rtol=0, atol=1e-8 * np.abs(dual).max())


def test_it_is_chosen_at_the_first_read_and_stays_until_refresh():
    x, y = samples()
    more, labels = samples(400, 1)
    head = LSSVMHead(J, K, rho="gcv", grid=GRID).add(x, y)
    first = head(x).shape and head.rho
    head.add(more * 5, labels)
    assert head.rho == first
    assert head.choices["rho"].state is ChoiceState.STALE
    version = head._state_version
    head.refresh()
    both = torch.cat([x, more * 5]), torch.cat([y, labels])
    assert head.rho == truth(head, *both) != first
    assert head._state_version != version
    assert head._refresh_rho()._state_version == head._state_version  # nothing to do
    head.remove(more * 5, labels).refresh()
    never = LSSVMHead(J, K, rho="gcv", grid=GRID).add(x, y).refresh()
    assert head.rho == never.rho == first
    assert torch.equal(head.w, never.w)


def test_few_samples_choose_nothing_and_ask_again():
    x, y = samples()
    head = LSSVMHead(J, K, rho="gcv").add(x[: LEAST_SAMPLES - 1], y[: LEAST_SAMPLES - 1])
    assert head.rho == 1.0
    assert head.choices["rho"].state is ChoiceState.OPEN
    head.add(x[LEAST_SAMPLES - 1 :], y[LEAST_SAMPLES - 1 :])
    assert head.rho == truth(head, x, y)
    one = LSSVMHead(J, K, rho="gcv").add(x, torch.zeros_like(y))
    assert one.rho == 1.0
    assert one(x).isfinite().all()
    assert one.add(x, y).rho != 1.0


def test_setting_and_refusing():
    x, y = samples()
    head = LSSVMHead(J, K).add(x, y)
    head.rho = "gcv"
    assert head.rho == truth(head, x, y)
    head.rho = 3.0
    assert head.refresh().rho == 3.0
    for make in (lambda: LSSVMHead(J, K, rho="loo"), lambda: LSSVMHead(J, K, rho=0)):
        with pytest.raises(ValueError, match=r"rho \(or 'gcv'\) must be"):
            make()
    with pytest.raises(ValueError, match="k-fold"):
        MarginHead(J, K, rho="gcv")
    with pytest.raises(ValueError, match="k-fold"):
        MarginHead(J, K).rho = "gcv"


def test_it_survives_copies_and_checkpoints():
    x, y = samples()
    head = LSSVMHead(J, K, rho="gcv", grid=GRID).add(x, y)
    again = LSSVMHead(J, K, grid=GRID)
    again.load_state_dict(head.state_dict())
    for other in (copy.deepcopy(head), again):
        assert other.rho == head.rho
        assert other.choices == head.choices
        other.add(*samples(400, 1)).refresh()
        assert other.rho == head.refresh().rho or other.n != head.n
        assert other.choices["rho"].state is ChoiceState.CURRENT
    empty = LSSVMHead(J, K)
    empty.load_state_dict(LSSVMHead(J, K, rho="gcv").state_dict())
    assert empty.add(x, y).rho == truth(empty, x, y)


def test_attach_chooses():
    x, y = samples()
    clf = attach(nn.Linear(J, 5), K).fit([(x, y)])
    assert clf.head.rho == truth(clf.head, x, y)
    assert attach(nn.Linear(J, 5), K, rho=2.0).fit([(x, y)]).head.rho == 2.0


def named(x, start=0):
    return [f"s{start + i}" for i in range(len(x))]


def test_a_store_chooses_before_a_certificate_and_verify_checks_it(tmp_path):
    x, y = samples()
    more, labels = samples(400, 1)
    with SampleStore(tmp_path / "s", LSSVMHead(J, K, rho="gcv", grid=GRID)) as store:
        store.apply(Add(named(x), x, y))
        first = store.head.rho
        store.apply(Add(named(more, 1000), more * 5, labels, subject="late"))
        assert store.head.rho == first
    with SampleStore(tmp_path / "s") as store:
        assert store.head.rho == first
        assert store.head.choices["rho"].state is ChoiceState.STALE
        receipt = store.apply(Remove(ids=named(x)[:5]))
        certificate = store.certificate(receipt.event_id)
        rho = store.head.rho
        kept = torch.cat([x[5:], more * 5]), torch.cat([y[5:], labels])
        assert rho == truth(store.head, *kept) != first
        assert certificate.scope["choices"]["rho"]["state"] == "current"
        assert "excess" in verify(certificate, store=store, head=store.head, allow_unsigned=True).checks["rho"].facts
    with SampleStore(tmp_path / "s") as store:  # a later handle uses the recorded value
        assert store.head.rho == rho
        store.head._choices.record("rho", "gcv", 2)
        store.head.rho = 4 * rho
        store.head._choices.record("rho", "gcv", rule=True)
        with pytest.raises(VerificationError, match="minimize GCV"):
            verify(certificate, store=store, head=store.head, allow_unsigned=True)


def test_an_open_rho_is_the_stores(tmp_path):
    x, y = samples()
    with SampleStore(tmp_path / "s", LSSVMHead(J, K, rho="gcv", grid=GRID)) as store:
        store.apply(Add(named(x), x, y))
        rho = store.refresh()
    with SampleStore(tmp_path / "s", LSSVMHead(J, K, rho="gcv", grid=GRID)) as store:
        assert store.head.rho == rho
        assert store.head._choices.rho_rule == "gcv"
        assert store.set_rho(5.0) == 5.0
    with SampleStore(tmp_path / "s", LSSVMHead(J, K, rho="gcv", grid=GRID)) as store:
        assert store.head.rho == 5.0  # it was set there
        assert store.head._choices.rho_rule is None
        assert store.set_rho("gcv") == rho
    with SampleStore(tmp_path / "s", LSSVMHead(J, K, rho=7.0, grid=GRID)) as store:
        assert store.head.rho == 7.0  # given to this handle
        assert "rho" not in store.head.choices


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("owner", "name"), [(LSSVMHead, "_refresh_rho"), (Database, "put"), (Database, "commit")])
@pytest.mark.parametrize("value", [5.0, "gcv"])
def test_an_interrupted_set_rho_leaves_what_the_store_says(tmp_path, value, owner, name, late):
    """Whatever call is interrupted, head and store have one rho, the old one or, once it is committed, the new one."""
    x, y = samples()
    with SampleStore(tmp_path / "s", LSSVMHead(J, K, rho="gcv" if value == 5.0 else 3.0, grid=GRID)) as store:
        store.apply(Add(named(x), x, y))
        rho, choices = store.refresh(), store.head.choices
        with pytest.raises(KeyboardInterrupt), replaced(owner, name, Failing(KeyboardInterrupt(), late=late)):
            store.set_rho(value)
        committed = name == "commit" and late
        with SampleStore(tmp_path / "s", readonly=True) as other:
            assert (other.head.rho != rho) == committed
            assert store.head.rho == other.head.rho
            assert store.head.choices == other.head.choices == (store.head.choices if committed else choices)
        store.apply(Add(named(x[:1], 900), x[:1], y[:1]))  # and it goes on


def test_two_handles_follow_each_other(tmp_path):
    x, y = samples()
    more, labels = samples(400, 1)
    with SampleStore(tmp_path / "s", LSSVMHead(J, K, rho="gcv", grid=GRID)) as one, SampleStore(tmp_path / "s") as two:
        one.apply(Add(named(x), x, y))
        one.refresh()
        assert two.head.rho == one.head.rho
        two.apply(Add(named(more, 1000), more * 5, labels))
        two.refresh()
        assert two.head.rho == one.head.rho
        assert one.head.choices == two.head.choices
        assert torch.equal(one.head.refresh().w, two.head.refresh().w)
