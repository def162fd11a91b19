"""Suspicion: which sequence may have killed a worker, and how that is found out without harming the others.

After a death the sequences in the unacknowledged plans are judged. One that had never completed a slice of that
kind (several tokens, or a single one) is a suspect at once; any other only if a worker dies a second time at the same
positions. A suspect computes those positions in plans of its own, newest first, while the others go on; once they are
computed the suspicion is lifted. If workers die twice while nothing else is computed, it is the cause, and is ended.

    judge       after a death: the plans in flight -> suspicions and who is to be ended
    Suspects    which of them gets a plan to itself, and when

Twice, because a worker may be killed from outside just while an innocent sequence is alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences

from pagemill.ids import SeqId
from scheduler.events import Suspicion
from scheduler.plans import PlanInFlight
from scheduler.sequence import Sequence, Status

#: Plans from one that a suspect has to itself to the next, while others have work.
_TURN_EVERY = 8
#: Deaths alone that make a suspect the cause.
_DEATHS_ALONE = 2


class Suspects:
    """The sequences that must be computed alone. Owned by the core."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._next_turn = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)

    def discard(self, sequence: Sequence) -> None:
        """It has ended, or its suspicion has been lifted."""
        if sequence in self._sequences:
            self._sequences.remove(sequence)

    def lift(self, sequence: Sequence) -> None:
        """If the positions in question are computed, the sequence is one like any other."""
        if sequence.suspicion is not None and sequence.num_computed_tokens >= sequence.suspicion.end:
            sequence.suspicion = None
            self.discard(sequence)

    def due(self, step: int, *, at_once: bool = False) -> list[Sequence]:
        """Those that can get no further beside others, newest first, if it is time (`at_once`: nobody else has work).

        The first may lack a seat or blocks that the others hold, so whoever can run first has the turn.
        """
        if not self._sequences or (step < self._next_turn and not at_once):
            return []
        waiting = [sequence for sequence in self._sequences if sequence.must_be_alone]
        return sorted(waiting, key=lambda sequence: sequence.order, reverse=True)

    def had_turn(self, step: int) -> None:
        self._next_turn = step + _TURN_EVERY


def judge(plans: Sequences[PlanInFlight]) -> tuple[dict[SeqId, Suspicion], set[SeqId]]:
    """A worker died while these plans were unacknowledged. Returns new suspicions, and the sequences that are the cause."""
    spans: dict[SeqId, tuple[Sequence, int, int, bool]] = {}
    for plan in plans:
        for slice_ in plan.slices:
            piece = slice_.piece
            sequence = piece.sequence
            if sequence.status is Status.FINISHED:
                continue
            is_new = not (sequence.has_prefilled if piece.num_tokens > 1 else sequence.has_decoded)
            _, first, end, was_new = spans.get(sequence.seq_id, (sequence, piece.start, 0, False))
            spans[sequence.seq_id] = (sequence, min(first, piece.start), max(end, piece.start + piece.num_tokens), is_new or was_new)
    # One whose sequences have all ended since is no witness: what else was computed is not known any more.
    is_alone = len(spans) == 1 and all(len(plan.slices) <= 1 for plan in plans)
    suspicions: dict[SeqId, Suspicion] = {}
    causes: set[SeqId] = set()
    for seq_id, (sequence, first, end, is_new) in spans.items():
        before = sequence.suspicion
        again = before is not None and first < before.end and end > before.first
        # Deaths at other positions have other causes.
        deaths_alone, deaths = (before.deaths_alone, before.deaths) if before is not None and again else (0, 0)
        deaths_alone += is_alone
        suspicions[seq_id] = Suspicion(first, end, alone=is_new or again, deaths_alone=deaths_alone, deaths=deaths + 1)
        if deaths_alone >= _DEATHS_ALONE:
            causes.add(seq_id)
    return suspicions, causes
