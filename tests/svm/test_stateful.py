"""Any sequence of operations leaves the machine that only ever saw the surviving samples."""

import hypothesis.strategies as st
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torchlssvm import IncrementalSVM
from torchlssvm.kernels import RBF, Linear

GENERATOR = torch.Generator().manual_seed(0)
# random points, a grid (ties), and copies of some of them
X = torch.cat(
    [torch.randn(16, 2, generator=GENERATOR), torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0))]
).double()
X = torch.cat([X, X[::3]])
METHODS = st.sampled_from(["auto", "path", "joint", "pivot"])
SAMPLES = st.lists(st.tuples(st.integers(0, len(X) - 1), st.integers(0, 1)), min_size=0, max_size=6)
KERNELS = {"rbf": lambda: RBF(sigma=1.0), "linear": Linear}


class Machine(RuleBasedStateMachine):
    @initialize(kernel=st.sampled_from(list(KERNELS)), C=st.sampled_from([0.01, 1.0, 20.0]))
    def start(self, kernel, C):
        self.kernel, self.C = KERNELS[kernel](), C
        self.svm = IncrementalSVM(self.kernel, C=C)
        self.held = {}

    def pick(self, data):
        return data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, max_size=6))

    @rule(samples=SAMPLES, method=METHODS)
    def add(self, samples, method):
        index, labels = [i for i, _ in samples], [y for _, y in samples]
        ids = self.svm.add(X[index], torch.tensor(labels, dtype=torch.int64), method=method)
        self.held |= dict(zip(ids.tolist(), samples, strict=True))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), method=METHODS)
    def remove(self, data, method):
        gone = self.pick(data)
        self.svm.remove(gone, method=method)
        for i in gone:
            del self.held[i]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), samples=SAMPLES, method=METHODS)
    def update(self, data, samples, method):
        gone = self.pick(data)
        index, labels = [i for i, _ in samples], [y for _, y in samples]
        ids = self.svm.update((X[index], torch.tensor(labels, dtype=torch.int64)), gone, method=method)
        for i in gone:
            del self.held[i]
        self.held |= dict(zip(ids.tolist(), samples, strict=True))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), method=METHODS)
    def relabel(self, data, method):
        some = self.pick(data)
        labels = [data.draw(st.integers(0, 1)) for _ in some]
        self.svm.relabel(some, torch.tensor(labels, dtype=torch.int64), method=method)
        for i, y in zip(some, labels, strict=True):
            self.held[i] = (self.held[i][0], y)

    @rule(factor=st.sampled_from([0.1, 0.5, 2.0]), method=st.sampled_from(["auto", "path"]))
    def change_C(self, factor, method):
        if 1e-3 < self.C * factor < 50:
            self.C *= factor
            self.svm.set_C(self.C, method=method)

    @invariant()
    def optimal(self):
        if not hasattr(self, "svm"):
            return
        assert self.svm.ids.tolist() == sorted(self.held)
        assert self.svm.y.tolist() == [self.held[i][1] for i in sorted(self.held)]
        assert self.svm.kkt_violation() <= 1e-10

    def teardown(self):
        if not getattr(self, "held", None):
            return
        samples = [self.held[i] for i in sorted(self.held)]
        fresh = IncrementalSVM(self.kernel, C=self.C)
        fresh.fit(X[[i for i, _ in samples]], torch.tensor([y for _, y in samples]))
        torch.testing.assert_close(self.svm(X), fresh(X), rtol=1e-7, atol=1e-7)


TestIncrementalSVM = Machine.TestCase
TestIncrementalSVM.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
