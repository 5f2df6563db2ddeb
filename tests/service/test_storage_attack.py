"""One tenant attacks memory and storage of a real service: less than `tests/chaos/storage_attack.py` does, but enough
to see a bound that is not there."""

from __future__ import annotations

import pytest

from tests.chaos import storage_attack

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("case", "scale", "max_mib"),
    [
        ("batch_of_minimal_lines", 0.2, 170),
        ("batch_of_long_lines", 0.2, 250),
        ("parallel_uploads", 0.4, 200),
        ("parallel_bodies", 0.5, 380),
    ],
)
async def test_a_gateway_keeps_within_its_memory(tmp_path, case, scale, max_mib):
    figures = await storage_attack.run(tmp_path, case, scale, takes_over=False)
    assert figures.gateway_mib < max_mib, figures
    assert figures.num_chats > 0
    assert figures.drain_s < storage_attack.DRAIN_S + storage_attack.EXIT_S


@pytest.mark.parametrize(("case", "what"), [("stored_responses", "/v1/responses"), ("records_of_requests", "/v1/chat")])
async def test_redis_keeps_within_what_a_tenant_may_store(tmp_path, case, what):
    flags = ("--max-stored-bytes-per-tenant", str(4 << 20))
    figures = await storage_attack.run(tmp_path, case, 0.15, flags=flags)
    refused = [received for received in figures.answers if received.endswith("429 storage_quota_exceeded")]
    assert [received.startswith(what) for received in refused] == [True], figures
    assert figures.redis_mib < 40, figures
    assert figures.num_chats > 0
