"""Questions to a head have the same answers on its device as on the CPU."""

import pytest
import torch

from torchlssvm import FixedPoint, LSSVMHead
from torchlssvm.linear.diagnostics.uncertainty import leverage, uncertainty

GRID = FixedPoint(8.0)
FORMS = {
    "free": {"grid": GRID},
    "penalized": {"grid": GRID, "intercept": "penalized"},
    "balanced": {"grid": GRID, "class_weight": "balanced"},
    "float sums": {"grid": None},
    "values": {"grid": GRID},
    "folds": {"grid": GRID, "folds": 3},
    "pairs": {"grid": GRID, "multiclass": "ovo"},
}


def ask(form: str, device: str) -> dict[str, torch.Tensor]:
    """Every question that a form has an answer to."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=generator).clamp(-4, 4).to(device)
    y = (torch.randn(40, 3, generator=generator) if form == "values" else torch.arange(40) % 3).to(device)
    head = LSSVMHead(6, 3, device=device, **({"rho": 1.0} | FORMS[form])).add(
        x, y, ids=range(40) if form == "folds" else None
    )
    out = {
        "loo": head.leave_one_out(x, y),
        "least": head.leave_one_out(x, y, pairs="least"),
        "leverage": leverage(head, x),
        "path": head.select_rho([0.1, 1.0], "loo", x, y, apply=False).errors,
    }
    if form != "pairs":
        out |= {"scores": head.influence(x, y, x[:5], on="scores"), "loss": head.influence(x, y, x[:5], y[:5])}
        top = head.most_influential(x, y, x[:5], y[:5], 3)
        out |= {"most": top.change, "helpful": top.helpful, "harm": top.harm}
    out |= {"gcv": head.select_rho([0.1, 1.0], apply=False).errors}
    if form != "pairs":
        out |= {"uncertainty": uncertainty(head, x)}
    if form == "folds":
        out["kfold"] = head.select_rho([0.1, 1.0], "kfold", apply=False).errors
    if form != "values":
        if form != "pairs":
            out["accuracy"] = head.influence(x, y, x[:5], y[:5], on="accuracy")
        for method in ("temperature", "platt", "isotonic"):
            out[method] = head.calibrate(x, y, method).predict_proba(x)
    return out


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
def test_on_a_real_device(form) -> None:
    real, other = ask(form, "cpu"), ask(form, "cuda")
    for name, value in other.items():
        assert value.device.type == "cuda", name
        assert torch.allclose(value.cpu(), real[name], rtol=1e-8, atol=1e-8), name
