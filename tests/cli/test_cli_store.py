"""Every command on a store, against fresh heads; machines get JSON and exit codes."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.cli_tools import ADD, GRID, J, K, N, Shell, head_of, write
from tests.support.store_file import write_locked
from torchlssvm import Certificate, LSSVMHead, audit
from torchlssvm.events import Add
from torchlssvm.linear.data_choices import ChoiceState
from torchlssvm.store import SampleStore

ROOT = Path(__file__).resolve().parents[2]


def test_the_whole_story(shell: Shell) -> None:
    pytest.importorskip("cryptography")
    x, y, subjects = write(shell.folder)
    made = shell.json("init", "s", "--in-features", 5, "--classes", 3, "--grid", "16:20", "--rho", 0.5)
    assert made == {"store": "s", "features": 5, "classes": 3, "fingerprint": None}
    added = shell.json(*ADD, "--batch-size", 25)
    assert (added["added"], added["skipped"], added["events"], added["samples"]) == (N, 0, 3, N)
    assert added["digest"] == head_of(x, y).digest()

    keep = np.array([s != "person-07" for s in subjects])
    looked = shell.json("preview", "s", "--subject", "person-07", "--features", "x.npy", "--labels", "y.npy")
    before, after = (
        LSSVMHead(5, 3, rho=0.5, grid=GRID).add(torch.tensor(x[m]), torch.tensor(y[m])) for m in (keep | True, keep)
    )
    right = [(h.predict(torch.tensor(x)).numpy() == y).mean() for h in (before, after)]
    assert (looked["samples"], looked["remaining"]) == (N - keep.sum(), keep.sum())
    assert [looked["accuracy_before"], looked["accuracy_after"]] == pytest.approx(right, abs=1e-12)
    assert looked["flips"] == int((before.predict(torch.tensor(x)) != after.predict(torch.tensor(x))).sum())
    assert shell.json("stats", "s")["digest"] == added["digest"]  # nothing was changed by looking

    shell.json("keygen", "key.pem")
    gone = shell.json(
        "remove", "s", "--subject", "person-07", "--compact", "--certificate", "c.json", "--key", "key.pem"
    )
    assert (gone["samples"], gone["remaining"], gone["applied"]) == (N - keep.sum(), keep.sum(), True)
    assert gone["signed"] is gone["compacted"] is True
    assert gone["digest"] == head_of(x[keep], y[keep]).digest()
    assert set(gone["nonces"]) == {f"s{i}" for i in np.nonzero(~keep)[0]}
    assert not [p for p in (shell.folder / "s").iterdir() if b"person-07" in p.read_bytes()]

    checks = ["verify", "c.json", "--store", "s", "--public-key", "key.pem.pub"]
    said = shell.json(*checks)
    assert said["verified"] is True
    assert said["compacted"] is True
    assert said["erased"] == N - keep.sum()
    assert set(said["checks"]) == {
        "signature", "journal", "erased", "rows", "state", "compacted", "files", "head", "returned",
    }  # fmt: skip

    certificate = Certificate.load(shell.folder / "c.json")
    replace(certificate, samples=certificate.samples + 1).save(shell.folder / "c.json")
    said = shell.json(*checks, code=3)
    assert said["error"]["type"] == "VerificationError"
    assert said["error"]["exit_code"] == 3
    assert "altered" in said["error"]["message"]


def test_a_tampered_store_exits_3(filled: Shell) -> None:
    filled("remove", "s", "--id", "s0", "s1", "--certificate", "c.json")
    check = ["verify", "c.json", "--store", "s", "--allow-unsigned"]
    filled(*check)
    file = filled.folder / "s" / "samples.sqlite"
    raw = bytearray(file.read_bytes())
    at = raw.rindex(b"person-03")  # a row that has survived
    raw[at + 8 : at + 9] = b"4"
    file.write_bytes(raw)
    assert "damaged" in filled(*check, code=3)


def test_an_unsigned_or_unreadable_certificate_exits_3(filled: Shell) -> None:
    filled("remove", "s", "--id", "s0", "--certificate", "c.json")
    assert "--allow-unsigned" in filled("verify", "c.json", code=3)
    assert "(give --store)" in filled("verify", "c.json", "--allow-unsigned").splitlines()[0]
    said = filled.json("verify", "c.json", "--allow-unsigned")
    assert (said["erasure_checked"], said["return_checked"]) == (False, False)
    (filled.folder / "c.json").write_text("{")
    assert "not a certificate" in filled("verify", "c.json", "--allow-unsigned", code=3)
    assert "nowhere.json" in filled("verify", "nowhere.json", code=1)


def test_the_headline_says_no_more_than_was_checked(filled: Shell) -> None:
    filled("remove", "s", "--id", "s0", "--certificate", "c.json")
    verify = ["verify", "c.json", "--allow-unsigned", "--store", "s"]
    assert "(give --receipt)" in filled(*verify).splitlines()[0]
    assert "(give --receipt)" not in filled(*verify, "--receipt", "c.receipt.json")
    filled(*ADD)  # the files still have it
    assert "(give --receipt)" in filled(*verify).splitlines()[0]
    assert "'s0' of the receipt is in the store again" in filled(*verify, "--receipt", "c.receipt.json", code=3)


def test_the_head_can_be_exported_and_verified(filled: Shell) -> None:
    filled("export", "s", "old.pt")
    said = filled.json("remove", "s", "--subject", "person-01", "--compact", "--certificate", "c.json")
    assert said["checkpoints"] == [str(filled.folder / "old.pt")]
    assert Certificate.load(filled.folder / "c.json").scope["checkpoints"] == said["checkpoints"]
    assert filled.json("export", "s", "new.pt")["samples"] == said["remaining"]

    found = torch.load(filled.folder / "new.pt", weights_only=True)
    head = LSSVMHead.from_config(found["config"])
    head.load_state_dict(found["state_dict"])
    assert head.digest() == said["digest"]
    assert found["classes"] == ["ant", "bee", "cow"]

    verify = ["verify", "c.json", "--allow-unsigned", "--exported-head"]
    assert "exported head" in filled.json(*verify, "new.pt", "--store", "s")["checks"]
    assert "opening" in filled(*verify, "new.pt", code=3)
    filled("certificate", "opening", "s", "o.json")
    opening = ["--opening", "o.json"]
    filled(*verify, "new.pt", *opening)
    filled(*verify, "old.pt", *opening, code=3)

    for part, reason in {"w": "w in served.pt", "C": "C in served.pt", "solution.": "checksum"}.items():
        served = copy.deepcopy(found)
        for name, value in served["state_dict"].items():
            if name == part or (part == "solution." and name.startswith(part) and value.is_floating_point()):
                value += 1.0
        torch.save(served, filled.folder / "served.pt")
        assert reason in filled(*verify, "served.pt", *opening, code=3)
    for other in ({"w": torch.zeros(3)}, {"format": found["format"], "config": {"a": 1}, "state_dict": 3}):
        torch.save(other, filled.folder / "served.pt")
        filled(*verify, "served.pt", *opening, code=3)


def test_samples_as_lines(filled: Shell) -> None:
    x, y, subjects = write(filled.folder)
    filled("export", "s", "s.jsonl", "--format", "jsonl")
    lines = [json.loads(line) for line in (filled.folder / "s.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"s{i}" for i in range(N)]
    assert [line["subject"] for line in lines] == subjects
    assert [line["label"] for line in lines] == y.tolist()
    assert np.array_equal([line["x"] for line in lines], GRID.snap(torch.tensor(x)).numpy())
    assert "--force" in filled("export", "s", "s.jsonl", "--format", "jsonl", code=1)
    filled("export", "s", "s.jsonl", "--format", "jsonl", "--force")
    assert (filled.folder / "s.jsonl").stat().st_mode & 0o777 == 0o600  # it names people
    assert "folder" in filled("export", "s", "s", code=1)
    filled("export", "s", "nowhere/h.pt", code=1)
    assert not list(filled.folder.rglob("*.tmp"))


def test_relabel_in_its_three_forms(filled: Shell) -> None:
    x, y, subjects = write(filled.folder)
    filled("relabel", "s", "--id", "s0", "s1", "--label", "cow", "0")
    y[[0, 1]] = [2, 0]
    filled("relabel", "s", "--subject", "person-05", "--label", "bee")
    y[[s == "person-05" for s in subjects]] = 1
    (filled.folder / "new.csv").write_text("label,id\ncow,s7\nant,s8\n")
    y[[7, 8]] = [2, 0]
    said = filled.json("relabel", "s", "--file", "new.csv", "--event", "e1")
    assert said["digest"] == head_of(x, y).digest()
    assert (said["applied"], said["samples"]) == (True, 2)
    assert filled.json("relabel", "s", "--file", "new.csv", "--event", "e1")["applied"] is False
    for wrong, code in {("--id", "s0", "--label", "dog"): 1, ("--id", "s0", "--label", "3"): 1, ("--id", "no", "--label", "0"): 1,
                        ("--id", "s0"): 2, ("--label", "0"): 2, ("--id", "s0", "--label", "0", "1"): 2,
                        ("--file", "new.csv", "--label", "0"): 2, ("--file", "x.npy"): 1}.items():  # fmt: skip
        filled("relabel", "s", *wrong, code=code)
    assert filled.json("stats", "s")["digest"] == head_of(x, y).digest()


def test_history_and_stats(filled: Shell) -> None:
    filled("remove", "s", "--id", "s3", "--event", "request-1")
    events = filled.json("history", "s")["events"]
    assert [(e["position"], e["kind"], e["samples"]) for e in events] == [
        (1, "add", 25), (2, "add", 25), (3, "add", 10), (4, "remove", 1),
    ]  # fmt: skip
    with SampleStore("s", readonly=True) as store:
        assert events[3]["event_id"] == store.recorded_id("request-1")
    assert events[3]["event_id"] in filled("history", "s")
    stats = filled.json("stats", "s")
    assert (stats["samples"], stats["events"], stats["subjects"]) == (59, 4, 12)
    assert stats["class_names"] == ["ant", "bee", "cow"]
    assert "ant: 19, bee: 20, cow: 20" in filled("stats", "s")
    assert filled.json("compact", "s")["compacted"] is True
    assert filled.json("stats", "s")["compacted_at"] == 4


def test_a_lost_certificate_can_be_had_again(filled: Shell) -> None:
    event = filled.json("remove", "s", "--subject", "person-02")["event_id"]
    again = filled.json("remove", "s", "--subject", "person-02", "--event", event, "--certificate", "c.json")
    assert again["applied"] is False
    assert filled.json("verify", "c.json", "--store", "s", "--allow-unsigned")["erased"] == 5


@pytest.mark.parametrize(
    "more", [["--certificate", "nowhere/c.json"], ["--certificate", "x.npy"], ["--certificate", "c.json", "--key", "x.npy"],
             ["--certificate", "c.json", "--key", "missing.pem"]],
)  # fmt: skip
def test_nothing_is_removed_when_the_certificate_cannot_be_written(filled: Shell, more: list[str]) -> None:
    before = filled.json("stats", "s")["digest"]
    filled("remove", "s", "--subject", "person-02", *more, code=1)
    assert filled.json("stats", "s")["digest"] == before
    assert filled.json("history", "s")["events"][-1]["kind"] == "add"


def test_a_busy_store_exits_4(filled: Shell) -> None:
    with write_locked("s"):
        said = filled.json("remove", "s", "--id", "s0", "--timeout", 0, code=4)
    assert said["error"]["type"] == "StoreBusyError"
    assert filled.json("stats", "s")["samples"] == N


def test_removed_but_not_compacted_is_said(filled: Shell) -> None:
    """An open reader keeps the log: the samples are gone from the tables, the certificate does not claim more."""
    with SampleStore("s", readonly=True) as reader, reader.view():
        assert len(reader) == N
        code, out, err = filled.run(
            "remove", "s", "--id", "s0", "--compact", "--certificate", "c.json", "--timeout", "0.1", "--json"
        )
        assert (code, json.loads(out)["compacted"], json.loads(out)["samples"]) == (4, False, 1)
        assert "removed, but" in err
        assert not Certificate.load(filled.folder / "c.json").compacted
    filled("compact", "s")


# -- adding twice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["features", "label", "subject"])
def test_another_sample_under_an_old_id_is_refused(filled: Shell, what: str) -> None:
    x, y, subjects = write(filled.folder)
    before = filled.json("stats", "s")["digest"]
    if what == "features":
        x[31, 2] += 0.1
        np.save("x.npy", x)
    elif what == "label":
        y[31] = (y[31] + 1) % 3
        np.save("y.npy", y)
    else:
        (filled.folder / "subjects.txt").write_text("\n".join([*subjects[:31], "", *subjects[32:]]))
    message = filled(*ADD, code=1)
    assert "'s31'" in message
    assert what in message
    assert filled.json("stats", "s")["digest"] == before


def test_float_targets_may_be_added_twice(shell: Shell) -> None:
    write(shell.folder)
    np.save("t.npy", np.random.default_rng(1).normal(size=(N, 3)))
    shell("init", "s", "--in-features", 5, "--classes", 3)
    shell("add", "s", "--features", "x.npy", "--labels", "t.npy")
    assert shell.json("add", "s", "--features", "x.npy", "--labels", "t.npy")["skipped"] == N
    assert shell.json("stats", "s")["samples"] == N


# -- init --------------------------------------------------------------------------------------------------------------


def test_init_options_reach_the_head(shell: Shell) -> None:
    shell("init", "a", "--in-features", 4, "--classes", "x,y", "--rho", 3, "--intercept", "penalized", "--class-weight", "1,2.5", "--grid", "4:12")  # fmt: skip
    with SampleStore("a") as store:
        head = store.head
        assert (head.in_features, head.num_classes, head.rho, head.intercept) == (4, 2, 3.0, "penalized")
        assert head.class_weight.tolist() == [1.0, 2.5]
        assert (head.statistics.grid.limit, head.statistics.grid.bits) == (4.0, 12)
    shell("init", "b", "--in-features", 4, "--classes", 2, "--class-weight", "balanced", "--fingerprint", "net-1")
    with SampleStore("b") as store:
        assert (store.head.class_weight, store.fingerprint, store.head.grid) == ("balanced", "net-1", None)
    shell("init", "c", "--in-features", 4, "--classes", 3, "--rule", "auto")
    with SampleStore("c") as store:
        assert (store.head.rule, shell.json("stats", "c")["rule"]) == ("lda", "auto")
    shell("init", "d", "--in-features", 4, "--classes", 3, "--rule", "lda", "--head", "margin", code=2)


def test_init_does_not_touch_what_is_there(filled: Shell) -> None:
    before = filled.json("stats", "s")
    for options in (["--grid", "16"], ["--grid", "4"], ["--head", "margin"]):
        assert "already a store" in filled("init", "s", "--in-features", 5, "--classes", 3, *options, code=1)
    filled("init", "s", "--in-features", 6, "--classes", 3, code=1)
    assert filled.json("stats", "s") == before
    (filled.folder / "mine").mkdir()
    (filled.folder / "mine" / "letter.txt").write_text("dear")
    assert "not empty" in filled("init", "mine", "--in-features", 5, "--classes", 3, code=1)
    assert [p.name for p in (filled.folder / "mine").iterdir()] == ["letter.txt"]
    filled("init", "x.npy", "--in-features", 5, "--classes", 3, code=1)


def test_init_finishes_what_a_crash_left(shell: Shell) -> None:
    SampleStore("s", LSSVMHead(5, 3, grid=GRID)).close()  # made, but the names of the classes were not written
    shell("init", "s", "--in-features", 5, "--classes", "a,b,c", "--grid", "16")
    assert shell.json("stats", "s")["class_names"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--classes 3", 2), ("--in-features 5", 2), ("--in-features 0 --classes 3", 2), ("--in-features x --classes 3", 2),
        ("--in-features 5 --classes a", 2), ("--in-features 5 --classes a,a", 2), ("--in-features 5 --classes 0", 1),
        ("--rho -1", 1), ("--rho nan", 1), ("--grid x", 2), ("--grid 4:x", 2), ("--grid -4", 1), ("--grid 4:99", 1),
        ("--class-weight heavy", 2), ("--class-weight 1,2", 1), ("--intercept x", 2), ("--weights f", 2), ("--timeout -1", 2),
    ],
)  # fmt: skip
def test_init_refuses(shell: Shell, arguments: str, code: int) -> None:
    more = [] if "-features" in arguments or "-classes" in arguments else ["--in-features", 5, "--classes", 3]
    shell("init", "s", *more, *arguments.split(), code=code)
    assert not (shell.folder / "s").exists()


# -- a store that was made in Python -----------------------------------------------------------------------------------


def test_a_store_made_in_python(shell: Shell) -> None:
    x, y, subjects = write(shell.folder)
    with SampleStore("s", LSSVMHead(5, 3, grid=GRID), fingerprint="net-1") as store:
        store.apply(Add([f"s{i}" for i in range(30)], x[:30], y[:30], subjects[:30]))
    shell("remove", "s", "--id", "s0")
    assert "from another network" in shell(*ADD[:6], "--fingerprint", "net-2", code=1)
    shell(*ADD[:6], "--fingerprint", "net-1")
    assert shell.json("stats", "s")["samples"] == 29 + N


def test_keygen_does_not_write_over_a_key(shell: Shell) -> None:
    pytest.importorskip("cryptography")
    shell("keygen", "k")
    secret = (shell.folder / "k").read_bytes()
    assert (shell.folder / "k").stat().st_mode & 0o077 == 0
    assert "k.pub" in shell("keygen", "k", code=1)
    assert (shell.folder / "k").read_bytes() == secret
    audit.private_key(shell.folder / "k")


def test_rho_is_chosen_and_set(filled: Shell) -> None:
    x, y, _ = write(filled.folder)
    with SampleStore("s") as store:
        chosen, choice = store.head.rho, store.head.choices["rho"]
        assert chosen == LSSVMHead(J, K, rho="gcv", grid=GRID).add(torch.tensor(x), torch.tensor(y)).rho
    assert choice.state is ChoiceState.CURRENT
    assert "chosen by gcv" in filled.json("stats", "s")["rho"]
    assert filled.json("stats", "s")["limit"] == 16.0
    assert filled.json("set", "s", "--rho", "5")["rho"] == 5.0
    assert filled.json("stats", "s")["rho"] == "5.0, as given"
    assert filled.json("set", "s", "--rho", "gcv")["rho"] == chosen
    assert "3 fox" in filled("set", "s", "--add-classes", "fox")
    assert filled.json("stats", "s")["class_names"] == ["ant", "bee", "cow", "fox"]
    for wrong, code in ((["--rho", "-1"], 1), (["--rho", "best"], 2), (["--rho", "kfold"], 2), ([], 2)):
        filled("set", "s", *wrong, code=code)


def test_class_weights_are_set(shell: Shell) -> None:
    x, y, _ = write(shell.folder)
    shell("init", "w", "--in-features", J, "--classes", K, "--grid", "16", "--class-weight", "balanced")
    shell("add", "w", "--features", "x.npy", "--labels", "y.npy")
    assert shell.json("set", "w", "--class-weight", "1,2,3", "--rho", 0.5)["class_weight"] == [1.0, 2.0, 3.0]
    with SampleStore("w", readonly=True) as store:
        fresh = LSSVMHead(J, K, rho=0.5, grid=GRID, class_weight=torch.tensor([1.0, 2.0, 3.0]))
        torch.testing.assert_close(store.head.w, fresh.add(torch.tensor(x), torch.tensor(y)).w, rtol=1e-9, atol=1e-9)
    said = shell.json("set", "w", "--class-weight", "complement", "--rho", "gcv")
    assert "made for the current samples" in said["choice"]
    assert shell.run("set", "w", "--class-weight", "heavy")[0] == 2
    shell("init", "none", "--in-features", J, "--classes", K)
    assert "init --class-weight" in shell("set", "none", "--class-weight", "balanced", code=1)
