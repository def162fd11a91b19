"""Preemption: who yields when blocks or seats run out, and how: the planner.

The policy gives an order; nobody takes from those ahead. Blocks are taken first from sequences that do not run
but still hold some, last in the order first, then from running ones. A running sequence may take from all
behind it; one that wants to start only from less urgent ones, so that equals never push each other out, unless
it has waited so long that those behind it have overtaken it. The *head*, the first sequence that may run, takes
from everybody, so it always advances, whatever else happens.

Only what is needed is freed, from the end of a sequence, private blocks only. Each victim's blocks go the
cheaper way: copied to the arena (what is queued on the link, out for those without a copy, and in again) or
dropped (computed again at the measured prefill rate). The last in the order yields, unless another is less
than half as dear; who has just come back, or has yielded often, comes after all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pagemill.ids import NO_PLAN, BlockId
from pagemill.messages.decisions import Decision, PreemptionReason, VictimKind
from scheduler.core_config import CoreConfig
from scheduler.decisions import Decisions
from scheduler.events import Preempt
from scheduler.kv_memory import KvMemory
from scheduler.offers import Asked, Offer
from scheduler.queues import Queues
from scheduler.rates import PrefillRate
from scheduler.sequence import Sequence, Status
from scheduler.swapping import Swapping

#: Steps after coming back in which a sequence yields only if nobody else can.
_QUANTUM_STEPS = 32
#: Preemptions after which the same holds.
_MANY_PREEMPTIONS = 3
#: Steps after which a sequence that does not run may take from all behind it. Far below the 512 that are promised.
_PATIENCE_STEPS = 128
#: The last in the order yields unless another is cheaper by this factor.
_PREFERENCE = 2.0
#: Running victims that are priced for one purpose.
_MAX_PRICED = 8
#: Those that come back leave room for so many further tokens of each running sequence, at most this share of the pool.
_HEADROOM_TOKENS = 32
_HEADROOM_SHARE = 8


class Preemption:
    """Chooses and carries out. `on_preempted` lets the owner of rows and plans forget the victim, `on_resumed` is told how long one did not run."""

    def __init__(
        self,
        config: CoreConfig,
        queues: Queues,
        memory: KvMemory,
        swapping: Swapping,
        prefill: PrefillRate,
        *,
        on_preempted: Callable[[Sequence], None],
        on_resumed: Callable[[float], None],
    ) -> None:
        self.decisions = Decisions()
        self.head: Sequence | None = None  #: the first that may run; set by the step builder
        self.num_reserved = 0  #: blocks that sequences on their way back are going to need
        self.num_returning = 0  #: such sequences
        self.now = 0.0
        self.step = 0
        self._config, self._queues, self._memory, self._swapping, self._prefill = config, queues, memory, swapping, prefill
        self._on_preempted, self._on_resumed = on_preempted, on_resumed

    def begin(self, now: float, step: int) -> None:
        """A new plan is being built."""
        self.now, self.step = now, step
        self.num_reserved = self.num_returning = 0

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grows a running sequence to `num_tokens` positions, at the cost of those behind it if need be.

        False, and nobody yields, if that would not be enough; then the sequence parks until others finish. So it does,
        if it has a slice in flight, where plans in flight are going to give back what it lacks: a step later it has none.
        """
        memory = self._memory
        if memory.extend(sequence, num_tokens):
            return True
        missing = memory.num_missing_blocks(sequence, num_tokens)
        if sequence.planned_in != NO_PLAN and missing <= memory.pool.num_obtainable + memory.num_coming_back(self._queues.running):
            return False
        return self._reclaim(sequence, lambda: missing, "growth", {}) and memory.extend(sequence, num_tokens)

    def make_room(self, candidate: Sequence, num_first_blocks: int) -> bool:
        """Finds a seat for a sequence that wants to start, room for its whole known context, and blocks for its first step.

        False, and nobody yields, if there is not enough. The rest of the room is taken as it is needed.
        """
        is_head = candidate is self.head
        victims = self._victims(candidate)
        no_seat = len(self._queues.running) + self.num_returning >= self._config.max_num_seqs
        if no_seat and not victims:
            return False
        memory, adopted = self._memory, dict.fromkeys(self._memory.adoptable(candidate))
        shortage = memory.num_needed_blocks(candidate, frugal=is_head) - self._room(candidate)
        if shortage > 0 and not is_head and not self._can_free(shortage, [*self._holders(candidate), *victims], adopted):
            return False
        if no_seat:
            self._take_seat(candidate, victims[0])

        def wanted() -> int:
            return min(memory.num_needed_blocks(candidate, frugal=is_head), num_first_blocks + memory.num_cached_hits(candidate))

        return self._reclaim(candidate, wanted, "start", adopted)

    def resume(self, candidate: Sequence) -> None:
        """A sequence runs from here on: its KV is on the device, or the next forward waits for it."""
        if candidate.status is Status.PREEMPTED:
            candidate.resumed_in_step = self.step
            self._on_resumed(self.now - candidate.preempted_at)
        self._queues.move(candidate, Status.RUNNING)
        self._memory.tighten(candidate)

    def force(self, order: Preempt, sequence: Sequence) -> None:
        """Makes a running sequence yield, whoever needs it."""
        asked, offer = self._nobody_asked(), self._offer(sequence, order.num_blocks, {})
        self.stop(sequence)
        if offer.tail.entries:
            kind: VictimKind = "swap" if order.kind == "swap" and offer.swap_s is not None else "recompute"
            self._give_up(offer, "keep" if order.kind == "keep" else kind)
        offer.yielded = True
        asked.took(offer)
        self._record(sequence, "forced", order.num_blocks, asked)

    # --- who -------------------------------------------------------------------------------------------

    def _victims(self, needy: Sequence) -> list[Sequence]:
        """Running sequences that `needy` may take from, last in the order first."""
        behind = [victim for victim in reversed(self._queues.running) if victim.order > needy.order]
        if needy.status is Status.RUNNING or needy is self.head or self.step - needy.waiting_since_step >= _PATIENCE_STEPS:
            return behind
        return [victim for victim in behind if victim.order[0] > needy.order[0]]

    def _holders(self, needy: Sequence) -> list[Sequence]:
        """Sequences that do not run but still hold blocks which `needy` may take, last in the order first."""
        loose = self._memory.loose_holders() if self._memory.pool.num_reclaimable else []
        holders = [holder for holder in loose if holder is not needy and (holder.order > needy.order or needy is self.head)]
        return sorted(holders, key=lambda holder: holder.order, reverse=True)

    def _can_free(self, num_blocks: int, sequences: list[Sequence], keep: dict[BlockId, None]) -> bool:
        """Whether these sequences together hold so many blocks that nobody else refers to."""
        pool = self._memory.pool
        references: dict[BlockId, int] = {}
        num_freed = 0
        for sequence in sequences:
            for table in sequence.tables:
                for number in table.live():
                    block = BlockId(number)
                    if block < 0 or block in keep:
                        continue
                    references[block] = references.get(block, 0) + 1
                    num_freed += references[block] == pool.num_to_free(block)
            if num_freed >= num_blocks:
                return True
        return False

    def _choose(self, victims: list[Sequence], num_blocks: int, keep: dict[BlockId, None]) -> tuple[Offer, list[Offer]]:
        """The victim to take next, and all that were priced for it."""
        least_urgent = [victim for victim in victims if victim.order[0] == victims[0].order[0]][:_MAX_PRICED]
        offers = [self._offer(victim, num_blocks, keep) for victim in least_urgent]
        open_ones = [offer for offer in offers if not self._is_protected(offer.sequence)] or offers
        useful = [offer for offer in open_ones if offer.tail.num_freed] or open_ones
        cheapest = min(offer.price for offer in useful)
        return next(offer for offer in useful if offer.price <= _PREFERENCE * cheapest), offers

    def _is_protected(self, victim: Sequence) -> bool:
        return self.step - victim.resumed_in_step < _QUANTUM_STEPS or victim.num_preemptions >= _MANY_PREEMPTIONS

    # --- how -------------------------------------------------------------------------------------------

    def _reclaim(self, needy: Sequence, wanted: Callable[[], int], reason: PreemptionReason, keep: dict[BlockId, None]) -> bool:
        """Makes as many blocks obtainable as are wanted. False if that is not possible now; for all but the head, nobody yields then.

        What is wanted grows where somebody gives up more than asked for: blocks in `keep` that nobody refers to any more are
        obtainable, and taken over by the needy one.
        """
        pool, num_blocks = self._memory.pool, wanted()
        if num_blocks <= pool.num_obtainable:
            return True
        holders, victims = self._holders(needy), self._victims(needy)
        if needy is not self.head and not self._can_free(num_blocks - pool.num_obtainable, [*holders, *victims], keep):
            return False
        asked = self._nobody_asked()
        for offer in self._offers(holders, victims, lambda: wanted() - pool.num_obtainable, keep, asked):
            self._take(offer)
            asked.took(offer)
        self._record(needy, reason, num_blocks, asked)
        return pool.num_obtainable >= wanted()

    def _offers(self, holders: list[Sequence], victims: list[Sequence], missing: Callable[[], int], keep: dict[BlockId, None], asked: Asked) -> Iterator[Offer]:
        """What to take next, as things stand when the last has been taken, until nothing is missing or nobody can help.

        First from those that do not run, then from running ones, which stop for it, each what it alone holds. What several of
        all these share is freed only when the last one gives it up, so they are asked for that in turns.
        """
        for holder in holders:
            if (num_blocks := missing()) <= 0:
                return
            yield self._offer(holder, num_blocks, keep)
        while victims and (num_blocks := missing()) > 0:
            chosen, priced = self._choose(victims, num_blocks, keep)
            asked.looked_at(priced)
            victims.remove(chosen.sequence)
            holders.insert(0, chosen.sequence)
            yield self._stop_and_offer(chosen.sequence, missing, keep)
        helps = True
        while helps:
            helps = False
            for holder in holders:
                if (num_blocks := missing()) <= 0:
                    return
                offer = self._offer(holder, num_blocks, keep, shared=True)
                helps |= bool(offer.tail.entries)
                yield offer

    def _stop_and_offer(self, victim: Sequence, missing: Callable[[], int], keep: dict[BlockId, None]) -> Offer:
        """What a running sequence had for the plan being built is free as soon as it stops, and may be all that is missing."""
        before = self._memory.pool.num_obtainable
        self.stop(victim)
        freed = self._memory.pool.num_obtainable - before
        offer = self._offer(victim, missing(), keep, was_running=True)
        offer.freed = freed  # told if that is all; else what its KV has freed is
        return offer

    def _take(self, offer: Offer) -> None:
        """Carries out what a sequence that does not run offers, the cheaper way."""
        offer.yielded = offer.was_running or bool(offer.tail.entries)
        if offer.tail.entries:
            swaps = offer.swap_s is not None and (self._config.preemption == "swap" or offer.swap_s <= offer.recompute_s)
            self._give_up(offer, "swap" if swaps else "recompute")

    def _give_up(self, offer: Offer, kind: VictimKind) -> None:
        offer.kind = kind
        if kind != "keep":
            offer.freed = self._swapping.give_up(offer.sequence, offer.tail, swap=kind == "swap")

    def _offer(self, sequence: Sequence, num_blocks: int, keep: dict[BlockId, None], *, shared: bool = False, was_running: bool = False) -> Offer:
        """Prices what the sequence could free of `num_blocks`."""
        swapping = self._swapping
        tail = swapping.tail(sequence, num_blocks, keep, shared=shared)
        was_running = was_running or sequence.status is Status.RUNNING
        if not tail.entries:
            return Offer(sequence, tail, was_running)
        num_without_copy = swapping.num_without_copy(sequence, tail)
        kept, reached = tail.first_index * self._config.block_size, sequence.num_computed_tokens + sequence.num_planned_tokens
        # What is in flight is given up with any of it.
        first = self._memory.windows.way_back(sequence, min(sequence.num_computed_tokens, kept)) if kept < reached else reached
        recompute_s = self._prefill.seconds(first, reached)
        swap_s: float | None = None
        if len(tail.entries) <= swapping.swap.num_obtainable:
            out, back, size = swapping.transfers.rates["out"], swapping.transfers.rates["in"], self._config.block_bytes
            swap_s = out.seconds(swapping.transfers.backlog_bytes("out") + num_without_copy * size) + back.seconds(len(tail.entries) * size)
        return Offer(sequence, tail, was_running, num_without_copy, reached - first, swap_s, recompute_s)

    def _take_seat(self, needy: Sequence, victim: Sequence) -> None:
        asked, offer = self._nobody_asked(), self._offer(victim, 0, {})
        self.stop(victim)
        offer.yielded = True
        asked.took(offer)
        self._record(needy, "seat", 0, asked)

    def stop(self, victim: Sequence) -> None:
        """A running sequence yields. It keeps its blocks for now, but weakly."""
        self._queues.move(victim, Status.PREEMPTED)
        self._on_preempted(victim)
        self._memory.loosen(victim)
        victim.num_preemptions += 1
        victim.preempted_at, victim.waiting_since_step = self.now, self.step

    def _room(self, candidate: Sequence) -> int:
        """Blocks left for the candidate's whole known context beside what others were promised.

        All but the head leave a little headroom, so that the next decoded tokens do not push it out again.
        """
        memory, running = self._memory, self._queues.running
        if candidate is self.head:
            return memory.pool.num_obtainable
        promised = sum(max(0, memory.num_awaited_blocks(other) - other.num_table_blocks) for other in running)
        headroom = max(1, memory.pool.num_blocks // 64)
        if candidate.status is Status.PREEMPTED:
            growth = sum(memory.num_awaited_blocks(one, _HEADROOM_TOKENS) - memory.num_awaited_blocks(one) for one in (*running, candidate))
            headroom = max(headroom, min(growth, memory.pool.num_blocks // _HEADROOM_SHARE))
        return memory.pool.num_obtainable - promised - headroom - self.num_reserved

    def _nobody_asked(self) -> Asked:
        return Asked(self._swapping.swap.num_obtainable, self._swapping.transfers.backlog_bytes("out"))

    def _record(self, needy: Sequence, reason: PreemptionReason, num_blocks: int, asked: Asked) -> None:
        if not asked.anybody_yielded:
            return
        rates = self._swapping.transfers.rates
        decision = Decision(
            number=self.decisions.next_number,
            at_s=self.now,
            step=self.step,
            reason=reason,
            request_id=needy.request_id,
            seq_id=needy.seq_id,
            blocks_wanted=num_blocks,
            out_bytes_s=rates["out"].bytes_s,
            in_bytes_s=rates["in"].bytes_s,
            prefill_tok_s=self._prefill.tokens_s,
            backlog_bytes=asked.backlog_bytes,
            block_bytes=self._config.block_bytes,
            swap_slots_left=asked.num_slots,
            victims=asked.prices(),
        )
        self.decisions.record(decision)
