"""From what the operator wrote to what each process receives: options, model and machine in, configs out.

Every `auto` is decided here and nowhere else, and every combination that cannot work is refused in one
line. Pure: nothing is measured, opened or started.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from pagemill.config import Device, Dtype, FrontendConfig, SchedulerConfig, ServeOptions, WorkerConfig
from pagemill.errors import UsageError
from pagemill.injection import parse_fault
from pagemill.machine import Machine
from pagemill.memory_plan import MemoryPlan, MemoryRequest, overhead_in_memory, plan_memory, plan_swap_for, rank_block_bytes
from pagemill.model_info import ModelInfo
from pagemill.swap_plan import SwapPlan
from pagemill.tensor_parallel import check_divides
from pagemill.threads import rank_cpus, worker_threads

#: Waiting sequences per seat in a step; more are refused with 429, for they would time out anyway.
_QUEUE_PER_SEAT = 16
#: Prompt tokens that may wait, in full steps.
_QUEUED_STEPS = 1024
#: A token of a long context on a slow machine takes a fraction of this.
_STEP_TIMEOUT_S_PER_TOKEN: dict[Device, float] = {"cpu": 0.1, "cuda": 0.01}


@dataclass(frozen=True)
class Model:
    """A model that lies on this machine."""

    name: str
    path: Path  #: folder in Hugging Face layout
    gguf_path: Path | None  #: where the same weights lie as GGUF
    fingerprint: bytes
    info: ModelInfo


@dataclass(frozen=True)
class Secrets:
    """What never stands on a command line, in an environment or in a log."""

    api_keys: tuple[str, ...]
    admin_keys: tuple[str, ...]
    cache_secret: bytes

    def __repr__(self) -> str:
        return "Secrets(***)"


@dataclass(frozen=True)
class Settings:
    """Everything decided."""

    device: Device
    dtype: Dtype
    plan: MemoryPlan | None  #: on CUDA the worker measures the card
    swap: SwapPlan
    frontend: FrontendConfig
    scheduler: SchedulerConfig
    workers: tuple[WorkerConfig, ...]  #: by rank


def check_options(options: ServeOptions, policies: dict[str, bool]) -> None:
    """What is wrong whatever the model. `policies` are the known ones: name -> reads priorities. Raises UsageError."""
    if policies and options.scheduling_policy not in policies:
        raise UsageError(f"--scheduling-policy accepts one of {', '.join(sorted(policies))}; not {options.scheduling_policy!r}")
    if options.block_size & (options.block_size - 1):
        raise UsageError(f"--block-size accepts auto or a power of two up to 256; not {options.block_size}")
    if options.max_model_len == 1:
        raise UsageError("--max-model-len accepts auto or at least 2, one token in and one out; not 1")
    check_pairs(options)
    for fault in options.inject:
        parse_fault(fault)
    if options.event_log and not Path(options.event_log).absolute().parent.is_dir():
        raise UsageError(f"--event-log: the folder of {options.event_log} does not exist")
    if options.event_log and Path(options.event_log).is_dir():
        raise UsageError(f"--event-log: {options.event_log} is a folder; name a file")


def check_pairs(options: ServeOptions) -> None:
    """A setting that another one makes void was not meant. Raises UsageError."""
    if options.num_blocks and options.kv_cache_memory:
        raise UsageError("--num-blocks and --kv-cache-memory both size the KV pool; give one of them")
    if options.preemption == "swap" and options.swap_memory == 0:
        raise UsageError("--preemption swap has nowhere to swap to with --swap-memory 0; take a size or auto, or --preemption recompute")
    if options.preemption == "recompute" and options.swap_memory:
        raise UsageError("--swap-memory is taken for nothing with --preemption recompute, which never swaps; leave one of them out")
    if options.shared_prefix_cache and not options.prefix_caching:
        raise UsageError("--shared-prefix-cache has nothing to share with --no-prefix-caching; leave one of them out")
    if options.max_connections < options.frontends:
        raise UsageError(f"--max-connections {options.max_connections} is less than one for each of --frontends {options.frontends}; raise it")
    if options.log_requests and options.log_level in ("warning", "error"):
        raise UsageError(f"--log-requests writes at level info, which --log-level {options.log_level} leaves out; take info or debug")


def choose_device(options: ServeOptions, machine: Machine) -> Device:
    if options.device == "cuda" and not machine.has_cuda:
        raise UsageError("--device cuda: no GPU that the installed torch can use; take --device cpu, or install Pagemill with its extra `cuda`")
    if not machine.has_cuda or options.device == "cpu":
        return "cpu"
    if machine.num_gpus < options.tensor_parallel_size:
        raise UsageError(
            f"--tensor-parallel-size {options.tensor_parallel_size} needs as many GPUs, one for each rank, but there"
            f" {'is 1' if machine.num_gpus == 1 else f'are {machine.num_gpus}'}; lower it, or take --device cpu"
        )
    return "cuda"


def _check_deterministic(options: ServeOptions, device: Device) -> None:
    if options.deterministic and device == "cuda":
        raise UsageError("--deterministic is promised on the CPU only so far: nothing shows that the operations on a GPU keep it; take --device cpu")


def choose_dtype(options: ServeOptions, device: Device, machine: Machine) -> Dtype:
    if options.dtype == "float16" and device == "cpu":
        raise UsageError("--dtype float16 needs --device cuda; on the CPU take float32 or bfloat16")
    if options.dtype != "auto":
        return options.dtype
    return "bfloat16" if device == "cuda" or machine.has_bfloat16 else "float32"


def settle(options: ServeOptions, model: Model, machine: Machine, secrets: Secrets, *, reads_priority: bool) -> Settings:
    """Decides everything. Raises UsageError."""
    check_divides(model.info, options.tensor_parallel_size)
    device = choose_device(options, machine)
    _check_deterministic(options, device)
    dtype = choose_dtype(options, device, machine)
    on_cpu = device == "cpu"
    request = MemoryRequest(
        num_blocks=options.num_blocks,
        kv_cache_bytes=options.kv_cache_memory,
        swap_bytes=0 if options.swap_memory is None and options.preemption == "recompute" else options.swap_memory,
        block_size=options.block_size or (16 if on_cpu else 32),
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens or (512 if on_cpu else 8192),
        dtype=dtype,
        num_ranks=options.tensor_parallel_size,
        num_frontends=options.frontends,
    )
    plan = plan_memory(model.info, request, total_bytes=machine.total_bytes, available_bytes=machine.available_bytes) if on_cpu else None
    swap = plan.swap if plan is not None else _swap_beside_a_card(model.info, request, machine)
    if options.preemption == "swap" and not swap.num_slots:
        raise UsageError(f"--preemption swap: {'; '.join(swap.notes)}; lower --kv-cache-memory, or take --preemption auto")
    return Settings(
        device=device,
        dtype=dtype,
        plan=plan,
        swap=swap,
        frontend=_frontend(options, model, request, secrets, reads_priority),
        scheduler=_scheduler(options, device, request),
        workers=_workers(options, model, machine, device, request, plan, swap),
    )


def resettle(settings: Settings, options: ServeOptions, secrets: Secrets) -> Settings:
    """`settings` with what may change while the server runs; the run's own secret stays."""
    return replace(
        settings,
        frontend=msgspec.structs.replace(
            settings.frontend,
            api_keys=secrets.api_keys,
            admin_keys=secrets.admin_keys,
            max_queue_time_s=options.max_queue_time,
            max_connections=_connections_each(options),
            log_level=options.log_level,
        ),
        scheduler=msgspec.structs.replace(settings.scheduler, log_level=options.log_level),
        workers=tuple(msgspec.structs.replace(worker, log_level=options.log_level) for worker in settings.workers),
    )


def _swap_beside_a_card(info: ModelInfo, request: MemoryRequest, machine: Machine) -> SwapPlan:
    """The KV pool lies on cards and is known here only if the operator sized it; host memory has nothing else to hold for long."""
    num_blocks = request.num_blocks or request.kv_cache_bytes // (rank_block_bytes(info, request) * request.num_ranks)
    return plan_swap_for(info, request, "cuda", num_blocks=num_blocks, free_bytes=machine.available_bytes - overhead_in_memory(info, request))


def _frontend(options: ServeOptions, model: Model, request: MemoryRequest, secrets: Secrets, reads_priority: bool) -> FrontendConfig:
    return FrontendConfig(
        model_path=str(model.path),
        model_names=options.served_model_name or (model.name,),
        model_fingerprint=model.fingerprint,
        api_keys=secrets.api_keys,
        admin_keys=secrets.admin_keys,
        cache_secret=secrets.cache_secret,
        prefix_caching=options.prefix_caching,
        shared_prefix_cache=options.shared_prefix_cache,
        priority_allowed=reads_priority,
        strict_request=options.strict_request,
        metrics_compat=options.metrics_compat,
        num_frontends=options.frontends,
        max_queue_time_s=options.max_queue_time,
        max_num_queued=_QUEUE_PER_SEAT * options.max_num_seqs,
        max_queued_tokens=_QUEUED_STEPS * request.max_num_batched_tokens,
        max_connections=_connections_each(options),
        log_format=options.log_format,
        log_level=options.log_level,
        log_requests=options.log_requests,
    )


def _connections_each(options: ServeOptions) -> int:
    return max(1, options.max_connections // options.frontends)


def _scheduler(options: ServeOptions, device: Device, request: MemoryRequest) -> SchedulerConfig:
    return SchedulerConfig(
        num_workers=options.tensor_parallel_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=request.max_num_batched_tokens,
        scheduling_policy=options.scheduling_policy,
        prefix_caching=options.prefix_caching,
        preemption=options.preemption,
        max_plans_in_flight=options.max_plans_in_flight,
        max_num_queued=_QUEUE_PER_SEAT * options.max_num_seqs,
        max_queued_tokens=_QUEUED_STEPS * request.max_num_batched_tokens,
        step_timeout_s=float(options.step_timeout),
        step_timeout_s_per_token=_STEP_TIMEOUT_S_PER_TOKEN[device],
        check_invariants=options.check_invariants,
        event_log=os.path.abspath(options.event_log) if options.event_log else "",
        log_format=options.log_format,
        log_level=options.log_level,
    )


def _workers(
    options: ServeOptions, model: Model, machine: Machine, device: Device, request: MemoryRequest, plan: MemoryPlan | None, swap: SwapPlan
) -> tuple[WorkerConfig, ...]:
    num_ranks = options.tensor_parallel_size
    deterministic = {None: "auto", True: "on", False: "off"}[options.deterministic]
    first = WorkerConfig(
        rank=0,
        num_workers=num_ranks,
        model_path=str(model.path),
        # Who asks for float32 gets every bit a GGUF file has. Otherwise the folder's bfloat16 weights are served, also
        # where the arithmetic is float32: they are half the bytes, and a decode step reads each of them once.
        gguf_path=str(model.gguf_path) if model.gguf_path is not None and options.dtype == "float32" else "",
        device=device,
        dtype=request.dtype,
        block_size=request.block_size,
        num_blocks=plan.num_blocks if plan is not None else options.num_blocks,
        kv_cache_bytes=(plan.kv_bytes if plan is not None else options.kv_cache_memory) // num_ranks,
        swap_bytes=swap.region_bytes,
        max_model_len=plan.max_model_len if plan is not None else options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=request.max_num_batched_tokens,
        deterministic=deterministic,  # type: ignore[arg-type]  # the three values are those of the Literal
        num_threads=worker_threads(machine, num_ranks),
        cpus=(),
        log_format=options.log_format,
        log_level=options.log_level,
    )
    # On GPUs a rank's threads only launch kernels: they are few, and where they run best depends on the card.
    cpus = [rank_cpus(machine, rank, num_ranks) if device == "cpu" else () for rank in range(num_ranks)]
    return tuple(msgspec.structs.replace(first, rank=rank, cpus=cpus[rank]) for rank in range(num_ranks))
