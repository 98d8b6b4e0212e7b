"""Pages in a real browser: what it makes of them in a frame of some width."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")


def chromium(folder: Path, *arguments: str) -> str:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += [
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
    ]
    command = [CHROMIUM, *flags, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def seen(page: str, folder: Path, width: int, fields: str, *arguments: str) -> Any:
    """The value of a JavaScript object in a page; in a frame, since a window has at least 500 pixels."""
    probe = f"<script>parent.postMessage(JSON.stringify({{{fields}}}), '*');</script>"
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace("</body>", probe + "</body>")
    (folder / "probe.html").write_text(text)
    (folder / "frame.html").write_text(f"""<!DOCTYPE html><body style="margin:0"><script>
    onmessage = e => document.documentElement.innerHTML = "<pre>" + e.data + "</pre>";
    </script><iframe src="probe.html" width="{width}" height="1500" style="border:0"></iframe></body>""")
    window = f"--window-size={max(width, 500)},1500"
    done = chromium(
        folder, "--virtual-time-budget=5000", window, *arguments, "--dump-dom", (folder / "frame.html").as_uri()
    )
    return json.loads(re.search(r"<pre>(.*?)</pre>", done, re.S).group(1))
