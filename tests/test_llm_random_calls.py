"""10,000 random API calls from several threads: no wrong answer without an error, nothing left."""

import random
import sys
import threading
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tiny_checkpoint import make_checkpoint

from minivllm import LLM, SamplingParams

NUM_CALLS = 10_000
NUM_THREADS = 4
PROMPTS = ["abcdefgh", "abcdefghij", "the end", "q", "xyz xyz xyz", [7, 9, 11], "abcdefgh the end"]
LENGTHS = [1, 2, 6]
BAD_PROMPTS = [
    "",
    None,
    5,
    float("nan"),
    b"bytes",
    [],
    [999],
    [1.5],
    {"prompt_token_ids": "abc"},
    {},
]
BAD_CHATS = [[], "Hello", [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": 5}]]


def greedy(length, **more):
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, **more)


def seeded(length):
    """Filters keep far from the boundaries that rounding in another batch could cross."""
    return SamplingParams(temperature=0.8, top_k=3, seed=5, max_tokens=length, ignore_eos=True)


def chat(text):
    return [{"role": "user", "content": text}]


class Caller:
    """Makes random calls on one LLM and keeps what was wrong."""

    def __init__(self, llm, number, expected):
        self.llm = llm
        self.expected = expected
        self.chance = random.Random(number)
        self.number = number
        self.wrong = []
        self.kinds = dict.fromkeys(self.calls(), 0)

    def calls(self):
        names = ("generate", "mixed", "chats", "streams", "leaves", "adds", "aborts", "several")
        return [*names, "refused_prompt", "refused_chat", "refused_settings"]

    def run(self, num_calls):
        for _ in range(num_calls):
            kind = self.chance.choice(self.calls())
            self.kinds[kind] += 1
            try:
                getattr(self, kind)()
            except Exception as error:
                self.wrong.append((kind, repr(error)))

    def compare(self, kind, key, found):
        if found != self.expected[key]:
            self.wrong.append((kind, key, found, self.expected[key]))

    def pick(self):
        index = self.chance.randrange(len(PROMPTS))
        return index, self.chance.choice(LENGTHS)

    def ids(self, output):
        assert output.error is None, output.error
        return output.outputs[0].token_ids

    def generate(self):
        picks = [self.pick() for _ in range(self.chance.randint(1, 4))]
        make = self.chance.choice([greedy, seeded])
        prompts = [PROMPTS[index] for index, _ in picks]
        outputs = self.llm.generate(prompts, [make(length) for _, length in picks], False)
        for (index, length), output in zip(picks, outputs):
            self.compare("generate", (make.__name__, index, length), self.ids(output))

    def mixed(self):
        """One bad prompt among good ones fails alone."""
        index, length = self.pick()
        prompts = [PROMPTS[index], self.chance.choice(BAD_PROMPTS), PROMPTS[index]]
        first, bad, last = self.llm.generate(prompts, greedy(length), False)
        assert bad.error and bad.outputs[0].finish_reason == "error"
        for output in (first, last):
            self.compare("mixed", ("greedy", index, length), self.ids(output))

    def chats(self):
        text = self.chance.choice(["hi", "ho"])
        (output,) = self.llm.chat(chat(text), greedy(6), False)
        self.compare("chats", ("chat", text), self.ids(output))

    def streams(self):
        index, length = self.pick()
        text = "".join(self.llm.stream(PROMPTS[index], greedy(length)))
        self.compare("streams", ("text", index, length), text)

    def leaves(self):
        """A loop that is left drops its stream."""
        for _ in self.llm.stream(PROMPTS[self.pick()[0]], greedy(40)):
            break

    def adds(self):
        """A request of its own, whose answer may come out of another thread's `step`."""
        index, length = self.pick()
        name = f"{self.number}-{self.chance.random()}"
        self.llm.add_request(PROMPTS[index], greedy(length), name)
        while self.llm.requests.has(name):
            for output in self.llm.step():
                assert output.error is None and output.finished

    def aborts(self):
        name = self.chance.choice(["a", "a/1", "request-1"]) + f"-{self.number}"
        self.llm.add_request(
            PROMPTS[self.pick()[0]], greedy(40, n=self.chance.choice([1, 2])), name
        )
        if self.chance.random() < 0.5:
            self.llm.step()
        self.llm.abort(name)  # unless the steps of other threads have ended it
        assert not self.llm.abort(name)

    def several(self):
        """Greedy answers of one prompt are equal."""
        index, length = self.pick()
        (output,) = self.llm.generate([PROMPTS[index]], greedy(length, n=3), False)
        for answer in output.outputs:
            self.compare("several", ("greedy", index, length), answer.token_ids)

    def refused_prompt(self):
        with pytest.raises(ValueError):
            self.llm.add_request(self.chance.choice(BAD_PROMPTS), greedy(2))

    def refused_chat(self):
        with pytest.raises(ValueError):
            self.llm.chat(self.chance.choice(BAD_CHATS), greedy(2), False)

    def refused_settings(self):
        name, value = self.chance.choice(
            [("top_k", 2**63), ("top_p", 0), ("temperature", -1), ("seed", -1), ("stop", 5)]
        )
        with pytest.raises(ValueError, match=name):
            self.llm.generate(["abc"], SamplingParams(**{name: value}), False)


def expected_answers(llm):
    """What each call must answer, asked one at a time."""
    expected = {}
    for index, prompt in enumerate(PROMPTS):
        for length in LENGTHS:
            for make in (greedy, seeded):
                (output,) = llm.generate([prompt], make(length), False)
                expected[make.__name__, index, length] = output.outputs[0].token_ids
            (output,) = llm.generate([prompt], greedy(length), False)
            expected["text", index, length] = output.outputs[0].text
    for text in ("hi", "ho"):
        expected["chat", text] = llm.chat(chat(text), greedy(6), False)[0].outputs[0].token_ids
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_no_call_harms_another(tmp_path, overlap):
    """Good, bad, left and aborted calls in any order; a small pool preempts and evicts."""
    path = str(make_checkpoint(tmp_path / "tiny"))
    settings = {"num_kv_blocks": 40, "block_size": 4, "max_num_seqs": 5, "progress": False}
    with LLM(path, overlap=overlap, attention_backend="torch", **settings) as llm:
        expected = expected_answers(llm)
        callers = [Caller(llm, number, expected) for number in range(NUM_THREADS)]
        share = NUM_CALLS // 2 // NUM_THREADS  # half of them with each loop
        threads = [threading.Thread(target=caller.run, args=(share,)) for caller in callers]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each refusal in a list is a warning
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert [caller.wrong for caller in callers] == [[]] * NUM_THREADS
        assert all(all(caller.kinds.values()) for caller in callers), "a kind of call was not tried"
        while llm.has_unfinished_requests():
            llm.step()
        llm.step()
        assert not llm.requests.parents and not llm.requests.answers
        assert not llm.engine.runner.rows.row_of
        assert llm.engine.memory.pool.num_free == llm.engine.memory.pool.num_blocks
        llm.engine.scheduler.check()
