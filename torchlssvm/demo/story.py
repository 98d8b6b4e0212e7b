"""The story: seven steps on a sample store in a temporary folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch

from torchlssvm import LSSVMHead, VerificationError, audit
from torchlssvm.demo.data import DIGIT_CLASSES, ERASED_USER, WRONG_SHARE, Task
from torchlssvm.demo.scores import leave_one_out, margins, new_head
from torchlssvm.events import Add, Relabel, Remove
from torchlssvm.store import SampleStore

T = TypeVar("T")
COMPARED_BATCH_ROWS = 97  # of the head that never saw the user; the first one learns in one batch


def timed(call: Callable[[], T]) -> tuple[T, float]:
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
        scores, ms = timed(lambda: leave_one_out(self.head, x, given))
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
        return "signed with Ed25519" if self.signed else "not signed, for want of cryptography: torchlssvm[audit]"

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
