"""Inputs nobody meant: events, certificates and store files with random damage end in success or a named error.

Success means that everything which can be read is what was written. ``pytest -m slow tests/test_fuzz.py`` runs 10,000 of them.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.crafted import mutate
from torchlssvm import FixedPoint, LSSVMHead, TorchLSSVMError, VerificationError, verify
from torchlssvm.errors import StoreError
from torchlssvm.events import Add, Relabel, Remove, Replace, from_primitives, to_primitives
from torchlssvm.store import SampleStore

J, K, N = 12, 3, 40
FEW, MANY = 150, pytest.param(4000, marks=pytest.mark.slow)
FILES = [120, pytest.param(2000, marks=pytest.mark.slow)]


def make(path: Path) -> SampleStore:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, J, generator=generator), torch.arange(N) % K
    store = SampleStore(path, head=LSSVMHead(J, K, grid=FixedPoint(8.0)), fingerprint="net")
    store.apply(
        Add(ids=[f"s{i}" for i in range(N)], x=x, y=y, subject=[f"user-{i % 5}" for i in range(N)], event_id="1")
    )
    store.apply(Remove(subject="user-0", event_id="2"))
    store.apply(Relabel(ids=["s1"], y=[0], event_id="3"))
    return store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that was closed, and beside it the same with its log still there."""
    root = tmp_path_factory.mktemp("fuzz")
    store = make(root / "closed")
    shutil.copytree(root / "closed", root / "live")
    store.close()
    return root


@pytest.fixture(scope="module")
def truth(folder: Path) -> dict[str, Any]:
    shutil.copytree(folder / "closed", folder / "truth")
    with SampleStore(folder / "truth") as store:
        return probe(store)


def probe(store: SampleStore) -> dict[str, Any]:
    """Everything that can be read."""
    rows = store.get(store.find())
    return {
        "ids": rows.ids,
        "subjects": rows.subjects,
        "y": rows.y.tolist(),
        "x": rows.x.tolist(),
        "nonces": rows.nonces,
        "digest": store.head.digest(),
        "history": [vars(e) for e in store.history()],
        "fingerprint": store.fingerprint,
        "config": store.head.config(),
        "by subject": {s: store.find(subject=s) for s in store.subjects()},
        "by label": [store.find(label=k) for k in range(K)],
        "certificate": store.certificate("2").commitment,
    }


# -- files -------------------------------------------------------------------------------------------------------------


def damage(path: Path, rng: random.Random) -> None:
    """Flip a few bits of a file, or cut it, or overwrite a piece."""
    content = bytearray(path.read_bytes())
    if not content:
        return
    kind = rng.random()
    if kind < 0.8:
        for _ in range(rng.choice([1, 1, 2, 5])):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind < 0.9:
        del content[rng.randrange(len(content)) :]
    else:
        at = rng.randrange(len(content))
        content[at : at + rng.randrange(1, 300)] = rng.randbytes(rng.randrange(1, 300))
    path.write_bytes(content)


@pytest.mark.parametrize("count", FILES)
@pytest.mark.parametrize("state", ["closed", "live"])
def test_damaged_files(folder: Path, truth: dict[str, Any], tmp_path: Path, state: str, count: int) -> None:
    rng, fine = random.Random(count), 0
    for _ in range(count):
        target = tmp_path / "store"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder / state, target)
        (target / "samples.sqlite-shm").unlink(missing_ok=True)
        files = sorted(p for p in target.iterdir() if p.stat().st_size)
        weights = [p.stat().st_size + 2000 for p in files]
        damage(rng.choices(files, weights)[0], rng)
        before = {p.name: p.read_bytes() for p in target.iterdir()}
        try:
            with SampleStore(target) as store:
                assert probe(store) == truth
                store.recompute()
                assert store.apply(Remove(subject="user-3")).samples == 8
                assert store.head.digest() == store.recompute()[1]
            fine += 1
        except StoreError:
            if not (target / "samples.sqlite").exists():
                assert "samples.sqlite" not in before
        except VerificationError:
            pass
    assert 0 < fine < count  # a flipped bit in an empty page harms nobody; one in a record is found


def test_a_key_that_is_gone_is_not_made_anew(folder: Path, tmp_path: Path) -> None:
    """The journal has the commitment under the old one: a certificate with another would not be the store's."""
    shutil.copytree(folder / "closed", tmp_path / "store")
    with closing(sqlite3.connect(tmp_path / "store" / "samples.sqlite")) as db, db:
        assert db.execute("DELETE FROM meta WHERE name LIKE 'opening/%'").rowcount
    with SampleStore(tmp_path / "store") as store, pytest.raises(StoreError, match="key of position"):
        store.certificate("2")


# -- certificates ------------------------------------------------------------------------------------------------------


@pytest.fixture
def live(tmp_path: Path) -> Iterator[SampleStore]:
    with make(tmp_path / "s") as store:
        yield store


@pytest.mark.parametrize("count", [FEW, pytest.param(3000, marks=pytest.mark.slow)])
def test_altered_certificates(live: SampleStore, count: int) -> None:
    pytest.importorskip("cryptography", reason="signatures need the package cryptography")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, rng = Ed25519PrivateKey.generate(), random.Random(count)
    signed = live.certificate("2", key=key)
    good = json.loads(signed.to_json())
    digest = live.head.digest()
    for _ in range(count):
        bad = mutate(good, rng)
        text: Any = bad
        if rng.random() < 0.3:
            data = bytearray(json.dumps(good).encode())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            text = bytes(data)
            try:
                bad = json.loads(text)
            except ValueError:
                bad = None
        if not same_but_hint(bad, good):
            with pytest.raises(VerificationError):
                verify(text, public_key=key.public_key())
        statement = mutate(signed.statement(), rng)
        payload = base64.b64encode(canonical_or_nothing(statement)).decode()
        try:
            verify(good | {"payload": payload, "signatures": []}, head=live.head, store=live, allow_unsigned=True)
        except VerificationError:
            continue
        # what the store cannot know: the issuer's words, which only a signature protects
        words = ("scope", "time", "library", "compacted", "files", "requests")
        mine, theirs = signed.statement(), statement
        for one in (mine, theirs):
            one["predicate"] = {k: v for k, v in one["predicate"].items() if k not in words}
        assert mine == theirs
    assert live.head.digest() == digest


def same_but_hint(bad: Any, good: dict[str, Any]) -> bool:
    """True if an envelope is another one in its key id only, which nobody believes."""
    try:
        hint = bad["signatures"][0].get("keyid", "")
        plain = {**bad, "signatures": [{**bad["signatures"][0], "keyid": good["signatures"][0]["keyid"]}]}
    except (AttributeError, LookupError, TypeError):
        return False
    return plain == good and isinstance(hint, str) and len(bad["signatures"]) == 1


def canonical_or_nothing(data: Any) -> bytes:
    try:
        return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError):
        return b""


# -- events ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [FEW, MANY])
def test_fuzzed_events(live: SampleStore, count: int) -> None:
    rng = random.Random(count)
    generator = torch.Generator().manual_seed(count)

    def some_ids(n: int, new: bool = False) -> list[str]:
        if rng.random() < 0.1:
            return [f"s{rng.randrange(60)}" for _ in range(n)]
        return [f"n{rng.getrandbits(32)}" for _ in range(n)] if new else rng.sample(live.find(), n)

    def features(n: int) -> torch.Tensor:
        width = J if rng.random() < 0.9 else rng.randrange(1, 20)
        return torch.randn(n, width, generator=generator) * rng.choice([1.0] * 8 + [100.0, float("nan")])

    def labels(n: int) -> Any:
        return [rng.randrange(K) if rng.random() < 0.95 else rng.choice([-1, K, 10**12]) for _ in range(n)]

    makers: list[Callable[[int], Any]] = [
        lambda n: Add(ids=some_ids(n, new=True), x=features(n), y=labels(n), subject=f"user-{rng.randrange(7)}"),
        lambda n: Add(ids=some_ids(8, new=True), x=features(8), y=labels(8), subject=f"user-{rng.randrange(7)}"),
        lambda n: Remove(ids=some_ids(n)),
        lambda n: Remove(subject=f"user-{rng.randrange(9)}"),
        lambda n: Relabel(ids=some_ids(n), y=labels(n)),
        lambda n: Relabel(subject=f"user-{rng.randrange(9)}", y=rng.randrange(K + 1)),
        lambda n: Replace(ids=some_ids(n), x=features(n)),
        lambda n: Replace(ids=some_ids(n), x=features(n), y=labels(n)),
    ]
    applied = refused = 0
    for _ in range(count):
        before = (live.head.digest(), live.position, len(live))
        try:
            events = [rng.choice(makers)(rng.randint(1, 3)) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
            if rng.random() < 0.3:
                events = [from_primitives(mutate(to_primitives(e), rng)) for e in events]
            live.apply(events)
            applied += 1
        except (ValueError, TorchLSSVMError):
            refused += 1
            assert (live.head.digest(), live.position, len(live)) == before
    assert applied > count / 10
    assert refused > count / 10
    assert live.recompute() == (len(live), live.head.digest())
    live.history()
