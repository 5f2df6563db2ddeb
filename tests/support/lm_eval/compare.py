"""Compare lm-eval's results on a running server with Hugging Face transformers on the same model.

In an environment of its own: `pip install 'lm-eval[api]' transformers torch`. From the root, while `quire serve` runs:

    lm_eval --model local-completions --tasks quire_endings,quire_stories --include_path tests/support/lm_eval \\
        --model_args model=demo,base_url=http://127.0.0.1:8000/v1/completions,tokenizer=model/demo,max_length=2047 \\
        --log_samples --output_path /tmp/lm_eval
    python tests/support/lm_eval/compare.py /tmp/lm_eval
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = Path("model/demo")
TOLERANCE = 1e-3
MAX_NEW_TOKENS = 24


class Reference:
    """The demo model in transformers, in float32."""

    def __init__(self, folder: Path):
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def loglikelihood(self, start: str, end: str) -> tuple[float, bool]:
        """Return the log-likelihood of `end` after `start`, and whether each of its tokens is the likeliest."""
        num_start, token_ids = len(self._ids(start)), self._ids(start + end)
        with torch.inference_mode():
            logits = self._model(torch.tensor([token_ids])).logits[0, num_start - 1 : -1]
        ids = torch.tensor(token_ids[num_start:])
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, None])
        return float(logprobs.sum()), bool((logits.argmax(-1) == ids).all())

    def sentence(self, start: str) -> str:
        """Return the greedy continuation, up to its full stop."""
        ids = self._ids(start)
        token_ids = self._model.generate(
            torch.tensor([ids]),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            pad_token_id=self._tokenizer.eos_token_id,
        )[0]
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text[len(self._tokenizer.decode(ids)) :].split(".")[0]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def samples(folder: Path, task: str) -> Iterator[dict]:
    for path in folder.rglob(f"samples_{task}_*.jsonl"):
        yield from map(json.loads, path.read_text().splitlines())


def main(folder: Path) -> None:
    reference = Reference(DEMO)
    differences = []
    for sample in samples(folder, "quire_endings"):
        for arguments, [[received, is_greedy]] in zip(sample["arguments"].values(), sample["resps"], strict=True):
            loglikelihood, is_likeliest = reference.loglikelihood(arguments["arg_0"], arguments["arg_1"])
            differences.append(abs(float(received) - loglikelihood))
            assert (is_greedy == "True") == is_likeliest
    num_stories = 0
    for sample in samples(folder, "quire_stories"):
        assert sample["resps"][0][0] == reference.sentence(sample["arguments"]["gen_args_0"]["arg_0"])
        num_stories += 1
    assert differences, "no samples of quire_endings"
    assert num_stories, "no samples of quire_stories"
    assert max(differences) < TOLERANCE
    print(f"{len(differences)} loglikelihoods, the worst off by {max(differences):.1e}; {num_stories} stories alike")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
