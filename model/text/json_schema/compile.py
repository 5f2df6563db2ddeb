"""Rewrites a JSON schema so that llguidance enforces every keyword.

llguidance ignores unknown keywords and some combinations, so it gets only a few keywords, in one order. The result
never allows more than the source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from model.errors import GrammarError
from model.text.json_schema.conjunctions import Conjunctions
from model.text.json_schema.core import Core, other_texts
from model.text.json_schema.document import Document, Place
from model.text.json_schema.limits import depth_of
from model.text.json_schema.rewriter import Rewriter

MAX_DEPTH = 256
"""Bounds llguidance's recursion."""


def enforceable(schema: Any, *, lenient: bool = False, place: Place | None = None) -> dict[str, Any]:
    """Return a schema that llguidance enforces; it never allows more than `schema`, or its part at `place`.

    `lenient` ignores unknown formats. Raises GrammarError with the keyword and its JSON pointer.
    """
    try:
        rewriter = Rewriter(Document(schema), lenient=lenient)
        root, bodies = rewriter.rewrite(place)
        _check_cycles(bodies)
        return _schema_with_definitions(*Conjunctions(bodies, rewriter.spend).merge_all(root))
    except RecursionError:
        raise GrammarError("The JSON schema nests too deep, references included.") from None


def _schema_with_definitions(root: Core, bodies: Mapping[str, Core]) -> dict[str, Any]:
    written = {key: _plain(core) for key, core in bodies.items()}
    own = _plain(root)
    if not written:
        return {"allOf": [own]} if isinstance(own, bool) else own
    # llguidance reads a definition at its first reference: this order keeps the recursion shallow.
    order = _innermost_first(own, written)
    _check_depth(order, own, written)
    early = {"anyOf": [True, *({"$ref": f"#/$defs/{key}"} for key in order)]}
    return {"$defs": written, "allOf": [early, own]}


def _plain(core: Core) -> Any:
    if isinstance(core, bool):
        return core
    if "$ref" in core:
        return {"$ref": f"#/$defs/{core['$ref']}"}
    found: dict[str, Any] = {}
    for key, value in core.items():
        if key in ("allOf", "anyOf", "prefixItems"):
            found[key] = [_plain(part) for part in value]
        elif key in ("properties", "patternProperties"):
            found[key] = {name: _plain(part) for name, part in value.items()}
        elif key in ("items", "additionalProperties"):
            found[key] = _plain(value)
        elif key != "notEnum":
            found[key] = value
    if "notEnum" in core:
        pattern = {"type": "string", "pattern": other_texts(core["notEnum"])}
        return {"allOf": [found, pattern]}
    return found


def _references(value: Any) -> list[str]:
    found, stack = [], [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Mapping):
            if isinstance(item.get("$ref"), str):
                found.append(item["$ref"].removeprefix("#/$defs/"))
            stack += reversed(list(item.values()))
        elif isinstance(item, list):
            stack += reversed(item)
    return found


def _innermost_first(root: Any, written: Mapping[str, Any]) -> list[str]:
    order: list[str] = []
    seen: set[str] = set()
    stack: list[tuple[str, bool]] = [(key, False) for key in reversed(_references(root))]
    while stack:
        key, is_done = stack.pop()
        if is_done:
            order.append(key)
        elif key not in seen:
            seen.add(key)
            stack.append((key, True))
            stack += [(other, False) for other in reversed(_references(written[key])) if other not in seen]
    return order


def _check_depth(order: Sequence[str], own: Any, written: Mapping[str, Any]) -> None:
    """Check the depth at which llguidance reads each definition."""
    seen: set[str] = set()
    for first in order:
        stack: list[tuple[str, int]] = [(first, 0)]
        while stack:
            key, outside = stack.pop()
            if key in seen:
                continue
            seen.add(key)
            depth = outside + depth_of(written[key])
            if depth > MAX_DEPTH:
                raise GrammarError(f"The JSON schema nests more than {MAX_DEPTH} deep, references included.")
            stack += [(other, depth) for other in reversed(_references(written[key])) if other not in seen]
    if depth_of(own) > MAX_DEPTH:
        raise GrammarError(f"The JSON schema nests more than {MAX_DEPTH} deep.")


def _check_cycles(bodies: Mapping[str, Core]) -> None:
    try:
        TopologicalSorter({key: _in_place(core) for key, core in bodies.items()}).prepare()
    except CycleError:
        raise GrammarError("The JSON schema's '$ref' refers to itself with no value in between.") from None


def _in_place(core: Core) -> list[str]:
    found, stack = [], [core]
    while stack:
        item = stack.pop()
        if not isinstance(item, bool):
            found += [item["$ref"]] if "$ref" in item else []
            stack += item.get("allOf") or item.get("anyOf") or ()
    return found
