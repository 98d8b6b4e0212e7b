"""What certificates tell somebody who has the compacted store and guesses who was in it."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from torchlssvm import FixedPoint, LSSVMHead, VerificationError, verify
from torchlssvm.audit import FileState, Outcome
from torchlssvm.events import Add, Remove
from torchlssvm.store import SampleStore

pytest.importorskip("cryptography", reason="signatures need the package cryptography")
J, K, N = 6, 3, 30


def confirmed(published: bytes, folder: Path, x: torch.Tensor, y: torch.Tensor, name: str) -> bool:
    """The attack: does anything published, or keyed by anything in the files, fit the surviving rows and a guess, or its id?"""
    with SampleStore(folder, readonly=True) as store:
        rows = store.get([s.id for s in store])
        head = LSSVMHead.from_config(store.head.config()).add(rows.x, rows.y)
    digest = head.add(x, y).digest()
    material = b"".join(p.read_bytes() for p in sorted(folder.iterdir())) + published
    texts = {bytes.fromhex(t.decode()) for t in re.findall(rb"(?=([0-9a-f]{64}))", material)}
    keys = texts | {material[i : i + 32] for i in range(len(material) - 31)}
    answers = {bytes.fromhex(t.decode()) for t in re.findall(rb"(?=([0-9a-f]{64}))", published)}
    with SampleStore(folder, readonly=True) as store:
        entries = store.history()
    answers |= {e.mac for e in entries if e.mac}
    named = {c for e in entries for c in e.commitment_bytes}
    if bytes.fromhex(digest) in answers or hashlib.sha256(digest.encode()).digest() in answers:
        return True
    return any(
        hmac.digest(key, digest.encode(), "sha256") in answers or hashlib.sha256(key + name.encode()).digest() in named
        for key in keys
    )


def test_an_older_certificate_confirms_no_guess(tmp_path: Path) -> None:
    """A certificate from before an erasure, and the store after it: a digest in clear would give the sample away.

    The attack works where it should: on that digest, and on the new certificate as long as the key is there.
    """
    x, y = torch.randn(N, J, generator=torch.Generator().manual_seed(3)), torch.arange(N) % K
    with SampleStore(tmp_path / "s", head=LSSVMHead(J, K, grid=FixedPoint(8.0))) as store:
        store.apply(Add(ids=[f"s{i}" for i in range(N)], x=x, y=y))
        store.apply(Remove(ids=["s1"], event_id="first"))
        new = store.certificate("first")
        old = json.dumps({"digest": store.head.digest()}).encode()
        victim = store.get(["s7"])
        store.apply(Remove(ids=["s7"], event_id="second"))
    shutil.copytree(tmp_path / "s", tmp_path / "before")
    with SampleStore(tmp_path / "s") as store:
        store.compact()
        second = store.certificate("second")
    guess = (tmp_path / "s", victim.x, victim.y, "s7")
    assert confirmed(old, *guess)
    assert confirmed(victim.nonces[0], *guess)  # the nonce, which is gone with the row
    assert confirmed(new.payload(), tmp_path / "before", *guess[1:])  # not compacted: the key is still there
    assert not confirmed(new.payload() + second.payload() + store.path.name.encode(), *guess)
    with SampleStore(tmp_path / "s") as store:
        state = verify(new, head=store.head, store=store, allow_unsigned=True).checks["state"]
        assert (state.outcome, state.facts) == (Outcome.CHANGED, {"recorded": True})
        assert store.opening(2) is None
        assert store.opening() is not None


def test_compaction_keeps_the_key_of_a_state_that_has_not_changed(tmp_path: Path) -> None:
    with SampleStore(tmp_path / "s", head=LSSVMHead(J, K, grid=FixedPoint(8.0))) as store:
        store.apply(Add(ids=list("abc"), x=torch.randn(3, J), y=[0, 1, 2]))
        store.apply(Remove(ids=["a"], event_id="e"))
        certificate = store.certificate("e")
        store.compact()
        assert verify(certificate, store=store, allow_unsigned=True).checks["state"].outcome is Outcome.HOLDS
        assert store.certificate("e").commitment == certificate.commitment


def test_choices_made_from_data_confirm_no_guess(tmp_path: Path) -> None:
    """A calibration and a chosen rho are functions of the samples: their numbers would confirm a guess as a digest does."""
    x, y = torch.randn(N, J, generator=torch.Generator().manual_seed(5)), torch.arange(N) % K
    x[torch.arange(N), y] += 1.5
    with SampleStore(tmp_path / "s", head=LSSVMHead(J, K, grid=FixedPoint(8.0))) as store:
        store.apply(Add(ids=[f"s{i}" for i in range(N)], x=x, y=y))
        store.apply(Remove(ids=["s1"], event_id="first"))
        store.head.select_rho()
        store.calibrate()
        in_clear = {name: str(choice) for name, choice in store.head.choices.items()}
        published = store.certificate("first")
        opening = store.opening()
        head = LSSVMHead.from_config(store.head.config())
        head.load_state_dict(store.head.state_dict())
        said = verify(published, head, allow_unsigned=True, opening=opening).checks
        assert (said["calibration"].outcome, said["calibration"].facts) == (Outcome.HOLDS, {})
        head.calibrate(x[2:], y[2:])
        with pytest.raises(VerificationError, match="calibration differs"):
            verify(published, head, allow_unsigned=True, opening=opening)
        victim = store.get(["s7"])
        store.apply(Remove(ids=["s7"], event_id="second"))
        store.compact()
        rows = store.get([s.id for s in store])
    guess = LSSVMHead(J, K, grid=FixedPoint(8.0)).add(torch.cat([rows.x, victim.x]), torch.cat([rows.y, victim.y]))
    guess.select_rho()
    # the attack: the numbers that the guess gives, to nine digits, in what was published
    found = f"{guess.rho:.9g}"
    assert found[:8] in in_clear["rho"]
    assert found[:8] not in published.payload().decode()
    numbers = re.findall(r"\d+\.\d{6,}", in_clear["calibration"])
    assert numbers
    assert not any(number[:8] in published.payload().decode() for number in numbers)


def test_files_of_the_state_are_committed_to(tmp_path: Path) -> None:
    """Those of an earlier state are named only: a commitment under a key that is there would confirm guesses."""
    with SampleStore(tmp_path / "s", head=LSSVMHead(J, K, grid=FixedPoint(8.0))) as store:
        store.apply(Add(ids=list("abc"), x=torch.randn(3, J), y=[0, 1, 2]))
        for name in ("old", "new"):
            (tmp_path / name).write_bytes(b"weights")
        store.register_checkpoint(tmp_path / "old")
        store.apply(Remove(ids=["a"], event_id="e"))
        store.register_checkpoint(tmp_path / "new")
        certificate = store.certificate("e")
        new, old = str(tmp_path / "new"), str(tmp_path / "old")
        assert (list(certificate.files), certificate.scope["checkpoints"]) == ([new], [old])
        assert hashlib.sha256(b"weights").hexdigest() not in certificate.to_json()

        def said() -> FileState:
            checks = verify(certificate, store=store, allow_unsigned=True).checks
            assert checks["older files"].facts["names"] == [old]
            return checks["files"].facts["files"][new]

        assert said() is FileState.SAME
        (tmp_path / "new").write_bytes(b"others")
        assert said() is FileState.CHANGED
        (tmp_path / "new").unlink()
        assert said() is FileState.GONE
