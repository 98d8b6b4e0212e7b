"""``torchlssvm demo``: learn, find wrong labels, correct them, erase a user, verify the erasure.

The demo uses the 1,797 digits of 8x8 pixels that ship with scikit-learn, and keeps them in a store in a temporary folder. The
reported times therefore include writing to the disk, and also updating the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from torchlssvm import FixedPoint, LSSVMHead, VerificationError, __version__, audit
from torchlssvm.analysis.cross_validation import margins
from torchlssvm.events import Add, Relabel, Remove
from torchlssvm.store import SampleStore

__all__ = ["PICTURE_FILE", "run", "tell"]

PICTURE_FILE = "torchlssvm_demo.png"
FEATURES, TRAINING_SAMPLES, USERS = 512, 1297, 40
WRONG_SHARE = 0.2  # fraction of the training labels that is made wrong
ERASED = "user-17"


def load(random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, features and labels of the digits in random order. A fixed random ReLU layer computes the features."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, y = torch.as_tensor(digits.images / 16, dtype=torch.float32), torch.as_tensor(digits.target).long()
    weight = torch.randint(-8, 9, (64, FEATURES), generator=random) / 8
    bias = torch.randint(-8, 9, (FEATURES,), generator=random) / 8
    x = torch.relu(images.flatten(1) @ weight + bias)  # exact in float32, in any order of summation
    order = torch.randperm(len(y), generator=random)
    return images[order], x[order], y[order]


def new_head() -> LSSVMHead:
    """Return an empty head with a fixed grid, which does not depend on any sample."""
    return LSSVMHead(FEATURES, 10, grid=FixedPoint(limit=64.0))


def tell(seed: int) -> dict[str, Any]:
    """Run all steps. Returns the figures for ``--json``, and under "suspects" the suspicious digits for the picture."""
    random = torch.Generator().manual_seed(seed)
    images, x, y = load(random)
    test_x, test_y = x[TRAINING_SAMPLES:], y[TRAINING_SAMPLES:]
    x, truth = x[:TRAINING_SAMPLES], y[:TRAINING_SAMPLES]
    labels = truth.clone()
    bad = torch.randperm(len(x), generator=random)[: round(WRONG_SHARE * len(x))]
    labels[bad] = (truth[bad] + torch.randint(1, 10, (len(bad),), generator=random)) % 10
    users = [f"user-{u:02d}" for u in (torch.randperm(len(x), generator=random) % USERS).tolist()]
    ids, signed = [f"digit-{i:04d}" for i in range(len(x))], find_spec("cryptography") is not None
    steps: list[dict[str, Any]] = []

    def accuracy(head: LSSVMHead) -> float:
        return float((head.predict(test_x) == test_y).double().mean())

    def step(name: str, what: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        out = work()
        steps.append({"name": name, "what": what, "ms": 1e3 * (time.perf_counter() - start)})
        return out

    def check(samples: int, text: str, passed: bool, head: LSSVMHead | None = None) -> None:
        scored = None if head is None else accuracy(head)
        steps[-1] |= {"samples": samples, "check": text, "passed": passed, "accuracy": scored}

    with TemporaryDirectory() as folder, SampleStore(Path(folder) / "store", new_head()) as store:
        head = store.head

        def apply(event: Add | Relabel | Remove) -> str:
            done = store.apply(event)
            _ = head.weight
            return done.event_id

        what = f"add once, {WRONG_SHARE:.0%} of labels wrong"
        step("learn", what, lambda: apply(Add(ids, x, labels, users)))
        once = torch.equal(head.counts, labels.bincount(minlength=10))
        check(len(x), "every sample counted once", once, head)

        scores = step("find", "lowest leave-one-out margins", lambda: head.leave_one_out(x, labels))
        suspicious = margins(scores, labels).argsort(stable=True)[: len(bad)]
        wrong = labels[suspicious] != truth[suspicious]
        precision, chance = float(wrong.double().mean()), float((labels != truth).double().mean())
        check(len(suspicious), f"{precision:.0%} wrong (chance {chance:.0%})", precision > 2 * chance)
        shown = zip(images[suspicious], labels[suspicious], scores[suspicious].argmax(1), wrong, strict=True)
        suspects = [(image, int(given), int(proposed), bool(really)) for image, given, proposed, really in shown]

        found = suspicious[wrong]  # a person who checks the list would correct these
        relabel = Relabel(truth[found], ids=[ids[i] for i in found.tolist()])
        step("correct", "relabel those really wrong", lambda: apply(relabel))
        labels[found] = truth[found]
        clean = accuracy(new_head().add(x, truth))
        better = accuracy(head) >= steps[0]["accuracy"]
        check(len(found), f"not lower (clean {clean:.1%})", better, head)

        gone, before = store.find(subject=ERASED), head.digest()
        event_id = step("erase", f"remove {ERASED}", lambda: apply(Remove(subject=ERASED)))
        after = head.digest()
        check(len(gone), "digest changed", after != before, head)

        key = Path(folder) / "key.pem" if signed else None
        public_key = None if key is None else audit.new_key(key)

        def certify() -> Any:
            store.compact()
            return store.certificate(event_id, key=key)

        certificate = step("certify", f"compact, {'sign' if signed else 'write'} a certificate", certify)
        files = [path.read_bytes() for path in store.path.iterdir()]
        traces = sum(data.count(word.encode()) for data in files for word in (ERASED, *gone))
        right = traces == 0 and certificate.compacted and certificate.erased == len(gone)
        check(len(gone), "no trace in any file", right)

        def verify() -> Any:
            try:
                return audit.verify(certificate, head, store, public_key, allow_unsigned=not signed).checks
            except VerificationError as error:
                return {"failed": error}

        checks = step("verify", "the certificate, rows and head", verify)
        check(len(store), "signature, rows, w hold" if signed else "unsigned; rows, w hold", "failed" not in checks)

        kept = torch.tensor([i for i, user in enumerate(users) if user != ERASED])
        batches = kept[torch.randperm(len(kept), generator=random)].split(97)  # another order, other batches
        other = new_head()

        def learn_the_rest() -> None:
            for rows in batches:
                other.add(x[rows], labels[rows])
            other.refresh()

        step("compare", f"head that never saw {ERASED}", learn_the_rest)
        head.refresh()
        identical = torch.equal(head.weight, other.weight) and torch.equal(head.bias, other.bias)
        check(len(kept), "digest, w bit-identical", identical and other.digest() == after)

    return {
        "version": __version__, "seed": seed, "test_samples": len(test_x), "steps": steps, "clean_accuracy": clean,
        "precision": precision, "chance": chance, "digest_before": before, "digest_after": after,
        "digest_never_saw": other.digest(), "bit_identical": identical, "signed": signed, "traces": traces,
        "verification": {name: str(check) for name, check in checks.items()}, "passed": all(s["passed"] for s in steps),
        "suspects": suspects,
    }  # fmt: skip


def table(story: dict[str, Any], picture: Path) -> str:
    """Format the steps as text, at most 100 columns wide (except for a long path)."""
    row = "{:<10}{:<30}{:>8}{:>9}{:>8}  {}"
    lines = []
    for i, s in enumerate(story["steps"], 1):
        scored = "" if s["accuracy"] is None else f"{s['accuracy']:.1%}"
        check = s["check"] if s["passed"] else f"FAILED: {s['check']}"
        lines.append(row.format(f"{i} {s['name']}", s["what"], s["samples"], scored, f"{s['ms']:.1f}", check))
    steps, rule = "\n".join(lines), "-" * 100
    after, never = story["digest_after"], story["digest_never_saw"]
    sizes = f"{TRAINING_SAMPLES} to learn, {story['test_samples']} to test"
    return f"""\
torchlssvm {__version__} demo, seed {story["seed"]}: scikit-learn's digits, {sizes}.
A fixed random ReLU layer takes the place of a frozen network: {FEATURES} features.

{row.format("step", "what", "samples", "test acc", "ms", "check")}
{rule}
{steps}
{rule}
picture: {picture}
certificate of the erasure: {"signed with Ed25519" if story["signed"] else "not signed: install torchlssvm[audit]"}
digests after erasing {ERASED}, and of the head that never saw that user (first 16 of 64 digits):
{after[:16]}  {never[:16]}  equal: {after == never}"""


def draw(story: dict[str, Any], path: Path) -> None:
    """Draw the accuracy of the steps on the left, and suspicious digits on the right."""
    from matplotlib.figure import Figure

    blue, orange, grey = "#0072B2", "#D55E00", "#595959"  # Okabe and Ito: distinct for colour-blind readers
    figure = Figure(figsize=(12, 4.6), dpi=150, facecolor="white", layout="constrained")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.4))[0]
    axes = left.subplots()
    steps = [s for s in story["steps"] if s["name"] in ("learn", "correct", "erase")]
    values, clean = [100 * s["accuracy"] for s in steps], 100 * story["clean_accuracy"]
    axes.axhline(clean, color=grey, linestyle="--", label=f"all labels clean: {clean:.1f}%")
    axes.plot([f"{s['name']}\n{s['ms']:.1f} ms" for s in steps], values, "o-", color=blue, linewidth=2)
    for i, value in enumerate(values):
        axes.annotate(f"{value:.1f}%", (i, value), (6, -14), textcoords="offset points", color=blue, weight="bold")
    axes.margins(x=0.2, y=0.25)
    axes.set_ylabel("test accuracy (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    left.suptitle("Each step is one exact, durable call", weight="bold")

    cells: Any = right.subplots(3, 8)
    suspects = story["suspects"]
    for cell, (image, given, proposed, wrong) in zip(
        cells.flat, suspects[:: len(suspects) // cells.size], strict=False
    ):
        colour, mark = (blue, "✓") if wrong else (orange, "✗")
        cell.imshow(image.numpy(), cmap="gray_r", vmin=0, vmax=1)
        cell.set(xticks=[], yticks=[])
        cell.spines[:].set(color=colour, linewidth=2)
        cell.set_title(f"{given} → {proposed} {mark}", color=colour, weight="bold")
    right.suptitle(
        f"{len(suspects)} lowest leave-one-out margins: {story['precision']:.0%} are wrong labels", weight="bold"
    )
    right.supxlabel(
        "label → proposed label, from the lowest margin on; ✓ the label was wrong, ✗ it was right", color=grey, size=10
    )
    figure.savefig(path)


def run(out: Path, seed: int) -> tuple[dict[str, Any], str]:
    """Run the demo and write the picture. Returns the facts and a table. facts["passed"] is True if every check holds."""
    import matplotlib.figure  # noqa: F401  # first: without it there is no picture

    out.mkdir(parents=True, exist_ok=True)
    story, picture = tell(seed), out / PICTURE_FILE
    draw(story, picture)
    facts = {name: value for name, value in story.items() if name != "suspects"} | {"picture": str(picture)}
    return facts, table(story, picture)
