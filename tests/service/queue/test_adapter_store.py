"""Adapters, in memory and on Redis alike."""

from dataclasses import replace

from service.queue.records import AdapterRecord

RECORD = AdapterRecord(name="org/talk", path="/data/é", digest="ab" * 32, created_s=100.5)


async def test_put_get_list_and_drop(queue):
    assert list(await queue.adapters.list_adapters()) == []
    assert await queue.adapters.put_adapter(RECORD, replaces=False)
    first = replace(RECORD, name="a")
    assert await queue.adapters.put_adapter(first, replaces=True)
    assert await queue.adapters.get_adapter("org/talk") == RECORD
    assert list(await queue.adapters.list_adapters()) == [first, RECORD]
    changed = replace(RECORD, digest="cd" * 32)
    assert not await queue.adapters.put_adapter(changed, replaces=False)
    assert await queue.adapters.get_adapter("org/talk") == RECORD
    assert await queue.adapters.put_adapter(changed, replaces=True)
    assert await queue.adapters.get_adapter("org/talk") == changed
    assert await queue.adapters.drop_adapter("org/talk")
    assert not await queue.adapters.drop_adapter("org/talk")
    assert await queue.adapters.get_adapter("org/talk") is None
