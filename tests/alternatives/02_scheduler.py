"""Right answers in other styles, read as text by `test_course_alternatives`, never imported."""


@answer("scheduler.next_chunk")
def next_chunk(request: Request, budget: int) -> Chunk:
    left = request.num_tokens - request.num_computed_tokens
    length = left if left <= budget else budget
    return Chunk(
        request=request,
        start=request.num_computed_tokens,
        length=length,
        samples=length == left,
        is_decode=request.is_decoding,
    )


@answer("scheduler.next_chunk")
def next_chunk(request, budget):
    chunk = Chunk(request, request.num_computed_tokens, budget, False, request.is_decoding)
    if chunk.end >= request.num_tokens:
        chunk.length = request.num_tokens - chunk.start
        chunk.samples = True
    return chunk


@answer("scheduler.finish_reason")
def finish_reason(request: Request) -> FinishReason | None:
    *_, last = request.token_ids
    if any(last == stop for stop in request.stop_token_ids):
        return "stop"
    return None if len(request.token_ids) < request.max_num_tokens else "length"


@answer("scheduler.finish_reason")
def finish_reason(request):
    reason = None
    if request.num_prompt_tokens + request.num_output_tokens >= request.max_num_tokens:
        reason = "length"
    if request.token_ids[-1] in request.stop_token_ids:
        reason = "stop"
    return reason


@answer("scheduler.Scheduler.admit")
def admit(self, request: Request) -> bool:
    if request.num_in_flight > 0:
        return False
    found = self.memory.reuse_prefix(request)
    enough = self.memory.allocate(
        request, num_tokens=request.num_tokens, keep_watermark=len(self.running) > 0
    )
    if enough:
        if not request.num_preemptions:
            request.num_cached_tokens = found
        request.num_computed_tokens = found
        request.num_prefill_tokens = request.num_tokens
    else:
        self.memory.free(request)
    return enough


@answer("scheduler.Scheduler.admit")
def admit(self, request):
    if request.num_in_flight != 0:
        return False
    num_found = self.memory.reuse_prefix(request)
    keep_watermark = self.running != []
    if self.memory.allocate(request, len(request.token_ids), keep_watermark):
        is_first = request.num_prefill_tokens == 0
        request.num_prefill_tokens = len(request.token_ids)
        request.num_computed_tokens = num_found
        if is_first:
            request.num_cached_tokens = num_found
        return True
    self.memory.free(request)
    return False


@answer("scheduler.Scheduler.schedule_waiting")
def schedule_waiting(self, output: SchedulerOutput) -> None:
    while True:
        budget = self.max_num_batched_tokens - output.num_tokens
        if not self.waiting or budget <= 0 or len(self.running) >= self.max_num_seqs:
            return
        request = self.waiting.popleft()
        if self.admit(request):
            self.running.append(request)
            self._take(next_chunk(request, budget=budget), output)
            continue
        if self.running or self.num_unread_steps > 0:
            self.waiting.appendleft(request)
            return
        self._fail(request, output)


@answer("scheduler.Scheduler.schedule_waiting")
def schedule_waiting(self, output):
    for request in tuple(self.waiting):
        budget = self.max_num_batched_tokens - sum(chunk.length for chunk in output.chunks)
        if budget == 0 or len(self.running) == self.max_num_seqs:
            break
        if not self.admit(request):
            if len(self.running) + self.num_unread_steps > 0:
                break
            self.waiting.remove(request)
            self._fail(request, output)
        else:
            self.waiting.remove(request)
            self.running += [request]
            self._take(next_chunk(request, budget), output)


@answer("scheduler.Scheduler.make_room")
def make_room(self, request: Request, output: SchedulerOutput) -> bool:
    wanted = request.num_computed_tokens + 1
    while self.memory.allocate(request, num_tokens=wanted, keep_watermark=False) is False:
        if self.running == [request]:
            if self.num_unread_steps == 0:
                self.running.remove(request)
                self._fail(request, output)
            return False
        newest = self.running[-1]
        self._preempt(newest, output)
        if newest is request:
            return False
    return True


@answer("scheduler.Scheduler.make_room")
def make_room(self, request, output):
    if self.memory.allocate(request, request.num_computed_tokens + 1):
        return True
    if len(self.running) > 1:
        last = self.running[len(self.running) - 1]
        self._preempt(last, output)
        return False if last is request else self.make_room(request, output)
    if not self.num_unread_steps:
        self._fail(request, output)
        self.running = [other for other in self.running if other is not request]
    return False


@answer("scheduler.Scheduler.schedule")
def schedule(self) -> SchedulerOutput:
    output = SchedulerOutput()
    index = 0
    while index < len(self.running):  # preempted requests are after this one
        request = self.running[index]
        if (
            request.is_decoding
            and request.num_tokens < request.max_num_tokens
            and self.make_room(request, output)
        ):
            self._take(next_chunk(request, 1), output)
        index += 1
    for request in self.running:
        left = self.max_num_batched_tokens - output.num_tokens
        if left and not request.is_decoding:
            self._take(next_chunk(request, left), output)
    self.schedule_waiting(output)
    return output


@answer("scheduler.Scheduler.schedule")
def schedule(self):
    output = SchedulerOutput(chunks=[], preempted=[], failed=[])
    prefills = [request for request in self.running if not request.is_decoding]
    for request in [r for r in self.running if r.is_decoding]:
        if request not in self.running:
            continue
        if request.num_tokens >= request.max_num_tokens:
            continue
        if self.make_room(request, output):
            self._take(next_chunk(request, budget=1), output)
    budget = self.max_num_batched_tokens - len(output.chunks)
    for request in prefills:
        if request in self.running and budget > 0:
            chunk = next_chunk(request, budget)
            self._take(chunk, output)
            budget -= chunk.length
    self.schedule_waiting(output)
    return output


@answer("scheduler.next_chunk")
def next_chunk(request: Request, budget: int) -> Chunk:
    positions = range(request.num_computed_tokens, request.num_tokens)
    part = positions[:budget]
    decode = request.num_prefill_tokens > 0 and request.num_prefill_tokens <= positions.start
    return Chunk(request, positions.start, len(part), len(part) == len(positions), decode)


@answer("scheduler.finish_reason")
def finish_reason(request):
    length = request.num_prompt_tokens + request.num_output_tokens
    reasons = {
        "stop": any(
            request.token_ids[len(request.token_ids) - 1] == t for t in request.stop_token_ids
        ),
        "length": not length < request.max_num_tokens,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@answer("scheduler.Scheduler.admit")
def admit(self, request):
    admitted = False
    if request.num_in_flight == 0:
        try:
            cached = self.memory.reuse_prefix(request)
            admitted = bool(self.memory.allocate(request, request.num_tokens, any(self.running)))
        finally:
            if not admitted:
                self.memory.free(request)
    if admitted:
        fields = {"num_computed_tokens": cached, "num_prefill_tokens": request.num_tokens}
        if request.num_preemptions < 1:
            fields["num_cached_tokens"] = cached
        for name, value in fields.items():
            setattr(request, name, value)
    return admitted


@answer("scheduler.Scheduler.schedule_waiting")
def schedule_waiting(self, output):
    def left():
        return self.max_num_batched_tokens - sum(chunk.length for chunk in output.chunks)

    def goes_on():
        request = self.waiting.popleft()
        if self.admit(request):
            self.running += [request]
            self._take(next_chunk(request, left()), output)
        elif not self.running and self.num_unread_steps == 0:
            self._fail(request, output)
        else:
            self.waiting.appendleft(request)
            return False
        return True

    while left() > 0 and len(self.waiting) and self.max_num_seqs - len(self.running) > 0:
        if not goes_on():
            break


@answer("scheduler.Scheduler.make_room")
def make_room(self, request, output):
    wanted = request.num_computed_tokens + 1
    for victim in self.running[::-1]:
        if self.memory.allocate(request, wanted, keep_watermark=False):
            return True
        is_alone = len(self.running) == 1
        if is_alone and self.num_unread_steps:
            return False
        if is_alone:
            self.running = []
            self._fail(request, output)
            return False
        self._preempt(victim, output)
        if victim is request:
            return False
    return False


@answer("scheduler.Scheduler.schedule")
def schedule(self):
    output, budget = SchedulerOutput(), self.max_num_batched_tokens
    for request in tuple(self.running):
        if not request.is_decoding:
            continue
        if request.max_num_tokens <= request.num_tokens:
            continue
        if not self.make_room(request, output):
            continue
        self._take(next_chunk(request, 1), output)
        budget -= 1
    prompts = filter(lambda request: not request.is_decoding, list(self.running))
    for request in prompts:
        if not budget:
            break
        chunk = next_chunk(request=request, budget=budget)
        self._take(chunk=chunk, output=output)
        budget -= chunk.length
    self.schedule_waiting(output=output)
    return output
