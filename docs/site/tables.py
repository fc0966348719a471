"""Writes what pages have from the code: tables of policy keys, lists of public names, and the JSON schema of policies.

`make reference` runs it; a test compares what it would write with what is there.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import tierstate
from tierstate.tiers.policy.schema import policy_schema

DOCS = Path(__file__).resolve().parents[1]
POLICY_PAGE = DOCS / "reference" / "policy.md"
NAMES_PAGE = DOCS / "reference" / "python.md"
DECISIONS = DOCS / "decisions" / "README.md"
SCHEMA_FILE = DOCS / "policies" / "schema.json"

TIER_TYPES = ("memory", "host", "gpu", "nvme", "lustre", "object", "peer")
"""The types of tierstate itself, so that what is written does not depend on what else is installed."""

MORE = {
    "alarms": "../how-to/watch-a-model.md#at-once",
    "agent": "../how-to/run-an-agent.md",
    "arena.size": "../explanation/pinned-memory.md",
    "best": "#keep",
    "codec": "#codecs",
    "encrypt": "../how-to/seal-and-encrypt.md#encrypt",
    "every": "../explanation/cascade.md#every-auto",
    "failures": "../explanation/cascade.md#every-auto",
    "format": "../how-to/open-packs-with-other-tools.md",
    "gpu.capacity": "../explanation/device-memory.md",
    "initialized": "../decisions/0017-identity-of-tiers.md",
    "keep": "#keep",
    "lossy": "../how-to/save-with-fewer-bits.md",
    "lustre.deadline": "../explanation/shared-file-systems.md#deadlines",
    "lustre.group": "#who-may-read-and-write",
    "lustre.mode": "#who-may-read-and-write",
    "lustre.stripe_count": "../explanation/shared-file-systems.md#striping",
    "max_lag": "../explanation/cascade.md#how-far-behind",
    "metrics": "../how-to/watch-a-run.md",
    "metrics.events": "events-and-metrics.md",
    "nvme.group": "#who-may-read-and-write",
    "nvme.mode": "#who-may-read-and-write",
    "object.deadline": "../explanation/object-storage.md#retries-and-deadlines",
    "object.options": "#object-stores",
    "object.url": "#object-stores",
    "on_failure": "../decisions/0004-when-errors-are-told.md",
    "peer.copies": "../how-to/survive-a-lost-node.md",
    "preemption": "../how-to/end-when-preempted.md",
    "ranks.trust": "../explanation/threat-model.md",
    "retries": "#limits-and-retries",
    "rules": "#rules",
    "statistics": "../how-to/watch-a-model.md",
    "seal": "../how-to/seal-and-encrypt.md",
}
"""Where a page says more of a key."""

OWN_TABLES = ("KeepKeys", "RuleKeys")
"""Mappings whose keys have a table of their own."""

HEAD = "| key | type | default | meaning | example |\n| --- | --- | --- | --- | --- |\n"


class Key(NamedTuple):
    """A key of a policy, with its JSON schema and whether it must be given."""

    name: str
    schema: dict[str, Any]
    required: bool = False

    @property
    def kinds(self) -> list[dict[str, Any]]:
        """The schemas that a value may have, without that of a variable in its place."""
        return [kind for kind in _alternatives(self.schema) if kind.get("pattern") != r"\$\{"]

    @property
    def models(self) -> list[str]:
        """Names of the mappings that a value may be."""
        return [kind["$ref"].removeprefix("#/$defs/") for kind in self.kinds if "$ref" in kind]

    def row(self, prefix: str = "") -> str:
        """The key's row in a table."""
        meaning = re.sub(r"[,;]? as in `[^`]+`", "", self.schema["description"])
        if page := MORE.get(prefix + self.name):
            meaning = f"{meaning.removesuffix('.')} ([more]({page}))"
        cells = [f"`{self.name}`", _kinds(self.kinds), self._default(), meaning, self._example()]
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"

    def _default(self) -> str:
        if self.required:
            return "required"
        default = self.schema.get("default")
        return "" if default in (None, "", []) else _code(default)

    def _example(self) -> str:
        if examples := self.schema.get("examples"):
            return _code(examples[0])
        values = [value for kind in self.kinds for value in _values(kind) if value != self.schema.get("default")]
        return _code(values[0]) if values else ""


def _alternatives(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    several = schema.get("anyOf") or schema.get("oneOf")
    if several and "title" not in schema:
        for each in several:
            yield from _alternatives(each)
    elif schema.get("type") != "null":
        yield schema


def _values(kind: dict[str, Any]) -> list[Any]:
    return (
        [False, True] if kind.get("type") == "boolean" else kind.get("enum", [kind["const"]] if "const" in kind else [])
    )


def _kinds(kinds: list[dict[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(filter(None, map(_kind, kinds))))


def _kind(kind: dict[str, Any]) -> str:
    if title := kind.get("title"):
        return str(title)
    if "$ref" in kind:
        return "mapping"
    if values := _values(kind):
        return ", ".join(map(_code, values))
    if kind.get("type") == "array":
        return f"list of {'mappings' if '$ref' in kind['items'] else 'texts'}"
    names = {"integer": "number", "number": "number", "string": kind.get("format", "text"), "object": "mapping"}
    return names.get(kind.get("type", ""), "")


def _code(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w.:/\-]*", value):
        return f"`{value}`"  # also `off`, which is text in a policy
    text = yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True, sort_keys=False)
    text = text.removesuffix("\n").removesuffix("\n...")
    return f"`{text.replace(chr(39), chr(34))}`"


class Tables:
    """The tables of a policy page, by the names that their marks have there."""

    def __init__(self) -> None:
        self._schema = policy_schema(TIER_TYPES)
        self._defs = self._schema["$defs"]

    def keys(self) -> Iterator[Key]:
        """All keys of all mappings."""
        for model in [self._schema, *self._defs.values()]:
            yield from self._of(model)

    def table(self, name: str) -> str:
        """One table as Markdown."""
        common = {key.name for key in self._of(self._defs["tier-memory"])} - {"capacity"}
        if name == "top":
            return HEAD + "".join(self._rows(self._schema))
        if name == "tier":
            return HEAD + "".join(self._rows(self._defs["tier-memory"], keep=common))
        if name in TIER_TYPES:
            own = {key.name for key in self._of(self._defs[f"tier-{name}"])} - common
            return HEAD + "".join(self._rows(self._defs[f"tier-{name}"], keep=own, about=f"{name}."))
        return HEAD + "".join(self._rows(self._defs[{"keep": "KeepKeys", "rules": "RuleKeys"}[name]]))

    def _of(self, model: dict[str, Any]) -> list[Key]:
        required = model.get("required", ())
        return [Key(name, schema, name in required) for name, schema in model.get("properties", {}).items()]

    def _rows(
        self, model: dict[str, Any], prefix: str = "", keep: set[str] | None = None, about: str = ""
    ) -> Iterator[str]:
        for key in self._of(model):
            if keep is not None and key.name not in keep:
                continue
            yield key._replace(name=prefix + key.name).row(about)
            for name in key.models:
                if name not in OWN_TABLES and key.name != "encrypt":
                    yield from self._rows(self._defs[name], f"{prefix}{key.name}.")


def policy_page(text: str) -> str:
    """A page with the tables of today between its marks."""
    tables = Tables()
    return re.sub(
        r"(<!-- keys: (\w+) -->\n).*?(?=<!-- end of keys -->)",
        lambda found: found[1] + tables.table(found[2]),
        text,
        flags=re.DOTALL,
    )


ADAPTERS = (
    *("accelerate", "deepspeed", "event_trackers", "lightning", "megatron", "mlflow", "ray"),
    *("torch_checkpointing", "torchtitan", "transformers", "wandb"),
)

MODULES = {
    "modules": ("dcp", "testing", "tiers.testing", "providers.testing"),
    "integrations": tuple(f"integrations.{name}" for name in ADAPTERS),
}
"""By the mark on the page, the modules whose public names are for users."""


def names_page(text: str) -> str:
    """A page with the public names of today between its marks."""
    errors, others = [], []
    for name in tierstate.__all__:
        value = getattr(tierstate, name)
        is_error = isinstance(value, type) and issubclass(value, Exception)
        (errors if is_error else others).append(f"* `tierstate.{name}`: {_sentence(value.__doc__)}\n")
    lists: dict[str, Iterable[str]] = {"names": others, "errors": errors}
    for mark, modules in MODULES.items():
        lists[mark] = [f"* `tierstate.{module}`: {_sentence(_module_docstring(module))}\n" for module in modules]
    for mark, items in lists.items():
        text = re.sub(
            rf"(<!-- {mark} -->\n).*?(?=<!-- end of {mark} -->)",
            lambda found, items=items: found[1] + "".join(items),
            text,
            flags=re.DOTALL,
        )
    return text


def _module_docstring(module: str) -> str | None:
    # By the text, as the framework of an adapter may not be installed.
    path = Path(tierstate.__file__).parent / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.get_docstring(ast.parse(file.read_text("utf-8")))


def _sentence(docstring: str | None) -> str:
    assert docstring, "a public name has no docstring"
    text = " ".join(docstring.split("\n\n")[0].split()).replace("``", "`").removesuffix("::")
    first = re.split(r"(?<=[.?]) (?=[A-Z])", text)[0]
    return first if first.endswith(("?", ".")) else f"{first}."


def decisions_page(text: str) -> str:
    """The index of decisions with the titles of today."""
    pages = sorted(path for path in DECISIONS.parent.glob("*.md") if path != DECISIONS)
    titles = [(path.name, path.read_text("utf-8").partition("\n")[0].removeprefix("# ")) for path in pages]
    return text.partition("* [")[0] + "".join(f"* [{title}]({name})\n" for name, title in titles)


def schema_text() -> str:
    """The JSON schema of a policy, as the file that the example policies name."""
    return json.dumps(policy_schema(TIER_TYPES), indent=2, ensure_ascii=False) + "\n"


def written() -> dict[Path, str]:
    """The files that are made from the code, with the text that each should have."""
    return {
        POLICY_PAGE: policy_page(POLICY_PAGE.read_text("utf-8")),
        NAMES_PAGE: names_page(NAMES_PAGE.read_text("utf-8")),
        DECISIONS: decisions_page(DECISIONS.read_text("utf-8")),
        SCHEMA_FILE: schema_text(),
    }


def main() -> None:
    """Write them."""
    for path, text in written().items():
        path.write_text(text, "utf-8")
        print(path.relative_to(DOCS.parent), file=sys.stderr)


if __name__ == "__main__":
    main()
