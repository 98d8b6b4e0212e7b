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
from tests.support.faults import Failing, replaced
from torchlssvm import LSSVMHead, cli
from torchlssvm.cli import store
from torchlssvm.cli.arguments import UsageError
from torchlssvm.cli.console import progress
from torchlssvm.cli.store_access import learn_names
from torchlssvm.errors import GridError, RemovalError, StoreBusyError, StoreError, VerificationError
from torchlssvm.store import SampleStore

ROOT = Path(__file__).resolve().parents[2]


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


def test_labels_and_subjects_add_up(filled: Shell) -> None:
    x, y, subjects = write(filled.folder)
    y[[s in ("person-01", "person-02") for s in subjects]] = 2
    said = filled.json("relabel", "s", "--subject", "person-01", "--subject", "person-02", "--label", 2)
    assert said["digest"] == head_of(x, y).digest()
    y[[3, 4]] = 2, 1
    said = filled.json("relabel", "s", "--id", "s3", "--label", 2, "--id", "s4", "--label", 1)
    assert said["digest"] == head_of(x, y).digest()
    filled(
        "remove", "s", "--subject", "person-01", "--subject", "person-02", "--event", "e", code=2
    )  # one id, two events
    assert filled.json("remove", "s", "--subject", "person-01", "--subject", "person-01")["samples"] == 5


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


# -- help and exit codes -----------------------------------------------------------------------------------------------


def test_every_command_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {name.split()[0]} ", text, re.M) for name in leaf_parsers())
    assert "exit codes: 0 " in text
    for name in leaf_parsers():
        with pytest.raises(SystemExit) as leaving:
            cli.main([*name.split(), "--help"])
        assert leaving.value.code == 0
        assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [(VerificationError("x"), 3), (StoreBusyError("x"), 4), (StoreError("x"), 1), (RemovalError("x"), 1), (GridError("x"), 1),
     (ValueError("one\n  two"), 1), (FileNotFoundError(2, "No such file", "x"), 1), (KeyboardInterrupt(), 130)],
)  # fmt: skip
def test_exit_codes(error: BaseException, code: int, shell: Shell) -> None:
    with replaced(store, "open_store", Failing(error)):
        shell("stats", "s", code=code)
    assert shell.out == ""
    with replaced(store, "open_store", Failing(error)):
        assert shell.json("stats", "s", code=code)["error"]["exit_code"] == code


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("cryptography", "audit", "keygen ?/k"), ("torchvision", "vision", "init ?/s --classes 2 --backbone resnet18"),
        ("matplotlib", "demo", "demo --out ?"), ("sklearn", "demo", "demo --out ?"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named(
    package: str, extra: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    shell = Shell(capsys, tmp_path)
    assert f"pip install 'torchlssvm[{extra}]'" in shell(*command.replace("?", str(tmp_path)).split(), code=1)
    assert not list(tmp_path.iterdir())


def test_an_unknown_missing_module_is_a_bug() -> None:
    missing = Failing(ModuleNotFoundError("no", name="elsewhere"))
    with replaced(store, "open_store", missing), pytest.raises(ModuleNotFoundError):
        cli.main(["stats", "s"])


# -- lists -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["id,owner\ns0,a\n", "s0,a\n", "s0;a\n", "a,b,c\n", "1,2\n" * N])
def test_a_table_without_the_header_is_refused(empty: Shell, text: str) -> None:
    Path("owners.csv").write_text(text)
    message = empty("add", "s", "--features", "x.npy", "--labels", "y.npy", "--subjects", "owners.csv", code=1)
    assert "id,subject" in message
    assert empty.json("stats", "s")["samples"] == 0


@pytest.mark.parametrize("option", ["--labels", "--ids", "--subjects"])
def test_a_list_says_that_it_goes_by_position(empty: Shell, option: str) -> None:
    Path("list.txt").write_text("".join(f"{i % 3 if option == '--labels' else i}\n" for i in range(N)))
    arguments = {"--labels": "y.npy", option: "list.txt"}
    add = ["add", "s", "--features", "x.npy", *(a for pair in arguments.items() for a in pair)]
    assert "--by-position" in empty(*add, code=1)
    assert empty.json("stats", "s")["samples"] == 0
    empty(*add, "--by-position")
    assert empty.json("stats", "s")["samples"] == N


# -- files that are there ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["report s --force --out", "export s --force", "remove s --id s1 --certificate"])
def test_nothing_is_written_into_a_store(filled: Shell, command: str) -> None:
    filled("init", "other", "--in-features", J, "--classes", K)
    Path("s/deep").mkdir()
    Path("link").symlink_to("s")
    before = {p: p.stat().st_size for p in Path("s").rglob("*")}
    for out in ("s/r.html", "s/samples.sqlite", "s/deep/r.html", "link/r.html", "other/r.html"):
        filled(*command.split(), out, code=1)
    assert {p: p.stat().st_size for p in Path("s").rglob("*")} == before
    assert filled.json("stats", "s")["samples"] == N


# -- usage errors as JSON ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        "--json", "nothing --json", "stats --json", "stats s --json --unknown", "add s --json", "init s --classes 2 --json",
        "remove s --json --subject a --id b", "stats s --timeout never --json", "stats s --js --timeout 1 --timeout 2",
        "remove s --json --id a --key k", "verify --json", "--json stats s", "demo --json --seed -1", "demo --json --seed x",
    ],
)  # fmt: skip
def test_a_usage_error_is_json_too(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(arguments.split())
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


INTERRUPTED = "torchlssvm: error: interrupted; changes made before are kept\n"


def listen() -> None:
    """Take Ctrl-C: what runs in the background of a shell is started with it ignored, and hands that down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("output", ["full", "broken", pytest.param("closed", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["remove", "s", "--id", "s1"], "the samples were removed, but the output could not be written"),
        (["stats", "s", "--json"], "nothing was changed, but the output could not be written"),
        (["classify", "s", "--features", "x.npy"], "nothing was changed, but the output could not be written"),
        (["stats", "nowhere", "--json"], "there is no store at nowhere"),
    ],
)
def test_an_output_that_cannot_be_written(filled: Shell, output: str, arguments: list[str], said: str) -> None:
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
    left = output == "broken" and said.startswith("nothing was changed")  # as in `torchlssvm stats s | head`
    assert said in err or left
    assert err.count("\n") == (0 if left else 1)
    assert process.returncode == (1 if "nowhere" in arguments else 0 if left else 5)
    assert filled.json("stats", "s")["samples"] == N - (arguments[0] == "remove")


def test_help_to_a_reader_that_has_left(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with start(tmp_path, "--help", stdout=writing) as process:
        os.close(writing)
        assert process.communicate(timeout=120)[1] == ""


def test_ctrl_c_while_adding(empty: Shell) -> None:
    x, _, _ = write(empty.folder)
    lines = "".join(",".join(map(str, [*row, i % 3])) + "\n" for i, row in enumerate(x.tolist() * 500))
    Path("long.csv").write_text(lines)
    command = ("add", "s", "--features", "long.csv", "--labels", "-1", "--batch-size", "2")
    with start(empty.folder, *command, preexec_fn=listen) as process:
        deadline = time.monotonic() + 60
        with SampleStore("s", readonly=True) as reader:
            while len(reader) < 10 and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert (process.communicate(timeout=60), process.returncode) == (("", INTERRUPTED), 130)
    assert 10 <= empty.json("stats", "s")["samples"] < 30_000
    assert len(empty.json("history", "s")["events"]) == empty.json("stats", "s")["samples"] / 2


@pytest.mark.parametrize(("entry", "delay"), [("module", 0.0), ("module", 0.4), ("script", 0.1)])
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

    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 60
        while not (tmp_path / "importing").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        assert (process.communicate(timeout=60), process.returncode) == (("", INTERRUPTED), 130)


def test_a_program_that_imports_the_library_keeps_its_handler() -> None:
    code = "import signal, torchlssvm; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
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


def test_a_bar_on_a_terminal(filled: Shell) -> None:
    filled("remove", "s", "--id", "s1", "--certificate", "c.json")
    seen = on_terminal(filled.folder, "verify", "c.json", "--store", "s", "--allow-unsigned")
    assert "\rverifying " in seen
    assert seen.split("\r")[-1] == ""  # the line is cleared


@pytest.mark.parametrize("json", [False, True])
def test_without_tqdm_or_with_json_there_is_no_bar(
    json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not json:
        monkeypatch.setattr("torchlssvm.progress_bar.find_spec", lambda _: None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress(argparse.Namespace(json=json), "adding", 1000) as advance:
        advance(500)
    assert capsys.readouterr().err == ""


# -- names of classes --------------------------------------------------------------------------------------------------


def test_names_and_labels(tmp_path: Path) -> None:
    with SampleStore(tmp_path / "s", LSSVMHead(J, 3)) as store:
        assert learn_names(store, ["0", "2"]).classes == []  # numbers stand for themselves
        learn_names(store, ["bees", "ants"])
        kept = learn_names(store, ["ants", "wasps"])
        assert [kept.label(t, 3) for t in ("ants", "2", " 1 ", "1.0")] == [1, 2, 1, 1]
        with pytest.raises(ValueError, match="would make 4 classes"):
            learn_names(store, ["flies"])
        with pytest.raises(ValueError, match="'flies'"):
            kept.label("flies", 3)
        assert store.classes == ["bees", "ants", "wasps"]
