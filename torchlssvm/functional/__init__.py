"""Pure functions of tensors. They keep no state, and their symbols are those of the papers they implement."""

from torchlssvm.functional.differentiable import LeaveOneOutLoss, fit

__all__ = ["LeaveOneOutLoss", "fit"]
