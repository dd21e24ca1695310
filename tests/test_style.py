"""The repository's own rules: ruff, a library without streamlit, nothing that only one machine understands."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLACES = "|".join(
    ["/" + folder + "/" for folder in ("work", "farm")] + ["bash" + "_jobs", "/ho" + "me/", "/ro" + "ot/"]
)
REGISTRIES = "|".join(["py" + r"pi\.org", "python" + "hosted", "registry.np" + "mjs", r"deb\.de" + "bian"])


def tracked() -> list[Path]:
    """Every file under version control, or every file beside this one where git is not at hand."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [path for path in ROOT.rglob("*") if ".venv" not in path.parts]
    return [path for path in paths if path.is_file()]


def texts() -> list[tuple[str, str]]:
    """(name, content) of the tracked text files."""
    found = []
    for path in tracked():
        try:
            found.append((path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return found


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff(command):
    ran = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("pattern", [PLACES, REGISTRIES], ids=["machine paths", "registries"])
def test_nothing_of_one_machine(pattern):
    found = [name for name, text in texts() if re.search(pattern, text)]
    assert found == []


def test_files_are_small():
    large = [path.name for path in tracked() if path.stat().st_size > 2_000_000]
    assert large == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "kvviz").rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_library_module(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
    assert "streamlit" not in imported
    assert ast.get_docstring(tree), "a module says in its first lines what it is for"


def test_requirements_are_pinned():
    for name in ("requirements.txt", "requirements-dev.txt", "requirements-model.txt"):
        lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
        loose = [
            line for line in lines if line and not re.match(r"[\w.-]+==[\w.]+( --hash=sha256:[0-9a-f]{64})?$", line)
        ]
        assert loose == []
