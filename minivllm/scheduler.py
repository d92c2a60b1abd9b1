"""Who computes how many tokens in the next step.

Continuous batching (Orca, Yu et al. 2022) with chunked prefill (Sarathi-Serve, Agrawal et al.
2024) under one budget of tokens per step. Leaves out where keys and values lie: it asks a
`Memory` for room. Notebook 02.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from minivllm.request import Chunk, FinishReason, Request, SchedulerOutput


class Memory(Protocol):
    """What the scheduler asks of the KV memory. `TokenCounter` is the smallest one that works,
    `block_manager.BlockManager` (Notebook 03) the real one."""

    @property
    def max_tokens(self) -> int:
        """Tokens that fit if one request has all of it."""

    def reuse_prefix(self, request: Request) -> int:
        """Give the request what is already computed of its tokens; returns how many tokens."""

    def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
        """Make room for the request's first `num_tokens` tokens; False, and no change, if
        there is none. `keep_watermark`: and leave a reserve for those that run."""

    def publish(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens are computed and known: others may reuse them."""

    def free(self, request: Request) -> None:
        """Take back all room of the request."""

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that exactly these requests hold room."""


class TokenCounter:
    """A memory that only counts tokens: no blocks, no prefixes, no watermark."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens_of: dict[str, int] = {}

    def reuse_prefix(self, request: Request) -> int:
        """Nothing is ever known."""
        return 0

    def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
        """Count the request with `num_tokens` tokens if all together still fit."""
        others = sum(self.tokens_of.values()) - self.tokens_of.get(request.request_id, 0)
        if others + num_tokens > self.max_tokens:
            return False
        self.tokens_of[request.request_id] = num_tokens
        return True

    def publish(self, request: Request, num_tokens: int) -> None:
        """Nothing is ever reused."""

    def free(self, request: Request) -> None:
        """Count the request no more."""
        self.tokens_of.pop(request.request_id, None)

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that exactly these requests are counted."""
        assert set(self.tokens_of) == {r.request_id for r in requests}, "a request is left over"


def next_chunk(request: Request, budget: int) -> Chunk:
    """The next part of a running request, at most `budget` (>= 1) tokens of it.

    It starts behind the computed tokens. It samples if it ends with the last token there is
    (`num_tokens`), and `is_decode` is what `request.is_decoding` says. With 100 tokens, 64 of
    them computed: `budget=20` gives positions 64 to 84 and no sample, `budget=50` gives 64 to
    100 and a sample. A decoding request has one token left.
    """
    start = request.num_computed_tokens
    length = min(budget, request.num_tokens - start)
    # Only the output of the last token says what comes next.
    samples = start + length == request.num_tokens
    return Chunk(request, start, length, samples, is_decode=request.is_decoding)


def finish_reason(request: Request) -> FinishReason | None:
    """Why the answer ends with the token read last, or None if it goes on.

    "stop" if that token is one of `stop_token_ids`, else "length" if `token_ids` (what has been
    read back) holds `max_num_tokens` tokens. Where both hold it is "stop".
    """
    if request.token_ids[-1] in request.stop_token_ids:
        return "stop"
    if len(request.token_ids) >= request.max_num_tokens:
        return "length"
    return None


class Scheduler:
    """The queues, and the choice made in each step.

    Invariant: an unfinished request is in `waiting` (no memory) or in `running` (memory for
    all its tokens so far), never in both; `running` is in order of admission.
    """

    def __init__(self, memory: Memory, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """`max_num_seqs` requests run at once at most, `max_num_batched_tokens` (at least as
        many) tokens are computed in a step."""
        self.memory = memory
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_unread_steps = 0  # while there are any, memory may come free

    def __repr__(self) -> str:
        return f"Scheduler({len(self.waiting)} waiting, {len(self.running)} running)"

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether anything is waiting or running."""
        return bool(self.waiting or self.running)

    def add_request(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's chunks (`_take` each) and count them as computed.

        1. Each decoding request of `running`, in order, gets one token if there is room for it
           (`make_room`) and if its tokens, unread ones included, are fewer than `max_num_tokens`.
        2. Running prompts get what is left of `max_num_batched_tokens`, in order.
        3. Requests from the queue get what is left then (`schedule_waiting`).
        Budget 10, one answer under way, a prompt of 20: chunks of 1 and 9, 1 and 9, 1 and 2.
        May be called again before the results of the last step are read (`update`).
        """
        output = SchedulerOutput()
        # A copy: making room takes the newest away, and those decode no more.
        for request in list(self.running):
            wants_token = request.is_decoding and request.num_tokens < request.max_num_tokens
            if wants_token and self.make_room(request, output):
                self._take(next_chunk(request, budget=1), output)
        for request in [r for r in self.running if not r.is_decoding]:
            budget = self.max_num_batched_tokens - output.num_tokens
            if budget > 0:
                self._take(next_chunk(request, budget), output)
        self.schedule_waiting(output)
        return output

    def schedule_waiting(self, output: SchedulerOutput) -> None:
        """Move requests from the queue, in order, to the end of `running`, each with a chunk.

        Ends when nobody waits, or nothing is left of the budget (`output` has used a part), or
        `max_num_seqs` requests run, or the first in the queue is not admitted: it waits for
        memory to come free. If nobody runs and no step is unread (`num_unread_steps`), none
        ever will: then it leaves the queue, fails (`_fail`), and the next one is tried.
        """
        budget = self.max_num_batched_tokens - output.num_tokens
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if self.admit(request):
                self.running.append(self.waiting.popleft())
                chunk = next_chunk(request, budget)
                self._take(chunk, output)
                budget -= chunk.length
            elif self.running or self.num_unread_steps:
                break
            else:
                self._fail(self.waiting.popleft(), output)

    def admit(self, request: Request) -> bool:
        """Get memory for all tokens of a waiting request; False, and no change, without it.

        `memory.reuse_prefix` comes first: of a preempted request with 100 tokens, 40 of them
        answer, it may find 64. Then 64 are cached and computed (`num_cached_tokens`,
        `num_computed_tokens`) and all 100 are prefill (`num_prefill_tokens`). The watermark is
        kept if anybody runs. False at once while a step in flight computes the request.
        """
        if request.num_in_flight:
            return False
        num_cached_tokens = self.memory.reuse_prefix(request)
        # With nobody running there is nobody to keep a reserve for.
        if not self.memory.allocate(request, request.num_tokens, bool(self.running)):
            self.memory.free(request)  # what was reused has an owner too many
            return False
        request.num_cached_tokens = request.num_computed_tokens = num_cached_tokens
        request.num_prefill_tokens = request.num_tokens
        return True

    def make_room(self, request: Request, output: SchedulerOutput) -> bool:
        """Get memory for one token behind the computed ones of a decoding request.

        While there is none, the newest of `running` is preempted (`_preempt`), be it `request`
        itself: of two with 6 tokens each in a memory for 12, the older gets its 7th. Alone, it
        fails (`_fail`) and leaves `running`; but while steps are unread (`num_unread_steps`) it
        only waits. Returns whether `request` can have its token.
        """
        while not self.memory.allocate(request, request.num_computed_tokens + 1):
            victim = self.running[-1]
            if len(self.running) > 1:
                self._preempt(victim, output)
            elif not self.num_unread_steps:
                self.running.clear()
                self._fail(request, output)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request, output: SchedulerOutput) -> None:
        """Send a running request back to the head of the queue, to be computed again, answer so
        far included. Not in the same step: it needs all that it had, and less is free now."""
        self.running.remove(request)
        self.memory.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        output.preempted.append(request)

    def _fail(self, request: Request, output: SchedulerOutput) -> None:
        """End one request that cannot go on, for itself alone."""
        self.memory.free(request)
        request.finish_reason = "error"
        request.error = (
            f"request {request.request_id} needs KV memory for {request.num_tokens} tokens, more"
            f" than there is in all ({self.memory.max_tokens}); shorten it or raise num_kv_blocks"
        )
        output.failed.append(request)

    def _take(self, chunk: Chunk, output: SchedulerOutput) -> None:
        """Put a chunk into the step and count it as computed."""
        self.num_unread_steps += not output.chunks  # the first one makes it a step
        output.chunks.append(chunk)
        chunk.request.num_computed_tokens = chunk.end
        chunk.request.num_in_flight += 1
        chunk.request.num_pending_tokens += chunk.samples

    def update(self, output: SchedulerOutput, token_ids: list[int]) -> list[Request]:
        """Take in one step's results; returns the requests that finished with it.

        `token_ids` holds one id for each chunk with `samples`, in order. What was computed is
        published now, not before, and then freed.
        """
        sampled = iter(token_ids)
        finished: list[Request] = []
        self.num_unread_steps -= bool(output.chunks)
        for chunk in output.chunks:
            request = chunk.request
            self._return(chunk)
            token_id = next(sampled) if chunk.samples else None
            # A request that ended while this step was in flight drops the step's token.
            if token_id is not None and not request.is_finished:
                request.token_ids.append(token_id)
                request.finish_reason = finish_reason(request)
                if request.is_finished:
                    finished.append(request)
            self.memory.publish(request, chunk.end)
            self._free_if_over(request)
        self._dismiss(finished)
        return finished

    def _dismiss(self, finished: list[Request]) -> None:
        """Take finished requests out of the queues."""
        if finished:
            self.running = [request for request in self.running if not request.is_finished]
        for request in finished:
            # Preempted while its last token was in flight: it waits to be computed again.
            if request.num_computed_tokens == 0:
                self.waiting.remove(request)

    def rollback(self, output: SchedulerOutput) -> None:
        """Forget a step whose results never came (an error or Ctrl-C); the newest one first.

        Its requests stand where they stood before it, and can go on or be aborted.
        """
        self.num_unread_steps -= bool(output.chunks)
        for chunk in output.chunks:
            request = chunk.request
            self._return(chunk)
            # A request preempted since then has 0 tokens computed, and stays at that.
            request.num_computed_tokens = min(chunk.start, request.num_computed_tokens)
            self._free_if_over(request)

    def _return(self, chunk: Chunk) -> None:
        chunk.request.num_in_flight -= 1
        chunk.request.num_pending_tokens -= chunk.samples

    def _free_if_over(self, request: Request) -> None:
        # While a step in flight writes to its blocks, nobody else may have them.
        if request.is_finished and request.num_in_flight == 0:
            self.memory.free(request)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> Request | None:
        """End a waiting or running request; returns it, or None if there is no such one.

        Its memory is freed at once, or after the steps in flight that still write to it.
        """
        everybody = (*self.waiting, *self.running)
        request = next((r for r in everybody if r.request_id == request_id), None)
        if request is None:
            return None
        request.finish_reason = reason
        self.waiting = deque(r for r in self.waiting if r is not request)
        self.running = [r for r in self.running if r is not request]
        self._free_if_over(request)
        return request

    def check(self, in_flight: Iterable[Request] = ()) -> None:
        """Assert the invariant between two steps; `in_flight`: the requests of unread ones."""
        assert len(self.running) <= self.max_num_seqs, "more requests run than there are rows"
        for request in self.waiting:
            has_none = not request.block_table and request.num_computed_tokens == 0
            assert has_none, f"{request.request_id} waits and owns memory"
            assert request not in self.running, f"{request.request_id} waits and runs"
        for request in (*self.waiting, *self.running):
            assert not request.is_finished, f"{request.request_id} is finished and still queued"
        ended = {r.request_id: r for r in in_flight if r.is_finished}
        self.memory.check([*self.running, *ended.values()])
