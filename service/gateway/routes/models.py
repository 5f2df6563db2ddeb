"""`/v1/models`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from aiohttp import web

from service.gateway.core.served_model import ServedModel
from service.gateway.core.service import InferenceService
from service.gateway.http.middleware import TENANT, json_response, read_body
from service.gateway.routes.tokenization import detokenize, tokenize
from service.queue.interface import QueueUnavailable
from service.queue.records import AdapterRecord


class Models:
    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def list(self, http: web.Request) -> web.Response:
        names = (self._service.model.name, *self._service.model.aliases)
        cards = [await self._card(name) for name in names]
        cards += [await self._card(record.name, record) for record in await self._service.adapters.records()]
        return json_response({"object": "list", "data": cards})

    async def get(self, http: web.Request) -> web.Response:
        name = http.match_info["model"]
        return json_response(await self._card(name, await self._service.adapters.find(name)))

    async def tokenize(self, http: web.Request) -> web.Response:
        body, loaded = await read_body(http), await self._service.adapters.loaded_names()
        tokens = await self._service.threads.run(http[TENANT], tokenize, self._service.model, body, loaded)
        return json_response({**tokens, "max_model_len": await self._max_model_len()})

    async def detokenize(self, http: web.Request) -> web.Response:
        body, loaded = await read_body(http), await self._service.adapters.loaded_names()
        text = await self._service.threads.run(http[TENANT], detokenize, self._service.model, body, loaded)
        return json_response(text)

    async def _card(self, name: str, adapter: AdapterRecord | None = None) -> dict[str, object]:
        """Describe a model name or an adapter, whose root is its folder and whose parent is the model."""
        model = self._service.model
        return {
            "id": name,
            "object": "model",
            "created": model.created_s if adapter is None else int(adapter.created_s),
            "owned_by": "quire",
            "root": model.name if adapter is None else adapter.path,
            "parent": None if adapter is None else model.name,
            "max_model_len": await self._max_model_len(),
            "permission": [_permission(model)],
        }

    async def _max_model_len(self) -> int:
        """Return the workers' limit, or the model's if the queue is unavailable."""
        limit = self._service.model.max_model_len
        try:
            return (await self._service.fleet.view()).max_model_len(limit)
        except QueueUnavailable:
            return limit


def _permission(model: ServedModel) -> dict[str, object]:
    return {
        "id": model.fingerprint.replace("fp_", "modelperm-"),
        "object": "model_permission",
        "created": model.created_s,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
