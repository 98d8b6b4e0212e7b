"""Events from sources to heads, without a Trainer: each exactly once, bad ones apart, in any partition into bursts."""

from __future__ import annotations

import json
import queue
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.faults import Failing, replaced
from tests.support.lightning_tools import J, K, module, samples, truth
from torchlssvm import KernelLSSVM, LSSVMHead
from torchlssvm.corrections import Corrector, DeadLetters
from torchlssvm.corrections.event_sources import FileSource, Item, IterableSource, QueueSource, as_source
from torchlssvm.corrections.head_samples import hash_samples
from torchlssvm.corrections.seen_samples import SeenSamples
from torchlssvm.errors import StoreError
from torchlssvm.events import Add, Event, Relabel, Remove, Replace, to_primitives
from torchlssvm.kernels import RBF
from torchlssvm.store import SampleStore


def head() -> LSSVMHead:
    return module().head  # type: ignore[no-any-return]


class Model:
    """What should be held: id -> (x, y), and which events apply, one by one."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[torch.Tensor, int]] = {}
        self.seen: set[str] = set()

    def apply(self, event: Event) -> str:
        if event.event_id in self.seen:
            return "repeated"
        ids = list(event.ids)
        if isinstance(event, Add):
            if any(i in self.held for i in ids):
                return "refused"
            self.held |= {i: (event.x[k], int(event.y[k])) for k, i in enumerate(ids)}
        else:
            x = event.x_old if isinstance(event, Replace) else event.x
            y = event.y if isinstance(event, Remove) else event.y_old
            same = all(
                i in self.held and torch.equal(self.held[i][0], x[k]) and self.held[i][1] == int(y[k])
                for k, i in enumerate(ids)
            )
            if not same:
                return "refused"
            for k, i in enumerate(ids):
                if isinstance(event, Remove):
                    del self.held[i]
                elif isinstance(event, Relabel):
                    self.held[i] = (self.held[i][0], int(event.y[k]))
                else:
                    self.held[i] = (event.x[k], int(event.y_old[k]) if event.y is None else int(event.y[k]))
        self.seen.add(event.event_id)
        return "applied"

    def digest(self) -> str:
        rows = list(self.held.values())
        if not rows:
            return head().digest()
        return truth(torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])).digest()


X, Y = samples(12)


@st.composite
def scripts(draw: Any) -> list[Event]:
    """Events over few ids and rows, so that they often clash; some are sent twice."""
    events: list[Event] = []
    for n in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["add", "add", "remove", "relabel", "replace", "again"]))
        ids = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=2, unique=True))
        rows = [draw(st.integers(0, 3)) for _ in ids]
        x, y = X[rows], Y[rows]
        new = (y + draw(st.integers(0, 2))) % K
        name = f"e{n}"
        if kind == "add":
            events.append(Add(ids=ids, x=x, y=y, event_id=name))
        elif kind == "remove":
            events.append(Remove(ids=ids, x=x, y=y, event_id=name))
        elif kind == "relabel":
            events.append(Relabel(ids=ids, x=x, y_old=y, y=new, event_id=name))
        elif kind == "replace":
            events.append(Replace(ids=ids, x_old=x, y_old=y, x=X[[r + 4 for r in rows]], event_id=name))
        elif events:
            events.append(draw(st.sampled_from(events)))
    return events


@given(scripts(), st.lists(st.integers(1, 5), min_size=1, max_size=5), st.booleans())
def test_any_bursts_do_what_the_events_say_one_by_one(events: list[Event], sizes: list[int], restart: bool) -> None:
    model, corrector = Model(), Corrector(head())
    expected = [model.apply(e) for e in events]
    found, at, turn = [], 0, 0
    while at < len(events):
        size = sizes[turn % len(sizes)]
        found += [o.status for o in corrector.apply(events[at : at + size])]
        at, turn = at + size, turn + 1
        if restart:  # as after a checkpoint: head and corrector are loaded together
            other = head()
            other.load_state_dict(corrector.head.state_dict())
            again = Corrector(other)
            again.load_state_dict(corrector.state_dict())
            corrector = again
    assert found == expected
    assert corrector.head.digest() == model.digest()


@given(scripts())
def test_a_kernel_machine_is_corrected_by_ids(events: list[Event]) -> None:
    machine = KernelLSSVM(RBF(gamma=0.3), num_classes=K)
    corrector, held = Corrector(machine), {}
    for event in events:
        status = corrector.apply([event])[0].status
        if status == "applied":
            for k, name in enumerate(event.ids):
                if isinstance(event, Remove):
                    del held[name]
                elif isinstance(event, Relabel):
                    held[name] = (held[name][0], event.y[k])
                elif isinstance(event, Add):
                    held[name] = (event.x[k], event.y[k])
                else:
                    held[name] = (event.x[k], event.y_old[k])
    assert len(machine.ids) == len(held)
    if held:
        fresh = KernelLSSVM(RBF(gamma=0.3), num_classes=K)
        fresh.add(torch.stack([x for x, _ in held.values()]), torch.stack([y for _, y in held.values()]))
        torch.testing.assert_close(machine(X), fresh(X), atol=1e-8, rtol=1e-8)


@given(st.lists(st.integers(0, 9), max_size=4, unique=True), st.integers(1, 12))
def test_bad_events_in_a_burst_are_told_apart(bad: list[int], count: int) -> None:
    """NaN, a wrong width, a label out of range, a number that the grid does not take: what only the head can tell."""
    corrector = Corrector(head())
    events = []
    for n in range(count):
        x, y = X[n % 12 : n % 12 + 1].clone(), Y[n % 12 : n % 12 + 1]
        if n in bad:
            kind = n % 3
            x, y = (x, torch.tensor([99])) if kind == 0 else (torch.ones(1, J + 1), y) if kind == 1 else (x * 1e6, y)
        events.append(Add(ids=[str(n)], x=x, y=y))
    status = [o.status for o in corrector.apply(events)]
    assert status == ["refused" if n in bad else "applied" for n in range(count)]
    good = [n % 12 for n in range(count) if n not in bad]
    assert corrector.head.digest() == (truth(X[good], Y[good]) if good else head()).digest()


def test_with_a_store_subjects_do_and_nothing_is_carried(tmp_path: Path) -> None:
    with SampleStore(tmp_path / "s", head=head()) as store:
        corrector = Corrector(store.head, store)
        events = [
            Add(ids=[str(i) for i in range(12)], x=X, y=Y, subject=[f"u{i % 3}" for i in range(12)]),
            Remove(subject="u1"),
            Remove(subject="nobody"),
            Relabel(ids=["0"], y=[2]),
        ]
        assert [o.status for o in corrector.apply(events)] == ["applied", "applied", "refused", "applied"]
        assert [o.status for o in corrector.apply(events[:2])] == ["repeated", "repeated"]
        keep = torch.tensor([i % 3 != 1 for i in range(12)])
        y = Y.clone()
        y[0] = 2
        assert store.head.digest() == truth(X[keep], y[keep]).digest()
        with SampleStore(tmp_path / "s") as other:
            other.apply(Remove(ids=["3"]))
        followed = corrector.follow(3)
        assert [(o.kind, o.samples) for o in followed] == [("remove", 1)]
        keep[3] = False
        assert corrector.head.digest() == truth(X[keep], y[keep]).digest()


def test_waiting_events_keep_their_order_if_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10**9, 0, -1))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    for label in (1, 2, 0):
        with SampleStore(tmp_path / "s", head=head()) as store:
            corrector = Corrector(store.head, store, SeenSamples(store))
            statuses = corrector.apply([Relabel(ids=["late"], y=[label]), Relabel(ids=["late"], y=[2 - label])])
            assert [o.status for o in statuses] == ["waiting", "waiting"]
    with SampleStore(tmp_path / "s") as store:
        corrector = Corrector(store.head, store, SeenSamples(store))
        assert [int(waiting.event.y) for waiting in corrector.queue] == [1, 1, 2, 0, 0, 2]
        corrector.learn([Add(ids=["late"], x=X[:1], y=[0])])
        assert store.get(["late"]).y.tolist() == [2]


def test_without_a_store_subjects_cannot_be_known() -> None:
    corrector = Corrector(head())
    outcomes = corrector.apply([Remove(subject="u1"), Remove(ids=["a"]), Relabel(ids=["a"], y=[1])])
    assert all(o.status == "refused" for o in outcomes)
    assert "no store" in outcomes[0].reason
    assert "carry the samples" in outcomes[1].reason


def test_a_head_that_learned_elsewhere_lets_unknown_ids_go() -> None:
    learned = truth(X, Y)
    corrector = Corrector(learned)
    wrong = Remove(ids=["x"], x=X[:1] + 5, y=Y[:1])
    right = Remove(ids=["a"], x=X[:1], y=Y[:1])
    assert [o.status for o in corrector.apply([right, wrong])] == ["applied", "refused"]
    assert learned.digest() == truth(X[1:], Y[1:]).digest()


# -- sources -----------------------------------------------------------------------------------------------------------


def line(event: Event) -> str:
    return json.dumps(to_primitives(event)) + "\n"


def test_a_file_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    source = FileSource(path)
    assert source.read(10) == []
    text = line(Remove(ids=["a"])) + "\n# a comment\n" + line(Remove(ids=["ä"])) + "nonsense\n" + '{"kind": "burn"}\n'
    data = text.encode()
    seen: list[Item] = []
    for n in range(len(data)):  # byte by byte, as a writer might
        with path.open("ab") as file:
            file.write(data[n : n + 1])
        seen += source.read(10)
    assert [item.event.ids[0] if item.event else item.reason[:8] for item in seen] == ["a", "ä", "not JSON", "not an e"]
    assert source.cursor == len(data)
    again = FileSource(path)
    again.seek(len(line(Remove(ids=["a"]))))
    assert [i.event.ids for i in again.read(1) if i.event] == [("ä",)]
    path.write_bytes(data[:10])
    again.seek(len(data))
    with pytest.raises(StoreError, match="shorter"):
        again.read(1)
    path.unlink()
    with pytest.raises(StoreError, match="no longer exists"):
        source.read(1)


def test_the_id_made_for_a_line_confirms_no_guess_about_it(tmp_path: Path) -> None:
    """The same line at the same place of another file has another id: nothing but the key beside the file links them."""
    found = []
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"kind": "remove", "ids": ["alice"]}\n')
        (item,) = FileSource(tmp_path / name).read(9)
        found.append(item.event.event_id)
        assert FileSource(tmp_path / name).read(9)[0].event.event_id == found[-1]  # the same each time
    assert found[0] != found[1]
    (tmp_path / "a.jsonl.key").replace(tmp_path / "b.jsonl.key")
    assert FileSource(tmp_path / "b.jsonl").read(9)[0].event.event_id == found[0]
    (tmp_path / "b.jsonl.key").write_bytes(b"short")
    with pytest.raises(StoreError, match="put the key back"):
        FileSource(tmp_path / "b.jsonl").read(9)
    (tmp_path / "b.jsonl").write_text('{"kind": "remove", "ids": ["alice"], "event_id": "e"}\n')
    assert FileSource(tmp_path / "b.jsonl").read(9)[0].event.event_id == "e"  # needs no key


def test_a_lack_of_memory_is_not_taken_for_the_events_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [Add(ids=["a"], x=X[:1], y=Y[:1]), Add(ids=["b"], x=X[1:2], y=Y[1:2])]
    with SampleStore(tmp_path / "s", head=head()) as store:
        for corrector in (Corrector(head()), Corrector(store.head, store)):
            lacking = replaced(LSSVMHead, "add", Failing(torch.OutOfMemoryError("no memory")))
            with lacking, pytest.raises(torch.OutOfMemoryError):
                corrector.apply(events)
            assert [o.status for o in corrector.apply(events)] == ["applied", "applied"]
            assert corrector.head.digest() == truth(X[:2], Y[:2]).digest()


@given(st.integers(0, 9), st.lists(st.integers(1, 4), max_size=4), st.integers(0, 9), st.booleans())
def test_an_iterable_goes_on_where_the_cursor_says(n: int, reads: list[int], back: int, fresh: bool) -> None:
    events = [Remove(ids=[str(i)]) for i in range(n)]
    source = IterableSource(events)
    taken = [i.event.ids[0] for size in reads for i in source.read(size)]
    assert taken == [str(i) for i in range(min(n, sum(reads)))]
    place = min(back, n)
    source = IterableSource(iter(events)) if fresh else source
    source.seek(place)
    assert [i.event.ids[0] for i in source.read(100)] == [str(i) for i in range(place, n)]
    assert source.cursor == n


def test_an_iterator_does_not_go_back() -> None:
    source = IterableSource(iter([Remove(ids=["a"]), Remove(ids=["b"])]))
    source.read(2)
    with pytest.raises(StoreError, match="cannot go back"):
        source.seek(1)


def test_a_queue_is_emptied_without_waiting() -> None:
    events: Any = queue.Queue()
    source = as_source(events)
    assert isinstance(source, QueueSource)
    assert source.read(5) == []
    for i in range(3):
        events.put(to_primitives(Remove(ids=[str(i)])))
    events.put(17)
    items = source.read(10)
    assert [i.event is not None for i in items] == [True, True, True, False]
    assert source.cursor == 4


@pytest.mark.parametrize("bad", [3, None, b"x", {"kind": "remove"}])
def test_what_is_no_source_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="source must be"):
        as_source(bad)


def test_a_resumed_run_writes_no_letter_twice(tmp_path: Path) -> None:
    path, event = tmp_path / "dead.jsonl", Remove(ids=["a"], event_id="e")
    DeadLetters(path).write(Item(event), "for a reason")
    with path.open("a") as file:
        file.write('{"time": "cut sh\n')
    again = DeadLetters(path)
    again.write(Item(event), "for a reason")
    again.write(Item(None, "nonsense"), "not JSON")
    again.write(Item(None, "nonsense"), "not JSON")
    again.write(Item(event), "for another one")
    lines = path.read_text().splitlines()
    assert [json.loads(line)["reason"] for line in (lines[0], *lines[2:])] == [
        "for a reason",
        "not JSON",
        "for another one",
    ]


def test_a_hash_is_of_the_numbers_not_of_their_dtype() -> None:
    x, y = torch.randn(5, 7), torch.arange(5) % 2
    half = x.to(torch.bfloat16)
    assert hash_samples(x, y) == hash_samples(x.double(), y.double())
    assert hash_samples(half, y) == hash_samples(half.float(), y)
    assert len({*hash_samples(x, y), *hash_samples(x, y + 1), *hash_samples(x.double() + 1e-12, y)}) == 15


@pytest.mark.parametrize("names", ["bcd", "b"])
@pytest.mark.parametrize("how", ["renamed", "rewritten"])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_file_with_other_content_is_read_from_its_start(tmp_path: Path, how: str, names: str, resumed: bool) -> None:
    """Log rotation renames the file, or copies it and rewrites it in place, with the same inode."""
    path = tmp_path / "events.jsonl"
    path.write_text(line(Remove(ids=["a", "long"])))
    source = FileSource(path)
    assert len(source.read(10)) == 1
    if how == "renamed":
        path.rename(tmp_path / "events.jsonl.1")
    path.write_text("".join(line(Remove(ids=[name])) for name in names))
    if resumed:
        place, source = (source.cursor, source.identity), FileSource(path)
        source.seek(place[0])
        source.identity = place[1]
    assert [item.event.ids for item in source.read(10) if item.event] == [(name,) for name in names]
    with path.open("a") as file:
        file.write(line(Remove(ids=["e"])))
    assert [item.event.ids for item in source.read(10) if item.event] == [("e",)]


def test_the_identity_of_a_file_and_its_dead_letters_tell_nobody(tmp_path: Path) -> None:
    text = '{"kind": "remove", "ids": ["alice"], "event_id": "e"}\n'
    found = []
    for name in ("a", "b"):
        (tmp_path / name).write_text(text)
        source = FileSource(tmp_path / name)
        source.read(9)
        found.append(source.identity)
    assert found[0] != found[1]  # equal only under the same key
    DeadLetters(tmp_path / "letters").write(Item(None, "alice", "no"), "no")
    assert (tmp_path / "letters").stat().st_mode & 0o077 == (tmp_path / "a.key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("run", ["goes on", "was killed"])
def test_compaction_deletes_the_name_of_a_watched_subject(tmp_path: Path, run: str) -> None:
    """A run that goes on still removes the later samples of the subject."""
    x, y = torch.rand(6, J), torch.arange(6) % K
    store = SampleStore(tmp_path / "store", head=head())
    corrector = Corrector(store.head, store, SeenSamples(store))
    corrector.learn([Add(ids=list("abcd"), x=x[:4], y=y[:4], subject=["alice.smith", "bob", "alice.smith", "bob"])])
    corrector.apply([Remove(subject="alice.smith", event_id="E1")])
    if run == "was killed":
        store.close()
        store = SampleStore(tmp_path / "store")
    store.compact()
    if run == "goes on":
        corrector.learn([Add(ids=["e", "f"], x=x[4:], y=y[4:], subject=["alice.smith", "bob"])])
        assert sorted(store.find(subject="bob")) == ["b", "d", "f"]
        assert store.find(subject="alice.smith") == []
        store.compact()
    store.close()
    assert not [p.name for p in store.path.iterdir() if b"alice" in p.read_bytes()]
