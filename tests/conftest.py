"""For every test: hypothesis never fails for slowness, and in CI it draws the same cases each time.

New cases are for the bench and the desk; a check of a change must give the same answer twice.
"""

import os

from hypothesis import settings

settings.register_profile("desk", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "desk")
