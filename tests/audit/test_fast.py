"""``verify --fast``: one flipped bit is found wherever it is, in rows, labels, sums and weights."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch

from tests.support import crafted
from torchlssvm import FixedPoint, LSSVMHead, MarginHead, VerificationError, verify
from torchlssvm.audit.verification import WEIGHT_TOLERANCE
from torchlssvm.errors import StoreError
from torchlssvm.events import Add, Remove
from torchlssvm.store import SampleStore

N, J, K = 40, 7, 3
HEADS = {
    "totals": lambda: LSSVMHead(J, K, grid=FixedPoint(8.0), rho=1.0),
    "per class": lambda: LSSVMHead(J, K, grid=FixedPoint(8.0), class_weight="balanced"),
    "folds": lambda: LSSVMHead(J, K, grid=FixedPoint(8.0), folds=2),
    "margin": lambda: MarginHead(J, K, rho=1.0, grid=FixedPoint(8.0)),
}


def filled(folder: Path, form: str) -> tuple[Path, str]:
    """A store with an erased sample, closed, and its certificate."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(N, J, generator=generator), torch.randint(K, (N,), generator=generator)
    with SampleStore(folder / form, head=HEADS[form]()) as store:
        store.apply(Add([f"s{i}" for i in range(N)], x, y))
        store.apply(Remove(ids=["s3"], event_id="erasure"))
        store.compact()
        return folder / form, store.certificate("erasure").to_json()


def fails(store: SampleStore, certificate: str) -> bool:
    try:
        verify(certificate, store.head, store, allow_unsigned=True, fast=True)
    except (VerificationError, StoreError):  # the latter when the head is no longer that of the store
        return True
    return False


@pytest.mark.parametrize("places", [6, pytest.param(340, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", HEADS)
def test_a_flipped_bit_of_a_row_is_found(tmp_path: Path, form: str, places: int) -> None:
    """In the file, with a checksum that was made right again."""
    folder, certificate = filled(tmp_path, form)
    rng = random.Random(form)
    with crafted.sql(folder) as db:
        rows = db.execute("SELECT label, features FROM samples ORDER BY seq").fetchall()

    def judged() -> bool:
        with SampleStore(folder, readonly=True) as store:
            return fails(store, certificate)

    assert not judged()
    for _ in range(places):
        which = rng.randrange(len(rows))
        label, features = rows[which]
        if rng.random() < 0.2:
            crafted.sample(which, label=label ^ (1 << rng.randrange(2)))(folder)
        else:
            bit = rng.randrange(8 * len(features))
            flipped = bytearray(features)
            flipped[bit // 8] ^= 1 << bit % 8
            crafted.sample(which, features=bytes(flipped))(folder)
        assert judged(), which
        crafted.sample(which, label=label, features=features)(folder)
    assert not judged()


@pytest.mark.parametrize("places", [12, pytest.param(340, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["totals", "per class", "folds"])
def test_a_flipped_bit_of_the_sums_is_found(tmp_path: Path, form: str, places: int) -> None:
    folder, certificate = filled(tmp_path, form)
    rng = random.Random(form)
    with SampleStore(folder) as store:
        sums = store.head.statistics
        assert not fails(store, certificate)
        for _ in range(places):
            values = rng.choice([*sums.group_sums().values(), sums.moments.view(-1)])
            kept = (
                range(values.numel())
                if values.numel() < J * J
                else [i for i in range(values.numel()) if i >= J * J or i % J <= i // J]
            )
            i, bit = rng.choice(kept), 1 << rng.randrange(62)
            values[i] ^= bit
            assert fails(store, certificate), (i, bit)
            values[i] ^= bit
        assert not fails(store, certificate)


@pytest.mark.parametrize("places", [20, pytest.param(340, marks=pytest.mark.slow)])
def test_a_flipped_bit_of_the_weights_is_found_beyond_the_tolerance(tmp_path: Path, places: int) -> None:
    folder, certificate = filled(tmp_path, "totals")
    rng, found = random.Random(0), 0
    with SampleStore(folder) as store:
        head = store.head
        solution, right = head._solver.solution, head.w.clone()
        for _ in range(places):
            i, k, bit = rng.randrange(J), rng.randrange(K), rng.randrange(64)
            (whole,) = struct.unpack("<Q", struct.pack("<d", float(right[i, k])))
            (value,) = struct.unpack("<d", struct.pack("<Q", whole ^ (1 << bit)))
            wrong = right.clone()
            wrong[i, k] = value
            solution.w, head._state_version = wrong, head._state_version + 1
            off = float((wrong - right).abs().max() / right.abs().max())
            if not WEIGHT_TOLERANCE / 2 < off < WEIGHT_TOLERANCE * 2:
                assert fails(store, certificate) == (not off < WEIGHT_TOLERANCE), (i, k, bit)
                found += off > WEIGHT_TOLERANCE
            solution.w, head._state_version = right.clone(), head._state_version + 1
        assert found > places / 4
        assert not fails(store, certificate)
