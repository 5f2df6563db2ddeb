"""Adapters at a gateway: named in `model`, listed, loaded and unloaded in vLLM's form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model.config import ModelConfig
from service.config.lora import parse_lora_modules
from service.config.settings import Settings
from service.errors import EndReason, StartupError
from service.gateway.core.served_model import ServedModel
from tests.fakes.scripted_worker import Script
from tests.support.adapters import write_adapter
from tests.support.gateway import MODEL, beside, open_gateway

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = {"prompt": "Hello", "max_tokens": 8}


@pytest.fixture(scope="module")
def adapters(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    config = ModelConfig.read(model_folder)
    write_adapter(folder / "sql", config, rank=4)
    write_adapter(folder / "deep" / "talk", config, rank=8, seed=1)
    write_adapter(folder / "large", config, rank=32)
    return folder


@pytest.fixture
async def gateway(model_folder, adapters):
    how = {"enable_lora": True, "lora_dir": adapters, "lora_modules": parse_lora_modules(f"sql={adapters}/sql")}
    async with open_gateway(model_folder, **how) as opened:
        yield opened


async def sentence(gateway, path: str, body: object) -> tuple[int, str]:
    async with gateway.http.post(gateway.url + path, json=body) as response:
        return response.status, await response.text()


async def test_a_request_names_its_adapter(gateway, adapters):
    status, answer = await gateway.post("/v1/completions", {"model": "sql", **PROMPT})
    assert (status, answer["model"]) == (200, "sql")
    job = gateway.worker.jobs[-1]
    assert (job.model, job.adapter.name, job.adapter.path) == (MODEL, "sql", str(adapters / "sql"))
    assert job.adapter.digest == gateway.model.adapters["sql"].digest
    status, answer = await gateway.post("/v1/completions", {"model": MODEL, **PROMPT})
    assert (answer["model"], gateway.worker.jobs[-1].adapter) == (MODEL, None)
    chunks = await gateway.events(
        "/v1/chat/completions", {"model": "sql", "messages": [{"role": "user", "content": "Hi"}]}
    )
    assert {json.loads(chunk)["model"] for chunk in chunks if chunk != "[DONE]"} == {"sql"}
    status, error = await gateway.post("/v1/completions", {"model": "sqm", **PROMPT})
    assert (status, error["error"]["code"]) == (404, "model_not_found")


async def test_models_lists_the_adapters_behind_the_model(gateway, adapters):
    _, listed = await gateway.get("/v1/models")
    assert [(one["id"], one["root"], one["parent"]) for one in listed["data"]] == [
        (MODEL, MODEL, None),
        ("sql", str(adapters / "sql"), MODEL),
    ]
    assert (await gateway.get("/v1/models/sql"))[1]["parent"] == MODEL
    assert (await gateway.get("/v1/models/sqm"))[0] == 404
    assert (await gateway.post("/tokenize", {"model": "sql", "prompt": "Hello"}))[0] == 200
    counted = {"model": "sql", "messages": [{"role": "user", "content": "Hi"}]}
    assert (await gateway.post("/v1/messages/count_tokens", counted))[0] == 200


async def test_load_and_unload(gateway, model_folder, adapters):
    talk = {"lora_name": "talk", "lora_path": "deep/talk"}
    status, text = await sentence(gateway, LOAD, talk)
    assert (status, text) == (200, "Success: LoRA adapter 'talk' added successfully.")
    async with beside(gateway, model_folder, enable_lora=True, lora_dir=adapters) as other:
        assert (await other.post("/v1/completions", {"model": "talk", **PROMPT}))[0] == 200
        assert [one["id"] for one in (await other.get("/v1/models"))[1]["data"]] == [MODEL, "talk"]
        assert (await other.post("/detokenize", {"model": "talk", "tokens": [5]}))[0] == 200
    assert gateway.worker.jobs[-1].adapter.name == "talk"
    status, error = await gateway.post(LOAD, talk)
    assert status == 400
    assert "has already been loaded" in error["error"]["message"]
    assert (await sentence(gateway, LOAD, {**talk, "load_inplace": True}))[0] == 200
    status, text = await sentence(gateway, UNLOAD, {"lora_name": "talk"})
    assert (status, text) == (200, "Success: LoRA adapter 'talk' removed successfully.")
    assert (await gateway.post("/v1/completions", {"model": "talk", **PROMPT}))[0] == 404
    status, error = await gateway.post(UNLOAD, {"lora_name": "talk"})
    assert (status, error["error"]["message"]) == (404, "The lora adapter 'talk' cannot be found.")


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (LOAD, {"lora_name": "a"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (LOAD, {"lora_name": "a", "lora_path": "../x"}, 400, "below this server's --lora-dir"),
        (LOAD, {"lora_name": "a", "lora_path": "/etc"}, 400, "below this server's --lora-dir"),
        (LOAD, {"lora_name": "a", "lora_path": "a\0b"}, 400, "below this server's --lora-dir"),
        (LOAD, {"lora_name": "a", "lora_path": "none"}, 404, "No adapter found for none"),
        (LOAD, {"lora_name": "a", "lora_path": "deep"}, 400, "deep/adapter_config.json: cannot be read"),
        (LOAD, {"lora_name": "a", "lora_path": "large"}, 400, "rank 32 exceeds --max-lora-rank (16)"),
        (LOAD, {"lora_name": "a b", "lora_path": "sql"}, 400, "must have 1 to 128 characters"),
        (LOAD, {"lora_name": MODEL, "lora_path": "sql"}, 400, "is a name of the served model"),
        (LOAD, {"lora_name": "sql", "lora_path": "sql", "load_inplace": True}, 400, "or of --lora-modules"),
        (UNLOAD, {}, 400, "'lora_name' needs to be provided"),
        (UNLOAD, {"lora_name": "sql"}, 400, "is one of --lora-modules"),
    ],
)
async def test_refusals(gateway, adapters, path, body, status, message):
    found, error = await gateway.post(path, body)
    assert (found, message in error["error"]["message"]) == (status, True), error
    assert str(adapters) not in error["error"]["message"]


async def test_a_link_that_leads_out_is_refused(gateway, adapters, tmp_path, model_folder):
    write_adapter(tmp_path / "outside", ModelConfig.read(model_folder), rank=4)
    (adapters / "link").symlink_to(tmp_path / "outside")
    status, error = await gateway.post(LOAD, {"lora_name": "a", "lora_path": "link"})
    assert (status, "below" in error["error"]["message"]) == (400, True)
    (adapters / "link").unlink()


async def test_off_unless_enabled(model_folder):
    async with open_gateway(model_folder) as gateway:
        for path in (LOAD, UNLOAD):
            status, error = await gateway.post(path, {"lora_name": "sql", "lora_path": "sql"})
            assert (status, error["error"]["code"]) == (404, "adapters_disabled")


async def test_a_worker_without_the_adapter_ends_the_request_by_name(gateway):
    gateway.worker.script = lambda job: Script(end=EndReason.ADAPTER)
    status, error = await gateway.post("/v1/completions", {"model": "sql", **PROMPT})
    assert (status, error["error"]["code"]) == (503, "adapter")


@pytest.mark.parametrize(
    ("modules", "folder", "problem"),
    [
        ("a=/none", None, "/none: no such folder"),
        (f"{MODEL}=/x", None, "is the model's own name"),
        ('{"name": "a", "path": "x", "base_model_name": "b"}', None, "base_model_name is b"),
        ("", Path("/none"), "--lora-dir: /none: no such folder"),
    ],
)
def test_refusals_at_start(model_folder, modules, folder, problem):
    how = {"model": model_folder, "served_model_name": MODEL, "lora_modules": parse_lora_modules(modules)}
    with pytest.raises(StartupError, match=problem):
        ServedModel.read(Settings(**how, lora_dir=folder, enable_lora=True))
    with pytest.raises(StartupError, match="adapters are off"):
        ServedModel.read(Settings(**how, lora_dir=folder))
