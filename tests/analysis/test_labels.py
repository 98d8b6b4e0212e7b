"""Label errors: found, ranked, proposed; in the form that cleanlab takes."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import cross_val_predict

from torchlssvm import FixedPoint, LSSVMHead, attach
from torchlssvm.analysis.label_errors import find_label_errors, from_scores
from torchlssvm.errors import RemovalError
from torchlssvm.events import Add, Relabel, from_primitives, to_primitives
from torchlssvm.functional.whitened import margins
from torchlssvm.store import SampleStore

GRID = FixedPoint(16.0)


@pytest.fixture(scope="module")
def digits():
    X, truth = load_digits(return_X_y=True)
    x, truth = torch.as_tensor(X / 16), torch.as_tensor(truth)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(truth), generator=generator)
    given = truth.clone()
    random, confused = order[:90], order[90:180]
    given[random] = (truth[random] + torch.randint(1, 10, (90,), generator=generator)) % 10
    given[confused] = torch.tensor([6, 7, 3, 5, 9, 3, 0, 9, 3, 4])[truth[confused]]
    return x, truth, given


def test_ranking_is_at_least_that_of_self_confidence(digits) -> None:
    """cleanlab's default score is the out-of-fold probability of the given label; here of 5-fold logistic regression."""
    x, truth, given = digits
    head = LSSVMHead(64, 10, grid=GRID, rho=1.0).add(x, given)
    head.select_rho()
    found = find_label_errors(head, x, given)
    wrong = (given != truth).numpy()
    ours = average_precision_score(wrong, -found.margins.numpy())
    p = cross_val_predict(LogisticRegression(max_iter=1000), x.numpy(), given.numpy(), cv=5, method="predict_proba")
    theirs = average_precision_score(wrong, -p[np.arange(len(p)), given.numpy()])
    assert ours >= theirs
    assert (found.proposed == truth)[given != truth].double().mean() > 0.8


def test_one_against_one_ranks_by_the_worst_pair(digits) -> None:
    """Margins of votes are numbers of wins and tie; the least pair score does not, and finds more."""
    x, truth, given = digits
    head = LSSVMHead(64, 10, grid=GRID, multiclass="ovo", rho=10.0).add(x, given)
    found = find_label_errors(head, x, given)
    precision = {
        name: average_precision_score((given != truth).numpy(), -margins(scores, given).numpy())
        for name, scores in (
            ("least", found.scores),
            ("votes", head.leave_one_out(x, given)),
            ("rest", LSSVMHead(64, 10, grid=GRID, rho=10.0).add(x, given).leave_one_out(x, given)),
        )
    }
    assert precision["least"] > max(precision["votes"], precision["rest"])
    alone = x[:1], given[:1]
    w, b = head.remove(*alone).w, head.b  # (J, pairs), of the head that never saw the first sample
    first, second = torch.triu_indices(10, 10, 1)
    f = (x[0] @ w + b).tolist()
    pair = {(int(i), int(j)): v for i, j, v in zip(first, second, f, strict=True)}
    for k in range(10):
        least = min(pair[k, j] if k < j else -pair[j, k] for j in range(10) if j != k)
        assert float(found.scores[0, k]) == pytest.approx(least, abs=1e-9)
    with pytest.raises(ValueError, match="pairs must be one of"):
        head.leave_one_out(x[1:], given[1:], pairs="most")


def test_what_is_returned(digits) -> None:
    x, _, given = digits
    x, given = x[:300], given[:300]
    head = LSSVMHead(64, 10, grid=GRID, rho=1.0).add(x, given)
    found = find_label_errors(head, x, given, ids=[f"s{i}" for i in range(300)])
    assert isinstance(found.pred_probs, np.ndarray)
    assert found.pred_probs.shape == (300, 10)
    np.testing.assert_allclose(found.pred_probs.sum(1), 1)
    assert (found.margins[found.order].diff() >= 0).all()
    assert torch.equal(found.suspects, found.order[: int((found.margins < 0).sum())])
    events = found.events(3)
    assert [e.ids[0] for e in events] == [f"s{i}" for i in found.order[:3].tolist()]
    assert all(
        int(e.y[0]) == int(found.proposed[i]) != int(given[i]) for e, i in zip(events, found.order[:3], strict=True)
    )
    assert len(found.events()) == len(found.suspects)
    users = find_label_errors(head, x, given, groups=torch.arange(300) // 30)
    assert not torch.equal(users.margins, found.margins)


def test_from_a_store_and_back(digits, tmp_path) -> None:
    x, _, given = digits
    with SampleStore(tmp_path / "s", head=LSSVMHead(64, 10, grid=GRID, rho=1.0)) as store:
        for a in range(0, 600, 200):  # several batches
            store.apply(Add(ids=range(a, a + 200), x=x[a : a + 200], y=given[a : a + 200]))
        found = store.label_errors()
        direct = find_label_errors(
            LSSVMHead(64, 10, grid=GRID, rho=1.0).add(x[:600], given[:600]), x[:600], given[:600]
        )
        assert torch.allclose(found.scores, direct.scores, rtol=0, atol=1e-10)
        store.apply(found.events(5))
        again = store.label_errors()
        changed = found.order[:5]
        assert torch.equal(again.labels[changed], found.proposed[changed])


def test_a_proposal_never_overwrites_a_newer_label(tmp_path) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    x = torch.randn(60, 5, generator=generator) + 6 * torch.nn.functional.one_hot(y, 5)
    given = y.clone()
    given[[3, 8]] = (y[[3, 8]] + 1) % 3
    by_hand = int((y[3] + 2) % 3)
    with SampleStore(tmp_path / "s", head=LSSVMHead(5, 3, grid=32.0, rho=1.0)) as store:
        store.apply(Add(ids=range(60), x=x, y=given))
        found = store.label_errors()
        first, second = sorted(found.events(2), key=lambda event: int(event.ids[0]))
        assert (first.ids, second.ids) == (("3",), ("8",))
        store.apply(Relabel(ids=[3], y=[by_hand]))
        digest, entries = store.head.digest(), len(store.history())
        with pytest.raises(RemovalError, match="'3'") as refused:
            store.apply([second, first])  # all or none
        assert (refused.value.label, refused.value.held_label) == (int(given[3]), by_hand)
        assert (store.head.digest(), len(store.history())) == (digest, entries)
        assert store.get([3, 8]).y.tolist() == [by_hand, int(given[8])]
        assert store.apply(from_primitives(to_primitives(second))).applied
        assert not store.apply(second).applied  # the same event again is no stale proposal
        assert store.get([8]).y.tolist() == [int(y[8])]
        with pytest.raises(ValueError, match="differ in length"):
            Relabel(ids=[3], y=[1], y_old=[0, 1])
        with pytest.raises(ValueError, match="y_old"):
            Relabel(subject="anna", y=1, y_old=[0])


def test_a_proposal_for_several_labels_never_overwrites_newer_ones(tmp_path) -> None:
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
    given = x[:, :3] > 0
    given[5, 1] = ~given[5, 1]
    head = LSSVMHead(6, 3, grid=8.0, rho=1.0, targets="multilabel")
    with SampleStore(tmp_path / "s", head=head) as store:
        store.apply(Add(ids=range(80), x=x, y=given))
        event = store.label_errors().events(1)[0]
        row = int(event.ids[0])
        newer = given[row : row + 1].clone()
        newer[0, 2] = ~newer[0, 2]
        store.apply(Relabel(ids=[row], y=newer))
        with pytest.raises(RemovalError):
            store.apply(event)
        store.apply(Relabel(ids=[row], y=given[row : row + 1]))
        assert store.apply(event).applied


@pytest.mark.parametrize("stored", [False, True])
def test_a_classifier_is_told_what_to_call(tmp_path, stored) -> None:
    clf = attach(torch.nn.Identity(), 3, in_features=5, store=tmp_path / "s" if stored else None)
    x, y = torch.randn(30, 5), torch.arange(30) % 3
    clf.add(x, y, **({"ids": range(30)} if stored else {}))
    with pytest.raises(TypeError, match=r"clf\.store\.label_errors" if stored else r"clf\.head, clf\.features"):
        find_label_errors(clf, x, y)
    direct = clf.store.label_errors() if stored else find_label_errors(clf.head, clf.features(x), y)
    assert len(direct.order) == 30


def test_bad_input(digits) -> None:
    scores, y = torch.randn(5, 3).double(), torch.arange(5) % 3
    with pytest.raises(ValueError, match="needed: scores"):
        from_scores(scores[:, :1], y)
    with pytest.raises(ValueError, match="needed: scores"):
        from_scores(scores, y.double())
    with pytest.raises(ValueError, match="labels and ids differ"):
        from_scores(scores, y, ids=["a"])
    with pytest.raises(ValueError, match="events need ids"):
        from_scores(scores, y).events()
    assert len(from_scores(scores[:0], y[:0]).order) == 0


def test_weights_count_samples_several_times():
    """The margin of a sample of weight m is that of a model without all m copies of it."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=generator), torch.arange(30) % 3
    weight = torch.ones(30)
    weight[7] = 3
    head = LSSVMHead(4, 3, grid=FixedPoint(8.0), rho=1.0).add(x, y, weight)
    keep = torch.arange(30) != 7
    without = LSSVMHead(4, 3, grid=FixedPoint(8.0), rho=1.0).add(x[keep], y[keep])
    found = find_label_errors(head, x, y, weight=weight)
    scores = without(head.grid.snap(x[7:8]))[0]
    others = torch.cat([scores[:1], scores[2:]])
    torch.testing.assert_close(found.margins[7], scores[1] - others.max(), rtol=0, atol=1e-9)
