"""Leader and workers: messages about a step, and what a worker does with them."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from row_makers import make_request

from minivllm.leader import Directory, Follower, StepMessage, WatchedEvent
from minivllm.request import Chunk


def message_of(directory, *chunks, is_plain=True):
    """Return the message about these chunks as a worker receives it."""
    return StepMessage.decode(directory.describe(chunks, is_plain).encode())


def prompt(request, samples=True):
    return Chunk(request, 0, len(request.token_ids), samples=samples, is_decode=False)


def decode(request, position):
    return Chunk(request, position, 1, samples=True, is_decode=True)


# -- the leader's side --


@pytest.mark.exercise("leader.Directory.describe")
def test_a_new_request_is_sent_whole():
    """The message has its number, tokens, blocks, and chunk."""
    directory = Directory()
    message = message_of(directory, prompt(make_request("a", [5, 6], [3])))
    assert message.new_tokens == [[0, [5, 6]]], "request a is new: are its tokens sent?"
    assert message.new_blocks == [[0, [3]]], "the workers know none of its blocks: is [3] sent?"
    assert message.chunks == [[0, 0, 2, True, False]], (
        "number, start, length, samples, is_decode: under which number does the chunk go?"
    )


@pytest.mark.exercise("leader.Directory.describe")
def test_known_tokens_and_blocks_are_not_sent_again():
    """A decoding request costs one entry per step."""
    directory, request = Directory(), make_request("a", [5, 6], [3])
    message_of(directory, prompt(request))
    request.token_ids.append(7)
    message = message_of(directory, decode(request, 2))
    assert message.new_tokens == [], (
        "the workers know request a, and its new token from the sampler: do you send tokens again?"
    )
    assert message.new_blocks == [], "its table hasn't grown: do you send blocks that are known?"
    assert message.chunks == [[0, 2, 1, True, True]], (
        "does it keep its number, and decode position 2?"
    )


@pytest.mark.exercise("leader.Directory.describe")
def test_only_gained_blocks_are_sent():
    """Each block is sent once, when the table has grown by it."""
    directory, request = Directory(), make_request("a", [5] * 4, [3])
    message_of(directory, prompt(request))
    request.block_table += [8, 2]
    message = message_of(directory, decode(request, 4))
    assert message.new_blocks == [[0, [8, 2]]], (
        "the table grew from [3] to [3, 8, 2]: do you send only the new blocks?"
    )
    message = message_of(directory, decode(request, 5))
    assert message.new_blocks == [], "blocks 8 and 2 were sent a step ago: do you record it?"


@pytest.mark.exercise("leader.Directory.describe")
def test_flags_are_the_schedulers():
    """The last token of a prompt is a single token, but not a decode."""
    directory, request = Directory(), make_request("a", [5, 6, 7], [3])
    message = message_of(directory, Chunk(request, 0, 2, samples=False, is_decode=False))
    assert message.chunks[0][3:] == [False, False], (
        "a prompt's first part: are both flags the chunk's own?"
    )
    message = message_of(directory, Chunk(request, 2, 1, samples=True, is_decode=False))
    assert message.chunks[0][3:] == [True, False], (
        "one token, the last of a prompt: is is_decode the chunk's own, or guessed from the length?"
    )
    assert message_of(directory, decode(request, 3), is_plain=False).is_plain is False, (
        "the step isn't plain: does the message say so?"
    )


@pytest.mark.exercise("leader.Directory.describe")
def test_a_release_is_sent_once():
    """A worker that received it twice would look for a request that it doesn't have."""
    directory = Directory()
    first, second = make_request("a", [5], [3]), make_request("b", [6], [4])
    message_of(directory, prompt(first))
    directory.release(first)
    message = message_of(directory, prompt(second))
    assert message.released == [0], (
        "request 0 has been released: is it in the message, or do you clear the very list that"
        " the message has?"
    )
    message = message_of(directory, decode(second, 1))
    assert message.released == [], "the workers received it a step ago: is the list emptied?"


@pytest.mark.exercise("leader.Directory.describe")
def test_a_request_that_comes_back_is_new():
    """After a preemption it gets another number, and all its tokens and blocks are sent."""
    directory, request = Directory(), make_request("a", [5, 6], [3])
    message_of(directory, prompt(request))
    directory.release(request)
    request.token_ids.append(9)
    request.block_table[:] = [7]
    message = message_of(directory, Chunk(request, 0, 3, samples=True, is_decode=False))
    assert message.released == [0], "its first number was released: is it in the message?"
    assert message.new_tokens == [[1, [5, 6, 9]]], (
        "it's new to the workers: are all tokens sent again?"
    )
    assert message.new_blocks == [[1, [7]]], "it's new to the workers: are all blocks sent again?"


@pytest.mark.exercise("leader.Directory.describe")
def test_several_requests_keep_their_order():
    """The example of the docstring."""
    directory, known = Directory(), make_request("b", [1] * 16, [9])
    directory.next_number = 4
    message_of(directory, prompt(known))
    known.block_table.append(7)
    message = message_of(directory, prompt(make_request("a", [5, 6], [3])), decode(known, 16))
    assert message.new_blocks == [[5, [3]], [4, [7]]], (
        "is a (number 5) before b (number 4), as in the chunks?"
    )
    assert message.chunks == [[5, 0, 2, True, False], [4, 16, 1, True, True]], (
        "are the chunks in the order in which the step computes them?"
    )


def test_a_release_of_an_unknown_request_is_ignored():
    """It was aborted before it ran."""
    directory = Directory()
    directory.release(make_request("never ran", [1], []))
    assert directory.released == []


def test_messages_are_json():
    """They are compact, and decode to the same message."""
    message = StepMessage([3], [(4, [1, 2])], [(4, [7])], [(4, 0, 2, True, False)], True)
    assert json.loads(message.encode())["chunks"] == [[4, 0, 2, True, False]]
    assert len(message.encode()) < 130
    assert StepMessage.decode(message.encode()).new_tokens == [[4, [1, 2]]]


# -- a worker's side --


@dataclass
class Plan:
    """A runner's plan of a step; a dataclass, as the real one is."""

    chunks: list[Chunk]
    is_plain: bool = True


class Runner:
    """Records its calls; it has `num_rows` rows."""

    def __init__(self, num_rows=2):
        self.num_rows, self.holding = num_rows, set()
        self.stepped, self.chunks = [], []

    def plan(self, chunks):
        self.holding |= {chunk.request.request_id for chunk in chunks}
        if len(self.holding) > self.num_rows:
            raise LookupError(f"{len(self.holding)} requests for {self.num_rows} rows")
        self.chunks.append(list(chunks))
        return Plan(list(chunks))

    def step(self, plan):
        self.stepped.append(plan)

    def release(self, request):
        self.holding.discard(request.request_id)


def follow(*messages, num_rows=2):
    """Return a worker that has computed these messages, and the error it raised, if any."""
    follower = Follower(Runner(num_rows))
    try:
        for message in messages:
            follower.compute(message)
    except Exception as error:  # the assert shows it
        return follower, repr(error)
    return follower, None


FIRST = StepMessage([], [(0, [5, 6])], [(0, [3])], [(0, 0, 2, True, False)], True)


@pytest.mark.exercise("leader.Follower.compute")
def test_a_worker_computes_the_chunks_of_the_message():
    """It has requests of its own, by number."""
    follower, error = follow(FIRST)
    assert error is None, "the first message: do you call hear before you look up its requests?"
    assert len(follower.runner.stepped) == 1, "one message is one step: do you start exactly one?"
    (chunk,) = follower.runner.chunks[0]
    assert chunk.request.token_ids == [5, 6], "is it the request that the message introduces?"
    assert chunk.request.block_table == [3], "is its block table up to date before the step?"
    assert (chunk.start, chunk.length, chunk.samples) == (0, 2, True), (
        "are start, length and samples those of the message?"
    )


@pytest.mark.exercise("leader.Follower.compute")
def test_released_rows_are_free_before_the_step():
    """There is one row, and the new request needs it."""
    second = StepMessage([0], [(1, [7])], [(1, [4])], [(1, 0, 1, True, False)], True)
    follower, error = follow(FIRST, second, num_rows=1)
    assert error is None, (
        "there is one row, and request 0 is released: is its row free before the plan is made?"
    )
    assert list(follower.requests) == [1], "does the worker forget request 0, and know request 1?"


@pytest.mark.exercise("leader.Follower.compute")
@pytest.mark.parametrize("is_decode", [True, False])
def test_a_worker_decides_nothing(is_decode):
    """A single token may be a decode or the last of a prompt; only the leader knows."""
    second = StepMessage([], [], [], [(0, 1, 1, True, is_decode)], True)
    follower, _ = follow(FIRST, second)
    chunk = follower.runner.chunks[-1][0]
    assert chunk.is_decode is is_decode, (
        "one token: is is_decode the message's, or do you infer it from the length?"
    )


@pytest.mark.exercise("leader.Follower.compute")
@pytest.mark.parametrize("is_plain", [True, False])
def test_the_leader_says_which_graph(is_plain):
    """Ranks that took different paths through a step would hang."""
    follower, _ = follow(StepMessage([], [(0, [5])], [], [(0, 0, 1, True, False)], is_plain))
    assert follower.runner.stepped[0].is_plain is is_plain, (
        "the worker's own plan always says plain: do you take is_plain from the message?"
    )


@pytest.mark.exercise("leader.Follower.compute")
def test_chunks_keep_the_order_of_the_message():
    """Row by row, all ranks must add up the same tokens."""
    message = StepMessage(
        [],
        [(4, [5, 6]), (5, [7])],
        [(4, [3]), (5, [8])],
        [(5, 0, 1, True, False), (4, 0, 2, True, False)],
        True,
    )
    follower, _ = follow(message)
    found = [chunk.request.token_ids for chunk in follower.runner.chunks[0]]
    assert found == [[7], [5, 6]], "request 5 is first in the message: is it first in the plan?"


@pytest.mark.exercise("leader.Follower.compute")
def test_a_worker_does_not_wait_for_its_device():
    """The next message may be on its way."""
    waits = []
    runner = Runner()
    runner.step = lambda plan: SimpleNamespace(wait=lambda: waits.append(plan))
    Follower(runner).compute(FIRST)
    assert waits == [], "the step is started: does compute return without waiting for it?"


def test_following_ends_with_an_empty_message():
    """Earlier messages are computed."""
    messages = iter([FIRST.encode(), b"", FIRST.encode()])
    follower = Follower(Runner())
    follower.follow(lambda: next(messages))
    assert len(follower.runner.stepped) == 1


def test_directory_and_followers_agree():
    """After each of twelve steps the worker's tables equal the leader's."""
    directory, follower = Directory(), Follower(Runner(99))
    requests = {}
    for step in range(12):
        requests[step] = make_request(f"r{step}", [step] * 3, [step])
        if step % 3 == 2:
            directory.release(requests.pop(step - 1))
        for request in requests.values():
            request.block_table += [step] * (len(request.block_table) % 2)
        chunks = [prompt(request) for request in requests.values()]
        follower.compute(message_of(directory, *chunks))
        known = {name: directory.number_of[r.request_id] for name, r in requests.items()}
        assert set(follower.requests) == set(known.values())
        for name, number in known.items():
            assert follower.requests[number].block_table == requests[name].block_table


# -- around it --


def test_an_event_that_never_completes_raises_an_error():
    """If a worker dies, the GPU hangs in a sum while the host checks the workers."""
    looks = []

    def check():
        looks.append(1)
        if len(looks) == 3:
            raise RuntimeError("worker 1 of 2 ended")

    with pytest.raises(RuntimeError, match="worker 1"):
        WatchedEvent(SimpleNamespace(query=lambda: False), check).synchronize()
    WatchedEvent(SimpleNamespace(query=lambda: True), check).synchronize()
    assert len(looks) == 3
