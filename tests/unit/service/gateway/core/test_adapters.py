"""Adapters by name without a server: where names are looked up, and what an outage answers."""

from __future__ import annotations

import asyncio

import pytest

from model.config import ModelConfig
from service.config.lora import parse_lora_modules
from service.config.settings import Settings
from service.errors import RequestError
from service.gateway.core.adapters import Adapters
from service.gateway.core.served_model import ServedModel
from service.queue.interface import QueueUnavailable
from tests.support.adapters import write_adapter
from tests.support.gateway import MODEL, QuickQueue


class AwayStore:
    async def get_adapter(self, *_):
        raise QueueUnavailable("away")

    list_adapters = put_adapter = drop_adapter = get_adapter


@pytest.fixture
def settings(model_folder, tmp_path):
    write_adapter(tmp_path / "sql", ModelConfig.read(model_folder), rank=4)
    modules = parse_lora_modules(f"sql={tmp_path}/sql")
    how = {"model": model_folder, "served_model_name": f"{MODEL},other", "enable_lora": True, "lora_dir": tmp_path}
    return Settings(**how, lora_modules=modules)


async def test_names(settings):
    queue = QuickQueue()
    adapters = Adapters(ServedModel.read(settings), queue, settings)
    assert [await adapters.find(name) for name in (None, MODEL, "other")] == [None] * 3
    assert (await adapters.find("sql")).path.endswith("/sql")
    for unknown in ("", "sqm", "a b", "x" * 500):
        with pytest.raises(RequestError) as caught:
            await adapters.find(unknown)
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    await adapters.load("more", "sql", in_place=False)
    assert (await adapters.find("more")).digest == (await adapters.find("sql")).digest
    assert set(await adapters.loaded_names()) == {"sql", "more"}
    await adapters.unload("more")
    two = [Adapters(ServedModel.read(settings), queue, settings) for _ in range(2)]
    loads = (each.load("again", "sql", in_place=False) for each in two)
    ends = await asyncio.gather(*loads, return_exceptions=True)
    assert sorted(end is None for end in ends) == [False, True], "one of two gateways loads a name"
    await queue.close()


async def test_without_the_queue_only_adapters_of_the_flags_are_known(settings):
    queue = QuickQueue()
    queue.adapters = AwayStore()
    adapters = Adapters(ServedModel.read(settings), queue, settings)
    assert (await adapters.find("sql")).name == "sql"
    for call in (lambda: adapters.find("more"), adapters.records, lambda: adapters.unload("more")):
        with pytest.raises(RequestError) as caught:
            await call()
        assert caught.value.status == 503
    await queue.close()
