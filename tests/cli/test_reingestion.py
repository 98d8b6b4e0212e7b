"""Erased ids that are offered again, by every way into a store: none is learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from tests.support.cli_tools import Shell
from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.audit import Outcome
from torchlssvm.corrections.corrector import Corrector
from torchlssvm.errors import SuppressedError
from torchlssvm.events import Add
from torchlssvm.store import SampleStore, check_absence
from torchlssvm.store.erasure.suppression import KEY_VARIABLE

J, K, LIMIT = 6, 3, 16.0


@pytest.mark.parametrize("erased", [24, pytest.param(1000, marks=pytest.mark.slow)])
def test_what_was_erased_on_request_is_not_learned_again(
    erased: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lightning", reason="needs torchlssvm[lightning]")
    from tests.support.lightning_tools import Stop, interrupted, quiet
    from torchlssvm.lightning import Indexed, LSSVMModule, ResumableLoader

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(KEY_VARIABLE, "suppression.key")
    shell = Shell(capsys, tmp_path)
    n, batch = 2 * erased, erased // 4
    y = torch.arange(n) % K
    x = torch.randn(n, J, generator=torch.Generator().manual_seed(0))
    owners = [f"customer-{i // 4}" for i in range(n)]
    gone, kept = list(range(erased)), list(range(erased, n))
    # Every second customer is named in the request, the others by their samples.
    by_subject = sorted({owners[i] for i in gone if i // 4 % 2})
    by_id = [str(i) for i in gone if owners[i] not in by_subject]
    truth = LSSVMHead(J, K, grid=FixedPoint(LIMIT)).add(x[kept], y[kept]).digest()

    def module() -> LSSVMModule:
        return LSSVMModule("identity", K, in_features=J, grid=LIMIT, store="store")

    def loader() -> ResumableLoader:
        return ResumableLoader(Indexed(TensorDataset(x, y), subjects=owners), batch)

    def learned(folder: str = "store") -> int:
        """Erased samples that a store holds."""
        with SampleStore(folder, readonly=True) as store:
            return sum(str(i) in store for i in gone) + sum(len(store.find(subject=s)) for s in by_subject)

    # A run is stopped when it has learned them all; they are erased on request, down to the bytes.
    first, trainer = module(), quiet(tmp_path, callbacks=[Stop(after=6)])
    shell("keygen", "--suppression", "suppression.key")
    interrupted(trainer, first, loader())
    trainer.save_checkpoint("run.ckpt")
    assert "suppression_key" not in torch.load("run.ckpt", weights_only=False)["hyper_parameters"]
    shell("suppression", "use", "store", "--list", "erased.list")
    names = [word for s in by_subject for word in ("--subject", s)] + [word for i in by_id for word in ("--id", i)]
    shell("request", "open", "store", "--request", "R-1", *names)
    shell("remove", "store", "--request", "R-1", "--compact", "--certificate", "R-1.json")
    assert learned() == 0

    # 1. a run that is resumed, with the order of its batches and then from the beginning in a new run
    for checkpoint in ("run.ckpt", None):
        m = module()
        quiet(tmp_path).fit(m, loader(), ckpt_path=checkpoint, **({"weights_only": False} if checkpoint else {}))
        assert learned() == 0
        assert m.head.digest() == truth
    # 2. the command line
    np.save("x.npy", x.numpy())
    np.save("y.npy", y.numpy())
    Path("ids.txt").write_text("".join(f"{i}\n" for i in range(n)))
    Path("owners.txt").write_text("".join(f"{s}\n" for s in owners))
    with SampleStore("store", readonly=True) as store:
        source = store.fingerprint
    add = ["add", "store", "--features", "x.npy", "--labels", "y.npy", "--ids", "ids.txt", "--by-position"]
    add += ["--fingerprint", source]
    assert "stay erased" in shell(*add, "--subjects", "owners.txt", code=1)
    assert shell.json(*add, "--subjects", "owners.txt", "--erased", "skip")["left_out"] == erased
    assert learned() == 0
    # 3. the API, one by one and as a correction, in this store and in another
    other = SampleStore("other", head=LSSVMHead(J, K, grid=FixedPoint(LIMIT)), suppression_list="erased.list")
    with other, SampleStore("store", erased="skip", fingerprint=source) as store:
        for i in gone[:: max(1, erased // 12)]:
            with pytest.raises(SuppressedError):
                other.apply(Add([str(i)], x[i : i + 1], y[i : i + 1]))
            assert not store.apply(Add([str(i)], x[i : i + 1], y[i : i + 1])).applied
        everybody = Add([str(i) for i in range(n)], x, y, owners)
        assert [o.status for o in Corrector(other.head, other).apply([everybody])] == ["refused"]
        assert store.apply(Add([str(i) for i in gone], x[gone], y[gone])).left_out == tuple(str(i) for i in gone)
        assert store.head.digest() == truth
        assert check_absence(store, store.certificate("R-1"))["returned"].outcome is Outcome.HOLDS
    assert learned() == learned("other") == 0


@pytest.mark.parametrize("named", [["--subject", "u1"], ["--subject", "u1", "--subject", "nobody-held"]])
def test_a_receipt_lets_all_back_in_who_were_erased_by_subject(
    named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The request may name more people than were held: those who were entered in the list are let in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(KEY_VARIABLE, "suppression.key")
    shell = Shell(capsys, tmp_path)
    x, y = torch.randn(4, J, generator=torch.Generator().manual_seed(0)), torch.arange(4) % K
    add = Add(["v-1", "v-2", "v-3", "v-4"], x, y, ["u1", "u1", "u2", "u2"])
    with SampleStore("store", LSSVMHead(J, K, grid=LIMIT)) as store:
        store.apply(add)
    shell("keygen", "--suppression", "suppression.key")
    shell("suppression", "use", "store", "--list", "erased.list")
    shell("request", "open", "store", "--request", "R-1", *named)
    shell("remove", "store", "--request", "R-1", "--subject", "u1", "--receipt", "r.json")
    back = Add(["v-1", "v-2"], x[:2], y[:2], "u1")
    with SampleStore("store") as store, pytest.raises(SuppressedError):
        store.apply(back)
    assert "3 names taken off" in shell("readmit", "store", "--receipt", "r.json", "--reason", "a new contract")
    with SampleStore("store") as store:
        store.apply(back)
        assert store.head.digest() == LSSVMHead(J, K, grid=LIMIT).add(x, y).digest()
    assert "r.json" in shell("readmit", "store", "--receipt", "r.json", "--reason", "again", code=1)
    shell("remove", "store", "--subject", "u2", "--receipt", "r2.json")  # of no request: nothing keeps it out
    assert "r2.json" in shell("readmit", "store", "--receipt", "r2.json", "--reason", "back", code=1)
