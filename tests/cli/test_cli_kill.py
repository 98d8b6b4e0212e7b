"""An erasure on the command line that is killed: the same command, given again, does all that is missing."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_tools import Shell
from torchlssvm import cli, verify
from torchlssvm.audit import Certificate, ErasureReceipt
from torchlssvm.store import SampleStore

COMMAND = ["remove", "s", "--request", "R-1", "--compact", "--certificate", "R-1.json"]


def die_at(call: int) -> None:
    """Run the command, and kill the process at this call that changes a file."""
    count = 0

    def counted(real: Any) -> Any:
        def changed(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return changed

    for name in ("fsync", "replace", "unlink", "open", "link"):
        setattr(os, name, counted(getattr(os, name)))
    os._exit(cli.main(COMMAND))


@pytest.mark.parametrize("call", range(1, 15, 2))
def test_the_same_command_completes_an_erasure_that_was_killed(filled: Shell, call: int) -> None:
    filled("request", "open", "s", "--request", "R-1", "--subject", "person-03")
    process = multiprocessing.get_context("fork").Process(target=die_at, args=(call,))
    process.start()
    process.join(100)
    assert process.exitcode in (-signal.SIGKILL, 0)
    said = filled.json(*COMMAND)
    assert said["compacted"]
    certificate = Certificate.load("R-1.json")
    assert (certificate.compacted, certificate.erased) == (True, 5)
    assert ErasureReceipt.load("R-1.receipt.json").check(certificate)
    with SampleStore("s") as store:
        assert verify(certificate, store=store, allow_unsigned=True)
        assert store.find(subject="person-03") == []
    assert not any(b"person-03" in path.read_bytes() for path in Path("s").iterdir())
    assert filled.json("request", "close", "s", "R-1")["state"] == "answered"
