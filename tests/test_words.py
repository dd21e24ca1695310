"""Every control of every page says in a sentence what it does."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CONTROLS = {
    "button", "download_button", "selectbox", "select_slider", "slider", "number_input", "text_input", "text_area", "toggle",
    "checkbox", "pills", "segmented_control", "radio", "multiselect", "file_uploader",
}  # fmt: skip


@pytest.mark.parametrize("path", [*(ROOT / "pages").glob("*.py"), *(ROOT / "ui").glob("*.py")], ids=lambda p: p.stem)
def test_every_control_has_help(path):
    without = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CONTROLS:
            names = {keyword.arg for keyword in node.keywords}  # None: **common, which brings the help
            if not names & {"help", None} and not (
                isinstance(node.func.value, ast.Name) and node.func.value.id == "text"
            ):
                without.append(f"{path.name}:{node.lineno} {node.func.attr}")
    assert without == []
