"""``python -m torchlssvm``: the same as the ``torchlssvm`` command."""

import sys

from torchlssvm.cli import main

if __name__ == "__main__":
    sys.exit(main())
