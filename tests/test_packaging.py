"""What a fresh clone promises: the extras, the small core, one test command, nothing tied to one machine."""

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def distribution(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement).group().lower()


def test_core_needs_torch_and_numpy_only(project: dict[str, Any]) -> None:
    assert sorted(map(distribution, project["dependencies"])) == ["numpy", "torch"]


def test_extras(project: dict[str, Any]) -> None:
    extras = {name: set(map(distribution, needs)) for name, needs in project["optional-dependencies"].items()}
    assert {"vision", "lightning", "sklearn", "plot", "export", "audit", "dev"} <= set(extras)
    assert {"lightning", "torchmetrics"} <= extras["lightning"]
    assert extras["audit"] == {"cryptography", "rfc3161-client"}
    assert extras["report"] == {"jinja2", "matplotlib", "pillow"}
    assert {"onnx", "onnxruntime", "safetensors"} <= extras["export"]
    assert {"torchlssvm", "pytest", "pytest-xdist", "hypothesis", "ruff", "mypy", "pre-commit"} <= extras["dev"]


def test_no_torch_pin(project: dict[str, Any]) -> None:
    # A torch pinned by itself breaks the torchvision that goes with another one.
    for needs in [project["dependencies"], *project["optional-dependencies"].values()]:
        assert not [need for need in needs if "==" in need or "<" in need or "@" in need]


def test_version_is_the_same_everywhere(project: dict[str, Any]) -> None:
    import torchlssvm

    assert getattr(torchlssvm, "__version__", project["version"]) == project["version"]


def test_package_is_typed() -> None:
    assert (ROOT / "torchlssvm" / "py.typed").is_file()


@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_schemas_and_templates_ship(target: str) -> None:
    """Whatever is in the folder of the package, and not only its Python files."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    patterns = [pattern.replace("**/", "*") for pattern in build["targets"][target]["include"]]
    files = [name for name in repository_texts() if name.startswith("torchlssvm/")]
    assert {Path(name).suffix for name in files} >= {".py", ".json", ".j2"}
    assert not [name for name in files if not any(fnmatch(f"/{name}", pattern) for pattern in patterns)]


def readme_test_command() -> str:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    start, end = "python3 -m venv .venv && .venv/bin/pip install", ".venv/bin/pytest"
    commands = {line.strip() for line in lines if line.strip().startswith(start) and line.strip().endswith(end)}
    assert len(commands) == 1, f"the README gives one line that sets up and tests, found {sorted(commands)}"
    return commands.pop()


@pytest.mark.parametrize("path", [".ci/run", "CONTRIBUTING.md"])
def test_the_readme_command_is_the_one_that_is_run(path: str) -> None:
    assert readme_test_command() in (ROOT / path).read_text(encoding="utf-8")


def repository_texts() -> dict[str, str]:
    """The text of every file that is tracked, or would be with `git add .`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    texts = {}
    for name in filter(None, listed):
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
        if b"\0" not in content:
            texts[name] = content.decode("utf-8", errors="replace")
    return texts


def test_nothing_is_tied_to_one_machine() -> None:
    hosts = ["pypi" + ".org", "files." + "pythonhosted"]
    folder = re.compile(r"(?<![\w.~$}/-])/(?:work|home|root|mnt|Users)/")
    texts = repository_texts()
    assert "pyproject.toml" in texts
    assert not [(name, host) for name, text in texts.items() for host in hosts if host in text.lower()]
    assert not [(name, found.group()) for name, text in texts.items() for found in folder.finditer(text)]
