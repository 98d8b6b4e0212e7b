"""Kernels: ``kernel(x1, x2)`` returns the Gram matrix (n1, n2) of the rows of x1 (n1, J) and x2 (n2, J).

You can add, multiply and scale kernels. Any callable ``(x1, x2) -> Gram`` works as a kernel too (:func:`as_kernel`).
:class:`Deep` applies a kernel to the features of a frozen network.

To limit its memory, a kernel computes the Gram matrix in tiles: apart from its inputs, a copy of them and its result, it needs
at most ``TILE_BYTES`` (8 MiB), or the memory for one pair of rows if that is larger. ``kernel.product(x1, x2, v)`` returns
K(x1, x2) v within the same limit, without computing the whole Gram matrix. Exported and compiled models do not use tiles, so
that one program works for any batch size.
"""

from torchlssvm.kernels.base import TILE_BYTES, Kernel
from torchlssvm.kernels.basic import RBF, Laplacian, Linear, Polynomial
from torchlssvm.kernels.composed import Custom, Deep, Product, Scaled, Sum, as_kernel

__all__ = [
    "RBF",
    "TILE_BYTES",
    "Custom",
    "Deep",
    "Kernel",
    "Laplacian",
    "Linear",
    "Polynomial",
    "Product",
    "Scaled",
    "Sum",
    "as_kernel",
]
