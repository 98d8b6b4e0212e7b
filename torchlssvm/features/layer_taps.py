"""Features from several layers of one frozen network, pooled, normalized and projected to a fixed number of columns.

A head on these features unlearns exactly, like a head on the last layer, because the features of a sample are a fixed function
of that sample: the network is frozen, pooling and normalization do not look at other samples, and a seed determines the
projection.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchlssvm.features.last_layer import find_last_layer
from torchlssvm.functional.modes import all_or_nothing
from torchlssvm.functional.projection import project, sign_weights
from torchlssvm.functional.row_normalization import ROW_NORMALIZATIONS, normalized

POOLS = ("mean", "std", "cls", "grid2", "grid3", "grid4")
"""Ways to pool the positions of a layer: mean, standard deviation, first token, mean over the cells of a g x g grid."""

LAYER_SETS = ("last", "blocks", "all")
"""Names of sets of layers. Any other value of ``layers`` is a module name, a pattern, or a list of names and patterns."""


class LayerTaps(nn.Module):
    """Map a batch to the features (B, J) of several layers of a frozen network.

    The output of each tapped layer is pooled over its positions (pixels or tokens) and normalized. If the layers together have
    more than ``max_features`` values, fixed random sign matrices project them to fewer. Each layer keeps separate columns
    (``groups``), so that ``column_selection.select(head, taps.groups)`` can choose among the layers.

    **The network that you pass is frozen** and put in eval mode. Its weights and layers do not change. If an error is raised,
    its modes and gradient flags are restored.

    Args:
        model: any ``nn.Module``, such as a classifier of torchvision or timm or an encoder of Hugging Face transformers.
        layers: ``"blocks"`` (the output of every block), ``"all"`` (also the widest activation inside each block),
            ``"last"`` (the last block only), or a list of module names and patterns, such as ``["features.1?", "conv1"]``.
        pool: ``"mean"``, ``"std"``, ``"cls"`` (the first token), ``"grid2"`` (means over 2 x 2 cells; also ``"grid3"`` and
            ``"grid4"``), or several of these. Tokens that an attention mask hides are left out.
        normalize: how the values of each layer are normalized for each sample: ``"l2"`` (to length 1), ``"sqrt"`` (signed
            square root, then to length 1) or None.
        max_features: the largest number of columns, which the layers share in proportion to their widths; None for no limit.
        example: a batch that is run once to find the widths of the layers. Required only if the input cannot be guessed.
        seed: the seed of the projection.

    Attributes:
        groups: the columns of each tapped layer, as a slice.
        out_features: J, the number of columns.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU())
        >>> taps = LayerTaps(network, layers="all", pool=("mean", "std"))
        >>> taps.groups
        {'1': slice(0, 16, None), '3': slice(16, 48, None)}
        >>> taps(torch.randn(4, 3, 8, 8)).shape
        torch.Size([4, 48])
    """

    takes_batches = True  # a dict of tensors goes in as it is

    def __init__(
        self,
        model: nn.Module,
        layers: str | Sequence[str] = "blocks",
        pool: str | Sequence[str] = "mean",
        *,
        normalize: str | None = "l2",
        max_features: int | None = 4096,
        example: Any = None,
        seed: int = 0,
    ):
        super().__init__()
        self.pool = (pool,) if isinstance(pool, str) else tuple(pool)
        if not self.pool or not set(self.pool) <= set(POOLS):
            raise ValueError(f"pool must be among {', '.join(POOLS)}, got {pool!r}")
        if normalize not in ROW_NORMALIZATIONS:
            raise ValueError(f"normalize must be None, 'l2' or 'sqrt', got {normalize!r}")
        if max_features is not None and (not isinstance(max_features, int) or max_features < 1):
            raise ValueError(f"max_features must be a whole number >= 1 or None, got {max_features!r}")
        self.normalize, self.max_features, self.seed = normalize, max_features, seed
        self.exact = True  # the projection gives the same bits in any batch; False for export
        self.model = model
        if isinstance(model, nn.DataParallel | torch.jit.ScriptModule):
            raise ValueError(
                f"hooks cannot read the layers of a {type(model).__name__}: give the network that it was made of, such as "
                "model.module of a DataParallel"
            )
        with unchanged_on_error(model):
            model.requires_grad_(False).eval()
            names = tap_candidates(model, layers)
            try:
                widths = self._widths(guess_input(model) if example is None else example, names)
            except (RuntimeError, TypeError) as error:
                if example is not None:
                    raise
                raise ValueError(
                    f"cannot tell what {type(model).__name__} takes ({str(error)[:200]}): give a batch of it, "
                    "LayerTaps(model, example=batch)"
                ) from error
            if layers == "last":
                widths = dict(list(widths.items())[-1:])
            elif layers == "all":
                widths = widest_inside(widths, list(find_blocks(model)))
            if not widths:
                raise ValueError(
                    f"no layer of {type(model).__name__} that {layers!r} names gives a tensor with 2 to 4 dimensions"
                )
            shares = share_columns(widths, max_features)
        self.layers = layers if isinstance(layers, str) else tuple(layers)
        self._tap(widths, shares)

    def _tap(self, widths: dict[str, int], shares: dict[str, int]) -> None:
        """Tap the layers of ``widths`` and make their projections. widths, shares: values and columns of each layer."""
        self.taps, self.in_widths = tuple(widths), widths
        self.groups: dict[str, slice] = {}
        start = 0
        for name, share in shares.items():
            self.groups[name] = slice(start, start + share)
            start += share
        self.out_features = start
        device = next((t.device for t in [*self.model.parameters(), *self.model.buffers()]), None)
        for i, name in enumerate(self.taps):
            if shares[name] < widths[name]:
                signs = sign_weights((widths[name], shares[name]), zlib.crc32(f"{self.seed} {name}".encode()))
                self.register_buffer(f"signs_{i}", signs.to(device))

    def only(self, names: Collection[str]) -> LayerTaps:
        """Return taps of some of the layers of the same network. The features of these layers do not change."""
        part = copy.copy(self)
        part._buffers = {}
        widths = {name: width for name, width in self.in_widths.items() if name in names}
        part._tap(widths, {name: self.groups[name].stop - self.groups[name].start for name in widths})
        return part

    def forward(self, batch: Any) -> Tensor:
        """Compute features (B, J) of a batch: a tensor (B, ...), or a dict of tensors as a tokenizer returns it."""
        mask, pooled = _mask_of(batch), dict[str, Tensor]()

        def pool(name: str, output: Tensor) -> None:
            if name in self.groups:
                pooled[name] = self._pooled(output, mask, name in self._channels_last)

        self._run(batch, {name.partition(":")[0] for name in self.taps}, pool)
        absent = [name for name in self.taps if name not in pooled]
        if absent:
            raise ValueError(f"{type(self.model).__name__} did not run its layer {absent[0]!r} for this batch")
        columns = []
        for i, name in enumerate(self.taps):
            x = pooled[name]
            if self.normalize == "sqrt":
                x = normalized(x, "sqrt", torch.sqrt)
            if self.normalize is not None:
                x = normalized(x, "l2", torch.sqrt)
            signs = getattr(self, f"signs_{i}", None)
            if signs is not None:
                x = (project(x, signs) if self.exact else x @ signs.to(x)) / signs.shape[1] ** 0.5
            columns.append(x)
        return torch.cat(columns, 1)

    @torch.no_grad()
    def _widths(self, example: Any, names: Iterable[str]) -> dict[str, int]:
        """Return the pooled width of each layer's output, in the order of the outputs.

        A tensor that two modules return counts once. If some outputs have positions, outputs without positions, (B, K), are
        left out, because they are the scores of a classifier.
        """
        mask, seen = _mask_of(example), dict[str, Tensor]()

        def keep(name: str, output: Tensor) -> None:
            for other in [n for n, value in seen.items() if value is output]:
                del seen[other]  # a block's last layer returns what the block does
            seen[name] = output

        self._run(example, names, keep)
        if any(value.ndim > 2 for value in seen.values()):
            seen = {name: value for name, value in seen.items() if value.ndim > 2}
        # As in Swin. The example is square, so this does not depend on the size of later pictures.
        self._channels_last = {
            n for n, value in seen.items() if value.ndim == 4 and value.shape[1] == value.shape[2] != value.shape[3]
        }
        return {name: self._pooled(v, mask, name in self._channels_last).shape[1] for name, v in seen.items()}

    def _run(self, batch: Any, names: Iterable[str], use: Callable[[str, Tensor], None]) -> None:
        """Run the network and pass each output of the named modules to ``use``. The second call of a module is "name:2"."""
        calls, mask = dict[str, int](), _mask_of(batch)
        compiling = torch.compiler.is_compiling()
        thread = 0 if compiling else threading.get_ident()

        def hook_of(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                if not compiling and threading.get_ident() != thread:
                    return  # another thread runs the same network
                output = output[0] if isinstance(output, tuple | list) else output
                if isinstance(output, Tensor) and output.is_nested and mask is not None:  # nn.TransformerEncoder
                    output = output.to_padded_tensor(0.0, (*mask.shape, output.size(-1)))
                calls[name] = calls.get(name, 0) + 1
                if isinstance(output, Tensor) and output.ndim in (2, 3, 4):
                    use(name if calls[name] == 1 else f"{name}:{calls[name]}", output)

            return hook

        handles = [self.model.get_submodule(name).register_forward_hook(hook_of(name)) for name in names]
        try:
            self.model(**batch) if isinstance(batch, Mapping) else self.model(batch)
        finally:
            for handle in handles:
                handle.remove()

    def _pooled(self, output: Tensor, mask: Tensor | None, channels_last: bool) -> Tensor:
        """Pooled values (B, C * len(pool)) of an output (B, C), (B, T, C), (B, C, H, W) or (B, H, W, C), float64."""
        if channels_last:
            output = output.permute(0, 3, 1, 2)
        # The copy is contiguous, which makes pooling three times as fast, and it can be centred in place.
        output = output.to(torch.float64, memory_format=torch.contiguous_format, copy=True)
        if output.ndim == 2:
            return output
        pooled = {kind: _pool(output, kind, mask) for kind in sorted(self.pool, key="std".__eq__)}  # "std" is the last
        return torch.cat([pooled[kind] for kind in self.pool], 1)

    def train(self, mode: bool = True) -> LayerTaps:
        """Set the mode; the network stays in eval mode."""
        super().train(mode)
        self.model.eval()
        return self

    def extra_repr(self) -> str:
        """The layers, how they are pooled, and the number of columns."""
        shown = f"layers={self.layers!r}, pool={self.pool}, normalize={self.normalize!r}, taps={len(self.taps)}"
        return f"{shown}, out_features={self.out_features}, seed={self.seed}"


@contextlib.contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Restore the layers, modes and gradient flags of a network when an error is raised inside."""
    own = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    before = [(module, vars(module).copy(), dict(module._modules)) for module in own]
    learned = [p for p in model.parameters() if p.requires_grad]

    def put_back() -> None:
        for module, attributes, layers in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._modules.clear()
            module._modules.update(layers)
        for parameter in learned:
            if not parameter.requires_grad:
                parameter.requires_grad_(True)

    with all_or_nothing(model, put_back):
        yield


def _pool(output: Tensor, kind: str, mask: Tensor | None) -> Tensor:
    """One way of pooling: (B, C), or (B, C g^2) for a grid. output: (B, T, C) tokens or (B, C, H, W); "std" overwrites it."""
    if kind == "cls":
        if output.ndim == 4 or mask is None:
            return (output[:, :, 0, 0] if output.ndim == 4 else output[:, 0]).clone()
        first = (mask > 0).int().argmax(1)  # padding may be on the left
        return output.gather(1, first[:, None, None].expand(-1, 1, output.shape[2]))[:, 0]
    if output.ndim == 4:
        if kind.startswith("grid"):
            cells: Tensor = nn.functional.adaptive_avg_pool2d(output, int(kind[4:])).flatten(1)
            return cells
        mean = output.mean((2, 3), keepdim=True)
        return (mean if kind == "mean" else output.sub_(mean).square_().mean((2, 3)).sqrt()).flatten(1)
    if kind.startswith("grid"):
        raise ValueError(f"pool={kind!r} is for layers with a height and a width; tokens have 'mean', 'std' and 'cls'")
    weight = output.new_ones(output.shape[:2]) if mask is None else mask.to(output)
    weight = weight[:, :, None] / weight.sum(1)[:, None, None]
    mean = (output * weight).sum(1)
    if kind == "mean":
        return mean
    return output.sub_(mean[:, None]).square_().mul_(weight).sum(1).sqrt()


def _mask_of(batch: Any) -> Tensor | None:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) else None


def share_columns(widths: dict[str, int], most: int | None) -> dict[str, int]:
    """Share a budget of columns among groups in proportion to their widths, at least one each."""
    total = sum(widths.values())
    if most is None or total <= most:
        return dict(widths)
    if most < len(widths):
        raise ValueError(f"max_features={most} is less than one column for each of the {len(widths)} layers")
    shares = {name: max(1, width * most // total) for name, width in widths.items()}
    while sum(shares.values()) > most:  # where many groups got their one column
        shares[max(shares, key=lambda name: shares[name])] -= 1
    return shares


def widest_inside(widths: dict[str, int], blocks: Sequence[str]) -> dict[str, int]:
    """Keep the blocks and the widest activation inside each block. Of several equally wide ones, keep the last."""
    kept: dict[str, tuple[str, int]] = {}
    for name, width in widths.items():
        block = next((b for b in blocks if name.startswith(f"{b}.")), name)
        if block != name and (block not in kept or width >= kept[block][1]):
            kept[block] = (name, width)
    inside = {name for name, _ in kept.values()}
    return {name: width for name, width in widths.items() if name in inside or name in blocks}


def tap_candidates(model: nn.Module, layers: str | Sequence[str]) -> list[str]:
    """Return the names of the modules that ``layers`` selects. Modules that return no tensor are left out later."""
    if isinstance(layers, str) and layers in LAYER_SETS:
        blocks = list(find_blocks(model))
        if layers == "all":
            activations = [n for n, m in model.named_modules() if _is_leaf(m) and _is_activation(m)]
            blocks += [n for n in activations if n.startswith(tuple(f"{b}." for b in blocks))]
        last = find_last_layer(model)
        if last is not None:  # scores of the old classes, not features
            blocks = [n for n in blocks if not n.startswith(last.replaced)]
        if not blocks:
            raise ValueError(
                f"{type(model).__name__} has no chain of blocks: name the layers, layers=['conv1', 'encoder.*']; it has "
                f"{', '.join([n for n, _ in model.named_children()][:8])}"
            )
        return blocks
    patterns = [layers] if isinstance(layers, str) else list(layers)
    names = [n for n, _ in model.named_modules() if n]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"no module of {type(model).__name__} is called {pattern!r}; see model.named_modules()")
    return [n for n in names if any(fnmatch.fnmatchcase(n, p) for p in patterns)]


def find_blocks(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names of the blocks of a network, outermost first.

    Blocks are found in chains, that is, in a Sequential or a ModuleList: a block is a member of a chain that has layers of its
    own. A chain of plain layers inside a chain (convolution, norm and activation) is one block. If a network has no chains of
    blocks, each child that has layers of its own is a block, and if the whole network is a chain of plain layers, each
    activation is a block.
    """
    children = list(module.named_children())
    chain = isinstance(module, nn.Sequential | nn.ModuleList)
    if chain and all(_is_leaf(child) for _, child in children):
        yield from (prefix + name for name, child in children if _is_activation(child))
        return
    composed = [(name, child) for name, child in children if not _is_leaf(child)]
    flat = not chain and sum(not isinstance(c, nn.Sequential | nn.ModuleList) for _, c in composed) >= 4
    for name, child in composed:
        if flat or (chain and _is_block(child)):
            yield prefix + name
        else:
            yield from find_blocks(child, f"{prefix}{name}.")


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ == "torch.nn.modules.activation" or type(module).__name__.endswith("Activation")


def _is_block(module: nn.Module) -> bool:
    """True for a composed module, unless it is a chain of composed modules."""
    if _is_leaf(module):
        return False
    return not isinstance(module, nn.Sequential | nn.ModuleList) or all(map(_is_leaf, module.children()))


def guess_input(model: nn.Module) -> Any:
    """Return a small batch that the network accepts. Raises ValueError if its input cannot be guessed."""
    like = next((t for t in [*model.parameters(), *model.buffers()] if t.is_floating_point()), torch.zeros(0))
    device = like.device
    config = getattr(model, "config", None)
    if hasattr(config, "vocab_size"):
        ids = torch.zeros(1, 4, dtype=torch.int64, device=device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    timm = getattr(model, "default_cfg", None)
    if isinstance(timm, dict) and timm.get("input_size") is not None:
        return like.new_zeros(1, *timm["input_size"])
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            side = getattr(model, "image_size", None) or getattr(config, "image_size", None) or 64
            return like.new_zeros(1, layer.in_channels, side, side)
        if isinstance(layer, nn.Linear):
            return like.new_zeros(1, layer.in_features)
    raise ValueError(f"cannot tell what {type(model).__name__} takes: give a batch of it, example=batch")
