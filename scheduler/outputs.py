"""What frontends are to be told, collected until an event has been handled: one message for each of them."""

from __future__ import annotations

from pagemill.ids import NONE
from pagemill.messages.frontend import Rejection, SequenceOutput, StepOutput
from pagemill.messages.sequences import FinishReason
from pagemill.messages.worker import RowResult
from scheduler.events import Effect
from scheduler.sequence import Sequence


class Outputs:
    """Owned by the core."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._outputs: dict[int, list[SequenceOutput]] = {}  #: by frontend
        self._rejections: dict[int, list[Rejection]] = {}

    def reject(self, rejection: Rejection) -> None:
        self._rejections.setdefault(rejection.key.frontend, []).append(rejection)

    def emit(
        self,
        sequence: Sequence,
        first_index: int,
        token_ids: tuple[int, ...],
        reason: FinishReason | None,
        *,
        result: RowResult | None = None,
        stop_id: int = NONE,
        error: str = "",
    ) -> None:
        """New tokens of a sequence, its end, or both."""
        output = SequenceOutput(
            key=sequence.key,
            first_index=first_index,
            token_ids=token_ids,
            logprobs=result.logprobs[: len(token_ids)] if result is not None else (),
            finish_reason=reason,
            stop_token_id=stop_id,
            num_cached_tokens=sequence.num_cached_tokens,
            num_preemptions=sequence.num_preemptions,
            queue_s=max(0.0, sequence.queue_s),
            error=error,
        )
        sequence.num_emitted_tokens = first_index + len(token_ids)
        self._outputs.setdefault(sequence.key.frontend, []).append(output)

    def take(self) -> list[Effect]:
        """One message per frontend, in order of their numbers."""
        if not self._outputs and not self._rejections:
            return []
        frontends = sorted({*self._outputs, *self._rejections})
        effects: list[Effect] = [
            StepOutput(frontend, self._epoch, tuple(self._outputs.get(frontend, ())), tuple(self._rejections.get(frontend, ()))) for frontend in frontends
        ]
        self._outputs.clear()
        self._rejections.clear()
        return effects
