"""Input orders of matrices that are stacked."""

from __future__ import annotations

import numpy as np

from model.ops.weight import WeightFormat
from model.weights.formats.stored_matrix import FLOAT32, StoredMatrix, WeightForm, equally_ordered

FORM = WeightForm(WeightFormat.INT4, group_size=4, scale_dtype=FLOAT32)


def matrix(name: str, order: list[int] | None = None) -> StoredMatrix:
    given = None if order is None else np.array(order, np.int32)
    form = FORM if order is None else WeightForm(**{**vars(FORM), "has_input_order": True})
    return StoredMatrix(name, (2, 8), form, {}, given)


def test_the_plain_order_is_given_to_experts_without_one():
    shuffled = [7, 6, 5, 4, 3, 2, 1, 0]
    first, second = equally_ordered([matrix("rounded"), matrix("calibrated", shuffled)])
    assert first.form == second.form
    assert first.input_order is not None
    assert first.input_order.tolist() == list(range(8))
    assert second.input_order is not None
    assert second.input_order.tolist() == shuffled


def test_without_any_order_nothing_changes():
    parts = [matrix("a"), matrix("b")]
    assert equally_ordered(parts) == parts
