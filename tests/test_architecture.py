"""The structure of the package: which package may import which, no circles, the links, and what a wheel holds."""

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PARTS = ("manifest", "providers", "tiers")
"""Folders at the top of the checkout, and links in the import package."""

# A package that is named here may import those beside it, what these may import, and itself.
# `*` are the modules directly in a package, where its sub-packages come above or below them.
MAY_IMPORT = {
    "manifest": (),
    "manifest.format": ("manifest",),
    "manifest.history": ("manifest.format",),
    "manifest.reshard": ("manifest.format",),
    "manifest.sharded": ("manifest.reshard",),
    "providers": ("providers.values", "providers.tensors"),
    "providers.base": ("manifest.format",),
    "providers.tensors": ("providers.base",),
    "providers.values": ("providers.tensors",),
    "providers.sharded": ("providers.values", "providers"),
    "providers.tree": ("providers.sharded",),
    "tiers": ("manifest", "tiers.connections"),
    "tiers.memory": ("tiers",),
    "tiers.wrappers": ("tiers.memory",),
    "tiers.posix": ("tiers.wrappers",),
    "tiers.object": ("tiers.object.s3",),
    "tiers.object.bucket": ("tiers.posix", "tiers.object.filesystem", "tiers.object.stream"),
    "tiers.object.filesystem": ("tiers.posix",),
    "tiers.object.stream": ("tiers",),
    "tiers.object.s3": ("tiers.object.bucket",),
    "tiers.connections": ("manifest", "tiers.private_file"),
    "tiers.private_file": ("tiers.trusted_path",),
    "tiers.trusted_path": (),
    "tiers.peer": ("tiers.posix",),
    "tiers.policy": ("tiers.posix", "manifest.history"),
    "tiers.testing": ("tiers.wrappers",),
    "engine.packs": ("tiers.wrappers", "manifest.history"),
    "engine.codecs": ("engine.packs", "tiers.wrappers"),
    "engine.events": ("tiers",),
    "engine.progress": ("tiers",),
    "engine.store": ("engine.codecs", "engine.events", "engine.progress"),
    "engine.restore": ("engine.store", "providers.tree", "manifest.reshard"),
    "engine": ("engine.store", "tiers.policy"),
    "engine.publish": ("engine.restore", "engine"),
    "engine.capture": ("engine.publish", "manifest.sharded"),
    "engine.save": ("engine.capture",),
    "engine.ranks": (),
    "engine.ranks.team": ("tiers.policy",),
    "engine.ranks.restore": ("engine.ranks.team", "engine.restore"),
    "engine.ranks.save": ("engine.ranks.restore", "engine.save"),
    "engine.info": ("engine.save",),
    "engine.versions": ("engine.info",),
    "engine.maintain": ("engine.versions",),
    "engine.repair": ("engine.versions",),
    "run": ("engine.maintain", "engine.repair", "not_reentrant", "pause_gc", "telemetry"),
    "copy": ("run",),
    "not_reentrant": ("manifest",),
    "pause_gc": (),
    "agent": ("engine.info", "engine.ranks.save", "telemetry", "tiers.peer"),
    "telemetry": ("engine.info",),
    "checkpointer": ("copy", "engine.ranks.save", "agent", "telemetry"),
    "report.echarts": (),  # a file of JavaScript
    "report": ("checkpointer",),
    "planning": ("report",),
    "": ("checkpointer",),
    "testing": ("providers.tree",),
    "dcp": ("checkpointer",),
    "files.readers": ("engine.packs", "providers.tree", "tiers.posix"),
    "files": ("checkpointer", "dcp", "files.readers"),
    "integrations": ("files", "dcp", ""),
    "cluster": ("tiers.policy", "tiers.testing", "tiers.object", "manifest.history"),
    "cli.output": ("files", "cluster", "tiers.peer", "report"),
    "cli": ("cli.output", "agent", "planning"),
    "__main__": ("cli",),
}
SPEC = importlib.util.find_spec("tierstate")
assert SPEC is not None
assert SPEC.origin is not None
PACKAGE = Path(SPEC.origin).parent
CHECKOUT = Path(__file__).resolve().parents[1]
IN_CHECKOUT = PACKAGE.resolve() == CHECKOUT / "tierstate"


def find_modules() -> dict[str, Path]:
    """Every module by its name below ``tierstate``; the face itself is ``""``."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        names = file.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = file
    for part in PARTS:  # links, which rglob does not follow
        for file in (PACKAGE / part).rglob("*.py"):
            names = file.relative_to(PACKAGE).with_suffix("").parts
            found[".".join(names[:-1] if names[-1] == "__init__" else names)] = file
    return found


MODULES = find_modules()
PACKAGES = {name for name, file in MODULES.items() if file.name == "__init__.py"}


def package_of(module: str) -> str:
    """The package that a module lies in; a package is its own."""
    return module if module in PACKAGES else module.rpartition(".")[0]


def rule_of(module: str) -> str:
    """The row of the table that a module belongs to: its own where it has one, or else its package's."""
    return module if module in MAY_IMPORT else package_of(module)


def statements(module: str):
    """Imports of a module: (level, module as written, names, line, whether it is made when the module is)."""
    tree = ast.parse(MODULES[module].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, (), node.lineno, node in tree.body) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield node.level, node.module or "", names, node.lineno, node in tree.body


def imported(module: str, *, at_once: bool = False):
    """Modules of ours that a module imports, as names below ``tierstate``."""
    for level, name, names, _line, top in statements(module):
        if level:
            base = ".".join(filter(None, [package_of(module), name]))
        elif name == "tierstate" or name.startswith("tierstate."):
            base = name.removeprefix("tierstate").removeprefix(".")
        else:
            continue
        if at_once and not top:
            continue
        for each in names or ("",):
            inner = ".".join(filter(None, [base, each]))
            yield inner if inner in MODULES else base


def reachable(row: str) -> set[str]:
    """The rows of the table that a row may import, directly or by way of others."""
    found, left = {row}, [row]
    while left:
        for other in MAY_IMPORT[left.pop()]:
            if other not in found:
                found.add(other)
                left.append(other)
    return found


def check_no_circle(arrows: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_the_table_names_packages_and_modules_that_are_there_and_has_no_circle():
    assert set(MAY_IMPORT) <= set(MODULES)
    assert {rule_of(module) for module in MODULES} <= set(MAY_IMPORT)
    check_no_circle({row: set(others) for row, others in MAY_IMPORT.items()})


@pytest.mark.parametrize("module", [pytest.param(m, id=m or "tierstate") for m in sorted(MODULES)])
def test_a_module_imports_only_what_its_package_may(module):
    file, may = MODULES[module], reachable(rule_of(module))
    assert ast.get_docstring(ast.parse(file.read_text())), (
        f"{file}: its first line is no docstring that says what it is"
    )
    for level, name, _names, line, _top in statements(module):
        assert level <= 1, f"{file}:{line}: 'from {'.' * level}{name}' leaves its package; write it absolutely"
        assert level or name.split(".")[0] not in PARTS, f"{file}:{line}: bare {name!r}; write tierstate.{name}"
        own = f"tierstate.{package_of(module)}".removesuffix(".")
        assert level or name.rpartition(".")[0] != own or module == "", (
            f"{file}:{line}: relative within a package: {name}"
        )
    for other in imported(module):
        assert rule_of(other) in may or other == module, f"{file}: may not import {other or 'tierstate'!r}"


MAKES_TENSORS = {"arange", "as_tensor", "empty", "empty_strided", "full", "ones", "rand", "randint", "tensor", "zeros"}
"""Functions of torch that make a tensor on its default device."""


@pytest.mark.slow
def test_no_tensor_is_made_on_the_default_device():
    """That is the user's to choose: ``torch.set_default_device("cuda")``, ``with torch.device("meta")``."""
    for file in MODULES.values():
        for call in ast.walk(ast.parse(file.read_text())):
            match call:
                case ast.Call(ast.Attribute(ast.Name("torch"), name), _, given) if name in MAKES_TENSORS:
                    said = {"device", None} & {one.arg for one in given}
                    assert said, f"{file}:{call.lineno}: torch.{name} without device="


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [True, False], ids=["when imported", "ever"])
def test_modules_have_no_circle(at_once):
    arrows = defaultdict(set)
    for module in MODULES:
        arrows[module] = {other for other in imported(module, at_once=at_once) if other != module}
        if module in PACKAGES and not at_once:
            arrows[module] -= {other for other in arrows[module] if package_of(other) == module}
    check_no_circle(arrows)


def test_packages_are_listed_and_say_what_they_are():
    folders = {f"tierstate.{name}".removesuffix(".") for name in PACKAGES}
    if IN_CHECKOUT:
        listed = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
        assert sorted(folders) == listed
    for name in PACKAGES - {""}:
        text = ast.get_docstring(ast.parse(MODULES[name].read_text()))
        assert text is not None
        assert " " in text, f"{name}: the docstring of its __init__ is no sentence"


@pytest.mark.skipif(not IN_CHECKOUT, reason="an installed wheel has folders, not links")
@pytest.mark.parametrize("part", PARTS)
def test_the_parts_are_folders_at_the_top_and_links_in_the_package(part):
    assert (CHECKOUT / part).is_dir()
    assert not (CHECKOUT / part).is_symlink()
    assert (CHECKOUT / "tierstate" / part).is_symlink()
    assert (CHECKOUT / "tierstate" / part).readlink() == Path("..") / part


@pytest.mark.skipif(IN_CHECKOUT, reason="an editable install is not what users get")
def test_the_wheel_installs_the_package_and_nothing_else():
    files = importlib.metadata.files("tierstate")
    assert files is not None
    tops = {f.parts[0] for f in files if not f.parts[0].startswith("..") and "dist-info" not in f.parts[0]}
    assert tops == {"tierstate"}
    names = {str(f) for f in files}
    assert "tierstate/py.typed" in names
    listed = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {f"{name.replace('.', '/')}/__init__.py" for name in listed} <= names


def test_the_metadata_has_urls_and_a_description_whose_links_lead_somewhere():
    about = importlib.metadata.metadata("tierstate")
    urls = dict(text.split(", ", 1) for text in about.get_all("Project-URL"))
    assert urls.keys() >= {"Source", "Documentation", "Changelog", "Issues"}
    text = about.get_payload()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    page = (CHECKOUT / "README.md").read_text()
    assert links == [
        link if ":" in link else f"{urls['Source']}/blob/main/{link}" for link in re.findall(r"\]\(([^)\s]+)\)", page)
    ]


def test_entry_points_are_the_door_and_all_of_them_open():
    for group in ("tierstate.tiers", "tierstate.providers", "fsspec.specs"):
        points = [p for p in importlib.metadata.entry_points(group=group) if p.dist and p.dist.name == "tierstate"]
        assert points, f"no entry points in {group}"
        for point in points:
            assert isinstance(point.load(), type)


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_importing_is_light():
    heavy = {"s3fs", "h5py", "pyuring", "rich", "typer", "numcodecs", "botocore", "aiohttp", "torch.distributed.tensor"}
    every = "[getattr(tierstate, name) for name in tierstate.__all__]"
    assert run_python(f"import sys, tierstate; {every}; print(sorted({heavy} & set(sys.modules)))") == "[]"


@pytest.mark.slow
def test_the_server_of_peer_memory_imports_nothing_big():
    heavy = {"torch", "numpy", "pydantic", "typer", "rich"}
    module = "tierstate.tiers.peer.server"
    assert run_python(f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_the_face_has_what_it_lists_and_says_what_it_lacks():
    import tierstate

    assert set(dir(tierstate)) == {*tierstate.__all__, "__version__"}
    assert {name for name in tierstate.__all__ if not hasattr(tierstate, name)} == set()
    with pytest.raises(AttributeError, match="'tierstate' has no attribute 'Nothing'"):
        tierstate.Nothing  # noqa: B018
