"""Wrong answers that people give, each with the words that its check must say.

These functions are read as text and never imported: names in their bodies belong to
`minivllm/scheduler.py`. The comment above each one names the rule of the lesson that it breaks.
"""

# -- next_chunk --


# rule 3
@mistake("scheduler.next_chunk", "36 of 100 tokens are left: can the chunk be longer than that?")
def next_chunk(request: Request, budget: int) -> Chunk:
    start = request.num_computed_tokens
    samples = start + budget >= request.num_tokens
    return Chunk(request, start, budget, samples, is_decode=request.is_decoding)


# rule 4
@mistake(
    "scheduler.next_chunk",
    "this one token belongs to the prompt: do you infer the phase from the length?",
)
def next_chunk(request: Request, budget: int) -> Chunk:
    start = request.num_computed_tokens
    length = min(budget, request.num_tokens - start)
    samples = start + length == request.num_tokens
    return Chunk(request, start, length, samples, is_decode=length == 1)


# rule 4
@mistake(
    "scheduler.next_chunk",
    "position 5 is recomputed after a preemption: do you compare with num_prompt_tokens?",
)
def next_chunk(request: Request, budget: int) -> Chunk:
    start = request.num_computed_tokens
    length = min(budget, request.num_tokens - start)
    samples = start + length == request.num_tokens
    return Chunk(request, start, length, samples, is_decode=start >= request.num_prompt_tokens)


# rule 3
@mistake(
    "scheduler.next_chunk",
    "the chunk ends in the middle of the prompt: isn't the next token known already?",
)
def next_chunk(request: Request, budget: int) -> Chunk:
    start = request.num_computed_tokens
    length = min(budget, request.num_tokens - start)
    return Chunk(request, start, length, True, request.is_decoding)


# rule 3
@mistake(
    "scheduler.next_chunk", "the fifth token is in flight: is it len(token_ids) or num_tokens?"
)
def next_chunk(request: Request, budget: int) -> Chunk:
    start = request.num_computed_tokens
    length = min(budget, len(request.token_ids) - start)
    samples = start + length == len(request.token_ids)
    return Chunk(request, start, length, samples, request.is_decoding)


# -- finish_reason --


# rule 5
@mistake(
    "scheduler.finish_reason",
    "the model finished with its last token: do you look at the length first?",
)
def finish_reason(request: Request) -> FinishReason | None:
    if len(request.token_ids) >= request.max_num_tokens:
        return "length"
    if request.token_ids[-1] in request.stop_token_ids:
        return "stop"
    return None


# rule 5
@mistake("scheduler.finish_reason", "three tokens of three: is it > or >=?")
def finish_reason(request: Request) -> FinishReason | None:
    if request.token_ids[-1] in request.stop_token_ids:
        return "stop"
    if len(request.token_ids) > request.max_num_tokens:
        return "length"
    return None


# rule 5
@mistake(
    "scheduler.finish_reason",
    "the third token isn't read yet: does num_tokens include tokens in flight?",
)
def finish_reason(request: Request) -> FinishReason | None:
    if request.token_ids[-1] in request.stop_token_ids:
        return "stop"
    return "length" if request.num_tokens >= request.max_num_tokens else None


# rule 5
@mistake(
    "scheduler.finish_reason",
    "the stop token is in the prompt: do you look at more than the last token?",
)
def finish_reason(request: Request) -> FinishReason | None:
    if request.stop_token_ids & set(request.token_ids):
        return "stop"
    return "length" if len(request.token_ids) >= request.max_num_tokens else None


# rule 5: right for sets that happen to have one element, or the largest last
@mistake("scheduler.finish_reason", "there are 4 stop tokens: do you look for each?")
def finish_reason(request: Request) -> FinishReason | None:
    if request.token_ids[-1] == max(request.stop_token_ids):
        return "stop"
    return "length" if len(request.token_ids) >= request.max_num_tokens else None


# rule 5
@mistake("scheduler.finish_reason", "the last token is 5: do you look for stop tokens before it?")
def finish_reason(request: Request) -> FinishReason | None:
    if request.stop_token_ids & set(request.output_token_ids):
        return "stop"
    return "length" if len(request.token_ids) >= request.max_num_tokens else None


# -- Scheduler.admit --


# rule 6
@mistake(
    "scheduler.Scheduler.admit",
    "a refused request still holds what reuse_prefix gave it: who frees that?",
)
def admit(self, request: Request) -> bool:
    if request.num_in_flight:
        return False
    num_cached_tokens = self.memory.reuse_prefix(request)
    if not self.memory.allocate(request, request.num_tokens, bool(self.running)):
        return False
    request.num_computed_tokens = num_cached_tokens
    if request.num_preemptions == 0:
        request.num_cached_tokens = num_cached_tokens
    request.num_prefill_tokens = request.num_tokens
    return True


# rule 6
@mistake(
    "scheduler.Scheduler.admit",
    "the watermark is 10: does allocate know to keep it?",
)
def admit(self, request: Request) -> bool:
    if request.num_in_flight:
        return False
    num_cached_tokens = self.memory.reuse_prefix(request)
    if not self.memory.allocate(request, request.num_tokens):
        self.memory.free(request)
        return False
    request.num_computed_tokens = num_cached_tokens
    if request.num_preemptions == 0:
        request.num_cached_tokens = num_cached_tokens
    request.num_prefill_tokens = request.num_tokens
    return True


# rule 6
@mistake(
    "scheduler.Scheduler.admit",
    "no running request could use the reserve: would `a` wait forever?",
)
def admit(self, request: Request) -> bool:
    if request.num_in_flight:
        return False
    num_cached_tokens = self.memory.reuse_prefix(request)
    if not self.memory.allocate(request, request.num_tokens, keep_watermark=True):
        self.memory.free(request)
        return False
    request.num_computed_tokens = num_cached_tokens
    if request.num_preemptions == 0:
        request.num_cached_tokens = num_cached_tokens
    request.num_prefill_tokens = request.num_tokens
    return True


# rule 4
@mistake(
    "scheduler.Scheduler.admit",
    "4 tokens of prompt and 3 of answer are computed again: do you count only the prompt?",
)
def admit(self, request: Request) -> bool:
    if request.num_in_flight:
        return False
    num_cached_tokens = self.memory.reuse_prefix(request)
    if not self.memory.allocate(request, request.num_tokens, bool(self.running)):
        self.memory.free(request)
        return False
    request.num_computed_tokens = num_cached_tokens
    if request.num_preemptions == 0:
        request.num_cached_tokens = num_cached_tokens
    request.num_prefill_tokens = request.num_prompt_tokens
    return True


# rule 6
@mistake(
    "scheduler.Scheduler.admit",
    "allocate wants the total number of tokens: did you subtract those that were found?",
)
def admit(self, request: Request) -> bool:
    if request.num_in_flight:
        return False
    num_cached_tokens = self.memory.reuse_prefix(request)
    missing = request.num_tokens - num_cached_tokens
    if not self.memory.allocate(request, missing, bool(self.running)):
        self.memory.free(request)
        return False
    request.num_computed_tokens = num_cached_tokens
    if request.num_preemptions == 0:
        request.num_cached_tokens = num_cached_tokens
    request.num_prefill_tokens = request.num_tokens
    return True


# rule 4: a half cached prompt counts as an answer
@mistake(
    "scheduler.Scheduler.admit",
    "decoding starts after all 30 tokens: did you subtract the cached ones?",
)
def admit(self, request: Request) -> bool:
    if request.num_in_flight:
        return False
    num_cached_tokens = self.memory.reuse_prefix(request)
    if not self.memory.allocate(request, request.num_tokens, bool(self.running)):
        self.memory.free(request)
        return False
    request.num_computed_tokens = num_cached_tokens
    request.num_prefill_tokens = request.num_tokens - num_cached_tokens
    if request.num_preemptions == 0:
        request.num_cached_tokens = num_cached_tokens
    return True


# rule 4
@mistake(
    "scheduler.Scheduler.admit",
    "it had 4 tokens at its first admission and has 7 now: is num_prefill_tokens updated?",
)
def admit(self, request: Request) -> bool:
    if request.num_in_flight:
        return False
    num_cached_tokens = self.memory.reuse_prefix(request)
    if not self.memory.allocate(request, request.num_tokens, bool(self.running)):
        self.memory.free(request)
        return False
    request.num_computed_tokens = num_cached_tokens
    request.num_prefill_tokens = request.num_prefill_tokens or request.num_tokens
    if request.num_preemptions == 0:
        request.num_cached_tokens = num_cached_tokens
    return True


# rule 4: after a preemption, a request finds its own tokens
@mistake(
    "scheduler.Scheduler.admit",
    "num_cached_tokens belongs to the first admission: does the second one change it?",
)
def admit(self, request: Request) -> bool:
    if request.num_in_flight:
        return False
    num_cached_tokens = self.memory.reuse_prefix(request)
    if not self.memory.allocate(request, request.num_tokens, bool(self.running)):
        self.memory.free(request)
        return False
    request.num_cached_tokens = request.num_computed_tokens = num_cached_tokens
    request.num_prefill_tokens = request.num_tokens
    return True


# rule 4: a request that found nothing at its first admission counts its own tokens
@mistake(
    "scheduler.Scheduler.admit",
    "num_cached_tokens belongs to the first admission: does the second one change it?",
)
def admit(self, request: Request) -> bool:
    if request.num_in_flight:
        return False
    num_cached_tokens = self.memory.reuse_prefix(request)
    if not self.memory.allocate(request, request.num_tokens, bool(self.running)):
        self.memory.free(request)
        return False
    request.num_computed_tokens = num_cached_tokens
    request.num_prefill_tokens = request.num_tokens
    request.num_cached_tokens = request.num_cached_tokens or num_cached_tokens
    return True


# rule 6: a refusal that has already changed something
@mistake(
    "scheduler.Scheduler.admit",
    "the counts of a refused request changed: do you set them too early?",
)
def admit(self, request: Request) -> bool:
    if request.num_in_flight:
        return False
    num_cached_tokens = self.memory.reuse_prefix(request)
    request.num_computed_tokens = num_cached_tokens
    request.num_prefill_tokens = request.num_tokens
    if request.num_preemptions == 0:
        request.num_cached_tokens = num_cached_tokens
    if self.memory.allocate(request, request.num_tokens, bool(self.running)):
        return True
    self.memory.free(request)
    return False


# rule 6: other waiting requests are not running ones
@mistake(
    "scheduler.Scheduler.admit", "no running request could use the reserve: would `a` wait forever?"
)
def admit(self, request: Request) -> bool:
    if request.num_in_flight:
        return False
    num_cached_tokens = self.memory.reuse_prefix(request)
    keep_watermark = bool(self.running) or len(self.waiting) > 1
    if not self.memory.allocate(request, request.num_tokens, keep_watermark):
        self.memory.free(request)
        return False
    request.num_computed_tokens = num_cached_tokens
    request.num_prefill_tokens = request.num_tokens
    if request.num_preemptions == 0:
        request.num_cached_tokens = num_cached_tokens
    return True


# -- Scheduler.schedule_waiting --


# rule 5
@mistake("scheduler.Scheduler.schedule_waiting", "a is running now: did it leave the queue?")
def schedule_waiting(self, output: SchedulerOutput) -> None:
    budget = self.max_num_batched_tokens - output.num_tokens
    while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
        request = self.waiting[0]
        if self.admit(request):
            self.running.append(request)
            chunk = next_chunk(request, budget)
            self._take(chunk, output)
            budget -= chunk.length
        elif self.running or self.num_unread_steps:
            break
        else:
            self._fail(self.waiting.popleft(), output)


# rule 1
@mistake(
    "scheduler.Scheduler.schedule_waiting",
    "three prompts share a budget of 10: does each chunk reduce it?",
)
def schedule_waiting(self, output: SchedulerOutput) -> None:
    budget = self.max_num_batched_tokens - output.num_tokens
    while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
        request = self.waiting[0]
        if self.admit(request):
            self.running.append(self.waiting.popleft())
            self._take(next_chunk(request, budget), output)
        elif self.running or self.num_unread_steps:
            break
        else:
            self._fail(self.waiting.popleft(), output)


# rule 5
@mistake(
    "scheduler.Scheduler.schedule_waiting",
    "big is first in the queue: if small requests overtake it, when does it ever start?",
)
def schedule_waiting(self, output: SchedulerOutput) -> None:
    budget = self.max_num_batched_tokens - output.num_tokens
    for request in list(self.waiting):
        if budget <= 0 or len(self.running) >= self.max_num_seqs:
            break
        if self.admit(request):
            self.waiting.remove(request)
            self.running.append(request)
            chunk = next_chunk(request, budget)
            self._take(chunk, output)
            budget -= chunk.length
        elif not self.running and not self.num_unread_steps:
            self.waiting.remove(request)
            self._fail(request, output)


# rule 8
@mistake(
    "scheduler.Scheduler.schedule_waiting",
    "big is first in the queue: if small requests overtake it",
)
def schedule_waiting(self, output: SchedulerOutput) -> None:
    budget = self.max_num_batched_tokens - output.num_tokens
    while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
        request = self.waiting.popleft()
        if self.admit(request):
            self.running.append(request)
            chunk = next_chunk(request, budget)
            self._take(chunk, output)
            budget -= chunk.length
        else:
            self._fail(request, output)


# rule 8
@mistake(
    "scheduler.Scheduler.schedule_waiting",
    "no request is running, so no memory will become free: does huge wait forever?",
)
def schedule_waiting(self, output: SchedulerOutput) -> None:
    budget = self.max_num_batched_tokens - output.num_tokens
    while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
        request = self.waiting[0]
        if not self.admit(request):
            break
        self.running.append(self.waiting.popleft())
        chunk = next_chunk(request, budget)
        self._take(chunk, output)
        budget -= chunk.length


# rule 8
@mistake(
    "scheduler.Scheduler.schedule_waiting",
    "reading the unread step may free memory for `a`: do you check num_unread_steps?",
)
def schedule_waiting(self, output: SchedulerOutput) -> None:
    budget = self.max_num_batched_tokens - output.num_tokens
    while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
        request = self.waiting[0]
        if self.admit(request):
            self.running.append(self.waiting.popleft())
            chunk = next_chunk(request, budget)
            self._take(chunk, output)
            budget -= chunk.length
        elif self.running:
            break
        else:
            self._fail(self.waiting.popleft(), output)


# rule 1: counts the requests of this step
@mistake(
    "scheduler.Scheduler.schedule_waiting",
    "old has one of two seats, without a chunk in this step: do you count it?",
)
def schedule_waiting(self, output: SchedulerOutput) -> None:
    budget = self.max_num_batched_tokens - output.num_tokens
    while self.waiting and budget > 0 and len(output.chunks) < self.max_num_seqs:
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


# rule 3: the chunk is made before admission has found the prefix
@mistake(
    "scheduler.Scheduler.schedule_waiting",
    "admission finds 2 of 4 tokens computed: do you make the chunk after that?",
)
def schedule_waiting(self, output: SchedulerOutput) -> None:
    budget = self.max_num_batched_tokens - output.num_tokens
    while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
        request = self.waiting[0]
        chunk = next_chunk(request, budget)
        if self.admit(request):
            self.running.append(self.waiting.popleft())
            self._take(chunk, output)
            budget -= chunk.length
        elif self.running or self.num_unread_steps:
            break
        else:
            self._fail(self.waiting.popleft(), output)


# rule 1: the chunk is in the step, and its tokens are not counted
@mistake(
    "scheduler.Scheduler.schedule_waiting",
    "a chunk must be counted once: do you add it to the step with self._take?",
)
def schedule_waiting(self, output: SchedulerOutput) -> None:
    budget = self.max_num_batched_tokens - output.num_tokens
    while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
        request = self.waiting[0]
        if self.admit(request):
            self.running.append(self.waiting.popleft())
            output.chunks.append(next_chunk(request, budget))
            budget -= output.chunks[-1].length
        elif self.running or self.num_unread_steps:
            break
        else:
            self._fail(self.waiting.popleft(), output)


# rule 8: decides before the loop what changes in it
@mistake(
    "scheduler.Scheduler.schedule_waiting",
    "`b` fits once `a` has ended: do you look at `running` before `a` is admitted, or after?",
)
def schedule_waiting(self, output: SchedulerOutput) -> None:
    budget = self.max_num_batched_tokens - output.num_tokens
    is_idle = not self.running and not self.num_unread_steps
    while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
        request = self.waiting[0]
        if self.admit(request):
            self.running.append(self.waiting.popleft())
            chunk = next_chunk(request, budget)
            self._take(chunk, output)
            budget -= chunk.length
        elif is_idle:
            self._fail(self.waiting.popleft(), output)
        else:
            break


# rule 6: changes what `admit` looks at
@mistake(
    "scheduler.Scheduler.schedule_waiting",
    "no request runs while admit is asked: do you change `running` before that?",
)
def schedule_waiting(self, output: SchedulerOutput) -> None:
    while self.waiting and len(self.running) < self.max_num_seqs:
        budget = self.max_num_batched_tokens - output.num_tokens
        if budget <= 0:
            break
        request = self.waiting.popleft()
        self.running.append(request)
        if self.admit(request):
            self._take(next_chunk(request, budget), output)
            continue
        self.running.remove(request)
        if self.running or self.num_unread_steps:
            self.waiting.appendleft(request)
            break
        self._fail(request, output)


# -- Scheduler.make_room --


# rule 7
@mistake(
    "scheduler.Scheduler.make_room",
    "preempting new frees enough memory for old: which request do you preempt?",
)
def make_room(self, request: Request, output: SchedulerOutput) -> bool:
    while not self.memory.allocate(request, request.num_computed_tokens + 1):
        victim = self.running[0]
        if len(self.running) > 1:
            self._preempt(victim, output)
        elif not self.num_unread_steps:
            self.running.clear()
            self._fail(request, output)
        if victim is request:
            return False
    return True


# rule 8
@mistake(
    "scheduler.Scheduler.make_room",
    "alone, it would come back, grow and be preempted again: what ends that loop?",
)
def make_room(self, request: Request, output: SchedulerOutput) -> bool:
    while not self.memory.allocate(request, request.num_computed_tokens + 1):
        victim = self.running[-1]
        self._preempt(victim, output)
        if victim is request:
            return False
    return True


# rule 7
@mistake(
    "scheduler.Scheduler.make_room",
    "d frees nothing and c frees enough: do you ask for memory after each preemption?",
)
def make_room(self, request: Request, output: SchedulerOutput) -> bool:
    if self.memory.allocate(request, request.num_computed_tokens + 1):
        return True
    victim = self.running[-1]
    if len(self.running) > 1:
        self._preempt(victim, output)
    elif not self.num_unread_steps:
        self.running.clear()
        self._fail(request, output)
    if victim is request:
        return False
    return self.memory.allocate(request, request.num_computed_tokens + 1)


# rule 7
@mistake(
    "scheduler.Scheduler.make_room",
    "the 7th token fits: do you ask for more than one, or is a `return True` missing?",
)
def make_room(self, request: Request, output: SchedulerOutput) -> bool:
    while not self.memory.allocate(request, request.num_tokens + 1):
        victim = self.running[-1]
        if len(self.running) > 1:
            self._preempt(victim, output)
        elif not self.num_unread_steps:
            self.running.clear()
            self._fail(request, output)
        if victim is request:
            return False
    return True


# rule 7
@mistake(
    "scheduler.Scheduler.make_room",
    "new was preempted and holds no memory: can it still compute a token?",
)
def make_room(self, request: Request, output: SchedulerOutput) -> bool:
    while not self.memory.allocate(request, request.num_computed_tokens + 1):
        if len(self.running) > 1:
            self._preempt(self.running[-1], output)
            continue
        if not self.num_unread_steps:
            self.running.clear()
            self._fail(request, output)
        return False
    return True


# rule 6
@mistake(
    "scheduler.Scheduler.make_room",
    "7 of 10 tokens fit: is the watermark kept from the running requests it is meant for?",
)
def make_room(self, request: Request, output: SchedulerOutput) -> bool:
    while not self.memory.allocate(request, request.num_computed_tokens + 1, keep_watermark=True):
        victim = self.running[-1]
        if len(self.running) > 1:
            self._preempt(victim, output)
        elif not self.num_unread_steps:
            self.running.clear()
            self._fail(request, output)
        if victim is request:
            return False
    return True


# rule 8
@mistake("scheduler.Scheduler.make_room", "self._fail doesn't touch `running`: who removes `a`?")
def make_room(self, request: Request, output: SchedulerOutput) -> bool:
    while not self.memory.allocate(request, request.num_computed_tokens + 1):
        victim = self.running[-1]
        if len(self.running) > 1:
            self._preempt(victim, output)
        elif not self.num_unread_steps:
            self._fail(request, output)
        if victim is request:
            return False
    return True


# rule 7: works for the first token of an answer only
@mistake(
    "scheduler.Scheduler.make_room",
    "9 tokens are computed, prompt and answer: is there memory for the 10th?",
)
def make_room(self, request: Request, output: SchedulerOutput) -> bool:
    while not self.memory.allocate(request, request.num_prefill_tokens + 1):
        victim = self.running[-1]
        if len(self.running) > 1:
            self._preempt(victim, output)
        elif not self.num_unread_steps:
            self.running.clear()
            self._fail(request, output)
        if victim is request:
            return False
    return True


# rule 7
@mistake("scheduler.Scheduler.make_room", "do you choose by the number of tokens?")
def make_room(self, request: Request, output: SchedulerOutput) -> bool:
    while not self.memory.allocate(request, request.num_computed_tokens + 1):
        victim = min(reversed(self.running), key=lambda other: other.num_tokens)
        if len(self.running) > 1:
            self._preempt(victim, output)
        elif not self.num_unread_steps:
            self.running.clear()
            self._fail(request, output)
        if victim is request:
            return False
    return True


# rule 7
@mistake(
    "scheduler.Scheduler.make_room",
    "only a request that runs alone waits for an unread step: does old wait here?",
)
def make_room(self, request: Request, output: SchedulerOutput) -> bool:
    while not self.memory.allocate(request, request.num_computed_tokens + 1):
        if self.num_unread_steps:
            return False
        victim = self.running[-1]
        if len(self.running) > 1:
            self._preempt(victim, output)
        else:
            self.running.clear()
            self._fail(request, output)
        if victim is request:
            return False
    return True


# -- Scheduler.schedule --


# rule 2
@mistake(
    "scheduler.Scheduler.schedule",
    "a decodes and b is new: do decodes go first, and does b get the rest of the budget?",
)
def schedule(self) -> SchedulerOutput:
    output = SchedulerOutput()
    self.schedule_waiting(output)
    if output.chunks:
        return output
    for request in list(self.running):
        wants_token = request.is_decoding and request.num_tokens < request.max_num_tokens
        if wants_token and self.make_room(request, output):
            self._take(next_chunk(request, budget=1), output)
    for request in [r for r in self.running if not r.is_decoding]:
        budget = self.max_num_batched_tokens - output.num_tokens
        if budget > 0:
            self._take(next_chunk(request, budget), output)
    return output


# rule 5
@mistake("scheduler.Scheduler.schedule", "a decodes and b is new")
def schedule(self) -> SchedulerOutput:
    output = SchedulerOutput()
    for request in list(self.running):
        wants_token = request.is_decoding and request.num_tokens < request.max_num_tokens
        if wants_token and self.make_room(request, output):
            self._take(next_chunk(request, budget=1), output)
    for request in [r for r in self.running if not r.is_decoding]:
        budget = self.max_num_batched_tokens - output.num_tokens
        if budget > 0:
            self._take(next_chunk(request, budget), output)
    if not self.running:
        self.schedule_waiting(output)
    return output


# rule 1
@mistake(
    "scheduler.Scheduler.schedule",
    "b's prompt is half done: does it continue with what decodes leave of the budget?",
)
def schedule(self) -> SchedulerOutput:
    output = SchedulerOutput()
    for request in list(self.running):
        wants_token = request.is_decoding and request.num_tokens < request.max_num_tokens
        if wants_token and self.make_room(request, output):
            self._take(next_chunk(request, budget=1), output)
    for request in [r for r in self.running if not r.is_decoding]:
        self._take(next_chunk(request, self.max_num_batched_tokens), output)
    self.schedule_waiting(output)
    return output


# rule 7
@mistake(
    "scheduler.Scheduler.schedule",
    "new was preempted to make room for old: does it still get a chunk?",
)
def schedule(self) -> SchedulerOutput:
    output = SchedulerOutput()
    decoding = [r for r in self.running if r.is_decoding and r.num_tokens < r.max_num_tokens]
    for request in decoding:
        if self.make_room(request, output):
            self._take(next_chunk(request, budget=1), output)
    for request in [r for r in self.running if not r.is_decoding]:
        budget = self.max_num_batched_tokens - output.num_tokens
        if budget > 0:
            self._take(next_chunk(request, budget), output)
    self.schedule_waiting(output)
    return output


# rule 1
@mistake(
    "scheduler.Scheduler.schedule",
    "all three tokens are in flight: do you compare num_tokens with max_num_tokens?",
)
def schedule(self) -> SchedulerOutput:
    output = SchedulerOutput()
    for request in list(self.running):
        if request.is_decoding and self.make_room(request, output):
            self._take(next_chunk(request, budget=1), output)
    for request in [r for r in self.running if not r.is_decoding]:
        budget = self.max_num_batched_tokens - output.num_tokens
        if budget > 0:
            self._take(next_chunk(request, budget), output)
    self.schedule_waiting(output)
    return output


# rule 1
@mistake(
    "scheduler.Scheduler.schedule",
    "a uses the whole budget: does b get a chunk of 0 tokens?",
)
def schedule(self) -> SchedulerOutput:
    output = SchedulerOutput()
    for request in list(self.running):
        wants_token = request.is_decoding and request.num_tokens < request.max_num_tokens
        if wants_token and self.make_room(request, output):
            self._take(next_chunk(request, budget=1), output)
    for request in [r for r in self.running if not r.is_decoding]:
        budget = self.max_num_batched_tokens - output.num_tokens
        self._take(next_chunk(request, budget), output)
    self.schedule_waiting(output)
    return output


# rule 7: prompts are collected before any of them is preempted
@mistake(
    "scheduler.Scheduler.schedule",
    "new was preempted in the middle of its prompt: which requests are still running?",
)
def schedule(self) -> SchedulerOutput:
    output = SchedulerOutput()
    prompts = [r for r in self.running if not r.is_decoding]
    for request in list(self.running):
        wants_token = request.is_decoding and request.num_tokens < request.max_num_tokens
        if wants_token and self.make_room(request, output):
            self._take(next_chunk(request, budget=1), output)
    for request in prompts:
        budget = self.max_num_batched_tokens - output.num_tokens
        if budget > 0:
            self._take(next_chunk(request, budget), output)
    self.schedule_waiting(output)
    return output


# rule 7
@mistake(
    "scheduler.Scheduler.schedule",
    "there is no memory for new's token: do you use what make_room returns?",
)
def schedule(self) -> SchedulerOutput:
    output = SchedulerOutput()
    for request in list(self.running):
        if request.is_decoding and request.num_tokens < request.max_num_tokens:
            self.make_room(request, output)
            self._take(next_chunk(request, budget=1), output)
    for request in [r for r in self.running if not r.is_decoding]:
        budget = self.max_num_batched_tokens - output.num_tokens
        if budget > 0:
            self._take(next_chunk(request, budget), output)
    self.schedule_waiting(output)
    return output
