"""Inventories for intersphinx, written from lists of names that are kept as text.

A list is ``docs/inventories/<project>.txt``: the address of the documentation in the first line, then ``name type place``
a line, as in an ``objects.inv``; ``$`` at the end of a place stands for the name.
"""

import zlib
from pathlib import Path


def mapping(lists: Path, folder: Path) -> dict[str, tuple[str, str]]:
    """Write an inventory for each list; return the setting ``intersphinx_mapping``."""
    folder.mkdir(parents=True, exist_ok=True)
    out = {}
    for path in sorted(lists.glob("*.txt")):
        address, *names = path.read_text(encoding="utf-8").splitlines()
        head = f"# Sphinx inventory version 2\n# Project: {path.stem}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        entries = [name.split() for name in names if name.strip()]
        body = "".join(f"{name} {kind} 1 {place} -\n" for name, kind, place in entries)
        inventory = folder / f"{path.stem}.inv"
        inventory.write_bytes(head.encode() + zlib.compress(body.encode()))
        out[path.stem] = (address, str(inventory))
    return out
