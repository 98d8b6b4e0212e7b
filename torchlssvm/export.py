"""Serving: a head as plain weights, and files that run without this library.

``freeze`` leaves the statistics behind: what remains of a linear head is an ``nn.Linear``, of which nothing but the weights can
be read. A kernel machine *is* its support rows, so they are in its frozen form too. The rest works on any module.

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

import torch
from torch import Tensor, nn

from torchlssvm.errors import NotFittedError
from torchlssvm.functional.modes import exactly
from torchlssvm.heads import AttachedClassifier, LSSVMHead
from torchlssvm.machines import KernelLSSVM

__all__ = [
    "KernelScores",
    "PairVotes",
    "export_onnx",
    "export_program",
    "freeze",
    "load_safetensors",
    "save_safetensors",
]

FORMAT = "torchlssvm-frozen-1"


class PairVotes(nn.Module):
    """One-vs-one scores: a linear layer with one output a pair, then votes, ties broken by margins.

    As :func:`torchlssvm.functional.votes.votes`, by products.

    G (pairs, K) is +1 for the first class of a pair, -1 for the second.
    """

    def __init__(self, linear: nn.Linear, num_classes: int):
        super().__init__()
        self.linear = linear
        first, second = torch.triu_indices(num_classes, num_classes, 1, device=linear.weight.device)
        one_hot = torch.eye(num_classes, dtype=linear.weight.dtype, device=linear.weight.device)
        self.register_buffer("G", one_hot[first] - one_hot[second])
        self.register_buffer("seconds", one_hot[second].sum(0))

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """The votes."""
        scores = self.linear(x)
        margin = scores @ self.G
        won = (scores.sign() + 1) / 2 @ self.G + self.seconds
        return won + margin / (3 * (margin.abs() + 1))  # type: ignore[no-any-return]


class KernelScores(nn.Module):
    """k(x, X) alpha + b with the support rows X (n, J), alpha (n, K) and b (K,)."""

    def __init__(self, kernel: Any, rows: Tensor, alpha: Tensor, b: Tensor):
        super().__init__()
        self.kernel = kernel
        for name, value in (("rows", rows), ("alpha", alpha), ("b", b)):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:  # (B, J) -> (B, K)
        """The scores."""
        rows = self.kernel.prepare(x)
        return self.kernel.gram(rows, self.rows) @ self.alpha + self.b  # type: ignore[no-any-return]


@exactly
def freeze(head: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A head as a plain module without statistics, in eval mode: an ``nn.Linear``, or kernel and support rows.

    ``head``: an :class:`~torchlssvm.LSSVMHead`, a :class:`~torchlssvm.KernelLSSVM`, or what ``attach`` made (its network comes
    along, as a copy). Nothing is shared with the head; later changes of it do not show.
    """
    if isinstance(head, AttachedClassifier):
        return nn.Sequential(copy.deepcopy(head.backbone), nn.Flatten(1), freeze(head.head, dtype)).eval()
    if isinstance(head, LSSVMHead):
        if not head.n:
            raise NotFittedError("the head holds no samples: there is nothing to freeze")
        weight, bias = head.weight, head.bias
        linear = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device, dtype=dtype)
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
        linear.requires_grad_(False)
        return (PairVotes(linear, head.num_classes) if head.multiclass == "ovo" else linear).eval()
    if isinstance(head, KernelLSSVM):
        if not len(head.ids):
            raise NotFittedError("the machine holds no samples: there is nothing to freeze")
        rows = head._rows.x[head._rows.order()]
        parts = [t.detach().to(dtype).clone() for t in (rows, head.alpha, head.b)]
        return KernelScores(copy.deepcopy(head.kernel).to(dtype), *parts).eval()
    raise ValueError(f"freeze takes an LSSVMHead, a KernelLSSVM or what attach made; got {type(head).__name__}")


def export_program(
    model: nn.Module, example: Tensor, path: str | os.PathLike[str] | None = None
) -> torch.export.ExportedProgram:
    """``torch.export`` with a batch of any size; written to ``path`` (.pt2) if it is given. example: (B, ...), B >= 2."""
    program = torch.export.export(model, (_example(example),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    if path is not None:
        torch.export.save(program, os.fspath(path))
    return program


def export_onnx(model: nn.Module, example: Tensor, path: str | os.PathLike[str]) -> None:
    """An ONNX file with one input ``x`` and one output ``scores``, for a batch of any size. Needs onnx and onnxscript."""
    torch.onnx.export(
        model, (_example(example),), os.fspath(path), input_names=["x"], output_names=["scores"], dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},), external_data=False, verbose=False,
    )  # fmt: skip


def _example(example: Tensor) -> Tensor:
    if len(example) < 2:  # a batch of one would be taken for a constant
        raise ValueError(
            f"the example must have two rows or more, to show that their number may vary; got {len(example)}"
        )
    return example


def save_safetensors(model: nn.Module, path: str | os.PathLike[str], metadata: Mapping[str, Any] | None = None) -> None:
    """The weights of a frozen module, with metadata: the format, each tensor's shape, and what is given (as JSON)."""
    from safetensors.torch import save_file

    state = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    known = {"format": FORMAT, "shapes": json.dumps({name: list(value.shape) for name, value in state.items()})}
    given = {str(k): v if isinstance(v, str) else json.dumps(v) for k, v in (metadata or {}).items()}
    clash = sorted(set(known) & set(given))
    if clash:
        raise ValueError(f"metadata may not hold {clash[0]!r}: it is written by itself")
    save_file(state, os.fspath(path), metadata=known | given)


def load_safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file of :func:`save_safetensors`; ValueError when it is another one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{os.fspath(path)} is no safetensors file: {error}") from None
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{os.fspath(path)} was not written by save_safetensors: its format is {metadata.get('format')!r}"
        )
    return state, metadata
