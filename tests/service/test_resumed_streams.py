"""A short run of `tests/chaos/resume_streams.py`."""

from service.queue.embedded.redis import EmbeddedRedis
from tests.chaos.resume_streams import KINDS, run


async def test_dropped_streams_come_out_as_if_they_were_not(tmp_path):
    times = 2 * len(KINDS)
    server = EmbeddedRedis.start(tmp_path / "redis")
    try:
        tally = await run(server.url, tmp_path / "model", times, num_at_once=4, seed=3)
    finally:
        server.stop()
    assert (tally.num_identical, tally.num_different) == (times, 0)
    assert tally.num_drops >= times / 2
