"""``torchlssvm demo``: learn, find wrong labels, correct them, erase a user, prove it. Each step is one exact call.

The data ships with scikit-learn: 1,797 digits of 8x8 pixels. The samples live in a store in a temporary folder. Times include
what makes a step durable on the disk, and bringing the weights up to date.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from torchlssvm import FixedPoint, LSSVMHead, TorchLSSVMError, VerificationError, __version__, audit
from torchlssvm.analysis.cross_validation import margins
from torchlssvm.events import Add, Relabel, Remove
from torchlssvm.store import SampleStore

__all__ = ["PICTURE_FILE", "DemoStep", "Story", "run", "tell"]

PICTURE_FILE = "torchlssvm_demo.png"
DIGIT_CLASSES, RELU_FEATURES, TRAINING_SAMPLES, USER_COUNT = 10, 512, 1297, 40
WRONG_SHARE = 0.2  # the fraction of training labels that is made wrong
ERASED_USER = 17  # the one who asks for erasure


@dataclass(frozen=True)
class DemoStep:
    """One step of the story: a row of the table."""

    name: str
    what: str
    samples: int
    accuracy: float | None
    milliseconds: float
    check: str
    passed: bool


@dataclass
class Story:
    """The steps in their order, the figures for ``--json``, and the suspicious digits for the picture."""

    steps: list[DemoStep] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    suspects: list[tuple[Tensor, int, int, bool]] = field(default_factory=list)  # image, given, proposed, really wrong


def import_extra(module: str, package: str) -> Any:
    """Import a module of an extra; the error names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise TorchLSSVMError(f"the demo needs {package}: pip install 'torchlssvm[sklearn,plot]'") from None


def load(random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Images, features and labels of the digits, in random order."""
    digits = import_extra("sklearn.datasets", "scikit-learn").load_digits()
    images, y = torch.as_tensor(digits.images / 16, dtype=torch.float32), torch.as_tensor(digits.target).long()
    weight = torch.randint(-8, 9, (64, RELU_FEATURES), generator=random) / 8
    bias = torch.randint(-8, 9, (RELU_FEATURES,), generator=random) / 8
    x = torch.relu(images.flatten(1) @ weight + bias)  # exact in float32, in whatever order it is summed
    order = torch.randperm(len(y), generator=random)
    return images[order], x[order], y[order]


def new_head() -> LSSVMHead:
    """Make an empty head. Its grid is fixed beforehand, so that it does not depend on any sample."""
    return LSSVMHead(RELU_FEATURES, DIGIT_CLASSES, grid=FixedPoint(limit=64.0))


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Call a function; return its result and its milliseconds."""
    start = time.perf_counter()
    out = call()
    return out, 1e3 * (time.perf_counter() - start)


def tell(seed: int) -> Story:
    """Go through all steps, in a store in a temporary folder."""
    random = torch.Generator().manual_seed(seed)
    images, x, y = load(random)
    test_x, test_y = x[TRAINING_SAMPLES:], y[TRAINING_SAMPLES:]
    x, truth = x[:TRAINING_SAMPLES], y[:TRAINING_SAMPLES]
    labels = truth.clone()
    bad = torch.randperm(len(x), generator=random)[: round(WRONG_SHARE * len(x))]
    labels[bad] = (truth[bad] + torch.randint(1, DIGIT_CLASSES, (len(bad),), generator=random)) % DIGIT_CLASSES
    users = torch.randperm(len(x), generator=random) % USER_COUNT
    ids, subjects = [f"digit-{i:04d}" for i in range(len(x))], [f"user-{u:02d}" for u in users.tolist()]
    erased, signed = f"user-{ERASED_USER:02d}", find_spec("cryptography") is not None
    story = Story()

    def step(name: str, what: str, samples: int, ms: float, check: str, passed: bool, scored: Any = None) -> None:
        accuracy = None if scored is None else float((scored.predict(test_x) == test_y).double().mean())
        story.steps.append(DemoStep(name, what, samples, accuracy, ms, check, passed))

    with TemporaryDirectory() as folder, SampleStore(Path(folder) / "store", new_head()) as store:
        head = store.head

        def apply(event: Add | Relabel | Remove) -> str:
            done = store.apply(event)
            _ = head.weight
            return done.event_id

        # 1. Learn in one pass over samples with wrong labels, each with its owner.
        _, ms = timed(lambda: apply(Add(ids, x, labels, subjects)))
        right = torch.equal(head.counts, labels.bincount(minlength=DIGIT_CLASSES))
        what = f"add once, {WRONG_SHARE:.0%} of labels wrong"
        step("learn", what, len(x), ms, "every sample counted once", right, head)

        # 2. Rank all samples by their leave-one-out margin and suspect the lowest.
        scores, ms = timed(lambda: head.leave_one_out(x, labels))
        suspicious = margins(scores, labels).argsort(stable=True)[: len(bad)]
        wrong = labels[suspicious] != truth[suspicious]
        precision, chance = float(wrong.double().mean()), float((labels != truth).double().mean())
        check = f"{precision:.0%} wrong (chance {chance:.0%})"
        step("find", "lowest leave-one-out margins", len(suspicious), ms, check, precision > 2 * chance)
        for i, really in zip(suspicious.tolist(), wrong.tolist(), strict=True):
            story.suspects.append((images[i], int(labels[i]), int(scores[i].argmax()), really))

        # 3. Relabel those that are really wrong, as a person who checks the list would.
        found = suspicious[wrong]
        _, ms = timed(lambda: apply(Relabel(truth[found], ids=[ids[i] for i in found.tolist()])))
        labels[found] = truth[found]
        clean = float((new_head().add(x, truth).predict(test_x) == test_y).double().mean())
        better = bool((head.predict(test_x) == test_y).double().mean() >= (story.steps[0].accuracy or 0.0))
        check = f"not lower (clean {clean:.1%})"
        step("correct", "relabel those really wrong", len(found), ms, check, better, head)

        # 4. Remove one user by name; no other sample is looked at.
        gone, before = store.find(subject=erased), head.digest()
        event_id, ms = timed(lambda: apply(Remove(subject=erased)))
        after = head.digest()
        step("erase", f"remove user {ERASED_USER}", len(gone), ms, "digest changed", after != before, head)

        # 5. Destroy the bytes, sign a certificate, and search every file for traces of the user.
        key = Path(folder) / "key.pem" if signed else None
        public_key = None if key is None else audit.new_key(key)
        _, compacting = timed(store.compact)
        certificate, ms = timed(lambda: store.certificate(event_id, key=key))
        files = [path.read_bytes() for path in store.path.iterdir()]
        traces = sum(data.count(word.encode()) for data in files for word in (erased, *gone))
        right = traces == 0 and certificate.compacted and certificate.erased == len(gone)
        what = "compact, sign a certificate" if signed else "compact, write a certificate"
        step("certify", what, len(gone), compacting + ms, "no trace in any file", right)

        # 6. Verify as an auditor does: check signature and journal, sum the rows and solve the weights again.
        start = time.perf_counter()
        try:
            checks = audit.verify(certificate, head, store, public_key, allow_unsigned=not signed).checks
            verification = {name: str(check) for name, check in checks.items()}
        except VerificationError as error:
            verification = {"failed": str(error)}
        ms = 1e3 * (time.perf_counter() - start)
        check = "signature, rows, w hold" if signed else "unsigned; rows, w hold"
        step("verify", "the certificate, rows and head", len(store), ms, check, "failed" not in verification)

        # 7. Compare with a head that never saw the user: the others' samples in another order and in other batches.
        kept = (users != ERASED_USER).nonzero()[:, 0]
        batches = kept[torch.randperm(len(kept), generator=random)].split(97)
        other = new_head()
        _, ms = timed(lambda: [other.add(x[rows], labels[rows]) for rows in batches] and other.refresh())
        head.refresh()
        digests_equal = other.digest() == after
        bit_identical = torch.equal(head.weight, other.weight) and torch.equal(head.bias, other.bias)
        what, right = f"head that never saw user {ERASED_USER}", digests_equal and bit_identical
        step("compare", what, len(kept), ms, "digest, w bit-identical", right, other)

    accuracy = {s.name: s.accuracy for s in story.steps}
    story.facts = {
        "version": __version__,
        "seed": seed,
        "test_samples": len(test_x),
        "features": RELU_FEATURES,
        "user": ERASED_USER,
        "samples": {s.name: s.samples for s in story.steps},
        "milliseconds": {s.name: round(s.milliseconds, 3) for s in story.steps},
        "accuracy": {"noisy": accuracy["learn"], "corrected": accuracy["correct"], "erased": accuracy["erase"]}
        | {"clean": clean},
        "precision": precision,
        "chance": chance,
        "digest_before": before,
        "digest_after": after,
        "digest_never_saw": other.digest(),
        "digests_equal": digests_equal,
        "bit_identical": bit_identical,
        "signed": signed,
        "compacted": certificate.compacted,
        "erased": certificate.erased,
        "traces": traces,
        "verification": verification,
        "checks": {s.name: s.passed for s in story.steps},
        "passed": all(s.passed for s in story.steps),
    }
    return story


def table(story: Story, picture: Path) -> str:
    """Format the steps as text, at most 100 columns wide (but for a long path)."""
    facts = story.facts
    row = "{:<10}{:<30}{:>8}{:>9}{:>8}  {}"
    lines = [
        f"torchlssvm {__version__} demo, seed {facts['seed']}: scikit-learn's digits, {TRAINING_SAMPLES} to learn, "
        f"{facts['test_samples']} to test.",
        f"A fixed random ReLU layer stands for a frozen network: {RELU_FEATURES} features.",
        "",
        row.format("step", "what", "samples", "test acc", "ms", "check"),
        "-" * 100,
    ]
    for i, s in enumerate(story.steps, 1):
        accuracy = "" if s.accuracy is None else f"{s.accuracy:.1%}"
        check = s.check if s.passed else f"FAILED: {s.check}"
        lines.append(row.format(f"{i} {s.name}", s.what, s.samples, accuracy, f"{s.milliseconds:.1f}", check))
    signed = "signed with Ed25519" if facts["signed"] else "not signed, without cryptography: torchlssvm[audit]"
    return "\n".join(
        [
            *lines,
            "-" * 100,
            f"picture: {picture}",
            f"certificate of the erasure: {signed}",
            f"digest after erasing user {ERASED_USER}, and of the head that never saw that user (first 16 of 64 digits):",
            f"{facts['digest_after'][:16]}  {facts['digest_never_saw'][:16]}  equal: {facts['digests_equal']}",
        ]
    )


def draw(story: Story, path: Path) -> None:
    """Draw the accuracy through the steps on the left, the most suspicious digits on the right."""
    from matplotlib.figure import Figure

    blue, orange, grey = "#0072B2", "#D55E00", "#595959"  # Okabe and Ito: told apart by colour-blind readers
    figure = Figure(figsize=(12, 4.6), dpi=150, facecolor="white", layout="constrained")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.4))[0]
    axes = left.subplots()
    steps = [s for s in story.steps if s.name in ("learn", "correct", "erase")]
    values, clean = [100 * (s.accuracy or 0.0) for s in steps], 100 * story.facts["accuracy"]["clean"]
    axes.axhline(clean, color=grey, linestyle="--", label=f"all labels clean: {clean:.1f}%")
    axes.plot([f"{s.name}\n{s.milliseconds:.1f} ms" for s in steps], values, "o-", color=blue, linewidth=2)
    for i, value in enumerate(values):
        axes.annotate(f"{value:.1f}%", (i, value), (6, -14), textcoords="offset points", color=blue, weight="bold")
    axes.margins(x=0.2, y=0.25)
    axes.set_ylabel("test accuracy (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    left.suptitle("Each step is one exact, durable call", weight="bold")

    cells: Any = right.subplots(3, 8)
    shown = story.suspects[:: len(story.suspects) // cells.size]
    for cell, (image, given, proposed, wrong) in zip(cells.flat, shown, strict=False):
        colour, mark = (blue, "✓") if wrong else (orange, "✗")
        cell.imshow(image.numpy(), cmap="gray_r", vmin=0, vmax=1)
        cell.set(xticks=[], yticks=[])
        cell.spines[:].set(color=colour, linewidth=2)
        cell.set_title(f"{given} → {proposed} {mark}", color=colour, weight="bold")
    title = f"The {len(story.suspects)} lowest leave-one-out margins: {story.facts['precision']:.0%} are wrong labels"
    right.suptitle(title, weight="bold")
    right.supxlabel(
        "given → proposed label, from the lowest margin on; ✓ the label was wrong, ✗ it was right", color=grey, size=10
    )
    figure.savefig(path)


def run(out: Path, seed: int, as_json: bool) -> int:
    """Tell the story, write the picture and print; 0 if every check holds, else 1."""
    import_extra("matplotlib", "matplotlib")  # before any work
    out.mkdir(parents=True, exist_ok=True)
    story, picture = tell(seed), out / PICTURE_FILE
    draw(story, picture)
    facts = story.facts | {"picture": str(picture)}
    print(json.dumps(facts, indent=2) if as_json else table(story, picture))
    return 0 if facts["passed"] else 1
