"""``torchlssvm init`` and ``keygen``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.console import OK, UsageError, command, count, emit, refuse_inside_store

if TYPE_CHECKING:
    from torchlssvm.cli.console import Commands


def register(commands: Commands) -> None:
    """Add the commands to the parser."""
    parser = command(
        commands, "init", run_init, "Make an empty store. Its head and its network are fixed from then on.",
        changes="the store was made",
    )  # fmt: skip
    parser.add_argument("--features", type=count, metavar="J", help="number of features (a backbone knows its own)")
    parser.add_argument("--classes", required=True, metavar="K", help="number of classes, or their names: ants,bees")
    parser.add_argument("--rho", type=float, default=1.0, metavar="R", help="regularization (default: 1)")
    parser.add_argument("--intercept", choices=("free", "penalized", "none"), default="free")
    parser.add_argument(
        "--grid", default="auto", metavar="LIMIT[:BITS]",
        help="largest feature and resolution, e.g. 8:20; or auto: from the first batch, which then has a say in it (default)",
    )  # fmt: skip
    parser.add_argument("--class-weight", metavar="W", help="balanced, complement, or one number for each class: 1,2.5")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--backbone", metavar="NAME", help="torchvision network for images, e.g. mobilenet_v2")
    source.add_argument("--fingerprint", metavar="F", help="name of the network that features from files come from")
    parser.add_argument(
        "--weights", metavar="FILE", help="state_dict of the backbone, or default: torchvision's (default)"
    )
    keys = command(
        commands,
        "keygen",
        run_keygen,
        "Make an Ed25519 key to sign certificates with.",
        store=False,
        changes="the keys were written",
    )
    keys.add_argument("out", type=Path, metavar="OUT", help="private key (PEM); the public one is written to OUT.pub")


def run_init(options: argparse.Namespace) -> int:
    """Make the head, then the store."""
    from torchlssvm import LSSVMHead
    from torchlssvm.cli import settings
    from torchlssvm.errors import StoreError
    from torchlssvm.store import SampleStore
    from torchlssvm.store.database import FILE

    names = class_names(options.classes)
    if options.weights is not None and options.backbone is None:
        raise UsageError("--weights needs --backbone")
    if options.features is None and options.backbone is None:
        raise UsageError("give --features J or --backbone NAME")
    build: dict[str, Any] = {"rho": options.rho, "intercept": options.intercept, "grid": grid(options.grid)}
    build["class_weight"] = class_weight(options.class_weight)
    chosen = settings.Settings(names or [])
    classes = len(names) if names else int(options.classes)
    existed = (options.store / FILE).exists()
    try:
        if options.backbone is None:
            head, source = LSSVMHead(options.features, classes, **build), options.fingerprint
        else:
            from torchlssvm.cli.images import DEFAULT, Backbone

            given = options.weights or DEFAULT
            chosen.backbone, chosen.weights = (
                options.backbone,
                given if given == DEFAULT else str(Path(given).absolute()),
            )
            backbone = Backbone(options.backbone, given, classes, **build)
            head, source = backbone.classifier.head, backbone.fingerprint
    except (MemoryError, RuntimeError) as error:
        raise ValueError(f"such a head cannot be made: {error}") from error
    if options.features not in (None, head.in_features):
        raise ValueError(f"{options.backbone} gives {head.in_features} features, not {options.features}")
    with SampleStore(options.store, head, fingerprint=source, timeout=options.timeout) as store:
        if existed and (settings.known(store) or store.position):
            raise StoreError(f"there is a store at {options.store} already: nothing was changed")
        settings.save(store, chosen)
        made = {"store": str(options.store), "features": head.in_features, "classes": classes, "fingerprint": source}
    bound = f", for the images that {options.backbone} sees" if options.backbone else ""
    emit(options, made, f"{options.store}: an empty store of {head.in_features} features and {classes} classes{bound}")
    return OK


def class_names(text: str) -> list[str] | None:
    """The names of the classes; None when only their number is given."""
    if text.strip().isdecimal():
        return None
    names = [name.strip() for name in text.split(",")]
    if len(names) < 2 or not all(names) or len(set(names)) < len(names):
        raise UsageError(f"--classes takes a number, or at least two different names with commas; got {text!r}")
    return names


def grid(text: str) -> Any:
    """``auto``, or ``LIMIT[:BITS]``."""
    from torchlssvm import FixedPoint

    if text == "auto":
        return text
    limit, _, bits = text.partition(":")
    try:
        numbers: tuple[Any, ...] = (float(limit), *([int(bits)] if bits else []))
    except ValueError:
        raise UsageError(f"--grid takes auto, LIMIT or LIMIT:BITS, e.g. 8:20; got {text!r}") from None
    return FixedPoint(*numbers)


def class_weight(text: str | None) -> Any:
    """A rule, or a tensor of weights."""
    import torch

    if text is None or text in ("balanced", "complement"):
        return text
    try:
        return torch.tensor([float(part) for part in text.split(",")], dtype=torch.float64)
    except ValueError:
        raise UsageError(f"--class-weight takes balanced, complement or numbers with commas; got {text!r}") from None


def run_keygen(options: argparse.Namespace) -> int:
    """Write a pair of keys."""
    from torchlssvm import audit

    refuse_inside_store(options.out)
    public = audit.new_key(options.out)
    emit(
        options,
        {"private_key": str(options.out), "public_key": str(public)},
        f"{options.out}: the private key, keep it to yourself\n{public}: the public key, for those who verify",
    )
    return OK
