"""Flags of `vllm serve` that are not settings here: accepted without effect, or refused with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Values(Enum):
    """Number of words that follow a flag."""

    NONE = 0
    ONE = 1
    SWITCH = 2  # none, or true or false
    SEVERAL = 3  # all words up to the next flag


@dataclass(frozen=True)
class VllmFlag:
    name: str
    values: Values
    note: str  # why it has no effect; logged once
    reason: str  # why it is refused, and the alternative
    accepted: tuple[str, ...] = ()  # values accepted without effect; others are refused

    def is_accepted(self, value: str | None) -> bool:
        return bool(self.note) if not self.accepted else value is not None and value.lower() in self.accepted


def _rows(names: str, values: Values, note: str = "", reason: str = "", *accepted: str) -> list[VllmFlag]:
    return [VllmFlag(name, values, note, reason, accepted) for name in names.split()]


LOCAL_WORKERS = "data-parallel-size-local"
"""Accepted if it equals --data-parallel-size."""

TOKENIZER = "tokenizer"
"""Accepted if it equals the model."""

_NONE, _ONE, _SWITCH, _SEVERAL = Values.NONE, Values.ONE, Values.SWITCH, Values.SEVERAL
_TEXT = "only text models are served"
_COMPILED = "nothing is compiled at start; kernels are chosen per shape, and decode steps run in CUDA graphs"
_KERNELS = "kernels are chosen per shape and measured"
_ONE_HOST = "a model runs on one host; for more requests use --data-parallel-size, or a `quire worker` on other hosts"
_TARGETS = "all layers' projections may be adapted; an adapter's own target_modules decide"
_DRAFTS = "use --speculative-config"
_NO_CODE = "no code is loaded from a flag"
_FOLDER = "the folder's Hugging Face files are read"
_EDIT = "edit config.json in a copy of the folder"
_EXPERTS = "every device has a part of each expert (--tensor-parallel-size)"
_LAYERS = "no model served has such layers"
_DEVICE = "weights stay on the device; --quantization fp8 halves them"
_OTHER_HARDWARE = "it is for other hardware"
_METRICS = "/metrics has what is measured"
_NOT_LOGGED = "requests are not logged"
_PREFIXES = "a prompt reuses all blocks of a common prefix, and the start of the next one"
_RESTARTED = "a crashed worker is restarted, and its requests continue"
_ORIGINS = "pages of other origins may call the service with an API key (--api-key-file), and no others"

ALREADY_SO = [
    *_rows("trust-remote-code", _SWITCH, "no code of a model is ever run; supported models are built in"),
    *_rows("code-revision", _ONE, "no code of a model is ever run"),
    *_rows("enable-auto-tool-choice", _SWITCH, "tools are always on; the chat template selects their parser"),
    *_rows("enable-chunked-prefill", _SWITCH, "prompts are always chunked", "prompts are always chunked", "true"),
    *_rows("async-scheduling no-async-scheduling", _SWITCH, "the next step is always planned while one runs"),
    *_rows("enforce-eager", _SWITCH, _COMPILED),
    *_rows(
        "compilation-config optimization-level max-cudagraph-capture-size max-seq-len-to-capture",
        _ONE, _COMPILED,
    ),
    *_rows("cuda-graph-sizes cudagraph-capture-sizes", _SEVERAL, _COMPILED),
    *_rows("max-context-len-to-capture", _ONE, _COMPILED),
    *_rows("attention-backend moe-backend linear-backend attention-config kernel-config all2all-backend", _ONE,
           _KERNELS),
    *_rows("ir-op-priority gdn-prefill-backend kda-prefill-backend", _ONE, _KERNELS),
    *_rows(
        "enable-flashinfer-autotune disable-cascade-attn disable-custom-all-reduce specialize-active-lora "
        "kv-sharing-fast-prefill enable-bf16x3-router-gemm enable-batch-sharded-sampling",
        _SWITCH, _KERNELS,
    ),
    *_rows("enable-dbo", _SWITCH, "a step runs whole"),
    *_rows("ubatch-size dbo-decode-token-threshold dbo-prefill-token-threshold", _ONE, "a step runs whole"),
    *_rows("enable-expert-parallel enable-eplb eplb-log-balancedness enable-ep-weight-filter", _SWITCH, _EXPERTS),
    *_rows("eplb-config eplb-window-size eplb-step-interval num-redundant-experts expert-placement-strategy", _ONE,
           _EXPERTS),
    *_rows("cp-kv-cache-interleave-size dcp-kv-cache-interleave-size", _ONE, "ranks divide heads, not tokens"),
    *_rows("dcp-q-replicate", _SWITCH, "ranks divide heads, not tokens"),
    *_rows("disable-nccl-for-dp-synchronization", _SWITCH, "workers run without each other"),
    *_rows("dp-sync-interval", _ONE, "workers run without each other"),
    *_rows("enable-fault-tolerance", _SWITCH, _RESTARTED),
    *_rows("fault-tolerance-config", _ONE, _RESTARTED),
    *_rows("enable-cumem-allocator", _SWITCH, "memory is reserved once, at start"),
    *_rows("use-v2-block-manager disable-hybrid-kv-cache-manager", _SWITCH, "one pool of blocks holds all layers"),
    *_rows("prefix-caching-hash-algo", _ONE, "prefixes are compared by their tokens"),
    *_rows("prefix-match-unit prefix-cache-retention-interval", _ONE, _PREFIXES),
    *_rows("scheduling-policy", _ONE, "tenants take turns, and `priority` orders a tenant's requests"),
    *_rows("guided-decoding-backend structured-outputs-config", _ONE, "llguidance compiles every grammar"),
    *_rows("disable-log-requests no-enable-log-requests disable-log-stats disable-uvicorn-access-log enable-log-deltas",
           _SWITCH, _NOT_LOGGED),
    *_rows("max-log-len disable-access-log-for-endpoints", _ONE, _NOT_LOGGED),
    *_rows("log-error-stack", _SWITCH, "tracebacks are in the log; answers have an incident number"),
    *_rows("aggregate-engine-logging", _SWITCH, "all processes log to one stream"),
    *_rows("fail-on-environ-validation", _SWITCH, "an unknown QUIRE_ variable is always refused"),
    *_rows("renderer-num-workers tokenizer-pool-size tokenizer-pool-type tokenizer-pool-extra-config", _ONE,
           "texts are tokenised in four threads"),
    *_rows("enable-prompt-tokens-details", _SWITCH, "usage.prompt_tokens_details is always sent"),
    *_rows("enable-request-id-headers", _SWITCH, "X-Request-Id is always sent"),
    *_rows("enable-reasoning", _SWITCH, "reasoning is separated where the chat template has it (--reasoning-parser)"),
    *_rows("num-scheduler-steps num-lookahead-slots scheduler-delay-factor", _ONE, "a step is planned at a time"),
    *_rows("multi-step-stream-outputs disable-async-output-proc", _SWITCH, "each step's tokens are sent"),
    *_rows("worker-use-ray engine-use-ray ray-workers-use-nsight", _SWITCH, "one process runs all ranks"),
    *_rows("calculate-kv-scales", _SWITCH, "scales of an fp8 cache are the checkpoint's, else measured at start"),
    *_rows("guided-decoding-disable-fallback", _SWITCH, "llguidance compiles every grammar"),
    *_rows("use-tqdm-on-load", _SWITCH, "loading shows its progress"),
    *_rows("lora-extra-vocab-size", _ONE, "adapters with tokens of their own are refused when they are read"),
    *_rows("enable-ssl-refresh", _SWITCH, "certificates are reloaded when they change"),
    *_rows("ignore-patterns", _SEVERAL, "only served files are downloaded"),
    *_rows(
        "safetensors-load-strategy safetensors-prefetch-block-size safetensors-prefetch-num-threads "
        "model-loader-extra-config "
        "max-parallel-loading-workers pt-load-map-location",
        _ONE, "tensors are read in parallel from safetensors",
    ),
    *_rows(
        "language-model-only skip-mm-profiling disable-chunked-mm-input disable-mm-preprocessor-cache "
        "interleave-mm-strings enable-flash-late-interaction enable-tower-connector-lora mm-device-do-normalize "
        "enable-multimodal-encoder-data-parallel enable-mm-processor-stats",
        _SWITCH, _TEXT,
    ),
    *_rows("allowed-media-domains", _SEVERAL, _TEXT),
    *_rows(
        "limit-mm-per-prompt mm-processor-cache-gb mm-processor-cache-type mm-processor-kwargs mm-encoder-tp-mode "
        "mm-encoder-attn-backend media-io-kwargs allowed-local-media-path video-pruning-rate "
        "mm-shm-cache-max-object-size-mb mm-tensor-ipc mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path "
        "mm-encoder-fp8-scale-save-margin mm-encoder-attn-dtype mm-hasher-algorithm mm-ipc-gpu-memory-gb "
        "mm-processor-device video-pruning-method",
        _ONE, _TEXT,
    ),
    *_rows(
        "mamba-ssm-cache-dtype mamba-cache-dtype mamba-cache-mode mamba-block-size mamba-backend "
        "mamba-cache-philox-rounds mamba-ssu-algorithm replayssm-buffer-len",
        _ONE, _LAYERS,
    ),
    *_rows("enable-mamba-cache-stochastic-rounding use-replayssm", _SWITCH, _LAYERS),
    *_rows("lora-target-modules", _SEVERAL, _TARGETS),
    *_rows("seed", _ONE, "weights are not random, and a request brings its own `seed`"),
    *_rows("disable-frontend-multiprocessing", _SWITCH, "the gateway is a process of its own"),
    *_rows("kv-offloading-backend", _ONE, "--swap-space is host memory", "--swap-space is host memory", "native"),
]  # fmt: skip

CONDITIONAL = [
    *_rows("tokenizer-mode config-format", _ONE, _FOLDER, "tokenizer.json and config.json are read (leave it out)",
           "auto", "hf", "fast", "mistral"),
    *_rows("model-impl", _ONE, "supported models are built in", "supported models are built in", "auto", "vllm"),
    *_rows("task runner convert", _ONE, "the model generates", "embeddings come with --enable-embeddings",
           "auto", "generate", "none"),
    *_rows("pipeline-parallel-size decode-context-parallel-size prefill-context-parallel-size nnodes", _ONE,
           "it is 1", _ONE_HOST, "1"),
    *_rows(LOCAL_WORKERS, _ONE, "all workers of --data-parallel-size run on this host",
           "all workers of --data-parallel-size run on this host; other hosts run `quire worker`", "1"),
    *_rows("data-parallel-rank data-parallel-start-rank node-rank", _ONE, "it is 0", _ONE_HOST, "0"),
    *_rows("distributed-executor-backend", _ONE, "one process runs all ranks", _ONE_HOST, "mp", "uni"),
    *_rows("data-parallel-backend", _ONE, "each worker is a process of this host", _ONE_HOST, "mp"),
    *_rows("watermark", _ONE, "blocks are taken as prompts are computed", "blocks are taken as prompts are computed "
           "(0)", "0", "0.0"),
    *_rows("cpu-offload-gb", _ONE, "weights stay on the device", _DEVICE, "0", "0.0"),
    *_rows("offload-backend", _ONE, "weights stay on the device", _DEVICE, "auto"),
    *_rows("performance-mode", _ONE, "steps are sized by the load",
           "use --max-num-batched-tokens and --max-prefill-chunk", "balanced"),
    *_rows("fingerprint-mode", _ONE, "system_fingerprint is a hash of the model's config and name",
           "system_fingerprint is a hash of the model's config and name (full, hash)", "full", "hash"),
    *_rows("logprobs-mode", _ONE, "log-probabilities are of the model's own logits",
           "log-probabilities are of the model's own logits (raw_logprobs)", "raw_logprobs"),
    *_rows("max-logprobs", _ONE, "up to 20 log-probabilities are sent", "at most 20 log-probabilities are sent",
           *map(str, range(21))),
    *_rows("response-role", _ONE, "answers have this role", "answers have the role assistant", "assistant"),
    *_rows("chat-template-content-format", _ONE, "the template gets what it reads", "the template gets what it reads "
           "(auto)", "auto"),
    *_rows("ssl-cert-reqs", _ONE, "clients need no certificate", "clients are known by keys, not certificates", "0"),
    *_rows("stream-interval", _ONE, "each step's tokens are sent", "each step's tokens are sent (1)", "1"),
    *_rows("lora-dtype", _ONE, "adapters have the activations' type",
           "adapters have the activations' type (auto)", "auto"),
]  # fmt: skip

REFUSED = [
    *_rows(
        "speculative-model num-speculative-tokens speculative-draft-tensor-parallel-size speculative-max-model-len "
        "speculative-disable-by-batch-size speculative-model-quantization ngram-prompt-lookup-max "
        "ngram-prompt-lookup-min spec-decoding-acceptance-method typical-acceptance-sampler-posterior-threshold "
        "typical-acceptance-sampler-posterior-alpha",
        _ONE, reason=_DRAFTS,
    ),
    *_rows("speculative-disable-mqa-scorer disable-logprobs-during-spec-decoding", _SWITCH, reason=_DRAFTS),
    *_rows("fully-sharded-loras", _SWITCH,
           reason="ranks have all of an adapter's A for q, k, v, gate and up (leave it out)"),
    *_rows("default-mm-loras", _ONE, reason=_TEXT),
    *_rows("enable-prompt-adapter", _SWITCH, reason="prompt adapters are not served (--lora-modules)"),
    *_rows("prompt-adapters max-prompt-adapters max-prompt-adapter-token", _SEVERAL,
           reason="prompt adapters are not served (--lora-modules)"),
    *_rows(
        "data-parallel-address data-parallel-rpc-port "
        "master-addr master-port dcp-comm-backend data-parallel-supervisor-port "
        "dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s dp-supervisor-probe-failure-threshold",
        _ONE, reason=_ONE_HOST,
    ),
    *_rows("headless data-parallel-hybrid-lb data-parallel-external-lb", _SWITCH, reason=_ONE_HOST),
    *_rows("enable-elastic-ep data-parallel-multi-port-external-lb", _SWITCH, reason=_ONE_HOST),
    *_rows("no-enable-chunked-prefill", _NONE, reason="prompts are always chunked (--max-num-batched-tokens)"),
    *_rows("kv-transfer-config kv-events-config ec-transfer-config ec-manager-config", _ONE,
           reason="blocks are not sent between servers; workers share requests through Redis"),
    *_rows("weight-transfer-config", _ONE, reason="a worker's weights are its folder's: start another worker"),
    *_rows("kv-cache-memory-bytes", _ONE, reason="use --gpu-memory-utilization or --num-gpu-blocks"),
    *_rows("kv-cache-dtype-skip-layers", _SEVERAL, reason="all layers have --kv-cache-dtype"),
    *_rows("quantization-param-path", _ONE, reason="scales of an fp8 cache are the checkpoint's, else measured"),
    *_rows("num-cpu-blocks-override", _ONE, reason="use --swap-space"),
    *_rows("offload-group-size offload-num-in-group offload-prefetch-step", _ONE, reason=_DEVICE),
    *_rows("offload-params cpu-offload-params", _SEVERAL, reason=_DEVICE),
    *_rows("long-prefill-token-threshold max-num-partial-prefills max-long-partial-prefills "
           "prefill-schedule-interval", _ONE,
           reason="use --max-prefill-chunk"),
    *_rows("max-num-scheduled-tokens", _ONE, reason="use --max-num-batched-tokens"),
    *_rows("max-num-prefill-seqs", _ONE, reason="use --max-prefill-chunk"),
    *_rows("scheduler-reserve-full-isl", _SWITCH, reason="blocks are taken as prompts are computed"),
    *_rows("distributed-timeout-seconds cpu-distributed-timeout-seconds", _ONE, reason="use --step-timeout"),
    *_rows("numa-bind", _SWITCH, reason="start it under numactl"),
    *_rows("numa-bind-cpus numa-bind-nodes", _SEVERAL, reason="start it under numactl"),
    *_rows("qlora-adapter-name-or-path", _ONE, reason="use --lora-modules"),
    *_rows("enable-lora-bias", _SWITCH, reason="adapters with biases are not served"),
    *_rows("long-lora-scaling-factors", _SEVERAL, reason="an adapter's own config has its scale"),
    *_rows("skip-tokenizer-init", _SWITCH, reason="the gateway always has the tokenizer; prompts may be token ids"),
    *_rows("enable-prompt-embeds", _SWITCH, reason="prompts are texts or token ids"),
    *_rows("enable-mm-embeds mm-encoder-only", _SWITCH, reason=_TEXT),
    *_rows("enable-return-routed-experts", _SWITCH, reason="answers do not name experts"),
    *_rows("enable-per-request-metrics", _SWITCH,
           reason="answers have no times; spans describe each request (deploy/README.md)"),
    *_rows("fingerprint-value", _ONE, reason="system_fingerprint is a hash of the model's config and name"),
    *_rows("cohere-is-reasoning-model", _SWITCH, reason="Cohere's API is not served"),
    *_rows("cohere-format", _ONE, reason="Cohere's API is not served"),
    *_rows("guided-decoding-disable-any-whitespace", _SWITCH, reason="send guided_whitespace_pattern"),
    *_rows("guided-decoding-disable-additional-properties", _SWITCH, reason="send additionalProperties: false"),
    *_rows("h11-max-incomplete-event-size", _ONE, reason="use --max-body-bytes; headers have a fixed bound"),
    *_rows("h11-max-header-count", _ONE, reason="headers have a fixed bound"),
    *_rows("allow-deprecated-quantization", _SWITCH, reason="a folder's format is served or refused by name"),
    *_rows("override-attention-dtype", _ONE, reason="use --dtype"),
    *_rows(f"{TOKENIZER} tokenizer-revision hf-config-path", _ONE, reason="the model's folder has its tokenizer"),
    *_rows("model-class-overrides", _ONE, reason="supported models are built in"),
    *_rows("quantization-config", _ONE, reason="the folder's config has the format; --quantization fp8 rounds 16 bits"),
    *_rows("device-ids", _ONE, reason="set CUDA_VISIBLE_DEVICES"),
    *_rows("use-fp64-gumbel", _SWITCH, reason="the sampler computes in float32"),
    *_rows("enable-mixed-moe-lora-format enable-moe-shared-loras", _SWITCH,
           reason="adapters of experts are not served (attention and dense layers)"),
    *_rows("disable-sliding-window", _SWITCH, reason=_EDIT),
    *_rows("hf-token", _ONE, reason="set HF_TOKEN: other users of this host can read flags"),
    *_rows("reasoning-config", _ONE, reason="send the budget with each request"),
    *_rows("exclude-tools-when-tool-choice-none return-tokens-as-token-ids trust-request-chat-template "
           "return-sampling-mask", _SWITCH,
           reason="answers would differ, and that form is not served"),
    *_rows("enable-force-include-usage", _SWITCH, reason="send stream_options.include_usage with each request"),
    *_rows("enable-log-requests enable-log-outputs", _SWITCH,
           reason="requests are not logged; spans describe each (deploy/README.md)"),
    *_rows("log-config-file", _ONE, reason="use --log-level"),
    *_rows("otlp-traces-endpoint collect-detailed-traces", _ONE, reason="set OTEL_EXPORTER_OTLP_ENDPOINT"),
    *_rows("enable-server-load-tracking", _SWITCH, reason="/metrics has the load"),
    *_rows("kv-cache-metrics cudagraph-metrics enable-mfu-metrics enable-logging-iteration-details "
           "per-request-spec-decode-metrics enable-trace-replay jit-monitor-verbose", _SWITCH,
           reason=_METRICS),
    *_rows("kv-cache-metrics-sample show-hidden-metrics-for-version jit-monitor-mode", _ONE, reason=_METRICS),
    *_rows("profiler-config", _ONE, reason="start the worker under a profiler such as nsys"),
    *_rows("enable-layerwise-nvtx-tracing", _SWITCH, reason="start the worker under a profiler such as nsys"),
    *_rows("enable-tokenizer-info-endpoint tokens-only disable-fastapi-docs enable-offline-docs", _SWITCH,
           reason="the routes are fixed; block paths at the proxy"),
    *_rows("uds", _ONE, reason="use --host and --port"),
    *_rows("ssl-ca-certs", _ONE, reason="clients are known by keys, not certificates"),
    *_rows("ssl-ciphers", _ONE, reason="the ciphers are Python's"),
    *_rows("allowed-origins allowed-methods allowed-headers", _ONE, reason=_ORIGINS),
    *_rows("allow-credentials", _SWITCH, reason=_ORIGINS),
    *_rows(
        "middleware tool-parser-plugin tool-call-parser-plugin reasoning-parser-plugin worker-cls worker-extension-cls "
        "scheduler-cls io-processor-plugin logits-processor-pattern",
        _ONE, reason=_NO_CODE,
    ),
    *_rows("logits-processors", _SEVERAL, reason=_NO_CODE),
    *_rows("tool-server", _ONE, reason="tools run in the client"),
    *_rows("enable-sleep-mode enable-nccl-comm-suspend", _SWITCH,
           reason="stop the worker: requests wait in the queue until one starts"),
    *_rows("override-pooler-config pooler-config", _ONE, reason="use --pooling"),
    *_rows("grpc", _SWITCH, reason="use HTTP, or Redis (--producers)"),
    *_rows("additional-config override-neuron-config", _ONE, reason=_OTHER_HARDWARE),
    *_rows("use-padding-aware-scheduling", _SWITCH, reason=_OTHER_HARDWARE),
    *_rows("omni use-hsdp vae-use-tiling enable-layerwise-offload enable-cpu-offload "
           "enable-distributed-layerwise-offload dlo-no-use-allgather no-async-chunk", _SWITCH, reason=_TEXT),
    *_rows("task-type deploy-config diffusion-attention-backend usp ring num-gpus model-class-name "
           "vae-patch-parallel-size vae-parallel-mode text-encoder-tp-size ulysses-degree cfg-parallel-size "
           "hsdp-shard-size init-timeout stage-init-timeout diffusion-config dlo-resident-layers", _ONE,
           reason=_TEXT),
]  # fmt: skip

VLLM_FLAGS = {flag.name: flag for flag in (*ALREADY_SO, *CONDITIONAL, *REFUSED)}

RENAMED = {
    "-tp": "--tensor-parallel-size",
    "--tensor-parallel": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dc": "--diffusion-config",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-ac": "--attention-config",
    "-cc": "--compilation-config",
    "-O": "--compilation-config",
    "-asc": "--api-server-count",
    "--rope-scaling": "--hf-overrides.rope_scaling",
    "--rope-theta": "--hf-overrides.rope_theta",
    "--spec-method": "--speculative-config.method",
    "--spec-model": "--speculative-config.model",
    "--spec-tokens": "--speculative-config.num_speculative_tokens",
    "--max-num-queued-reqs": "--max-waiting",
    "--max-num-queued-tokens": "--max-waiting-tokens",
    "--num-gpu-blocks-override": "--num-gpu-blocks",
    "--kv-offloading-size": "--swap-space",
    "--shutdown-timeout": "--drain-timeout",
    "--uvicorn-log-level": "--log-level",
}
"""vLLM's spellings and the equivalent flags."""

VARIABLES = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "--hf-overrides.max_position_embeddings",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "--lora-dir",
    "VLLM_CPU_KVCACHE_SPACE": "--num-gpu-blocks",
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": "--step-timeout",
    "VLLM_LOGGING_LEVEL": "--log-level",
    "VLLM_USE_MODELSCOPE": "HF_ENDPOINT",
}
"""vLLM's variables that have no effect, and their replacements."""
