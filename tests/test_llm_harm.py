"""No call harms another: Ctrl-C anywhere, several threads, ids, and a fork."""

import os
import random
import signal
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tiny_checkpoint import make_checkpoint

from minivllm import LLM, SamplingParams

PROMPTS = ["abcdefgh", "abcdefghij", "the end", "q", "xyz xyz xyz"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SETTINGS = {
    "attention_backend": "torch",
    "num_kv_blocks": 24,
    "block_size": 4,
    "max_num_seqs": 3,
    "progress": False,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def _interrupts_raise():
    """As in a terminal: in a script's background, SIGINT is ignored from the start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def answers_of(llm, prompts, params=GREEDY):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, False)]


def assert_nothing_is_left(llm):
    """Every block and row is free again, and no request is known."""
    while llm.has_unfinished_requests():
        llm.step()
    engine = llm.engine
    assert engine.memory.pool.num_free == engine.memory.pool.num_blocks
    assert not engine.runner.rows.row_of
    assert not engine.scheduler.waiting and not engine.scheduler.running
    assert not llm.requests.parents and not llm.requests.answers
    engine.scheduler.check()


class CtrlC:
    """Sends SIGINT when Python has executed so many lines of the package; several, with gaps."""

    def __init__(self, *lines):
        self.left = list(lines)
        self.package = str(Path(sys.modules["minivllm"].__file__).parent)

    def __enter__(self):
        sys.settrace(self.trace)

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(self.package):
            return None
        if event == "line" and self.left:
            self.left[0] -= 1
            if self.left[0] <= 0:
                self.left.pop(0)
                signal.raise_signal(signal.SIGINT)
        return self.trace


@pytest.mark.long
@pytest.mark.usefixtures("_interrupts_raise")
@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_ctrl_c_anywhere_leaves_no_request_and_no_block(path, overlap):
    """One to three signals at random lines of `generate`; the next call answers as ever."""
    chance = random.Random(int(overlap))
    with LLM(path, overlap=overlap, **SETTINGS) as llm:
        expected = answers_of(llm, PROMPTS)
        num_interrupts = 0
        for _ in range(60):
            first = chance.randrange(1, 5000)
            gaps = [chance.randrange(1, 60) for _ in range(chance.randrange(3))]
            try:
                with CtrlC(first, *gaps):
                    answers_of(llm, PROMPTS)
            except KeyboardInterrupt:
                num_interrupts += 1
            sys.settrace(None)
            assert_nothing_is_left(llm)
        assert num_interrupts > 30, "the signals came too late to say anything"
        assert answers_of(llm, PROMPTS) == expected
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("_interrupts_raise")
def test_ctrl_c_is_noticed_between_two_steps(path):
    """A long answer need not end first."""
    with LLM(path, **SETTINGS) as llm:
        steps = []
        launch = llm.engine.runner.launch

        def interrupted(chunks):
            steps.append(len(chunks))
            if len(steps) == 2:
                signal.raise_signal(signal.SIGINT)
            return launch(chunks)

        llm.engine.runner.launch = interrupted
        with pytest.raises(KeyboardInterrupt):
            answers_of(llm, PROMPTS[:1])
        assert len(steps) == 2
        llm.engine.runner.launch = launch
        assert_nothing_is_left(llm)


def test_a_stream_that_is_dropped_inside_a_step_ends_after_it(path):
    """Python's collector may run anywhere; a request must not vanish from a running step."""
    with LLM(path, overlap=False, **SETTINGS) as llm:
        expected = answers_of(llm, ["q"])
        streams = [llm.stream("xyz", SamplingParams(max_tokens=40, ignore_eos=True))]
        next(streams[0])
        launch = llm.engine.runner.launch

        def dropping(chunks):
            streams.clear()
            assert len(llm.requests.parents) == 2, "the step has begun: its requests must stay"
            llm.engine.runner.launch = launch
            return launch(chunks)

        llm.engine.runner.launch = dropping
        assert answers_of(llm, ["q"]) == expected
        assert not llm.has_unfinished_requests()
        assert_nothing_is_left(llm)


def test_several_threads_get_their_own_answers(path):
    """Calls wait for each other; streams take turns step by step."""
    with LLM(path, **SETTINGS) as llm:
        expected = {prompt: answers_of(llm, [prompt])[0] for prompt in PROMPTS}
        texts = {prompt: "".join(llm.stream(prompt, GREEDY)) for prompt in PROMPTS}
        wrong = []

        def work(number):
            chance = random.Random(number)
            for _ in range(12):
                chosen = chance.sample(PROMPTS, chance.randint(1, 3))
                if chance.random() < 0.3:
                    if "".join(llm.stream(chosen[0], GREEDY)) != texts[chosen[0]]:
                        wrong.append(chosen[0])
                elif answers_of(llm, chosen) != [expected[prompt] for prompt in chosen]:
                    wrong.append(chosen)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert_nothing_is_left(llm)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_told_to_make_its_own(path):
    """Threads and devices do not survive a fork; without the check the child would hang."""
    with LLM(path, **SETTINGS) as llm:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                llm.generate("abc", GREEDY, False)
            except RuntimeError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.close(write)
        assert b"spawn" in os.read(read, 1000)
        os.waitpid(child, 0)


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("temperature", [0, 1], ids=["greedy", "random"])
def test_numbers_that_overflow_end_their_request_alone(path, overlap, temperature):
    """With an error that says so; the others, and all who get its blocks later, go on."""
    with LLM(path, overlap=overlap, **SETTINGS) as llm:
        expected = {prompt: answers_of(llm, [prompt])[0] for prompt in PROMPTS}
        poisoned = llm.tokenizer.encode("zz")[0]
        embedding = llm.engine.runner.model.model.embed_tokens
        forward = embedding.forward

        def overflowing(input_ids):
            out = forward(input_ids)
            out[input_ids == poisoned] = float("nan")
            return out

        embedding.forward = overflowing
        params = SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True)
        bad = {"prompt_token_ids": [*llm.tokenizer.encode("abcdefgh"), poisoned] * 2}
        first, second, third = llm.generate([PROMPTS[1], bad, PROMPTS[3]], [GREEDY, params, GREEDY])
        assert second.outputs[0].finish_reason == "error"
        assert "not finite" in second.error and "dtype" in second.error
        assert second.outputs[0].token_ids == []
        assert first.outputs[0].token_ids == expected[PROMPTS[1]]
        assert third.outputs[0].token_ids == expected[PROMPTS[3]]
        embedding.forward = forward
        assert bool(llm.engine.runner.kv_cache.isfinite().all())
        for prompt in PROMPTS:
            assert answers_of(llm, [prompt])[0] == expected[prompt]
        assert_nothing_is_left(llm)
