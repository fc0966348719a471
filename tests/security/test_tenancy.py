"""Other users of the machine: the modes of what a directory tier makes, and whose folders it refuses."""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstate.manifest.errors import AccessDenied, PolicyError
from tierstate.tiers import trusted_path
from tierstate.tiers.base import Tier
from tierstate.tiers.keys import read_key
from tierstate.tiers.object.tier import ObjectStore
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.posix import naming, ownership
from tierstate.tiers.posix.directory import Nvme
from tierstate.tiers.posix.lustre import Lustre
from tierstate.tiers.posix.ownership import check_path, parse_mode

STRANGER = 54_321
"""A user who is not in the machine's list."""


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


MAKE: dict[str, Callable[..., Tier]] = {
    "nvme": lambda path, **more: Nvme(path=path, **more),
    "lustre": lambda path, **more: Lustre(path=path, **more),
    "file": lambda path, **more: ObjectStore(url=f"file://{path}", **more),
}


def modes(path: Path) -> dict[str, set[int]]:
    """The modes of all folders and all files from a path on."""
    found: dict[str, set[int]] = {"folders": set(), "files": set()}
    for one in (path, *path.rglob("*")):
        found["folders" if one.is_dir() else "files"].add(stat.S_IMODE(one.lstat().st_mode))
    return found


# Modes


@pytest.mark.parametrize("kind", list(MAKE))
@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077, 0o777], ids="{:03o}".format)
@pytest.mark.parametrize(
    ("mode", "files", "folders"),
    [(None, 0o600, 0o700), ("0640", 0o640, 0o750), ("2770", 0o660, 0o2770), ("0644", 0o644, 0o755)],
)
def test_what_a_tier_makes_has_the_mode_of_the_policy_under_every_umask(
    kind: str, mask: int, mode: str | None, files: int, folders: int, tmp_path: Path, umask: Callable[[int], int]
) -> None:
    umask(mask)
    tier = MAKE[kind](tmp_path / "new" / "tier", **({"mode": mode} if mode else {}))
    tier.put("packs/run/short", torch.ones(100, dtype=torch.uint8))
    with tier.writer("packs/run/long") as writer:
        for _ in range(3):
            writer.append(torch.ones(1 << 20, dtype=torch.uint8))
        assert modes(tmp_path / "new")["files"] == {files}, "a temporary file too"
    tier.close()
    assert modes(tmp_path / "new") == {"folders": {folders}, "files": {files}}


@pytest.mark.parametrize("mode", [None, "0640"])
def test_no_file_or_folder_is_ever_wider_than_it_is_to_be(
    mode: str | None, tmp_path: Path, umask: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at after each call that makes something or changes a mode."""
    umask(0)
    wide: list[tuple[str, int]] = []

    def watch(name: str) -> None:
        real = getattr(os, name)

        def call(*args: object, **kwargs: object) -> object:
            done = real(*args, **kwargs)
            for one in tmp_path.rglob("*"):
                found = stat.S_IMODE(one.lstat().st_mode)
                if found & ~(0o750 if mode else 0o700):
                    wide.append((name, found))
            return done

        monkeypatch.setattr(os, name, call)

    for name in ("open", "mkdir", "fchmod", "fchown", "link", "rename"):
        watch(name)
    Nvme(path=tmp_path / "tier", **({"mode": mode} if mode else {})).put("packs/a", torch.ones(9, dtype=torch.uint8))
    assert wide == []


def test_lock_files_are_as_wide_as_the_tier_and_no_wider(
    tmp_path: Path, umask: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without hard links and such renames; another user of the tier must be able to take a lock over."""
    umask(0)
    seen: list[int] = []
    real = naming._check_free

    def look(path: Path) -> None:
        seen.append(stat.S_IMODE(naming.lock_file(path).stat().st_mode))
        real(path)

    def refuse(*_: object) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(naming, "_link", refuse)
    monkeypatch.setattr(naming, "_rename_no_replace", refuse)
    monkeypatch.setattr(naming, "_check_free", look)
    Nvme(path=tmp_path / "a").put("x", torch.ones(9, dtype=torch.uint8))
    Nvme(path=tmp_path / "b", mode="0660").put("x", torch.ones(9, dtype=torch.uint8))
    assert seen == [0o600, 0o660]


def test_a_setgid_folder_goes_on_giving_its_group(tmp_path: Path) -> None:
    tmp_path.chmod(0o2700)
    tier = Nvme(path=tmp_path / "tier")
    tier.put("packs/a", torch.ones(9, dtype=torch.uint8))
    assert modes(tier.path) == {"folders": {0o2700}, "files": {0o600}}


def test_existing_folders_that_all_can_read_are_used_and_told(tmp_path: Path) -> None:
    """What earlier versions made, by the umask."""
    (tmp_path / "tier" / "packs").mkdir(parents=True, mode=0o755)
    (tmp_path / "tier").chmod(0o755)
    (tmp_path / "tier" / "packs" / "old").write_bytes(b"old")
    tier = Nvme(path=tmp_path / "tier")
    assert tier.get("packs/old").tolist() == list(b"old")
    tier.put("packs/new", torch.ones(9, dtype=torch.uint8))
    assert [("mode 0755" in note, "0600" in note) for note in tier.traits.notes] == [(True, True)]
    assert stat.S_IMODE((tmp_path / "tier" / "packs" / "new").stat().st_mode) == 0o600


@pytest.mark.parametrize("number", [1, 13, 22, 38, 95], ids=["EPERM", "EACCES", "EINVAL", "ENOSYS", "EOPNOTSUPP"])
def test_where_modes_cannot_be_set_that_is_told_and_saves_go_on(
    number: int, tmp_path: Path, umask: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fchmod", refuse)
    tier = Nvme(path=tmp_path / "tier", mode="0640")
    tier.put("packs/a", torch.ones(9, dtype=torch.uint8))
    assert tier.get("packs/a").tolist() == [1] * 9
    assert len(tier.traits.notes) == 1
    assert "does not keep modes" in tier.traits.notes[0]


def test_a_mode_that_is_taken_and_not_kept_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fchmod", lambda *_: None)
    tier = Nvme(path=tmp_path / "tier", mode="0640")
    tier.put("packs/a", torch.ones(9, dtype=torch.uint8))
    assert "does not keep modes" in "".join(tier.traits.notes)


@pytest.mark.root
def test_files_get_the_group_before_its_members_may_read(root: None, tmp_path: Path) -> None:
    gid = 4242
    tier = Nvme(path=tmp_path / "tier", mode="0640", group=gid)
    tier.put("packs/a", torch.ones(9, dtype=torch.uint8))
    assert {one.lstat().st_gid for one in (tier.path, *tier.path.rglob("*"))} == {gid}


def test_without_the_group_the_mode_stays_narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else members of another group could read."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "no")

    monkeypatch.setattr(os, "fchown", refuse)
    monkeypatch.setattr(ownership, "find_group", lambda _: 4242)
    tier = Nvme(path=tmp_path / "tier", mode="0640", group="other")
    tier.put("packs/a", torch.ones(9, dtype=torch.uint8))
    assert modes(tier.path) == {"folders": {0o700}, "files": {0o600}}


# Values of the policy


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ("0640", 0o640),
        ("640", 0o640),
        ("0o640", 0o640),
        (416, 0o640),
        (0o600, 0o600),
        ("2770", 0o2770),
        ("1777", 0o1777),
    ],
)
def test_modes_as_chmod_writes_them_and_as_yaml_reads_them(value: object, mode: int) -> None:
    assert parse_mode(value) == mode


@pytest.mark.parametrize(
    "value", [640, 600, 660, 755, "0400", "0200", "0620", "0602", "0670", "4755", "888", "", "rw", True, None, 1.5, -1]
)
def test_what_is_no_mode_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a mode of files; write '0600'"):
        parse_mode(value)


def test_no_decimal_number_is_taken_for_a_mode_that_its_digits_are() -> None:
    """`mode: 640` is a slip for '0640', and no mode by its value."""
    for mode in range(0o4000):
        digits = int(f"{mode:o}")
        try:
            parse_mode(mode)
        except ValueError:
            continue
        with pytest.raises(ValueError, match="is not a mode"):
            parse_mode(digits)


def policy(**keys: object) -> str:
    more = "".join(f", {key}: {value}" for key, value in keys.items())
    return f"tiers: {{n: {{type: nvme, path: /x{more}}}}}"


def test_a_policy_takes_modes_unquoted_and_quoted_and_refuses_decimal_ones() -> None:
    for text in ("0640", "'0640'", "416"):
        assert Policy.parse(policy(mode=text)).tiers[0].options["mode"] == 0o640
    with pytest.raises(PolicyError, match=r"tiers\.n\.mode: 640 is not a mode of files; write '0600'"):
        Policy.parse(policy(mode=640))


def test_a_policy_names_a_group_that_is_there_and_has_this_user() -> None:
    mine = trusted_path.group_name(os.getegid())
    assert Policy.parse(policy(group=mine)).tiers[0].options["group"] == os.getegid()
    with pytest.raises(PolicyError, match=r"tiers\.n\.group: 'no-such-group' is no group on this machine"):
        Policy.parse(policy(group="no-such-group"))


def test_stores_without_folders_take_neither() -> None:
    with pytest.raises(ValueError, match="only file:// URLs take them"):
        ObjectStore(url="memory://x", mode="0640")


# Whose folders are refused


def use(path: Path, **more: object) -> None:
    tier = Nvme(path=path, **more)  # type: ignore[arg-type]
    try:
        list(tier.list(""))
        tier.put("packs/a", torch.ones(9, dtype=torch.uint8))
    finally:
        tier.close()


@pytest.mark.parametrize("mode", [0o777, 0o702, 0o1777 & 0o777], ids="{:o}".format)
@pytest.mark.parametrize("where", ["tier", "above"])
def test_a_folder_that_every_user_can_write_to_is_refused(mode: int, where: str, tmp_path: Path) -> None:
    folder = tmp_path / "above" / "tier"
    folder.mkdir(parents=True)
    (folder if where == "tier" else folder.parent).chmod(mode)
    for ask in (lambda: use(folder), lambda: list(Nvme(path=folder).list("")), lambda: Nvme(path=folder).size("a")):
        with pytest.raises(AccessDenied, match=r"every user can write to .*chmod o-w or chmod \+t"):
            ask()
    assert list(folder.iterdir()) == []
    (folder if where == "tier" else folder.parent).chmod(0o1777)
    use(folder)


def test_a_new_folder_below_such_a_one_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "above").mkdir()
    (tmp_path / "above").chmod(0o777)
    with pytest.raises(AccessDenied, match="every user can write to"):
        use(tmp_path / "above" / "tier")
    assert list((tmp_path / "above").iterdir()) == []


def test_a_policy_can_say_that_all_users_write(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier").chmod(0o777)
    use(tmp_path / "tier", mode="0666")


def test_a_wide_folder_within_the_tier_is_refused_too(tmp_path: Path) -> None:
    use(tmp_path)
    (tmp_path / "packs").chmod(0o777)
    with pytest.raises(AccessDenied, match="every user can write to"):
        Nvme(path=tmp_path).get("packs/a")


def test_a_group_that_can_write_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted_path, "_is_trusted", lambda gid, named: gid == named)
    monkeypatch.setattr(trusted_path, "_is_owners_own", lambda *_: False)
    above = tmp_path / "project"
    above.mkdir()
    above.chmod(0o770)
    with pytest.raises(AccessDenied, match=r"the group \S+ can write to .*project .*write 'group: "):
        use(above / "tier")
    use(above / "tier", group=above.stat().st_gid)
    use(above / "other", mode="0660")
    assert modes(above / "tier")["files"] == {0o600}, "to trust a group on the way gives it no access"


def test_links_of_this_user_are_followed_on_the_way(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    use(tmp_path / "link" / "tier")
    assert (tmp_path / "real" / "tier" / "packs" / "a").exists()


def test_what_a_link_leads_to_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "wide" / "inner").mkdir(parents=True)
    (tmp_path / "wide").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "wide" / "inner")
    with pytest.raises(AccessDenied, match=r"every user can write to \S*/wide"):
        use(tmp_path / "link" / "tier")


@settings(max_examples=60)
@given(steps=st.lists(st.sampled_from(["a", "b", "..", "to-a", "to-b", "up"]), max_size=8))
def test_the_way_of_a_path_ends_where_the_system_finds_it(
    steps: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.getbasetemp() / "ways"
    if not root.exists():
        for folder in ("a", "a/b", "b", "b/a"):
            (root / folder).mkdir(parents=True, exist_ok=True)
            (root / folder / "to-a").symlink_to(root / "a")
            (root / folder / "to-b").symlink_to("../b")
            (root / folder / "up").symlink_to("..")
    path = root.joinpath(*steps)
    last = list(trusted_path.passed(path))[-1]
    if path.exists():
        real = [one for one in trusted_path.passed(path) if not one.is_link]
        assert os.path.realpath(path) in {str(one.path) for one in real}
    assert last.path.is_relative_to("/")


def test_a_circle_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(AccessDenied, match="ELOOP"):
        use(tmp_path / "a" / "tier")


# Another user


AS_USERS = """
    import json, os, sys
    sys.path[:0] = {path!r}
    import torch
    from pathlib import Path
    from tierstate.tiers.posix.directory import Nvme
    for line in sys.stdin:  # each in a process of its own, since nobody can become root again
        what = json.loads(line)
        if not os.fork():
            os.setgroups(what["groups"]); os.setgid(what["uid"]); os.setuid(what["uid"])
            try:
                tier = Nvme(path=Path(what["path"]), **what["options"])
                list(tier.list(""))
                told = eval(what["call"])
            except Exception as error:
                told = f"{{type(error).__name__}}: {{error}}"
            print(json.dumps(str(told)), flush=True)
            os._exit(0)
        os.wait()
"""


AsUser = Callable[..., str]
"""Opens a tier as another user; returns what was told, or what the call gave."""


@pytest.fixture(scope="module")
def as_user(root: None) -> Iterator[AsUser]:
    code = textwrap.dedent(AS_USERS).format(path=sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:

        def ask(
            path: Path, uid: int = STRANGER, *, groups: tuple[int, ...] = (), call: str = WRITE, **options: object
        ) -> str:
            assert child.stdin is not None
            assert child.stdout is not None
            what = {"path": str(path), "uid": uid, "groups": groups, "call": call, "options": options}
            child.stdin.write(json.dumps(what) + "\n")
            child.stdin.flush()
            return str(json.loads(child.stdout.readline()))

        yield ask
        assert child.stdin is not None
        child.stdin.close()


WRITE = "tier.put('packs/a', torch.ones(9, dtype=torch.uint8)) or 'wrote'"


@pytest.fixture
def place(root: None) -> Iterator[Path]:
    """A folder that other users reach, where all may make things, as in /tmp."""
    found = Path(tempfile.mkdtemp(prefix="tierstate-test-", dir="/tmp"))
    found.chmod(0o1777)
    yield found
    shutil.rmtree(found)


@pytest.mark.root
@pytest.mark.slow
def test_the_folder_of_another_user_is_refused(place: Path, as_user: AsUser) -> None:
    """Who makes a folder of that name first, in a place that all may write to, gets nobody's state."""
    (place / "ckpt").mkdir()
    os.chown(place / "ckpt", 11_111, 11_111)
    (place / "ckpt").chmod(0o777)
    assert "AccessDenied" in (told := as_user(place / "ckpt"))
    assert f"{place}/ckpt is a folder of the user 11111" in told
    with pytest.raises(AccessDenied, match="is a folder of the user 11111"):
        use(place / "ckpt")
    assert list((place / "ckpt").iterdir()) == []


@pytest.mark.root
@pytest.mark.slow
def test_a_link_of_another_user_is_refused(place: Path, as_user: AsUser) -> None:
    (place / "mine").mkdir()
    os.chown(place / "mine", STRANGER, STRANGER)
    (place / "link").symlink_to(place / "mine")
    os.chown(place / "link", 11_111, 11_111, follow_symlinks=False)
    assert "is a link of the user 11111" in as_user(place / "link" / "tier")
    assert list((place / "mine").iterdir()) == []
    os.chown(place / "link", 0, 0, follow_symlinks=False)
    assert as_user(place / "link" / "tier") == "wrote"


@pytest.mark.root
@pytest.mark.slow
def test_a_planted_folder_within_a_sticky_one_is_refused(place: Path, as_user: AsUser) -> None:
    (place / "packs").mkdir()
    os.chown(place / "packs", 11_111, 11_111)
    (place / "packs").chmod(0o777)
    assert "packs is a folder of the user 11111" in as_user(place)
    (place / "file").write_bytes(b"planted")
    os.chown(place / "file", 11_111, 11_111)
    assert "file is a file of the user 11111" in as_user(place, call="tier.get('file')")


@pytest.mark.root
@pytest.mark.slow
def test_another_user_reads_a_tier_only_where_the_policy_shares_it(place: Path, as_user: AsUser) -> None:
    read = "int(tier.get('packs/a').sum())"
    assert as_user(place / "own", 11_111) == "wrote"
    assert as_user(place / "own", call=read).startswith("AccessDenied")
    assert as_user(place / "own", call=read, mode="0644").startswith("AccessDenied"), "its owner does not share it"
    shared = {"mode": "0640", "group": 7777}
    assert as_user(place / "team", 11_111, groups=(7777,), **shared) == "wrote"
    assert as_user(place / "team", groups=(7777,), call=read, **shared) == "9"
    assert "is a folder of the user 11111" in as_user(place / "team", groups=(7777,), call=read)
    assert as_user(place / "team", call=read, mode="0644").startswith("AccessDenied")
    shared["mode"] = "2770"
    assert as_user(place / "all", 11_111, groups=(7777,), **shared) == "wrote"
    call = "tier.put('packs/b', torch.ones(3, dtype=torch.uint8)) or tier.delete('packs/a') or list(tier.list(''))"
    assert as_user(place / "all", groups=(7777,), call=call, **shared) == "['packs/b']"


@pytest.mark.root
@pytest.mark.slow
def test_a_group_that_this_user_is_not_in_is_refused(place: Path, as_user: AsUser) -> None:
    assert "ValueError: this user is not in the group 7777" in as_user(place / "x", group=7777)


@pytest.mark.root
def test_root_uses_what_root_was_led_to_and_says_whose_it_is(root: None, tmp_path: Path) -> None:
    """As a container does with a folder of a user outside."""
    (tmp_path / "volume").mkdir(mode=0o755)
    os.chown(tmp_path / "volume", STRANGER, STRANGER)
    tier = Nvme(path=tmp_path / "volume")
    tier.put("packs/a", torch.ones(9, dtype=torch.uint8))
    assert f"belongs to the user {STRANGER}" in tier.traits.notes[0]


# Files of keys


def test_a_private_file_is_one_that_nobody_else_can_read_or_change(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("5a" * 32)
    key.chmod(0o600)
    read_key(key)
    key.chmod(0o400)
    read_key(key)
    for mode in (0o640, 0o644, 0o604, 0o620, 0o666):
        key.chmod(mode)
        with pytest.raises(PolicyError, match=f"others have access to it .mode {mode:04o}"):
            read_key(key)
    key.chmod(0o600)
    tmp_path.chmod(0o777)
    with pytest.raises(PolicyError, match="every user can write to"):
        read_key(key)
    tmp_path.chmod(0o700)
    with pytest.raises(PolicyError, match="is a folder"):
        read_key(tmp_path)
    with pytest.raises(PolicyError, match="No such file"):
        read_key(tmp_path / "none")


@pytest.mark.root
def test_a_key_of_another_user_is_refused(root: None, place: Path) -> None:
    (place / "key").write_text("5a" * 32)
    (place / "key").chmod(0o600)
    read_key(place / "key")
    os.chown(place / "key", STRANGER, STRANGER)
    with pytest.raises(PolicyError, match=f"it belongs to user {STRANGER}"):
        read_key(place / "key")


def test_check_path_names_owners_and_says_nothing_of_what_is_right(tmp_path: Path) -> None:
    trust = check_path(tmp_path)
    assert os.geteuid() in trust.owners
    assert trust.notes == ()
