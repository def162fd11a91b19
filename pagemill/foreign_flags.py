"""Flags of other servers that people type here out of habit, each with what does the same, or with a plain no.

A guess by spelling would lead nowhere for these. Flags whose names need no explanation, being ours spelled a little
differently, are not listed: spelling finds them. Must not know how a command line is parsed.
"""

from __future__ import annotations

_NO_SPECULATION = "speculative decoding is not in this version"
_NO_ADAPTERS = "adapters are not in this version"
_NO_TOOLS = "tools and constrained output are not in this version"
_NO_TLS = "HTTPS is a reverse proxy's work"
_NO_GRAPHS = "there is nothing to turn off: no CUDA graphs, no compilation"
_ONE_COPY = "there is one copy of the model, shared by the ranks of --tensor-parallel-size on one machine; for more, run more servers"
_OWN_TOKENIZER = "a model is served with the tokenizer and the template in its own folder"
_POOL = "size the KV pool with --kv-cache-memory or --num-blocks"
_CHUNKS = "prompts are always computed in chunks; --max-num-batched-tokens bounds a step"
_MODEL = "the model is given as an argument: pagemill serve MODEL"
_LOADING = "weights come from safetensors or GGUF, whichever the model has, and --dtype says what they are computed in"
_REQUEST_LOG = "prompts and outputs are logged with --log-requests only"

_ADVICE: dict[str, tuple[str, ...]] = {
    _MODEL: ("--model", "--model-path", "--model-id", "--hf-repo"),
    _OWN_TOKENIZER: ("--tokenizer", "--tokenizer-path", "--tokenizer-mode", "--chat-template", "--chat-template-content-format"),
    "code that comes with a model is never run, so there is nothing to trust": ("--trust-remote-code",),
    "a folder pins a model's version: pass one": ("--revision", "--code-revision", "--tokenizer-revision"),
    "models lie under the variable PAGEMILL_HOME, and in Hugging Face's cache": ("--download-dir",),
    "set the variable HF_TOKEN": ("--hf-token",),
    _LOADING: ("--quantization", "-q", "--load-format", "--kv-cache-dtype", "--quantization-param-path"),
    "config.json of the model says it": ("--rope-scaling", "--rope-theta", "--hf-overrides", "--json-model-override-args"),
    "what a request leaves open is in generation_config.json of the model": ("--generation-config", "--override-generation-config"),
    "a request has its own `seed`": ("--seed", "--random-seed"),
    "use --max-model-len": ("--context-length", "--max-total-tokens", "--ctx-size", "--max-input-length"),
    "use --tensor-parallel-size": ("--tp", "--tp-size", "--num-shard"),
    _ONE_COPY: (
        "--pipeline-parallel-size", "-pp", "--pp-size", "--data-parallel-size", "-dp", "--dp", "--dp-size", "--enable-expert-parallel", "--ep-size",
        "--expert-parallel-size", "--nnodes", "--node-rank", "--dist-init-addr", "--distributed-executor-backend",
    ),
    _POOL: ("--gpu-memory-utilization", "--mem-fraction-static", "--max-total-tokens-in-pool"),
    "use --block-size": ("--page-size",),
    "use --no-prefix-caching": ("--disable-radix-cache", "--disable-prefix-caching"),
    "use --swap-memory": ("--swap-space", "--kv-offloading-size", "--kv-transfer-config", "--enable-hierarchical-cache", "--hicache-size", "--hicache-ratio"),
    "weights stay where the model runs; --swap-memory is for KV": ("--cpu-offload-gb",),
    "use --preemption": ("--preemption-mode",),
    "use --max-num-seqs": ("--max-running-requests", "--max-batch-size", "--max-concurrent-requests", "--parallel"),
    "16 sequences may wait for each seat of --max-num-seqs": ("--max-queued-requests",),
    "use --max-num-batched-tokens": ("--max-prefill-tokens", "--max-batch-prefill-tokens"),
    _CHUNKS: (
        "--enable-chunked-prefill", "--no-enable-chunked-prefill", "--chunked-prefill-size", "--long-prefill-token-threshold", "--max-num-partial-prefills",
    ),
    "use --scheduling-policy": ("--schedule-policy", "--schedule-conservativeness"),
    "use --scheduling-policy priority": ("--enable-priority-scheduling",),
    "use --max-plans-in-flight 2": ("--async-scheduling",),
    "use --max-plans-in-flight 1, the default": ("--no-async-scheduling", "--disable-overlap-schedule"),
    "use --deterministic": ("--enable-deterministic-inference",),
    "use --step-timeout": ("--watchdog-timeout",),
    "use --frontends": ("--api-server-count", "--tokenizer-worker-num"),
    "keys are never on a command line, which others can read: use --api-key-file or the variable PAGEMILL_API_KEY": ("--api-key",),
    "use --admin-key-file": ("--admin-api-key",),
    _NO_TLS: ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs"),
    _REQUEST_LOG: ("--disable-log-requests", "--enable-log-requests", "--no-enable-log-requests", "--max-log-len"),
    "use --log-level": ("--uvicorn-log-level", "--log-level-http", "--disable-uvicorn-access-log", "--disable-log-stats"),
    "/metrics is always there": ("--enable-metrics",),
    _NO_GRAPHS: ("--enforce-eager", "--disable-cuda-graph", "--compilation-config", "-O", "--cuda-graph-max-bs", "--attention-backend"),
    _NO_SPECULATION: (
        "--speculative-model", "--speculative-config", "--num-speculative-tokens", "--speculative-algorithm", "--speculative-algo",
        "--speculative-draft-model-path", "--speculative-num-steps", "--speculative-num-draft-tokens",
    ),
    _NO_ADAPTERS: ("--enable-lora", "--lora-modules", "--lora-paths", "--max-loras", "--max-lora-rank", "--max-loras-per-batch"),
    _NO_TOOLS: (
        "--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser", "--grammar-backend", "--guided-decoding-backend",
        "--structured-outputs-config", "--enable-reasoning",
    ),
}  # fmt: skip
_BY_FLAG = {flag: advice for advice, flags in _ADVICE.items() for flag in flags}


def advice_on(flag: str) -> str:
    """What to do instead of giving this flag, "" if it is known from nowhere. Underscores are dashes, as some servers read them."""
    return _BY_FLAG.get(flag.replace("_", "-"), "")
