"""What MkDocs does not do by itself: the order of pages from the index, and links to files outside of ``docs/``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """The pages by the sections of the index, in its order."""
    config.nav = nav((DOCS / "README.md").read_text("utf-8"))
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Links to folders and to files outside of ``docs/`` lead to the repository, and names to their reference."""
    here = Path(page.file.abs_src_path).parent
    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(lambda link: _link(link, here, config.repo_url), part) for part in parts[::2]]
    text = "".join(parts)
    if page.file.src_uri == "reference/python.md":
        text = re.sub(r"^\* `(tierstate[\w.]*)`:.*$", r"\n::: \1\n", text, flags=re.MULTILINE)
    return text


def nav(index: str) -> list[Any]:
    """The navigation: each section of the index with the pages that its links name, each page once.

    A folder stands for all of its pages.
    """
    found: list[Any] = [{"Documentation": "README.md"}]
    seen: set[str] = {"README.md"}
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        pages = [page for _, target in LINK.findall(section) for page in _pages(target) if page not in seen]
        pages = list(dict.fromkeys(pages))
        seen.update(pages)
        found.append({section.partition("\n")[0]: pages})
    return found


def _pages(target: str) -> list[str]:
    name = target.partition("#")[0]
    if (DOCS / name).is_dir() and "://" not in target:
        folder = name.rstrip("/")
        pages = sorted(f"{folder}/{page.name}" for page in (DOCS / folder).glob("*.md"))
        return sorted(pages, key=lambda page: not page.endswith("README.md"))
    return [name] if name.endswith(".md") and (DOCS / name).is_file() else []


def _link(link: re.Match[str], here: Path, repository: str) -> str:
    text, target = link.groups()
    name, hash_, anchor = target.partition("#")
    if not name or ":" in name.split("/")[0]:
        return link[0]
    path = (here / name).resolve()
    if path.is_relative_to(DOCS) and not path.is_relative_to(DOCS / "site"):
        if path.is_dir() and (path / "README.md").is_file():
            return f"[{text}]({name.rstrip('/')}/README.md{hash_}{anchor})"
        if not path.is_dir():
            return link[0]
    kind = "tree" if path.is_dir() else "blob"
    return f"[{text}]({repository}/{kind}/main/{path.relative_to(DOCS.parent)}{hash_}{anchor})"
