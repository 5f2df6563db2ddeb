"""Array rules as core schemas."""

from __future__ import annotations

from itertools import combinations, permutations
from math import comb, perm
from typing import Any

from model.text.json_schema.core import (
    ARRAY,
    MAX_DEPTH,
    Core,
    Kinds,
    ProofContext,
    any_of,
    are_disjoint,
    item_of,
    of_kinds,
    values_of,
)

WINDOW = 8
"""Items required by `contains` must be among the first WINDOW."""
MAX_COMBINATIONS = 64
MAX_ORDERS = 400
"""Max permutations written out for `uniqueItems`."""
MAX_TUPLE = 16


def unless_array(kinds: Kinds, core: Core) -> Core:
    return any_of([of_kinds(kinds - ARRAY), core])


def containing(item: Core, other: Core, least: int, most: int | None, longest: int | None) -> Core | None:
    """Return `contains`: `least` to `most` items match `item` and, if `most` is set, the rest match `other`.

    Returns None if no grammar can express it.
    """
    window = max(least, min(WINDOW, WINDOW if longest is None else longest))
    while window > least and _num_combinations(window, least, most) > MAX_COMBINATIONS:
        window -= 1
    if _num_combinations(window, least, most) > MAX_COMBINATIONS:
        return None
    found: list[Core] = []
    for size in range(least, (least if most is None else min(most, window)) + 1):
        for chosen in combinations(range(window), size):
            last = max(chosen, default=-1)
            array: dict[str, Any] = {"type": "array", "minItems": last + 1}
            array["prefixItems"] = [item if i in chosen else other for i in range(last + 1)]
            found.append(array if other is True else {**array, "items": other})
    return any_of(found)


def _num_combinations(window: int, least: int, most: int | None) -> int:
    return sum(comb(window, size) for size in range(least, (least if most is None else min(most, window)) + 1))


def without_repeats(core: dict[str, Any], known: ProofContext) -> Core | None:
    """Return the rule that items of arrays in `core` are unique; None if no grammar can express it."""
    longest = core.get("maxItems")
    num_prefix = len(core.get("prefixItems", ()))
    if core.get("items", True) is False:
        longest = num_prefix if longest is None else min(longest, num_prefix)
    if longest is not None and longest <= 1:
        return True
    if longest is not None and longest <= min(num_prefix, MAX_TUPLE):
        items = [item_of(core, i) for i in range(longest)]
        if all(are_disjoint(one, other, known) for one, other in combinations(items, 2)):
            return True
    values = values_of(core.get("items", True), known)
    if num_prefix or values is None:
        return None
    longest = len(values) if longest is None else min(longest, len(values))
    least = core.get("minItems", 0)
    if sum(perm(len(values), size) for size in range(least, longest + 1)) > MAX_ORDERS:
        return None
    orders = (order for size in range(least, longest + 1) for order in permutations(values, size))
    return any_of(_exactly(order) for order in orders)


def writes_items(core: dict[str, Any], known: ProofContext) -> bool:
    """Return whether `without_repeats` enumerates the items."""
    items = core.get("items", True)
    for _ in range(MAX_DEPTH):
        if isinstance(items, bool) or "$ref" not in items:
            break
        items = known.lookup(items["$ref"])
    is_plain = isinstance(items, dict) and set(items) <= {"enum", "type"}
    return is_plain and values_of(items, known) is not None and not core.get("prefixItems")


def _exactly(values: tuple[Any, ...]) -> Core:
    items = [{"enum": [value]} for value in values]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
