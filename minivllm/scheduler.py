"""Choose which requests the next step computes, and how many tokens of each.

Continuous batching (Orca, Yu et al. 2022) with chunked prefill (Sarathi-Serve, Agrawal et al.
2024) under one token budget per step. Does not decide where keys and values are stored: it asks a
`Memory` for room. Notebook 02.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from minivllm.request import INVALID_TOKEN, Chunk, FinishReason, Request, SchedulerOutput


class Memory(Protocol):
    """What the scheduler needs from the KV memory. `TokenCounter` is a minimal implementation,
    `block_manager.BlockManager` (Notebook 03) the real one."""

    @property
    def max_tokens(self) -> int:
        """Number of tokens that fit if one request uses the whole memory."""

    def reuse_prefix(self, request: Request) -> int:
        """Give the request memory for its first tokens that are already computed; return how many
        tokens these are."""

    def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
        """Make room for `num_tokens` tokens of the request in total. Return False and change
        nothing if there is not enough. `keep_watermark`: leave a reserve for running requests."""

    def publish(self, request: Request, num_tokens: int) -> None:
        """Let other requests reuse the first `num_tokens` tokens, which are now computed."""

    def free(self, request: Request) -> None:
        """Release all memory of the request."""

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that exactly these requests hold memory."""


class TokenCounter:
    """A memory that only counts tokens, without blocks, prefixes or a watermark."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens_of: dict[str, int] = {}

    def reuse_prefix(self, request: Request) -> int:
        """Return 0: there are no prefixes to find."""
        return 0

    def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
        """Set the request's count to `num_tokens` if that fits next to all other requests."""
        others = sum(self.tokens_of.values()) - self.tokens_of.get(request.request_id, 0)
        if others + num_tokens > self.max_tokens:
            return False
        self.tokens_of[request.request_id] = num_tokens
        return True

    def publish(self, request: Request, num_tokens: int) -> None:
        """Do nothing: there is no content to reuse."""

    def free(self, request: Request) -> None:
        """Stop counting the request."""
        self.tokens_of.pop(request.request_id, None)

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that exactly these requests are counted."""
        expected = {request.request_id for request in requests}
        assert set(self.tokens_of) == expected, "the wrong requests hold memory"


def next_chunk(request: Request, budget: int) -> Chunk:
    """Return the next chunk of a running request, of at most `budget` (>= 1) tokens.

    Does not change the request. Example: 64 of 100 tokens are computed. `budget=20` gives
    positions 64 to 84 without a sample, `budget=50` gives positions 64 to 100 with a sample.
    """
    start = request.num_computed_tokens
    length = min(budget, request.num_tokens - start)
    # Only the output at the last known token predicts a token that is not known yet.
    samples = start + length == request.num_tokens
    return Chunk(request, start, length, samples, is_decode=request.is_decoding)


def finish_reason(request: Request) -> FinishReason | None:
    """Return why the answer ends with the token that was read last, or None if it continues.

    "stop": the token is in `stop_token_ids`. "length": prompt and answer have reached
    `max_num_tokens`, not counting tokens in flight. "stop" takes precedence.
    Example: a prompt of 2 tokens, `max_num_tokens=5`: the third token of the answer ends it.
    """
    if request.token_ids[-1] in request.stop_token_ids:
        return "stop"
    if len(request.token_ids) >= request.max_num_tokens:
        return "length"
    return None


class Scheduler:
    """Two queues of requests, from which each step's chunks are chosen.

    Invariant: an unfinished request is either in `waiting`, without memory, or in `running`, with
    memory for all its tokens so far. `running` is in order of admission.
    """

    def __init__(self, memory: Memory, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """`max_num_seqs`: requests that can run at once. `max_num_batched_tokens`: tokens that a
        step can compute; must be at least `max_num_seqs`."""
        self.memory = memory
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_unread_steps = 0  # scheduled, not updated yet; reading them may free memory

    def __repr__(self) -> str:
        return f"Scheduler({len(self.waiting)} waiting, {len(self.running)} running)"

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def add_request(self, request: Request) -> None:
        """Append a request to the queue."""
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Choose the chunks of the next step and count their tokens as computed.

        Decoding requests come first, then started prompts, then requests from the queue, each group
        in order. May be called before the previous step is read (`update`); even then, a request
        never gets more tokens than `max_num_tokens` allows, tokens in flight included.
        Example: budget 10, one answer and a prompt of 20: steps of 1 + 9, 1 + 9 and 1 + 2 tokens.
        """
        output = SchedulerOutput()
        # A copy, because `make_room` removes requests. Preempted requests are not decoding anymore.
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
        """Move requests from the queue to `running`, in order, each with a chunk in `output`.

        `output` already holds the chunks of running requests, which count against the budget. At
        most `max_num_seqs` requests run. A request that is not admitted stays first in the queue
        and blocks those behind it, unless no memory can ever become free for it: then it fails.
        Example: budget 10, an empty output, three prompts of 4: chunks of 4, 4 and 2 tokens.
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
        """Get memory for all tokens of a waiting request. Return False and change nothing if there
        is not enough, or while a step in flight still computes the request.

        Sets the request's `num_computed_tokens`, `num_prefill_tokens` and, at its first admission
        only, `num_cached_tokens`. Does not touch the queues. Example: preempted with 60 tokens of
        prompt and 40 of answer, 64 of them found in memory: 64 are computed, 100 are prefill.
        """
        if request.num_in_flight:
            return False
        num_cached_tokens = self.memory.reuse_prefix(request)
        # The watermark is for running requests: without any, the whole memory can be used.
        if not self.memory.allocate(request, request.num_tokens, bool(self.running)):
            self.memory.free(request)  # the request owns what `reuse_prefix` found
            return False
        request.num_computed_tokens = num_cached_tokens
        request.num_prefill_tokens = request.num_tokens
        # Later admissions find tokens that the request itself computed before it was preempted.
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached_tokens
        return True

    def make_room(self, request: Request, output: SchedulerOutput) -> bool:
        """Get memory for the next token of a decoding request; return whether that worked.

        If memory is short, preempts the newest running requests, possibly `request` itself, until
        the token fits. A request that runs alone is never preempted: it leaves `running` and
        fails. If a step is unread, it keeps its place instead and gets no token in this step.
        Example: two requests of 6 tokens in a memory for 12: the older one gets its 7th token.
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
        """Free a running request's memory and move it from `running` to the head of `waiting`.

        All its tokens, the answer so far included, are computed again in a later step."""
        self.running.remove(request)
        self.memory.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        output.preempted.append(request)

    def _fail(self, request: Request, output: SchedulerOutput) -> None:
        """End a request that needs more memory than there is. Does not touch the queues."""
        self.memory.free(request)
        request.finish_reason = "error"
        request.error = (
            f"request {request.request_id} needs KV memory for {request.num_tokens} tokens, but the"
            f" whole KV cache holds {self.memory.max_tokens}; shorten it or raise num_kv_blocks"
        )
        output.failed.append(request)

    def _take(self, chunk: Chunk, output: SchedulerOutput) -> None:
        """Add a chunk to the step and count it as computed."""
        if not output.chunks:  # a step without chunks is never read
            self.num_unread_steps += 1
        output.chunks.append(chunk)
        chunk.request.num_computed_tokens = chunk.end
        chunk.request.num_in_flight += 1
        if chunk.samples:
            chunk.request.num_pending_tokens += 1

    def update(self, output: SchedulerOutput, token_ids: list[int]) -> list[Request]:
        """Read the results of one step; return the requests that finished with it.

        `token_ids` has one id for each chunk with `samples`, in order. Publishes the memory that
        the step computed, and frees the memory of finished requests.
        """
        sampled = iter(token_ids)
        finished: list[Request] = []
        self._land(output)
        for chunk in output.chunks:
            request = chunk.request
            token_id = next(sampled) if chunk.samples else None
            # Ignore the token of a request that ended while this step was in flight.
            if token_id is not None and not request.is_finished:
                self._take_token(request, token_id)
                if request.is_finished:
                    finished.append(request)
            if request.error is None:
                self.memory.publish(request, chunk.end)
            self._free_if_finished(request)
        self._remove(finished)
        return finished

    def _take_token(self, request: Request, token_id: int) -> None:
        """Append a sampled token, or end the request if the model computed none."""
        if token_id == INVALID_TOKEN:
            request.finish_reason = "error"
            request.error = (
                f"the model's logits for token {request.num_output_tokens} of the answer are not"
                ' finite: numbers overflowed; try dtype="bfloat16" or dtype="float32"'
            )
            return
        request.token_ids.append(token_id)
        request.finish_reason = finish_reason(request)

    def _remove(self, finished: list[Request]) -> None:
        """Remove finished requests from the queues."""
        if finished:
            self.running = [request for request in self.running if not request.is_finished]
        for request in finished:
            # Preempted while its last token was in flight, so it is in the queue.
            if request.num_computed_tokens == 0:
                self.waiting.remove(request)

    def rollback(self, output: SchedulerOutput) -> None:
        """Undo `schedule` for a step without results (an error or Ctrl-C), newest step first.

        Its requests are as they were before the step, and can continue or be aborted.
        """
        self._land(output)
        for chunk in output.chunks:
            request = chunk.request
            # A request preempted since then stays at 0 computed tokens.
            request.num_computed_tokens = min(chunk.start, request.num_computed_tokens)
            self._free_if_finished(request)

    def _land(self, output: SchedulerOutput) -> None:
        """Count a step as read: its chunks are no longer in flight."""
        if output.chunks:
            self.num_unread_steps -= 1
        for chunk in output.chunks:
            chunk.request.num_in_flight -= 1
            if chunk.samples:
                chunk.request.num_pending_tokens -= 1

    def _free_if_finished(self, request: Request) -> None:
        # A step in flight still writes to its blocks, so they can't be reallocated yet.
        if request.is_finished and request.num_in_flight == 0:
            self.memory.free(request)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> Request | None:
        """End a waiting or running request; return it, or None if the id is unknown.

        Its memory is freed immediately, or when the last step in flight that writes to it is read.
        """
        queued = (*self.waiting, *self.running)
        request = next((r for r in queued if r.request_id == request_id), None)
        if request is None:
            return None
        request.finish_reason = reason
        self.waiting = deque(r for r in self.waiting if r is not request)
        self.running = [r for r in self.running if r is not request]
        self._free_if_finished(request)
        return request

    def check(self, in_flight: Iterable[Request] = ()) -> None:
        """Assert the invariant between two steps. `in_flight`: the requests of unread steps."""
        assert len(self.running) <= self.max_num_seqs, "more requests run than max_num_seqs"
        for request in self.waiting:
            has_none = not request.block_table and request.num_computed_tokens == 0
            assert has_none, f"{request.request_id} is waiting and owns memory"
            assert request not in self.running, f"{request.request_id} is waiting and running"
        for request in (*self.waiting, *self.running):
            assert not request.is_finished, f"{request.request_id} is finished and still queued"
        ended = {r.request_id: r for r in in_flight if r.is_finished}
        self.memory.check([*self.running, *ended.values()])
