"""Training with Lightning: a module without an optimizer, and callbacks that correct data while a run goes on."""

from torchlssvm.lightning.batches import Indexed, ResumableLoader
from torchlssvm.lightning.data_correction import DataCorrection
from torchlssvm.lightning.datamodules import Cifar10Data, DigitsData, FolderData
from torchlssvm.lightning.drift_monitor import DriftMonitor
from torchlssvm.lightning.fit_head import FitHead
from torchlssvm.lightning.label_audit import LabelAudit
from torchlssvm.lightning.module import LSSVMModule
from torchlssvm.lightning.online_probe import OnlineProbe
from torchlssvm.lightning.prediction_file import PredictionFile

__all__ = [
    "Cifar10Data",
    "DataCorrection",
    "DigitsData",
    "DriftMonitor",
    "FitHead",
    "FolderData",
    "Indexed",
    "LSSVMModule",
    "LabelAudit",
    "OnlineProbe",
    "PredictionFile",
    "ResumableLoader",
]
