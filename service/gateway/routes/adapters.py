"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`. As in vLLM, success returns a plain sentence."""

from __future__ import annotations

import msgspec
from aiohttp import web

from service.errors import RequestError
from service.gateway.core.service import InferenceService
from service.gateway.http.middleware import read_body
from service.gateway.openai.request_bodies import convert
from service.gateway.openai.strict_json import decode_object

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class LoadAdapterBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False  # vLLM's; expert tensors are recognized by name and shape


class UnloadAdapterBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    lora_name: str = ""
    lora_int_id: int | None = None  # vLLM's; ignored, the name decides


class LoraAdapters:
    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def load(self, http: web.Request) -> web.Response:
        self._check()
        body = convert(decode_object(await read_body(http)), LoadAdapterBody)
        if not body.lora_name or not body.lora_path:
            raise RequestError(400, "Both 'lora_name' and 'lora_path' must be provided.", param="lora_name")
        await self._service.adapters.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, http: web.Request) -> web.Response:
        self._check()
        body = convert(decode_object(await read_body(http)), UnloadAdapterBody)
        if not body.lora_name:
            message = "'lora_name' needs to be provided to unload a LoRA adapter."
            raise RequestError(400, message, param="lora_name")
        await self._service.adapters.unload(body.lora_name)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _check(self) -> None:
        if not self._service.adapters.loads_at_run_time:
            message = "Adapters are not loaded at run time here (--enable-lora --lora-dir DIR)."
            raise RequestError(404, message, code="adapters_disabled")
