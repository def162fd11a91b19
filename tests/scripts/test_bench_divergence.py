"""How often tokens differ is measured on sequences that really pushed each other out; under --deterministic none does."""

from __future__ import annotations

import pytest

from scripts.lib.equality import Answer
from tests.helpers.script import run_bench
from tests.helpers.tiny_model import tiny_checkpoint


def test_no_bit_differs_under_deterministic_whichever_way_sequences_are_preempted(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", tiny_checkpoint("vector-heads"), "--dtype", "bfloat16", "--deterministic", "--requests", 5, "--prompt", 20, "--output", 44]
    lines, summary = run_bench("bench_divergence", [*arguments, "--share", 0.4], capsys)
    assert [line["scenario"] for line in lines] == ["memory for all", "auto", "swap", "recompute"]
    assert all((line["sequences_differ"], line["logprobs_differ"], line["differences_per_1000_tokens"]) == (0, 0, 0.0) for line in lines)
    assert lines[0]["preemptions"] == {}
    assert all(sum(line["preemptions"].values()) > 0 for line in lines[1:])
    assert "swap/growth" in lines[2]["preemptions"]
    assert "recompute/growth" in lines[3]["preemptions"]
    assert set(summary["share_of_sequences_that_differ"].values()) == {0.0}


def test_sequences_that_differ_are_counted_and_the_tokens_up_to_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usual, other = (Answer(token_ids, (b"",) * 4, "length", "") for token_ids in ((1, 2, 3, 4), (1, 2, 9, 9)))
    answers = iter([usual, usual, *(usual, usual), *(other, usual), *(usual, usual), *(usual, usual)])
    monkeypatch.setattr(Answer, "of", lambda output: next(answers))
    arguments = ["--model", tiny_checkpoint("vector-heads"), "--dtype", "float32", "--no-deterministic", "--requests", 2, "--prompt", 5, "--output", 4]
    lines, summary = run_bench("bench_divergence", arguments, capsys)
    assert [line["sequences_differ"] for line in lines] == [0, 1, 0, 0]
    assert lines[1]["differences_per_1000_tokens"] == pytest.approx(1000 / 7, rel=1e-3)  # four tokens of one, three of the other
    assert summary["share_of_sequences_that_differ"]["auto"] == 0.5
