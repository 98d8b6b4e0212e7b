"""What a head can say about itself: leave-one-out, the choice of rho, influence, probabilities, uncertainty."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchlssvm.functional.modes import exactly
from torchlssvm.heads.base import HeadBase
from torchlssvm.heads.leaving import leave_one_out


class Judging(HeadBase):
    """Read-only questions to :class:`~torchlssvm.LSSVMHead`; nothing here refits."""

    @exactly
    def leave_one_out(self, x: Any, y: Any, weight: Any = None, groups: Any = None) -> Tensor:
        """Scores (B, K) of samples held, each by the head that never saw it: y_i - (y_i - f(x_i)) / (1 - h_i).

        Exact, with class weights that follow the counts derived again without the sample. In batches: any part of what is
        held may be given. ``groups`` (B,): leave out the whole group instead (leave-user-out); all of a group goes in one call.

        Args:
            x: (B, J), as added. y: (B,) labels or (B, K) targets, as added. weight: (B,), as added.
            groups: (B,) numbers or names.

        >>> import torch
        >>> from torchlssvm import LSSVMHead
        >>> from torchlssvm.selection import error_rate
        >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
        >>> head = LSSVMHead(3, 2).add(x, y)
        >>> scores = head.leave_one_out(x, y)
        >>> torch.allclose(scores[0], head.remove(x[:1], y[:1])(x[:1])[0], atol=1e-4)  # the grid aside
        True
        >>> 0 <= error_rate(scores, y) <= 1
        True
        """
        return leave_one_out(self, x, y, weight, groups)
