"""What GET /debug/preemptions answers, and the same in words for people: who yielded to whom, at what price, and why so.

The words are made from the decision alone: its prices, and the rates that they come from. Names came from a server and
end up in a terminal, so only what is printable of them is shown.
This module must not know HTTP, the terminal or how a decision is made.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from pagemill.messages.decisions import Decision, VictimKind, VictimPrice

DEFAULT_DECISIONS = 100
MAX_DECISIONS = 1000  #: that one answer may have

#: What stands before a request's own id in its reply, by endpoint.
_REPLY_PREFIX = re.compile("^(chat)?cmpl-")

#: A price is called cheaper than another only if it shows after rounding.
_NOTABLE = 1.05

_PAST: dict[VictimKind, str] = {"swap": "swapped", "recompute": "dropped to recompute", "keep": "stopped with all blocks kept"}


class PreemptionReport(msgspec.Struct, frozen=True):
    """Some decisions, oldest first, and what the scheduler has counted since it started: as in its `StatsSnapshot`."""

    now_s: float  #: the scheduler's clock, as `Decision.at_s`
    decisions: list[Decision]
    preemptions: dict[str, int] = {}
    swapped_bytes: dict[str, int] = {}
    swap_seconds: dict[str, float] = {}


class Line(NamedTuple):
    """One line for people. `kind` is what became of the victim it tells of, None if it tells of none."""

    text: str
    kind: VictimKind | None = None


def concerns(decision: Decision, request_id: str) -> bool:
    """Whether the request wanted room, or was looked at. It may be called by its own id, or by that of its reply."""
    own_id = _REPLY_PREFIX.sub("", request_id)
    return decision.request_id == own_id or any(victim.request_id == own_id for victim in decision.victims)


# --- one decision ----------------------------------------------------------------------------------------


def heading(decision: Decision, now_s: float) -> str:
    """When it was, seen from `now_s` on the same clock."""
    return f"Decision {decision.number}, step {decision.step:,}, {max(0.0, now_s - decision.at_s):,.1f} s ago"


def paragraph(decision: Decision) -> Iterator[Line]:
    """For whom and why, who was looked at and what became of each, and the rates behind the prices."""
    yield Line(_need(decision))
    for victim in decision.victims:
        yield Line(f"  {_offer(victim)} {_outcome(victim, decision)}", victim.kind if victim.yielded else "keep")
    rates = f"{_size(decision.out_bytes_s)}/s out, {_size(decision.in_bytes_s)}/s in, prefill of {_number(decision.prefill_tok_s)} tokens/s"
    queued = f"{_size(decision.backlog_bytes)} queued on the link" if decision.backlog_bytes else "nothing queued on the link"
    yield Line(f"  Rates: {rates}; {queued}; {_count(decision.swap_slots_left, 'swap slot')} left.")


def _need(decision: Decision) -> str:
    who, blocks = _name(decision.request_id, decision.seq_id), _count(decision.blocks_wanted, "block")
    match decision.reason:
        case "growth":
            need = f"{who} was running and needed {blocks} to go on"
        case "start":
            need = f"{who} was to start, or to resume, and needed {blocks}"
        case "seat":
            need = f"{who} was to run, and every seat was taken"
        case "forced":
            need = f"It was asked for, on behalf of {who}: {blocks} to be freed"
    if not decision.victims:
        return f"{need}. Nobody could yield."
    yielded = [victim for victim in decision.victims if victim.yielded]
    freed = _count(sum(victim.freed for victim in yielded), "block")
    return f"{need}. {len(yielded)} of {_count(len(decision.victims), 'sequence')} looked at yielded and freed {freed}."


def _offer(victim: VictimPrice) -> str:
    """What a sequence could have given, and the price of each way."""
    who = f"{_name(victim.request_id, victim.seq_id)}, {'running' if victim.was_running else 'not running'}"
    if not victim.blocks:
        return f"{who}, nothing of its own to free."
    copies = f"{_count(victim.blocks_to_copy, 'block')} to copy" if victim.blocks_to_copy else "nothing to copy"
    ways = [_way("swap", victim.swap_s, copies), _way("recompute", victim.recompute_s, _count(victim.tokens, "token"))]
    return f"{who}, {_count(victim.blocks, 'block')} to free: {', '.join(ways)}."


def _way(name: str, price_s: float | None, work: str) -> str:
    return f"{name} not open ({work})" if price_s is None else f"{name} {_milliseconds(price_s)} ({work})"


def _outcome(victim: VictimPrice, decision: Decision) -> str:
    if not victim.yielded:
        return "Left alone."
    stopped = "Stopped running, " if victim.was_running else ""
    why = "as asked for, " if decision.reason == "forced" else ""
    match victim.kind:
        case "keep":
            given_back = f"gave back {_count(victim.freed, 'block')} that it had not used yet and kept the rest"
            done, why = given_back if victim.freed else "kept its blocks", ""
        case "swap":
            done = f"swapped {_count(victim.freed, 'block')} ({_size(victim.freed * decision.block_bytes)}): "
            why += _why(victim.swap_s, victim.recompute_s, "recompute", "recomputing was not open")
        case "recompute":
            full = decision.swap_slots_left < victim.blocks
            done = f"dropped {_count(victim.freed, 'block')} to recompute: "
            why += _why(victim.recompute_s, victim.swap_s, "swap", "too few swap slots were left" if full else "swapping was not open")
    told = f"{stopped}{done}{why}."
    return told[0].upper() + told[1:]


def _why(price_s: float | None, other_s: float | None, other: str, closed: str) -> str:
    """Why the way taken, and not the other one."""
    if other_s is None:
        return closed
    if price_s is None or price_s > other_s * _NOTABLE:
        return f"though to {other} was cheaper"
    if price_s == 0 < other_s:
        return f"for nothing, where to {other} costs {_milliseconds(other_s)}"
    ratio = other_s / price_s if price_s else 1.0
    return f"{_number(ratio)} times cheaper than to {other}" if ratio >= _NOTABLE else f"no dearer than to {other}"


# --- all of them -----------------------------------------------------------------------------------------


def summary(report: PreemptionReport, num_known: int = 0) -> Iterator[Line]:
    """Counts by kind and reason, of the decisions here, which may be the newest of more, and of everything since the scheduler started."""
    decisions = report.decisions
    told = f"newest {len(decisions):,} of {num_known:,} decisions" if num_known > len(decisions) else _count(len(decisions), "decision")
    yield Line(f"{told[0].upper() + told[1:]} ({_listed(Counter(decision.reason for decision in decisions))}).")
    for kind, past in _PAST.items():
        victims = [(decision, victim) for decision in decisions for victim in decision.victims if victim.yielded and victim.kind == kind]
        if victims:
            freed = sum(victim.freed for _, victim in victims)
            told = f"{past}, {_count(freed, 'block')} freed" if freed else past
            why = _listed(Counter(decision.reason for decision, _ in victims))
            yield Line(f"  {_count(len(victims), 'sequence')} {told} ({why}).", kind)
    yield from _totals(report)


def _totals(report: PreemptionReport) -> Iterator[Line]:
    by_kind: dict[str, Counter[str]] = {}
    for name, number in sorted(report.preemptions.items()):
        kind, _, reason = name.partition("/")
        by_kind.setdefault(kind, Counter())[reason] += number
    if by_kind:
        told = "; ".join(f"{kind}: {_listed(reasons)}" for kind, reasons in by_kind.items() if reasons.total())
        yield Line(f"Since the scheduler started: {_count(sum(report.preemptions.values()), 'preemption')}{f' ({told})' if told else ''}.")
    copied = [_copied(direction, report) for direction in ("out", "in") if report.swapped_bytes.get(direction)]
    if copied:
        yield Line(f"  Copied {', '.join(copied)}.")


def _copied(direction: str, report: PreemptionReport) -> str:
    num_bytes, seconds = report.swapped_bytes[direction], report.swap_seconds.get(direction, 0.0)
    rate = f" at {_size(num_bytes / seconds)}/s" if seconds > 0 else ""
    return f"{_size(num_bytes)} {direction}{rate}"


def _listed(counts: Mapping[str, int]) -> str:
    """The largest first."""
    return ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items(), key=lambda item: -item[1]) if number)


# --- numbers and names -----------------------------------------------------------------------------------


def _name(request_id: str, seq_id: int) -> str:
    printable = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in request_id)
    return f"{printable} (sequence {seq_id})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _number(value: float) -> str:
    """Three digits, without an exponent: what is below a thousandth is 0."""
    return f"{value:,.0f}" if value >= 100 or value < 0.001 else f"{value:.3g}"


def _milliseconds(seconds: float) -> str:
    return f"{_number(seconds * 1000)} ms"


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{_number(num_bytes)} {unit}"
        num_bytes /= 1000
    return f"{_number(num_bytes)} TB"
