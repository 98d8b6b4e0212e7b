"""Choices that a head made from data: their values, their methods, and whether the samples have changed since."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from torch import Tensor

from torchlssvm.errors import NotFittedError
from torchlssvm.functional.calibration import least_squares
from torchlssvm.linear.diagnostics.calibration import Calibration


class ChoiceState(Enum):
    """Whether a choice is still to be made, made for the current samples, or made before samples changed."""

    OPEN = "open"
    CURRENT = "current"
    STALE = "stale"


_COMPARED = {"columns": "sets", "scale": "scales", "rule": "rules"}


@dataclass(frozen=True)
class Choice:
    """One choice made from data; ``str(choice)`` is the sentence that reports and certificates show.

    Attributes:
        name: "rho", "rule", "calibration", "columns" or "scale".
        state: open, current or stale.
        method: how the choice is made: "gcv", "loo" or "kfold"; "temperature", "platt" or "isotonic" for a calibration.
        rule: True if the head repeats the choice by this method at the times that it documents (``rho="gcv"``).
        candidates: the number of values compared; None if the method has values of its own.
        value: the value in use, as text; empty while the choice is open, and for a calibration that is no longer used.
    """

    name: str
    state: ChoiceState
    method: str
    rule: bool = False
    candidates: int | None = None
    value: str = ""

    def __str__(self) -> str:
        if self.state is ChoiceState.OPEN:
            return f"to be chosen by {self.method} at the first read"
        if self.name == "calibration":
            if self.state is ChoiceState.STALE:
                return "void: it was made before samples changed"
            how = self.value or self.method
        else:
            number = "powers of two" if self.candidates is None else f"{self.candidates} {self._compared}"
            how = f"{self.value}, " * bool(self.value) + f"chosen by {self.method} out of {number}"
        when = "made for the current samples" if self.state is ChoiceState.CURRENT else "made before samples changed"
        return f"{how}, {when}"

    @property
    def _compared(self) -> str:
        return _COMPARED.get(self.name, "values")

    def facts(self) -> dict[str, Any]:
        """Every attribute, as a JSON value."""
        return asdict(self) | {"state": self.state.value}


@dataclass
class DataChoices:
    """Choices made from data (rho, a calibration, columns).

    Attributes:
        made: the choices by name. The values of rho and of a calibration are not included, since the head has them.
        calibration: the map from scores to probabilities; None once samples have changed, since the map may depend on removed
            samples.
    """

    made: dict[str, Choice] = field(default_factory=dict)
    calibration: Calibration | None = None

    @classmethod
    def for_rho(cls, rule: str | None) -> DataChoices:
        """No choice, or a rho that is still to be chosen by a rule."""
        choices = cls()
        if rule is not None:
            choices.record("rho", rule, rule=True, state=ChoiceState.OPEN)
        return choices

    def record(
        self,
        name: str,
        method: str,
        candidates: int | None = None,
        value: str = "",
        *,
        rule: bool = False,
        state: ChoiceState = ChoiceState.CURRENT,
    ) -> None:
        """Remember a choice, made for the current samples."""
        self.made = self.made | {name: Choice(name, state, method, rule, candidates, value)}

    @property
    def rho_rule(self) -> str | None:
        """The rule by which rho is chosen again after changes ("gcv"). None for a rho that was given, or chosen once."""
        choice = self.made.get("rho")
        return choice.method if choice is not None and choice.rule else None

    @property
    def rho_is_open(self) -> bool:
        """True if rho is to be chosen by its rule at the next read."""
        return self.state_of("rho") is ChoiceState.OPEN

    def state_of(self, name: str) -> ChoiceState | None:
        """State of a choice; None if it was not made from data."""
        choice = self.made.get(name)
        return None if choice is None else choice.state

    def reopen_rho(self) -> None:
        """Have a rho with a rule chosen again at the next read, because it was chosen for other samples."""
        if self.rho_rule is not None:
            self.made["rho"] = replace(self.made["rho"], state=ChoiceState.OPEN)

    def outdate(self) -> None:
        """Mark the choices as stale and drop the calibration, after samples have changed."""
        for name, choice in self.made.items():
            if choice.state is ChoiceState.CURRENT:
                self.made[name] = replace(choice, state=ChoiceState.STALE)
        self.calibration = None

    def outdate_calibration(self) -> None:
        """Drop the calibration, which no longer applies after weights have changed."""
        if "calibration" in self.made:
            self.made["calibration"] = replace(self.made["calibration"], state=ChoiceState.STALE)
        self.calibration = None

    def record_calibration(self, calibration: Calibration) -> None:
        """Remember a calibration made for the current samples."""
        self.calibration = calibration
        self.record("calibration", calibration.method)

    def probabilities(self, scores: Tensor, calibrated: bool) -> Tensor:
        """Probabilities (B, K) of scores by the calibration; if not ``calibrated``, (1 + score) / 2, clipped.

        Raises NotFittedError if there is no calibration for the current samples.
        """
        if not calibrated:
            return least_squares(scores)
        if self.calibration is None:
            stale = "calibration" in self.made
            reason = "The samples have changed since the calibration" if stale else "These scores are uncalibrated"
            raise NotFittedError(
                f"{reason}: call calibrate(x, y) with the samples{' again' if stale else ' first'}, or "
                "predict_proba(x, calibrated=False) for clipped scores."
            )
        return self.calibration(scores)

    def listed(self, rho: float) -> dict[str, Choice]:
        """The choices with their values. rho: the one in use."""
        out = dict(self.made)
        if "rho" in out and not self.rho_is_open:
            out["rho"] = replace(out["rho"], value=repr(rho))
        if self.calibration is not None and "calibration" in out:
            out["calibration"] = replace(out["calibration"], value=str(self.calibration))
        return out

    # -- saving --------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, dict[str, Any]]:
        """The choices as primitives, without the values of rho and of a calibration."""
        return {name: choice.facts() for name, choice in self.made.items()}

    @classmethod
    def from_json(cls, saved: dict[str, Any], calibration: Calibration | None) -> DataChoices:
        """Undo :meth:`to_json`, for a head with the samples it was written for; ValueError if it is not understood."""
        made = {}
        for name, facts in saved.items():
            made[str(name)] = Choice(**facts | {"state": ChoiceState(facts["state"])})
        choices = cls(made, calibration)
        if calibration is None:
            choices.outdate_calibration()
        return choices
