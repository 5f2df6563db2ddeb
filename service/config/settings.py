"""Every setting of every command: flag, variable, default, unit and bounds.

`max_num_seqs` comes from the flag `--max-num-seqs`, else from the variable `QUIRE_MAX_NUM_SEQS` (empty counts as
unset), else from the line `max_num_seqs = N` in the TOML file given by `--config` or `QUIRE_CONFIG`, else the default
applies.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from service.config.lora import MAX_SLOTS, RANKS, LoraModules, parse_lora_modules
from service.config.speculative import SpeculativeConfig, parse_speculative_config
from service.config.values import (
    parse_hosts,
    parse_keys,
    parse_model,
    parse_name,
    parse_names,
    parse_object,
    parse_prefix,
    parse_rope_overrides,
    parse_switch,
)

SERVE, GATEWAY, WORKER, CHECK, BENCH = VERBS = ("serve", "gateway", "worker", "check", "bench")
SECTIONS = {"model": "Model", "device": "Engine", "redis_url": "Queue", "host": "HTTP", "log_level": "All"}
"""First setting of each section; the others follow in order."""

_MODEL_VERBS = VERBS
_ENGINE_VERBS = (SERVE, WORKER, CHECK, BENCH)
_STEP_VERBS = (SERVE, WORKER, BENCH)
_GATEWAY_VERBS = (SERVE, GATEWAY)


def _setting(
    default: Any,
    help: str,
    *,
    verbs: Sequence[str],
    parse: Callable[[str], Any] = str,
    bounds: tuple[float, float] | None = None,
    choices: Sequence[Any] | None = None,
) -> Any:
    low, high = bounds or (None, None)
    metadata = {"help": help, "verbs": verbs, "parse": parse, "low": low, "high": high, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


_integer = partial(_setting, parse=int)
_number = partial(_setting, parse=float)
_path = partial(_setting, parse=Path)
_switch = partial(_setting, parse=parse_switch, choices=(True, False))


def _one_of(default: Any, help: str, choices: Sequence[Any], *, verbs: Sequence[str]) -> Any:
    return _setting(default, help, verbs=verbs, parse=type(choices[0]), choices=choices)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one process, validated and frozen. Durations are in seconds."""

    # Model
    model: Path | None = _setting(
        None,
        "a folder, or org/name of a Hugging Face model, read from its cache or downloaded (default: the shipped demo "
        "model)",
        verbs=_MODEL_VERBS,
        parse=parse_model,
    )
    revision: str | None = _setting(
        None, "branch, tag or commit of a model given as org/name (default: main)", verbs=_MODEL_VERBS
    )
    download_dir: Path | None = _path(
        None,
        "folder of the cache of models given as org/name (default: $HF_HUB_CACHE, else $HF_HOME/hub)",
        verbs=_MODEL_VERBS,
    )
    served_model_name: str | None = _setting(
        None,
        "the model's name in the API, and others that requests may use, comma-separated (default: org/name, or the "
        "folder's name)",
        verbs=(*_GATEWAY_VERBS, WORKER),
    )
    chat_template: str | None = _setting(
        None, "file of a Jinja chat template, or its text (default: the model's own)", verbs=_GATEWAY_VERBS
    )
    default_chat_template_kwargs: str | None = _setting(
        None,
        'JSON of chat template variables for requests without them, such as {"enable_thinking": false} (default: {})',
        verbs=_GATEWAY_VERBS,
        parse=parse_object,
    )
    hf_overrides: str | None = _setting(
        None,
        "JSON of config.json's rope_scaling, rope_parameters, rope_theta or max_position_embeddings, such as "
        '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}} (default: '
        "the model's)",
        verbs=_MODEL_VERBS,
        parse=parse_rope_overrides,
    )
    generation_config: str = _setting(
        "auto",
        "folder whose generation_config.json gives the default sampling; auto: the model's; vllm: none",
        verbs=_GATEWAY_VERBS,
    )
    override_generation_config: str | None = _setting(
        None,
        'JSON of default sampling, such as {"temperature": 0.5} (default: only --generation-config)',
        verbs=_GATEWAY_VERBS,
    )
    tool_call_parser: str | None = _one_of(
        None,
        "parser of the model's tool calls (default: chosen by the chat template)",
        (
            "granite",
            "hermes",
            "llama3_json",
            "llama3_json_anywhere",
            "mistral",
            "phi4_mini_json",
            "pythonic",
            "pythonic_anywhere",
            "qwen3_coder",
            "seed_oss",
        ),
        verbs=_GATEWAY_VERBS,
    )
    reasoning_parser: str | None = _one_of(
        None,
        "parser of the model's reasoning; none: leave it in the text (default: chosen by the chat template)",
        ("deepseek_r1", "mistral", "none", "qwen3", "seed_oss"),
        verbs=_GATEWAY_VERBS,
    )
    dtype: str = _one_of(
        "auto",
        "type of weights and activations; auto: as stored on a GPU, float32 on a CPU",
        ("auto", "float32", "float16", "bfloat16"),
        verbs=_ENGINE_VERBS,
    )
    max_model_len: int | None = _integer(
        None,
        "max tokens of a sequence, prompt plus output (default: what model and memory allow)",
        verbs=_MODEL_VERBS,
        bounds=(2, 1 << 24),
    )
    load_format: str = _one_of(
        "safetensors",
        "where weights come from; dummy: random ones of the model's shape, for measuring",
        ("safetensors", "dummy"),
        verbs=(CHECK, BENCH, WORKER, SERVE),
    )
    quantization: str = _one_of(
        "auto",
        "format of the layers' weights; auto: as stored; fp8: 16-bit weights are rounded to 8 bits while loading",
        ("auto", "fp8"),
        verbs=(CHECK, BENCH, WORKER, SERVE),
    )
    kv_cache_dtype: str = _one_of(
        "auto",
        "type of the KV cache; auto: the activations'; fp8 (e4m3): twice the tokens of 16 bits in the same memory",
        ("auto", "fp8", "fp8_e4m3", "float16", "bfloat16"),
        verbs=_ENGINE_VERBS,
    )
    enable_lora: bool = _switch(
        False, "serve LoRA adapters; requests name one in `model`", verbs=(SERVE, GATEWAY, WORKER, CHECK)
    )
    lora_modules: LoraModules = _setting(
        LoraModules(),
        'adapters in PEFT\'s format: name=path, or JSON objects of "name", "path" and "base_model_name", '
        "comma-separated; paths are folders that gateways and workers read, or org/name of a Hugging Face adapter",
        verbs=(*_GATEWAY_VERBS, CHECK),
        parse=parse_lora_modules,
    )
    lora_dir: Path | None = _path(
        None,
        "folder of adapters that POST /v1/load_lora_adapter may load; it enables that route and "
        "/v1/unload_lora_adapter, for all API keys (default: neither)",
        verbs=_GATEWAY_VERBS,
    )
    max_loras: int = _integer(
        1, "max different adapters in a step", verbs=(SERVE, WORKER, CHECK), bounds=(1, MAX_SLOTS)
    )
    max_lora_rank: int = _one_of(16, "max rank of an adapter", RANKS, verbs=(SERVE, GATEWAY, WORKER, CHECK))
    lora_experts: bool = _switch(
        False,
        "serve adapters of experts and routers too: slots have memory for every expert (default: true if an adapter "
        "given at start has such; workers started apart need the flag)",
        verbs=(SERVE, GATEWAY, WORKER, CHECK),
    )
    max_cpu_loras: int | None = _integer(
        None,
        "adapters kept in host memory besides those of open requests (default: --max-loras)",
        verbs=(SERVE, WORKER),
        bounds=(1, 1 << 16),
    )
    model_config: str | None = _setting(
        None,
        "a preset shape (llama-3.1-8b, ...) in place of a folder's config.json (default: --model's)",
        verbs=(CHECK, BENCH),
    )

    # Engine
    device: str = _one_of(
        "auto", "where the model runs; auto: the GPU if there is one", ("auto", "cpu", "cuda"), verbs=_ENGINE_VERBS
    )
    block_size: int = _one_of(16, "tokens per KV block", (8, 16, 32), verbs=_ENGINE_VERBS)
    gpu_memory_utilization: float = _number(
        0.9,
        "share of GPU memory for weights, workspace and KV cache; on a CPU the cache takes at most 2 GiB",
        verbs=_ENGINE_VERBS,
        bounds=(0.05, 0.98),
    )
    num_gpu_blocks: int | None = _integer(
        None, "blocks in the KV cache (default: what the memory holds)", verbs=_ENGINE_VERBS, bounds=(1, 1 << 24)
    )
    swap_space: float | None = _number(
        None,
        "host memory for swapped blocks and evicted prefixes, GiB (default: 4 with a GPU and 32 of memory, else 0)",
        verbs=_ENGINE_VERBS,
        bounds=(0.0, 4096.0),
    )
    preemption_mode: str = _one_of(
        "auto",
        "how preempted sequences are restored: swap their blocks, recompute them, or auto, whichever is cheaper",
        ("auto", "swap", "recompute"),
        verbs=_ENGINE_VERBS,
    )
    enable_prefix_caching: bool = _switch(
        True,
        "reuse the blocks of ended requests for prompts of the same tenant with the same prefix",
        verbs=_ENGINE_VERBS,
    )
    max_num_seqs: int = _integer(256, "max running sequences", verbs=_ENGINE_VERBS, bounds=(1, 4096))
    max_num_batched_tokens: int | None = _integer(
        None,
        "max tokens per step (default: 8192 on a GPU, 512 on a CPU)",
        verbs=_ENGINE_VERBS,
        bounds=(1, 1 << 20),
    )
    max_prefill_chunk: int | None = _integer(
        None,
        "max prefill tokens per step while decodes run, per prompt (up to 3 prompts; more with a long queue; "
        "default: 512 on a GPU, 128 on a CPU)",
        verbs=_STEP_VERBS,
        bounds=(1, 1 << 20),
    )
    speculative_config: SpeculativeConfig | None = _setting(
        None,
        "JSON of how decodes draft tokens, in vLLM's keys: "
        '{"method": "ngram", "num_speculative_tokens": 4} (also suffix, eagle3, draft_model; default: only tokens '
        "that a grammar forces, on a CPU)",
        verbs=_ENGINE_VERBS,
        parse=parse_speculative_config,
    )
    tensor_parallel_size: int = _one_of(
        1,
        "GPUs of one host that the model is divided among, in one process; on a CPU, ranks",
        (1, 2, 4, 8),
        verbs=_ENGINE_VERBS,
    )
    data_parallel_size: int = _integer(
        1,
        "workers, each with the whole model on its own --tensor-parallel-size devices; a request goes to the worker "
        "with its prefix or the most room",
        verbs=(SERVE,),
        bounds=(1, 64),
    )
    step_timeout: float | None = _number(
        None,
        "seconds until a step counts as hung and its worker exits (default: 60 on a GPU, 600 on a CPU)",
        verbs=(SERVE, WORKER),
        bounds=(0.5, 86400.0),
    )

    # Queue
    redis_url: str | None = _setting(
        None,
        "Redis: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://; its password is safer in "
        "--redis-password-file (default: serve starts an embedded server)",
        verbs=(SERVE, GATEWAY, WORKER),
    )
    redis_password_file: Path | None = _path(
        None,
        "file with the password of the URL's user (default: the password in the URL)",
        verbs=(SERVE, GATEWAY, WORKER),
    )
    data_dir: Path = _path(Path(".quire"), "folder of the embedded Redis: data, log, lock and socket", verbs=(SERVE,))
    producers: tuple[str, ...] = _setting(
        ("default",),
        "comma-separated names of queue producers whose ingress streams are read",
        verbs=_GATEWAY_VERBS,
        parse=parse_names,
    )
    drain_timeout: float = _number(
        30.0,
        "seconds for running requests to finish after SIGTERM",
        verbs=(SERVE, GATEWAY, WORKER),
        bounds=(0.0, 3600.0),
    )
    lease: float = _number(
        10.0,
        "seconds without a heartbeat until a worker's requests move to another worker",
        verbs=(SERVE, WORKER),
        bounds=(0.5, 300.0),
    )
    worker_name: str | None = _setting(
        None,
        "name kept over restarts, so that the worker resumes its requests at once (default: new at each start)",
        verbs=(WORKER,),
        parse=parse_name,
    )

    # HTTP
    host: str = _setting("127.0.0.1", "address to listen on", verbs=_GATEWAY_VERBS)
    port: int = _integer(8000, "port to listen on; 0: any free port", verbs=_GATEWAY_VERBS, bounds=(0, 65535))
    api_server_count: int = _integer(
        1, "gateways, a process each, that share --port", verbs=_GATEWAY_VERBS, bounds=(1, 64)
    )
    root_path: str | None = _setting(
        None,
        "prefix that a proxy leaves before every path, such as /llm; paths without it are served too (default: none)",
        verbs=_GATEWAY_VERBS,
        parse=parse_prefix,
    )
    api_key: tuple[str, ...] = _setting(
        (),
        "accepted API keys, comma-separated; as a flag the host's other users can read it: prefer --api-key-file or "
        "the variable (default: only --api-key-file; with neither, no key is required)",
        verbs=_GATEWAY_VERBS,
        parse=parse_keys,
    )
    api_key_file: Path | None = _path(
        None,
        "file of hashed keys, made by `quire key`, reloaded when it changes (default: only --api-key)",
        verbs=_GATEWAY_VERBS,
    )
    allowed_hosts: tuple[str, ...] = _setting(
        (),
        "accepted Host headers, comma-separated; *.domain and * match many (default: addresses, localhost, --host and "
        "this machine's name; any name if keys are required)",
        verbs=_GATEWAY_VERBS,
        parse=parse_hosts,
    )
    ssl_certfile: Path | None = _path(
        None,
        "PEM file of the certificate and its chain, reloaded when it changes (default: plain HTTP)",
        verbs=_GATEWAY_VERBS,
    )
    ssl_keyfile: Path | None = _path(
        None, "PEM file of the private key (default: in --ssl-certfile)", verbs=_GATEWAY_VERBS
    )
    probe_port: int | None = _integer(
        None,
        "port of a separate thread for /livez and /readyz; 0: any free port (default: only --port answers them)",
        verbs=_GATEWAY_VERBS,
        bounds=(0, 65535),
    )
    max_connections: int = _integer(16384, "max HTTP connections", verbs=_GATEWAY_VERBS, bounds=(1, 1 << 20))
    max_connections_per_client: int = _integer(
        8192, "max HTTP connections per client address", verbs=_GATEWAY_VERBS, bounds=(1, 1 << 20)
    )
    max_open_per_key: int = _integer(
        8192,
        "max open requests per API key, unless its line in --api-key-file sets another number",
        verbs=_GATEWAY_VERBS,
        bounds=(1, 1 << 20),
    )
    max_body_bytes: int = _integer(2 << 20, "max bytes of a request body", verbs=_GATEWAY_VERBS, bounds=(1024, 1 << 28))
    max_file_bytes: int = _integer(
        64 << 20, "max bytes of a batch file; Redis stores it", verbs=_GATEWAY_VERBS, bounds=(1024, 1 << 29)
    )
    max_body_bytes_in_flight: int = _integer(
        128 << 20,
        "max bytes of request bodies, uploads and downloads in memory, at least twice --max-body-bytes; half of it per "
        "tenant, or per address if no key is required",
        verbs=_GATEWAY_VERBS,
        bounds=(1 << 20, 1 << 40),
    )
    max_stored_bytes_per_tenant: int = _integer(
        512 << 20,
        "max bytes stored in Redis per tenant: files, batches and responses; half as many again for records of its "
        "requests; more get 429",
        verbs=_GATEWAY_VERBS,
        bounds=(1024, 1 << 50),
    )
    queue_memory_share: float = _number(
        0.5,
        "share of Redis' maxmemory, or of its host's memory if it has none, reserved for the queue; files and "
        "responses that would need it get 503",
        verbs=_GATEWAY_VERBS,
        bounds=(0.05, 0.95),
    )
    request_timeout: float = _number(600.0, "max seconds of a request", verbs=_GATEWAY_VERBS, bounds=(1.0, 86400.0))
    read_timeout: float = _number(
        30.0,
        "max seconds to receive a request's headers, and again for its body",
        verbs=_GATEWAY_VERBS,
        bounds=(0.1, 3600.0),
    )
    write_timeout: float = _number(
        30.0, "max seconds that a client may leave an answer unread", verbs=_GATEWAY_VERBS, bounds=(1.0, 3600.0)
    )
    resume_grace: float = _number(
        30.0,
        "seconds that a resumable request continues without a client",
        verbs=_GATEWAY_VERBS,
        bounds=(0.05, 86400.0),
    )
    response_retention: float = _number(
        86400.0,
        "seconds that a stored response is kept",
        verbs=_GATEWAY_VERBS,
        bounds=(1.0, 2592000.0),
    )
    enable_embeddings: bool = _switch(
        False, "serve /v1/embeddings: the model's pooled hidden states", verbs=_GATEWAY_VERBS
    )
    pooling: str = _one_of(
        "mean",
        "which final hidden states make an embedding: their mean over the prompt, or the last",
        ("mean", "last"),
        verbs=_GATEWAY_VERBS,
    )
    max_waiting: int = _integer(4096, "max waiting jobs; more get 503", verbs=_GATEWAY_VERBS, bounds=(1, 1 << 20))
    max_waiting_tokens: int = _integer(
        1 << 22,
        "max tokens of waiting jobs, prompts plus at most 1024 per branch; more get 503",
        verbs=_GATEWAY_VERBS,
        bounds=(1, 1 << 40),
    )
    max_waiting_tokens_per_tenant: int = _integer(
        1 << 20,
        "max tokens of one tenant's waiting jobs, counted likewise; more get 429",
        verbs=_GATEWAY_VERBS,
        bounds=(1, 1 << 40),
    )
    max_n: int = _integer(8, "max choices per prompt (`n` and `best_of`)", verbs=_GATEWAY_VERBS, bounds=(1, 32))
    max_request_tokens: int = _integer(
        1 << 20,
        "max tokens of one request: prompts plus max_tokens, over all choices",
        verbs=_GATEWAY_VERBS,
        bounds=(1, 1 << 31),
    )

    # All
    log_level: str = _one_of(
        "info", "least severe level that is logged", ("debug", "info", "warning", "error"), verbs=VERBS
    )

    @property
    def config_overrides(self) -> dict[str, Any]:
        """Fields that override config.json's."""
        return json.loads(self.hf_overrides) if self.hf_overrides is not None else {}

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names in the API; responses and metrics use the first."""
        given = (name.strip() for name in (self.served_model_name or "").split(","))
        return tuple(filter(None, given)) or ((self.model or Path()).name,)
