"""Write tests/unit/service/engine/goldens/beams.json and adjusted_beams.json: what transformers' beam search finds with
the demo model, without and with logits processors.

Needs torch and transformers, which the repository does not install; the file it writes is checked in. Run it as
`python tests/support/make_beam_goldens.py` in an environment with torch 2.13 and transformers 5.23.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "unit" / "service" / "engine" / "goldens"

PROMPTS_AND_STOPS = (([*range(40, 51)], [1, 13, 260, 262, 300]), ([0, 54, 83, 259, 301, 266, 270], [1]))
WIDTHS = (2, 4, 8, 16)
EARLY_STOPPING = (True, False, "never")
LENGTH_PENALTIES = (1.0, -1.0, 2.0)
MAX_TOKENS = 12

ADJUSTMENTS = (
    {"min_tokens": 6},
    {"min_tokens": 9, "logit_bias": {1: 15.0, 260: 3.0}},
    {"logit_bias": {18: -6.0, 262: 4.5, 300: 2.0}},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "min_tokens": 4, "logit_bias": {13: 5.0}},
)
"""Fields under the API's names; transformers': min_new_tokens, sequence_bias, repetition_penalty."""


def main() -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(ROOT / "model" / "demo", dtype=torch.float32)
    options = product(PROMPTS_AND_STOPS, WIDTHS, EARLY_STOPPING, LENGTH_PENALTIES)
    cases = [case(model, prompt, stops, *others) for (prompt, stops), *others in options]
    write("beams.json", cases)
    options = product(PROMPTS_AND_STOPS, (2, 5), (True, False), ADJUSTMENTS)
    write(
        "adjusted_beams.json",
        [
            case(model, prompt, stops, width, early_stopping, 1.0, adjustment)
            for (prompt, stops), width, early_stopping, adjustment in options
        ],
    )


def write(name: str, cases: list[dict]) -> None:
    GOLDENS.mkdir(exist_ok=True)
    (GOLDENS / name).write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n", encoding="utf-8")


@torch.no_grad()
def case(model, prompt, stops, width, early_stopping, length_penalty, adjustment=None) -> dict:
    adjustment = adjustment or {}
    processors = {
        "min_new_tokens": adjustment.get("min_tokens"),
        "sequence_bias": {(token,): bias for token, bias in adjustment.get("logit_bias", {}).items()} or None,
        "repetition_penalty": adjustment.get("repetition_penalty"),
    }
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        early_stopping=early_stopping,
        length_penalty=length_penalty,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=stops,
        pad_token_id=1,
        return_dict_in_generate=True,
        output_scores=True,
        **{name: value for name, value in processors.items() if value is not None},
    )
    return {
        "prompt": prompt,
        "stops": stops,
        "width": width,
        "early_stopping": early_stopping,
        "length_penalty": length_penalty,
        "max_tokens": MAX_TOKENS,
        **({"adjustment": adjustment} if adjustment else {}),
        "answers": [trimmed(row[len(prompt) :].tolist(), stops) for row in found.sequences],
        "scores": [round(score, 5) for score in found.sequences_scores.tolist()],
    }


def trimmed(output: list[int], stops: list[int]) -> list[int]:
    """Return the tokens up to the first end token, without padding."""
    ends = [at for at, token in enumerate(output) if token in stops]
    return output[: ends[0] + 1] if ends else output


if __name__ == "__main__":
    main()
