"""Commands on a store as a whole: ``init``, ``set``, ``stats``, ``history``, ``compact``, ``waiting``, ``drop``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import (
    CLASS_WEIGHT,
    SUPPRESSION_KEY,
    UsageError,
    class_names,
    command,
    count,
    grid,
    more_classes,
    one_of,
    option,
    rho,
)
from torchlssvm.cli.console import emit, progress, table
from torchlssvm.cli.store_access import Settings, open_store
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.corrections.waiting_events import WaitingEvent
    from torchlssvm.store import Compaction

# -- init --------------------------------------------------------------------------------------------------------------


@command(
    "init",
    "Create an empty store. Its head and its network cannot be changed later.",
    option("--in-features", type=count, metavar="J", help="number of features (not needed with --backbone)"),
    option(
        "--classes",
        type=class_names,
        required=True,
        metavar="K",
        help="number of classes, or their names: ants,bees, or @FILE with one name per line",
    ),
    option(
        "--head",
        choices=("lssvm", "margin"),
        default="lssvm",
        help="lssvm: least squares (default); margin: squared hinge, a max-margin classifier",
    ),
    option(
        "--rho",
        type=rho,
        metavar="gcv|R",
        help="regularization: a number, or gcv to choose it from the samples after each command (default). A margin head "
        "accepts only a number; by default it chooses rho by k-fold once it has 10 samples",
    ),
    option(
        "--intercept",
        choices=("free", "penalized", "none"),
        default="free",
        help="kind of intercept (default: free)",
    ),
    option(
        "--grid",
        type=grid,
        default="auto",
        metavar="LIMIT[:BITS]",
        help="largest feature value and bits of resolution, e.g. 8:20; auto to choose them from the first batch (default); "
        "none for float64 sums, which are not exact",
    ),
    option(
        "--normalize", choices=("l2", "sqrt"), help="normalize each row: divide it by its length, or take square roots"
    ),
    option(
        "--scale", choices=("std",), help="standardize the features, with means and deviations of the current samples"
    ),
    CLASS_WEIGHT,
    option(
        "--rule",
        choices=("least_squares", "lda", "auto"),
        default="least_squares",
        help="how to compute weights from the sums: by least squares (default), by the linear discriminant (for many classes "
        "and few features), or by the rule with the better leave-one-out accuracy (auto)",
    ),
    option(
        "--targets",
        choices=("classes", "multilabel", "regression"),
        default="classes",
        help="what to predict: one class per sample (default), several labels per sample, or numbers. For labels and numbers, "
        "--classes is their count, and add --labels takes an array (n, K)",
    ),
    one_of(
        option(
            "--backbone",
            metavar="NAME",
            help="torchvision network for images, e.g. mobilenet_v2, or folder of a transformers encoder for texts",
        ),
        option("--fingerprint", metavar="F", help="fingerprint of the network that computes the features in files"),
    ),
    option("--weights", metavar="FILE", help="file with the network's state_dict (default: the published weights)"),
    option(
        "--layers",
        metavar="last|blocks|all|NAMES",
        help="layers of the network that the head learns from, separated by commas (default: last)",
    ),
    option("--pool", metavar="mean|std|...", help="how to pool a layer, separated by commas (default: mean)"),
    option(
        "--max-features", type=count, metavar="J", help="largest number of features from several layers (default: 4096)"
    ),
    option("--views", metavar="flip", help="average the features of each image and its mirror image"),
    changes="the store was created",
)
def init(options: argparse.Namespace) -> int:
    """Create the head, then the store. If a crash has left the store incomplete, complete it."""
    from torchlssvm.errors import StoreError
    from torchlssvm.files import holds_store
    from torchlssvm.store import SampleStore
    from torchlssvm.store.database import NETWORK_NOTE, SETTINGS_NOTE

    for name in ("weights", "layers", "pool", "max_features", "views"):
        if getattr(options, name) is not None and options.backbone is None:
            raise UsageError(f"--{name.replace('_', '-')} needs --backbone")
    if options.in_features is None and options.backbone is None:
        raise UsageError("give --in-features J or --backbone NAME")
    if options.rho in ("gcv", "kfold", "loo") and (options.head, options.rho) != ("lssvm", "gcv"):
        raise UsageError(
            f"--rho {options.rho} cannot be used with --head {options.head} here. A least-squares head takes gcv or a number. "
            "A margin head takes a number; without --rho it chooses by k-fold once it has 10 samples"
        )
    exists = holds_store(options.store)
    already = StoreError(f"there is already a store at {options.store}; nothing was changed")
    if exists and is_finished(options):
        raise already
    names = options.classes if isinstance(options.classes, list) else []
    classes = len(names) or options.classes
    settings = Settings(names)
    try:
        head, source, network = make_head(options, classes, settings)
    except (MemoryError, RuntimeError) as error:
        raise ValueError(f"the head cannot be created: {error}") from error
    if options.in_features not in (None, head.in_features):
        raise ValueError(f"{options.backbone} computes {head.in_features} features, not {options.in_features}")
    with SampleStore(options.store, head, fingerprint=source, timeout=options.timeout) as store:
        if exists and (store.note(SETTINGS_NOTE) is not None or store.position):
            raise already  # by another process, just now
        if network is not None:
            store.set_note(NETWORK_NOTE, network)
        store.set_note(SETTINGS_NOTE, asdict(settings))
        if names:
            store.name_classes(names)
    said = {"store": str(options.store), "features": head.in_features, "classes": classes, "fingerprint": source}
    bound = f", for the features of {options.backbone}" if options.backbone else ""
    return emit(
        options, said, f"{options.store}: empty store with {head.in_features} features and {classes} classes{bound}"
    )


def make_head(options: argparse.Namespace, classes: int, settings: Settings) -> tuple[Any, str | None, str | None]:
    """Create the head. Returns it with the fingerprint and the description of its network, which go into the settings."""
    from torchlssvm.functional.grid import as_grid
    from torchlssvm.linear import head_class

    build = {name: getattr(options, name) for name in ("intercept", "normalize", "scale")}
    build["rho"] = options.rho if options.rho is not None else "gcv" if options.head == "lssvm" else None
    if options.rule != "least_squares":
        if options.head != "lssvm":
            raise UsageError("--rule needs --head lssvm")
        build["rule"] = options.rule
    if options.targets != "classes":
        build["targets"] = options.targets
    build |= {"grid": as_grid(options.grid), "class_weight": as_weights(options.class_weight)}
    if options.backbone is None:
        return head_class(options.head)(options.in_features, classes, **build), options.fingerprint, None
    from torchlssvm.backbone_hash import fingerprint
    from torchlssvm.cli.sample_files import attach_named
    from torchlssvm.features.description import describe_network
    from torchlssvm.features.layer_taps import LAYER_SETS
    from torchlssvm.store.database import DEFAULT_WEIGHTS

    weights = options.weights or DEFAULT_WEIGHTS
    settings.backbone = options.backbone
    settings.weights = weights if weights == DEFAULT_WEIGHTS else str(Path(weights).absolute())
    for name in ("layers", "pool", "views", "max_features"):
        value = getattr(options, name)
        if value is not None:
            several = isinstance(value, str) and value not in LAYER_SETS
            settings.network[name] = [part.strip() for part in value.split(",")] if several else value
    made = attach_named(options.backbone, weights, classes, options.head, **settings.network, **build)
    return made.head, fingerprint(made.backbone, made.preprocess), describe_network(made.backbone)


def as_weights(given: str | list[float] | None) -> Any:
    """Convert class weights for a head. Numbers become a tensor (K,)."""
    import torch

    return torch.tensor(given, dtype=torch.float64) if isinstance(given, list) else given


def is_finished(options: argparse.Namespace) -> bool:
    """Return True if the command that created the store has finished."""
    from torchlssvm.errors import StoreBusyError, StoreError
    from torchlssvm.store.database import SETTINGS_NOTE

    try:
        with open_store(options, readonly=True) as store:
            return store.note(SETTINGS_NOTE) is not None or store.position > 0
    except StoreBusyError:
        raise
    except StoreError:  # incomplete or damaged: opening it with the new head will tell
        return False


# -- set ---------------------------------------------------------------------------------------------------------------


@command(
    "set",
    "Change rho or the class weights, or add classes (--add-classes).",
    option(
        "--rho",
        type=rho,
        metavar="R|gcv|kfold|loo",
        help="a number > 0, or a method. gcv, for a least-squares head: chosen again after each command that changes samples. "
        "kfold or loo (leave-one-out), for a margin head: chosen once",
    ),
    CLASS_WEIGHT,
    option(
        "--add-classes", type=more_classes, metavar="K|NAMES", help="add classes: their number, or their names: fox,owl"
    ),
    changes="the options were set",
)
def set_options(options: argparse.Namespace) -> int:
    """Set the given options and print the values in use."""
    from torchlssvm.linear import MarginHead

    if options.rho is None and options.class_weight is None and options.add_classes is None:
        raise UsageError("give --rho, --class-weight or --add-classes")
    with open_store(options) as store, progress(options, "choosing rho"):
        head = store.head
        allowed = ("kfold", "loo") if isinstance(head, MarginHead) else ("gcv",)
        if isinstance(options.rho, str) and options.rho not in allowed:
            raise UsageError(f"--rho {options.rho}: a {type(head).__name__} takes a number or {' or '.join(allowed)}")
        if options.add_classes is not None:
            store.add_classes(options.add_classes)
        if options.class_weight is not None:
            if not head.statistics.per_class:
                raise ValueError(
                    "class weights need sums per class, which this store does not keep: create a store with "
                    "torchlssvm init --class-weight W and add the samples to it"
                )
            store.set_class_weight(as_weights(options.class_weight))
        if options.rho is not None:
            store.set_rho(options.rho)
        choice, weights = str(head.choices.get("rho", f"{head.rho!r}, as given")), head.config()["class_weight"]
        said = {"rho": head.rho, "choice": choice, "class_weight": weights, "classes": head.num_classes}
        names = store.classes
    shown = {"rho": choice}
    if weights is not None:
        shown["class weights"] = str(weights)
    if options.add_classes is not None:
        shown["classes"] = f"{head.num_classes}, with the labels 0 to {head.num_classes - 1}"
        if names:
            shown["classes"] = ", ".join(f"{label} {name}" for label, name in enumerate(names))
    return emit(options, said | {"class_names": names}, table(shown))


# -- stats and history -------------------------------------------------------------------------------------------------


@command("stats", "Show the number of samples, classes and subjects, rho, the grid and the digest.")
def stats(options: argparse.Namespace) -> int:
    """Print the figures of the store."""
    with open_store(options, readonly=True) as store:
        settings, found = Settings.load(store), store.stats()
    found |= {"class_names": settings.classes, "backbone": settings.backbone, "weights": settings.weights}
    shown = {name: value for name, value in found.items() if value not in (None, [], {})}
    if found["targets"] == "classes":
        shown["labels"] = ", ".join(f"{settings.name(int(k))}: {v}" for k, v in found["labels"].items()) or "none"
    shown["class_names"] = ", ".join(settings.classes) or "none"
    return emit(options, found, table(shown))


@command("history", "List all events, after checking the hash chain of the journal.")
def history(options: argparse.Namespace) -> int:
    """Print all events, oldest first."""
    with open_store(options, readonly=True) as store:
        entries = store.history()
    names = ("position", "time", "kind", "samples", "event_id")
    events = [{name: getattr(e, name) for name in names} | {"chain": e.chain.hex()} for e in entries]
    lines = [f"{'':>6}  {'time (UTC)':<19}  {'kind':<8} {'samples':>8}  event"]
    lines += [f"{e.position:>6}  {e.time[:19]}  {e.kind:<8} {e.samples:>8}  {e.event_id}" for e in entries]
    return emit(options, {"store": str(options.store), "events": events}, lines if entries else "no events")


# -- compact -----------------------------------------------------------------------------------------------------------


@command("compact", "Destroy the bytes of erased samples in the store's files.", changes="the store was compacted")
def compact(options: argparse.Namespace) -> int:
    """Compact the store and print the result."""
    with open_store(options) as store, progress(options, "compacting"):
        done = store.compact()
    return emit(options, {"position": done.position} | compaction_to_json(done), compaction_text(done))


def compaction_to_json(done: Compaction) -> dict[str, Any]:
    """Convert the result of a compaction to primitives."""
    return {"compacted": True, "removed_snapshots": done.removed, "checkpoints": done.checkpoints}


def compaction_text(done: Compaction) -> str:
    """Describe a compaction, and list the files outside the store that may still contain erased samples."""
    text = f"compacted: the store's files no longer contain bytes of erased samples (event {done.position})"
    if done.checkpoints:
        text += f"; older files outside the store may still contain them: {', '.join(done.checkpoints)}"
    return text


# -- backup ------------------------------------------------------------------------------------------------------------


@command(
    "backup",
    "Copy the store to a new folder while it is in use. The copy still contains samples that are erased later, so use restore "
    "to put it back.",
    option("to", type=Path, metavar="TO", help="folder to create for the copy"),
    changes="the copy was made",
)
def backup(options: argparse.Namespace) -> int:
    """Copy the store."""
    with open_store(options) as store:
        target = store.backup(options.to)
        said = {"backup": str(target), "position": store.position}
    return emit(options, said, f"{target}: a copy of {options.store} at event {said['position']}")


@command(
    "restore",
    "Create a store from a backup, and erase the samples that were erased on request since the backup.",
    option("to", type=Path, metavar="TO", help="folder to create for the new store"),
    option("--list", type=Path, metavar="FILE", help="path of the suppression list, if the list was moved"),
    option("--receipt", type=Path, metavar="FILE", help="receipt to write of the repeated erasure"),
    option("--certificate", type=Path, metavar="OUT.json", help="certificate to write of the repeated erasure"),
    SUPPRESSION_KEY,
    changes="the store was made",
)
def restore(options: argparse.Namespace) -> int:
    """Make a store from a backup, without the samples that were erased since."""
    from torchlssvm.store import SampleStore

    target, again = SampleStore.from_backup(
        options.store, options.to, suppression_key=options.suppression_key, suppression_list=options.list,
        receipt=options.receipt, certificate=options.certificate,
    )  # fmt: skip
    erased = 0 if again is None else again.samples
    text = f"{target}: a store made from {options.store}, {counted(erased, 'sample')} erased again"
    return emit(options, {"store": str(target), "erased": erased}, text)


# -- events that wait for their samples --------------------------------------------------------------------------------


@command(
    "waiting",
    "List events that wait for samples which have not arrived. The store keeps the names of these samples until then.",
)
def waiting(options: argparse.Namespace) -> int:
    """Print the waiting events, oldest first."""
    from torchlssvm.corrections.waiting_events import WaitingEvents

    with open_store(options, readonly=True) as store:
        found = list(WaitingEvents(store))
    said = {"store": str(options.store), "waiting": [waiting_to_json(p) for p in found]}
    return emit(options, said, list(map(str, found)) if found else "no waiting events")


@command(
    "drop",
    "Drop waiting events. The samples they name stay as they are.",
    option("event", nargs="+", metavar="EVENT", help="ids of the events (see waiting)"),
    changes="the events were dropped",
)
def drop(options: argparse.Namespace) -> int:
    """Drop all the given events, or none of them."""
    from torchlssvm.corrections.waiting_events import drop_waiting

    with open_store(options) as store:
        dropped = drop_waiting(store, options.event)
    said = {"store": str(options.store), "dropped": [waiting_to_json(p) for p in dropped]}
    return emit(options, said, [f"dropped: {p}" for p in dropped])


def waiting_to_json(found: WaitingEvent) -> dict[str, Any]:
    """Convert a waiting event to primitives, without features."""
    event = found.event
    return {
        "event_id": event.event_id,
        "kind": event.kind,
        "ids": None if event.ids is None else list(event.ids),
        "subject": None if event.ids is not None else event.subject,
        "on_watch": found.on_watch,
    }
