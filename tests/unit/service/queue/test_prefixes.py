from service.queue.codec import pack_ids
from service.queue.messages import JobAdapter
from service.queue.prefixes import DIGEST_BYTES, NUM_SLOTS, prefix_digests
from tests.support.wire import make_job


def digests(num_tokens, **changes):
    found = prefix_digests(make_job(prompt=pack_ids(range(num_tokens)), **changes))
    return [found[start : start + DIGEST_BYTES] for start in range(0, len(found), DIGEST_BYTES)]


def test_a_longer_prompt_continues_the_digests_of_a_shorter_one():
    assert digests(63) == []
    assert len(digests(200)) == 3
    assert digests(640)[:3] == digests(200)
    assert len(set(digests(2048))) == 32
    assert digests(5000)[:32] == digests(2048)
    assert len(digests(5000)) == 33
    assert len(digests(1 << 20)) == 32 + 6  # up to 131,072 tokens


def test_tenants_salts_and_adapters_share_nothing():
    adapters = [JobAdapter(name="a", path="/a", digest=digest) for digest in ("ab", "cd")]
    found = [digests(64), digests(64, tenant="other"), digests(64, cache_salt="s")]
    found += [digests(64, adapter=adapter) for adapter in adapters]
    assert len({digest for (digest,) in found}) == 5


def test_slots_are_in_the_table():
    assert all(int.from_bytes(digest[:3]) < NUM_SLOTS for digest in digests(2048))
