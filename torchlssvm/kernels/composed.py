"""Kernels built from other kernels, from any callable, or from a network's features."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchlssvm.functional import checks
from torchlssvm.kernels.base import Kernel

Gram = Callable[[Tensor, Tensor], Tensor]


class Sum(Kernel):
    """k(x, z) = k_1(x, z) + k_2(x, z).

    If one of the kernels is a :class:`Deep` kernel, a prepared row concatenates the rows of both kernels; the first row has
    ``split`` columns.
    """

    options = ("split",)

    def __init__(self, first: Kernel | Gram, second: Kernel | Gram):
        super().__init__()
        self.first, self.second, self.split = as_kernel(first), as_kernel(second), 0
        self.deep = self.first.deep or self.second.deep

    def prepare(self, x: Tensor) -> Tensor:
        """x itself, or both parts' rows side by side."""
        if not self.deep:
            return x
        first, second = (part.prepare(x).flatten(1) for part in (self.first, self.second))
        self.split = first.shape[1]
        return torch.cat([first, second], 1)

    def floats(self, J: int) -> int:
        """Estimate the memory: the result of one part is kept while the other part is computed."""
        return 2 + max(self.first.floats(J), self.second.floats(J))

    def parts(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        """The Gram matrices K_1 and K_2."""
        if not self.deep:
            return self.first.gram(x1, x2), self.second.gram(x1, x2)
        a = self.split
        return self.first.gram(x1[:, :a], x2[:, :a]), self.second.gram(x1[:, a:], x2[:, a:])

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """The sum K_1 + K_2 (n1, n2)."""
        K1, K2 = self.parts(x1, x2)
        return K1 + K2


class Product(Sum):
    """k(x, z) = k_1(x, z) k_2(x, z)."""

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """K_1 * K_2, entry by entry."""
        K1, K2 = self.parts(x1, x2)
        return K1 * K2


class Scaled(Kernel):
    """k(x, z) = scale k_1(x, z), scale > 0."""

    options = ("scale",)

    def __init__(self, kernel: Kernel | Gram, scale: float):
        super().__init__()
        self.kernel, self.scale = as_kernel(kernel), checks.positive(scale, "scale")
        self.deep = self.kernel.deep

    def prepare(self, x: Tensor) -> Tensor:
        """Prepare rows as the scaled kernel does."""
        return self.kernel.prepare(x)

    def floats(self, J: int) -> int:
        """Count the numbers of the scaled kernel, and the product."""
        return 1 + self.kernel.floats(J)

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Return scale K (n1, n2)."""
        return self.scale * self.kernel.gram(x1, x2)


class Custom(Kernel):
    """Any callable ``(x1, x2) -> Gram`` of rows x1 (n1, J) and x2 (n2, J).

    The callable is applied to tiles of the Gram matrix, so k(x, z) must depend on x and z alone.

    >>> import torch
    >>> tanimoto = Custom(lambda a, b: a @ b.T / (a.sum(1)[:, None] + b.sum(1) - a @ b.T))
    >>> tanimoto(torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0, 0.0, 1.0]]))
    tensor([[0.3333]])
    """

    def __init__(self, function: Gram):
        super().__init__()
        self.function = function

    def floats(self, J: int) -> int:
        """Estimate the memory: a few temporaries of the result's size."""
        return 8

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Call the callable and check the shape it returns."""
        K = self.function(x1, x2)
        if not isinstance(K, Tensor) or tuple(K.shape) != (len(x1), len(x2)):
            shape = tuple(K.shape) if isinstance(K, Tensor) else type(K).__name__
            raise ValueError(
                f"a kernel must return a Gram matrix ({len(x1)}, {len(x2)}), {self.function!r} returned {shape}"
            )
        return K


class Deep(Kernel):
    """k(x, z) = kernel(network(x), network(z)), where the network is frozen and in eval mode.

    The features are flattened to rows and converted to float64. Machines keep the features, not the network's inputs.
    """

    deep = True

    def __init__(self, network: nn.Module, kernel: Kernel | Gram):
        super().__init__()
        self.network, self.kernel = network.requires_grad_(False).eval(), as_kernel(kernel)

    def train(self, mode: bool = True) -> Deep:
        """Keep the network in eval mode, because its features must not change."""
        super().train(mode)
        self.network.eval()
        return self

    def prepare(self, x: Tensor) -> Tensor:
        """Compute the network's features (n, J) in the network's own precision, and convert them to float64."""
        weight = next((p for p in self.network.parameters() if p.is_floating_point()), None)
        rows = self.network(x if weight is None or not x.is_floating_point() else x.to(weight.dtype))
        return self.kernel.prepare(rows.flatten(1).to(torch.float64))

    def floats(self, J: int) -> int:
        """Count the numbers of the kernel on the features."""
        return self.kernel.floats(J)

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """K (n1, n2) of the network's features."""
        return self.kernel.gram(x1, x2)


def as_kernel(kernel: Kernel | Gram) -> Kernel:
    """Return a kernel unchanged, and wrap any other callable in :class:`Custom`."""
    if isinstance(kernel, Kernel):
        return kernel
    if isinstance(kernel, type) or not callable(kernel):
        raise ValueError(
            f"kernel must be a kernel, e.g. RBF(sigma=1.0), or a callable (x1, x2) -> Gram; got {kernel!r}"
        )
    return Custom(kernel)
