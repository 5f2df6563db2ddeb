"""`LoRARequest` with `LLM` and `AsyncLLM` on a small random model."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from model.config import ModelConfig
from service.offline.api import LLM, AsyncLLM, BeamSearchParams, LoRARequest, SamplingParams
from tests.support.adapters import merged_model, write_adapter
from tests.support.small_models import write_cached

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = list(range(100, 120))
SMALL = {"max_model_len": 128, "swap_space": 0, "num_gpu_blocks": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, two adapters, and the model with the first one merged."""
    root = tmp_path_factory.mktemp("adapters")
    base = write_cached(root, "meta-llama/Llama-3.1-8B-Instruct").rename(root / "base")
    config = ModelConfig.read(base)
    fox = write_adapter(root / "fox", config, rank=8, seed=1, strength=5.0)
    write_adapter(root / "owl", config, rank=16, seed=2, strength=5.0)
    merged_model(base, fox, root / "merged", 64)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, root / "merged")
    return root


@pytest.fixture(scope="module")
def llm(folders):
    with LLM(folders / "base", enable_lora=True, max_loras=2, **SMALL) as made:
        yield made


def ids(outputs):
    return [each.outputs[0].token_ids for each in outputs]


def test_each_prompt_is_answered_by_its_adapter(llm, folders):
    fox, owl = LoRARequest("fox", 1, str(folders / "fox")), LoRARequest("owl", 2, str(folders / "owl"))
    mixed = llm.generate([PROMPT] * 3, GREEDY, lora_request=[fox, None, owl], use_tqdm=False)
    assert [each.lora_request for each in mixed] == [fox, None, owl]
    assert len(set(map(tuple, ids(mixed)))) == 3
    with LLM(folders / "merged", **SMALL) as merged:
        (wanted,) = ids(merged.generate([PROMPT], GREEDY, use_tqdm=False))
        with pytest.raises(ValueError, match="adapters are off"):
            merged.generate([PROMPT], GREEDY, lora_request=fox, use_tqdm=False)
    assert ids(mixed)[0] == wanted
    assert ids(llm.generate([PROMPT] * 2, GREEDY, lora_request=fox, use_tqdm=False)) == [wanted] * 2


def test_chats_beams_and_embeddings_take_an_adapter(llm, folders):
    fox = LoRARequest("fox", 1, str(folders / "fox"))
    talk = [{"role": "user", "content": "A fox"}]
    assert ids(llm.chat(talk, GREEDY, False, fox)) != ids(llm.chat(talk, GREEDY, False))
    beams = BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True)
    assert (
        llm.beam_search([PROMPT], beams, fox)[0].sequences[0].tokens[-4:]
        == ids(llm.generate([PROMPT], GREEDY, lora_request=fox, use_tqdm=False))[0][:4]
    )
    score = llm.score(PROMPT, PROMPT, lora_request=fox, use_tqdm=False)[0].outputs.score
    assert score == pytest.approx(1, abs=1e-5)
    (plain,), (adapted,) = (llm.embed(PROMPT, lora_request=one, use_tqdm=False) for one in (None, fox))
    assert plain.outputs.embedding != adapted.outputs.embedding


def test_a_folder_is_read_again_only_in_place(llm, folders, tmp_path):
    shutil.copytree(folders / "fox", tmp_path / "fox")
    given = LoRARequest("moving", 3, str(tmp_path / "fox"))
    before = llm.generate([PROMPT], GREEDY, lora_request=given, use_tqdm=False)
    shutil.copytree(folders / "owl", tmp_path / "fox", dirs_exist_ok=True)
    again = llm.generate([PROMPT], GREEDY, lora_request=given, use_tqdm=False)
    assert ids(again) == ids(before)
    anew = LoRARequest("moving", 3, str(tmp_path / "fox"), load_inplace=True)
    assert ids(llm.generate([PROMPT], GREEDY, lora_request=anew, use_tqdm=False)) != ids(before)


def test_wrong_adapters_are_refused_by_name(llm, folders):
    for arguments, problem in (
        (("", 1, "x"), "'lora_name'"),
        (("fox", 0, "x"), "'lora_int_id' must be at least 1, not 0"),
        (("fox", 1), "'lora_path'"),
    ):
        with pytest.raises(ValueError, match=problem):
            LoRARequest(*arguments)
    fox = LoRARequest("fox", 1, str(folders / "fox"))
    for given, problem in (
        (object(), "must be a LoRARequest"),
        ([fox], "1 for 2 prompts"),
        (LoRARequest("gone", 1, str(folders / "gone")), "'lora_request': .*no such folder"),
    ):
        with pytest.raises(ValueError, match=problem):
            llm.generate(["a", "b"], GREEDY, lora_request=given, use_tqdm=False)


def test_async_streams_take_an_adapter(llm, folders):
    fox = LoRARequest("fox", 1, str(folders / "fox"))

    async def stream(served):
        return [output async for output in served.generate(PROMPT, GREEDY, lora_request=fox)][-1]

    with AsyncLLM(folders / "base", enable_lora=True, **SMALL) as served:
        found = asyncio.run(stream(served))
    assert ids([found]) == ids(llm.generate([PROMPT], GREEDY, lora_request=fox, use_tqdm=False))
    assert found.lora_request is fox
