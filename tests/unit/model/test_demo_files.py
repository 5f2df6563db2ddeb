"""The shipped demo model: small enough for git, whole, made by a deterministic corpus, and able to speak."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from model.config import ModelConfig, generation_defaults
from model.families.llama import Llama
from model.ops.cpu.ops import NumpyOps
from model.text.chat_template import ChatTemplate
from model.text.tokenizer import Tokenizer
from model.weights.checkpoint import expected_shapes
from model.weights.loader import load_model
from tests.support.paged import PagedSequences
from tests.support.source_tree import ROOT

DEMO = ROOT / "model" / "demo"
MAX_FOLDER_BYTES = 12_000_000
MAX_HEAD_BYTES = 2_000_000
BEGIN_ID, END_ID = 0, 1
MAX_LEN = 1024
WORST_LOSS = 0.8  # nats a token; the card gives the loss measured over many more documents
TEXTS = ["", " ", "Once upon a time", "12 + 7 = 19", "a  b\n\n\tc", "café 雪 🦊 \u200b", "x" * 300, 'He said, "No!"']


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.read(DEMO)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.read(DEMO)


@pytest.fixture(scope="module")
def template(tokenizer: Tokenizer) -> ChatTemplate:
    template = ChatTemplate.read(DEMO, tokenizer)
    assert template is not None
    return template


@pytest.fixture(scope="module")
def model(config: ModelConfig) -> Llama:
    return load_model(DEMO, config, NumpyOps(), MAX_LEN)


def corpus(seed: int, num_documents: int, hash_seed: str = "0") -> list[dict]:
    """Documents from the script, run as its reader runs it."""
    command = [sys.executable, "make_corpus.py", "--seed", str(seed), "--documents", str(num_documents)]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, cwd=DEMO / "training", env=environment, capture_output=True, check=True, timeout=60)
    return [json.loads(line) for line in done.stdout.decode().splitlines()]


def greedy(model: Llama, prompt: list[int], max_tokens: int) -> list[int]:
    """The likeliest tokens after `prompt`, with the END that closes them if it comes in time."""
    sequences = PagedSequences(model, 1, MAX_LEN, 16)
    out: list[int] = []
    chunk = prompt
    while len(out) < max_tokens and END_ID not in out:
        [logits] = sequences.forward([(0, np.array(chunk))])
        chunk = [int(logits[-1].argmax())]
        out += chunk
    return out


def test_the_folder_fits_into_git():
    files = [path for path in DEMO.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    head = [path for path in files if DEMO / "eagle3" in path.parents]
    assert sum(path.stat().st_size for path in files) - sum(path.stat().st_size for path in head) <= MAX_FOLDER_BYTES
    assert 0 < sum(path.stat().st_size for path in head) <= MAX_HEAD_BYTES


def test_every_file_that_serving_reads_is_there(config: ModelConfig):
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names <= {path.name for path in DEMO.iterdir()}
    assert generation_defaults(DEMO) == {"temperature": 0.7, "top_p": 0.95}
    assert (config.bos_token_id, config.eos_token_ids) == (BEGIN_ID, (END_ID,))


def test_the_config_describes_the_weights(config: ModelConfig):
    with (DEMO / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    assert {name: tuple(entry["shape"]) for name, entry in header.items()} == dict(expected_shapes(config))
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert 4_500_000 < config.num_parameters < 5_300_000
    assert config.num_heads % config.num_kv_heads == 0
    assert config.max_position >= 2048


def test_the_model_card_lists_the_parameters(model: Llama):
    num_parameters = sum(np.prod(shape) for shape in expected_shapes(model.config).values())
    assert f"{num_parameters:,}" in (DEMO / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert ids[0] == BEGIN_ID
    assert BEGIN_ID not in ids[1:]
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.vocab_size == 4096


def test_the_vocabulary_holds_every_byte(tokenizer: Tokenizer):
    single_bytes = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= single_bytes


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer):
    assert [tokenizer.decode([token_id]) for token_id in tokenizer.encode("2048")[1:]] == ["2", "0", "4", "8"]


def test_the_chat_template_writes_each_turn_between_its_marks(template: ChatTemplate):
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [{"type": "text", "text": "Bye"}]},
    ]
    assert template.render(messages) == (
        "<|begin|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|>Bye<|end|><|assistant|>"
    )
    assert template.render(messages[1:3], add_generation_prompt=False) == (
        "<|begin|><|user|>Hi<|end|><|assistant|>Hello!<|end|>"
    )


def test_the_chat_template_lists_tools_and_replays_calls(template: ChatTemplate):
    function = {"name": "add", "description": "Add two numbers", "parameters": {"properties": {"a": {}, "b": {}}}}
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages = [
        {"role": "user", "content": "Add 1 and 2."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    assert template.render(messages, tools=[{"type": "function", "function": function}]) == (
        "<|begin|><|system|>\nTools:\nadd(a, b): Add two numbers<|end|><|user|>Add 1 and 2.<|end|>"
        '<|assistant|>{"name": "add", "arguments": {"a": 1, "b": 2}}<|end|>'
        "<|user|>The tool says: 3<|end|><|assistant|>"
    )


def test_the_corpus_depends_on_its_seed_alone():
    documents = corpus(7, 400)
    assert documents == corpus(7, 400, hash_seed="1")
    assert documents != corpus(8, 400)
    for document in documents:
        assert document.get("text") or document["messages"][-1]["role"] == "assistant"


def test_the_corpus_leaves_no_mark_of_its_grammar():
    texts = json.dumps([document.get("text") or document["messages"] for document in corpus(9, 400)])
    assert not any(mark in texts for mark in ("<|", "{^", "<^", "[a|", "*2 "))


def test_the_model_predicts_documents_it_has_not_seen(model: Llama, tokenizer: Tokenizer):
    losses = []
    for text in [document["text"] for document in corpus(1, 40) if "text" in document][:6]:
        ids = np.array([*tokenizer.encode(text), END_ID])[:MAX_LEN]
        [logits] = PagedSequences(model, 1, MAX_LEN, 16).forward([(0, ids[:-1])])
        shifted = logits - logits.max(-1, keepdims=True)
        log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        losses += (-log_probabilities[np.arange(len(ids) - 1), ids[1:]]).tolist()
    assert np.mean(losses) < WORST_LOSS


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Hello!", "Hello! How can I help you?"),
        ("what colour is grass", "Grass is green."),
        ("What is 7 + 5?", "7 + 5 is 12."),
        ("What day comes after Tuesday?", "After Tuesday comes Wednesday."),
    ],
)
def test_it_answers_and_ends(model: Llama, tokenizer: Tokenizer, template: ChatTemplate, question: str, answer: str):
    ids = greedy(model, template.encode([{"role": "user", "content": question}]), 24)
    assert ids[-1] == END_ID
    assert tokenizer.decode(ids[:-1]) == answer


def test_a_story_is_about_the_requested_subject(model: Llama, tokenizer: Tokenizer, template: ChatTemplate):
    prompt = template.encode([{"role": "user", "content": "Tell me a story about a fox and a lantern."}])
    ids = greedy(model, prompt, 400)
    assert ids[-1] == END_ID
    story = tokenizer.decode(ids[:-1])
    assert "fox" in story
    assert "lantern" in story
