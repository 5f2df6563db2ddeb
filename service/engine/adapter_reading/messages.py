"""Description of an adapter in shared memory, exchanged by the two processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from model.weights.lora.adapter import LoraAdapter
from model.weights.lora.products import Part

Place = tuple[int, tuple[int, ...]]
"""First byte and shape of an array in the shared memory."""


@dataclass(frozen=True)
class ReadAdapter:
    """Adapter whose arrays are in shared memory."""

    digest: str
    rank: int
    num_bytes: int
    dtype: np.dtype
    products: dict[tuple[int, str], dict[int, tuple[Place, Place]]]
    layout: str  # see LoraAdapter

    def placed_in(self, memory: np.ndarray) -> LoraAdapter:
        """Return the adapter with its arrays as views of the memory, uint8[n]."""

        def array(place: Place) -> np.ndarray:
            begin, shape = place
            end = begin + math.prod(shape) * self.dtype.itemsize
            return memory[begin:end].view(self.dtype).reshape(shape)

        products: dict[tuple[int, str], dict[int, Part]] = {
            product: {part: (array(a), array(b)) for part, (a, b) in parts.items()}
            for product, parts in self.products.items()
        }
        return LoraAdapter(self.digest, self.rank, products, self.num_bytes, memory, self.layout)


def address_of(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
