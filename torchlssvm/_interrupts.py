"""Ctrl-C while the command imports what it needs, which takes seconds: leave at once and quietly, with exit code 130.

Importing this module sets the handler, before anything heavy is imported, and only if this process is the command
(``torchlssvm`` or ``python -m torchlssvm``); :func:`restore` puts Python's own back. A program that imports the library
keeps its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

INTERRUPTED = 130
"""Exit code of an interrupted command: 128 plus the number of the signal, 2."""


def is_command() -> bool:
    """True if this process was started as the command."""
    if sys.argv[:1] == ["-m"]:  # what it is while Python imports the package that -m names
        return any(pair == ("-m", "torchlssvm") for pair in zip(sys.orig_argv, sys.orig_argv[1:], strict=False))
    return bool(sys.argv) and os.path.basename(sys.argv[0]) in ("torchlssvm", "torchlssvm.exe")


def leave(*_: Any) -> None:
    """End the process: nothing was begun."""
    os._exit(INTERRUPTED)


def restore() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, if it was this module that changed it."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if (
    is_command()
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where a shell has it ignored
):
    signal.signal(signal.SIGINT, leave)
