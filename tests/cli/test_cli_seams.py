"""Where the command line meets a shell: options given twice, lists without ids, files that are there, a closed output, Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_tools import J, K, N, Shell, head_of, write
from torchlssvm import cli
from torchlssvm.cli.arguments import UsageError
from torchlssvm.corrections.corrector import Corrector
from torchlssvm.corrections.seen_samples import SeenSamples
from torchlssvm.events import Remove
from torchlssvm.store import SampleStore

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ["--labels", "y.npy", "--ids", "ids.txt", "--subjects", "subjects.txt", "--by-position"]


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    out = Shell(capsys, tmp_path)
    out("init", "s", "--in-features", J, "--classes", K, "--grid", "16")
    return out


@pytest.fixture
def filled(shell: Shell) -> Shell:
    shell("add", "s", "--features", "x.npy", *COLUMNS)
    return shell


# -- an option given twice ---------------------------------------------------------------------------------------------


def test_two_subjects_are_both_erased(filled: Shell) -> None:
    x, y, subjects = write(filled.folder)
    keep = [s not in ("person-01", "person-02") for s in subjects]
    two = ["--subject", "person-01", "--subject", "person-02"]
    assert filled.json("preview", "s", *two)["remaining"] == sum(keep)
    said = filled.json("remove", "s", *two, "--compact", "--certificate", "c.json")
    assert (said["samples"], said["remaining"]) == (N - sum(keep), sum(keep))
    assert said["digest"] == head_of(x[keep], y[keep]).digest()
    assert len(said["nonces"]) == N - sum(keep)
    assert [event["samples"] for event in said["events"]] == [5, 5]
    checked = filled.json("verify", "c.json", "--store", "s", "--allow-unsigned")
    assert checked["erased"] == N - sum(keep)
    assert "person-01" in filled("remove", "s", "--subject", "person-03", "--subject", "person-01", code=1)
    assert filled.json("stats", "s")["samples"] == sum(keep)  # all or nothing


def test_the_same_subject_twice_is_one(filled: Shell) -> None:
    assert filled.json("remove", "s", "--subject", "person-01", "--subject", "person-01")["samples"] == 5


def test_two_subjects_are_both_relabelled(filled: Shell) -> None:
    x, y, subjects = write(filled.folder)
    y[[s in ("person-01", "person-02") for s in subjects]] = 2
    said = filled.json("relabel", "s", "--subject", "person-01", "--subject", "person-02", "--label", 2)
    assert said["digest"] == head_of(x, y).digest()


def test_an_event_id_names_one_event(filled: Shell) -> None:
    filled("remove", "s", "--subject", "person-01", "--subject", "person-02", "--event", "e", code=2)
    assert filled.json("stats", "s")["samples"] == N


def test_labels_add_up(filled: Shell) -> None:
    x, y, _ = write(filled.folder)
    y[[3, 4]] = 2, 1
    assert (
        filled.json("relabel", "s", "--id", "s3", "--label", 2, "--id", "s4", "--label", 1)["digest"]
        == head_of(x, y).digest()
    )


def leaf_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command, by its words."""
    found, left = {}, {"": cli.build_parser()}
    while left:
        name, parser = left.popitem()
        below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not below:
            found[name] = parser
        left |= {f"{name} {verb}".strip(): p for a in below for verb, p in a.choices.items()}
    return found


def test_an_option_that_takes_one_value_takes_it_once() -> None:
    """Every option of every command: one that collects its values, or one that is refused when it is given twice."""
    tried = 0
    for parser in leaf_parsers().values():
        for action in parser._actions:
            if (
                action.nargs == 0
                or not action.option_strings
                or type(action).__name__ in ("_AppendAction", "_ExtendAction")
            ):
                continue
            value = str(next(iter(action.choices))) if action.choices else "1,2" if action.dest == "classes" else "1"
            with pytest.raises(UsageError, match=f"{action.option_strings[0]}: given twice"):
                parser.parse_args([action.option_strings[0], value] * 2)
            tried += 1
    assert tried > 60


def test_one_meaning_for_each_flag() -> None:
    """A flag of two commands takes the same kind of value, and STORE comes first where a command works on a store."""
    kinds: dict[str, set[Any]] = {}
    for name, parser in leaf_parsers().items():
        first = parser._actions[1].dest  # behind --help
        assert first == "store" or name.split()[0] in ("certificate", "demo", "keygen", "verify"), name
        for action in parser._actions:
            for flag in action.option_strings:
                kinds.setdefault(flag, set()).add(action.type)
    assert {flag for flag, found in kinds.items() if len(found) > 1} == set()
    assert kinds["--features"] == {Path}


# -- lists -------------------------------------------------------------------------------------------------------------


def test_owners_without_a_header_are_refused(shell: Shell) -> None:
    _, _, subjects = write(shell.folder)
    Path("owners.csv").write_text("".join(f"s{i},{subjects[i]}\n" for i in range(N)))
    add = ["add", "s", "--features", "x.npy", "--labels", "y.npy", "--ids", "ids.txt", "--by-position"]
    message = shell(*add, "--subjects", "owners.csv", code=1)
    assert "id,subject" in message
    assert shell.json("stats", "s")["samples"] == 0
    Path("owners.csv").write_text("id,subject\n" + Path("owners.csv").read_text())
    shell(*add, "--subjects", "owners.csv")
    assert shell.json("stats", "s")["subjects"] == 12


@pytest.mark.parametrize("text", ["id,owner\ns0,a\n", "s0,a\n", "s0;a\n", "a,b,c\n", "1,2\n" * N])
def test_other_tables_of_owners(shell: Shell, text: str) -> None:
    Path("owners.csv").write_text(text)
    message = shell("add", "s", "--features", "x.npy", "--labels", "y.npy", "--subjects", "owners.csv", code=1)
    assert "id,subject" in message
    assert shell.json("stats", "s")["samples"] == 0


@pytest.mark.parametrize("option", ["--labels", "--ids", "--subjects"])
def test_a_list_says_that_it_goes_by_position(shell: Shell, option: str) -> None:
    Path("list.txt").write_text("".join(f"{i % 3 if option == '--labels' else i}\n" for i in range(N)))
    arguments = {"--labels": "y.npy", option: "list.txt"}
    add = ["add", "s", "--features", "x.npy", *(a for pair in arguments.items() for a in pair)]
    assert "--by-position" in shell(*add, code=1)
    assert shell.json("stats", "s")["samples"] == 0
    shell(*add, "--by-position")
    assert shell.json("stats", "s")["samples"] == N


# -- files that are there ----------------------------------------------------------------------------------------------


def test_a_report_does_not_write_over_a_file(filled: Shell) -> None:
    Path("r.html").write_text("mine")
    assert "--force" in filled("report", "s", "--out", "r.html", code=1)
    assert Path("r.html").read_text() == "mine"
    filled("report", "s", "--out", "r.html", "--force")
    assert "<title>" in Path("r.html").read_text()


@pytest.mark.parametrize("out", ["s/r.html", "s/samples.sqlite", "s/deep/r.html", "link/r.html", "other/r.html"])
@pytest.mark.parametrize("command", ["report", "export", "remove"])
def test_nothing_is_written_into_a_store(filled: Shell, out: str, command: str) -> None:
    filled("init", "other", "--in-features", J, "--classes", K)
    Path("s/deep").mkdir()
    Path("link").symlink_to("s")
    before = {p: p.stat().st_size for p in Path("s").rglob("*")}
    more: dict[str, list[str]] = {
        "report": ["--out", out, "--force"],
        "export": [out, "--force"],
        "remove": ["--id", "s1", "--certificate", out],
    }
    assert filled.run(command, "s", *more[command])[0] == 1
    assert {p: p.stat().st_size for p in Path("s").rglob("*")} == before
    assert filled.json("stats", "s")["samples"] == N


# -- usage errors as JSON ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json"], ["nothing", "--json"], ["stats", "--json"], ["stats", "s", "--json", "--unknown"], ["add", "s", "--json"],
        ["init", "s", "--classes", "2", "--json"], ["remove", "s", "--json", "--subject", "a", "--id", "b"],
        ["stats", "s", "--timeout", "never", "--json"], ["stats", "s", "--js", "--timeout", "1", "--timeout", "2"],
        ["remove", "s", "--json", "--id", "a", "--key", "k"], ["verify", "--json"], ["--json", "stats", "s"],
    ],
)  # fmt: skip
def test_a_usage_error_is_json_too(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert leaving.value.code == 2
    said = json.loads(out)["error"]
    assert (said["type"], said["exit_code"]) == ("UsageError", 2)
    assert err.startswith("usage: torchlssvm")
    assert err.endswith(f"error: {said['message']}\n")


# -- real processes ----------------------------------------------------------------------------------------------------


def start(folder: Path, *arguments: Any, **options: Any) -> subprocess.Popen[str]:
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment, "cwd": folder}
    return subprocess.Popen([sys.executable, "-m", "torchlssvm", *map(str, arguments)], **{**pipes, **options})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("output", ["full", *(pytest.param(o, marks=pytest.mark.slow) for o in ("broken", "closed"))])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["remove", "s", "--id", "s1"], "the samples were removed, but the output could not be written"),
        (["drop", "s", "waiting"], "the events were dropped, but the output could not be written"),
        (["stats", "s", "--json"], "nothing was changed, but the output could not be written"),
        (["stats", "nowhere", "--json"], "there is no store at nowhere"),
    ],
)
def test_an_output_that_cannot_be_written(filled: Shell, output: str, arguments: list[str], said: str) -> None:
    with SampleStore(filled.folder / "s") as store:
        Corrector(store.head, store, SeenSamples(store)).apply([Remove(ids=["later"], event_id="waiting")])
    if output == "full":
        with open("/dev/full", "w") as full, start(filled.folder, *arguments, stdout=full) as process:
            err = process.communicate(timeout=120)[1]
    elif output == "broken":
        reading, writing = os.pipe()
        os.close(reading)
        with start(filled.folder, *arguments, stdout=writing) as process:
            os.close(writing)
            err = process.communicate(timeout=120)[1]
    else:
        with start(filled.folder, *arguments, preexec_fn=lambda: os.close(1), stdout=None) as process:
            err = process.communicate(timeout=120)[1]
    assert said in err
    assert err.count("\n") == 1
    assert process.returncode == (1 if "nowhere" in arguments else 5)
    assert filled.json("stats", "s")["samples"] == N - (arguments[0] == "remove")
    assert len(filled.json("pending", "s")["pending"]) == (arguments[0] != "drop")


def test_help_to_a_reader_that_has_left(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with start(tmp_path, "--help", stdout=writing) as process:
        os.close(writing)
        assert process.communicate(timeout=120)[1] == ""


@pytest.mark.parametrize("entry", ["module", "script"])
@pytest.mark.parametrize("delay", [0.0, 0.1, 0.4])
def test_ctrl_c_while_importing(tmp_path: Path, entry: str, delay: float) -> None:
    """The signal comes while torch is being imported: a module of that name tells when, and takes its time."""
    (tmp_path / "s").mkdir()
    slow = tmp_path / "path" / "torch"
    slow.mkdir(parents=True)
    (slow / "__init__.py").write_text(
        "import pathlib, time\npathlib.Path('importing').touch()\nfor _ in range(2000): time.sleep(0.01)\n"
    )
    script = tmp_path / "torchlssvm"
    script.write_text("import sys\nfrom torchlssvm.__main__ import main\nsys.exit(main())\n")
    environment = {"PYTHONPATH": f"{slow.parent}:{ROOT}", "PATH": os.environ["PATH"]}
    command = [sys.executable, *(["-m", "torchlssvm"] if entry == "module" else [str(script)]), "stats", "s"]

    def listen() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 60
        while not (tmp_path / "importing").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "torchlssvm: error: interrupted; what was done before is kept\n")


def test_a_program_that_imports_the_library_keeps_its_handler() -> None:
    code = "import signal, torchlssvm; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"

    def listen() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120, preexec_fn=listen)


# -- progress ----------------------------------------------------------------------------------------------------------


def on_terminal(folder: Path, *arguments: Any) -> str:
    """What a command writes to a terminal as its stderr."""
    ours, theirs = pty.openpty()
    with start(folder, *arguments, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            seen += part
        process.communicate(timeout=120)
    os.close(ours)
    assert process.returncode == 0, seen
    return seen.decode()


LONG = {
    "add": (["add", "s", "--features", "x.npy", *COLUMNS], "adding"),
    "verify": (["verify", "c.json", "--store", "s", "--allow-unsigned"], "verifying"),
    "compact": (["compact", "s"], "compacting"),
    "export": (["export", "s", "h.pt"], "writing"),
    "report": (["report", "s"], "reporting"),
}


@pytest.mark.parametrize("name", ["verify", *(pytest.param(n, marks=pytest.mark.slow) for n in LONG if n != "verify")])
def test_long_commands_show_a_bar_on_a_terminal(filled: Shell, name: str) -> None:
    filled("remove", "s", "--id", "s1", "--certificate", "c.json")
    arguments, word = LONG[name]
    seen = on_terminal(filled.folder, *arguments)
    assert re.search(rf"\r{word} ", seen)
    assert seen.split("\r")[-1] == ""  # the line is cleared
    for used in ("h.pt", "torchlssvm_report.html"):
        Path(used).unlink(missing_ok=True)
    assert on_terminal(filled.folder, *arguments, "--json") == ""
