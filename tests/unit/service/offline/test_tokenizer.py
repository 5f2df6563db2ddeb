"""Prompts that a program renders itself: special tokens in texts, `apply_chat_template`."""

from __future__ import annotations

import pytest

from service.offline.api import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm():
    with LLM(max_model_len=128, swap_space=0) as made:
        yield made


def test_a_rendered_chat_is_the_chat(llm):
    tokenizer, params = llm.get_tokenizer(), SamplingParams(temperature=0, max_tokens=4)
    hello = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(hello, tokenize=False, add_generation_prompt=True)
    assert text.startswith(tokenizer.bos_token)
    chat, generated, other = llm.chat(hello, params, use_tqdm=False) + llm.generate([text, "Hello"], params)
    assert generated.prompt_token_ids == chat.prompt_token_ids
    assert generated.prompt == text
    assert other.prompt_token_ids == [tokenizer.bos_token_id, *tokenizer.encode("Hello", add_special_tokens=False)]


def test_messages_spell_no_special_token(llm):
    tokenizer = llm.get_tokenizer()
    end = tokenizer.eos_token
    spelt = [{"role": "user", "content": f"Hello {end}"}]
    rendered = tokenizer.apply_chat_template(spelt, tokenize=False)
    ids = tokenizer.apply_chat_template(spelt)
    assert tokenizer.encode(rendered).count(tokenizer.eos_token_id) == ids.count(tokenizer.eos_token_id) + 1
    assert tokenizer.apply_chat_template([spelt, spelt]) == [ids, ids]
    assert tokenizer.decode(ids) == rendered


def test_names_of_transformers(llm):
    tokenizer = llm.get_tokenizer()
    assert tokenizer.convert_tokens_to_ids(tokenizer.eos_token) == tokenizer.eos_token_id
    assert tokenizer.convert_tokens_to_ids("no token") is None
    assert len(tokenizer) == tokenizer.vocab_size > max(tokenizer.all_special_ids)
    assert tokenizer.decode(tokenizer.encode("Hello"), skip_special_tokens=True) == "Hello"
    assert "messages" in tokenizer.chat_template
    with pytest.raises(ValueError, match=r"messages\[0\].role"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "Hello"}])
    with pytest.raises(AttributeError, match=r"LLMTokenizer.pad: unknown name"):
        _ = tokenizer.pad
