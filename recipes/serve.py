"""Export a head and predict without torchlssvm, with plain torch and with onnxruntime.

    python recipes/serve.py                       # writes OUT/head.pt2, head.safetensors and, with onnx installed, head.onnx
    python recipes/serve.py --network             # a whole network with its head

The predictions run in a separate process that cannot import torchlssvm. You need scikit-learn, lightning and safetensors.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from torchlssvm import FixedPoint, LSSVMHead, attach
from torchlssvm.export import export_onnx, export_program, freeze, save_safetensors
from torchlssvm.lightning import DigitsData

SERVER = """
import json, sys
import numpy as np, torch
sys.modules["torchlssvm"] = None  # an import of it would fail here, whether it is installed or not
folder, onnx = sys.argv[1], sys.argv[2] == "True"
x = np.load(f"{folder}/x.npy")
found = {"torch": torch.export.load(f"{folder}/head.pt2").module()(torch.from_numpy(x)).argmax(1).tolist()}
if onnx:
    import onnxruntime
    session = onnxruntime.InferenceSession(f"{folder}/head.onnx", providers=["CPUExecutionProvider"])
    found["onnxruntime"] = session.run(["scores"], {"x": x})[0].argmax(1).tolist()
print(json.dumps(found))
"""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="store_true", help="export a network with its head")
    parser.add_argument("--out", type=Path, help="folder for the files (default: a temporary folder)")
    o = parser.parse_args(argv)
    data = DigitsData(size=16 if o.network else None)
    data.setup("fit")
    (x, y), (test_x, test_y) = data.train.tensors, data.val.tensors
    head: Any
    if o.network:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(576, 300),
            nn.ReLU(),
            nn.Linear(300, 10),
        )
        head = attach(net, 10).add(x, y)
    else:
        head = LSSVMHead(64, 10, grid=FixedPoint(4.0)).add(x, y)
    model = freeze(head)
    onnx = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
    with tempfile.TemporaryDirectory() as temporary:
        out = o.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        export_program(model, test_x[:2], out / "head.pt2")
        save_safetensors(model, out / "head.safetensors", {"classes": [str(k) for k in range(10)]})
        if onnx:
            export_onnx(model, test_x[:2], out / "head.onnx")
        np.save(out / "x.npy", test_x.numpy())
        command = [sys.executable, "-I", "-c", SERVER, str(out), str(onnx)]
        answer = subprocess.run(command, capture_output=True, text=True, cwd=out, check=False)
        if answer.returncode:
            raise RuntimeError(f"the server failed: {answer.stderr.strip().splitlines()[-1]}")
        sizes = {p.name: p.stat().st_size for p in sorted(out.glob("head.*"))}
    found = json.loads(answer.stdout)
    here = head.predict(test_x).tolist()
    result = {name: {"same": served == here} for name, served in found.items()}
    right = float((torch.tensor(here) == test_y).double().mean())
    for name, row in result.items():
        print(f"{name:12} without torchlssvm: the same {len(here)} predictions: {row['same']}")
    print(f"accuracy {right:.1%}; " + ", ".join(f"{name} {size:,} bytes" for name, size in sizes.items()))
    return {"servers": result, "accuracy": right, "sizes": sizes}


if __name__ == "__main__":
    main()
