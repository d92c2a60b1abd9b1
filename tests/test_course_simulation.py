"""The simulated device of chapters 02 and 03: time, arrivals, memory and scores."""

import subprocess
import sys

import pytest

from course.props import simulation as sim
from minivllm.block_manager import BlockManager
from minivllm.request import Chunk
from minivllm.scheduler import Scheduler, TokenCounter

pytestmark = pytest.mark.course

QUEUE = {"a": (5, 2), "b": (6, 3), "c": (4, 1), "d": (9, 1)}
STEPS = ["a5 b3", "a1 b3", "b1 c4", "b1 d7", "d2"]


def test_a_step_costs_weights_tokens_and_context():
    """5,000 for the weights, 25 for the token, 200 // 40 for what it attends to."""
    token = Chunk(None, start=199, length=1, samples=True, is_decode=True)
    assert sim.step_time([token]) == 5030
    assert sim.step_time([token] * 64) == 6920


def test_requests_join_at_any_step_without_a_batch():
    """The second one arrives during the first step and is in the second."""
    requests = [sim.make_request("a", 4, 3), sim.make_request("b", 4, 1, arrival=1)]
    run = sim.serve(requests)
    assert [len(step.chunks) for step in run.trace.steps] == [1, 2, 1]


def test_a_static_batch_waits_for_its_last_arrival_and_its_longest_answer():
    """Two batches of two: the third request waits for the first batch to end."""
    sizes = [(1, 0), (3, 50_000), (1, 60_000)]
    requests = [sim.make_request(str(i), 4, n, at) for i, (n, at) in enumerate(sizes)]
    run = sim.serve(requests, batch=2)
    assert run.trace.steps[0].start == 0.05
    assert [len(step.chunks) for step in run.trace.steps] == [2, 1, 1, 1]


def test_arrivals_with_a_gap_let_the_clock_jump():
    """The engine is idle until the second request arrives."""
    run = sim.serve([sim.make_request("a", 4, 1), sim.make_request("b", 4, 1, arrival=1_000_000)])
    assert run.trace.steps[1].start == 1.0
    assert sim.first_token_times(run) == pytest.approx([0.0051, 0.0051])


def test_hand_played_steps_are_compared_with_the_scheduler():
    """In any order; an empty guess gives nothing away."""
    told = sim.play([*STEPS[:2], "c4 b1", "b1 d8", ""], QUEUE, budget=8).split("\n")
    assert told == [
        "step 1: a5 b3 ✓",
        "step 2: a1 b3 ✓",
        "step 3: c4 b1 ✓",
        "step 4: b1 d8 ✗",
        "step 5: your turn",
    ]


def test_hand_played_steps_may_go_on_after_the_last_answer():
    """There is nothing left to compute, and no error."""
    assert sim.play([*STEPS, "d1", ""], QUEUE, budget=8).endswith("step 6: d1 ✗\nstep 7: your turn")


def test_scores_count_what_preemption_costs():
    """Four requests grow from 10 to 34 tokens in a memory for 80."""
    requests = [sim.make_request(name, 10, 24) for name in "abcd"]
    run = sim.serve(requests, budget=64, memory=TokenCounter(80))
    assert sim.preemptions(run) == [(11, "d"), (17, "c")]
    assert sim.computed_twice(run) == 46
    assert max(sum(held.values()) for held in run.held) <= 80


def test_speed_and_wait_are_those_of_the_whole_run():
    """One request: a prompt of 4 tokens, then two decode steps."""
    run = sim.serve([sim.make_request("a", 4, 3)])
    speed, wait = sim.speed_and_wait(run)
    assert speed == pytest.approx(3e6 / run.now)
    assert wait == pytest.approx(run.now / 3 / 1000)
    assert [ms for _, ms in sim.waits(run.requests[0])] == pytest.approx([5.025, 5.025])


def test_blocks_are_recorded_with_a_block_manager():
    """The trace has tables, and utilisation is their share of the pool."""
    run = sim.serve([sim.make_request("a", 16, 1)], memory=BlockManager(4, 16))
    assert run.trace.steps[0].block_tables == {"a": (0,)}
    assert sim.utilisation(run) == 0.25


def test_policies_know_the_time_and_the_running_requests():
    """What the open problems of both chapters build on."""
    seen = []

    class Timed(sim.Clocked):
        def schedule(self):
            seen.append(self.now)
            return super().schedule()

    class Informed(sim.Informed):
        def can_allocate(self, num_blocks, keep_watermark):
            seen.append([request.request_id for request in self.running])
            return super().can_allocate(num_blocks, keep_watermark)

    sim.serve([sim.make_request("a", 4, 2)], kind=Timed, memory=Informed(4, 16))
    assert seen == [0, [], 5100, ["a"]]


def test_loads_are_the_same_each_time():
    """Scores can be compared from day to day."""
    sizes = [
        [(r.num_prompt_tokens, r.max_num_tokens, r.metrics.arrival_time) for r in make()]
        for make in (lambda: sim.rush(50_000, 10), lambda: sim.rush(50_000, 10))
    ]
    assert sizes[0] == sizes[1]
    assert [prompt for prompt, _, _ in sizes[0]][4::5] == [4000, 4000]


def test_a_broken_scheduler_is_noticed():
    """An empty step while requests wait would never end."""

    class Idle(Scheduler):
        def schedule_waiting(self, output):
            """Admit no request."""

    with pytest.raises(AssertionError, match="the step is empty"):
        sim.serve([sim.make_request("a", 4, 1)], kind=Idle)


def test_it_does_not_import_torch():
    """The first cells of two chapters start in a fraction of a second."""
    code = "import sys, course.props.simulation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
