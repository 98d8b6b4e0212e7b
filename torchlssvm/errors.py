"""The errors and the warning of the library; ``torchlssvm`` itself has the most common ones.

Each error also derives from the built-in one that fits it, so ``except ValueError`` keeps working where it should.
"""

from typing import Any

__all__ = [
    "ConvergenceError",
    "GridError",
    "InexactDeviceError",
    "InterruptedUpdateError",
    "NotFittedError",
    "NumericalWarning",
    "OutOfMemoryError",
    "RemovalError",
    "StoreBusyError",
    "StoreDiskError",
    "StoreError",
    "SuppressedError",
    "TorchLSSVMError",
    "VerificationError",
]


class TorchLSSVMError(Exception):
    """The base of every error that this library names.

    Catch it to handle every error that is specific to this library. Plain mistakes in a call (a wrong shape, an
    unknown option, a label out of range) raise the built-in ``ValueError`` or ``RuntimeError`` instead.
    """


class NotFittedError(TorchLSSVMError, RuntimeError):
    """A prediction, or anything else derived from data, was asked of a machine that holds no samples.

    Raised before the first ``add``, and again when everything that was added has been removed.
    """


class OutOfMemoryError(TorchLSSVMError, MemoryError):
    """A change needs more memory than is free; it was refused before anything was allocated, and nothing was changed.

    The message gives both numbers of bytes and what to do: fewer features, or no sums per class.
    """


class RemovalError(TorchLSSVMError, ValueError):
    """The samples to be removed or relabelled are not held; the state is left as it was before the call.

    Raised by the call itself, never by a later read. A head on a grid knows its rows by fingerprint and names the first one
    that is not held; a store or a kernel machine knows ids and subjects. Where rows are not known (``head.unchecked`` says why)
    the error is raised when the remaining sums could not be those of samples.

    Attributes:
        row: the place in the call of the first row that is not held with its label, where that is known.
        label: its label. held_label: another label with which the row is held, if any.
    """

    row: int | None = None
    label: int | None = None
    held_label: int | None = None


class InterruptedUpdateError(TorchLSSVMError, RuntimeError):
    """An update was interrupted while sums were being changed in place, so the state is neither the old nor the new one.

    Every use of the head is refused from then on: load a checkpoint into it (``head.load_state_dict``), or open its store
    again. After an interrupt that came at any other time the head is as it was.
    """


class GridError(TorchLSSVMError, ValueError):
    """A value does not fit the fixed grid on which the statistics are summed exactly.

    Raised when a feature or a target lies beyond the grid's limit, or when a sum could leave the range of 64-bit
    integers. The message names the value and the limit; choose a ``FixedPoint`` with a larger ``limit`` (or fewer
    ``bits``), scale the features, or give up bit-exactness with ``grid=None``.
    """


class InexactDeviceError(TorchLSSVMError, RuntimeError):
    """A device's float64 products are not exact, so that sums on a grid would be wrong there.

    Tested once for each process and device, when the first samples are summed there.
    """


class ConvergenceError(TorchLSSVMError, RuntimeError):
    """A solver did not converge; no answer that violates its own conditions is returned.

    A ``LagrangianSVM`` ran out of steps; it still holds its samples. Allow more iterations or a larger tolerance, or choose
    another solver, and read again. An ``IncrementalSVM`` does not change.
    """


class VerificationError(TorchLSSVMError):
    """A certificate does not hold: its signature, digest or contents disagree with what it is checked against.

    Raised by ``verify`` with the reason; a certificate without a signature counts as a failure too, unless
    ``allow_unsigned=True``. ``check``: the :class:`~torchlssvm.audit.Check` that failed, None if it was not one of them.
    """

    check: Any = None


class StoreError(TorchLSSVMError):
    """A sample store cannot be used as asked: it is missing, foreign, newer, damaged, or not in step with its head.

    The message says which file, what was found there and what can be done; the files are left as they were.
    """


class NotForgottenError(StoreError):
    """A certificate was asked for samples that the network itself was trained on: the network still knows them."""


class StoreBusyError(StoreError):
    """Another process or an open reader holds the store: nothing was changed, try again when it is done."""


class StoreDiskError(StoreError):
    """The disk of a store is full, fails or cannot be written: nothing was changed, fix the disk and try again."""


class SuppressedError(TorchLSSVMError, ValueError):
    """Samples that were erased on request are offered again: they are on the store's suppression list, and nothing was changed.

    Leave them out, let the store skip them (``SampleStore(..., erased="skip")``), or allow a lawful return (``store.readmit``).
    """


class SuppressedWarning(UserWarning):
    """A store may hold samples that were erased on request: an old copy was put back, or an erasure was interrupted.

    ``store.erase_returned()``, or ``torchlssvm suppression apply``, erases them again.
    """


class NumericalWarning(UserWarning):
    """A result was computed, but not in the way or to the accuracy that was asked for.

    Issued when a factorization needed help, an update was replaced by a solve from the statistics, or a drift was found
    larger than it should be. The message says what happened and what was done about it.
    """
