"""``torchlssvm fit|validate|test|predict --config FILE``: run a Trainer from configuration files."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from torchlssvm.lightning.data_correction import DataCorrection
from torchlssvm.lightning.module import LSSVMModule
from torchlssvm.lightning.prediction_file import PredictionFile


class HeadCLI(LightningCLI):
    """Command line with a file for predictions: ``--predictions.path``."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the callback that writes the file."""
        parser.add_lightning_class_args(PredictionFile, "predictions")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments without Lightning's warning about ``sys.argv``: they are the rest of the command line."""
        self.config = parser.parse_args(args)  # type: ignore[arg-type]


def run(args: Sequence[str]) -> bool:
    """Run one stage. ``args``: as on the command line, the stage first. One epoch is the whole training, hence the default.

    Returns True if all events of a fit were answered. Only the first rank returns False, so that the other ranks exit with 0.
    """
    cli = HeadCLI(
        LSSVMModule, LightningDataModule, subclass_mode_model=False, subclass_mode_data=True, args=list(args),
        auto_configure_optimizers=False, trainer_defaults={"max_epochs": 1}, save_config_kwargs={"overwrite": True},
        seed_everything_default=0,
    )  # fmt: skip
    corrections = [callback for callback in cli.trainer.callbacks if isinstance(callback, DataCorrection)]  # type: ignore[attr-defined]
    refused = sum(callback.refused for callback in corrections)
    return not (cli.model.unanswered or refused) or not cli.trainer.is_global_zero
