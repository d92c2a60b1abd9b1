"""Right answers in other styles, for `test_course_alternatives`; read as text, never imported."""


@answer("engine.Engine.launch")
def launch(self):
    now = time.perf_counter()
    chosen = self.scheduler.schedule()
    self._demand_progress(chosen)
    self._vacate(chosen, now)
    if chosen.chunks:
        self.num_computed_tokens += chosen.num_tokens
        self.flights.append(self._new_flight(chosen, now))
        self.flights[-1].pending = self.runner.launch(chosen.chunks)
    return len(chosen.chunks) > 0


@answer("engine.Engine.read")
def read(self):
    over = []
    if len(self.flights) > 0:
        oldest = next(iter(self.flights))
        tokens = oldest.wait()
        del self.flights[0]
        over.extend(self.scheduler.update(oldest.output, tokens))
        self._note(oldest, over)
        for request in over:
            self.runner.release(request)
    over = [*over, *self.failed]
    self.failed = []
    self._check()
    return over


@answer("engine.Engine.step")
def step(self):
    with self._rolled_back_on_error():
        self.launch()
        ended = self.read()
    return ended


@answer("engine.Engine.run")
def run(self):
    while self.has_unfinished_requests:
        ended = self.step()
        yield from ended


@answer("engine.Engine.step_overlapped")
def step_overlapped(self):
    with self._rolled_back_on_error():
        before = len(self.flights)
        launched = self.launch()
        if launched and before == 0:
            return []
        return self.read()


@answer("engine.Engine.run_overlapped")
def run_overlapped(self):
    while True:
        if not self.has_unfinished_requests:
            return
        yield from self.step_overlapped()


@answer("engine.build_engine")
def build_engine(config: EngineConfig, *, trace: bool = False, progress: bool = True) -> Engine:
    parts = load_parts(config, progress)
    memory = build_memory(parts.config)
    scheduler = Scheduler(memory, parts.config.max_num_seqs, parts.config.max_num_batched_tokens)
    record = None
    if trace:
        record = Trace(memory.pool.num_blocks, memory.block_size)
    return Engine(
        parts.config,
        load_tokenizer(parts.path),
        eos_token_ids_of(parts.path, parts.model.config.vocab_size),
        memory,
        scheduler,
        build_runner(parts),
        generation_defaults=generation_defaults(parts.path),
        trace=record,
    )
