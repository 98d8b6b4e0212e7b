"""Kernels: ``kernel(x1, x2)`` is the Gram matrix (n1, n2) of the rows of x1 (n1, J) and x2 (n2, J).

Kernels are added, multiplied and scaled like the numbers they give; any callable ``(x1, x2) -> Gram`` will do in their
place (:func:`as_kernel`), and :class:`Deep` puts one on the features of a frozen network.

Memory: beyond its inputs, a copy of them and its result a kernel works in at most ``TILE_BYTES`` (8 MiB) at a time, or what a
single pair of rows takes if more; ``kernel.product(x1, x2, v)`` gives K(x1, x2) v without the Gram matrix, in the same bound.
While a model is exported or compiled the tiles are left out: one program for any batch size.
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
