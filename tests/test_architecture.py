"""The house itself: which part may know which, the links, and what a wheel holds."""

import ast
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PARTS = ("manifest", "providers", "tiers")
MAY_KNOW = {
    "manifest": {"manifest"},
    "providers": {"providers", "manifest"},
    "tiers": {"tiers", "manifest"},
    "": {"", "tiers", "providers", "manifest"},
}
SPEC = importlib.util.find_spec("tierstate")
assert SPEC is not None
assert SPEC.origin is not None
PACKAGE = Path(SPEC.origin).parent
CHECKOUT = Path(__file__).resolve().parents[1]
IN_CHECKOUT = PACKAGE.resolve() == CHECKOUT / "tierstate"


def rooms():
    """Every file of the package with the part it belongs to; the face is ''."""
    for folder, part in [(PACKAGE, ""), *((PACKAGE / p, p) for p in PARTS)]:
        for file in sorted(folder.glob("*.py")):
            yield pytest.param(file, part, id=f"{part or 'tierstate'}/{file.name}")


ROOMS = list(rooms())


def imports(file: Path):
    """Modules a file imports, as (level, name)."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


def part_of(module: str) -> str | None:
    """The part an absolute name belongs to; None for other distributions."""
    names = module.split(".")
    if names[0] != "tierstate":
        return None
    return names[1] if len(names) > 1 and names[1] in PARTS else ""


@pytest.mark.parametrize(("file", "part"), ROOMS)
def test_arrows_point_only_where_they_may(file, part):
    for level, module in imports(file):
        assert level <= 1, f"{file}: 'from {'.' * level}{module}' climbs out of its part; write it absolutely"
        assert level or module.split(".")[0] not in PARTS, f"{file}: bare {module!r}; write tierstate.{module}"
        target = part if level else part_of(module)
        if target is not None:
            assert target in MAY_KNOW[part], f"{file}: {part or 'the face'} may not know {module!r}"
            assert level or target != part or part == "", f"{file}: inside a part imports are relative: {module!r}"


@pytest.mark.parametrize("part", ["face", *PARTS])
def test_there_is_no_cycle(part):
    folder = PACKAGE if part == "face" else PACKAGE / part
    arrows = {}
    for file in folder.glob("*.py"):
        tree = ast.parse(file.read_text())
        found = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.level == 1]
        arrows[file.stem] = {n.module.split(".")[0] if n.module else a.name for n in found for a in n.names}
    arrows.pop("__init__", None)

    def walk(room, path):
        assert room not in path, f"{part}: {' -> '.join([*path, room])}"
        for other in arrows.get(room, ()):
            walk(other, [*path, room])

    for room in arrows:
        walk(room, [])


@pytest.mark.parametrize(("file", "part"), ROOMS)
def test_every_room_says_what_it_is_and_stays_small(file, part):
    text = file.read_text()
    assert ast.get_docstring(ast.parse(text)), f"{file} opens with no phrase that says what it is"
    assert len(text.splitlines()) <= 300, f"{file} has grown past 300 lines: does it hold more than one noun?"


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
    assert {f"tierstate/{p}/__init__.py" for p in PARTS} <= names


def test_entry_points_are_the_door_and_all_of_them_open():
    for group in ("tierstate.tiers", "tierstate.providers"):
        points = [p for p in importlib.metadata.entry_points(group=group) if p.dist and p.dist.name == "tierstate"]
        assert points, f"no entry points in {group}"
        for point in points:
            assert isinstance(point.load(), type)


def test_importing_is_light():
    heavy = {"s3fs", "h5py", "pyuring", "rich", "typer", "numcodecs", "botocore", "aiohttp", "torch.distributed.tensor"}
    code = f"import sys, tierstate; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
