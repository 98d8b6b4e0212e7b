"""The errors and warnings of the library. The most common ones can also be imported from ``torchlssvm``.

Each error also derives from a suitable built-in error, so that e.g. ``except ValueError`` works as expected.
"""

from collections.abc import Sequence
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
    """The base of all errors defined by this library.

    Catch this error to handle every error that is specific to this library. Mistakes in a call (a wrong shape, an unknown
    option, a label out of range) raise the built-in ``ValueError`` or ``RuntimeError``, not this error.
    """


class NotFittedError(TorchLSSVMError, RuntimeError):
    """A machine without samples was asked for a prediction, or for another result derived from data.

    This error is raised before the first ``add``, and again after all samples have been removed.
    """


class OutOfMemoryError(TorchLSSVMError, MemoryError):
    """A change needs more memory than is free. It was refused before any allocation, and nothing was changed.

    The message gives the required and the free memory in bytes, and suggests a remedy: fewer features, or no sums per class.
    """


class RemovalError(TorchLSSVMError, ValueError):
    """The samples to be removed or relabelled are not held. The state is the same as before the call.

    The call itself raises this error, never a later read. A head on a grid recognizes its rows by their hashes and names the
    first row that it does not hold, while a store or a kernel machine recognizes ids and subjects. A head that does not know
    its rows (``head.unchecked`` gives the reason) raises the error only if no set of samples could have the remaining sums.

    Attributes:
        row: the index, in the call, of the first row that is not held with its label, if known.
        label: the label of this row. held_label: another label with which the row is held, if any.
    """

    row: int | None = None
    label: int | None = None
    held_label: int | None = None


class InterruptedUpdateError(TorchLSSVMError, RuntimeError):
    """An update was interrupted while sums were being changed in place, so the state is neither the old nor the new one.

    The sums may then be half changed, so the head refuses every use until you load a checkpoint (``head.load_state_dict``) or
    open its store again. An interrupt at any other time leaves the head unchanged and does not raise this error.
    """


class GridError(TorchLSSVMError, ValueError):
    """A value does not fit the fixed grid on which the statistics are summed exactly.

    This error is raised if a feature or a target exceeds the grid's limit, or if a sum could exceed the range of 64-bit
    integers. The message names the value and the limit. Choose a ``FixedPoint`` with a larger ``limit`` (or fewer ``bits``),
    scale the features, or give up bit-exactness with ``grid=None``.
    """


class InexactDeviceError(TorchLSSVMError, RuntimeError):
    """The float64 products of a device are not exact, so sums on a grid would be wrong on that device.

    Each process tests each device once, when the first samples are summed on it.
    """


class ConvergenceError(TorchLSSVMError, RuntimeError):
    """A solver did not converge. An answer that violates the solver's own conditions is never returned.

    If a ``LagrangianSVM`` ran out of steps, it still holds its samples, so you can allow more iterations or a larger
    tolerance, or choose another solver, and read the result again. An ``IncrementalSVM`` stays unchanged.
    """


class VerificationError(TorchLSSVMError):
    """A certificate does not hold: its signature, digest or contents contradict the data it is checked against.

    ``verify`` raises this error with the reason. A certificate without a signature also fails, unless ``allow_unsigned=True``.
    ``check`` is the :class:`~torchlssvm.audit.Check` that failed, or None if no such check failed.
    """

    check: Any = None


class StoreError(TorchLSSVMError):
    """A sample store cannot be used as requested: it is missing, foreign, newer, damaged, or does not match its head.

    The message names the file, the problem and a remedy. The files were not changed.
    """


class NotForgottenError(StoreError):
    """A certificate was requested for samples that the network itself was trained on, so the network still knows them."""


class StoreBusyError(StoreError):
    """Another process or an open reader is using the store. Nothing was changed; try again later."""


class StoreDiskError(StoreError):
    """The disk of a store is full, failing or not writable. Nothing was changed; fix the disk and try again."""


class SuppressedError(TorchLSSVMError, ValueError):
    """An Add contains samples that were erased on request and are on the suppression list. Nothing was changed.

    Omit the samples, let the store skip them (``SampleStore(..., erased="skip")``), or allow their return (``store.readmit``).
    ``ids`` lists the ids of these samples.
    """

    ids: Sequence[str] = ()


class SuppressedWarning(UserWarning):
    """A store may hold samples that were erased on request, because an old copy was restored or an erasure was interrupted.

    ``store.erase_returned()``, or ``torchlssvm suppression apply``, erases these samples again.
    """


class NumericalWarning(UserWarning):
    """A result was computed, but not by the requested method or not to the requested accuracy.

    This warning is issued if a factorization had to be modified, an update was replaced with a solve from the statistics, or
    the drift was larger than expected. The message describes what happened and how it was handled.
    """
