"""The linear heads: they learn (x, y), keep sums of their samples, and remove the same (x, y) exactly."""

from __future__ import annotations

from torchlssvm.linear.head import LSSVMHead
from torchlssvm.linear.margin_head import MarginHead

HEAD_KINDS: dict[str, type[LSSVMHead] | type[MarginHead]] = {"lssvm": LSSVMHead, "margin": MarginHead}
"""The linear heads by the names that users give them."""

HEAD_TYPES: dict[str, type[LSSVMHead] | type[MarginHead]] = {kind.__name__: kind for kind in HEAD_KINDS.values()}
"""The linear heads by the names of their classes, which files and stores record."""


def head_class(kind: str) -> type[LSSVMHead] | type[MarginHead]:
    """The class of a linear head by its name. Raises ValueError for an unknown name."""
    if kind not in HEAD_KINDS:
        raise ValueError(f"head must be a module or one of {', '.join(map(repr, HEAD_KINDS))}, got {kind!r}")
    return HEAD_KINDS[kind]
