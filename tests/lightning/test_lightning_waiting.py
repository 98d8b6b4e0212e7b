"""Corrections for samples that have not arrived: they wait, are applied with the batch that brings them, and are never lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("jsonargparse")

from tests.support.lightning_events import Writer, write
from tests.support.lightning_tools import K, indexed, loader, module, quiet, samples, truth
from torchlssvm import Certificate, KernelLSSVM, LSSVMHead, verify
from torchlssvm.cli import main
from torchlssvm.corrections.waiting_events import WaitingEvents
from torchlssvm.events import Add, Event, Relabel, Remove, Replace
from torchlssvm.kernels import RBF
from torchlssvm.lightning import DataCorrection, Indexed, LSSVMModule, ResumableLoader
from torchlssvm.lightning.learner import Learner
from torchlssvm.store import SampleStore, new_suppression_key

X, Y = samples()
OTHER, _ = samples(67, seed=5)
OWNERS = [i % 5 for i in range(67)]
ROOT = Path(__file__).resolve().parents[2]
QUIET = [f"--trainer.{name}=false" for name in ("enable_progress_bar", "enable_model_summary", "logger")]


class Reference:
    """The truth: all samples are there from the start, then the events come one by one."""

    def __init__(self) -> None:
        self.held = {str(i): (X[i], int(Y[i]), str(OWNERS[i])) for i in range(67)}

    def apply(self, event: Event) -> bool:
        if isinstance(event, Add):
            if any(i in self.held for i in event.ids):
                return False
            new = {i: (event.x[k], int(event.y[k]), event.subjects[k] or "") for k, i in enumerate(event.ids)}
            self.held |= new
            return True
        ids = event.ids or [i for i, (_, _, s) in self.held.items() if s == event.subject]
        if isinstance(event, Remove):  # of those that are left
            ids = [i for i in ids if i in self.held]
        if not ids or any(i not in self.held for i in ids):
            return False
        for k, i in enumerate(ids):
            x, y, owner = self.held[i]
            if isinstance(event, Remove):
                del self.held[i]
            elif isinstance(event, Relabel):
                self.held[i] = (x, int(event.y) if event.y.ndim == 0 else int(event.y[k]), owner)
            else:
                self.held[i] = (event.x[k], y if event.y is None else int(event.y[k]), owner)
        return True

    def digest(self) -> str:
        rows = list(self.held.values())
        return truth(torch.stack([x for x, _, _ in rows]), torch.tensor([y for _, y, _ in rows])).digest()


def after(*events: Event) -> Reference:
    reference = Reference()
    for event in events:
        reference.apply(event)
    return reference


def owned(**options: Any) -> ResumableLoader:
    return ResumableLoader(indexed(subjects=OWNERS), 8, **options)


def run(folder: Path, source: Any, stored: bool = True, train: Any = None, epochs: int = 1, **options: Any) -> Any:
    """A fit with corrections; returns module and callback."""
    m = module(store=str(folder / "store") if stored else None)
    correction = DataCorrection(source, dead_letters=folder / "dead.jsonl", **options)
    quiet(folder, max_epochs=epochs, callbacks=[correction]).fit(m, train or owned())
    return m, correction


def removal(i: int, **more: Any) -> Remove:
    """With the sample as it will be added, for a head without a store."""
    return Remove(ids=[str(i)], x=X[i : i + 1], y=Y[i : i + 1], **more)


# -- the cases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [False, True])
def test_the_first_batch_decides_the_grid_also_where_a_sample_is_removed_later(tmp_path: Path, stored: bool) -> None:
    x = X.clone()
    x[2] *= 1e4
    m = module(store=str(tmp_path / "store") if stored else None, grid="auto")
    data = DataLoader(Indexed(TensorDataset(x, Y)), batch_size=8)
    event = Remove(ids=["2"], x=x[2:3], y=Y[2:3], event_id="e")
    quiet(tmp_path, callbacks=[DataCorrection([event])]).fit(m, data)
    all_of_it = LSSVMHead(X.shape[1], K).add(x[:8], Y[:8])
    assert (m.head.n, m.head.grid) == (66, all_of_it.grid)
    if stored:
        with SampleStore(tmp_path / "store") as store:
            assert "grid" in store.certificate("e").scope["choices"]


@pytest.mark.parametrize("events", [[Remove(ids=["60"]), Remove(ids=["2", "61"])], [Remove(subject="0")]])
def test_no_transaction_leaves_a_sample_that_was_asked_to_go(
    tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad event for a sample of the same batch does not part them either."""
    apply, found = SampleStore.apply, []
    gone = set(map(str, range(67))) - set(after(*events).held) - {"2"}  # 2 waits for 61, which is named with it

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        out = apply(self, *args, **options)
        found.append({i for i in gone if i in self})
        return out

    monkeypatch.setattr(SampleStore, "apply", watched)
    m, correction = run(tmp_path, [Relabel(ids=["62"], y=[99]), *events])
    assert m.head.digest() == after(*events).digest()
    assert (correction.refused, m.unanswered) == (1, 0)
    assert json.loads((tmp_path / "dead.jsonl").read_text())["event"]["ids"] == ["62"]
    assert len(found) > 8
    assert set().union(*found) == set()


def test_what_cannot_be_learned_and_is_to_be_removed_counts_as_arrived(tmp_path: Path, capsys: Any) -> None:
    x = X.clone()
    x[2, 1], x[60] = torch.nan, 1e6  # neither can be learned; the first is named by an event, the second by its subject
    data = ResumableLoader(Indexed(TensorDataset(x, Y), subjects=OWNERS), 8)
    events = [Remove(ids=["2", "50"]), Remove(subject="0"), Remove(ids=["2"])]
    m, correction = run(tmp_path, events, train=data)
    assert m.head.digest() == after(*events).digest()
    assert (correction.refused, m.unanswered) == (0, 0)
    assert "2 samples left out, to be removed" in capsys.readouterr().out
    with pytest.raises(ValueError, match="NaN"):
        run(tmp_path / "other", events[1:2], train=data)


@pytest.mark.parametrize("stored", [False, True])
def test_names_in_another_form_of_unicode_are_the_same_names(tmp_path: Path, stored: bool) -> None:
    ids = [f"e\u0301-{i}" for i in range(8)]  # decomposed, as file names are on macOS
    learner = Learner(module().head)
    if stored:
        learner.open(str(tmp_path / "store"), torch.nn.Identity())
    assert learner.learn(X[:8], Y[:8], ids, None) == 0
    assert ids[3] in learner.seen
    assert "\u00e9-3" in learner.seen
    learner.corrector.apply([Remove(ids=[ids[3]], x=X[3:4], y=Y[3:4])])
    assert learner.learn(X[:8], Y[:8], ids, None) == 8
    learner.corrector.apply([Remove(ids=["\u00e9-9"], x=X[8:9], y=Y[8:9])])
    assert learner.learn(torch.full_like(X[8:9], torch.nan), Y[8:9], ["e\u0301-9"], None) == 0
    keep = [0, 1, 2, 4, 5, 6, 7]
    assert learner.head.digest() == truth(X[keep], Y[keep]).digest()
    learner.close()


def test_what_was_erased_on_request_counts_as_arrived(tmp_path: Path) -> None:
    new_suppression_key(tmp_path / "key")
    listed = {"suppression_list": str(tmp_path / "list"), "suppression_key": str(tmp_path / "key")}
    with SampleStore(tmp_path / "other", head=module().head, **listed) as store:
        store.apply(Add(ids=["2"], x=X[2:3], y=Y[2:3]))
        store.requests.open(ids=["2"], request_id="R-1")
        store.apply(Remove(ids=["2"]), request="R-1")
    m = module(store=str(tmp_path / "store"), **listed)
    correction = DataCorrection([Remove(ids=["2", "60"]), Remove(ids=["2"])], dead_letters=tmp_path / "dead")
    quiet(tmp_path, callbacks=[correction]).fit(m, owned())
    assert m.head.digest() == after(Remove(ids=["2", "60"])).digest()
    assert (correction.refused, m.unanswered) == (0, 0)


def test_a_kernel_machine_waits_for_samples_too(tmp_path: Path) -> None:
    m = LSSVMModule("identity", K, in_features=X.shape[1], head=KernelLSSVM(RBF(gamma=0.1), num_classes=K))
    quiet(tmp_path, callbacks=[DataCorrection([Remove(ids=["60", "2"]), Relabel(ids=["61"], y=[0])])]).fit(m, loader())
    keep = torch.tensor([i not in (2, 60) for i in range(67)])
    y = Y.clone()
    y[61] = 0
    alone = KernelLSSVM(RBF(gamma=0.1), num_classes=K)
    alone.add(X[keep], y[keep])
    assert len(m.head.ids) == 65
    torch.testing.assert_close(m.head(X[:5]), alone(X[:5]), atol=1e-6, rtol=1e-6)


ORDERS: dict[str, list[Event]] = {
    "relabel, then remove": [Relabel(ids=["60"], y=[2]), Remove(ids=["60"])],
    "remove, then relabel": [Remove(ids=["60"]), Relabel(ids=["60"], y=[2])],
    "remove, then add": [Remove(ids=["60"]), Add(ids=["60"], x=OTHER[:1], y=[1])],
    "remove, add, remove": [Remove(ids=["60"]), Add(ids=["60"], x=OTHER[:1], y=[1]), Remove(ids=["60"])],
    "remove twice": [Remove(ids=["60"]), Remove(ids=["60"])],
    "relabel twice": [Relabel(ids=["60"], y=[2]), Relabel(ids=["60"], y=[1])],
    "replace, then relabel": [Replace(ids=["60"], x=OTHER[:1]), Relabel(ids=["60"], y=[1])],
    "an event for two, then for one of them": [Relabel(ids=["1", "60"], y=[2, 2]), Remove(ids=["1"])],
    "a subject, then one of its samples": [Remove(subject="0"), Relabel(ids=["60"], y=[2])],
    "one of its samples, then a subject": [Relabel(ids=["60"], y=[2]), Remove(subject="0")],
    "some samples, then their subject": [Remove(ids=["0", "60"]), Remove(subject="0")],
    "a subject is relabelled, then removed": [Relabel(subject="0", y=1), Remove(subject="0")],
    "a subject is removed, then added anew": [
        Remove(subject="0"),
        Add(ids=["n"], x=OTHER[:1], y=[1], subject="0"),
    ],
    "a subject is relabelled": [Relabel(subject="3", y=2)],
    "an addition, its removal": [Add(ids=["n"], x=OTHER[:1], y=[1]), Remove(ids=["n"])],
}


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("name", ORDERS)
def test_events_are_applied_in_the_order_they_came(tmp_path: Path, name: str, batch: int | None) -> None:
    path = tmp_path / "events.jsonl"
    write(path, ORDERS[name] if batch is None else [])
    m = module(store=str(tmp_path / "store"))
    writer = Writer(path, {} if batch is None else {batch: ORDERS[name]})
    quiet(tmp_path, callbacks=[writer, DataCorrection(path, dead_letters=tmp_path / "dead")]).fit(m, owned())
    assert m.head.digest() == after(*ORDERS[name]).digest()
    assert m.unanswered == 0


def test_the_same_event_twice_is_applied_once(tmp_path: Path) -> None:
    event, liar = Remove(ids=["60"], event_id="e"), Remove(ids=["61"], event_id="e")
    write(tmp_path / "again.jsonl", [event])
    m, correction = run(tmp_path, [event, event, liar])
    assert m.head.digest() == after(event).digest()
    assert [sum(getattr(r, s) for r in correction.reports) for s in ("applied", "repeated", "refused")] == [1, 1, 1]
    assert "another event with the id 'e'" in (tmp_path / "dead.jsonl").read_text()
    again, correction = run(tmp_path, tmp_path / "again.jsonl")
    assert again.head.digest() == m.head.digest()
    assert [r.repeated for r in correction.reports] == [1]


@pytest.mark.parametrize(("batch", "shuffle"), [(None, False), (None, True), (2, False), (6, True)])
def test_a_removed_subject_is_watched_for_the_rest_of_the_run(tmp_path: Path, batch: int | None, shuffle: bool) -> None:
    path, event = tmp_path / "events.jsonl", Remove(subject="3", event_id="whose")
    write(path, [event] if batch is None else [])
    m = module(store=str(tmp_path / "store"))
    correction = DataCorrection(path, certificates=tmp_path / "certificates")
    hooks = [Writer(path, {} if batch is None else {batch: [event]}), correction]
    quiet(tmp_path, max_epochs=2, callbacks=hooks).fit(m, owned(shuffle=shuffle))
    assert m.head.digest() == after(event).digest()
    assert sum(r.applied for r in correction.reports) == 1
    assert sum(r.samples for r in correction.reports) == 13
    check_certified(tmp_path, {"whose": 13}, "whose")
    with SampleStore(tmp_path / "store") as store:
        assert store.find(subject="3") == []
        assert not len(WaitingEvents(store))  # the watch has ended with the run


# -- what is not answered ----------------------------------------------------------------------------------------------


def fit(folder: Path, *more: str) -> int:
    os.chdir(folder)
    return main(["fit", "--config", str(ROOT / "configs/events/file.yaml"), *QUIET, *more])


def test_what_is_not_answered_is_said_and_waits_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    events = [
        Remove(ids=["train/300"], event_id="later"),
        Remove(ids=["train/5", "nobody"], event_id="never"),
        Relabel(ids=["train/5"], y=[1], event_id="behind"),
    ]
    write(tmp_path / "events.jsonl", events)
    assert fit(tmp_path, "--data.init_args.limit=200") == 1
    said = capsys.readouterr().out
    assert "have not arrived: 3 events," in said
    assert "torchlssvm drop store EVENT" in said
    assert all(e.event_id in said for e in events)
    assert main(["waiting", "store", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["waiting"]
    assert [p["event_id"] for p in listed] == ["later", "never", "behind"]
    assert main(["drop", "store", "never", "nothing"]) == 1
    assert main(["drop", "store", "never"]) == 0
    assert "dropped: remove never" in capsys.readouterr().out
    assert fit(tmp_path) == 0  # the sample arrives in the next run, and nothing is in the way of the third event
    with SampleStore(tmp_path / "store") as store:
        assert len(store) == 1437
        assert "train/300" not in store
        assert int(store.get(["train/5"]).y[0]) == 1
        expected = [store.recorded_id("behind"), store.recorded_id("later")]
        assert [e.event_id for e in store.history() if e.kind != "add"] == expected
    assert main(["waiting", "store"]) == 0
    assert "no waiting events" in capsys.readouterr().out


def test_a_refused_event_is_an_exit_code_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "events.jsonl").write_text("nonsense\n")
    assert fit(tmp_path) == 1
    assert "1 event not applied" in capsys.readouterr().out


def test_without_a_store_waiting_events_are_in_the_checkpoint(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    event = removal(60, event_id="e")
    m = module()
    quiet(tmp_path, callbacks=[DataCorrection([event]), save], enable_checkpointing=True).fit(m, loader())
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    assert [p["event"]["event_id"] for p in saved["torchlssvm"]["learner"]["corrector"]["waiting"]] == ["e"]
    again = module()
    quiet(tmp_path).fit(again, loader(), ckpt_path=str(tmp_path / "step=3.ckpt"))  # and no callback
    assert again.head.digest() == m.head.digest() == after(event).digest()


def test_a_fit_without_the_callback_answers_what_a_store_holds(tmp_path: Path) -> None:
    events = [Remove(ids=["60"]), Remove(subject="3")]
    few = ResumableLoader(torch.utils.data.Subset(indexed(subjects=OWNERS), [0, 1, 2]), 8)
    m, _ = run(tmp_path, events, train=few)
    assert m.unanswered == 2
    m = module(store=str(tmp_path / "store"))
    quiet(tmp_path).fit(m, owned())
    assert m.head.digest() == after(*events).digest()
    assert m.unanswered == 0


def test_nothing_of_an_answered_event_is_left_after_compaction(tmp_path: Path) -> None:
    owners = [f"customer-{i % 5}" for i in range(67)]
    prefix = "picture-of-a-person-"
    data = ResumableLoader(Indexed(TensorDataset(X, Y), prefix=prefix, subjects=owners), 8)
    events = [Remove(ids=[f"{prefix}60"]), Remove(subject="customer-3"), Remove(ids=[f"{prefix}nobody"], event_id="x")]
    run(tmp_path, events, train=data)
    with SampleStore(tmp_path / "store") as store:
        kept = b"".join(p.read_bytes() for p in (tmp_path / "store").iterdir())
        assert f"{prefix}nobody".encode() in kept  # it waits, and has to know for whom
        store.compact()
    assert main(["drop", str(tmp_path / "store"), "x"]) == 0
    with SampleStore(tmp_path / "store") as store:
        store.compact()
    kept = b"".join(p.read_bytes() for p in (tmp_path / "store").iterdir())
    assert f"{prefix}0".encode() in kept
    assert not any(word in kept for word in (f"{prefix}60".encode(), b"customer-3", f"{prefix}nobody".encode()))


# -- kill and resume ---------------------------------------------------------------------------------------------------


def killed(work: Any) -> None:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(100)
    assert process.exitcode == -signal.SIGKILL


LATE: list[Event] = [
    Remove(ids=["60"], event_id="a"), Relabel(ids=["61"], y=[0], event_id="b"), Remove(ids=["1", "62"], event_id="c"),
    Remove(subject="3", event_id="d"), Remove(ids=["20"], event_id="e"),
]  # fmt: skip


def check_certified(folder: Path, expected: dict[str, int], subject: str) -> None:
    found: dict[str, int] = {}
    with SampleStore(folder / "store") as store:
        for path in (p for p in (folder / "certificates").iterdir() if ".receipt." not in p.name):
            certificate = Certificate.load(path)
            assert verify(certificate, store=store, allow_unsigned=True)
            for e in certificate.events:  # a random id: the event for a subject, applied to samples that came later
                name = next((name for name in expected if store.recorded_id(name) == e["event_id"]), subject)
                found[name] = found.get(name, 0) + e["samples"]
        assert len({e.event_id for e in store.history()}) == len(store.history())
    assert found == expected


@pytest.mark.parametrize("call", [1, 2, 3, 4, 6, 9, 11, 12, 13])
def test_killed_at_each_change_of_the_store(tmp_path: Path, call: int) -> None:
    """Also between an event and its certificate."""
    path = tmp_path / "events.jsonl"
    write(path, LATE)

    def fitted() -> Any:
        m = module(store=str(tmp_path / "store"))
        correction = DataCorrection(path, certificates=tmp_path / "certificates", dead_letters=tmp_path / "dead")
        quiet(tmp_path, callbacks=[correction]).fit(m, owned())
        return m

    def dies() -> None:
        count, apply = [0], SampleStore.apply

        def counted(self: Any, *args: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return apply(self, *args, **options)

        SampleStore.apply = counted  # type: ignore[method-assign]
        fitted()
        os.kill(os.getpid(), signal.SIGKILL)

    killed(dies)
    m = fitted()  # a new run over the same store: what was erased does not come back, and the watch goes on
    assert m.head.digest() == after(*LATE).digest()
    assert not (tmp_path / "dead").exists()
    assert m.unanswered == 0
    check_certified(tmp_path, {"a": 1, "c": 2, "d": 13, "e": 1}, "d")


# -- any order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_it_does_not_matter_when_an_event_arrives(tmp_path: Path, seed: int) -> None:
    """Random events at random moments, samples in a random order, process restarted at random: the truth is one by one."""
    chance = random.Random(seed)
    order, events, now = list(range(67)), [], {}
    chance.shuffle(order)
    for n in range(chance.randint(1, 25)):
        i = chance.choice(order)
        name = {"event_id": f"event{n}", "ids": [str(i)]}
        x, y = now.get(i, (X[i : i + 1], Y[i : i + 1]))
        kind = chance.choice(["remove", "relabel", "replace", "pair"])
        other = chance.choice(order)
        if kind == "remove":
            events.append(Remove(**name, x=x, y=y))
        elif kind == "relabel":
            new = torch.tensor([chance.randrange(K)])
            events.append(Relabel(**name, x=x, y_old=y, y=new))
            now[i] = (x, new)
        elif kind == "replace":
            events.append(Replace(**name, x_old=x, y_old=y, x=OTHER[n : n + 1]))
            now[i] = (OTHER[n : n + 1], y)
        elif other != i and other not in now and i not in now:
            events.append(Remove(ids=[str(i), str(other)], x=X[[i, other]], y=Y[[i, other]], event_id=f"event{n}"))
    stored = bool(seed % 2)
    head = module().head
    learner = Learner(head)
    if stored:
        learner.open(str(tmp_path / "store"), torch.nn.Identity())
    times = sorted(chance.randint(0, 9) for _ in events)
    for step in range(10):
        learner.corrector.apply([e for e, at in zip(events, times, strict=True) if at == step])
        part = order[7 * step : 7 * step + 7]
        if part:
            learner.learn(X[part], Y[part], [str(i) for i in part], None)
        if stored and chance.random() < 0.3:
            learner.close()
            head = module().head
            learner = Learner(head)
            learner.open(str(tmp_path / "store"), torch.nn.Identity())
    learner.end_pass()
    assert head.digest() == after(*events).digest()
    assert learner.corrector.queue.unanswered == [] or all(p.refused for p in learner.corrector.queue.unanswered)
    learner.close()


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_an_event_that_was_dropped_meanwhile_is_not_applied(tmp_path: Path) -> None:
    learner = Learner(module().head)
    learner.open(str(tmp_path / "store"), torch.nn.Identity())
    learner.corrector.apply([Remove(ids=["5"], event_id="e")])
    assert main(["drop", str(tmp_path / "store"), "e"]) == 0
    learner.learn(X, Y, [str(i) for i in range(67)], None)
    assert learner.head.digest() == Reference().digest()
    learner.close()


def test_samples_without_ids_are_not_counted_twice_in_silence(tmp_path: Path) -> None:
    m, data = module(), DataLoader(TensorDataset(X, Y), batch_size=8)
    quiet(tmp_path).fit(m, data)
    with pytest.warns(UserWarning, match="counted twice.*ckpt_path.*Indexed"):
        quiet(tmp_path).fit(m, data)
    with_ids = module()
    for _ in range(2):
        quiet(tmp_path).fit(with_ids, loader())
    assert with_ids.head.n == 67


def test_an_event_for_samples_without_ids_is_tried_again_at_the_end_of_the_pass(tmp_path: Path) -> None:
    m = module()
    correction = DataCorrection([removal(60)])
    quiet(tmp_path, callbacks=[correction]).fit(m, DataLoader(TensorDataset(X, Y), batch_size=8))
    keep = torch.arange(67) != 60
    assert m.head.digest() == truth(X[keep], Y[keep]).digest()
    assert m.unanswered == 0
