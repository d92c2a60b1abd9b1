"""Workloads are the same in every run, and times are counted from where a user would."""

from types import SimpleNamespace

import pytest
from tiny_checkpoint import VOCAB_SIZE, make_checkpoint

from minivllm import LLM
from minivllm.measure import workloads as bench
from minivllm.request import CompletionOutput, RequestMetrics, RequestOutput


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A tiny model with a prefix cache."""
    path = make_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=256)
    with LLM(str(path), progress=False) as llm:
        yield llm


def output(token_times, num_prompt_tokens=10, num_cached_tokens=0, request_id="a", error=None):
    """A finished request whose tokens came at `token_times`."""
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=[1] * num_prompt_tokens,
        outputs=[CompletionOutput(0, "", [1] * len(token_times), "error" if error else "length")],
        finished=True,
        metrics=RequestMetrics(token_times=list(token_times)),
        num_cached_tokens=num_cached_tokens,
        error=error,
    )


# -- workloads ---------------------------------------------------------------------------------


def test_mixed_workload_is_nano_vllms_benchmark():
    """256 requests with its ranges have its totals, which only the same draws give."""
    workload = bench.mixed_workload(256, vocab_size=151_936)
    assert workload.num_prompt_tokens == 142_827
    assert workload.num_output_tokens == 133_966
    assert workload.longest == 2011
    assert max(max(prompt) for prompt in workload.prompts) <= 10_000
    assert workload.params[0].temperature == 0.6
    assert workload.params[0].ignore_eos


def test_mixed_lengths_stay_within_their_ranges():
    """Both ends can occur: of 200 draws from 2 to 4, some are 2 and some are 4."""
    workload = bench.mixed_workload(200, 50, prompt_range=(2, 4), output_range=(1, 2))
    assert {len(prompt) for prompt in workload.prompts} == {2, 3, 4}
    assert set(workload.num_new_tokens) == {1, 2}
    assert max(max(prompt) for prompt in workload.prompts) == 49


def test_another_seed_is_another_workload():
    """The seed decides, and nothing else does."""
    first, again, other = (
        bench.mixed_workload(5, 50, (2, 9), (2, 9), seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_batch_workload_has_equal_requests():
    """Four prompts of seven tokens, all different, decoded greedily."""
    workload = bench.batch_workload(4, 7, 3, vocab_size=50)
    assert [len(prompt) for prompt in workload.prompts] == [7] * 4
    assert len({tuple(prompt) for prompt in workload.prompts}) == 4
    assert [(p.max_tokens, p.temperature, p.ignore_eos) for p in workload.params] == [
        (3, 0.0, True)
    ] * 4
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (28, 12)
    assert workload.name == "batch 4 x 7 in, 3 out"
    assert bench.batch_workload(1, 7, 1, 50).name == "prefill 1 x 7 in, 1 out"


def test_batches_share_no_prompts():
    """A batch of four does not begin with the prompts of a batch of two: a prefix cache would
    find them."""
    two, four = (bench.batch_workload(size, 16, 3, 500).prompts for size in (2, 4))
    assert not {tuple(prompt) for prompt in two} & {tuple(prompt) for prompt in four}
    assert bench.batch_workload(2, 16, 3, 500).prompts == two


def test_other_tokens_keep_lengths_and_change_every_token():
    """The ids are moved on, around the end of the vocabulary: 49 becomes 1 of 50, by 2."""
    workload = bench.Workload("w", [[0, 48, 49], [7]], [2, 3])
    assert bench.with_other_tokens(workload, 2, 50).prompts == [[2, 0, 1], [9]]
    assert bench.with_other_tokens(workload, 2, 50).num_new_tokens == [2, 3]
    assert bench.with_other_tokens(workload, 0, 50) == workload


def test_arrivals_are_the_same_for_a_seed():
    """Two runs at one rate can be compared."""
    assert bench.arrival_times(2.0, 20, seed=3) == bench.arrival_times(2.0, 20, seed=3)
    assert bench.arrival_times(2.0, 20, seed=3) != bench.arrival_times(2.0, 20, seed=4)


def test_arrivals_are_a_poisson_process():
    """At 5 a second the gaps are 0.2 s on average, and as spread as long: exponential."""
    times = bench.arrival_times(5.0, 20_000)
    assert times == sorted(times)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.2, rel=0.03)
    assert deviation == pytest.approx(0.2, rel=0.05)


def test_twice_the_rate_is_the_same_arrivals_in_half_the_time():
    """Rates differ in nothing but time."""
    slow, fast = bench.arrival_times(1.0, 10), bench.arrival_times(2.0, 10)
    assert [t / 2 for t in slow] == pytest.approx(fast)


# -- the figures of a run ----------------------------------------------------------------------


def test_phases_are_told_apart():
    """The example of `phase_speeds`."""
    times = [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]]
    assert bench.phase_speeds(times, num_prompt_tokens=100, began=0.0) == (50.0, 2.0)


def test_no_phases_where_one_ends_before_another_begins():
    """There was never a time when all decoded."""
    assert bench.phase_speeds([[1.0, 2.0], [3.0, 4.0]], 100, began=0.0) == (None, None)


def test_prompts_alone_have_no_decode_speed():
    """One token each: the prompts took until the last of them came."""
    assert bench.phase_speeds([[1.0], [2.0]], 100, began=0.0) == (50.0, None)
    assert bench.phase_speeds([[2.0]], 100, began=1.0) == (100.0, None)


def test_a_run_counts_from_each_arrival():
    """Requests that came at 100 and 101 s, on the clock of their token times."""
    outputs = [output([102.0, 103.0], 10, 4), output([104.0, 106.0], 20, 1)]
    run = bench.make_run(outputs, [100.0, 101.0], 6.0, num_computed=30 - 5 + 4 - 2 + 7)
    assert run.first_token_s == [2.0, 3.0]
    assert run.end_to_end_s == [3.0, 5.0]
    assert run.gap_s == [1.0, 2.0]
    assert (run.num_prompt_tokens, run.num_output_tokens, run.num_cached_tokens) == (30, 4, 5)
    assert run.num_recomputed_tokens == 7


def make_run(seconds, first=(1.0,), prefill=None, decode=None):
    return bench.Run(seconds, 10, 20, 0, 0, 0, list(first), [0.5], [2.0], prefill, decode)


def test_a_summary_has_medians_and_every_time():
    """Three runs of 4, 1 and 2 s: the median 2 s decides, the best is 1 s."""
    workload = bench.Workload("w", [[1] * 10], [20])
    runs = [make_run(4.0, [1.0]), make_run(1.0, [2.0], 8.0, 5.0), make_run(2.0, [6.0], 4.0, None)]
    summary = bench.summarise(workload, runs)
    assert (summary["seconds"], summary["best_seconds"]) == (2.0, 1.0)
    assert (summary["output_tokens_per_s"], summary["prompt_tokens_per_s"]) == (10.0, 5.0)
    assert summary["prefill_tokens_per_s"] == 6.0
    assert summary["decode_tokens_per_s"] == 5.0
    assert summary["seconds_all"] == [4.0, 1.0, 2.0]
    assert summary["first_token_s"]["p50"] == 2.0
    assert summary["first_token_s_all"] == [[1.0], [2.0], [6.0]]


def test_short_answers_are_no_measurement():
    """An answer of 2 tokens where 3 were asked for, or one that failed, is an error."""
    workload = bench.Workload("w", [[1]], [3])
    with pytest.raises(RuntimeError, match=r"2 tokens, not the 3 asked for \(length\)"):
        bench.check_complete([output([1.0, 2.0])], workload)
    with pytest.raises(RuntimeError, match="0 tokens.*no memory"):
        bench.check_complete([output([], error="no memory")], workload)
    bench.check_complete([output([1.0, 2.0, 3.0])], workload)


# -- with an engine ----------------------------------------------------------------------------


def test_offline_computes_the_whole_workload(llm):
    """Three requests of 20 and 5 tokens, on a clock that moves on."""
    run = bench.time_offline(llm, bench.batch_workload(3, 20, 5, VOCAB_SIZE))
    assert (run.num_prompt_tokens, run.num_output_tokens) == (60, 15)
    assert len(run.gap_s) == 12
    assert all(0 < first < end for first, end in zip(run.first_token_s, run.end_to_end_s))
    assert max(run.end_to_end_s) <= run.seconds
    assert run.decode_tokens_per_s > 0


def test_repeats_are_not_served_by_the_prefix_cache(llm):
    """The same workload again finds its prompts; the repeats of one do not."""
    workload = bench.batch_workload(2, 40, 2, VOCAB_SIZE)
    runs = bench.repeat_offline(llm, workload, repeats=3)
    assert [run.num_cached_tokens for run in runs] == [0, 0, 0]
    assert bench.time_offline(llm, workload).num_cached_tokens == 2 * 32


def test_no_repeat_begins_when_the_time_is_over(llm):
    """One run there is in any case."""
    workload = bench.batch_workload(1, 4, 2, VOCAB_SIZE)
    assert len(bench.repeat_offline(llm, workload, repeats=3, max_seconds=0.0)) == 1
    assert len(bench.repeat_offline(llm, workload, repeats=3)) == 3


def test_a_workload_that_is_too_long_is_refused(llm):
    """Both numbers are in the message, and nothing is computed."""
    with pytest.raises(ValueError, match="260 tokens, more than max_model_len=256"):
        bench.time_offline(llm, bench.batch_workload(1, 250, 10, VOCAB_SIZE))
    assert not llm.has_unfinished_requests()


def test_online_requests_are_all_answered(llm):
    """Each in the order of its arrival, also where they come at once."""
    workload = bench.mixed_workload(6, VOCAB_SIZE, (4, 20), (2, 6))
    run = bench.time_online(llm, workload, [0.0, 0.0, 0.001, 0.002, 0.05, 0.05])
    assert run.num_output_tokens == workload.num_output_tokens
    assert len(run.first_token_s) == 6
    assert min(run.first_token_s) > 0


class SlowLLM:
    """Every step takes one second of a clock of its own, and gives all requests a token."""

    config = SimpleNamespace(max_model_len=100)
    engine = SimpleNamespace(num_computed_tokens=0)

    def __init__(self):
        self.now, self.running, self.added = 50.0, {}, {}

    def add_request(self, prompt, params, request_id):
        self.running[request_id] = (len(prompt), params.max_tokens, [])
        self.added[request_id] = self.now

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        self.now += 1.0
        for _, _, times in self.running.values():
            times.append(self.now)
        ended = {name: r for name, r in self.running.items() if len(r[2]) == r[1]}
        self.running = {name: r for name, r in self.running.items() if name not in ended}
        return [output(times, size, request_id=name) for name, (size, _, times) in ended.items()]

    def sleep(self, seconds):
        self.now += seconds


def test_waiting_for_a_long_step_is_waiting(monkeypatch):
    """A request that comes at 0.5 s, in the middle of a step, has its first token at 2 s: it
    waited 1.5 s, though the engine took it in at 1 s."""
    llm = SlowLLM()
    clock = SimpleNamespace(perf_counter=lambda: llm.now, sleep=llm.sleep)
    monkeypatch.setattr(bench, "time", clock)
    workload = bench.Workload("w", [[1], [1]], [2, 1])
    run = bench.time_online(llm, workload, [0.0, 0.5])
    assert llm.added == {"online-0": 50.0, "online-1": 51.0}
    assert run.first_token_s == [1.0, 1.5]
    assert run.end_to_end_s == [2.0, 1.5]
    assert run.seconds == 2.0


def test_an_idle_engine_waits_for_the_next_arrival(monkeypatch):
    """Nothing to do from 1 to 10 s: it sleeps until then, and no step is made up."""
    llm = SlowLLM()
    clock = SimpleNamespace(perf_counter=lambda: llm.now, sleep=llm.sleep)
    monkeypatch.setattr(bench, "time", clock)
    run = bench.time_online(llm, bench.Workload("w", [[1], [1]], [1, 1]), [0.0, 10.0])
    assert run.first_token_s == [1.0, 1.0]
    assert run.seconds == 11.0
