"""The README as the description of the package, with links that also lead somewhere on a package index."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def absolute_links(text: str, repository: str) -> str:
    """The text with its relative links as those of the repository."""
    link = re.compile(r"(\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+\))")
    return link.sub(lambda found: f"{found[1]}{repository}/blob/main/{found[2]}", text)


project = tomllib.loads((HERE / "pyproject.toml").read_text("utf-8"))["project"]
setup(
    long_description=absolute_links((HERE / "README.md").read_text("utf-8"), project["urls"]["Source"]),
    long_description_content_type="text/markdown",
)
