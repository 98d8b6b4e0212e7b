"""Export for serving: plain modules without statistics, and files that run without this library.

``freeze`` returns a head without its statistics. A linear head, or a kernel machine with the linear kernel, becomes an
``nn.Linear`` that contains only the weights. If the head has ``normalize``, the module normalizes rows first.

With any other kernel, the frozen machine contains its support rows, which are training samples, so freeze it again after an
erasure: the old file still contains the erased row. It contains no ids, no labels and no rows with coefficient zero.

>>> import torch
>>> from torchlssvm import LSSVMHead
>>> x, y = torch.randn(50, 4), torch.arange(50) % 3
>>> head = LSSVMHead(4, 3).add(x, y)
>>> frozen = freeze(head)
>>> frozen
Linear(in_features=4, out_features=3, bias=True)
>>> torch.allclose(frozen(x).double(), head(x), atol=1e-5)
True
>>> program = export_program(frozen, x[:2])
>>> torch.allclose(program.module()(x), frozen(x))
True
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchlssvm.errors import NotFittedError
from torchlssvm.features.layer_taps import LayerTaps
from torchlssvm.features.views import tensor_of
from torchlssvm.files import refuse_in_store
from torchlssvm.functional.modes import exactly
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.kernel_machines import KernelLSSVM, LagrangianSVM, OneVsOne
from torchlssvm.kernel_machines.multiclass import MultiClass
from torchlssvm.kernels import Linear
from torchlssvm.linear import LinearHead
from torchlssvm.linear.attach import AttachedClassifier
from torchlssvm.linear.checkpoint import checksum
from torchlssvm.linear.compact_head import CompactLSSVMHead
from torchlssvm.svm import IncrementalSVM

__all__ = [
    "KernelScores",
    "NormalizedLinear",
    "PairVotes",
    "export_onnx",
    "export_program",
    "freeze",
    "load_safetensors",
    "save_safetensors",
]

FROZEN_FORMAT = "torchlssvm-frozen-1"

_ORIGINS: WeakKeyDictionary[nn.Module, tuple[Any, int | None]] = WeakKeyDictionary()
"""The store of each frozen classifier or head that has one, and the journal position of its head."""


class NormalizedLinear(nn.Linear):
    """An ``nn.Linear`` that first normalizes rows by "l2" or "sqrt", as the head did."""

    def __init__(self, in_features: int, out_features: int, normalize: str, device: Any = None, dtype: Any = None):
        super().__init__(in_features, out_features, device=device, dtype=dtype)
        self.normalize = normalize

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """Return scores (B, K)."""
        return super().forward(normalized(x, self.normalize, torch.sqrt))


class PairVotes(nn.Module):
    """Computes one-vs-one scores (votes, with ties broken by margins) from a module with one output per pair of classes.

    The result equals that of :func:`torchlssvm.functional.votes.votes`, but is computed with matrix products. The matrix
    G (pairs, K) is +1 for the first class of a pair and -1 for the second.
    """

    def __init__(self, linear: nn.Module, num_classes: int):
        super().__init__()
        self.linear = linear
        like = next(iter(linear.state_dict().values()))
        first, second = torch.triu_indices(num_classes, num_classes, 1, device=like.device)
        one_hot = torch.eye(num_classes, dtype=like.dtype, device=like.device)
        self.register_buffer("G", one_hot[first] - one_hot[second])
        self.register_buffer("seconds", one_hot[second].sum(0))

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """Return votes (B, K) of all pairs."""
        scores = self.linear(x)
        margin = scores @ self.G
        won = (scores.sign() + 1) / 2 @ self.G + self.seconds
        return won + margin / (3 * (margin.abs() + 1))  # type: ignore[no-any-return]


class KernelScores(nn.Module):
    """Computes k(x, X) alpha + b for the support rows X (n, J), alpha (n, K) and b (K,).

    If ``augmented``, the kernel is applied to [x, -1]. The rows of X already have this form.
    """

    def __init__(self, kernel: Any, rows: Tensor, alpha: Tensor, b: Tensor, augmented: bool = False):
        super().__init__()
        self.kernel, self.augmented = kernel, augmented
        for name, value in (("rows", rows), ("alpha", alpha), ("b", b)):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """Return scores k(x, X) alpha + b (B, K)."""
        rows = self.kernel.prepare(x)
        if self.augmented:
            rows = nn.functional.pad(rows, (0, 1), value=-1.0)
        return self.kernel.gram(rows, self.rows) @ self.alpha + self.b  # type: ignore[no-any-return]


class FlatFeatures(nn.Module):
    """Converts the output of a network to rows (B, J) of the head's float type."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, output: Any) -> Tensor:
        """Return rows (B, J)."""
        return tensor_of(output).flatten(1).to(self.dtype)


@exactly
def freeze(head: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a head as a module without statistics, in eval mode: an ``nn.Linear``, or a kernel with support rows.

    The result shares no memory with the head, so later changes of the head do not affect it. If the classifier has a store,
    certificates of later erasures list the files that this module writes of the result.

    Args:
        head: a linear head (least-squares, margin or compact), a kernel machine, a ``OneVsRest`` or ``OneVsOne`` of kernel
            machines, or a classifier that ``attach`` returned. The network of a classifier is copied.
        dtype: the float type of the result.
    """
    if isinstance(head, AttachedClassifier):
        head._follow()
        position = None if head.store is None else head.store.head_position  # before the head is read
        backbone = copy.deepcopy(head.backbone)
        for part in backbone.modules():
            if isinstance(part, LayerTaps):
                part.exact = False  # rows are predicted, not summed: products in floats will do
        frozen = nn.Sequential(backbone, FlatFeatures(dtype), freeze(head.head, dtype)).eval()
        if head.store is not None:
            _ORIGINS[frozen] = (head.store, position)
        return frozen
    if isinstance(head, CompactLSSVMHead):
        return _linear(head.w.mT, head.b, dtype).eval()
    if isinstance(head, LinearHead):
        if not head.n:
            raise NotFittedError("the head holds no samples: there is nothing to freeze")
        store: Any = head._keeper
        position = None if store is None else store.head_position  # before the head is read
        with head._lock:  # of one state, whatever other threads do
            weight, bias = head.weight, head.bias
        linear = _linear(weight, bias, dtype, head.normalize)
        out = (PairVotes(linear, head.num_classes) if head.multiclass == "ovo" else linear).eval()
        if store is not None:
            _ORIGINS[out] = (store, position)
        return out
    scores = _scores(head, dtype)
    return (PairVotes(scores, head.num_classes) if isinstance(head, OneVsOne) else scores).eval()


def _linear(weight: Tensor, bias: Tensor, dtype: torch.dtype, normalize: str | None = None) -> nn.Linear:
    """Create an ``nn.Linear`` that computes x @ weight.T + bias, optionally on normalized rows."""
    shape = (weight.shape[1], weight.shape[0])
    linear = nn.Linear(*shape, device=weight.device, dtype=dtype)
    if normalize is not None:
        linear = NormalizedLinear(*shape, normalize, weight.device, dtype)
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)
    return linear.requires_grad_(False)


def _scores(head: Any, dtype: torch.dtype) -> nn.Module:
    """Return the scores of a kernel machine, or of the machines of several classes, with each support row only once."""
    machines = list(head.machines) if isinstance(head, MultiClass) else [head]
    if not all(isinstance(machine, KernelLSSVM | LagrangianSVM | IncrementalSVM) for machine in machines):
        raise ValueError(f"freeze takes a linear head, a kernel machine or what attach made; got {type(head).__name__}")
    if not len(head.ids):
        raise NotFittedError("the machine holds no samples: there is nothing to freeze")
    parts = [expansion(machine) if machine.n else None for machine in machines]
    if isinstance(head, MultiClass):  # of each machine f alone, the score of class 1
        parts = [None if part is None else (part[0], part[1][:, 1:], part[2][1:]) for part in parts]
    some = next(part for part in parts if part is not None)
    rows, places = torch.unique(torch.cat([p[0] for p in parts if p is not None]), dim=0, return_inverse=True)
    outputs = len(parts) if isinstance(head, MultiClass) else some[1].shape[1]
    alpha, b, start = some[1].new_zeros(len(rows), outputs), some[1].new_zeros(outputs), 0
    for t, part in enumerate(parts):
        if part is None:  # a machine without samples abstains
            continue
        at, start = places[start : start + len(part[0])], start + len(part[0])
        columns = slice(t, t + 1) if isinstance(head, MultiClass) else slice(None)
        alpha[:, columns] = alpha[:, columns].index_add(0, at, part[1])
        b[columns] = part[2]
    kernel = machines[0].kernel
    augmented = getattr(machines[0], "bias", None) == "augmented"
    if type(kernel) is Linear:  # the rows are in the sum, and nowhere else
        weight = (rows.mT @ alpha).mT
        return _linear(weight[:, :-1], b - weight[:, -1], dtype) if augmented else _linear(weight, b, dtype)
    used = alpha.abs().sum(1) > 0
    X, alpha, b = (value.detach().to(dtype).clone() for value in (rows[used], alpha[used], b))
    return KernelScores(copy.deepcopy(kernel).to(dtype), X, alpha, b, augmented)


def expansion(machine: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows (n, J), alpha (n, K) and b (K,) such that the scores are k(x, rows) alpha + b."""
    if isinstance(machine, KernelLSSVM | LagrangianSVM):
        return machine.expansion()
    if machine.kernel is None:
        raise ValueError("a machine with a precomputed kernel cannot be frozen: its rows are not here")
    rows, f, b = machine.expansion()
    f = f[:, None]
    b = torch.as_tensor(b, dtype=f.dtype, device=f.device).reshape(1)
    return rows, torch.cat([-f, f], 1), torch.cat([-b, b])


def export_program(
    model: nn.Module, example: Any, path: str | os.PathLike[str] | None = None
) -> torch.export.ExportedProgram:
    """Export a model with ``torch.export`` for batches of any size.

    Args:
        model: a frozen head or classifier (:func:`freeze`), or a classifier that ``attach`` returned, which is frozen first.
        example: a batch (B, ...) with B >= 2, or a dict of tokens (B, T). Only shape and type are used, not the values.
        path: file (.pt2) to write the program to.
    """
    if path is not None:
        refuse_in_store(path)
    given, shapes = _example(example)
    model = freeze(model) if isinstance(model, AttachedClassifier) else model
    program = torch.export.export(model, (given,), dynamic_shapes=(shapes,))
    if path is not None:
        torch.export.save(program, os.fspath(path))
        _register(model, path)
    return program


def export_onnx(model: nn.Module, example: Any, path: str | os.PathLike[str]) -> None:
    """Write an ONNX file with one output ``scores``, for a batch of any size. Needs onnx and onnxscript.

    The input is named ``x``. If ``example`` is a dict of tokens, the inputs are named after its keys. ``model`` and
    ``example`` are those of :func:`export_program`.
    """
    refuse_in_store(path)
    names = list(example) if isinstance(example, Mapping) else ["x"]
    model = freeze(model) if isinstance(model, AttachedClassifier) else model
    torch.onnx.export(
        export_program(model, example), (), os.fspath(path), input_names=names, output_names=["scores"], dynamo=True,
        external_data=False, verbose=False,
    )  # fmt: skip
    _register(model, path)


def _register(frozen: nn.Module, path: str | os.PathLike[str]) -> None:
    """Tell the store of a frozen classifier or a head about its file, so that certificates of later erasures list the file."""
    store, position = _ORIGINS.get(frozen, (getattr(frozen, "_keeper", None), None))
    if store is not None and not store.readonly:
        store.register_checkpoint(path, position)


def _example(example: Any) -> tuple[Any, Any]:
    """Create a batch of the example's shape without its data, and determine which of its sizes may vary.

    The example is replaced because an exported program keeps the batch that it was traced with.
    """
    batch = torch.export.Dim("batch")
    if isinstance(example, Mapping):
        length = torch.export.Dim("length")
        made: Any = {name: torch.ones_like(value) for name, value in example.items()}  # a mask must show its tokens
        rows = len(next(iter(made.values())))
        shapes: Any = {name: {0: batch, 1: length} for name in made}
    elif not isinstance(example, Tensor):
        raise TypeError(f"example must be a batch (B, ...) or a dict of tokens, got {type(example).__name__}")
    else:
        made, rows, shapes = torch.zeros_like(example), len(example), {0: batch}
    if rows < 2:  # a batch of one would be taken for a constant
        raise ValueError(f"the example must have two rows or more, to show that their number may vary; got {rows}")
    return made, shapes


def save_safetensors(model: nn.Module, path: str | os.PathLike[str], metadata: Mapping[str, Any] | None = None) -> None:
    """Write the weights of a frozen module, or of a classifier that ``attach`` returned, with metadata.

    The metadata contain the format, the shape of each tensor, the values that you pass (as JSON) and, if rows must be
    normalized before the weights are applied, ``normalize``.
    """
    from safetensors.torch import save_file

    refuse_in_store(path)
    model = freeze(model) if isinstance(model, AttachedClassifier) else model
    state = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    shapes = json.dumps({name: list(value.shape) for name, value in state.items()})
    known = {"format": FROZEN_FORMAT, "shapes": shapes, "checksum": checksum(state)}
    for part in model.modules():
        if isinstance(part, NormalizedLinear):
            known["normalize"] = part.normalize
    given = {str(k): v if isinstance(v, str) else json.dumps(v) for k, v in (metadata or {}).items()}
    clash = sorted(set(known) & set(given))
    if clash:
        raise ValueError(f"metadata may not hold {clash[0]!r}: it is written by itself")
    save_file(state, os.fspath(path), metadata=known | given)
    _register(model, path)


def load_safetensors(
    path: str | os.PathLike[str], file_format: str = FROZEN_FORMAT
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Load the tensors and metadata of a file that :func:`save_safetensors` wrote. Raises ValueError for any other file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{os.fspath(path)} is no safetensors file: {error}") from None
    if metadata.get("format") != file_format:
        raise ValueError(f"{os.fspath(path)} is not of the format {file_format!r}: it is {metadata.get('format')!r}")
    if file_format == FROZEN_FORMAT and metadata.get("checksum") != checksum(state):
        raise ValueError(f"{os.fspath(path)} is damaged: its tensors are not those that were saved")
    return state, metadata
