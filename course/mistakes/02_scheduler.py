"""Wrong answers that people really give, each with the words that its check must say.

Read as text, never imported: the names in the bodies are those of `minivllm/scheduler.py`.
Above each stands the rule of the lesson that the answer breaks.
"""

# -- next_chunk --


# rule 3
@mistake(
    "scheduler.next_chunk", "only 36 of 100 tokens are left: does your chunk run past the last one?"
)
def next_chunk(request: Request, budget: int) -> Chunk:
    start = request.num_computed_tokens
    samples = start + budget >= request.num_tokens
    return Chunk(request, start, budget, samples, is_decode=request.is_decoding)


# rule 4
@mistake(
    "scheduler.next_chunk",
    "one token, and still the prompt: do you tell the phase by the length?",
)
def next_chunk(request: Request, budget: int) -> Chunk:
    start = request.num_computed_tokens
    length = min(budget, request.num_tokens - start)
    samples = start + length == request.num_tokens
    return Chunk(request, start, length, samples, is_decode=length == 1)


# rule 4
@mistake(
    "scheduler.next_chunk",
    "position 5 is answer and computed again: do you tell the phase by num_prompt_tokens?",
)
def next_chunk(request: Request, budget: int) -> Chunk:
    start = request.num_computed_tokens
    length = min(budget, request.num_tokens - start)
    samples = start + length == request.num_tokens
    return Chunk(request, start, length, samples, is_decode=start >= request.num_prompt_tokens)


# rule 3
@mistake(
    "scheduler.next_chunk",
    "it ends in the middle of the prompt: what would a sample there be the answer to?",
)
def next_chunk(request: Request, budget: int) -> Chunk:
    start = request.num_computed_tokens
    length = min(budget, request.num_tokens - start)
    return Chunk(request, start, length, True, request.is_decoding)


# rule 3
@mistake("scheduler.next_chunk", "the fifth token is on its way: len(token_ids), or num_tokens?")
def next_chunk(request: Request, budget: int) -> Chunk:
    start = request.num_computed_tokens
    length = min(budget, len(request.token_ids) - start)
    samples = start + length == len(request.token_ids)
    return Chunk(request, start, length, samples, request.is_decoding)


# -- finish_reason --


# rule 5
@mistake(
    "scheduler.finish_reason", "the model had come to its end: do you ask for the length first?"
)
def finish_reason(request: Request) -> FinishReason | None:
    if len(request.token_ids) >= request.max_num_tokens:
        return "length"
    if request.token_ids[-1] in request.stop_token_ids:
        return "stop"
    return None


# rule 5
@mistake("scheduler.finish_reason", "three of three: is it > or >=?")
def finish_reason(request: Request) -> FinishReason | None:
    if request.token_ids[-1] in request.stop_token_ids:
        return "stop"
    if len(request.token_ids) > request.max_num_tokens:
        return "length"
    return None


# rule 5
@mistake(
    "scheduler.finish_reason",
    "the third token is not read yet: do you count num_tokens, which runs ahead?",
)
def finish_reason(request: Request) -> FinishReason | None:
    if request.token_ids[-1] in request.stop_token_ids:
        return "stop"
    return "length" if request.num_tokens >= request.max_num_tokens else None


# rule 5
@mistake(
    "scheduler.finish_reason",
    "the stop token stands in the prompt: do you look at more than the last token?",
)
def finish_reason(request: Request) -> FinishReason | None:
    if request.stop_token_ids & set(request.token_ids):
        return "stop"
    return "length" if len(request.token_ids) >= request.max_num_tokens else None


# -- Scheduler.admit --


# rule 6
@mistake(
    "scheduler.Scheduler.admit",
    "refused, and still it holds what reuse_prefix gave it: who frees that?",
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
    "71 beside 20 of 100 would leave 9, the watermark is 10: do you ask allocate to keep it?",
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
    "no request runs that could use the reserve: would `a` have to wait for ever?",
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
    "prompt and answer so far, 4 + 3, are computed anew: do you count the prompt only?",
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
    "allocate is told how many tokens the request has in all: did you take off the known ones?",
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


# rule 4: a prompt that is known by half counts as an answer
@mistake(
    "scheduler.Scheduler.admit",
    "all 30 tokens come before decoding: do you take off those that were found?",
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
@mistake("scheduler.Scheduler.admit", "does num_prefill_tokens still say so?")
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


# rule 4: a preempted request finds its own tokens
@mistake(
    "scheduler.Scheduler.admit",
    "4 tokens were cached at the first admission: does the second one change that count?",
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


# -- Scheduler.schedule_waiting --


# rule 5
@mistake("scheduler.Scheduler.schedule_waiting", "a runs now: did it leave the queue?")
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
    "a budget of 10 for all: do you take off what each chunk uses?",
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
    "small stands behind big: if the small ones pass, when does big ever get its turn?",
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
@mistake("scheduler.Scheduler.schedule_waiting", "small stands behind big: if the small ones pass")
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
    "no request runs, so no memory will become free: does huge wait for ever?",
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
    "a step is unread, memory comes free with it: do you ask num_unread_steps?",
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


# -- Scheduler.make_room --


# rule 7
@mistake("scheduler.Scheduler.make_room", "new can go: old gets its token")
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
    "alone, it would come back, grow and be preempted again, for ever: who ends that?",
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
    "d gave nothing back, c gave enough: do you try again after each one?",
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
    "new was preempted itself and owns nothing: may it still compute a token?",
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
    "7 of 10 fit, the reserve is for requests like this: do you keep the watermark from it?",
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
@mistake("scheduler.Scheduler.make_room", "it has ended: does it still stand in `running`?")
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


# rule 7: right for the first token of an answer
@mistake(
    "scheduler.Scheduler.make_room",
    "9 tokens are computed, 6 of them prefill: is there room for the 10th?",
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


# -- Scheduler.schedule --


# rule 2
@mistake(
    "scheduler.Scheduler.schedule",
    "a is answering, b is new: does every decoding request get a token before any prompt?",
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
@mistake("scheduler.Scheduler.schedule", "a is answering, b is new")
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
    "b is half way: does a prompt that has begun go on with what is left of the",
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
    "new was preempted for old's token: does it get a chunk all the same?",
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
    "three tokens are on their way: do you compare num_tokens with max_num_tokens?",
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
    "nothing of the budget is left for b: does it get a chunk of 0 tokens?",
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
