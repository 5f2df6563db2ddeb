"""Every setting of every command on one page: its flag, its variable, its default, its unit and its bounds.

A setting `max_num_seqs` is the flag `--max-num-seqs` and the environment variable `QUIRE_MAX_NUM_SEQS`; a flag wins
over a variable, a variable over the line `max_num_seqs = N` of the TOML file that `--config` or `QUIRE_CONFIG` names,
that over the default. An empty variable counts as unset. Settings are read once at start, checked, and never changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from service.config.values import hosts, keys, name, names, switch

SERVE, GATEWAY, WORKER, CHECK, BENCH = VERBS = ("serve", "gateway", "worker", "check", "bench")
_MODEL_VERBS = VERBS
_ENGINE_VERBS = (SERVE, WORKER, CHECK, BENCH)
_STEP_VERBS = (SERVE, WORKER, BENCH)
_DOOR_VERBS = (SERVE, GATEWAY)


def _setting(default: Any, help: str, *, verbs: Sequence[str], parse=str, low=None, high=None, choices=None):
    metadata = {"help": help, "verbs": verbs, "parse": parse, "low": low, "high": high, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


_integer = partial(_setting, parse=int)
_number = partial(_setting, parse=float)
_path = partial(_setting, parse=Path)
_switch = partial(_setting, parse=switch, choices=(True, False))


def _one_of(default: Any, help: str, choices: Sequence[Any], *, verbs: Sequence[str]):
    return _setting(default, help, verbs=verbs, parse=type(choices[0]), choices=choices)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One process's settings. Durations are in seconds, sizes in the unit their help names."""

    # Model
    model: Path | None = _path(
        None, "folder of a Hugging Face model; without it the shipped demo model", verbs=_MODEL_VERBS
    )
    served_model_name: str | None = _setting(
        None, "name the API knows the model by; without it the folder's name", verbs=(*_DOOR_VERBS, WORKER)
    )
    tool_call_parser: str | None = _one_of(
        None,
        "how the model writes calls of functions; without it as its chat template does",
        (
            "hermes",
            "llama3_json",
            "llama3_json_anywhere",
            "mistral",
            "pythonic",
            "pythonic_anywhere",
            "qwen3_coder",
        ),
        verbs=_DOOR_VERBS,
    )
    dtype: str = _one_of(
        "auto",
        "of weights, activations and KV cache; auto: as stored on a GPU, float32 on a CPU",
        ("auto", "float32", "float16", "bfloat16"),
        verbs=_ENGINE_VERBS,
    )
    max_model_len: int | None = _integer(
        None,
        "longest sequence, prompt and output, in tokens; without it what the model and the memory allow",
        verbs=_MODEL_VERBS,
        low=2,
        high=1 << 24,
    )
    load_format: str = _one_of(
        "safetensors",
        "dummy: random weights of the model's shape, for measuring",
        ("safetensors", "dummy"),
        verbs=(CHECK, BENCH, WORKER, SERVE),
    )
    model_config: str | None = _setting(
        None, "a shape known by name (llama-3.1-8b, ...) in place of a folder's config.json", verbs=(CHECK, BENCH)
    )

    # Engine
    device: str = _one_of("auto", "auto: the GPU where there is one", ("auto", "cpu", "cuda"), verbs=_ENGINE_VERBS)
    block_size: int = _one_of(16, "tokens in a block of the KV cache", (8, 16, 32), verbs=_ENGINE_VERBS)
    gpu_memory_utilization: float = _number(
        0.9,
        "share of the GPU's memory for weights, workspace and KV cache; on a CPU the cache takes at most 2 GiB",
        verbs=_ENGINE_VERBS,
        low=0.05,
        high=0.98,
    )
    num_gpu_blocks: int | None = _integer(
        None, "blocks in the KV cache; without it what the memory holds", verbs=_ENGINE_VERBS, low=1, high=1 << 24
    )
    swap_space: float | None = _number(
        None,
        "host memory for blocks that leave the GPU, in GiB; without it 4 beside a GPU if the host has 32, 0 on a CPU",
        verbs=_ENGINE_VERBS,
        low=0.0,
        high=4096.0,
    )
    preemption_mode: str = _one_of(
        "auto",
        "how sequences leave a full cache: swap copies them to the host, recompute does not, auto does what is cheaper",
        ("auto", "swap", "recompute"),
        verbs=_ENGINE_VERBS,
    )
    enable_prefix_caching: bool = _switch(
        True,
        "keep the blocks of ended requests, and begin others of the same tenant and beginning with them",
        verbs=_ENGINE_VERBS,
    )
    max_num_seqs: int = _integer(256, "sequences that run at once", verbs=_ENGINE_VERBS, low=1, high=4096)
    max_num_batched_tokens: int | None = _integer(
        None,
        "token budget of one step; without it 8192 on a GPU, 512 on a CPU",
        verbs=_ENGINE_VERBS,
        low=1,
        high=1 << 20,
    )
    max_prefill_chunk: int | None = _integer(
        None,
        "prompt tokens of a step while others decode: so many for each open prompt, up to three, and more in a long "
        "queue; without it 512 on a GPU, 128 on a CPU",
        verbs=_STEP_VERBS,
        low=1,
        high=1 << 20,
    )
    tensor_parallel_size: int = _integer(
        1, "GPUs that share one model; 1 is all that works yet", verbs=_ENGINE_VERBS, low=1, high=1
    )
    step_timeout: float | None = _number(
        None,
        "seconds after which a step counts as hung and its worker ends; without it 60 on a GPU, 600 on a CPU",
        verbs=(SERVE, WORKER),
        low=0.5,
        high=86400.0,
    )

    # Queue
    redis_url: str | None = _setting(
        None,
        "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://; its password is better kept in "
        "--redis-password-file; serve starts a server of its own without it",
        verbs=(SERVE, GATEWAY, WORKER),
    )
    redis_password_file: Path | None = _path(
        None,
        "file that holds the password of the URL's user; without it what the URL says",
        verbs=(SERVE, GATEWAY, WORKER),
    )
    data_dir: Path = _path(
        Path(".quire"), "folder of the embedded Redis: its data, log, lock and socket", verbs=(SERVE,)
    )
    producers: tuple[str, ...] = _setting(
        ("default",), "names of the queue producers whose ingress streams are read", verbs=_DOOR_VERBS, parse=names
    )
    drain_timeout: float = _number(
        30.0,
        "seconds that running requests get to finish after SIGTERM",
        verbs=(SERVE, GATEWAY, WORKER),
        low=0.0,
        high=3600.0,
    )
    lease: float = _number(
        10.0,
        "seconds without a heartbeat after which a worker's requests go on elsewhere",
        verbs=(SERVE, WORKER),
        low=0.5,
        high=300.0,
    )
    worker_name: str | None = _setting(
        None,
        "this worker's own, kept over restarts: it takes up at once what it left; without it a new one each time",
        verbs=(WORKER,),
        parse=name,
    )

    # HTTP
    host: str = _setting("127.0.0.1", "address to listen on", verbs=_DOOR_VERBS)
    port: int = _integer(8000, "port to listen on; 0 takes a free one", verbs=_DOOR_VERBS, low=0, high=65535)
    api_key: tuple[str, ...] = _setting(
        (),
        "keys that clients may show, separated by commas; as a flag the host's other users can read it: prefer "
        "--api-key-file or the variable; without it only those of --api-key-file, or none is asked",
        verbs=_DOOR_VERBS,
        parse=keys,
    )
    api_key_file: Path | None = _path(
        None,
        "file of hashed keys, made by `quire key`, read again when it changes; without it only those of --api-key",
        verbs=_DOOR_VERBS,
    )
    allowed_hosts: tuple[str, ...] = _setting(
        (),
        "names that a Host header may hold, with *.some.domain and *; without it addresses, localhost, --host and this "
        "machine's name, and every name where keys are asked for",
        verbs=_DOOR_VERBS,
        parse=hosts,
    )
    ssl_certfile: Path | None = _path(
        None,
        "PEM file of the certificate and its chain, read again when it changes; without it plain HTTP",
        verbs=_DOOR_VERBS,
    )
    ssl_keyfile: Path | None = _path(
        None, "PEM file of its private key; without it in the certificate's file", verbs=_DOOR_VERBS
    )
    probe_port: int | None = _integer(
        None,
        "port where a thread of its own answers /livez and /readyz, whatever else is busy; without it only --port does",
        verbs=_DOOR_VERBS,
        low=0,
        high=65535,
    )
    max_connections: int = _integer(16384, "HTTP connections at once", verbs=_DOOR_VERBS, low=1, high=1 << 20)
    max_connections_per_client: int = _integer(
        8192, "HTTP connections at once from one address", verbs=_DOOR_VERBS, low=1, high=1 << 20
    )
    max_open_per_key: int = _integer(
        8192,
        "requests at once with one key, where its line in --api-key-file says nothing else",
        verbs=_DOOR_VERBS,
        low=1,
        high=1 << 20,
    )
    max_body_bytes: int = _integer(2 << 20, "longest request body, in bytes", verbs=_DOOR_VERBS, low=1024, high=1 << 28)
    max_file_bytes: int = _integer(
        64 << 20, "longest file of batch requests, in bytes; Redis keeps it", verbs=_DOOR_VERBS, low=1024, high=1 << 29
    )
    max_body_bytes_in_flight: int = _integer(
        128 << 20,
        "bytes of request bodies, uploads and downloads in memory at once, at least twice --max-body-bytes; half of it "
        "for one tenant, or one address where no key is asked for",
        verbs=_DOOR_VERBS,
        low=1 << 20,
        high=1 << 40,
    )
    max_stored_bytes_per_tenant: int = _integer(
        512 << 20,
        "bytes that Redis keeps of a tenant's files, batches and responses, and half as many of records of its "
        "requests; more gets 429",
        verbs=_DOOR_VERBS,
        low=1024,
        high=1 << 50,
    )
    queue_memory_share: float = _number(
        0.5,
        "share of Redis' maxmemory, or of its host's memory where it has none, that is the queue's own: what would be "
        "stored in it gets 503",
        verbs=_DOOR_VERBS,
        low=0.05,
        high=0.95,
    )
    request_timeout: float = _number(
        600.0, "seconds after which an unfinished request ends", verbs=_DOOR_VERBS, low=1.0, high=86400.0
    )
    read_timeout: float = _number(
        30.0,
        "seconds that a client has for its headers, and again for its body",
        verbs=_DOOR_VERBS,
        low=0.1,
        high=3600.0,
    )
    write_timeout: float = _number(
        30.0, "seconds that a client may leave an answer unread", verbs=_DOOR_VERBS, low=1.0, high=3600.0
    )
    resume_grace: float = _number(
        30.0,
        "seconds that a resumable request goes on while no client waits for it",
        verbs=_DOOR_VERBS,
        low=0.05,
        high=86400.0,
    )
    response_retention: float = _number(
        86400.0,
        "seconds that a stored response is kept, for whoever asks for it or goes on with it",
        verbs=_DOOR_VERBS,
        low=1.0,
        high=2592000.0,
    )
    enable_embeddings: bool = _switch(
        False, "answer /v1/embeddings with pooled hidden states of the model", verbs=_DOOR_VERBS
    )
    pooling: str = _one_of(
        "mean",
        "what an embedding is made of: the mean of the prompt's final hidden states, or the last of them",
        ("mean", "last"),
        verbs=_DOOR_VERBS,
    )
    max_waiting: int = _integer(
        4096, "jobs that may wait for a worker before new ones get 503", verbs=_DOOR_VERBS, low=1, high=1 << 20
    )
    max_waiting_tokens: int = _integer(
        1 << 22,
        "tokens that waiting jobs may cost before new ones get 503: prompts, and 1024 a branch at most",
        verbs=_DOOR_VERBS,
        low=1,
        high=1 << 40,
    )
    max_waiting_tokens_per_tenant: int = _integer(
        1 << 20, "the same for each tenant, whose new jobs get 429", verbs=_DOOR_VERBS, low=1, high=1 << 40
    )
    max_n: int = _integer(8, "choices that a request may ask of one prompt", verbs=_DOOR_VERBS, low=1, high=32)
    max_request_tokens: int = _integer(
        1 << 20,
        "tokens that one request may cost: its prompts and all it may generate, over all its choices",
        verbs=_DOOR_VERBS,
        low=1,
        high=1 << 31,
    )

    # All
    log_level: str = _one_of("info", "what is logged", ("debug", "info", "warning", "error"), verbs=VERBS)
