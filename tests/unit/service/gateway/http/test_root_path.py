"""A gateway after a proxy that leaves its prefix on the paths."""

import pytest

from service.config.settings import Settings
from service.errors import StartupError
from service.gateway.core.request import CHAT, COMPLETIONS
from service.gateway.core.served_model import ServedModel
from service.queue.codec import unpack_ids
from tests.support.gateway import MODEL, open_gateway

PROMPT = {"model": MODEL, "prompt": "hi"}


async def test_paths_are_served_with_and_without_the_prefix(model_folder):
    async with open_gateway(model_folder, root_path="/api/llm") as gateway:
        for prefix in ("", "/api/llm"):
            assert (await gateway.post(prefix + COMPLETIONS, PROMPT))[0] == 200
            status, state = await gateway.get(f"{prefix}/livez?x=%2F")
            assert (status, state) == (200, {"status": "ok"})
        for other in ("/api/llmx", "/api", "/llm", "/api/llm/api/llm"):
            assert (await gateway.get(f"{other}/livez"))[0] == 404
        _, document = await gateway.get("/api/llm/openapi.json")
        assert document["servers"] == [{"url": "/api/llm"}]
        assert (await gateway.get("/api/llm"))[1]["service"] == "quire"
        async with gateway.http.post(gateway.url + COMPLETIONS, json={**PROMPT, "background": True}) as response:
            location = response.headers["Location"]
        assert location.startswith("/api/llm/v1/requests/")
        assert (await gateway.get(location))[0] == 200
        metrics = await (await gateway.http.get(gateway.url + "/api/llm/metrics")).text()
        assert 'route="/v1/completions"' in metrics


async def test_template_variables_have_defaults(model_folder):
    template = "{{ messages[0].content }}{{ mood }}{{ name }}"
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    settings = {"chat_template": template, "default_chat_template_kwargs": '{"mood": "sad", "name": "Tom"}'}
    async with open_gateway(model_folder, **settings) as gateway:
        await gateway.post(CHAT, chat)
        await gateway.post(CHAT, {**chat, "chat_template_kwargs": {"mood": "the"}})
        texts = [gateway.model.tokenizer.decode(unpack_ids(job.prompt)) for job in gateway.worker.jobs]
    assert texts == ["hisadTom", "hitheTom"]


def test_a_default_of_what_requests_set_is_refused(model_folder):
    settings = Settings(model=model_folder, default_chat_template_kwargs='{"mood": "sad", "tools": []}')
    with pytest.raises(StartupError, match=r"^--default-chat-template-kwargs: tools is set by the request$"):
        ServedModel.read(settings)
