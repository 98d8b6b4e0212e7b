"""``python -m torchlssvm``, and the ``torchlssvm`` command."""

import sys


def main() -> int:
    """Run the command line. Ctrl-C ends it quietly even while it is still being imported."""
    try:
        from torchlssvm.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130  # as the command line itself does, see cli/console.py


if __name__ == "__main__":
    sys.exit(main())
