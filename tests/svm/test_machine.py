"""The incremental SVM against libsvm and a dense float64 solution, whatever way it was reached."""

import copy
import io
import itertools

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits

from tests.support.faults import replaced
from tests.svm.truth import exact, kkt, libsvm, rbf
from torchlssvm import IncrementalSVM, NotFittedError, RemovalError
from torchlssvm.errors import ConvergenceError
from torchlssvm.kernels import RBF, Deep, Laplacian, Linear, Polynomial
from torchlssvm.svm.solver import PathSolver


def blobs(n=80, d=2, seed=0, noise=0.7):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + noise * torch.randn(n, generator=generator) > 0).long()
    return x, y


def data(name):
    if name == "cancer":
        x, y = load_breast_cancer(return_X_y=True)
        x = (x - x.mean(0)) / x.std(0)
    else:
        x, y = load_digits(return_X_y=True)
        x, y = x[: int(name)] / 16, y[: int(name)] % 2
    return x, y, 1 / (x.shape[1] * x.var())


def truth(svm, x, y, gamma):
    K = rbf(x, x, gamma)
    sign = 2.0 * y - 1
    u = np.where(sign > 0, float(svm._C[1]), float(svm._C[0]))
    return K, sign, u, exact(K, sign, u)


SIZES = ["cancer", "500", *[pytest.param(n, marks=pytest.mark.slow) for n in ("1000", "1797")]]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("C", [1.0, 10.0])
def test_equal_to_a_dense_solution_and_to_libsvm(name, C):
    x, y, gamma = data(name)
    svm = IncrementalSVM(RBF(gamma=gamma), C=C)
    svm.add(x[:50], y[:50])
    for i in range(50, 90):
        svm.add(x[i : i + 1], y[i : i + 1])
    svm.add(x[90:], y[90:])
    K, sign, u, (alpha, b) = truth(svm, x, y, gamma)
    assert np.abs(svm.alpha.numpy() - alpha).max() < 1e-9
    assert abs(svm.b - b) < 1e-9
    assert kkt(K, sign, u, svm.alpha.numpy(), svm.b) < 1e-12
    # libsvm keeps its kernel in float32: given the same rounded kernel it agrees to 1e-8
    rounded = K.astype(np.float32).astype(np.float64)
    svm = IncrementalSVM("precomputed", C=C)
    svm.add(rounded, y)
    assert np.abs(svm.alpha.numpy() - libsvm(rounded, sign, u)[0]).max() < 1e-8


@pytest.mark.parametrize("method", ["auto", "path", "joint", "pivot"])
def test_the_answer_is_the_same_whichever_way(method):
    x, y = blobs()
    svm = IncrementalSVM(RBF(sigma=1.0), C=2.0)
    ids = svm.add(x[:30], y[:30])
    svm.add(x[30:], y[30:], method=method)
    svm.remove(ids[5:25], method=method)
    new = svm.update(add=(x[5:15], y[5:15]), remove=ids[:5], method=method)
    svm.relabel(new[:4], 1 - y[5:9], method=method)
    keep_x = torch.cat([x[25:30], x[30:], x[5:15]])
    keep_y = torch.cat([y[25:30], y[30:], 1 - y[5:9], y[9:15]])
    _, _, _, (alpha, b) = truth(svm, keep_x.numpy(), keep_y.numpy(), 0.5)
    assert np.abs(svm.alpha.numpy() - alpha).max() < 1e-9
    assert abs(svm.b - b) < 1e-9
    assert svm.ids.tolist() == [*range(25, 80), *range(80, 90)]
    assert svm.y.tolist() == keep_y.tolist()


def test_sets_are_those_of_section_2():
    x, y = blobs()
    svm = IncrementalSVM(RBF(sigma=1.0), C=1.0).fit(x, y)
    alpha, g = svm.alpha, svm.g
    sign = 2.0 * y - 1
    torch.testing.assert_close(g, sign * svm.decision(x) - 1, rtol=0, atol=1e-12)
    sets = svm.partition()
    assert sorted(torch.cat(list(sets.values())).tolist()) == svm.ids.tolist()
    S, E, R = sets["margin"], sets["error"], sets["reserve"]
    assert len(S)
    assert len(E)
    assert len(R)
    assert bool(((alpha[S] > 0) & (alpha[S] < 1)).all() and (g[S] == 0).all())
    assert bool((alpha[E] == 1).all() and (g[E] <= 0).all())
    assert bool((alpha[R] == 0).all() and (g[R] >= 0).all())
    torch.testing.assert_close(svm(x), torch.stack([-svm.decision(x), svm.decision(x)], 1), rtol=0, atol=0)
    assert torch.equal(svm.predict(x), (svm.decision(x) > 0).long())


def test_bounds_per_class_and_per_sample():
    x, y = blobs()
    weight = torch.rand(80, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5
    svm = IncrementalSVM(RBF(sigma=1.0), C=(0.5, 2.0))
    svm.add(x[:40], y[:40], weight[:40])
    for i in range(40, 80):
        svm.add(x[i : i + 1], y[i : i + 1], weight[i : i + 1])
    K, sign = rbf(x.numpy(), x.numpy(), 0.5), 2.0 * y.numpy() - 1
    u = np.where(sign > 0, 2.0, 0.5) * weight.numpy()
    alpha, b = exact(K, sign, u)
    assert np.abs(svm.alpha.numpy() - alpha).max() < 1e-9
    svm.set_C(1.5)
    alpha, b = exact(K, sign, 1.5 * weight.numpy())
    assert np.abs(svm.alpha.numpy() - alpha).max() < 1e-9
    assert abs(svm.b - b) < 1e-9


def test_regularization_path_is_linear_between_breakpoints():
    x, y = blobs(60, d=6)
    svm = IncrementalSVM(RBF(sigma=1.0), C=0.1).fit(x, y)
    path = svm.regularization_path(10.0)
    assert float(path.C[0]) == 0.1
    assert float(path.C[-1]) == pytest.approx(10.0)
    assert bool((path.C.diff() >= 0).all())
    assert len(path.C) > 20
    for C in (0.17, 1.3, 6.0):
        k = int((path.C <= C).sum()) - 1
        t = float((C - path.C[k]) / (path.C[k + 1] - path.C[k]))
        alpha = path.alpha[k] + t * (path.alpha[k + 1] - path.alpha[k])
        fresh = IncrementalSVM(RBF(sigma=1.0), C=C).fit(x, y)
        torch.testing.assert_close(alpha, fresh.alpha, rtol=0, atol=1e-8)
    back = svm.regularization_path(0.1)
    torch.testing.assert_close(back.alpha[-1], path.alpha[0], rtol=0, atol=1e-9)


def test_changing_the_kernel():
    x, y = blobs()
    svm = IncrementalSVM(RBF(sigma=1.0), C=2.0).fit(x, y)
    start = svm.alpha
    for sigma in (0.7, 2.0, 0.3):
        svm.set_kernel(RBF(sigma=sigma))
        _, _, _, (alpha, _) = truth(svm, x.numpy(), y.numpy(), 0.5 / sigma**2)
        assert np.abs(svm.alpha.numpy() - alpha).max() < 1e-9
    svm.set_kernel(RBF(sigma=1.0))
    torch.testing.assert_close(svm.alpha, start, rtol=0, atol=1e-9)


def assert_optimal_all_along(path, x, y):
    """Every breakpoint is a solution for its own C, by the definition."""
    K = np.exp(-0.5 * ((x.numpy()[:, None] - x.numpy()[None]) ** 2).sum(-1))
    for C, alpha, b in zip(path.C.tolist(), path.alpha.numpy(), path.b.tolist(), strict=True):
        alpha = np.where(alpha < 1e-13 * C, 0.0, np.where(alpha > (1 - 1e-12) * C, C, alpha))
        assert kkt(K, 2.0 * y.numpy() - 1, np.full(len(y), C), alpha, b) < 1e-9


def test_regularization_path_from_a_margin_set_that_is_empty():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(100, 2, generator=generator, dtype=torch.float64)
    score = x[:, 0] * x[:, 1] + 0.5 * torch.randn(100, generator=generator, dtype=torch.float64)
    y = (score > score.median()).long()
    svm = IncrementalSVM(RBF(sigma=1.0), C=0.01).fit(x, y)
    assert not len(svm.margin)
    path = svm.regularization_path(100.0)
    assert bool((path.C.diff() >= 0).all())
    assert_optimal_all_along(path, x, y)
    assert_optimal_all_along(svm.regularization_path(0.01), x, y)


def test_precomputed_kernel():
    x, y = blobs()
    K = torch.from_numpy(rbf(x.numpy(), x.numpy(), 0.5))
    svm = IncrementalSVM("precomputed", C=2.0)
    ids = svm.add(K[:30, :30], y[:30])
    svm.add(K[30:60, :60], y[30:60])
    svm.remove(ids[10:20])
    rest = [*range(10), *range(20, 60)]
    svm.add(K[60:][:, [*rest, *range(60, 80)]], y[60:])
    rest += range(60, 80)
    svm.relabel(ids[:3], 1 - y[:3])
    other = IncrementalSVM(RBF(sigma=1.0), C=2.0).fit(x[rest], torch.cat([1 - y[:3], y[rest][3:]]))
    torch.testing.assert_close(svm.alpha, other.alpha, rtol=0, atol=1e-9)
    torch.testing.assert_close(svm(K[:, rest]), other(x), rtol=0, atol=1e-9)
    svm.set_kernel(K[rest][:, rest] ** 2)
    assert svm.kkt_violation() < 1e-11


def test_replace_keeps_ids():
    x, y = blobs()
    svm = IncrementalSVM(RBF(sigma=1.0), C=2.0)
    ids = svm.add(x[:60], y[:60])
    svm.replace(ids[10:30], x[60:], y[60:])
    assert torch.equal(svm.ids, ids)
    order = [*range(10), *range(60, 80), *range(30, 60)]
    other = IncrementalSVM(RBF(sigma=1.0), C=2.0).fit(x[order], y[order])
    torch.testing.assert_close(svm.alpha, other.alpha, rtol=0, atol=1e-9)


def test_events_are_reported_and_recorded():
    x, y = blobs(40)
    seen = []
    svm = IncrementalSVM(RBF(sigma=1.0), C=2.0, callback=seen.append, record=True)
    for i in range(40):
        svm.add(x[i : i + 1], y[i : i + 1])
    assert len(seen) == len(svm.trajectory) > 40
    assert {event.to for event in seen} >= {"margin", "error", "reserve", "end"}
    for step in svm.trajectory:  # every stored sample satisfies (2) at every event, but the one on its way
        S = (step.alpha > 1e-12) & (step.alpha < 2 - 1e-12)
        assert int((step.g[S].abs() > 1e-9).sum()) <= 1
        assert abs(float((2.0 * y[step.ids].double() - 1) @ step.alpha)) < 1e-9
    quiet = IncrementalSVM(RBF(sigma=1.0), C=2.0).fit(x, y)
    torch.testing.assert_close(svm.alpha, quiet.alpha, rtol=0, atol=1e-9)
    svm.on_event(None)
    count = len(seen)
    svm.remove(svm.margin[:1])
    assert len(seen) == count


def test_reserve_vectors_beyond_epsilon_are_forgotten():
    x, y = blobs(200, noise=0.1)
    whole = IncrementalSVM(RBF(sigma=1.0), C=2.0)
    small = IncrementalSVM(RBF(sigma=1.0), C=2.0, reserve_limit=0.5)
    ids = []
    for part, labels in zip(x.split(10), y.split(10), strict=True):
        whole.add(part, labels)
        ids.append(small.add(part, labels))
    assert small.inexact
    assert not whole.inexact
    assert small.n < whole.n == 200
    assert float(small.g.max()) < 0.5
    assert float((small(x) - whole(x)).abs().max()) < 0.2
    gone = sorted(set(torch.cat(ids).tolist()) - set(small.ids.tolist()))
    held = small.n
    small.remove(gone[:2])  # forgotten already: nothing to do, and no error
    assert small.n == held
    with pytest.raises(RemovalError):
        small.remove(gone[:1])


def following_only(which):
    """Makes a method that follows the path at some of its calls, by their number, and gives up at the others."""

    def make(real):
        calls = itertools.count(1)
        return lambda *arguments: which(next(calls)) and real(*arguments)

    return make


@pytest.mark.parametrize("failures", [1, 3])
def test_regularization_path_that_cannot_be_followed_in_one_is_followed_in_parts(failures):
    x, y = blobs(60, d=6)
    whole = IncrementalSVM(RBF(sigma=1.0), C=0.1).fit(x, y).regularization_path(10.0)
    svm = IncrementalSVM(RBF(sigma=1.0), C=0.1).fit(x, y)
    with replaced(PathSolver, "follow_bounds", following_only(lambda call: call > failures)):
        parts = svm.regularization_path(10.0)
    assert_optimal_all_along(parts, x, y)
    torch.testing.assert_close(parts.alpha[-1], whole.alpha[-1], rtol=0, atol=1e-9)
    assert bool((parts.C.diff() >= 0).all())


@pytest.mark.parametrize("passed", [0, 1])
def test_regularization_path_that_cannot_be_followed_changes_nothing(passed):
    """Not one bit, also where a part of it has been followed already."""
    x, y = blobs(60, d=6)
    svm = IncrementalSVM(RBF(sigma=1.0), C=0.1).fit(x, y)
    before = {name: value.clone() for name, value in svm.state_dict().items() if name != "R"}
    only_one = following_only(lambda call: call == 7 and passed)
    with replaced(PathSolver, "follow_bounds", only_one), pytest.raises(ConvergenceError):
        svm.regularization_path(10.0)
    assert svm.C == 0.1
    after = svm.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("cache_bytes", [0, 8 * 512 * 5, 2**26])
def test_the_answer_does_not_depend_on_the_cache(cache_bytes):
    x, y = blobs(300)
    svm = IncrementalSVM(RBF(sigma=1.0), C=2.0, cache_bytes=cache_bytes)
    ids = svm.add(x[:200], y[:200])
    for i in range(200, 300):
        svm.add(x[i : i + 1], y[i : i + 1])
    svm.remove(ids[::4])
    for i in ids[1::20].tolist():
        svm.remove([i])
    assert svm.kkt_violation() < 1e-11
    fresh = IncrementalSVM(RBF(sigma=1.0), C=2.0).fit(x[svm.ids], y[svm.ids])
    torch.testing.assert_close(svm.alpha, fresh.alpha, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "kernel",
    [
        Linear(),
        RBF(sigma=1.0),
        Laplacian(sigma=1.0),
        Polynomial(2),
        0.5 * RBF(sigma=1.0) + Linear(),
        lambda a, b: a @ b.T + 1.0,
    ],
)
def test_every_kernel(kernel):
    x, y = blobs()
    svm = IncrementalSVM(kernel, C=0.5)
    ids = svm.add(x[:40], y[:40])
    svm.add(x[40:], y[40:])
    svm.remove(ids[::3])
    assert svm.kkt_violation() < 1e-11
    fresh = IncrementalSVM(kernel, C=0.5).fit(x[svm.ids], svm.y)
    torch.testing.assert_close(svm(x), fresh(x), rtol=0, atol=1e-9)


def test_deep_kernel_keeps_features():
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4), torch.nn.Tanh())
    images, y = torch.randn(40, 1, 4, 4), torch.arange(40) % 2
    svm = IncrementalSVM(Deep(network, RBF(sigma=1.0)), C=1.0)
    ids = svm.add(images, y)
    svm.remove(ids[:5])
    features = network(images).double().detach()
    plain = IncrementalSVM(RBF(sigma=1.0), C=1.0).fit(features[5:], y[5:])
    torch.testing.assert_close(svm(images), plain(features), rtol=0, atol=1e-6)


def test_checkpoints_resize_and_go_on():
    x, y = blobs()
    svm = IncrementalSVM(RBF(sigma=1.3), C=2.0, reserve_limit=None)
    ids = svm.add(x[:60], y[:60])
    svm.remove(ids[3:9])
    file = io.BytesIO()
    torch.save(svm.state_dict(), file)
    file.seek(0)
    other = IncrementalSVM(RBF(sigma=9.0), C=7.0)
    other.add(x[:3], y[:3])
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), svm(x))
    assert other.C == 2.0
    for machine in (svm, other, copy.deepcopy(svm)):
        assert machine.add(x[60:], y[60:]).tolist() == [*range(60, 80)]
        machine.remove(ids[20:30])
    torch.testing.assert_close(other.alpha, svm.alpha, rtol=0, atol=1e-10)
    state = svm.state_dict()
    del state["alpha"]
    with pytest.raises(RuntimeError, match="lacks"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="precomputed"):
        IncrementalSVM("precomputed").load_state_dict(svm.state_dict(), strict=False)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: IncrementalSVM(RBF), ValueError, "kernel"),
        (lambda: IncrementalSVM(RBF(sigma=1.0), C=0.0), ValueError, "C must"),
        (lambda: IncrementalSVM(RBF(sigma=1.0), C=(1.0, -1.0)), ValueError, "C must"),
        (lambda: IncrementalSVM(RBF(sigma=1.0), reserve_limit=-1), ValueError, "reserve_limit"),
        (lambda: IncrementalSVM(RBF(sigma=1.0), cache_bytes=-1), ValueError, "cache_bytes"),
        (lambda: IncrementalSVM(RBF(sigma=1.0)).decision(torch.zeros(1, 2)), NotFittedError, "add"),
        (lambda: IncrementalSVM(RBF(sigma=1.0)).leave_one_out(), NotFittedError, "add"),
        (lambda: IncrementalSVM(RBF(sigma=1.0)).k_fold(3), NotFittedError, "add"),
        (lambda: IncrementalSVM(RBF(sigma=1.0)).solutions([1.0]), NotFittedError, "add"),
    ],
)
def test_errors_of_a_new_machine(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_errors_leave_the_machine_alone():
    x, y = blobs(40)
    svm = IncrementalSVM(RBF(sigma=1.0), C=2.0)
    ids = svm.add(x, y)
    before = svm.alpha
    for call, match in (
        (lambda: svm.add(x[:, :1], y), "shape"),
        (lambda: svm.add(x, y + 1), "got 2"),
        (lambda: svm.add(x, y.double()), "integers"),
        (lambda: svm.add(x, y, torch.zeros(40)), "weight"),
        (lambda: svm.add(x, y, method="magic"), "method"),
        (lambda: svm.add(x * float("nan"), y), "NaN"),
        (lambda: svm.update(add=(x,)), "add must"),
        (lambda: svm.remove([3, 3]), "twice"),
        (lambda: svm.remove([99]), "99"),
        (lambda: svm.replace(ids[:2], x[:1], y[:1]), "2 ids and 1 samples"),
        (lambda: svm.relabel(ids[:2], y[:1]), "length"),
        (lambda: svm.set_C(-1.0), "C must"),
        (lambda: svm.set_kernel("precomputed"), "set_kernel"),
        (lambda: svm.leave_one_out("guess"), "method"),
        (lambda: svm.k_fold(1), "folds"),
        (lambda: svm.k_fold(torch.zeros(40)), "every sample"),
        (lambda: svm.decision(x[:, :1]), "shape"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    assert torch.equal(svm.alpha, before)


def test_a_long_fit_tells_its_progress_and_a_function_that_fails_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2500, 5, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.5 * torch.randn(2500, generator=generator) > 0).long()
    shares: list[float] = []
    svm = IncrementalSVM(RBF(sigma=2.0), C=100.0).fit(x, y, progress=shares.append)
    assert len(shares) > 3
    assert shares == sorted(shares)
    assert 0.0 <= shares[0] <= shares[-1] <= 1.0
    before = svm.alpha

    def stop(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        svm.fit(x[:2000], y[:2000], progress=stop)
    assert torch.equal(svm.alpha, before)
    with pytest.raises(ValueError, match="progress"):
        svm.fit(x, y, progress=3)


def test_a_start_needs_neither_both_classes_in_a_part_nor_balanced_weights():
    """Few samples of one class: the parts from which a large fit starts may hold none of them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3000, 3, generator=generator, dtype=torch.float64)
    y = torch.zeros(3000, dtype=torch.int64)
    y[[7, 1999]] = 1
    x[[7, 1999]] += 1.0
    weight = torch.rand(3000, generator=generator, dtype=torch.float64) + 0.1
    svm = IncrementalSVM(RBF(sigma=1.0), C=5.0).fit(x, y, weight)
    found = svm.kkt_violation()
    assert found < 256 * found.bound
    u = 5.0 * weight
    assert bool(((svm.alpha >= 0) & (svm.alpha <= u)).all())


def test_thousands_of_margin_vectors_go_on_from_a_factor_that_is_not_inverted():
    rng = np.random.default_rng(0)
    n = 1200
    x, y = rng.normal(size=(n + 8, 30)), rng.integers(0, 2, n + 8)
    K, tx, ty = rbf(x, x, 0.05), torch.from_numpy(x), torch.from_numpy(y)
    start = IncrementalSVM(RBF(gamma=0.05), C=100.0).fit(tx[:n], ty[:n])
    assert len(start.margin) > 1100

    def off(svm, keep):
        return kkt(K[np.ix_(keep, keep)], 2.0 * y[keep] - 1, np.full(len(keep), svm.C), svm.alpha.numpy(), svm.b)

    every = np.arange(n)
    assert off(start, every) < 1e-11
    assert off(copy.deepcopy(start).polish(), every) < 1e-11
    assert off(copy.deepcopy(start).set_C(3.0), every) < 1e-11
    more = copy.deepcopy(start)
    more.add(tx[n:], ty[n:])
    assert off(more, np.arange(n + 8)) < 1e-11
    more.remove(list(range(3, 9)))
    assert off(more, np.delete(np.arange(n + 8), range(3, 9))) < 1e-11
    other = IncrementalSVM(RBF(gamma=0.05), C=100.0)
    other.load_state_dict(start.state_dict())
    other.remove([5])
    assert off(other, np.delete(every, 5)) < 1e-11
    left_out = start.leave_one_out().margin
    assert off(start.remove([7]), np.delete(every, 7)) < 1e-11
    assert abs((2 * y[7] - 1) * float(start.decision(tx[7:8])) - 1 - float(left_out[7])) < 1e-8
