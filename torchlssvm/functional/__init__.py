"""Pure mathematics in torch, in the papers' letters, without state."""

from torchlssvm.functional.differentiable import LeaveOneOutLoss, fit

__all__ = ["LeaveOneOutLoss", "fit"]
