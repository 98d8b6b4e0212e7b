"""Heads: nn.Modules that learn on features. :func:`torchlssvm.attach` puts one behind a network."""

from typing import TYPE_CHECKING

from torchlssvm._lazy import lazy_names

if TYPE_CHECKING:
    from torchlssvm.linear.head import LSSVMHead
    from torchlssvm.linear.kinds import HEAD_KINDS, head_class
    from torchlssvm.linear.linear_head import LinearHead
    from torchlssvm.linear.margin_head import MarginHead

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "torchlssvm.linear.head": ["LSSVMHead"],
        "torchlssvm.linear.kinds": ["HEAD_KINDS", "head_class"],
        "torchlssvm.linear.linear_head": ["LinearHead"],
        "torchlssvm.linear.margin_head": ["MarginHead"],
    },
)

__all__ = ["HEAD_KINDS", "LSSVMHead", "LinearHead", "MarginHead", "head_class"]
