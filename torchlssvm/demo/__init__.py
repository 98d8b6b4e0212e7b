"""``torchlssvm demo``: learn, find wrong labels, correct them, erase a user, prove it. Each step is one exact call.

The data ships with scikit-learn: 1,797 digits of 8x8 pixels. The samples live in a store in a temporary folder.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
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

__all__ = ["PICTURE_FILE", "DemoStep", "Story", "Task", "load", "new_head", "run", "summary", "table"]

PICTURE_FILE = "torchlssvm_demo.png"
DIGIT_CLASSES, RELU_FEATURES, TRAINING_SAMPLES, USER_COUNT = 10, 512, 1297, 40
WRONG_SHARE = 0.2  # the fraction of training labels that is made wrong
ERASED_USER = 17  # the one who asks for erasure


@dataclass(frozen=True)
class Task:
    """Training samples with wrong labels and owners, and a test set."""

    images: Tensor  # (n, 8, 8)
    x: Tensor  # (n, J)
    truth: Tensor  # (n,)
    given: Tensor  # (n,)
    users: Tensor  # (n,)
    test_x: Tensor  # (m, J)
    test_y: Tensor  # (m,)
    seed: int


def load(seed: int) -> Task:
    """Split the digits, lift them to J features, make labels wrong and give every training sample an owner."""
    random = torch.Generator().manual_seed(seed)
    digits = import_extra("sklearn.datasets", "scikit-learn").load_digits()
    images, y = torch.as_tensor(digits.images / 16, dtype=torch.float32), torch.as_tensor(digits.target).long()
    weight = torch.randint(-8, 9, (64, RELU_FEATURES), generator=random) / 8
    bias = torch.randint(-8, 9, (RELU_FEATURES,), generator=random) / 8
    x = torch.relu(images.flatten(1) @ weight + bias)  # exact in float32, in whatever order it is summed

    order = torch.randperm(len(y), generator=random)
    train, test = order[:TRAINING_SAMPLES], order[TRAINING_SAMPLES:]
    truth, given = y[train], y[train].clone()
    bad = torch.randperm(TRAINING_SAMPLES, generator=random)[: round(WRONG_SHARE * TRAINING_SAMPLES)]
    given[bad] = (truth[bad] + torch.randint(1, DIGIT_CLASSES, (len(bad),), generator=random)) % DIGIT_CLASSES
    users = torch.randperm(TRAINING_SAMPLES, generator=random) % USER_COUNT
    return Task(images[train], x[train], truth, given, users, x[test], y[test], seed)


def import_extra(module: str, package: str) -> Any:
    """Import a module of an extra; the error names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise TorchLSSVMError(f"the demo needs {package}: pip install 'torchlssvm[sklearn,plot]'") from None


def new_head() -> LSSVMHead:
    """Make an empty head. Its grid is fixed beforehand, so that it does not depend on any sample."""
    return LSSVMHead(RELU_FEATURES, DIGIT_CLASSES, grid=FixedPoint(limit=64.0))


COMPARED_BATCH_ROWS = 97  # of the head that never saw the user; the first one learns in one batch


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Call a function; return its result and its milliseconds."""
    start = time.perf_counter()
    out = call()
    return out, 1e3 * (time.perf_counter() - start)


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


def subject(user: int) -> str:
    """Return the subject under which the store knows a user."""
    return f"user-{user:02d}"


class Story:
    """The steps in their order, with their results.

    Times include what makes a step durable on the disk, and bringing the weights up to date.
    """

    def __init__(self, task: Task):
        self.task = task
        self.ids = [f"digit-{i:04d}" for i in range(len(task.x))]
        self.labels = task.given.clone()  # what the head holds now
        self.steps: list[DemoStep] = []
        self.clean = self.accuracy(new_head().add(task.x, task.truth))
        with TemporaryDirectory() as folder:
            self.folder = Path(folder)
            with SampleStore(self.folder / "store", new_head()) as self.store:
                self.head: LSSVMHead = self.store.head
                for step in (self.learn, self.find, self.correct, self.erase, self.certify, self.verify, self.compare):
                    step()

    def accuracy(self, head: LSSVMHead) -> float:
        """Return a head's accuracy on the test set."""
        return float((head.predict(self.task.test_x) == self.task.test_y).double().mean())

    def __getitem__(self, name: str) -> DemoStep:
        return next(step for step in self.steps if step.name == name)

    @property
    def passed(self) -> bool:
        """True if every check holds."""
        return all(step.passed for step in self.steps)

    def apply(self, event: Add | Relabel | Remove) -> tuple[str, float]:
        """Apply an event; return its id and the milliseconds until it is durable and the weights are up to date."""
        start = time.perf_counter()
        receipt = self.store.apply(event)
        _ = self.head.weight
        return receipt.event_id, 1e3 * (time.perf_counter() - start)

    def learn(self) -> None:
        """Learn in one pass over samples with wrong labels, each with its owner."""
        x, y = self.task.x, self.task.given
        _, ms = self.apply(Add(self.ids, x, y, [subject(u) for u in self.task.users.tolist()]))
        check, passed = "every sample counted once", torch.equal(self.head.counts, y.bincount(minlength=DIGIT_CLASSES))
        what = f"add once, {WRONG_SHARE:.0%} of labels wrong"
        self.steps.append(DemoStep("learn", what, len(x), self.accuracy(self.head), ms, check, passed))

    def find(self) -> None:
        """Rank all samples by their leave-one-out margin and suspect the lowest."""
        x, given, truth = self.task.x, self.task.given, self.task.truth
        scores, ms = timed(lambda: self.head.leave_one_out(x, given))
        self.proposed = scores.argmax(1)
        self.suspicious = margins(scores, given).argsort(stable=True)[: round(WRONG_SHARE * len(x))]
        self.right = given[self.suspicious] != truth[self.suspicious]
        self.precision, self.chance = float(self.right.double().mean()), float((given != truth).double().mean())
        what, passed = "lowest leave-one-out margins", self.precision > 2 * self.chance
        check = f"{self.precision:.0%} wrong (chance {self.chance:.0%})"
        self.steps.append(DemoStep("find", what, len(self.right), None, ms, check, passed))

    def correct(self) -> None:
        """Relabel the suspicious samples that are really wrong, as a person who checks the list would."""
        wrong = self.suspicious[self.right]
        new = self.task.truth[wrong]
        _, ms = self.apply(Relabel(new, ids=[self.ids[i] for i in wrong.tolist()]))
        self.labels[wrong] = new
        accuracy, before = self.accuracy(self.head), self["learn"].accuracy or 0.0
        what, check = "relabel those really wrong", f"not lower (clean {self.clean:.1%})"
        self.steps.append(DemoStep("correct", what, len(wrong), accuracy, ms, check, accuracy >= before))

    def erase(self) -> None:
        """Remove one user by name; no other sample is looked at."""
        gone = self.store.find(subject=subject(ERASED_USER))
        self.digest_before = self.head.digest()
        self.event_id, ms = self.apply(Remove(subject=subject(ERASED_USER)))
        self.digest_after = self.head.digest()
        accuracy, passed = self.accuracy(self.head), self.digest_after != self.digest_before
        self.steps.append(
            DemoStep("erase", f"remove user {ERASED_USER}", len(gone), accuracy, ms, "digest changed", passed)
        )

    def certify(self) -> None:
        """Destroy the bytes, search every file for traces of the user, and sign a certificate."""
        self.signed = find_spec("cryptography") is not None
        key = self.folder / "key.pem"
        self.public_key = audit.new_key(key) if self.signed else None
        start = time.perf_counter()
        self.store.compact()
        self.certificate = self.store.certificate(self.event_id, key=key if self.signed else None)
        ms = 1e3 * (time.perf_counter() - start)
        gone = torch.nonzero(self.task.users == ERASED_USER)[:, 0].tolist()
        words = [subject(ERASED_USER).encode(), *(self.ids[i].encode() for i in gone)]
        files = [p.read_bytes() for p in self.store.path.iterdir()]
        self.traces = sum(data.count(word) for data in files for word in words)
        passed = self.traces == 0 and self.certificate.compacted and self.certificate.erased == len(gone)
        what = "compact, sign a certificate" if self.signed else "compact, write a certificate"
        self.steps.append(DemoStep("certify", what, len(gone), None, ms, "no trace in any file", passed))

    @property
    def certificate_text(self) -> str:
        """Form of the signature, or the reason that there is none."""
        return "signed with Ed25519" if self.signed else "not signed, without cryptography: torchlssvm[audit]"

    def verify(self) -> None:
        """Verify as an auditor does: check the signature and the journal, sum the rows anew, solve the weights again."""
        start = time.perf_counter()
        try:
            report = audit.verify(
                self.certificate, self.head, self.store, self.public_key, allow_unsigned=not self.signed
            )
            self.verification, passed = {name: str(check) for name, check in report.checks.items()}, True
        except VerificationError as error:
            self.verification, passed = {"failed": str(error)}, False
        ms = 1e3 * (time.perf_counter() - start)
        check = "signature, rows, w hold" if self.signed else "unsigned; rows, w hold"
        what = "the certificate, rows and head"
        self.steps.append(DemoStep("verify", what, len(self.store), None, ms, check, passed))

    def compare(self) -> None:
        """Compare with a head that never saw the user: the others' samples in another order and in other batches."""
        kept = torch.nonzero(self.task.users != ERASED_USER)[:, 0]
        order = kept[torch.randperm(len(kept), generator=torch.Generator().manual_seed(self.task.seed))]

        batches = [(self.task.x[rows], self.labels[rows]) for rows in order.split(COMPARED_BATCH_ROWS)]

        def relearn() -> LSSVMHead:
            head = new_head()
            for x, y in batches:
                head.add(x, y)
            return head.refresh()

        other, ms = timed(relearn)
        self.head.refresh()
        self.digest_never_saw = other.digest()
        self.digests_equal = self.digest_never_saw == self.digest_after
        pairs = (self.head.weight, other.weight), (self.head.bias, other.bias)
        self.bit_identical = all(torch.equal(mine, theirs) for mine, theirs in pairs)
        passed = self.digests_equal and self.bit_identical
        what, check = f"head that never saw user {ERASED_USER}", "digest, w bit-identical"
        self.steps.append(DemoStep("compare", what, len(kept), self.accuracy(other), ms, check, passed))


TABLE_COLUMNS = 100
"""Characters of a line: a terminal of usual width shows it whole."""


def line(step: str, what: str, samples: str, accuracy: str, milliseconds: str, check: str) -> str:
    """Format a line of the table."""
    return f"{step:<10}{what:<30}{samples:>8}{accuracy:>9}{milliseconds:>8}  {check}"


def table(story: Story, picture: Path) -> str:
    """Format the steps as text, at most 100 columns wide (but for a long path)."""
    n, m = len(story.task.x), len(story.task.test_x)
    lines = [
        f"torchlssvm {__version__} demo, seed {story.task.seed}: scikit-learn's digits, {n} to learn, {m} to test.",
        f"A fixed random ReLU layer stands for a frozen network: {RELU_FEATURES} features.",
        "",
        line("step", "what", "samples", "test acc", "ms", "check"),
        "-" * TABLE_COLUMNS,
    ]
    for i, step in enumerate(story.steps, 1):
        accuracy = "" if step.accuracy is None else f"{step.accuracy:.1%}"
        check = step.check if step.passed else f"FAILED: {step.check}"
        lines.append(
            line(f"{i} {step.name}", step.what, str(step.samples), accuracy, f"{step.milliseconds:.1f}", check)
        )
    lines += [
        "-" * TABLE_COLUMNS,
        f"picture: {picture}",
        f"certificate of the erasure: {story.certificate_text}",
        f"digest after erasing user {ERASED_USER}, and of the head that never saw that user (first 16 of 64 digits):",
        f"{story.digest_after[:16]}  {story.digest_never_saw[:16]}  equal: {story.digests_equal}",
    ]
    return "\n".join(lines)


def summary(story: Story, picture: Path) -> dict[str, Any]:
    """Return the same figures for ``--json``."""
    return {
        "version": __version__,
        "seed": story.task.seed,
        "test_samples": len(story.task.test_x),
        "features": RELU_FEATURES,
        "user": ERASED_USER,
        "samples": {step.name: step.samples for step in story.steps},
        "milliseconds": {step.name: round(step.milliseconds, 3) for step in story.steps},
        "accuracy": {
            "noisy": story["learn"].accuracy,
            "corrected": story["correct"].accuracy,
            "erased": story["erase"].accuracy,
            "clean": story.clean,
        },
        "precision": story.precision,
        "chance": story.chance,
        "digest_before": story.digest_before,
        "digest_after": story.digest_after,
        "digest_never_saw": story.digest_never_saw,
        "digests_equal": story.digests_equal,
        "bit_identical": story.bit_identical,
        "signed": story.signed,
        "compacted": story.certificate.compacted,
        "erased": story.certificate.erased,
        "traces": story.traces,
        "verification": story.verification,
        "checks": {step.name: step.passed for step in story.steps},
        "passed": story.passed,
        "picture": str(picture),
    }


def run(out: Path, seed: int, as_json: bool) -> int:
    """Tell the story, write the picture and print; 0 if every check holds, else 1."""
    import_extra("matplotlib", "matplotlib")  # before any work
    from torchlssvm.demo.picture import draw

    out.mkdir(parents=True, exist_ok=True)
    story, path = Story(load(seed)), out / PICTURE_FILE
    draw(story, path)
    print(json.dumps(summary(story, path), indent=2) if as_json else table(story, path))
    return 0 if story.passed else 1
