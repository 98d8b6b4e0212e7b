"""The ``torchlssvm`` command. Each sub-command imports what it needs when it runs.

Exit codes: 0 it worked; 1 it did not, or was refused (one line on stderr says why); 2 the command line is wrong;
3 a certificate does not hold; 4 the store is busy, try again; 5 it worked, but what it says could not be written; 130
interrupted. With ``--json`` there is one JSON object on stdout, for an error too:
``{"error": {"type", "message", "exit_code"}}``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torchlssvm import __version__
from torchlssvm.cli import (
    add,
    certificate,
    compact,
    demo,
    drop,
    export,
    fit,
    history,
    init,
    keygen,
    pending,
    preview,
    readmit,
    receipt,
    relabel,
    remove,
    report,
    request,
    set_options,
    show,
    stats,
    subjects,
    suppression,
    verify,
)
from torchlssvm.cli.arguments import Parser, UsageError
from torchlssvm.cli.console import (
    BUSY,
    EXTRA_OF_PACKAGE,
    FAILED,
    INTERRUPTED,
    NOT_VERIFIED,
    OUTPUT_LOST,
    USAGE,
    OutputError,
    one_line,
    warn,
    write,
)
from torchlssvm.errors import StoreBusyError, TorchLSSVMError, VerificationError

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands

COMMANDS: tuple[Callable[[Commands], None], ...] = (
    init.register, keygen.register, add.register, remove.register, relabel.register, preview.register, compact.register,
    certificate.register, set_options.register,
    request.register, receipt.register, subjects.register, show.register, suppression.register, readmit.register,
    pending.register, drop.register, verify.register, export.register, history.register, stats.register, demo.register,
    report.register, fit.register,
)  # fmt: skip
EPILOG = """exit codes: 0 it worked; 1 it did not, or was refused; 2 wrong command line; 3 a certificate does not hold;
4 the store is busy; 5 it worked, but its output could not be written; 130 interrupted. Whatever a command reported as done is
on the disk."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a wrong command line leaves by SystemExit(2), as argparse does."""
    given = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    options = argparse.Namespace(json=any(len(a) > 2 and "--json".startswith(a) for a in given), parser=parser)
    try:
        options = fit.lightning_options(given) or parser.parse_args(given)
        if options.run is None:
            parser.print_help()
            return 0
        code: int = options.run(options)
        write("", end="")
        return code
    except SystemExit:  # of --help and --version
        flush()
        raise
    except UsageError as error:
        blamed = error.parser or options.parser
        fail(options, error, USAGE, f"{blamed.format_usage()}{blamed.prog}: error: ")
        raise SystemExit(USAGE) from None
    except KeyboardInterrupt:
        return fail(options, KeyboardInterrupt("interrupted; what was done before is kept"), INTERRUPTED)
    except OutputError as error:
        return fail(options, error, OUTPUT_LOST)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF_PACKAGE:
            raise
        install = f"needs the package {package}: pip install 'torchlssvm[{EXTRA_OF_PACKAGE[package]}]'"
        return fail(options, TorchLSSVMError(f"{options.command} {install}"), FAILED)
    except (TorchLSSVMError, ValueError, OSError) as error:
        return fail(options, error, exit_code(error))


def exit_code(error: Exception) -> int:
    """Return the exit code of an error."""
    if isinstance(error, VerificationError):
        return NOT_VERIFIED
    return BUSY if isinstance(error, StoreBusyError) else FAILED


def fail(options: argparse.Namespace, error: BaseException, code: int, start: str = "torchlssvm: error: ") -> int:
    """Print the error in one line, and as JSON if asked for; return the exit code."""
    message = one_line(error)
    warn(f"{start}{message}")
    if options.json:
        said: dict[str, Any] = {"type": type(error).__name__, "message": message, "exit_code": code}
        with contextlib.suppress(OutputError):  # stderr has it
            write(json.dumps({"error": said}))
    return code


def flush() -> None:
    """Flush standard output; a reader that has left is ignored."""
    with contextlib.suppress(OutputError):
        write("", end="")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with every command of :data:`COMMANDS`."""
    text = "Classifier heads that learn and unlearn exactly."
    parser: argparse.ArgumentParser = Parser(prog="torchlssvm", description=text, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for register in COMMANDS:
        register(commands)
    return parser
