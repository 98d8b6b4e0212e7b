"""What :class:`IncrementalSVM` knows about samples it has not seen: leave-one-out, span rule, k-fold."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks
from torchlssvm.functional.modes import exactly
from torchlssvm.machines.incremental_base import SVMBase
from torchlssvm.machines.svm_drive import Drive
from torchlssvm.machines.svm_lockstep import Lockstep
from torchlssvm.machines.threads import single_thread

ENDLESS = float("inf")


class LeaveOneOut(NamedTuple):
    """Each sample judged by the machine without it, in the order of ``ids``."""

    ids: Tensor  # (n,)
    margin: Tensor  # (n,) g_c = y_c f(x_c) - 1 without c; where a path ended early, a value below -1 that it had passed
    error: Tensor  # (n,) whether c is misclassified without it: g_c < -1
    rate: float  # the share of errors


class Estimates(SVMBase):
    """Generalization estimates; none of them changes the machine."""

    @exactly
    def leave_one_out(self, method: str = "exact", early_exit: bool = False, batched: bool = True) -> LeaveOneOut:
        """Every sample left out in turn.

        method: "exact" (Algorithm 2: all support vectors unlearned, from one tableau); "span" (Vapnik and Chapelle's rule, from
        the sensitivities: g_c - alpha_c gamma_c, gamma_c the squared distance to the span of the margin vectors); "linear"
        (the first segment of the exact path, extrapolated: the same number, as no set changes on it).
        early_exit: stop a path, as Algorithm 2 does, once the sample is known to be misclassified: faster; rates are the same,
        margins below -1 are not final. batched: False walks the paths one at a time.
        """
        checks.one_of(method, "method", ("exact", "span", "linear"))
        if not self.n:
            raise NotFittedError("no samples are held: add some first")
        s = self._engine.samples
        margin = s.g.clone()
        support = (s.alpha > 0).nonzero()[:, 0]
        if method == "exact":
            if early_exit:
                support = support[margin[support] >= -1.0]  # what is misclassified with itself is without
            margin[support] = self._without(support, -1.0 if early_exit else -ENDLESS, batched)
        else:
            margin = margin - s.alpha * self._squared_distances()
        margin = self._ordered(margin)
        error = margin < -1.0
        return LeaveOneOut(self.ids, margin, error, float(error.double().mean()))

    def _without(self, support: Tensor, stop_below: float, batched: bool) -> Tensor:
        """g_c without c for each of these positions."""
        s, m = self._engine.samples, self._engine.margin
        out = torch.full((len(support),), torch.nan, dtype=torch.float64, device=self.device)
        self._engine.walker.settle()
        with single_thread(self.device.type == "cpu" and s.n * m.top < 1_000_000):
            if batched and len(m) > 2:
                out = Lockstep(s, m, support, stop_below).run()
        with self._threads():
            for k in torch.isnan(out).nonzero()[:, 0].tolist():
                out[k] = self._walk_out(int(support[k]), stop_below)
        return out

    def _walk_out(self, c: int, stop_below: float) -> float:
        """g_c without c, by the sequential walk; the machine is put back afterwards."""
        engine = self._engine
        s, walker = engine.samples, engine.walker
        watch, walker.watch, events = walker.watch, None, walker.events
        before, margin = engine.snapshot(), engine.margin.backup()
        g = float(s.g[c])
        try:
            engine._withdraw(c)
            return walker.walk_out(Drive.single(s, c, 0.0), c, g, stop_below)
        finally:
            s.put_back(before["vectors"])
            engine.margin.put_back(margin)
            walker.watch, walker.events = watch, events

    @exactly
    def distance_to_span(self) -> Tensor:
        """gamma_c (n,): the squared distance in feature space of each sample to the span of the (other) margin vectors (21)."""
        return self._ordered(self._squared_distances())

    def _squared_distances(self) -> Tensor:
        s, m = self._engine.samples, self._engine.margin
        own = s.diagonal()
        if not len(m):
            return torch.full_like(own, ENDLESS)  # alpha cannot move: nothing balances it
        H = m.QSn * m.used[: m.top]  # (n, m), [y_c; Q_Sc] of each sample
        gamma = own - (H @ m.Rk * H).sum(1)
        slots = m.members()
        gamma[m.at[slots]] = m.R.diagonal()[slots].reciprocal() if len(m) > 1 else ENDLESS
        return gamma.clamp(min=0.0)

    @exactly
    def k_fold(self, folds: Any) -> tuple[Tensor, float]:
        """Exact k-fold cross-validation: decision values (n,) of each sample by the machine without its fold, and the error.

        folds: a number k (samples are dealt out in the order of ``ids``), or the fold (n,) of each sample.
        """
        if not self.n:
            raise NotFittedError("no samples are held: add some first")
        if isinstance(folds, int) and not isinstance(folds, bool):
            if not 2 <= folds <= self.n:
                raise ValueError(f"folds must be between 2 and the number of samples {self.n}, got {folds}")
            fold = torch.arange(self.n, device=self.device) % folds
        else:
            fold = checks.as_tensor(folds, "folds", self.device)
            if fold.shape != (self.n,):
                raise ValueError(f"folds must be a number or have shape ({self.n},), got {tuple(fold.shape)}")
        s, ids = self._engine.samples, self.ids
        values = torch.zeros(self.n, dtype=torch.float64, device=self.device)
        for k in torch.unique(fold).tolist():
            out = fold == k
            if bool(out.all()):
                raise ValueError("one fold holds every sample: nothing would be left to learn from")
            part = copy.deepcopy(self)
            part._engine.change(None, [], {}, [part._engine.samples.where[i] for i in ids[out].tolist()])
            at = torch.tensor([s.where[i] for i in ids[out].tolist()], device=self.device)
            held = part._engine.samples
            rest = torch.tensor([s.where[i] for i in held.ids], device=self.device)
            Q = s.block(at, rest) * s.y[at][:, None]
            values[out] = Q @ held.alpha + part.b
        return values, float(((values > 0).long() != self.y).double().mean())
