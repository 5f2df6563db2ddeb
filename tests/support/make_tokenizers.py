"""Small tokenizers built by hand: their ids never change.

Each function writes a model folder's tokenizer files and returns the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

TEXT = """
the and you are is of to in that it for was on with as be this have from not what hello world how time
system user assistant helpful weather name role content tool call function type string city answer question
"""
WORDS = TEXT.split()
HANGUL = ("안녕", "하세요", "날씨")  # some Korean text has whole tokens, the rest bytes
LLAMA3_SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
CHATML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MISTRAL_SPECIALS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")


def llama3_style(folder: Path) -> Path:
    """Byte-level BPE whose post-processor puts BOS before a prompt."""
    backend = _byte_level(LLAMA3_SPECIALS)
    bos = LLAMA3_SPECIALS[0]
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return _write(folder, backend, {"bos_token": bos, "eos_token": "<|eot_id|>"})


def qwen_style(folder: Path) -> Path:
    """Byte-level BPE with ChatML's tokens, NFC, no BOS, and added tokens that are not special."""
    backend = _byte_level(CHATML_SPECIALS)
    backend.normalizer = normalizers.NFC()
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>", "<think>")])
    config = {
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }
    return _write(folder, backend, config)


def llama2_style(folder: Path) -> Path:
    """SentencePiece-like BPE with byte fallback, its normalizer prepending a space; the configuration asks for BOS."""
    backend = _sentencepiece_like(())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = _sentencepiece_decoder(num_spaces_to_strip=1)
    written = {"__type": "AddedToken", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    tokens = {name: {**written, "content": text} for name, text in (("bos_token", "<s>"), ("eos_token", "</s>"))}
    return _write(folder, backend, {"add_bos_token": True, "add_eos_token": False, **tokens, "unk_token": "<unk>"})


def mistral_style(folder: Path) -> Path:
    """The same with Metaspace, which prepends a space to the first piece of a text only, and special [INST]."""
    backend = _sentencepiece_like(MISTRAL_SPECIALS)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = _sentencepiece_decoder(num_spaces_to_strip=1)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return _write(folder, backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def gemma_style(folder: Path) -> Path:
    """SentencePiece-like with no prepended space and a decoder that strips none; runs of spaces are added tokens.

    Its turn tokens swallow adjacent spaces, as Phi's do.
    """
    backend = _sentencepiece_like(())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = _sentencepiece_decoder(num_spaces_to_strip=0)
    backend.add_tokens([AddedToken("▁▁", normalized=False)])
    backend.add_special_tokens(
        [AddedToken("<turn>", special=True, rstrip=True), AddedToken("</turn>", special=True, lstrip=True)]
    )
    return _write(folder, backend, {"bos_token": "<s>", "eos_token": "</s>"})


def unigram(folder: Path) -> Path:
    """Unigram without byte fallback, under a Metaspace decoder. The model itself has "</s>" and may find it in text."""
    pieces = ["<unk>", "</s>", "▁", *(f"▁{word}" for word in WORDS), *"abcdefghijklmnopqrstuvwxyz.,", *HANGUL]
    model = models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("</s>", special=True)])
    return _write(folder, backend, {"eos_token": "</s>"})


def wordpiece(folder: Path) -> Path:
    """A tokenizer whose tokens cannot be read alone, with gaps in its ids."""
    letters = "abcdefghijklmnopqrstuvwxyz.,!'"
    texts = ["[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{c}" for c in letters), *WORDS, "##ing", "##s", *HANGUL]
    vocab = {text: 2 * i for i, text in enumerate(texts)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    backend.add_special_tokens([AddedToken(text, special=True) for text in texts[:3]])
    ids = [(text, vocab[text]) for text in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    return _write(folder, backend, {"unk_token": "[UNK]"})


ALL_STYLES = (llama3_style, qwen_style, llama2_style, mistral_style, gemma_style, unigram, wordpiece)


def _byte_level(specials: Sequence[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    texts = [form for word in WORDS for form in (word, f" {word}")] + list(HANGUL)
    backend = Tokenizer(_bpe(alphabet, [splitter.pre_tokenize_str(text)[0][0] for text in texts], {}))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in specials])
    return backend


def _sentencepiece_like(specials: Sequence[str]) -> Tokenizer:
    first = ["<unk>", "<s>", "</s>", *specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({chr(code) for code in range(0x21, 0x7F)} | set("▁안녕하세요날씨é"))
    texts = [form for word in WORDS for form in (word, f"▁{word}")] + list(HANGUL) + ["▁▁"]
    options = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    backend = Tokenizer(_bpe([*first, *letters], texts, options))
    backend.add_special_tokens([AddedToken(text, special=True) for text in (*first[:3], *specials)])
    return backend


def _sentencepiece_decoder(num_spaces_to_strip: int) -> decoders.Decoder:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(content=" ", left=num_spaces_to_strip, right=0)] if num_spaces_to_strip else []
    return decoders.Sequence(steps + strip)


def _bpe(alphabet: Sequence[str], texts: Iterable[str], options: dict[str, Any]) -> models.BPE:
    """A BPE model that knows `alphabet` and builds each of `texts` letter by letter from the left."""
    vocab = {text: i for i, text in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for text in texts:
        for end in range(2, len(text) + 1):
            if text[:end] not in vocab:
                vocab[text[:end]] = len(vocab)
                merges.append((text[: end - 1], text[end - 1]))
    return models.BPE(vocab=vocab, merges=merges, **options)


def _write(folder: Path, backend: Tokenizer, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
