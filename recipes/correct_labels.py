"""Find wrong labels (a fifth of all labels) by an audit, correct them, and update the head without retraining.

    python recipes/correct_labels.py                   # MobileNetV2 features of 10,000 CIFAR-10 pictures (extracted once)
    python recipes/correct_labels.py --digits          # scikit-learn's digits, seconds
    python recipes/correct_labels.py --trust           # apply every suggestion of the audit without review

A Lightning run learns the noisy labels into a store. LabelAudit ranks all samples by their exact leave-one-out margin and
writes the most suspicious fifth as Relabel events. A person corrects the file (here the true labels stand in for the person).
DataCorrection applies the file in steps, and the recipe draws the accuracy after each step (OUT/correct_labels.png). You need
lightning, scikit-learn and matplotlib.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from pretrained_head import CACHE, accuracy, features, fit
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from torchlssvm.lightning import DataCorrection, DigitsData, Indexed, LabelAudit, LSSVMModule, ResumableLoader
from torchlssvm.lightning.datamodules import noisy_labels

NOISE, STEPS = 0.2, 10
QUIET: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip


def digits() -> list[Tensor]:
    """Digits lifted to 500 random features."""
    from torchlssvm.features import RandomReLU

    data = DigitsData()
    data.setup("fit")
    lift = RandomReLU(64, 500)
    return [part for d in (data.train, data.val) for part in (lift(d.tensors[0]), d.tensors[1])]


def mend(file: Path, truth: Tensor, given: Tensor) -> int:
    """Stand in for a person: drop the lines of right labels, and write the true label into the others."""
    kept = []
    for line in file.read_text().splitlines():
        if line.startswith("#"):
            continue
        event = json.loads(line)
        right = int(truth[int(event["ids"][0])])
        if right != int(given[int(event["ids"][0])]):
            kept.append(json.dumps(event | {"y": [right]}))
    file.write_text("\n".join(kept) + "\n")
    return len(kept)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--digits", action="store_true")
    parser.add_argument("--samples", type=int, help="use only this many samples of each part")
    parser.add_argument("--trust", action="store_true", help="accept every suggestion of the audit")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--out", type=Path, default=Path("."))
    o = parser.parse_args(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    x, y, test_x, test_y = digits() if o.digits else features(samples=o.samples, cache=o.cache)
    given = noisy_labels(y, NOISE, seed=0)
    wrong = given != y
    clean = fit(x, y, 10)
    val = DataLoader(TensorDataset(test_x, test_y), batch_size=512)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "suspects.jsonl")
        limit = float(2 ** torch.ceil(torch.log2(x.abs().max())))
        module = LSSVMModule("identity", 10, in_features=x.shape[1], grid=limit, store=str(Path(folder, "store")))
        audit = LabelAudit(file, fraction=0.2)
        data = ResumableLoader(Indexed(TensorDataset(x, given)), 512)
        Trainer(**QUIET, callbacks=[audit]).fit(module, data)
        ranked = [int(s.id) for s in audit.suspects]
        top, all_ = ranked[: len(x) // 10], ranked[: len(x) // 5]
        result: dict[str, Any] = {
            "clean": accuracy(clean.predict(test_x), test_y),
            "precision_10": float(wrong[top].double().mean()), "precision_20": float(wrong[all_].double().mean()),
            "found": float(wrong[all_].sum() / wrong.sum()),
        }  # fmt: skip
        count = len(ranked) if o.trust else mend(file, y, given)
        correction = DataCorrection(file, limit=-(-count // STEPS))
        trainer = Trainer(**QUIET, callbacks=[correction])
        curve = [accuracy(module.head.predict(test_x), test_y)]
        for _ in range(STEPS):
            trainer.validate(module, val, verbose=False)
            curve.append(float(trainer.callback_metrics["val_accuracy"]))
        result |= {"curve": curve, "noisy": curve[0], "corrected": curve[-1]}
        result["applied"] = sum(r.applied for r in correction.reports)
        result["milliseconds"] = sum(r.milliseconds for r in correction.reports)
        module.head.select_rho(method="gcv")  # it was chosen from wrong labels: that is influence of theirs, too
        result["chosen_again"] = accuracy(module.head.predict(test_x), test_y)
    print(f"{len(x)} samples, {int(wrong.sum())} labels are wrong")
    print(
        f"of the most suspicious tenth {result['precision_10']:.1%} are wrong, of the fifth {result['precision_20']:.1%}"
    )
    print(
        f"accuracy: {curve[0]:.1%} with wrong labels, {curve[-1]:.1%} corrected, {result['clean']:.1%} trained on right ones"
    )
    print(f"with rho chosen again from the corrected labels: {result['chosen_again']:.1%}")
    print(f"{result['applied']} corrections in {result['milliseconds']:.0f} ms")
    result["picture"] = draw(curve, result["chosen_again"], result["clean"], count, len(test_y), o.out)
    return result


def draw(curve: list[float], again: float, clean: float, count: int, judges: int, out: Path) -> Path | None:
    """Accuracy against the number of corrected labels."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: it needs matplotlib")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    steps = [count * k / (len(curve) - 1) for k in range(len(curve))]
    axes.plot(steps, [100 * a for a in curve], "o-", color="#0072B2", label="corrected step by step")
    axes.plot([count], [100 * again], "^", color="#D55E00", markersize=9, label="then rho chosen again")
    axes.axhline(100 * clean, color="#595959", linestyle="--", label="trained on the right labels")
    axes.set(xlabel="labels corrected", ylabel=f"accuracy on {judges:,} test samples (%)")
    axes.set_title("Correcting labels without retraining")
    axes.locator_params(axis="y", steps=[1, 2, 5, 10])
    axes.yaxis.set_major_formatter("{x:.1f}")
    axes.margins(y=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    path = out / "correct_labels.png"
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    print(f"picture: {path}")
    return path


if __name__ == "__main__":
    main()
