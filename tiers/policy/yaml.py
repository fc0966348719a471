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

KeyPath: TypeAlias = tuple[str | int, ...]
"""The place of a value: keys of mappings and indices of lists (from 0), from the root on."""


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
        lines: line of each value, from 1; a value that is not in it counts as being on its parent's line.
    """

    name: str
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    _found: dict[tuple[int, KeyPath], str] = field(default_factory=dict)

    def add(self, keys: KeyPath, text: str, line: int | None = None) -> None:
        """Add an error: what was found at a value, and what would be right.

        Only the first error at a place counts, since later ones usually follow from it.
        """
        place = f"{dotted_keys(keys)}: " if keys else ""
        line = self.line(keys) if line is None else line
        self._found.setdefault((line, keys), f"{self.name}:{line}: {place}{text}")

    def line(self, keys: KeyPath) -> int:
        """The line of a value, or of the innermost value around it that has a line."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return self.lines.get(keys, 1)

    def raise_any(self) -> None:
        """Raises:
        PolicyError: there are errors; the message has one line for each.
        """
        if self._found:
            in_order = sorted(self._found.items(), key=lambda found: found[0][0])
            raise PolicyError("\n".join(text for _, text in in_order))


def dotted_keys(keys: KeyPath) -> str:
    """Keys joined by dots, as messages show a place."""
    return ".".join(map(str, keys))


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
        findings.add((), "is not a mapping; write keys and values, as in 'version: 1'", _line(node))
    else:
        build = _Build(findings)
        data: dict[str, Any] = build.value(node, (), 0)
        findings.lines = build.lines
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
        findings.add((), f"is not YAML: {what}", mark.line + 1 if mark else 1)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        findings.add((), f"is not YAML: the character U+{int(error.character):04X} is not allowed", line)
    except _TooMuch as error:
        findings.add((), str(error), error.line)
    findings.raise_any()
    return None


class _TooMuch(Exception):
    def __init__(self, text: str, line: int) -> None:
        super().__init__(text)
        self.line = line


def _check_bounds(depth: int, count: int, line: int) -> None:
    if depth > MAX_POLICY_DEPTH:
        raise _TooMuch(f"is nested more than {MAX_POLICY_DEPTH} deep; a policy is not", line)
    if count > MAX_NODES:
        raise _TooMuch(f"has more than {MAX_NODES} values; a policy has not", line)


class _Loader(yaml.SafeLoader):
    """Composes nodes, and stops at too many or too deep ones before they use memory."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        self._count += 1
        _check_bounds(self._depth, self._count, self.peek_event().start_mark.line + 1)  # type: ignore[no-untyped-call]
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


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


class _Build:
    """Makes plain data of composed nodes. Aliases are copied out, so nodes are counted again here."""

    def __init__(self, findings: PolicyErrors) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._findings = findings
        self._count = 0

    def value(self, node: yaml.Node, keys: KeyPath, depth: int) -> Any:
        """The data under a node; records its line, unless its key has a line already."""
        self.lines.setdefault(keys, _line(node))
        self._count += 1
        try:
            _check_bounds(depth, self._count, _line(node))
        except _TooMuch as error:
            self._findings.add(keys[:4], str(error), error.line)
            self._findings.raise_any()
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_YAML}map":
            return self._mapping(node, keys, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_YAML}seq":
            return [self.value(item, (*keys, i), depth + 1) for i, item in enumerate(node.value)]
        return self._scalar(node, keys)

    def _mapping(self, node: yaml.MappingNode, keys: KeyPath, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in node.value:
            name = self._key(key, keys)
            if name is None:
                continue
            if name in out:
                first = self.lines[*keys, name]
                self._findings.add((*keys, name), f"is written twice, first in line {first}; keep one", _line(key))
                continue
            self.lines[*keys, name] = _line(key)
            out[name] = self.value(value, (*keys, name), depth + 1)
        return out

    def _key(self, node: yaml.Node, keys: KeyPath) -> str | None:
        if isinstance(node, yaml.ScalarNode) and node.tag == f"{_YAML}str":
            return str(node.value)
        if isinstance(node, yaml.ScalarNode):
            self._findings.add(keys, f"the key {node.value!r} is not text; put it in quotes", _line(node))
        else:
            self._findings.add(keys, "a key is a list or a mapping; write text", _line(node))
        return None

    def _scalar(self, node: yaml.Node, keys: KeyPath) -> Any:
        kind = node.tag.removeprefix(_YAML)
        if isinstance(node, yaml.ScalarNode) and kind in (*_WORDS, "str"):
            try:
                return _scalar(kind, node.value)
            except (ValueError, KeyError):
                self._findings.add(keys, f"is tagged as {kind} and is none; take the tag away", _line(node))
        else:
            self._findings.add(
                keys, f"has the tag {node.tag[:60]!r}; take it away, a policy is plain data", _line(node)
            )
        return None


def expand_variables(value: Any, environ: Mapping[str, str], findings: PolicyErrors, keys: KeyPath = ()) -> Any:
    """The same data with environment variables replaced by their values; keys of mappings are not expanded.

    A variable that is not set and has no default, or a ``$`` that begins no variable, is added to ``findings``. As in a
    shell, a default also replaces an empty variable.
    """
    if isinstance(value, dict):
        return {key: expand_variables(item, environ, findings, (*keys, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [expand_variables(item, environ, findings, (*keys, i)) for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    return _DOLLAR.sub(lambda found: _value_of_variable(found, environ, findings, keys), value)


def _value_of_variable(found: re.Match[str], environ: Mapping[str, str], findings: PolicyErrors, keys: KeyPath) -> str:
    dollar, name, default = found.groups()
    if dollar:
        return "$"
    if name is None:
        findings.add(keys, f"has a '$' that starts no variable; {_REMEDY}")
        return "$"
    if default is not None:
        return environ.get(name) or str(default)
    if name not in environ:
        findings.add(keys, f"the variable {name} is not set; set it, or write '${{{name}:-default}}'")
    return environ.get(name, "")


def escape_variables(text: str) -> str:
    """Text that expands to this very text: every ``$`` is doubled."""
    return text.replace("$", "$$")
