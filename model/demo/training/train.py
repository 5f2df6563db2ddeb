"""Makes the demo model: writes the corpus, trains its tokenizer, trains the weights, writes the model folder.

    python train.py --out FOLDER

Needs PyTorch, transformers and a GPU; serving needs none of this. Seeds are fixed. Training and held-out documents come
from different seeds of the corpus generator.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import time
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import torch
from documents import BEGIN, BEGIN_ID, END, END_ID, HERE, NOT_LEARNED, SPECIAL_TOKENS, rendered_documents, targets_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 4096
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID,
}
HELD_OUT_SEED = 1
FIRST_TOKENIZER_SEED = 100
FIRST_TRAINING_SEED = 1000
DOCUMENTS_PER_SEED = 20_000
NUM_HELD_OUT_DOCUMENTS = 8_000
NUM_TOKENIZER_SEEDS = 16
DOCUMENTS_PER_TOKENIZER_SEED = 5000
WINDOW = 2048  # tokens
WINDOWS_PER_STEP = 32
PEAK_LEARNING_RATE = 3e-3
NUM_WARMUP_STEPS = 100


def train_tokenizer(path: Path, pool: Pool) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    parts = pool.imap(_plain_parts, range(FIRST_TOKENIZER_SEED, FIRST_TOKENIZER_SEED + NUM_TOKENIZER_SEEDS))
    tokenizer.train_from_iterator((text for part in parts for text in part), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, BEGIN_ID)]
    )
    tokenizer.save(str(path))


def _plain_parts(seed: int) -> list[str]:
    """Return the texts between control tokens, of one seed."""
    control = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    documents = rendered_documents(seed, DOCUMENTS_PER_TOKENIZER_SEED)
    return [part for document in documents for part in control.split(document) if part]


def encode(job: tuple[str, int, int]) -> np.ndarray:
    """The documents of one seed as one run of token ids (uint16)."""
    tokenizer_path, seed, num_documents = job
    tokenizer = Tokenizer.from_file(tokenizer_path)
    encodings = tokenizer.encode_batch_fast(list(rendered_documents(seed, num_documents)), add_special_tokens=False)
    return np.concatenate([np.asarray(encoding.ids, dtype=np.uint16) for encoding in encodings])


def encode_training_documents(tokenizer_path: Path, num_documents: int, pool: Pool) -> np.ndarray:
    """Return documents of as many training seeds as needed, on all cores, in order of seed."""
    num_seeds = math.ceil(num_documents / DOCUMENTS_PER_SEED)
    seeds = range(FIRST_TRAINING_SEED, FIRST_TRAINING_SEED + num_seeds)
    return np.concatenate(pool.map(encode, [(str(tokenizer_path), seed, DOCUMENTS_PER_SEED) for seed in seeds], 1))


def windows_of(tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, each (windows, WINDOW) on the GPU."""
    targets = targets_of(tokens)
    num_windows = len(targets) // WINDOW
    shape = (num_windows, WINDOW)
    inputs = torch.from_numpy(tokens[: num_windows * WINDOW].astype(np.int32).reshape(shape))
    return inputs.cuda(), torch.from_numpy(targets[: num_windows * WINDOW].astype(np.int32).reshape(shape)).cuda()


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(input_ids=inputs.long(), use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.long().flatten(), ignore_index=NOT_LEARNED
    )


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Mean loss in nats a learned token."""
    total, count = 0.0, 0
    for start in range(0, len(inputs) - WINDOWS_PER_STEP + 1, WINDOWS_PER_STEP):
        part = slice(start, start + WINDOWS_PER_STEP)
        num_learned = int((targets[part] != NOT_LEARNED).sum())
        total += loss_of(model, inputs[part], targets[part]).item() * num_learned
        count += num_learned
    return total / count


def learning_rate(step: int, num_steps: int) -> float:
    if step < NUM_WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / NUM_WARMUP_STEPS
    progress = (step - NUM_WARMUP_STEPS) / (num_steps - NUM_WARMUP_STEPS)
    return PEAK_LEARNING_RATE * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def optimizer_for(model: torch.nn.Module) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor, num_steps: int) -> None:
    """One pass or more over the windows in a seeded order."""
    optimizer = optimizer_for(model)
    step_loss = torch.compile(loss_of)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0)).cuda()
    started_s = time.monotonic()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps)
        picked = order[torch.arange(step * WINDOWS_PER_STEP, (step + 1) * WINDOWS_PER_STEP, device="cuda") % len(order)]
        loss = step_loss(model, inputs[picked], targets[picked])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0 or step == num_steps - 1:
            print(f"step {step} loss {loss.item():.4f} after {time.monotonic() - started_s:.0f} s", flush=True)


def write_folder(model: LlamaForCausalLM, folder: Path) -> None:
    """Weights, config and the tokenizer's and sampler's settings, as Hugging Face lays them out."""
    model.to(torch.bfloat16).save_pretrained(folder)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"} | SHAPE
    settings = {
        "config.json": config,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": END,
            "model_max_length": SHAPE["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
        "generation_config.json": {
            "bos_token_id": BEGIN_ID,
            "eos_token_id": END_ID,
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.95,
        },
    }
    for name, content in settings.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--documents", type=int, default=1_700_000, help="how many documents to train on")
    parser.add_argument("--passes", type=int, default=2, help="how often each is seen")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes of the pool keep the cores busy
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    tokenizer_path = arguments.out / "tokenizer.json"
    started_s = time.monotonic()
    # Forked first of all, before any thread is started that a fork would lose.
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        train_tokenizer(tokenizer_path, pool)
        training_tokens = encode_training_documents(tokenizer_path, arguments.documents, pool)
    inputs, targets = windows_of(training_tokens)
    held_out = windows_of(encode((str(tokenizer_path), HELD_OUT_SEED, NUM_HELD_OUT_DOCUMENTS)))
    print(f"{inputs.numel()} training tokens, {held_out[0].numel()} held out, {time.monotonic() - started_s:.0f} s")
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).cuda()
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters")
    train(model, inputs, targets, arguments.passes * len(inputs) // WINDOWS_PER_STEP)
    print(f"held-out loss {held_out_loss(model.eval(), *held_out):.4f} nats a token")
    write_folder(model, arguments.out)


if __name__ == "__main__":
    main()
