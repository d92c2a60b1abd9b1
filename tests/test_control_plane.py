"""Scheduler, block manager and prefix cache together under random use, against a plain model
of the memory: what is written where, and what each chunk is about to read.

Covers the serial loop and the loop that launches a step before it has read the last one.
"""

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minivllm.block_manager import BlockManager
from minivllm.prefix_cache import PrefixCache, hash_block
from minivllm.request import Request, SamplingParams
from minivllm.scheduler import Scheduler

STOP = 3


class ControlPlane(RuleBasedStateMachine):
    """Adds, steps, reads and aborts in any order.

    `slots` is the KV cache: for each slot, all tokens up to the one whose key it holds.
    `texts` is the device's knowledge of each request: its tokens, unread ones included.
    """

    @initialize(
        num_blocks=st.integers(1, 10),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 4),
        extra_budget=st.integers(0, 9),
        watermark=st.sampled_from([0, 0.2]),
        collide=st.booleans(),
    )
    def build(self, num_blocks, block_size, max_num_seqs, extra_budget, watermark, collide):
        def bad_hash(parent, tokens):
            return sum(tokens) % 2

        self.block_size = block_size
        prefixes = PrefixCache(block_size, bad_hash if collide else hash_block)
        self.memory = BlockManager(num_blocks, block_size, watermark, prefixes)
        self.scheduler = Scheduler(self.memory, max_num_seqs, max_num_seqs + extra_budget)
        self.slots = {}
        self.texts = {}
        self.in_flight = []
        self.all = []

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        max_tokens=st.integers(1, 8),
    )
    def add(self, prompt, max_tokens):
        request = Request(
            request_id=str(len(self.all)),
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            sampling_params=SamplingParams(),
            max_num_tokens=len(prompt) + max_tokens,
            stop_token_ids=frozenset([STOP]),
        )
        self.all.append(request)
        self.texts[request.request_id] = list(prompt)
        self.scheduler.add_request(request)

    @precondition(lambda self: self.scheduler.has_unfinished_requests and len(self.in_flight) < 3)
    @rule(data=st.data())
    def launch(self, data):
        output = self.scheduler.schedule()
        assert output.chunks or output.failed or self.in_flight, "nothing can be done"
        assert output.num_tokens <= self.scheduler.max_num_batched_tokens
        phases = [chunk.is_decode for chunk in output.chunks]
        assert phases == sorted(phases, reverse=True), "decodes come first"
        for request in output.failed:
            assert request.num_tokens > self.memory.max_tokens, "it would have fitted"
        for request in output.preempted:
            # What the step in flight has sampled is read before the request runs again.
            assert request in self.scheduler.waiting
        sampled = []
        for chunk in output.chunks:
            self.compute(chunk)
            if chunk.samples:
                token_id = data.draw(st.integers(0, STOP))
                self.texts[chunk.request.request_id][chunk.end :] = [token_id]
                sampled.append(token_id)
        self.in_flight.append((output, sampled))

    def compute(self, chunk):
        """Read all positions before the chunk, write the chunk's own."""
        request, text = chunk.request, self.texts[chunk.request.request_id]
        assert chunk.length >= 1, "every chunk has a token to compute"
        if not chunk.is_decode:
            # A prefill writes the host's tokens into the row: it must know all of them.
            assert request.num_pending_tokens == chunk.samples, "a token was not collected"
        assert len(request.block_table) * self.block_size >= chunk.end
        for position in range(chunk.start):
            written = self.slots.get(self.slot(request, position))
            assert written == text[: position + 1], f"position {position} holds something else"
        for position in range(chunk.start, chunk.end):
            self.slots[self.slot(request, position)] = text[: position + 1]

    def slot(self, request, position):
        block_id = request.block_table[position // self.block_size]
        return block_id * self.block_size + position % self.block_size

    @precondition(lambda self: self.in_flight)
    @rule()
    def read(self):
        output, sampled = self.in_flight.pop(0)
        for request in self.scheduler.update(output, sampled):
            assert request.is_finished
            assert request not in self.scheduler.running
        chunks = [chunk for output, _ in self.in_flight for chunk in output.chunks]
        self.scheduler.check(chunk.request for chunk in chunks)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.all))
        was_finished = request.is_finished
        assert (self.scheduler.abort(request.request_id) is None) == was_finished

    @precondition(lambda self: self.in_flight)
    @rule()
    def break_off(self):
        while self.in_flight:
            self.forget(self.in_flight.pop()[0])
        self.scheduler.check()

    def forget(self, output):
        self.scheduler.rollback(output)
        for chunk in output.chunks:
            if chunk.samples:
                del self.texts[chunk.request.request_id][chunk.end :]

    @invariant()
    def every_block_is_free_cached_or_owned(self):
        if not self.all:
            return
        owners = [r for r in self.all if r.block_table]
        self.memory.check(owners)
        self.memory.prefixes.check()
        for request in owners:
            assert request in self.scheduler.running or request.num_in_flight, "memory is lost"

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        while self.in_flight:
            self.read()
        for _ in range(1000):
            if not self.scheduler.has_unfinished_requests:
                break
            output = self.scheduler.schedule()
            for chunk in output.chunks:
                self.compute(chunk)
                if chunk.samples:
                    self.texts[chunk.request.request_id][chunk.end :] = [0]
            self.scheduler.update(output, [0 for chunk in output.chunks if chunk.samples])
        assert all(r.is_finished for r in self.all), "every request comes to an end"
        self.memory.check([])
        assert self.memory.pool.num_free == self.memory.pool.num_blocks


ControlPlane.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    # No shrinking: with this many steps it takes minutes, and the failing steps are printed.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    derandomize=True,  # the same examples in every run of CI
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestControlPlane = ControlPlane.TestCase
