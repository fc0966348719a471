"""Safe YAML for policies: plain data with the line number of every value, bounded in size and depth.

`PolicyErrors` collects errors by line. `expand_variables` replaces environment variables in texts: ``${NAME}``,
``${NAME:-default}``, and ``$$`` for a dollar sign.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import yaml

from tierstate.manifest.errors import PolicyError
from tierstate.manifest.printable import escape_controls
from tierstate.tiers.secrets import SHORTEST_SECRET, ExpandedText, is_credential_name, takes_credentials

KeyPath: TypeAlias = tuple[str | int, ...]
"""The place of a value: keys of mappings and indices of lists (from 0), from the root on."""


Position: TypeAlias = tuple[int, int]
"""Line and column of a text, from 1."""


MAX_POLICY_BYTES = 1 << 20


MAX_POLICY_DEPTH = 24


MAX_NODES = 10_000
"""Far more than any policy has, far fewer than aliases of aliases could make (a "billion laughs" attack)."""


_YAML = "tag:yaml.org,2002:"


# Each pattern is a subset of YAML 1.1's, so that what a writer of YAML 1.1 leaves unquoted is read back unchanged.
_WORDS = {
    "bool": ("true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": ("~|null|Null|NULL|", ["~", "n", "N", ""]),
    "int": (r"[-+]?(?:0|[1-9][0-9]{0,18})", "-+0123456789"),
    "float": (r"[-+]?(?:0|[1-9][0-9]*)\.[0-9]+(?:[eE][-+][0-9]{1,3})?", "-+0123456789"),
}


_DOLLAR = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^${}]*))?\})?")


_REMEDY = "write '${NAME}' or '${NAME:-default}', or '$$' for a dollar sign"


@dataclass(slots=True)
class PolicyErrors:
    """Collects all errors of one file, to raise them together, in the order of their lines.

    Attributes:
        name: the file's name in messages.
        lines, columns: line and column of each value, or of its key, from 1; a value that is in neither counts as being
            where its parent is.
        variables: the values that were put in for variables; messages have the variables instead.
    """

    name: str
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    columns: Mapping[KeyPath, int] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    _found: dict[tuple[int, KeyPath], str] = field(default_factory=dict)

    def add(self, keys: KeyPath, text: str, at: Position | None = None) -> None:
        """Add an error: what was found at a value, and what would be right. ``at``: its place; by default the value's.

        Only the first error at a place counts, since later ones usually follow from it.
        """
        place = f"{dotted_keys(keys)}: " if keys else ""
        line, column = at or (self.line(keys), self.column(keys))
        said = escape_controls(f"{place}{self._as_written(text)}")
        self._found.setdefault((line, keys), f"{self.name}:{line}:{column}: {said}")

    def _as_written(self, text: str) -> str:
        """The text with variables in place of their values, as far as these are long enough to be told apart."""
        for value, name in sorted(self.variables.items(), key=lambda found: -len(found[0])):
            for form in {value, repr(value)[1:-1]}:
                text = text.replace(form, f"${{{name}}}") if len(form) >= SHORTEST_SECRET else text
        return text

    def line(self, keys: KeyPath) -> int:
        """The line of a value, or of the innermost value around it that has a line."""
        return _nearest(self.lines, keys)

    def column(self, keys: KeyPath) -> int:
        """The column of a value, or of the innermost value around it that has one."""
        return _nearest(self.columns, keys)

    def raise_any(self) -> None:
        """Raises:
        PolicyError: there are errors; the message has one line for each.
        """
        if self._found:
            in_order = sorted(self._found.items(), key=lambda found: found[0][0])
            raise PolicyError("\n".join(text for _, text in in_order))


def _nearest(places: Mapping[KeyPath, int], keys: KeyPath) -> int:
    while keys and keys not in places:
        keys = keys[:-1]
    return places.get(keys, 1)


def dotted_keys(keys: KeyPath) -> str:
    """Keys joined by dots, as messages show a place: in one line, so that a message has a line for each error."""
    return ".".join(key if (key := str(one)).isprintable() else repr(key) for one in keys)


def show_value(value: object) -> str:
    """A value of a file for a message, cut to one short line."""
    if value is None:
        return "an empty value"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (dict, list, tuple)):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]}...{text[0]}"


def read_yaml(text: str, findings: PolicyErrors) -> dict[str, Any]:
    """Read a YAML text whose root is a mapping; returns dict, list, str, int, float, bool and None.

    Fills ``findings.lines``. Unquoted words are read as in YAML 1.2, as far as 1.1 agrees: only ``true`` and ``false``
    are booleans, and ``off``, ``1:30``, ``010`` and dates are texts.

    Raises:
        PolicyError: it is not YAML, not a mapping, has other tags, or is larger or deeper than a policy can be.
            Duplicate keys, and keys that are not text, are added to ``findings`` instead.
    """
    node = _compose(text, findings)
    if node is None:
        findings.add((), "is empty; write at least 'tiers:' and one tier")
    elif node.tag != f"{_YAML}map":
        findings.add((), "is not a mapping; write keys and values, as in 'version: 1'", _position(node))
    else:
        build = _Build(findings)
        data: dict[str, Any] = build.value(node, (), 0)
        findings.lines, findings.columns = build.lines, build.columns
        return data
    findings.raise_any()
    return {}


def _compose(text: str, findings: PolicyErrors) -> yaml.Node | None:
    if len(text.encode("utf-8", "replace")) > MAX_POLICY_BYTES:
        findings.add((), f"is larger than {MAX_POLICY_BYTES} bytes; a policy is not")
        findings.raise_any()
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(filter(None, (error.context, error.problem)))
        at = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        findings.add((), f"is not YAML: {what}{_hint(text, error)}", at)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        at = (before.count("\n") + 1, error.position - before.rfind("\n"))
        findings.add((), f"is not YAML: the character U+{int(error.character):04X} is not allowed; remove it", at)
    except _TooMuch as error:
        findings.add((), str(error), error.at)
    findings.raise_any()
    return None


def _hint(text: str, error: yaml.MarkedYAMLError) -> str:
    """What is probably meant, where YAML's flow style takes the braces of a variable for its own."""
    lines = text.splitlines()
    marks = [mark.line for mark in (error.problem_mark, error.context_mark) if mark is not None]
    if any("${" in lines[line] for line in marks if line < len(lines)):
        return "; put text with '${...}' in quotes within {...} and [...], as in '{path: \"${SCRATCH}/ckpt\"}'"
    return "; check the brackets, quotes and indentation before this place"


class _TooMuch(Exception):
    def __init__(self, text: str, at: Position) -> None:
        super().__init__(text)
        self.at = at


def _check_bounds(depth: int, count: int, at: Position) -> None:
    if depth > MAX_POLICY_DEPTH:
        raise _TooMuch(f"is nested more than {MAX_POLICY_DEPTH} deep; a policy is not", at)
    if count > MAX_NODES:
        raise _TooMuch(f"has more than {MAX_NODES} values; a policy has not", at)


class _Loader(yaml.SafeLoader):
    """Composes nodes, and stops at too many or too deep ones before they use memory."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        self._count += 1
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        _check_bounds(self._depth, self._count, (mark.line + 1, mark.column + 1))
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


for _kind, (_pattern, _first) in _WORDS.items():
    _Loader.add_implicit_resolver(f"{_YAML}{_kind}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def _scalar(kind: str, text: str) -> Any:
    if kind == "null":
        return None
    if kind == "bool":
        return {"true": True, "false": False}[text.lower()]
    return {"int": int, "float": float, "str": str}[kind](text)


def _position(node: yaml.Node) -> Position:
    return int(node.start_mark.line) + 1, int(node.start_mark.column) + 1


class _Build:
    """Makes plain data of composed nodes. Aliases are copied out, so nodes are counted again here."""

    def __init__(self, findings: PolicyErrors) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.columns: dict[KeyPath, int] = {}
        self._findings = findings
        self._count = 0

    def value(self, node: yaml.Node, keys: KeyPath, depth: int) -> Any:
        """The data under a node; records its place, unless its key has one already."""
        self._note(keys, node)
        self._count += 1
        try:
            _check_bounds(depth, self._count, _position(node))
        except _TooMuch as error:
            self._findings.add(keys[:4], str(error), error.at)
            self._findings.raise_any()
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_YAML}map":
            return self._mapping(node, keys, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_YAML}seq":
            return [self.value(item, (*keys, i), depth + 1) for i, item in enumerate(node.value)]
        return self._scalar(node, keys)

    def _note(self, keys: KeyPath, node: yaml.Node) -> None:
        line, column = _position(node)
        if self.lines.setdefault(keys, line) == line:
            self.columns.setdefault(keys, column)

    def _mapping(self, node: yaml.MappingNode, keys: KeyPath, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in node.value:
            name = self._key(key, keys)
            if name is None:
                continue
            if name == "<<" and key.style is None:
                text = "YAML's merge key is not known here; write the keys out that are merged"
                self._findings.add((*keys, name), text, _position(key))
                continue
            if name in out:
                first = self.lines[*keys, name]
                self._findings.add((*keys, name), f"is written twice, first in line {first}; keep one", _position(key))
                continue
            self._note((*keys, name), key)
            out[name] = self.value(value, (*keys, name), depth + 1)
        return out

    def _key(self, node: yaml.Node, keys: KeyPath) -> str | None:
        if isinstance(node, yaml.ScalarNode) and node.tag == f"{_YAML}str":
            return str(node.value)
        if isinstance(node, yaml.ScalarNode):
            self._findings.add(keys, f"the key {node.value!r} is not text; put it in quotes", _position(node))
        else:
            self._findings.add(keys, "a key is a list or a mapping; write text", _position(node))
        return None

    def _scalar(self, node: yaml.Node, keys: KeyPath) -> Any:
        kind = node.tag.removeprefix(_YAML)
        if isinstance(node, yaml.ScalarNode) and kind in (*_WORDS, "str"):
            try:
                return _scalar(kind, node.value)
            except (ValueError, KeyError):
                self._findings.add(keys, f"is tagged as {kind} and is none; take the tag away", _position(node))
        else:
            self._findings.add(
                keys, f"has the tag {node.tag[:60]!r}; take it away, a policy is plain data", _position(node)
            )
        return None


def expand_variables(value: Any, environ: Mapping[str, str], findings: PolicyErrors, keys: KeyPath = ()) -> Any:
    """The same data with environment variables replaced by their values; keys of mappings are not expanded.

    A variable that is named like a credential is put in only where the keys are named so too: else a policy that
    somebody else wrote could send it to a host of theirs, or have it printed.

    A variable that is not set and has no default, or a ``$`` that begins no variable, is added to ``findings``. As in a
    shell, a default also replaces an empty variable.
    """
    if isinstance(value, dict):
        return {key: expand_variables(item, environ, findings, (*keys, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [expand_variables(item, environ, findings, (*keys, i)) for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    text = _DOLLAR.sub(lambda found: _value_of_variable(found, environ, findings, keys), value)
    return text if text == value else ExpandedText(text, value)


def _value_of_variable(found: re.Match[str], environ: Mapping[str, str], findings: PolicyErrors, keys: KeyPath) -> str:
    dollar, name, default = found.groups()
    if dollar:
        return "$"
    if name is None:
        findings.add(keys, f"has a '$' that starts no variable; {_REMEDY}")
        return "$"
    if is_credential_name(name) and not takes_credentials(keys):
        findings.add(keys, f"{name} is named like a credential, which is put in only where a key is, such as 'secret'")
        return ""
    if default is None and name not in environ:
        findings.add(keys, f"the variable {name} is not set; set it, or write '${{{name}:-default}}'")
    if text := environ.get(name):
        findings.variables[text] = name
    return text or str(default or "")


def escape_variables(text: str) -> str:
    """Text that expands to this very text: every ``$`` is doubled."""
    return text.replace("$", "$$")
