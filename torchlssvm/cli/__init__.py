"""The ``torchlssvm`` command. Each command imports what it needs when it runs, so help and usage errors appear quickly.

The exit codes are 0 for success; 1 for failure or refusal, with one line on stderr; 2 for a wrong command line; 3 if a
certificate does not hold; 4 if the store is busy, so try again; 5 for success if the output could not be written; and 130 if
interrupted. With ``--json``, stdout receives one JSON object, also for errors:
``{"error": {"type", "message", "exit_code"}}``.

To add a command, write a function in the module of its noun and declare it with ``@command`` (see ``arguments.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from importlib import import_module

from torchlssvm import __version__
from torchlssvm.cli import console
from torchlssvm.cli.arguments import NOUNS, Parser, UsageError, add_commands
from torchlssvm.cli.console import EXTRA_OF_PACKAGE, OutputError, one_line, warn, write
from torchlssvm.errors import StoreBusyError, TorchLSSVMError, VerificationError

for _noun in NOUNS:  # importing a module declares its commands
    import_module(f"torchlssvm.cli.{_noun}")

CODES: dict[type[Exception], int] = {
    OutputError: console.OUTPUT_LOST,
    VerificationError: console.NOT_VERIFIED,
    StoreBusyError: console.BUSY,
    TorchLSSVMError: console.FAILED,
    ValueError: console.FAILED,
    OSError: console.FAILED,
}
"""Exit codes of errors. The first class that matches counts. Any other error is a bug."""

TEXT = """Classifier heads that learn and unlearn exactly. Run `torchlssvm COMMAND --help` for
the options of a command."""

EXIT_CODES = """exit codes: 0 success; 1 failure or refusal; 2 wrong command line; 3 a certificate
does not hold; 4 the store is busy; 5 success, but the output could not be written;
130 interrupted. Changes are on the disk when a command reports them."""

LIGHTNING_STAGES = {
    "fit": "Train a head with Lightning: --config configs/base.yaml",
    "validate": "Evaluate a head with Lightning on the validation data",
    "test": "Evaluate a head with Lightning on the test data",
    "predict": "Compute scores with Lightning (for a store: classify)",
}
"""Commands that are passed on to Lightning, which parses the rest of the line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A wrong command line raises SystemExit(2), as argparse does."""
    given = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    options = argparse.Namespace(json=any(len(a) > 2 and "--json".startswith(a) for a in given), parser=parser)
    try:
        if given and given[0] in LIGHTNING_STAGES:
            from torchlssvm.lightning.cli import run

            options.command = given[0]
            return console.OK if run(given) else console.FAILED
        parsed, unknown = parser.parse_known_args(given)
        if unknown:
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}", getattr(parsed, "parser", parser))
        options = parsed
        if options.run is None:
            parser.print_help()
            return console.OK
        code: int = options.run(options)
        write("", end="")
        return code
    except SystemExit:  # of --help and --version
        with contextlib.suppress(OutputError):  # the reader has closed the pipe
            write("", end="")
        raise
    except UsageError as error:
        blamed = error.parser or options.parser
        fail(options, error, console.USAGE, f"{blamed.format_usage()}{blamed.prog}: error: ")
        raise SystemExit(console.USAGE) from None
    except KeyboardInterrupt:
        return fail(options, KeyboardInterrupt("interrupted; changes made before are kept"), console.INTERRUPTED)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF_PACKAGE:
            raise
        extra = "demo" if options.command == "demo" else EXTRA_OF_PACKAGE[package]
        install = f"pip install 'torchlssvm[{extra}]'"
        return fail(
            options, TorchLSSVMError(f"{options.command} needs the package {package}: {install}"), console.FAILED
        )
    except tuple(CODES) as error:
        return fail(options, error, next(code for kind, code in CODES.items() if isinstance(error, kind)))


def fail(options: argparse.Namespace, error: BaseException, code: int, start: str = "torchlssvm: error: ") -> int:
    """Print the error on one line, and as JSON with --json. Returns the exit code."""
    message = one_line(error)
    warn(f"{start}{message}")
    if options.json:
        said = {"type": type(error).__name__, "message": message, "exit_code": code}
        with contextlib.suppress(OutputError):  # it is on stderr
            write(json.dumps({"error": said}))
    return code


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with every command."""
    parser = Parser(
        prog="torchlssvm",
        usage="torchlssvm [-h] [--version] COMMAND ...",
        description=TEXT,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(run=None)
    add_commands(parser, LIGHTNING_STAGES)
    return parser
