"""README and docs say what the code does: tables, formulas, command lines, links, the library example.

`python -m tests.test_docs` writes the table of published settings into docs/methods.md.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

import kvviz
from kvviz import __main__ as command_line
from kvviz.allocation import ALLOCATIONS
from kvviz.commands import needle
from kvviz.engine import STATE_BYTES
from kvviz.experiment import MAX_NEW_TOKENS, MAX_POLICIES
from kvviz.host import MAX_WAITING
from kvviz.policies import METHODS, names, options
from kvviz.policies.policy import Policy
from kvviz.policies.spec import parse

ROOT = Path(__file__).parent.parent
METHODS_PAGE = ROOT / "docs" / "methods.md"
README = ROOT / "README.md"
PAGES = sorted([README, *(ROOT / "docs").glob("*.md")])
PENDING: set[str] = set()
"""Linked to, and on their way; take a name out once it is there."""
PAPER = "https://arxiv.org/abs/"


def each_page(test):
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())(test)


def between(page: Path, name: str) -> str:
    """What stands between `<!-- name:begin -->` and `<!-- name:end -->`."""
    found = re.search(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", page.read_text(encoding="utf-8"), re.S)
    assert found, f"{page.name} has no table {name}"
    return found[1]


def cells(table: str) -> list[list[str]]:
    """The body of a Markdown table."""
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.strip().splitlines()[2:]]


def code(text: str) -> list[str]:
    """All `code` in a text."""
    return re.findall(r"`([^`]+)`", text)


def settings_table() -> str:
    """What every method was published with, from the registry."""
    lines = [
        "| method | paper | `sinks` | `recent` | allocation | correction | needs |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in names():
        method, chosen = METHODS[name], kvviz.policy(name)
        paper = f"[{method.paper}]({PAPER}{method.paper})" if method.paper else ""
        recent = f"{chosen.recent:.0%} of the budget" if 0 < chosen.recent < 1 else str(chosen.recent)
        needs = ", ".join(sorted(method.needs)).replace("_", " ")
        correction = "none" if chosen.correction is None else f"order {chosen.correction}"
        row = [f"`{name}`", paper, str(chosen.sinks), recent, chosen.allocation.name, correction, needs]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def test_published_settings_are_those_of_the_registry():
    assert between(METHODS_PAGE, "settings") == settings_table(), "run: python -m tests.test_docs"


def test_every_option_stands_with_its_default():
    stated = {
        (name, code(option)[0], code(default)[0])
        for methods, option, default, _ in cells(between(METHODS_PAGE, "options"))
        for name in code(methods)
    }
    assert stated == {(name, option, repr(value)) for name in names() for option, value in options(name).items()}


def test_options_of_every_policy_stand_with_their_defaults():
    stated = {code(option)[0]: code(default) for option, default, _ in cells(between(METHODS_PAGE, "policy"))}
    own = {field.name: [str(field.default)] for field in fields(Policy) if field.name in ("partition", "bits")}
    for kind in ALLOCATIONS.values():
        own |= {field.name: [str(field.default)] for field in fields(kind) if field.name != "compatible"}
    assert stated == own | {"allocation": [], "correction": []}
    named = {field.name for field in fields(Policy)} - {"scorer"}
    assert named <= set(stated) | {"sinks", "recent"}


@pytest.mark.parametrize("name", names())
def test_every_method_has_a_section_that_opens_with_its_formula(name):
    text = METHODS_PAGE.read_text(encoding="utf-8")
    section = re.search(rf"\n### {name}\n(.*?)(?=\n##)", text, re.S)
    assert section, f"docs/methods.md has no section {name}"
    formula = re.search(r"```math\n(.*?)```", section[1], re.S)[1]
    assert "".join(formula.split()) == "".join(METHODS[name].formula.split())


@pytest.mark.parametrize("name", names())
def test_the_readme_lists_every_method_with_its_paper(name):
    row = next((row for row in cells(between(README, "methods")) if code(row[0]) == [name]), None)
    assert row, f"README.md does not list {name}"
    assert METHODS[name].title in row[0]
    paper = METHODS[name].paper
    assert not paper or f"]({PAPER}{paper})" in row[1]


def test_every_linked_paper_is_one_of_the_registry():
    known = {method.paper for method in METHODS.values()}
    for page in (README, METHODS_PAGE):
        assert set(re.findall(PAPER + r"([\w./]+)", page.read_text(encoding="utf-8"))) <= known


def test_inline_formulas_hold_nothing_that_markdown_would_change():
    """Inside $...$ GitHub takes a backslash before punctuation away, and a bar would end a table's cell."""
    for page in PAGES:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.S)
        assert text.count("$") % 2 == 0, page.name
        for formula in re.findall(r"\$([^$]+)\$", text):
            assert not re.search(r"\\[^a-zA-Z]|[|<>*]|^\s|\s$", formula), f"{page.name}: {formula}"


def command_lines(page: Path) -> list[list[str]]:
    """The arguments of every `python -m kvviz ...` in a page."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(each, comments=True) for each in re.findall(r"python -m kvviz +([^`\n]+)", text)]


@each_page
def test_command_lines_parse(page, monkeypatch):
    read = []
    for module in command_line.COMMANDS.values():
        monkeypatch.setattr(module, "run", read.append)
    for arguments in command_lines(page):
        assert command_line.main(arguments) == 0, arguments
    for asked in read:
        for policy in getattr(asked, "policy", None) or []:
            parse(policy)


@each_page
def test_policies_in_their_short_form_exist(page):
    for short in re.findall(r"`(\w+:\w+=[^`\s]+)`", page.read_text(encoding="utf-8")):
        parse(short)


@each_page
def test_make_targets_exist(page):
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    text = page.read_text(encoding="utf-8")
    in_blocks = re.findall(r"^make ([a-z][\w-]*)", "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S)), re.M)
    assert {*in_blocks, *re.findall(r"`make ([a-z][\w-]*)", text)} <= known


def anchors(page: Path) -> set[str]:
    """The anchors of a page: of its headings, as GitHub makes them, and those that it sets itself."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return set(re.findall(r'<a id="([^"]+)">', text)) | {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
    }


@each_page
def test_relative_links_and_images_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|srcset|href)=\"([^\"]+)\"", text)
    awaited = set()
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() and (name := target.relative_to(ROOT).as_posix()) in PENDING:
            awaited.add(name)
            continue
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"
    if awaited:
        pytest.xfail(f"not there yet: {', '.join(sorted(awaited))}")


def test_the_folder_map_is_the_folder():
    block = re.search(r"<!-- map -->\n```text\n(.*?)```", README.read_text(encoding="utf-8"), re.S)[1]
    stated, folder = set(), ""
    for line in block.splitlines():
        indent, path = re.match(r"( *)(\S+)", line).groups()
        if not indent:
            folder = path
        stated.add((folder if indent else "") + path)
    missing = [path for path in stated if not (ROOT / path).exists()]
    assert missing == []
    packages = {path.parent.relative_to(ROOT).as_posix() + "/" for path in (ROOT / "kvviz").glob("*/__init__.py")}
    assert packages - stated == set(), "add them to the map in README.md"


def python_examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)


def test_the_library_example_runs(engine, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kvviz, "load", lambda: engine)
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("The meeting began late. " * 20)
    exec(compile(python_examples()[0], "README.md", "exec", dont_inherit=True), {})
    printed = capsys.readouterr().out
    assert printed.startswith("128 entries a head")
    for label in ("Full cache", "CapKV (recent 32)", "MomentKV", "SnapKV (correction of order 1)"):
        assert f"\n{label}: " in printed


def test_the_example_of_a_new_method_works(engine):
    space: dict = {"__name__": "example"}
    exec(compile(python_examples()[1], "README.md", "exec", dont_inherit=True), space)
    made = next(each for each in space.values() if isinstance(each, type) and each.__module__ == space["__name__"])
    state = engine.prefill("A text of some length, long enough to evict most of it.")
    kept = engine.evict(state, Policy(made(), ALLOCATIONS["uniform"]()), 8)
    assert kept.entries == 8


def test_limits_of_a_shared_server_are_those_of_the_code():
    table = cells(
        (ROOT / "docs" / "shared-server.md").read_text(encoding="utf-8").split("## Limits\n\n")[1].split("\n\n")[0]
    )
    stated = dict(table)
    pages = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "ui").glob("*.py")}
    config = (ROOT / ".streamlit" / "config.toml").read_text(encoding="utf-8")
    assert stated["jobs that wait"].startswith(f"{MAX_WAITING};")
    assert stated["policies in a run"].startswith(f"{MAX_POLICIES} beside")
    assert stated["tokens to write"].startswith(f"{MAX_NEW_TOKENS} in")
    assert stated["prompts kept in memory"].startswith(f"{STATE_BYTES >> 30} GiB")
    assert re.search(r"maxUploadSize = (\d+)", config)[1] + " MB as a file" in stated["prompt"]
    assert f"{int(re.search(r'MAX_CHARACTERS = ([0-9_]+)', pages['edit.py'])[1]):,} characters" in stated["prompt"]
    assert f"after {float(re.search(r'GRACE = ([0-9.]+)', pages['host.py'])[1]):g} seconds" in stated["a closed tab"]


def test_the_needle_table_names_every_method():
    table = between(README, "needle").split("\n\n")[0]
    assert [row[0] for row in cells(table)] == [kvviz.policy(name).title for name in names()]
    assert all(len(row) == 7 for row in cells(table))
    assert needle.BEGIN in README.read_text(encoding="utf-8")


if __name__ == "__main__":
    page = METHODS_PAGE.read_text(encoding="utf-8")
    new = f"<!-- settings:begin -->\n{settings_table()}<!-- settings:end -->"
    METHODS_PAGE.write_text(
        re.sub(r"<!-- settings:begin -->\n.*?<!-- settings:end -->", lambda _: new, page, flags=re.S)
    )
