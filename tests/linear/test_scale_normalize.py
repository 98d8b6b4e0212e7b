"""Standardised and normalized features (``scale``, ``normalize``): equal to scikit-learn's, and nothing stays of a sample that is removed."""

import io
import pickle

import numpy as np
import pytest
import torch

from tests.support.dense import code, relative, ridge
from torchlssvm import FixedPoint, LSSVMHead, RemovalError, Statistics, attach, cli, verify
from torchlssvm.distributed import Delta, merge
from torchlssvm.events import Add, Remove, Replace
from torchlssvm.export import export_onnx, freeze, load_safetensors, save_safetensors
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.linear.diagnostics.uncertainty import leverage, uncertainty
from torchlssvm.store import SampleStore

N, J, K = 90, 7, 3
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, J, generator=GENERATOR, dtype=torch.float64) * torch.logspace(-1, 2, J) + torch.linspace(-200, 50, J)
X[:, 2] = 5.0  # constant
Y = torch.arange(N) % K
GRID = FixedPoint(1024.0, bits=24)
GONE = torch.arange(N) < 20


def standardised(x, like):
    """Independent of the library: numpy's mean and deviation, and the features as the grid has them."""
    like = like.numpy()
    deviation = like.std(0)
    return torch.from_numpy((x.numpy() - like.mean(0)) / np.where(like.std(0) > 1e-12, deviation, 1.0))


@pytest.mark.parametrize("intercept", ["free", "penalized", "none"])
@pytest.mark.parametrize(
    "class_weight", [None, "balanced", torch.tensor([1.0, 2.0, 0.1])], ids=["plain", "balanced", "given"]
)
def test_standardised_ridge_before_and_after_a_removal(intercept, class_weight):
    head = LSSVMHead(J, K, rho=2.0, grid=GRID, scale="std", intercept=intercept, class_weight=class_weight).add(X, Y)
    snapped = GRID.snap(X)
    for keep in (torch.ones(N, dtype=torch.bool), ~GONE):
        if not keep.all():
            head.remove(X[GONE], Y[GONE])
        counts = torch.bincount(Y[keep]).double()
        by_class = (
            {"balanced": len(Y[keep]) / (K * counts)}.get(class_weight)
            if isinstance(class_weight, str)
            else class_weight
        )
        z = standardised(snapped, snapped[keep])
        w, b = ridge(z[keep], code(Y[keep], K), 2.0, intercept, None if by_class is None else by_class[Y[keep]])
        assert relative(head(snapped), z @ w + b) < 1e-9


@pytest.mark.parametrize("kind", ["labels", "values", "float sums"])
def test_a_pipeline_of_scikit_learn(kind):
    pipeline = pytest.importorskip("sklearn.pipeline")
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    linear_model = pytest.importorskip("sklearn.linear_model")
    options = {"grid": None} if kind == "float sums" else {"grid": GRID, "target_grid": FixedPoint(8.0, bits=26)}
    y = torch.randn(N, K, generator=GENERATOR, dtype=torch.float64) if kind == "values" else Y
    head = LSSVMHead(J, K, scale="std", **({"rho": 1.0} | options)).add(X, y)
    if kind == "float sums":  # rounding hides which columns have become constant
        with pytest.raises(ValueError, match='grid="auto"'):
            head.remove(X[GONE], y[GONE])
        head = LSSVMHead(J, K, scale="std", **({"rho": 1.0} | options)).add(X[~GONE], y[~GONE])
    else:
        head.remove(X[GONE], y[GONE])
    x = X if head.grid is None else head.grid.snap(X)
    truth = pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.Ridge(alpha=1.0, solver="cholesky"))
    truth.fit(
        x[~GONE].numpy(), (head.statistics.target_grid.snap(y) if kind == "values" else code(y, K))[~GONE].numpy()
    )
    assert relative(head(x), torch.from_numpy(truth.predict(x.numpy()))) < 1e-8
    assert head.drift() == 0


def test_pairs_share_one_scale():
    head = LSSVMHead(J, K, rho=0.5, grid=GRID, scale="std", multiclass="ovo").add(X, Y).remove(X[GONE], Y[GONE])
    snapped = GRID.snap(X)
    z = standardised(snapped, snapped[~GONE])
    for i, (a, b) in enumerate([(0, 1), (0, 2), (1, 2)]):
        mine = ~GONE & ((a == Y) | (b == Y))
        w, c = ridge(z[mine], code((Y[mine] != a).long(), 2)[:, :1], 0.5)
        assert relative(snapped @ head.w[:, i] + head.b[i], (z @ w + c)[:, 0]) < 1e-9


def test_relabel_and_a_change_of_rho_follow_the_scale():
    new = (Y + 1) % K
    head = LSSVMHead(J, K, grid=GRID, scale="std", rho=1.0).add(X, Y)
    _ = head.P
    head.relabel(X[:30], Y[:30], new[:30])
    head.rho = 3.0
    again = LSSVMHead(J, K, grid=GRID, scale="std", rho=3.0).add(X, torch.cat([new[:30], Y[30:]]))
    assert relative(head.w, again.w) < 1e-10


@pytest.mark.parametrize("intercept", ["free", "penalized", "none"])
@pytest.mark.parametrize("multiclass", ["ovr", "ovo"])
def test_leave_one_out_holds_the_scale_fixed(intercept, multiclass):
    """The truth: the same ridge on columns that were standardised beforehand, as if the scale had been given."""
    head = LSSVMHead(J, K, grid=GRID, scale="std", intercept=intercept, multiclass=multiclass, rho=1.0).add(X, Y)
    z = standardised(GRID.snap(X), GRID.snap(X))
    plain = LSSVMHead(J, K, grid=None, intercept=intercept, multiclass=multiclass, rho=1.0).add(z, Y)
    assert relative(head.leave_one_out(X, Y), plain.leave_one_out(z, Y)) < 1e-8
    groups = torch.arange(N) // 9
    assert relative(head.leave_one_out(X, Y, groups=groups), plain.leave_one_out(z, Y, groups=groups)) < 1e-8
    assert (
        relative(head.influence(X, Y, GRID.snap(X)[:9], on="scores"), plain.influence(z, Y, z[:9], on="scores")) < 1e-7
    )
    assert relative(leverage(head, GRID.snap(X)), leverage(plain, z)) < 1e-8
    rhos = [0.1, 1.0, 10.0]
    for method in ("gcv", "loo"):
        ours, theirs = (h.select_rho(rhos, method, x, Y, apply=False).errors for h, x in ((head, X), (plain, z)))
        assert relative(ours, theirs) < 1e-7
    if multiclass == "ovr":
        assert relative(uncertainty(head, GRID.snap(X)), uncertainty(plain, z)) < 1e-8


@pytest.mark.parametrize("intercept", ["free", "penalized", "none"])
@pytest.mark.parametrize("score", ["squared", "accuracy"])
def test_k_fold_derives_the_scale_again(intercept, score):
    ids = [f"s{i}" for i in range(N)]
    head = LSSVMHead(J, K, grid=GRID, scale="std", intercept=intercept, folds=3, rho=1.0).add(X, Y, ids=ids)
    rhos = [0.5, 5.0]
    found = head.select_rho(rhos, "kfold", X, Y, ids=ids, score=score, apply=False).errors
    from torchlssvm.functional.sample_identity import fold_of

    fold, snapped, expected = torch.tensor(fold_of(ids, 3)), GRID.snap(X), []
    for rho in rhos:
        total = 0.0
        for f in range(3):
            kept = fold != f
            z = standardised(snapped, snapped[kept])
            w, b = ridge(z[kept], code(Y[kept], K), rho, intercept)
            scores, y = (z @ w + b)[~kept], Y[~kept]
            wrong = (scores.argmax(1) != y).double().sum()
            total += float(wrong if score == "accuracy" else (scores - code(y, K)).square().mean(1).sum())
        expected.append(total / N)
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-8)


def test_normalized_rows_have_one_form_everywhere():
    """In a batch or alone, strided, in other float types, in numpy: the same bits; and the right numbers."""
    x = torch.randn(50, 37, generator=GENERATOR) * 100
    x[3] = 0.0
    wide = x.double()
    for kind in ("l2", "sqrt"):
        whole = normalized(wide, kind)
        assert torch.equal(torch.cat([normalized(row[None], kind) for row in wide]), whole)
        assert torch.equal(normalized(wide.mT.contiguous().mT, kind), whole)
    lengths = np.linalg.norm(wide.numpy(), axis=1, keepdims=True)
    assert np.allclose(normalized(wide, "l2").numpy(), wide.numpy() / np.where(lengths == 0, 1, lengths), rtol=1e-14)
    assert not normalized(wide, "l2")[3].any()
    assert torch.allclose(normalized(wide, "sqrt").square() * wide.sign(), wide)
    extreme = torch.tensor([[3e300, 4e300], [3e-300, 4e-300], [5e-324, 0.0]], dtype=torch.float64)
    assert torch.allclose(normalized(extreme, "l2"), torch.tensor([[0.6, 0.8], [0.6, 0.8], [1.0, 0.0]]).double())


@pytest.mark.parametrize("normalize", ["l2", "sqrt"])
def test_a_normalizing_head_is_a_head_on_normalized_rows(normalize):
    grid = FixedPoint(32.0)
    head = LSSVMHead(J, K, grid=grid, normalize=normalize, rho=1.0).add(X.float(), Y)
    z = normalized(X.float().double(), normalize)
    plain = LSSVMHead(J, K, grid=grid, rho=1.0).add(z, Y)
    for a, b in ((head, X.float()), (plain, z)):
        a.remove(b[GONE], Y[GONE])
        a.relabel(b[-3:], Y[-3:], (Y[-3:] + 1) % K)
    assert torch.equal(head.w, plain.w)
    assert torch.allclose(head(X.float()), plain(z), rtol=0, atol=1e-12)
    assert torch.equal(head.statistics.M, plain.statistics.M)
    assert head.digest() != plain.digest()  # the header says what was done to the rows
    y = Y.clone()
    y[-3:] = (y[-3:] + 1) % K
    keep = ~GONE
    assert torch.equal(head.leave_one_out(X.float()[keep], y[keep]), plain.leave_one_out(z[keep], y[keep]))
    assert torch.equal(leverage(head, X.float()), leverage(plain, z))
    part = X.float()[40:41]
    assert torch.equal(head.influence(part, y[40:41], X.float()[:5], on="scores"),
                       plain.influence(z[40:41], y[40:41], z[:5], on="scores"))  # fmt: skip


def test_bad_rows_are_named_as_they_came():
    for normalize in ("l2", "sqrt"):
        head = LSSVMHead(2, 2, normalize=normalize, rho=1.0)
        with pytest.raises(ValueError, match=r"x holds 1 NaN or inf value\(s\), the first at index \(1, 0\)"):
            head.add(torch.tensor([[1.0, 2.0], [float("inf"), 3.0]]), torch.tensor([0, 1]))
        assert head.n == 0
    for options in ({"normalize": "l1"}, {"scale": "max"}, {"scale": True}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be one of None"):
            LSSVMHead(2, 2, **({"rho": 1.0} | options))
    with pytest.raises(ValueError, match=r"scale='std' moves"):
        LSSVMHead(J, K, scale="std", rho=1.0).add(X, Y).remove_approximate(X[:2], Y[:2])


def test_the_digest_names_the_options_and_is_otherwise_what_it_was():
    plain = Statistics(J, K, grid=GRID).add(X, Y)
    assert "normalize" not in plain.header()
    assert "scale" not in plain.header()
    digests = {
        LSSVMHead(J, K, grid=GRID, normalize=n, scale=s, rho=1.0).digest()
        for n in (None, "l2", "sqrt")
        for s in (None, "std")
    }
    assert len(digests) == 6
    with pytest.raises(ValueError, match="scale is None here and 'std' there"):
        LSSVMHead(J, K, grid=GRID, rho=1.0).add(X, Y).merge(LSSVMHead(J, K, grid=GRID, scale="std", rho=1.0).add(X, Y))


def test_files_pickles_and_deltas_carry_the_options(tmp_path):
    options = {"grid": FixedPoint(32.0), "normalize": "sqrt", "scale": "std", "intercept": "penalized"}
    head = LSSVMHead(J, K, **({"rho": 1.0} | options)).add(X, Y)
    file = io.BytesIO()
    torch.save(head.state_dict(), file)
    file.seek(0)
    again = LSSVMHead(J, K, **({"rho": 1.0} | options))
    again.load_state_dict(torch.load(file, weights_only=True))
    for other in (again, pickle.loads(pickle.dumps(head)), LSSVMHead.from_config(head.config()).merge(head)):
        assert other.digest() == head.digest()
        assert torch.equal(other(X), head(X))
        assert (
            other.remove(X[:9], Y[:9]).digest()
            == LSSVMHead(J, K, **({"rho": 1.0} | options)).add(X[9:], Y[9:]).digest()
        )
        assert relative(other.w, LSSVMHead(J, K, **({"rho": 1.0} | options)).add(X[9:], Y[9:]).w) == 0
    for wrong in ({"scale": None}, {"normalize": "l2"}):
        with pytest.raises(RuntimeError, match=next(iter(wrong))):
            LSSVMHead(J, K, **(options | wrong)).load_state_dict(head.state_dict())
    delta = Delta.take(LSSVMHead(J, K, **({"rho": 1.0} | options)).add(X, Y))
    delta.save(tmp_path / "delta.pt")
    assert (
        merge(LSSVMHead(J, K, **({"rho": 1.0} | options)), Delta.load(tmp_path / "delta.pt")).digest() == head.digest()
    )
    assert merge(head, Delta.like(head).remove(X[:9], Y[:9])).n == N - 9


@pytest.mark.parametrize("normalize", ["l2", "sqrt"])
def test_files_for_serving(normalize, tmp_path):
    grid = FixedPoint(32.0)
    head = LSSVMHead(J, K, grid=grid, normalize=normalize, scale="std", rho=0.1).add(X, Y)
    frozen = freeze(head, torch.float64)
    assert torch.allclose(frozen(X), head(X), rtol=0, atol=1e-9)
    pytest.importorskip("safetensors")
    save_safetensors(frozen, tmp_path / "head.safetensors")
    state, about = load_safetensors(tmp_path / "head.safetensors")
    assert about["normalize"] == normalize
    assert set(state) == {"weight", "bias"}
    if normalize == "sqrt":  # one conversion is enough
        return
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export_onnx(freeze(head), X[:3].float(), tmp_path / "head.onnx")
    session = runtime.InferenceSession(tmp_path / "head.onnx")
    scores = session.run(None, {"x": X.float().numpy()})[0]
    assert np.abs(scores - head(X.float()).numpy()).max() < 1e-3


def test_constant_after_a_removal_and_rows_never_held():
    x = torch.zeros(6, 2)
    x[:, 0] = torch.arange(6.0)
    x[0, 1] = 1.0  # without the first row the second column is constant
    head = (
        LSSVMHead(2, 2, grid=FixedPoint(16.0), scale="std", rho=1.0)
        .add(x, torch.arange(6) % 2)
        .remove(x[:1], torch.tensor([0]))
    )
    assert not head.w[1].any()
    unchecked = LSSVMHead(2, 2, grid=FixedPoint(16.0), scale="std", membership=False, rho=1.0).add(
        x, torch.arange(6) % 2
    )
    before = unchecked.digest()
    with pytest.raises(RemovalError):
        unchecked.remove(torch.tensor([[9.0, 0.0]]), torch.tensor([0]))
    assert unchecked.digest() == before
    one = LSSVMHead(2, 2, scale="std", rho=1.0).add(x[:1], torch.tensor([0]))
    assert torch.equal(one.predict(x), torch.zeros(6, dtype=torch.int64))


@pytest.mark.parametrize(
    "refused",
    [
        lambda h, x, y, other: h.remove(x, y),
        lambda h, x, y, other: h.update(remove=(x, y)),
        lambda h, x, y, other: h.__isub__(other),
    ],
    ids=["remove", "update", "subtract"],
)
def test_float_sums_take_no_removal_that_could_leave_a_constant_column(refused):
    def head(rows):
        return LSSVMHead(3, 2, grid=None, scale="std", rho=1.0).add(x[rows], y[rows])

    x, y = torch.randn(100, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(100) % 2
    x[:, 2], x[7, 2] = 3.7, 900.0  # without row 7 the last column is constant
    h, before = head(slice(None)), head(slice(None))(x)
    with pytest.raises(ValueError, match="grid"):
        refused(h, x[[7]], y[[7]], head([7]))
    assert torch.equal(h(x), before)


@pytest.mark.parametrize(
    "options", [{"normalize": "l2"}, {"normalize": "sqrt", "scale": "std"}, {"scale": "std"}], ids=str
)
def test_a_store_keeps_rows_that_can_be_removed(options, tmp_path):
    """With an automatic grid, opened again, from a snapshot and from the rows; the certificate names the options."""
    x, ids = X.float(), [f"s{i}" for i in range(N)]
    with SampleStore(tmp_path / "s", head=LSSVMHead(J, K, **({"rho": 1.0} | options))) as store:
        store.apply(Add(ids=ids, x=x, y=Y, subject=["a"] * 20 + ["b"] * (N - 20)))
        store.apply(Replace(ids=ids[-1:], x=x[:1], y=Y[:1]))
        grid = store.head.grid
    fresh = LSSVMHead(J, K, grid=grid, **({"rho": 1.0} | options)).add(x[20:-1], Y[20:-1]).add(x[:1], Y[:1])
    with SampleStore(tmp_path / "s") as store:
        assert store.head.config() | {"grid": None, "membership": True} == fresh.config() | {"grid": None}
        store.apply(Remove(subject="a", event_id="erasure"))
        assert torch.equal(store.head.statistics.M, fresh.statistics.M)
        assert torch.allclose(store.head(x), fresh(x), rtol=0, atol=1e-12)
        certificate = store.certificate("erasure")
        assert {k: v for k, v in certificate.grid.items() if k in ("normalize", "scale")} == options
        assert verify(certificate, head=store.head, store=store, allow_unsigned=True)
        assert verify(certificate.to_json(), head=store.head, opening=store.opening(), allow_unsigned=True)
    with pytest.raises(ValueError, match="does not fit the store"):
        SampleStore(tmp_path / "s", head=LSSVMHead(J, K, rho=1.0))


def test_attach_the_command_line_and_scikit_learn_take_the_options(tmp_path):
    clf = attach(torch.nn.Linear(J, 10), K, normalize="sqrt", scale="std").add(X, Y)
    truth = LSSVMHead(J, K, normalize="sqrt", scale="std", rho=1.0).add(X, Y)
    assert clf.head.digest() == truth.digest()
    arguments = ["--in-features", str(J), "--classes", str(K), "--normalize", "sqrt", "--scale", "std"]
    assert cli.main(["init", str(tmp_path / "s"), *arguments]) == 0
    with SampleStore(tmp_path / "s") as store:
        store.apply(Add(ids=[str(i) for i in range(N)], x=X, y=Y))
        assert store.head.digest() == truth.digest()
    estimators = pytest.importorskip("torchlssvm.sklearn")
    grid = FixedPoint(32.0, bits=26)
    model = estimators.LSSVMClassifier(rho=1.0, scale="std", normalize="sqrt", multiclass="ovr", grid=grid)
    model.fit(X.numpy(), Y.numpy())
    model.partial_unfit(X[:20].numpy(), Y[:20].numpy())
    rest = LSSVMHead(J, K, normalize="sqrt", scale="std", grid=grid, rho=1.0).add(X[20:], Y[20:])
    assert np.allclose(model.decision_function(X.numpy()), rest(X).numpy(), rtol=0, atol=1e-8)
    regressor = estimators.LSSVMRegressor(scale="std").fit(X.numpy(), X[:, 0].numpy())
    assert np.abs(regressor.predict(X.numpy()) - X[:, 0].numpy()).max() < 0.1
