"""Parts of messages that several directions have in common: a sequence's name, what it asks for and what it is told."""

from __future__ import annotations

from typing import Literal

from pagemill.ids import NONE
from pagemill.messages.wire import Record

FinishReason = Literal["stop", "length", "abort", "error"]


class SequenceKey(Record, order=True):
    """The name of a sequence between a frontend and the scheduler. Adding one twice changes nothing."""

    frontend: int
    incarnation: int  #: of the frontend process
    request: int  #: the frontend's own counter
    choice: int  #: prompt index * n + choice of that prompt


#: Below this temperature the best token is taken and nothing is drawn.
GREEDY_TEMPERATURE = 1e-5


class SamplingParams(Record):
    """How one sequence samples. Validated by the frontend; the worker still range-checks every index.

    Order: logit bias, penalties, mask of stop ids before `min_tokens`, divide by temperature, then
    min-p, top-k, top-p; the token is the argmax of what is left + Gumbel(seed, position, token id).
    """

    temperature: float = 1.0  #: below `GREEDY_TEMPERATURE`: argmax, lowest id on a tie
    top_p: float = 1.0
    top_k: int = 0  #: 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  #: over prompt and output
    presence_penalty: float = 0.0  #: over output only
    frequency_penalty: float = 0.0  #: over output only
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int = NONE  #: NONE: no logprobs; 0: only the chosen token's; k: the k best too
    min_tokens: int = 0  #: ids of `stop_token_ids` are masked before this many output tokens
    stop_token_ids: tuple[int, ...] = ()  #: including the model's EOS ids, unless they are to be ignored


class Limits(Record):
    """When the core ends one sequence. EOS ids are already part of `SamplingParams.stop_token_ids`."""

    max_tokens: int  #: output tokens, at least 1
    max_queue_s: float = 0.0  #: seconds it may wait for its first slice; then it is rejected. 0: as long as it takes


class TokenLogprobs(Record, gc=False):
    """Of the raw logits, natural logarithm, finite (clamped at -9999.0)."""

    logprob: float  #: of the token drawn
    top_ids: bytes  #: packed int32, best first, lowest id first on a tie
    top_logprobs: bytes  #: packed float32


class KvGroup(Record):
    """Decoder layers that share one block table: a sequence has as many tables as the model has groups, of one block size."""

    window: int = 0  #: positions that a position attends to, itself included; 0: all before it
