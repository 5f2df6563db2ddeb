"""The gateway process from its start to its end, in one process with a memory queue."""

import asyncio
import json

import aiohttp
import pytest

from service.config.settings import Settings
from service.errors import RequestError, StartupError
from service.gateway.core.served_model import ServedModel
from service.gateway.process import run_gateway
from service.shutdown import Shutdown
from tests.support.gateway import QuickQueue, write_model


def settings(folder, **more):
    return Settings(model=folder, port=0, drain_timeout=0.1, **more)


async def test_serves_until_it_is_stopped(model_folder):
    stop, urls = Shutdown(), []
    running = asyncio.create_task(run_gateway(settings(model_folder), QuickQueue(), stop, on_ready=urls.append))
    while not urls:
        await asyncio.sleep(0.01)
    async with aiohttp.ClientSession() as http:
        async with http.get(urls[0] + "/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == model_folder.name
        stop.set()
        async with asyncio.timeout(3):
            await running
        with pytest.raises(aiohttp.ClientConnectionError):
            await http.get(urls[0] + "/livez")


async def test_ends_when_it_is_cancelled(model_folder):
    urls = []
    running = asyncio.create_task(run_gateway(settings(model_folder), QuickQueue(), Shutdown(), on_ready=urls.append))
    while not urls:
        await asyncio.sleep(0.01)
    running.cancel()
    async with asyncio.timeout(3):
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_port_taken(model_folder):
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{port}: "):
        await run_gateway(Settings(model=model_folder, port=port), QuickQueue(), Shutdown(), on_ready=lambda url: None)
    server.close()
    await server.wait_closed()


async def test_no_such_address(model_folder):
    with pytest.raises(StartupError, match="cannot listen"):
        await run_gateway(settings(model_folder, host="no-such-host.invalid"), QuickQueue(), Shutdown(), on_ready=print)


async def test_ipv6_url(model_folder):
    stop, urls = Shutdown(), []
    stop.set()
    await run_gateway(settings(model_folder, host="::1"), QuickQueue(), stop, on_ready=urls.append)
    assert urls[0].startswith("http://[::1]:")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "generation_config.json"])
def test_broken_model_folder(tmp_path, file):
    folder = write_model(tmp_path / "model")
    (folder / file).write_text("{")
    with pytest.raises(StartupError, match=file):
        ServedModel.read(settings(folder))


def test_no_model_folder(tmp_path):
    with pytest.raises(StartupError, match="--model"):
        ServedModel.read(settings(None))
    with pytest.raises(StartupError):
        ServedModel.read(settings(tmp_path / "nowhere"))


def test_the_model_is_read_from_a_folder(tmp_path):
    folder = write_model(tmp_path / "my-model")
    model = ServedModel.read(settings(folder, max_model_len=100))
    assert (model.name, model.max_model_len) == ("my-model", 100)
    assert model.defaults == {"temperature": 0.6, "top_k": 20}
    assert ServedModel.read(settings(folder, max_model_len=10**6)).max_model_len == 512
    assert ServedModel.read(settings(folder, served_model_name="n")).name == "n"
    assert model.vocab_size == json.loads((folder / "config.json").read_text())["vocab_size"]
    (folder / "chat_template.jinja").unlink()
    assert ServedModel.read(settings(folder)).template is None


def test_names_of_the_model(tmp_path):
    model = ServedModel.read(settings(write_model(tmp_path / "m"), served_model_name="a, b"))
    assert (model.name, model.aliases) == ("a", ("b",))
    for name in (None, "a", "b"):
        model.require(name)
    with pytest.raises(RequestError):
        model.require("m")


def test_default_sampling_from_elsewhere(tmp_path):
    folder, other = write_model(tmp_path / "m"), tmp_path / "other"
    other.mkdir()

    def defaults(**chosen: str):
        return ServedModel.read(settings(folder, **chosen)).defaults

    assert defaults(generation_config="vllm") == defaults(generation_config=str(other)) == {}
    assert defaults(override_generation_config='{"temperature": 0, "min_p": 0.1}') == {
        "temperature": 0.0, "top_k": 20, "min_p": 0.1,
    }  # fmt: skip
    for wrong in ('{"max_new_tokens": 9}', '{"top_p": 2}', "[]", "{"):
        with pytest.raises(StartupError, match=r"^--override-generation-config: "):
            defaults(override_generation_config=wrong)
    with pytest.raises(StartupError, match=r"^--generation-config: x: no such folder"):
        defaults(generation_config="x")


def test_a_chat_template_from_a_file_or_the_line_itself(tmp_path):
    folder, text = write_model(tmp_path / "m"), "{{ messages[0].content }}!"
    (tmp_path / "t.jinja").write_text(text)
    for given in (text, str(tmp_path / "t.jinja")):
        template = ServedModel.read(settings(folder, chat_template=given)).template
        assert template.render([{"role": "user", "content": "hi"}]) == "hi!"
    for wrong, reason in (("no.jinja", "no.jinja: no such file"), ("{% if %}", "malformed")):
        with pytest.raises(StartupError, match=reason):
            ServedModel.read(settings(folder, chat_template=wrong))
