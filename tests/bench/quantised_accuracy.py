"""Measures what formats of weights and KV cache lose on the demo model: perplexity and agreement of the best token.

    python model/demo/training/make_corpus.py --seed 20261122 --documents 400 --out corpus.jsonl
    python -m tests.bench.quantised_accuracy --corpus corpus.jsonl [--model DIR] [--tokens N] [--out FILE]

The corpus is new text of the kind the model was trained on. One JSON line a case: perplexity, the share of positions
where the best token is that of bf16, and the bytes of the weights for 16-bit activations. The CPU computes in float32.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.dtypes import NUMPY_DTYPES
from model.kv_scales import measure_kv_scales
from model.ops.backend import open_ops
from model.text.tokenizer import Tokenizer
from model.weights.loader import load_model, plan_weights
from model.weights.writer import write_quantised
from tests.support.paged import PagedSequences

DEMO = Path(__file__).parents[2] / "model" / "demo"
CASES = (
    ("bf16", "auto"),
    ("bf16", "fp8"),
    ("fp8", "auto"),
    ("fp8", "fp8"),
    ("int4-g128", "auto"),
    ("int4-g128", "fp8"),
    ("int4-g32", "auto"),
)
"""Formats of weights, and of the KV cache by `--kv-cache-dtype`; bf16 and auto first."""
CONTEXT = 512


def chunks_of(directory: Path, corpus: Path, num_tokens: int) -> list[np.ndarray]:
    """Token ids of the corpus's plain texts, one array each, about `num_tokens` in all."""
    tokenizer, chunks, total = Tokenizer.read(directory), [], 0
    for line in corpus.read_text(encoding="utf-8").splitlines():
        if total < num_tokens and (text := json.loads(line).get("text")) is not None:
            chunks.append(np.array(tokenizer.encode(text)[:CONTEXT], np.int32))
            total += len(chunks[-1])
    return chunks


def log_probs(directory: Path, kv_dtype: str, chunks: list[np.ndarray]) -> list[np.ndarray]:
    """Log-probabilities float32[n, V] after each token, chunk by chunk."""
    model = load_model(directory, ModelConfig.read(directory), open_ops("cpu", "auto", "float32", kv_dtype), CONTEXT)
    if kv_dtype != "auto":
        measure_kv_scales(model, 16, CONTEXT)
    found = []
    for chunk in chunks:
        logits = PagedSequences(model, 1, CONTEXT, 16).forward([(0, chunk)])[0]
        shifted = logits - logits.max(axis=1, keepdims=True)
        found.append(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
    return found


def perplexity(chunks: list[np.ndarray], found: list[np.ndarray]) -> float:
    losses = [-logs[np.arange(len(chunk) - 1), chunk[1:]] for chunk, logs in zip(chunks, found, strict=True)]
    return float(np.exp(np.concatenate(losses).mean()))


def measure(directory: Path, corpus: Path, num_tokens: int) -> list[dict[str, float | int | str]]:
    """One record for each of CASES."""
    chunks = chunks_of(directory, corpus, num_tokens)
    best = np.zeros(0, np.int64)
    records: list[dict[str, float | int | str]] = []
    for weights, kv_dtype in CASES:
        with tempfile.TemporaryDirectory() as folder:
            source = directory
            if weights != "bf16":
                source = Path(folder) / "model"
                write_quantised(directory, source, weights, lambda written: None)
            found = log_probs(source, kv_dtype, chunks)
            planned = plan_weights(source, ModelConfig.read(source), NUMPY_DTYPES["bfloat16"])
        tokens = np.concatenate([logs.argmax(axis=1) for logs in found])
        best = best if records else tokens
        records.append(
            {
                "bench": "quantised_accuracy",
                "format": weights,
                "kv_cache_dtype": kv_dtype,
                "tokens": sum(map(len, chunks)),
                "perplexity": round(perplexity(chunks, found), 4),
                "top1_agreement": round(float((tokens == best).mean()), 4),
                "weight_bytes": planned.num_bytes,
            }
        )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO, metavar="DIR", help="16-bit model folder (default: demo)")
    parser.add_argument("--corpus", type=Path, required=True, metavar="FILE", help="JSON lines of make_corpus.py")
    parser.add_argument("--tokens", type=int, default=16384, metavar="N", help="tokens to score (default: 16384)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the records to a file (default: stdout only)")
    flags = parser.parse_args()
    lines = "".join(json.dumps(record) + "\n" for record in measure(flags.model, flags.corpus, flags.tokens))
    print(lines, end="")
    if flags.out is not None:
        with flags.out.open("a", encoding="utf-8") as file:
            file.write(lines)


if __name__ == "__main__":
    main()
