"""A removal is checked when it is made: what is not held, bit for bit, is refused at once, with nothing changed."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchlssvm import FixedPoint, LSSVMHead, RemovalError
from torchlssvm.distributed import Delta, merge
from torchlssvm.functional.gram import exact_products
from torchlssvm.functional.sample_identity import fold_of, key_factors, row_names, row_words, secret_vectors

J, K, N = 40, 3, 120
GRID = FixedPoint(8.0)


def samples(n: int = N, J: int = J) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(n, J, generator=generator).clamp(-4, 4), torch.arange(n) % K


X, Y = samples()


def head(**options: Any) -> LSSVMHead:
    return LSSVMHead(J, K, **({"grid": GRID} | options))


WRONG: dict[str, Callable[[LSSVMHead], Any]] = {
    "rounded to bfloat16": lambda h: h.remove(X[:5].bfloat16(), Y[:5]),
    "a little noise": lambda h: h.remove(X[:5] + 1e-5, Y[:5]),
    "wrong labels": lambda h: h.remove(X[:5], (Y[:5] + 1) % K),
    "the same row twice": lambda h: h.remove(X[[3, 4, 3]], Y[[3, 4, 3]]),
    "too large a weight": lambda h: h.remove(X[:2], Y[:2], weight=torch.tensor([1, 2])),
    "one of many": lambda h: h.remove(torch.cat([X[:100], X[:1] + 1]), torch.cat([Y[:100], Y[:1]])),
    "relabelled from another label": lambda h: h.relabel(X[:2], (Y[:2] + 1) % K, Y[:2]),
    "replaced, never held": lambda h: h.replace(-X[:2], Y[:2], X[:2], Y[:2]),
    "removed and added in one call": lambda h: h.update(add=(X[:1] + 1, Y[:1]), remove=(X[:1] + 1, Y[:1])),
}


@pytest.mark.parametrize("options", [{}, {"multiclass": "ovo", "grid": "auto"}], ids=str)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_held_is_refused_at_once(wrong: str, options: dict[str, Any]) -> None:
    h, twin = (head(**options).add(X, Y) for _ in range(2))
    with pytest.raises(RemovalError, match=r"row \d+ is (not )?held.*Nothing was changed"):
        WRONG[wrong](h)
    assert h.digest() == twin.digest()
    torch.testing.assert_close(h.w, twin.w, rtol=0, atol=0)
    assert h.remove(X[:7], Y[:7]).digest() == twin.remove(X[:7], Y[:7]).digest()


def test_the_message_names_the_row_and_the_label() -> None:
    with pytest.raises(RemovalError, match=r"row 2 is not held with label 0 \(it is held with label 2\).*SampleStore"):
        head().add(X, Y).remove(X[:3], torch.tensor([0, 1, 0]))
    with pytest.raises(RemovalError, match=r"row 0 is held 1 time, and was to be removed 3 times"):
        head().add(X, Y).remove(X[:1], Y[:1], weight=[3])


def test_weights_add_up() -> None:
    h = head().add(X[:4], Y[:4], weight=[1, 2, 3, 4]).add(X[:4], Y[:4])
    h.remove(X[:4], Y[:4], weight=[2, 3, 1, 5])
    assert h.digest() == head().add(X[2:3], Y[2:3], weight=[3]).digest()
    with pytest.raises(RemovalError, match="row 0 is not held"):
        h.remove(X[:1], Y[:1])


@pytest.mark.parametrize("options", [{}, {"per_class": True}, {"folds": 3}], ids=str)
def test_rows_added_in_bulk_are_known_whatever_they_are_summed_by(options: dict[str, Any]) -> None:
    """Row hashes are formed chunk by chunk and class by class, on the way into the sums."""
    x, y = samples(2500)
    weight = torch.arange(2500) % 3 + 1
    ids = {"ids": range(2500)} if "folds" in options else {}
    h = head(**options).add(x, y, weight=weight, **ids)
    pick = torch.randperm(2500, generator=torch.Generator().manual_seed(0))
    some = {"ids": pick[:2000].tolist()} if ids else {}
    with pytest.raises(RemovalError, match="row 1999 is held"):
        h.remove(x[pick[:2000]], y[pick[:2000]], weight=weight[pick[:2000]] + (torch.arange(2000) == 1999), **some)
    h.remove(x[pick[:2000]], y[pick[:2000]], weight=weight[pick[:2000]], **some)
    rest = {"ids": pick[2000:].tolist()} if ids else {}
    assert h.digest() == head(**options).add(x[pick[2000:]], y[pick[2000:]], weight[pick[2000:]], **rest).digest()


def test_a_removal_in_another_fold_names_the_id() -> None:
    h = head(folds=3).add(X[:1], Y[:1], ids=["a"])
    other = next(str(i) for i in range(99) if fold_of([str(i)], 3) != fold_of(["a"], 3))
    with pytest.raises(RemovalError, match=f"id '{other}'"):
        h.remove(X[:1], Y[:1], ids=[other])


class Rounded(TorchDispatchMode):
    """Counts the numbers that are rounded."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.numbers += args[0].numel() if func.overloadpacket in (torch.ops.aten.round, torch.ops.aten.round_) else 0
        return func(*args, **(kwargs or {}))


def test_rows_that_are_added_go_on_the_grid_once() -> None:
    x, y = samples(2500)
    with Rounded() as rounded:
        head().add(x, y)
    assert rounded.numbers == x.numel()


def test_float_targets_are_part_of_the_row() -> None:
    t = torch.randint(-512, 512, (N, K), generator=torch.Generator().manual_seed(0)) / 256
    h = head().add(X, t)
    with pytest.raises(RemovalError, match="row 1 is not held"):
        h.remove(X[:2], torch.stack([t[0], t[0]]))
    h.add_classes(1)
    wider = torch.nn.functional.pad(t, (0, 1))
    h.remove(X[:2], wider[:2])
    assert h.n == N - 2


def test_copies_and_checkpoints_check_too() -> None:
    first = head().add(X, Y)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    loaded = head()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for h in (copy.deepcopy(first), pickle.loads(pickle.dumps(first)), loaded):
        assert h.unchecked is None
        h.remove(X[:2], Y[:2])
        with pytest.raises(RemovalError, match="row 0 is not held"):
            h.remove(X[:1], Y[:1])
    assert first.n == N


def test_a_damaged_table_is_refused() -> None:
    state = head().add(X, Y).state_dict()
    state["membership"][-8] += 1
    with pytest.raises(Exception, match="checksum"):
        head().load_state_dict(state)


def test_merged_heads_know_all_rows() -> None:
    a, b = head().add(X[:60], Y[:60]), head().add(X[40:], Y[40:])
    a.merge(b)
    assert a.unchecked is None
    a.remove(X[45:50], Y[45:50]).remove(X[45:50], Y[45:50])  # held twice
    with pytest.raises(RemovalError):
        a.remove(X[45:46], Y[45:46])
    a.remove(X[:1], Y[:1]).remove(X[100:], Y[100:])
    with pytest.raises(RemovalError, match="1 row"):
        b -= head().add(X[39:45], Y[39:45])
    b -= head().add(X[40:], Y[40:])
    assert (b.n, b.unchecked) == (0, None)


def test_rows_under_another_key_are_said_to_be_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    a, other = head().add(X, Y), head().add(X[:20], Y[:20])
    other._rows.own_key()
    monkeypatch.setattr(other._rows, "key", bytes(32))
    a -= other
    assert a.unchecked is not None
    assert "another key" in str(a.unchecked)
    assert a.digest() == head().add(X[20:], Y[20:]).digest()
    twin = copy.deepcopy(a)
    with pytest.raises(RemovalError):
        a -= head().add(torch.full((30, J), 3.0), Y[:30])
    assert a.digest() == twin.digest()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: head(membership=False).add(X, Y), "membership=False"),
        (lambda: head(grid=None).add(X, Y), "grid=None"),
        (lambda: merge(head(), Delta(head().add(X, Y).statistics)), "not known"),
    ],
)
def test_where_rows_are_not_known_the_head_says_so_and_tests_within_the_call(make: Any, why: str) -> None:
    h = make()
    assert h.unchecked is not None
    assert why in h.unchecked
    before = h(X)
    with pytest.raises(RemovalError, match="Nothing was changed"):
        h.remove(torch.full((1, J), 3.9), Y[:1])
    torch.testing.assert_close(h(X), before, rtol=0, atol=1e-12)
    h.remove(X[:3], Y[:3])
    assert h.n == N - 3


def test_an_emptied_head_checks_again() -> None:
    h = merge(head(), Delta(head().add(X, Y).statistics))
    assert h.unchecked is not None
    h.remove(X, Y)
    assert h.unchecked is None
    h.add(X[:4], Y[:4])
    with pytest.raises(RemovalError, match="row 0 is not held"):
        h.remove(X[5:6], Y[5:6])


def test_a_forgotten_class_is_not_held() -> None:
    h = head(per_class=True).add(X, Y).forget_class(1)
    with pytest.raises(RemovalError, match="row 0 is not held"):
        h.remove(X[1:2], Y[1:2])
    h.remove(X[:1], Y[:1])
    assert h.n == 79


def test_nothing_that_stays_confirms_a_guess_about_a_removed_row() -> None:
    """The attack succeeds on rows that are present, which the documentation says, and on no removed one."""
    h = head().add(X, Y)
    guess = row_names(words_of_a_guess(h), np.array([[-1, int(Y[0])]]), h._rows.own_key())[0][:16]
    assert guess in h.state_dict()["membership"].numpy().tobytes()
    h.remove(X[:1], Y[:1])
    for left in (h.state_dict()["membership"].numpy().tobytes(), pickle.dumps(h)):
        assert guess[:8] not in left
        assert guess[8:] not in left


def words_of_a_guess(h: LSSVMHead) -> NDArray[np.int64]:
    """What whoever has the key computes from a guess of the first row."""
    key, here = h._rows.own_key(), torch.device("cpu")
    return row_words(GRID.quantize(X[:1]), secret_vectors(key, J), key_factors(key, here)).numpy()


def test_rows_that_come_one_by_one_do_not_pile_up() -> None:
    h = LSSVMHead(4, K, grid=FixedPoint(8.0), rho=1.0)
    x, y = torch.randn(700, 4).clamp(-4, 4), torch.arange(700) % K
    for i in range(700):
        h.add(x[i : i + 1], y[i : i + 1])
    assert len(h._rows.waiting) <= 256
    assert (
        h.remove(x[:350], y[:350]).digest()
        == LSSVMHead(4, K, grid=FixedPoint(8.0), rho=1.0).add(x[350:], y[350:]).digest()
    )
    with pytest.raises(RemovalError, match="row 0 is not held"):
        h.remove(x[:1], y[:1])


def test_products_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    for width in (3, 2048, 5000):
        rows = torch.randint(-(2**26), 2**26 + 1, (4, width), generator=generator).double()
        rows[0] = 2**26
        vectors = secret_vectors(b"k" * 32, width)
        vectors[0] = 2**16  # at worst
        exact = [[sum(int(a) * int(b) for a, b in zip(r, v, strict=True)) for v in vectors] for r in rows]
        assert exact_products(rows, vectors).tolist() == exact


def test_vectors_of_wider_rows_begin_alike() -> None:
    assert torch.equal(secret_vectors(b"a" * 32, 9)[:, :5], secret_vectors(b"a" * 32, 5))
    assert not torch.equal(secret_vectors(b"a" * 32, 5), secret_vectors(b"b" * 32, 5))


OPERATION = st.tuples(st.sampled_from(["add", "remove", "relabel", "wrong"]), st.integers(0, 7), st.integers(1, 3))


def play(history: list[tuple[str, int, int]], options: dict[str, Any]) -> None:
    """Random changes with wrong removals among them; a Counter of rows is the truth."""
    x, y = samples(8, 5)
    h, held = LSSVMHead(5, K, grid=GRID, **({"rho": 1.0} | options)), Counter()
    for verb, i, times in history:
        label = int(y[i])
        rows, labels = x[[i] * times], y[[i] * times]
        digest = h.digest()
        fine = True
        try:
            if verb == "add":
                h.add(rows, labels)
                held[i, label] += times
            elif verb == "remove":
                fine = held[i, label] >= times
                h.remove(rows, labels)
                held[i, label] -= times
            elif verb == "relabel":
                other = (label + 1) % K
                fine = held[i, label] >= times
                h.relabel(rows, labels, (labels + 1) % K)
                held[i, label] -= times
                held[i, other] += times
                h.relabel(rows, (labels + 1) % K, labels)
                held[i, other] -= times
                held[i, label] += times
            else:
                fine = False
                h.remove(rows + 2.0**-17, labels)
        except RemovalError:
            assert not fine
            assert h.digest() == digest
        else:
            assert fine
    fresh = LSSVMHead(5, K, grid=GRID, **({"rho": 1.0} | options))
    for (i, label), times in held.items():
        if times:
            fresh.add(x[[i] * times], torch.full((times,), label))
    assert h.digest() == fresh.digest()
    h._rows.read_waiting()
    assert len(h._rows.held) == sum(n > 0 for n in held.values())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(OPERATION, max_size=14), st.sampled_from([{}, {"per_class": True}]))
def test_random_histories_with_wrong_removals(history: list[tuple[str, int, int]], options: dict[str, Any]) -> None:
    play(history, options)


@pytest.mark.slow
def test_ten_thousand_histories_with_wrong_removals() -> None:
    generator = np.random.default_rng(0)
    verbs = ["add", "add", "remove", "relabel", "wrong"]
    for _ in range(10_000):
        picks = generator.integers((5, 8, 3), size=(int(generator.integers(3, 12)), 3))
        play([(verbs[v], int(i), int(t) + 1) for v, i, t in picks], {})


def test_a_wide_batch_far_from_the_origin_is_no_removal() -> None:
    """Nothing was removed: the system is solved although Theorem 1 cannot be used on it."""
    generator = torch.Generator().manual_seed(0)
    x = 1e10 * (1 + 1e-3 * torch.randn(2, 2048, generator=generator))
    h = LSSVMHead(2048, 3, rho=1.0).add(x, torch.tensor([0, 1]))
    assert h.grid is not None
    kept = h.grid.snap(x)
    d = (kept[0] - kept[1]) / 2  # centred rows are d and -d: w = d 2 / (rho + 2 d^2) for the first class
    w = d * 2 / (1 + 2 * (d @ d))
    torch.testing.assert_close(h.w[:, 0], w, rtol=1e-4, atol=0)
    torch.testing.assert_close(h(x)[:, 0], torch.tensor([1.0, -1.0], dtype=torch.float64), rtol=1e-4, atol=0)
