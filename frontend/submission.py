"""From a valid request to running sequences: prompts become ids and prefix keys, choices become `AddRequest`s.

Long prompts are encoded and hashed in a thread of their own pool, so that they delay neither streams nor each other's
neighbours; short ones are done on the spot. A sequence is one choice of one prompt: `choice = prompt index * n + k`.
This module must not know HTTP or the shape of replies.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from frontend.chat_template import Message
from frontend.choice import Choice
from frontend.engine import Engine
from frontend.errors import context_length_exceeded, invalid_value
from frontend.generation import Generation
from frontend.overload import Load
from frontend.readiness import Readiness
from frontend.request_metrics import RequestRecord
from frontend.tokenizer import Tokenizer
from frontend.validation import GenerationRequest, Prompts
from pagemill.config import FrontendConfig
from pagemill.ids import unpack_ids
from pagemill.injection import reach
from pagemill.keys import cache_domain, choice_seed, prefix_keys, root_key
from pagemill.messages.frontend import AddRequest, SchedulerReady
from pagemill.messages.sequences import Limits
from pagemill.telemetry import get_logger

#: Texts of fewer characters are encoded in the event loop: it takes less than a step.
_SHORT_CHARACTERS = 4096
#: What a text costs beside its characters: its part of the template, or a call.
_TEXT_CHARACTERS = 32
#: A text with more bytes for each token that a prompt may have is looked at before it is encoded: nearly none fits, and what does not may be huge.
_SPARSE_BYTES = 8
_NUM_THREADS = 4

log = get_logger("frontend.submission")

Encode = Callable[[], Iterable[list[int]]]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt that fits, ready for the scheduler."""

    num_tokens: int
    packed_ids: bytes
    max_tokens: int
    prefix_keys: bytes
    is_silent: bool  #: has special tokens only, so that what continues it is the beginning of a text


class Submitter:
    """Starts generations. One per frontend process."""

    def __init__(self, config: FrontendConfig, tokenizer: Tokenizer, engine: Engine, readiness: Readiness) -> None:
        self._tokenizer = tokenizer
        self._engine = engine
        self._readiness = readiness
        self._prefix_caching = config.prefix_caching
        self._shared = config.shared_prefix_cache
        self._fingerprint = config.model_fingerprint
        self._cache_secret = config.cache_secret
        self._log_texts = config.log_requests
        self.max_queue_time_s = config.max_queue_time_s  #: may change at run time
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

    async def chat(self, request: GenerationRequest, messages: Sequence[Message], record: RequestRecord, key_id: str, load: Load) -> Generation:
        text = "".join(message["content"] for message in messages)
        root = self._root(key_id)
        size = len(text) + _TEXT_CHARACTERS * len(messages)
        prompts = await self._prepare(request, [text], size, lambda: [self._tokenizer.encode_chat(messages)], root)
        return self._submit(request, prompts, root, record, load, continues=False)

    async def completion(self, request: GenerationRequest, prompts: Prompts, record: RequestRecord, key_id: str, load: Load) -> Generation:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        root = self._root(key_id)

        def encode() -> Iterable[list[int]]:
            return (self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts)

        size = sum(map(len, prompts)) + _TEXT_CHARACTERS * len(texts)  # an id that is given takes no longer than a character
        return self._submit(request, await self._prepare(request, texts, size, encode, root), root, record, load, continues=True)

    async def run(self, work: Callable[[], Result], num_characters: int) -> Result:
        """Tokenizer work of an endpoint, in a thread if it may take long."""
        if num_characters < _SHORT_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _prepare(self, request: GenerationRequest, texts: Sequence[str], size: int, encode: Encode, root: bytes) -> list[_Prompt]:
        """Ids and keys of the prompts. Raises ApiError for what cannot fit, or if no requests are taken."""
        geometry = self._readiness.require()
        reach("frontend.request")

        def prepare() -> list[_Prompt]:
            self._refuse_hopeless(request, texts, geometry)
            special_ids = self._tokenizer.token_bytes.special_ids
            return [_prompt(field, ids, request, geometry, root, special_ids) for field, ids in zip(request.prompt_fields, encode(), strict=True)]

        prompts = await self.run(prepare, size)
        self._readiness.require()  # it may have changed meanwhile
        return prompts

    def _refuse_hopeless(self, request: GenerationRequest, texts: Sequence[str], geometry: SchedulerReady) -> None:
        """Spares the tokenizer a text that cannot fit: it costs time, and memory a hundred times its size."""
        most = geometry.max_model_len
        for field, text in zip(request.prompt_fields, texts, strict=False):  # prompts that are given as ids have no texts
            num_tokens = self._tokenizer.min_tokens(text)
            if num_tokens > most:
                raise context_length_exceeded(field, most, f"the prompt has at least {num_tokens}")
            if len(text.encode()) > _SPARSE_BYTES * most and self._tokenizer.has_more_tokens(text, most):
                raise context_length_exceeded(field, most, "the prompt has more")

    def _root(self, key_id: str) -> bytes:
        if not self._prefix_caching:
            return b""
        return root_key(self._fingerprint, b"", cache_domain(self._cache_secret, "" if self._shared else key_id))

    def _submit(self, request: GenerationRequest, prompts: Sequence[_Prompt], root: bytes, record: RequestRecord, load: Load, *, continues: bool) -> Generation:
        """`continues`: outputs go on in the middle of their prompts' texts, and are no texts of their own."""
        num_prompt_tokens = sum(prompt.num_tokens for prompt in prompts)
        begins_text = [prompt.is_silent or not continues for prompt in prompts for _ in range(request.n)]
        choices = [Choice(index, self._tokenizer.token_bytes, request.text, begins_text=begins) for index, begins in enumerate(begins_text)]
        num_certain_tokens = request.n * sum(request.certain_tokens(prompt.max_tokens) for prompt in prompts)
        generation = Generation(
            self._engine, record, load, choices, num_prompt_tokens, request.n, num_certain_tokens=num_certain_tokens, log_texts=self._log_texts
        )
        number, arrival = self._engine.new_request(), time.time()
        sequences = [
            AddRequest(
                key=self._engine.key(number, choice.index),
                request_id=record.request_id,
                prompt_ids=prompt.packed_ids,
                output_ids=b"",
                sampling=request.sampling,
                limits=Limits(max_tokens=prompt.max_tokens, max_queue_s=float(self.max_queue_time_s)),
                seed=choice_seed(request.seed, choice.index),
                priority=request.priority,
                arrival=arrival,
                root=root,
                prefix_keys=prompt.prefix_keys,
            )
            for choice in choices
            for prompt in (prompts[choice.index // request.n],)
        ]
        record.describe(
            stream=request.stream,
            n=request.n,
            max_tokens=max(prompt.max_tokens for prompt in prompts),
            num_prompt_tokens=num_prompt_tokens,
            num_prompts=len(prompts),
        )
        if self._log_texts:
            for index, prompt in enumerate(prompts):
                log.info("prompt_submitted", request_id=record.request_id, prompt=index, text=self._tokenizer.decode(unpack_ids(prompt.packed_ids)))
        generation.start(sequences)
        return generation


def _prompt(field: str, ids: list[int], request: GenerationRequest, geometry: SchedulerReady, root: bytes, special_ids: frozenset[int]) -> _Prompt:
    if not ids:
        raise invalid_value(field, f"'{field}' must yield at least one token.")
    max_tokens = request.max_tokens_for(field, len(ids), geometry.max_model_len)
    packed = array("i", ids)
    keys = prefix_keys(root, packed, geometry.block_size) if root else b""
    return _Prompt(len(ids), packed.tobytes(), max_tokens, keys, all(map(special_ids.__contains__, ids)))
