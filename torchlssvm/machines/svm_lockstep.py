"""Many removals from one machine: their paths start from one tableau, and none of them changes the machine.

On the host, where numba is installed, each path is walked to its end in compiled loops. Elsewhere they go in lockstep, a step
of all of them at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional import loops, svm_tableau
from torchlssvm.functional.svm_path import EPS
from torchlssvm.functional.svm_tableau import ENDLESS, Pivot
from torchlssvm.machines.svm_margin import DEPENDENT, Margin
from torchlssvm.machines.svm_samples import Samples
from torchlssvm.machines.svm_tableau import Tableau

MOST = 64  # events of a path before it is left to the sequential walk
AT_ONCE = 256  # paths in lockstep
ROOM = 2**22  # numbers in an array (paths, samples looked at)
EAGER = 1500  # samples looked at up to which a path that lacks a column costs more than all columns in one product
AGAIN = 4  # times that more samples are looked at
TIE = 1e-12  # steps below this are simultaneous events: left to the sequential walk
SOUND = 1e3 * DEPENDENT


class Lockstep:
    """The paths of samples c (B,) leaving."""

    def __init__(self, samples: Samples, margin: Margin, c: Tensor, stop_below: float):
        self.samples, self.stop_below = samples, stop_below
        compiled = isinstance(samples.host(samples.alpha), np.ndarray)
        self.loops: Any = loops.load("svm_tableau_loops") if compiled else None
        self.tableau = Tableau(samples, margin, EAGER if self.loops else 0)
        self.c = self.tableau.index[c]
        self.g, self.alpha = samples.g[c], samples.alpha[c]  # (B,)
        self.result = torch.full_like(self.g, torch.nan)
        self.noise = 16 * EPS * samples.scale  # of g, for each unit of the coefficients that move

    def run(self) -> Tensor:
        """g_c when c is gone (B,), below ``stop_below`` where the path ended early; nan where it has to be walked alone."""
        paths = torch.arange(len(self.c), device=self.c.device)
        for _ in range(AGAIN):
            found = [self._walk(part) for part in paths.split(max(16, ROOM // self.tableau.N))]
            paths = paths[self.result[paths].isnan()]
            more = torch.unique(torch.cat(found))
            if not len(more):
                break
            self.tableau.see(more)
        return self.result

    def _walk(self, paths: Tensor) -> Tensor:  # (k,) -> (l,)
        """The results of these paths; returns the positions of samples they should have looked at."""
        t = self.tableau
        t.need(self.c[paths])
        moved, beta = (self.g.new_zeros(len(paths), t.N) for _ in range(2))
        done = (self._compiled if self.loops else self._together)(paths, moved, beta)
        paths, moved, beta = paths[done], moved[done], beta[done]
        c = self.c[paths]
        out, found = t.ends(c, moved, beta)
        early = moved.gather(1, c[:, None])[:, 0] > (TIE - 1.0) * self.alpha[paths]
        self.result[paths] = torch.where(early & (out >= self.stop_below), torch.nan, out)
        return found

    def _compiled(self, paths: Tensor, moved: Tensor, beta: Tensor) -> Tensor:  # (k,), (k, N), (k, N) -> (k,)
        """Walk these paths, and tell how far every coefficient has moved, and beta_c at the end; returns those that have ended.

        A path that lacks a column starts again when it is there.
        """
        t, ahead, lacks = self.tableau, torch.arange(len(paths), device=paths.device), torch.empty_like(paths)
        what = (self.c[paths].numpy(), self.alpha[paths].numpy(), self.g[paths].numpy())
        limits = (self.stop_below, self.noise, SOUND, TIE, MOST)
        while len(ahead):
            shared = (t.T.numpy(), t.row.numpy(), t.size.numpy(), t.m, t.start.numpy())
            self.loops.walk_all(*shared, ahead.numpy(), *what, *limits, moved.numpy(), beta.numpy(), lacks.numpy())
            ahead = (lacks >= 0).nonzero()[:, 0]
            t.need(lacks[ahead])
        ended: Tensor = lacks == self.loops.DONE
        return ended

    def _together(self, paths: Tensor, moved: Tensor, beta: Tensor) -> Tensor:  # (k,), (k, N), (k, N) -> (k,)
        """The same, in lockstep."""
        parts = (v.split(max(16, min(AT_ONCE, ROOM // (4 * self.tableau.N)))) for v in (paths, moved, beta))
        return torch.cat([Together(self, *part).run() for part in zip(*parts, strict=True)])


STATE = ("path", "c", "d", "g", "p", "x", "lower", "upper", "inside", "rate")
"""What each path has a row of."""


class Together:
    """Paths in lockstep; a path that ends, or is left to the sequential walk, loses its row."""

    def __init__(self, all_paths: Lockstep, paths: Tensor, moved: Tensor, beta: Tensor):
        self.moved, self.beta = moved, beta  # (B, N), of each path
        self.tableau = t = all_paths.tableau
        self.noise, self.stop_below = all_paths.noise, all_paths.stop_below
        B, m = len(paths), t.m
        self.path = torch.arange(B, device=t.device)
        self.c, self.d, self.g = all_paths.c[paths], -all_paths.alpha[paths], all_paths.g[paths]
        self.done = torch.zeros(B, dtype=torch.bool, device=t.device)
        self.p = torch.zeros_like(self.g)
        self.x, self.lower, self.upper = (v.expand(B, -1).clone() for v in t.start[:3])
        self.inside = (torch.arange(t.N, device=t.device) < m).expand(B, -1).clone()
        # the sample leaving has no bounds; a margin vector first leaves P, by (14), before it is driven
        key, mine = self.c[:, None], self.c < m
        self.lower.scatter_(1, key, -ENDLESS)
        self.upper.scatter_(1, key, ENDLESS)
        self.inside.scatter_(1, key, False)
        u = t.T[t.row[self.c]]
        pivot = u.gather(1, key)[:, 0]
        w = u.scatter(1, key, 1.0) * mine[:, None]
        self.pivots = [Pivot(self.c, torch.where(mine, 1.0 / pivot, 0.0), w)]
        self.rate = torch.where(mine[:, None], w / pivot[:, None], u) * self.d[:, None]
        self._keep(~mine | (pivot > 0))

    def _keep(self, keep: Tensor) -> None:
        index = keep.nonzero()[:, 0]
        if len(index) < len(keep):
            for name in STATE:
                setattr(self, name, getattr(self, name).index_select(0, index))
            self.pivots = [Pivot(*(v.index_select(0, index) for v in pivot)) for pivot in self.pivots]

    def run(self) -> Tensor:  # -> (B,)
        """To the end of every path; returns those that came to it."""
        while len(self.path) and len(self.pivots) <= MOST:
            self._step()
        return self.done

    def _step(self) -> None:
        bounds = self.lower, self.upper
        first, k = svm_tableau.first_event(self.rate, self.x, *bounds, self.inside, self.d, self.noise)
        left = 1.0 - self.p
        step = torch.minimum(first, left)
        doubtful = first < TIE
        self.g = self.g + step * self.rate.gather(1, self.c[:, None])[:, 0]
        self.p = self.p + step
        self.x.addcmul_(step[:, None], self.rate)
        over = ~doubtful & ((self.g < self.stop_below) | (first >= left))
        rows = over.nonzero()[:, 0]
        if len(rows):
            path, inside = self.path[rows], self.inside[rows]
            self.done[path] = True
            self.moved[path] = torch.where(inside, self.x[rows] - self.tableau.start[3], self.moved[path])
            self.moved[path, self.c[rows]] = (self.d * self.p)[rows]
            self.beta[path] = torch.where(inside, self.rate[rows] / self.d[rows, None], 0.0)
        go = ~(doubtful | over)
        k = k[go]
        self._keep(go)
        if len(k):
            self._change(k)

    def _change(self, k: Tensor) -> None:  # (B,)
        """Every path has an event: k enters S, by (13), or leaves, by (14)."""
        t, key = self.tableau, k[:, None]
        t.need(k)
        w, size = t.T[t.row[k]], t.size[t.row[k]]
        svm_tableau.column_(w, k, size, self.pivots)
        pivot, rate = w.gather(1, key)[:, 0], self.rate.gather(1, key)[:, 0]
        leaves = self.inside.gather(1, key)[:, 0]
        # b, k and one more at least
        good = torch.where(leaves, (pivot > 0) & (self.inside.sum(1) > 2), pivot > SOUND * size)
        self.pivots.append(Pivot(k, 1.0 / pivot, w.scatter_(1, key, 1.0)))
        svm_tableau.pivot_(self.rate, self.pivots[-1])
        # What rises comes to u and leaves to E; or its g rises to 0 from below, and it comes from E with alpha = u
        up, u = rate > 0, t.start[4][k]
        alpha = torch.where(up, u, 0.0)
        self.moved[self.path, k] = alpha - t.start[3][k]  # as long as it is not inside
        self.x.scatter_(1, key, torch.where(leaves, 0.0, alpha)[:, None])
        self.lower.scatter_(1, key, torch.where(leaves & up, -ENDLESS, torch.zeros_like(u))[:, None])
        self.upper.scatter_(1, key, torch.where(leaves, torch.where(up, torch.zeros_like(u), ENDLESS), u)[:, None])
        self.inside.scatter_(1, key, ~leaves[:, None])
        self._keep(good)
