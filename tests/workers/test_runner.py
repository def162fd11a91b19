"""One plan at a time: what happens to one row never concerns another."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from pagemill.ids import NONE, PlanId
from pagemill.messages.sequences import SamplingParams
from pagemill.messages.worker import Plan, RowResult
from scripts.lib.offline import OfflineEngine, offline_config
from tests.helpers.forward import logits_in_chunks
from tests.helpers.plans import install, piece, plan
from tests.helpers.rank_threads import thread_group
from tests.helpers.ranks import close, load_ranks, together
from tests.helpers.tiny_model import VOCAB_SIZE, tiny_checkpoint
from workers.inputs import StepInputs
from workers.kv_cache import KvCache
from workers.loader import Loaded, load
from workers.parallel import PeerRankLost, TensorParallel
from workers.probe import DeviceFault
from workers.rows import INVALID_INPUT
from workers.runner import NOT_FINITE, STEP_FAILED, Runner

POISON = 300  #: a token id that the faulty models below stumble over
EVERY = NONE  #: all of them are poison


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(offline_config(str(tiny_checkpoint("llama")), block_size=4, num_blocks=64))


@pytest.fixture
def runner(loaded: Loaded) -> Iterator[Runner]:
    runner = Runner(loaded.runner.model, loaded.runner.kv_cache, loaded.runner.swapper, loaded.runner.rows, torch.device("cpu"))
    yield runner
    runner.rows.clear()


class FaultyModel:
    """The tiny model, except that it raises, or computes no numbers, where the poison token is."""

    ARCHITECTURES = ("Faulty",)

    def __init__(self, runner: Runner, fault: str, poison: int = POISON, times: int = 10**6) -> None:
        self._model = runner.model
        self.head = runner.model.head
        self._fault = fault
        self._poison = poison
        self._times_left = times  #: forwards that go wrong, before it recovers
        self._poisoned = torch.tensor([False])
        self.num_calls = 0

    def __call__(self, inputs: StepInputs, kv_cache: KvCache) -> Tensor:
        self.num_calls += 1
        poisoned = (inputs.token_ids == self._poison) | (self._poison == EVERY)
        if poisoned.any():
            self._times_left -= 1
            poisoned &= self._times_left >= 0
        self._poisoned = poisoned[inputs.sample_rows]
        if self._fault == "raise" and bool(poisoned.any()):
            raise RuntimeError("poison")
        hidden = self._model(inputs, kv_cache)
        return torch.where(poisoned[:, None], torch.nan, hidden) if self._fault == "hidden" else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._model.logits(hidden)
        return torch.where(self._poisoned[:, None], torch.nan, logits) if self._fault == "logits" else logits


def poison(runner: Runner, fault: str, **changes: int) -> FaultyModel:
    model = FaultyModel(runner, fault, **changes)
    runner.model = model  # type: ignore[assignment]
    return model


def by_row(runner: Runner, work: Plan) -> dict[int, RowResult]:
    assert runner.rows.missing(work) is None
    results, seconds = runner.run(work)
    assert set(seconds) == {"prepare", "forward", "sample"} | ({"reduce"} if runner.parallel.size > 1 else set())
    assert len({result.row for result in results}) == len(results)
    return {result.row: result for result in results}


def argmax(loaded: Loaded, tokens: list[int]) -> int:
    return int(logits_in_chunks(loaded, [tokens], 1000, seed=7)[0][-1].argmax())


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, POISON) for _ in range(draw.randrange(2, 12))] for _ in range(count)]


def install_all(runner: Runner, histories: list[list[int]]) -> None:
    for index, tokens in enumerate(histories):
        runner.rows.install(install(index, tokens, range(4 * index, 4 * index + 4)))


def test_sampling_slices_get_the_most_likely_token_and_others_nothing(runner: Runner, loaded: Loaded) -> None:
    histories = prompts(3)
    expected = [argmax(loaded, tokens) for tokens in histories]
    install_all(runner, histories)
    work = plan(piece(0, 0, len(histories[0])), piece(1, 0, len(histories[1]) - 1, sample=False), piece(2, 0, len(histories[2])))
    results = by_row(runner, work)
    assert {row: result.token_ids for row, result in results.items()} == {0: (expected[0],), 2: (expected[2],)}
    assert {(result.outcome, result.version, result.error) for result in results.values()} == {("accepted", 1, "")}


@pytest.mark.parametrize(("fault", "error"), [("raise", STEP_FAILED), ("hidden", NOT_FINITE), ("logits", NOT_FINITE)])
def test_a_fault_of_one_row_fails_that_row_alone(runner: Runner, loaded: Loaded, fault: str, error: str) -> None:
    histories = prompts(4)
    expected = [argmax(loaded, tokens) for tokens in histories]
    histories[1].append(POISON)
    install_all(runner, histories)
    poison(runner, fault)
    results = by_row(runner, plan(*(piece(index, 0, len(tokens)) for index, tokens in enumerate(histories))))
    assert (results[1].outcome, results[1].error, results[1].token_ids) == ("failed", error, ())
    assert {row: results[row].token_ids for row in (0, 2, 3)} == {row: (expected[row],) for row in (0, 2, 3)}


@pytest.mark.parametrize("fault", ["raise", "hidden"])
def test_a_fault_in_a_slice_that_does_not_sample_is_reported_too(runner: Runner, fault: str) -> None:
    install_all(runner, [[5, POISON, 6, 7], [8, 9]])
    poison(runner, fault)
    results = by_row(runner, plan(piece(0, 0, 3, sample=False), piece(1, 0, 2)))
    assert {row: result.outcome for row, result in results.items()} == {0: "failed", 1: "accepted"}


@pytest.mark.parametrize(("fault", "rows_tried_again"), [("raise", 3), ("hidden", 1), ("logits", 1)])
def test_a_fault_costs_one_more_forward_for_each_row_without_a_result_and_only_then(runner: Runner, fault: str, rows_tried_again: int) -> None:
    install_all(runner, [[5, 6], [7, POISON], [8, 9]])
    model = poison(runner, fault)
    by_row(runner, plan(piece(0, 0, 2), piece(2, 0, 2)))
    assert model.num_calls == 1
    by_row(runner, plan(piece(0, 0, 2), piece(1, 0, 2), piece(2, 0, 2)))
    assert model.num_calls == 1 + 1 + rows_tried_again


@pytest.mark.parametrize("fault", ["raise", "hidden", "logits"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_fault_that_passes_fails_nobody(runner: Runner, loaded: Loaded, fault: str, num_rows: int) -> None:
    histories = prompts(num_rows)
    expected = [argmax(loaded, tokens) for tokens in histories]
    install_all(runner, histories)
    poison(runner, fault, poison=EVERY, times=1)
    results = by_row(runner, plan(*(piece(index, 0, len(tokens)) for index, tokens in enumerate(histories))))
    assert [results[index].token_ids for index in range(num_rows)] == [(token,) for token in expected]


@pytest.mark.parametrize("sample", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_model_that_computes_no_numbers_any_more_is_a_fault_of_the_device(runner: Runner, num_rows: int, sample: bool) -> None:
    install_all(runner, [[5, 6], [7, 8], [8, 9]])
    poison(runner, "hidden", poison=EVERY)
    with pytest.raises(DeviceFault, match=r"^all rows came out as not a number$"):
        runner.run(plan(*(piece(index, 0, 2, sample=sample) for index in range(num_rows))))


def test_a_model_that_only_raises_any_more_is_a_fault_of_the_device(runner: Runner) -> None:
    install_all(runner, [[5, 6]])
    poison(runner, "raise", poison=EVERY)
    with pytest.raises(DeviceFault, match=r"^nothing can be computed any more: RuntimeError: poison$"):
        runner.run(plan(piece(0, 0, 2)))


@pytest.mark.parametrize("fault", ["raise", "hidden", "logits"])
def test_rows_that_all_have_faults_of_their_own_are_none_of_the_device(runner: Runner, fault: str) -> None:
    install_all(runner, [[5, POISON], [POISON]])
    poison(runner, fault)
    before = runner.kv_cache.blocks.clone()
    results = by_row(runner, plan(piece(0, 0, 2), piece(1, 0, 1)))
    assert {result.outcome for result in results.values()} == {"failed"}
    assert torch.equal(runner.kv_cache.blocks[8:], before[8:]), "the probe has blocks of its own"


def test_input_out_of_range_fails_before_the_model_sees_it(runner: Runner) -> None:
    runner.rows.install(install(0, [5, VOCAB_SIZE], [1]))
    runner.rows.install(install(1, [5, 6], [2]))
    model = poison(runner, "none")
    results = by_row(runner, plan(piece(0, 0, 2), piece(1, 0, 2)))
    assert (results[0].outcome, results[0].error) == ("failed", INVALID_INPUT)
    assert results[1].outcome == "accepted"
    assert by_row(runner, plan(piece(0, 0, 1, sample=False)))[0].error == INVALID_INPUT
    assert model.num_calls == 1


def test_a_plan_without_slices_is_done_at_once(runner: Runner) -> None:
    assert runner.run(plan())[0] == ()


def test_a_token_drawn_can_be_the_next_input_by_naming_its_plan(runner: Runner, loaded: Loaded) -> None:
    install_all(runner, [[5, 6, 7]])
    drawn = by_row(runner, plan(piece(0, 0, 3), plan_id=8))[0].token_ids[0]
    result = by_row(runner, plan(piece(0, 3, 1, after_plan=plan(plan_id=8).plan_id), plan_id=9))[0]
    assert result.token_ids == (argmax(loaded, [5, 6, 7, drawn]),)


def test_a_slice_without_its_token_is_deferred_and_nothing_of_it_computed(runner: Runner, loaded: Loaded) -> None:
    install_all(runner, [[5, 6, 7], [8, 9]])
    model = poison(runner, "none")
    assert by_row(runner, plan(piece(0, 3, 1, after_plan=PlanId(8)), plan_id=9))[0].outcome == "deferred"
    assert model.num_calls == 0
    results = by_row(runner, plan(piece(0, 4, 1, after_plan=PlanId(9)), piece(1, 0, 2), plan_id=10))
    assert {row: result.outcome for row, result in results.items()} == {0: "deferred", 1: "accepted"}
    assert by_row(runner, plan(piece(0, 0, 3), plan_id=11))[0].token_ids == (argmax(loaded, [5, 6, 7]),)


def test_a_failed_draw_defers_the_slice_that_follows(runner: Runner) -> None:
    install_all(runner, [[5, POISON, 6]])
    poison(runner, "raise")
    assert by_row(runner, plan(piece(0, 0, 3), plan_id=8))[0].outcome == "failed"
    assert by_row(runner, plan(piece(0, 3, 1, after_plan=PlanId(8)), plan_id=9))[0].outcome == "deferred"


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.5, num_logprobs=2),
        SamplingParams(temperature=1.0, repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.9, top_k=20),
        SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=tuple(range(3, 200)), logit_bias=((250, 3.0),)),
    ],
    ids=["greedy", "noise and logprobs", "penalties", "masks"],
)
def test_tokens_taken_from_the_row_do_what_tokens_sent_do(runner: Runner, sampling: SamplingParams) -> None:
    prompt, num_tokens = [5, 6, 7, 8, 9], 9
    runner.rows.install(install(0, prompt, range(4), sampling=sampling, seed=3))
    runner.rows.install(install(1, prompt, range(4, 8), sampling=sampling, seed=3))
    sent = [by_row(runner, plan(piece(0, 0, 5), plan_id=1))[0]]
    taken = [by_row(runner, plan(piece(1, 0, 5), plan_id=1))[1]]
    for step in range(2, num_tokens):
        start = len(prompt) + step - 2
        sent.append(by_row(runner, plan(piece(0, start, 1, new_tokens=sent[-1].token_ids), plan_id=step))[0])
        taken.append(by_row(runner, plan(piece(1, start, 1, after_plan=PlanId(step - 1)), plan_id=step))[1])
    assert [(result.token_ids, result.logprobs) for result in taken] == [(result.token_ids, result.logprobs) for result in sent]
    histories = [row.token_ids for row in runner.rows.apply(plan(piece(0, 12, 1, new_tokens=[9]), piece(1, 12, 1, new_tokens=[9])))]
    assert histories[0][:12] == histories[1][:12], "all but the last token drawn are part of the history"
    assert len(histories[0]) == len(histories[1]) == 13


def test_padded_vocabulary_rows_are_never_drawn() -> None:
    loaded = load(offline_config(str(tiny_checkpoint("padded-vocab")), block_size=4, num_blocks=64))
    logits = logits_in_chunks(loaded, [list(range(3, 203))], 1000)[0]
    assert (logits.argmax(dim=-1) >= VOCAB_SIZE).any(), "the checkpoint tempts nobody"
    engine = OfflineEngine(loaded)
    hot = SamplingParams(temperature=2.0)
    drawn = engine.generate(prompts(6), max_tokens=24) + engine.generate(prompts(6), max_tokens=24, sampling=hot)
    assert all(0 <= token < VOCAB_SIZE for tokens in drawn for token in tokens)


def test_the_engine_gives_the_same_tokens_in_one_go_and_in_pieces(loaded: Loaded) -> None:
    whole = OfflineEngine(loaded, max_num_batched_tokens=512).generate(prompts(6), max_tokens=20)
    pieces = OfflineEngine(loaded, check_invariants=True, max_num_batched_tokens=7).generate(prompts(6), max_tokens=20)
    tight = OfflineEngine(loaded, check_invariants=True, num_blocks=14, max_num_batched_tokens=16)
    assert whole == pieces == tight.generate(prompts(6), max_tokens=20)
    assert sum(output.num_preemptions for output in tight.outputs.values()) > 0


# --- several ranks ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded_ranks() -> Iterator[list[Loaded]]:
    ranks = load_ranks(tiny_checkpoint("llama"), 2, block_size=4, num_blocks=64)
    yield ranks
    close(ranks)


@pytest.fixture
def ranks(loaded_ranks: list[Loaded]) -> Iterator[list[Runner]]:
    runners = [
        Runner(each.runner.model, each.runner.kv_cache, each.runner.swapper, each.runner.rows, torch.device("cpu"), each.runner.parallel)
        for each in loaded_ranks
    ]
    yield runners
    for runner in runners:
        runner.rows.clear()


def by_row_on_all(ranks: Sequence[Runner], work: Plan) -> dict[int, RowResult]:
    """What all ranks say alike."""
    results = together(lambda runner: by_row(runner, work), ranks)
    assert all(each == results[0] for each in results)
    return results[0]


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, num_logprobs=2), SamplingParams(temperature=1.5)])
def test_all_ranks_draw_the_same_tokens(ranks: list[Runner], loaded: Loaded, sampling: SamplingParams) -> None:
    histories = prompts(4)
    for runner in ranks:
        for index, tokens in enumerate(histories):
            runner.rows.install(install(index, tokens, range(4 * index, 4 * index + 4), sampling=sampling, seed=index))
    results = by_row_on_all(ranks, plan(*(piece(index, 0, len(tokens)) for index, tokens in enumerate(histories))))
    if sampling.temperature == 0:
        assert [results[index].token_ids for index in range(4)] == [(argmax(loaded, tokens),) for tokens in histories]


class SlowMirror(TensorParallel):
    """One of two ranks, of which the other does the same and takes ages to come."""

    size = 2

    def exchange(self, values: Tensor) -> Tensor:
        self.met_s += 1000.0
        return torch.stack((values, values))


def test_meeting_other_ranks_is_a_part_of_the_step_of_its_own(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    now, mirror = time.perf_counter, SlowMirror()
    monkeypatch.setattr("workers.runner.time.perf_counter", lambda: now() + mirror.met_s)
    runner.parallel = mirror
    install_all(runner, [[5, 6]])
    for _ in range(2):
        results, seconds = runner.run(plan(piece(0, 0, 2)))
        assert results[0].outcome == "accepted"
        assert seconds.pop("reduce") == 2000.0  # whether it came out as numbers, and which token is the best
        assert 0 < min(seconds.values()) < sum(seconds.values()) < 1000


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("fault", ["hidden", "logits"])
def test_numbers_that_go_wrong_on_one_rank_fail_their_row_on_all(ranks: list[Runner], loaded: Loaded, fault: str, broken: int) -> None:
    histories = prompts(4)
    expected = [argmax(loaded, tokens) for tokens in histories]
    histories[1].append(POISON)
    for runner in ranks:
        install_all(runner, histories)
    models = [poison(runner, fault if rank == broken else "none") for rank, runner in enumerate(ranks)]
    results = by_row_on_all(ranks, plan(*(piece(index, 0, len(tokens)) for index, tokens in enumerate(histories))))
    assert (results[1].outcome, results[1].error) == ("failed", NOT_FINITE)
    assert [results[row].token_ids for row in (0, 2, 3)] == [(expected[row],) for row in (0, 2, 3)]
    assert [model.num_calls for model in models] == [2, 2], "only the row without a result is tried once more"


@pytest.mark.parametrize("sample", [True, False])
def test_a_fault_that_passes_on_one_rank_fails_nobody(ranks: list[Runner], loaded: Loaded, sample: bool) -> None:
    histories = prompts(3)
    for runner in ranks:
        install_all(runner, histories)
    poison(ranks[1], "hidden", poison=EVERY, times=1)
    results = by_row_on_all(ranks, plan(*(piece(index, 0, len(tokens), sample=sample) for index, tokens in enumerate(histories))))
    assert [result.token_ids for result in results.values()] == [(argmax(loaded, tokens),) for tokens in histories if sample]


def test_a_rank_that_computes_no_numbers_any_more_is_a_fault_that_all_see(ranks: list[Runner]) -> None:
    for runner in ranks:
        install_all(runner, [[5, 6], [7, 8]])
    poison(ranks[1], "hidden", poison=EVERY)

    def run(runner: Runner) -> None:
        with pytest.raises(DeviceFault, match=r"^all rows came out as not a number$"):
            runner.run(plan(piece(0, 0, 2), piece(1, 0, 2)))

    together(run, ranks)


def test_an_exception_on_one_rank_of_several_is_not_tried_again(loaded: Loaded) -> None:
    runner = Runner(loaded.runner.model, loaded.runner.kv_cache, loaded.runner.swapper, loaded.runner.rows, torch.device("cpu"), thread_group(2)[0])
    install_all(runner, [[5, POISON], [7, 8]])
    model = poison(runner, "raise")
    with pytest.raises(DeviceFault, match=r"^a step failed on one of 2 ranks: RuntimeError: poison$"):
        runner.run(plan(piece(0, 0, 2), piece(1, 0, 2)))
    assert model.num_calls == 1


@pytest.mark.parametrize("when", [1, 2, 3])
def test_the_loss_of_another_rank_is_no_fault_of_rows_or_devices(runner: Runner, monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    """Neither in a step, nor when its rows are tried again, nor in the probe."""
    install_all(runner, [[5, POISON]])
    model = poison(runner, "hidden")
    compute = FaultyModel.__call__

    def lose(self: FaultyModel, inputs: StepInputs, kv_cache: KvCache) -> Tensor:
        hidden = compute(self, inputs, kv_cache)
        if self.num_calls == when:
            raise PeerRankLost("rank 0 of 2 has lost another rank")
        return hidden

    monkeypatch.setattr(FaultyModel, "__call__", lose)
    with pytest.raises(PeerRankLost):
        runner.run(plan(piece(0, 0, 2)))
    assert model.num_calls == when
