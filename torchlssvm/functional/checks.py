"""Input checks. Checks of shapes and types run first, because they need no data. All others share one read from the device."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from torchlssvm.errors import RemovalError
from torchlssvm.functional import sparse_rows
from torchlssvm.functional.threads import PASS_WORK, threads_for

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_fake(*tensors: Tensor | None) -> bool:
    """Whether any tensor has no data (FakeTensorMode, meta device), as in an exported ``forward``."""
    return any(t is not None and (t.is_meta or isinstance(t, FakeTensor)) for t in tensors)


def not_finite(t: Tensor) -> bool:
    """Return True if an entry is infinite or NaN. A finite sum shows in one pass that all entries are finite."""
    if not t.numel() or is_fake(t):
        return False
    with threads_for(PASS_WORK * t.numel()):
        return not math.isfinite(float(t.sum())) and not bool(t.isfinite().all())


def to_host(*tensors: Tensor) -> list[list[float]]:
    """The values of small tensors as Python floats, in one device synchronization."""
    if all(t.device.type == "cpu" for t in tensors):
        return [t.reshape(-1).tolist() for t in tensors]  # tensors inside a torch.func transform have no numpy array
    return [array.reshape(-1).tolist() for array in read(*tensors)]


def read(*tensors: Tensor) -> list[NDArray[Any]]:
    """Return the values of tensors as host arrays, in one device synchronization. CPU tensors are not copied.

    Numbers of eight bytes are transferred unchanged, in one array. Shorter numbers are converted to float64 or int64 first.
    """
    if all(t.device.type == "cpu" for t in tensors):
        return [t.numpy() for t in tensors]
    wide = [
        t if t.element_size() == 8 else t.to(torch.float64 if t.is_floating_point() else torch.int64) for t in tensors
    ]
    words = torch.cat([t.reshape(-1).view(torch.int64) for t in wide]).cpu().numpy()
    out, start = [], 0
    for t in wide:
        part = words[start : start + t.numel()]
        out.append((part.view(np.float64) if t.is_floating_point() else part).reshape(tuple(t.shape)))
        start += t.numel()
    return out


def as_tensor(value: Any, name: str, device: torch.device) -> Tensor:
    """Return a detached tensor on ``device``. A tensor on another device is an error; any other value is copied to ``device``.

    Arrays, and objects with a ``to_numpy`` method (a pandas Series or DataFrame), are accepted like lists.
    """
    if isinstance(value, Tensor):
        if value.device != device:
            raise RuntimeError(
                f"{name} is on {value.device} but the machine is on {device}: move one of them, e.g. {name}.to({str(device)!r})"
            )
        return value.detach() if value.requires_grad else value
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    try:
        if isinstance(value, np.ndarray):
            value = native(value)
        tensor = torch.as_tensor(value, device=device)
        if tensor.is_floating_point() and isinstance(value, list | tuple):
            tensor = torch.as_tensor(value, dtype=torch.float64, device=device)  # Python's floats, to the bit
        return tensor
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        text = first_text(value)
        if text is None:
            raise ValueError(f"{name} cannot be read as a tensor: {error}") from error
        kind = (
            "integer labels 0..K-1: number the classes, with a store by store.labels(names)"
            if name == "y"
            else "numbers"
        )
        raise ValueError(f"{name} holds text, {text[:40]!r} for one; it must be {kind}") from None


def first_text(value: Any) -> str | None:
    """Return the first element of a list, an array, or a list of lists if it is text; otherwise None."""
    while isinstance(value, list | tuple | np.ndarray) and len(value):
        value = value[0]
    return str(value) if isinstance(value, str) else None


def id_list(ids: Any) -> list[int]:
    """Return sample ids (a tensor, array, list or number) as a list. Raises ValueError unless they are integers (no mask)."""
    if isinstance(ids, np.integer) or (isinstance(ids, int) and not isinstance(ids, bool)):
        return [int(ids)]
    if isinstance(ids, Tensor | np.ndarray) and str(ids.dtype).removeprefix("torch.").lstrip("u").startswith("int"):
        return [int(i) for i in ids.reshape(-1).tolist()]
    if isinstance(ids, Iterable) and not isinstance(ids, str | bytes):
        out: list[Any] = [i.item() if isinstance(i, Tensor | np.generic) and not i.ndim else i for i in ids]
        if all(isinstance(i, int) and not isinstance(i, bool) for i in out):
            return out
    raise ValueError(f"ids must be integers, as add returned them, got {ids!r}")


def native(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert an array for torch: writable, without negative strides, in native byte order, and of a known type."""
    if array.dtype.hasobject:
        array = np.array(array.tolist())  # pandas' own integers, for one
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.size and int(array.max()) >= 2**63:
            raise OverflowError(f"{int(array.max())} does not fit into 64 bits with a sign")
        return array.astype(np.int64)
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return array.copy() if not array.flags.writeable or min(array.strides, default=0) < 0 else array


def sparse_features(given: Any, device: torch.device) -> Tensor | None:
    """Return sparse rows (torch's, of any layout, or scipy's) as a coalesced tensor; None for anything else."""
    if isinstance(given, Tensor):
        if given.layout == torch.strided:
            return None
        x = as_tensor(given, "x", device)
        return (x if x.layout == torch.sparse_coo else x.to_sparse_coo()).coalesce()
    if not hasattr(given, "tocoo") or not hasattr(given, "nnz"):
        return None
    if len(given.shape) != 2:
        raise ValueError(f"x must have two dimensions, got shape {tuple(given.shape)}")
    found = given.tocoo()
    places = as_tensor(np.stack([found.row, found.col]).astype(np.int64), "x", device)
    values = as_tensor(found.data, "x", device)
    return torch.sparse_coo_tensor(places, values, given.shape, check_invariants=True).coalesce()


def features(given: Any, J: int, device: torch.device, sparse: bool = False) -> Tensor:
    """Return x as a float (B, J) tensor. Sparse rows (torch's or scipy's) stay sparse if ``sparse``, else become dense."""
    x = sparse_features(given, device)
    if x is None:
        x = as_tensor(given, "x", device)
    elif not sparse or x.numel() <= 2**17:  # few rows (1 MiB) update the weights instead of solving for them
        x = x.to_dense()
    if x.ndim != 2 or x.shape[1] != J:
        hint = "; a single sample is x[None]" if x.ndim == 1 else ""
        raise ValueError(f"x must have shape (B, {J}), got {tuple(x.shape)}{hint}")
    if x.dtype in INTEGER_DTYPES or x.dtype == torch.bool:
        x = sparse_rows.with_values(x, x.values().to(torch.float64)) if x.is_sparse else x.to(torch.float64)
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"x must be a real floating point tensor, got dtype {x.dtype}")
    return x


def scored_features(x: Any, J: int, device: torch.device, sparse: bool = False) -> Tensor:
    """Return features to score as float64 (B, J), differentiable in x. Lists and arrays go through :func:`features`."""
    usable = isinstance(x, Tensor) and x.device == device and not x.is_complex() and x.shape[1:] == (J,)
    return (x if usable else features(x, J, device, sparse)).to(torch.float64)


def targets(y: Any, x: Tensor, K: int, mode: str | None = None) -> tuple[Tensor, str]:
    """y as int64 labels (B,), kind "labels", or as float targets (B, K), kind "values".

    With ``mode`` None, y may be of either kind. With "multilabel" or "regression", y must be (B, K), or may be (B,) if K = 1.
    """
    y = as_tensor(y, "y", x.device)
    if y.ndim == 0 or y.shape[0] != x.shape[0]:
        raise ValueError(f"x and y differ in length: x has shape {tuple(x.shape)}, y has shape {tuple(y.shape)}")
    if y.numel() == 0 and y.ndim == 1 and K > 1:
        return (y.to(torch.int64), "labels") if mode is None else (y.to(torch.float64).reshape(0, K), "values")
    is_label = y.dtype in INTEGER_DTYPES or (y.dtype == torch.bool and K == 2)
    if mode is None and y.ndim == 1 and is_label and K > 1:
        return y.to(torch.int64), "labels"
    if y.ndim == 1 and K == 1:
        y = y[:, None]
    if (
        y.ndim == 2
        and y.shape[1] == K
        and (y.dtype in FLOAT_DTYPES or y.dtype in INTEGER_DTYPES or y.dtype == torch.bool)
    ):
        return (y if y.dtype in FLOAT_DTYPES else y.to(torch.float64)), "values"
    if mode is not None:
        what = "0 and 1, or booleans," if mode == "multilabel" else "numbers"
        raise ValueError(
            f"targets={mode!r} needs y with {what} of shape (B, {K}), got shape {tuple(y.shape)}, dtype {y.dtype}; class "
            'labels (B,) are for targets="classes"'
        )
    if y.ndim == 1 and y.dtype in FLOAT_DTYPES:
        odd = next((v for v in y.tolist() if not v.is_integer()), y[0].item())
        raise ValueError(
            f"labels must be integers, got dtype {y.dtype} with the value {odd!r}; "
            f"use y.long() for labels, or float targets of shape (B, {K})"
        )
    raise ValueError(
        f"y must be integer labels of shape (B,) or float targets of shape (B, {K}); "
        f"got shape {tuple(y.shape)}, dtype {y.dtype} for x of shape {tuple(x.shape)}"
    )


def label_signs(y: Tensor) -> Tensor:
    """Code labels 0 and 1 as -1 and +1 (B, K), float64; anything else becomes NaN. y: (B, K)."""
    signs = 2.0 * y.to(torch.float64) - 1.0
    return torch.where(signs.abs() == 1.0, signs, torch.nan)


def raise_not_binary(y: Tensor) -> None:
    """Raise ValueError with the first value that is neither 0 nor 1."""
    first = tuple(label_signs(y).isnan().nonzero()[0].tolist())
    raise ValueError(
        f'targets="multilabel" needs 0 and 1, or booleans; y holds {y[first].item()!r} at index {first}. Numbers are for '
        'targets="regression"'
    )


def binary(y: Tensor) -> Tensor:
    """Labels 0 and 1 as booleans. ValueError for anything else."""
    if y.dtype != torch.bool and bool(label_signs(y).isnan().any()):
        raise_not_binary(y)
    return y.bool()


def truth(y: Any, predicted: Tensor, mode: str) -> Tensor:
    """Labels or targets to judge predictions by, in the shape of these. ValueError for another shape, or what ``add`` refuses.

    predicted: (n,) or (n, K); ``mode``: "classes", "multilabel" (returns booleans) or "regression".
    """
    y = y.to(predicted.device) if isinstance(y, Tensor) else as_tensor(y, "y", predicted.device)
    if mode != "classes" and y.shape[:1] == predicted.shape[:1] and y.numel() == predicted.numel() == len(y):
        y = y.reshape(predicted.shape)  # K = 1
    if y.shape != predicted.shape:
        each = "one label for each sample" if mode == "classes" else "as predict returns them"
        raise ValueError(f"y must have shape {tuple(predicted.shape)}, {each}; got {tuple(y.shape)}")
    if mode == "regression" and not_finite(y):
        raise_not_finite("y", y)
    return binary(y) if mode == "multilabel" else y


def thresholds(given: Any, K: int, device: torch.device) -> Tensor:
    """Return the thresholds of K labels as float64 (K,), from one number for all, one for each, or None for 0."""
    if given is None:
        return torch.zeros(K, dtype=torch.float64, device=device)
    values = as_tensor(given, "thresholds", device).to(torch.float64)
    if values.shape not in ((), (K,)) or bool(values.isnan().any()):
        raise ValueError(f"thresholds must be a number or {K} numbers, one for each label; got {given!r}")
    return values.expand(K)


def weights(given: Any, x: Tensor) -> Tensor | None:
    """Sample weights as float64 (B,)."""
    if given is None:
        return None
    weight = as_tensor(given, "weight", x.device)
    if weight.shape != x.shape[:1]:
        raise ValueError(f"weight must have shape ({x.shape[0]},) like x's rows, got {tuple(weight.shape)}")
    if weight.is_complex():
        raise ValueError(f"weight must be real, got dtype {weight.dtype}")
    return weight.to(torch.float64)


def row_largest(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row (B,), or NaN if the row contains NaN."""
    if x.is_sparse:
        return sparse_rows.row_largest(x)
    if x.shape[1] == 0:
        return torch.zeros(x.shape[0], dtype=x.dtype, device=x.device)
    if x.device.type != "cpu":
        return x.abs().amax(1)  # two launches
    return torch.maximum(x.amax(1), -x.amin(1))  # one pass, no temporary of x's size


def raise_not_finite(name: str, values: Tensor) -> None:
    """Raise ValueError with the number of NaN or inf entries and the first index."""
    bad = ~torch.isfinite(values.values() if values.is_sparse else values)
    first = tuple(values.indices()[:, bad][:, 0].tolist() if values.is_sparse else bad.nonzero()[0].tolist())
    raise ValueError(
        f"{name} holds {int(bad.sum())} NaN or inf value(s), the first at index {first[0] if len(first) == 1 else first}: "
        "clean or drop those samples"
    )


def finite_scores(scores: Tensor) -> Tensor:
    """Return scores (B, K) if they are finite, else raise ValueError with the first row that is not. Reads the device once."""
    if not torch.compiler.is_compiling() and not_finite(scores):
        bad = (~scores.isfinite().all(1)).nonzero()[:, 0]
        raise ValueError(
            f"x holds NaN or inf, or values too large to score, in {len(bad)} row(s), the first at index {int(bad[0])}"
        )
    return scores


def positive(value: Any, name: str) -> float:
    """A finite number > 0."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
    return float(value)


def natural(value: Any, name: str) -> None:
    """Raise ValueError unless the value is an int >= 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an int >= 0, got {value!r}")


def label(value: Any, K: int) -> None:
    """Raise ValueError unless the value is the number of a class."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < K:
        raise ValueError(f"the class must be an int in 0..{K - 1}, got {value!r}")


def one_of(value: Any, name: str, allowed: tuple[Any, ...]) -> Any:
    """Return the value of an option, or raise ValueError with the allowed values."""
    if isinstance(value, str) and value in allowed:
        return value
    if not any(value is a for a in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value


def removal_error(what: str) -> RemovalError:
    """The error for removing samples that were provably never added."""
    return RemovalError(
        f"{what}: the samples to remove are not among the current samples. You can only remove exactly what was added: the "
        "same features, label and weight, bit for bit. Nothing was changed."
    )
