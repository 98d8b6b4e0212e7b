"""Choices that a head made from data, and the state of the head that each was made for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torchlssvm.errors import NotFittedError
from torchlssvm.functional.calibration import least_squares
from torchlssvm.linear.diagnostics.calibration import Calibration

RHO_NOT_CHOSEN = "to be chosen by gcv at the first read"
"""Description of a rho that is chosen by the rule "gcv" as soon as there are enough samples."""

RHO_CHOSEN = "chosen by gcv out of powers of two"
"""Description of a rho that was chosen by the rule "gcv", and is chosen again at the moments that the head names."""

OUTDATED_VERSION = -1
"""Version recorded for a choice that was made before samples changed; no head has it, since versions start at 0."""


@dataclass
class DataChoices:
    """Choices made from data (rho, a calibration), each with the version of the head it was made for.

    Attributes:
        made: for each choice the version, and a description of the choice.
        calibration: the map from scores to probabilities; void once samples have changed.
    """

    made: dict[str, tuple[int, str]] = field(default_factory=dict)
    calibration: Calibration | None = None

    def record(self, name: str, version: int, description: str) -> None:
        """Remember a choice made for the samples held at this version."""
        self.made[name] = (version, description)

    @property
    def rho_rule(self) -> str | None:
        """Rule by which rho is chosen again and again: "gcv"; None for a rho that was given, or chosen once."""
        return "gcv" if self.made.get("rho", (0, ""))[1] in (RHO_NOT_CHOSEN, RHO_CHOSEN) else None

    @property
    def rho_not_chosen(self) -> bool:
        """True if rho is to be chosen by its rule at the next read."""
        return self.made.get("rho", (0, ""))[1] == RHO_NOT_CHOSEN

    def reopen_rho(self) -> None:
        """Let a rho with a rule be chosen again at the next read: other samples have shaped it."""
        if self.rho_rule is not None:
            self.record("rho", OUTDATED_VERSION, RHO_NOT_CHOSEN)

    def record_calibration(self, calibration: Calibration, version: int) -> None:
        """Remember a calibration made for the samples held at this version."""
        self.calibration = calibration
        self.record("calibration", version, str(calibration))

    def current_calibration(self, version: int) -> Calibration | None:
        """Calibration, if made for this version; an older one is dropped, since samples that may be gone have shaped it."""
        if self.calibration is not None and self.made["calibration"][0] != version:
            self.calibration = None
        return self.calibration

    def probabilities(self, scores: Tensor, version: int, calibrated: bool) -> Tensor:
        """Probabilities (B, K) of scores: by the calibration; before any, and if not ``calibrated``, (1 + score) / 2, clipped.

        NotFittedError for a calibration that was made for another version.
        """
        if not calibrated or "calibration" not in self.made:
            return least_squares(scores)
        calibration = self.current_calibration(version)
        if calibration is None:
            raise NotFittedError(
                "the calibration was made for other samples than the head holds now, and they shaped it: call "
                "calibrate(x, y) again, or predict_proba(x, calibrated=False)"
            )
        return calibration(scores)

    def carry_over(self, old: int, new: int) -> None:
        """Count choices made for version ``old`` as made for ``new``: the same samples are held."""
        self.made = {name: (new if at == old else at, text) for name, (at, text) in self.made.items()}

    def describe(self, rho: float, version: int) -> dict[str, str]:
        """Choices as text, each with a note that tells whether it was made for this version."""
        out = {}
        for name, (at, text) in self.made.items():
            if text == RHO_NOT_CHOSEN:
                out[name] = text
                continue
            value = f"{rho!r}, {text}" if name == "rho" else text
            out[name] = (
                f"{value}, made for the samples held" if at == version else f"{value}, made before samples changed"
            )
            if name == "calibration" and at != version:
                out[name] = "void: it was made before samples changed"
        return out

    # -- saving --------------------------------------------------------------------------------------------------------

    def to_json(self, version: int) -> dict[str, list[Any]]:
        """Choices as [description, made for this version]. Of a void calibration no number is written out."""
        return {
            name: ["" if name == "calibration" and at != version else text, at == version]
            for name, (at, text) in self.made.items()
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any], version: int, calibration: Calibration | None) -> DataChoices:
        """Undo :meth:`to_json`, for a head that is at this version."""
        made = {
            str(name): (version if bool(now) else OUTDATED_VERSION, str(text)) for name, (text, now) in saved.items()
        }
        return cls(made, calibration)
