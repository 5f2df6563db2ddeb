"""What Python's garbage collector need not walk."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 10_000
"""So many new ones the collector lets be before it looks at them. An engine's step makes some thousand, which are gone
with the next one by themselves; what needs the collector is what held each other, a request of the engine some twenty.
"""


def keep_for_good() -> None:
    """For a process that has all it will ever load: what is there stays, and the collector, which would hold up a step
    or a stream by tens of milliseconds each time it walked it all, leaves it alone."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
