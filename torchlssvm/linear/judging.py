"""What a head can say about itself: leave-one-out, the choice of rho, influence, probabilities, uncertainty."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchlssvm.linear.base import HeadBase
from torchlssvm.linear.diagnostics import uncertainty as probability
from torchlssvm.linear.diagnostics.calibration import Calibration
from torchlssvm.linear.diagnostics.influence import Measure, influence
from torchlssvm.linear.diagnostics.influence_ranking import Influential, check_ranking, names_of, rank
from torchlssvm.linear.diagnostics.leave_one_out import leave_one_out
from torchlssvm.linear.diagnostics.rho_selection import RhoPath, rho_path
from torchlssvm.linear.locking import exclusive


class Judging(HeadBase):
    """Read-only questions to :class:`~torchlssvm.LSSVMHead`; nothing here refits."""

    @exclusive
    def leave_one_out(self, x: Any, y: Any, weight: Any = None, groups: Any = None, *, pairs: str = "votes") -> Tensor:
        """Scores (B, K) of samples held, each by the head that never saw it: y_i - (y_i - f(x_i)) / (1 - h_i).

        Exact, with class weights that follow the counts derived again without the sample. In batches: any part of what is
        held may be given. ``groups`` (B,): leave out the whole group instead (leave-user-out); all of a group goes in one call.

        Args:
            x: (B, J), as added.
            y: (B,) labels or (B, K) targets, as added.
            weight: (B,), as added.
            groups: (B,) numbers or names.
            pairs: with ``multiclass="ovo"``, ``"votes"`` as in ``forward``, or ``"least"``: the score of a class is the least
                it gets against any other, which has finer margins.

        >>> import torch
        >>> from torchlssvm import LSSVMHead
        >>> from torchlssvm.analysis.cross_validation import error_rate
        >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
        >>> head = LSSVMHead(3, 2).add(x, y)
        >>> scores = head.leave_one_out(x, y)
        >>> torch.allclose(scores[0], head.remove(x[:1], y[:1])(x[:1])[0], atol=1e-4)  # the grid aside
        True
        >>> 0 <= error_rate(scores, y) <= 1
        True
        """
        return leave_one_out(self, x, y, weight, groups, pairs)

    @exclusive
    def rho_path(
        self, rhos: Any = None, method: str = "gcv", x: Any = None, y: Any = None, *, weight: Any = None, ids: Any = None,
        score: str = "squared",
    ) -> RhoPath:  # fmt: skip
        """Errors for many values of rho from one eigendecomposition, without choosing; arguments as for ``select_rho``."""
        return rho_path(self, rhos, method, x, y, weight, ids, score)

    @exclusive
    def select_rho(
        self, rhos: Any = None, method: str = "gcv", x: Any = None, y: Any = None, *, weight: Any = None, ids: Any = None,
        score: str = "squared",
    ) -> RhoPath:  # fmt: skip
        """Choose rho and apply it: one eigendecomposition serves all values.

        Args:
            rhos: values > 0; None: 100 around the scale of the data.
            method: ``"gcv"`` (generalized cross-validation, from statistics alone), ``"loo"`` (exact leave-one-out; x and y are
                all samples held) or ``"kfold"`` (exact, from the sums of each fold; needs ``folds``).
            x: (n, J), as added.
            y: (n,) or (n, K), as added.
            weight: (n,), as added.
            ids: (n,), as added; only for k-fold by accuracy.
            score: ``"squared"`` or ``"accuracy"`` ("loo" and "kfold", with x and y).

        >>> import torch
        >>> from torchlssvm import LSSVMHead
        >>> x, y = torch.randn(50, 4), torch.arange(50) % 2
        >>> head = LSSVMHead(4, 2).add(x, y)
        >>> path = head.select_rho([0.1, 1.0, 10.0], "loo", x, y)
        >>> head.rho == path.rho, path.errors.shape
        (True, torch.Size([3]))
        """
        path = rho_path(self, rhos, method, x, y, weight, ids, score)
        self.rho = path.rho
        self._made["rho"] = (self._version, f"chosen by {method} out of {len(path.rhos)} values")
        return path

    @exclusive
    def influence(
        self, x: Any, y: Any, x_val: Any, y_val: Any = None, what: str = "remove", on: str | Measure = "loss", *,
        y_new: Any = None, weight: Any = None, groups: Any = None,
    ) -> Tensor:  # fmt: skip
        """The exact change at x_val if each sample, or group of samples, were removed, added or relabelled.

        Positive for ``on="loss"`` means the loss would rise: removing such a sample hurts, it is a helpful one. In tiles; a
        matrix of samples by points is made for ``on="scores"`` only.

        Args:
            x: (B, J), samples held, as added; for ``what="add"`` samples that are not held.
            y: (B,) or (B, K), their labels or targets.
            x_val: (V, J), where to look.
            y_val: (V,) labels or (V, K) targets, for "loss" and "accuracy".
            what: ``"remove"``, ``"add"`` or ``"relabel"``.
            on: ``"loss"`` (mean squared error) or ``"accuracy"``, returns (B,); ``"scores"``, returns (B, V, K); or a function
                from scores (b, V, K) to one number for each change (b,).
            y_new: (B,), for ``"relabel"``.
            weight: (B,), as added.
            groups: (B,); samples of a group change together, and the result has one entry for each group, in the order in
                which they first appear.

        >>> import torch
        >>> from torchlssvm import LSSVMHead
        >>> x, y = torch.randn(50, 4), torch.arange(50) % 2
        >>> head = LSSVMHead(4, 2).add(x, y)
        >>> head.influence(x, y, x[:10], y[:10]).shape, head.influence(x, y, x[:10], on="scores").shape
        (torch.Size([50]), torch.Size([50, 10, 2]))
        """
        return influence(self, x, y, x_val, y_val, what, on, y_new, weight, groups)

    @exclusive
    def most_influential(
        self, x: Any, y: Any, x_val: Any, y_val: Any, count: int = 10, what: str = "remove", on: str = "loss", *,
        ids: Any = None, y_new: Any = None, weight: Any = None, groups: Any = None,
    ) -> Influential:  # fmt: skip
        """The ``count`` most helpful and the ``count`` most harmful samples (or groups) by their exact influence at x_val.

        Never a matrix of samples by points; other arguments as for ``influence``. ``ids`` (B,) come back with the samples.

        >>> import torch
        >>> from torchlssvm import LSSVMHead
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(200, 4), torch.arange(200) % 2
        >>> x[:, 0] += 6 * y
        >>> given = y.clone()
        >>> given[7] = 1 - given[7]  # a wrong label
        >>> head = LSSVMHead(4, 2).add(x[:100], given[:100])
        >>> found = head.most_influential(x[:100], given[:100], x[100:], y[100:], 3, ids=[f"s{i}" for i in range(100)])
        >>> "s7" in found.harmful_ids, bool((found.harm > 0).all()), len(found.helpful)
        (True, True, 3)
        """
        check_ranking(what, on, count)
        names = names_of(ids, groups, len(x))
        change = influence(self, x, y, x_val, y_val, what, on, y_new, weight, groups)
        return rank(change, what, on, count, names)

    # -- probabilities -------------------------------------------------------------------------------------------------

    @exclusive
    def calibrate(self, x: Any, y: Any, method: str | None = None, *, weight: Any = None, groups: Any = None) -> Any:
        """Fit probabilities on the leave-one-out scores of samples held: no held-out data is needed. Returns self.

        Args:
            x: (n, J), as added.
            y: (n,), as added.
            weight: (n,), as added.
            method: ``"temperature"`` (the default for many classes), ``"platt"`` (for two) or ``"isotonic"``. A temperature
                keeps the order of the scores; the others may find another class more probable than the one that ``predict``,
                which always goes by scores, returns.
            groups: (n,), e.g. users: then on leave-group-out scores.

        >>> import torch
        >>> from torchlssvm import LSSVMHead
        >>> x, y = torch.randn(50, 4), torch.arange(50) % 2
        >>> head = LSSVMHead(4, 2).add(x, y).calibrate(x, y)
        >>> bool(torch.allclose(head.predict_proba(x).sum(1), torch.ones(50, dtype=torch.float64)))
        True
        """
        probability.calibrate(self, x, y, method, weight, groups)
        return self

    @exclusive
    def calibrate_on(self, scores: Any, y: Any, method: str | None = None) -> Any:
        """As ``calibrate``, on leave-one-out scores (n, K) that were computed in batches. Returns self."""
        probability.calibrate_on(self, scores, y, method)
        return self

    @property
    def calibration(self) -> Calibration | None:
        """The map from scores to probabilities, if it was made for the samples held now."""
        if self._calibration is not None and self._made["calibration"][0] != self._version:
            self._calibration = None  # samples that may be gone have shaped it
        calibration: Calibration | None = self._calibration
        return calibration

    def predict_proba(self, x: Tensor, calibrated: bool = True) -> Tensor:  # (B, J) -> (B, K)
        """Probabilities (B, K): calibrated by the last ``calibrate``; before any, and if asked, (1 + score) / 2, clipped.

        A change of samples makes the calibration void, since what was removed has shaped it: that is a NotFittedError until
        ``calibrate`` is called again.
        """
        scores: Tensor = self(x)
        return probability.probabilities(self, scores, calibrated)

    @exclusive
    def leverage(self, x: Any, relative: bool = False) -> Tensor:
        """How far away inputs are: g = 1/n + (x - mu)^T A^-1 (x - mu) (B,), from P. x: (B, J).

        ``relative``: divided by its mean over the samples held; an input of 10 is ten times as far as those are.
        """
        return probability.leverage(self, x, relative)

    @exclusive
    def uncertainty(self, x: Any) -> Tensor:
        """The standard error of each score (B, K): sigma_k sqrt(g), sigma_k^2 = rss_k / (n - dof). x: (B, J)."""
        return probability.uncertainty(self, x)

    def _remember_calibration(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._made["calibration"] = (self._version, str(calibration))

    @property
    def choices(self) -> dict[str, str]:
        """What was chosen from data (rho, a calibration), and whether it was made for the samples held now."""
        out = {}
        for name, (version, text) in self._made.items():
            value = f"{self.rho!r}, {text}" if name == "rho" else text
            now = version == self._version
            out[name] = f"{value}, made for the samples held" if now else f"{value}, made before samples changed"
            if name == "calibration" and not now:
                out[name] = "void: it was made before samples changed"
        return out
