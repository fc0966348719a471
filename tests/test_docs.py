"""The documentation: each relative link leads to a file and heading that exist, and each test it names exists."""

import ast
import pkgutil
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IN_CHECKOUT = (ROOT / "tierstate").is_dir()
COPIED = ("tests", "examples", "benchmarks", "docs", "README.md", "pyproject.toml")
"""What lies beside the tests where they run against a wheel: only links into these can be checked there."""

PAGES = [page for name in ("README.md", "CONTRIBUTING.md") if (page := ROOT / name).exists()]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
IMPORT = re.compile(r"^from (tierstate[\w.]*) import ([\w, ]+)$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

NOT_MODULES = {"tierstate.json", "tierstate.paths"}
"""Names with dots that are no modules: a file, a field of safetensors files."""


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", LINK.sub("", heading).lower()) for heading in headings)
    return {text.strip().replace(" ", "-") for text in plain}


def lacks_framework(name: str) -> bool:
    """Whether a name is in an adapter that exists, and whose framework is not installed here."""
    try:
        return name.startswith("tierstate.integrations.") and not import_module(".".join(name.split(".")[:3]))
    except ModuleNotFoundError as error:
        return not (error.name or "").startswith("tierstate")


def is_copied(target: Path) -> bool:
    return target.is_relative_to(ROOT) and target.relative_to(ROOT).parts[:1] in [(name,) for name in COPIED]


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_links_lead_to_files_and_headings_that_exist(page):
    broken = []
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if ":" in link.split("/")[0]:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not IN_CHECKOUT and not is_copied(target):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken, f"{page.relative_to(ROOT)}: nothing is at {broken}"


def test_the_tests_that_pages_name_exist():
    modules = {module.name for module in (ROOT / "tests").rglob("test_*.py")}
    shown = set(re.findall(r"^# (test_\w+\.py)$", "".join(page.read_text() for page in PAGES), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"\btest_\w+\.py\b", page.read_text())) - shown
        assert named <= modules, f"{page.relative_to(ROOT)} names tests that do not exist: {sorted(named - modules)}"
        paths = re.findall(r"`(tests/[\w/]+\.py)`", page.read_text())
        missing = [path for path in paths if not (ROOT / path).exists()]
        assert not missing, f"{page.relative_to(ROOT)} names tests that are elsewhere: {missing}"


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_what_pages_import_or_name_exists(page):
    text = page.read_text()
    for module, names in IMPORT.findall(text):
        if lacks_framework(module):
            continue
        for name in names.split(", "):
            inner = name.split(" as ")[0]
            assert hasattr(import_module(module), inner) or import_module(f"{module}.{inner}")
    for name in re.findall(r"`(tierstate(?:\.\w+)+)`", FENCED.sub("", text)):
        if name not in NOT_MODULES and not lacks_framework(name):
            pkgutil.resolve_name(name)


@pytest.mark.skipif(not IN_CHECKOUT, reason="only the checkout has the source folders at the top")
def test_the_architecture_page_has_every_package():
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    tops = ("manifest", "providers", "tiers", "tierstate")
    folders = [init.parent.relative_to(ROOT) for top in tops for init in (ROOT / top).rglob("__init__.py")]
    missing = [str(folder) for folder in folders if f"(../../{folder})" not in page]
    assert folders
    assert not missing, f"the table of packages lacks {missing}"


def messages_of_the_source() -> str:
    """All text of the package's sources, one line each, with ``…`` in place of what a message puts in."""
    package = Path(import_module("tierstate").__file__ or "").parent
    found = []
    for part in ("", "manifest", "providers", "tiers"):  # links in a checkout, which rglob does not follow
        for file in (package / part).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"{\w+}", "…", node.value))
    return "\n".join(text.replace("\n", " ") for text in found)


@pytest.mark.slow
def test_the_messages_of_the_troubleshooting_page_are_those_of_the_source():
    page = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    source = messages_of_the_source()
    assert len(quoted) > 40
    gone = [text for text in quoted if not re.search(".*".join(map(re.escape, text.split("…"))), source)]
    assert not gone, f"no message has these words any more: {gone}"
