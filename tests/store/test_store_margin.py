"""A store whose head is a MarginHead: the same contract as with an LSSVMHead."""

import copy

import pytest
import torch

from torchlssvm import FixedPoint, MarginHead, VerificationError, verify
from torchlssvm.events import Add, Relabel, Remove, Replace
from torchlssvm.store import SampleStore

J, K, N = 6, 3, 60
GRID = FixedPoint(16.0)


def samples(seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(N) % K
    x = torch.randn(N, J, generator=g) + 1.5 * torch.nn.functional.one_hot(y, J)
    return [f"s{i}" for i in range(N)], x, y


def filled(path, head=None):
    ids, x, y = samples()
    store = SampleStore(path, head=head or MarginHead(J, K, rho=1.0, grid=GRID))
    store.apply(Add(ids=ids[:40], x=x[:40], y=y[:40], subject=[f"u{i % 8}" for i in range(40)]))
    store.apply(Add(ids=ids[40:], x=x[40:], y=y[40:]))
    return store, x, y


def same(head, fresh):
    head.refresh()
    fresh.refresh()
    assert head.digest() == fresh.digest()
    assert all(torch.equal(value, fresh._derived()[name]) for name, value in head._derived().items())


@pytest.mark.parametrize("read", [True, False], ids=["weights read before", "not read"])
def test_erasure_of_a_subject_ends_at_a_fresh_head(tmp_path, read):
    store, x, y = filled(tmp_path / "s")
    if read:
        store.head._solve()
    copy_with_all = copy.deepcopy(store.head)
    store.apply(Relabel(ids=["s50"], y=[(int(y[50]) + 1) % K]))
    store.apply(Replace(ids=["s51"], x=x[51:52] + 0.5))
    store.apply(Remove(subject="u3", event_id="erase"))
    y[50] = (y[50] + 1) % K
    x[51] += 0.5
    keep = [i for i in range(N) if not (i < 40 and i % 8 == 3)]
    fresh = MarginHead(J, K, rho=1.0, grid=GRID).add(x[keep], y[keep])
    same(store.head, fresh)
    certificate = store.certificate("erase")
    report = verify(certificate, head=store.head, store=store, allow_unsigned=True)
    assert report.checks["head"].facts["derived"] == ["w", "b", "active"]
    verify(certificate, head=fresh, store=store, allow_unsigned=True)
    verify(certificate, head=fresh, opening=store.opening(), allow_unsigned=True)
    with pytest.raises(VerificationError, match="digest"):
        verify(certificate, head=copy_with_all, store=store, allow_unsigned=True)
    store.close()
    with SampleStore(tmp_path / "s") as again:
        assert type(again.head) is MarginHead
        same(again.head, fresh)
        assert verify(certificate, head=again.head, store=again, allow_unsigned=True, fast=True)


def test_a_head_whose_rows_or_weights_are_not_those_of_its_statistics_fails_verify(tmp_path):
    store = filled(tmp_path / "s")[0]
    before = copy.deepcopy(store.head)
    store.apply(Remove(ids=["s1"], event_id="e"))
    certificate, opening = store.certificate("e"), store.opening()
    old_rows = copy.deepcopy(before)
    old_rows.statistics = copy.deepcopy(store.head.statistics)  # the digest of the survivors, the rows of all
    old_weights = copy.deepcopy(store.head)
    old_weights._solve()
    old_weights._solver.w.copy_(before.w)
    for head, reason in ((old_rows, "rows"), (old_weights, "w does not follow")):
        assert head.digest() == store.head.digest()
        for source in ({"store": store}, {"opening": opening}):
            with pytest.raises(VerificationError, match=reason):
                verify(certificate, head=head, allow_unsigned=True, **source)
    store.close()


def test_snapshots_hold_no_rows_and_start_the_next_solve(tmp_path):
    store, x, y = filled(tmp_path / "s")
    store.head._solve()
    w = store.head.w.clone()
    store.close()
    (file,) = (tmp_path / "s").glob("*.snapshot.pt")
    held = torch.load(file, weights_only=True)["statistics"]
    assert set(held) == {"w", "b", "active"}
    with SampleStore(tmp_path / "s") as again:
        assert "snapshot" in again.live.recovery
        torch.testing.assert_close(again.head.w, w, rtol=1e-12, atol=1e-12)
        again.apply(Remove(ids=["s0"]))
    (file,) = (tmp_path / "s").glob("*.snapshot.pt")
    assert torch.load(file, weights_only=True)["statistics"] == {}  # weights that knew s0 are gone
    with SampleStore(tmp_path / "s") as again:
        same(again.head, MarginHead(J, K, rho=1.0, grid=GRID).add(x[1:], y[1:]))


@pytest.mark.cuda
def test_a_store_with_a_head_on_a_gpu(tmp_path):
    with SampleStore(tmp_path / "s", head=MarginHead(J, K, rho=1.0, grid=GRID, device="cuda")) as store:
        ids, x, y = samples()
        store.apply(Add(ids=ids, x=x, y=y, subject=[f"u{i % 8}" for i in range(N)]))
        store.head._solve()
        store.apply(Relabel(ids=["s9"], y=[1]))
        store.apply(Remove(subject="u3", event_id="e"))
        y[9] = 1
        keep = [i for i in range(N) if i % 8 != 3]
        fresh = MarginHead(J, K, rho=1.0, grid=GRID).add(x[keep], y[keep])
        assert store.head.digest() == fresh.digest()
        torch.testing.assert_close(store.head.w.cpu(), fresh.w, rtol=1e-9, atol=1e-9)
        certificate = store.certificate("e")
        for head in (store.head, fresh):
            assert verify(certificate, head=head, store=store, allow_unsigned=True)
    with SampleStore(tmp_path / "s", device="cuda") as again:
        assert again.head.device.type == "cuda"
        assert again.head.digest() == fresh.digest()


def test_a_chosen_rho_and_a_kept_calibration_forget_too(tmp_path):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(60, 6, generator=generator), torch.arange(60) % 3
    x[:, 0] += 2 * y
    owners = [f"u{i // 10}" for i in range(60)]
    with SampleStore(tmp_path / "s", head=MarginHead(6, 3, grid=16.0)) as store:
        store.apply(Add(ids=list(range(60)), x=x, y=y, subject=owners))
        _ = store.head.w
        store.calibrate(keep=True)
        files = {"receipt": tmp_path / "r.json", "certificate": tmp_path / "c.json"}
        store.erase(subjects=["u1", "u3"], compact=True, **files)
        keep = [i for i, owner in enumerate(owners) if owner not in ("u1", "u3")]
        assert store.head.rho == MarginHead(6, 3, grid=16.0).add(x[keep], y[keep]).rho
        assert verify(files["certificate"], head=store.head, store=store, allow_unsigned=True)
