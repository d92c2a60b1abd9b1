"""Wrong answers that people really give, each with the words that its check must say.

Read as text, never imported: the names in the bodies are those of `minivllm/engine.py`. Above each
stands the rule of the lesson that the answer breaks.
"""

# -- engine.Engine.launch --


# rule 1
@mistake("engine.Engine.launch", "expected  RuntimeError")
def launch(self) -> bool:
    started = time.perf_counter()
    output = self.scheduler.schedule()
    self._vacate(output, started)
    if not output.chunks:
        return False
    flight = self._new_flight(output, started)
    self.num_computed_tokens += output.num_tokens
    self.flights.append(flight)
    flight.pending = self.runner.launch(output.chunks)
    return True


# rule 2
@mistake(
    "engine.Engine.launch",
    "the launch broke off: is the step noted in `flights` by then, so that it can be undone?",
)
def launch(self) -> bool:
    started = time.perf_counter()
    output = self.scheduler.schedule()
    self._demand_progress(output)
    self._vacate(output, started)
    if not output.chunks:
        return False
    flight = self._new_flight(output, started)
    flight.pending = self.runner.launch(output.chunks)
    self.flights.append(flight)
    self.num_computed_tokens += output.num_tokens
    return True


# rule 3
@mistake(
    "engine.Engine.launch",
    "launching must not wait for the device: the caller that wants the tokens calls `read`.",
)
def launch(self) -> bool:
    started = time.perf_counter()
    output = self.scheduler.schedule()
    self._demand_progress(output)
    self._vacate(output, started)
    if not output.chunks:
        return False
    flight = self._new_flight(output, started)
    self.num_computed_tokens += output.num_tokens
    self.flights.append(flight)
    flight.pending = self.runner.launch(output.chunks)
    flight.wait()  # to be sure that it is done
    return True


# rule 4
@mistake(
    "engine.Engine.launch",
    "it waits to be computed again: does the preempted request still hold its row?",
)
def launch(self) -> bool:
    started = time.perf_counter()
    output = self.scheduler.schedule()
    self._demand_progress(output)
    if not output.chunks:
        self._vacate(output, started)
        return False
    flight = self._new_flight(output, started)
    self.num_computed_tokens += output.num_tokens
    self.flights.append(flight)
    flight.pending = self.runner.launch(output.chunks)
    return True


# rule 5: the blocks are being written, so why not say so
@mistake(
    "engine.Engine.launch",
    "the step has only been asked for: are its blocks made known to others already?",
)
def launch(self) -> bool:
    started = time.perf_counter()
    output = self.scheduler.schedule()
    self._demand_progress(output)
    self._vacate(output, started)
    if not output.chunks:
        return False
    flight = self._new_flight(output, started)
    self.num_computed_tokens += output.num_tokens
    self.flights.append(flight)
    flight.pending = self.runner.launch(output.chunks)
    for chunk in output.chunks:
        self.memory.publish(chunk.request, chunk.end)
    return True


# -- engine.Engine.read --


# rule 2
@mistake(
    "engine.Engine.read",
    "the wait broke off: is the step still among the flights, so that it can be undone?",
)
def read(self) -> list[Request]:
    ended: list[Request] = []
    if self.flights:
        flight = self.flights.pop(0)
        ended = self.scheduler.update(flight.output, flight.wait())
        self._note(flight, ended)
        for request in ended:
            self.runner.release(request)
    ended, self.failed = ended + self.failed, []
    self._check()
    return ended


# rule 3
@mistake(
    "engine.Engine.read",
    "steps 0 and 1 are in flight: do you wait for the older one, and for no other?",
)
def read(self) -> list[Request]:
    ended: list[Request] = []
    if self.flights:
        flight = self.flights[-1]
        token_ids = flight.wait()
        self.flights.pop()
        ended = self.scheduler.update(flight.output, token_ids)
        self._note(flight, ended)
        for request in ended:
            self.runner.release(request)
    ended, self.failed = ended + self.failed, []
    self._check()
    return ended


# rule 4
@mistake("engine.Engine.read", "a step in flight still writes to the ended request's blocks")
def read(self) -> list[Request]:
    ended: list[Request] = []
    if self.flights:
        flight = self.flights[0]
        token_ids = flight.wait()
        self.flights.remove(flight)
        ended = self.scheduler.update(flight.output, token_ids)
        self._note(flight, ended)
        for request in ended:
            self.runner.release(request)
            self.memory.free(request)
    ended, self.failed = ended + self.failed, []
    return ended


# rule 4
@mistake(
    "engine.Engine.read",
    "it has ended, and the next request wants a row: do you release the runner's?",
)
def read(self) -> list[Request]:
    ended: list[Request] = []
    if self.flights:
        flight = self.flights[0]
        token_ids = flight.wait()
        self.flights.remove(flight)
        ended = self.scheduler.update(flight.output, token_ids)
        self._note(flight, ended)
    ended, self.failed = ended + self.failed, []
    self._check()
    return ended


# rule 5
@mistake(
    "engine.Engine.read",
    "one token has been read: is its time noted after the scheduler has taken it in?",
)
def read(self) -> list[Request]:
    ended: list[Request] = []
    if self.flights:
        flight = self.flights[0]
        token_ids = flight.wait()
        self.flights.remove(flight)
        self._note(flight, [])
        ended = self.scheduler.update(flight.output, token_ids)
        for request in ended:
            self.runner.release(request)
    ended, self.failed = ended + self.failed, []
    self._check()
    return ended


# rule 6: nothing but the step that was read
@mistake("engine.Engine.read", "it failed, and nothing else reports it: is it returned?")
def read(self) -> list[Request]:
    if not self.flights:
        return []
    flight = self.flights[0]
    token_ids = flight.wait()
    self.flights.remove(flight)
    ended = self.scheduler.update(flight.output, token_ids)
    self._note(flight, ended)
    for request in ended:
        self.runner.release(request)
    ended, self.failed = ended + self.failed, []
    self._check()
    return ended


# -- engine.Engine.step --


# rule 2
@mistake(
    "engine.Engine.step",
    "Ctrl-C came in the middle: does everything happen inside `_rolled_back_on_error`?",
)
def step(self) -> list[Request]:
    self.launch()
    return self.read()


# rule 6
@mistake(
    "engine.Engine.step",
    "it failed, and no step was launched: do you read all the same?",
)
def step(self) -> list[Request]:
    with self._rolled_back_on_error():
        return self.read() if self.launch() else []


# -- engine.Engine.run --


# rule 6
@mistake(
    "engine.Engine.run",
    "the queues are empty, a step is in flight: does the loop go on until it is read?",
)
def run(self) -> Iterator[Request]:
    while self.scheduler.has_unfinished_requests:
        yield from self.step()


# rule 6
@mistake(
    "engine.Engine.run",
    "the short answer is there: does its reader wait until the long one has ended",
)
def run(self) -> Iterator[Request]:
    ended: list[Request] = []
    while self.has_unfinished_requests:
        ended += self.step()
    return iter(ended)


# -- engine.Engine.step_overlapped --


# rule 7: the serial order, one call later
@mistake(
    "engine.Engine.step_overlapped",
    "the device must not wait for the host: is step 1 launched before step 0 is read?",
)
def step_overlapped(self) -> list[Request]:
    with self._rolled_back_on_error():
        ended = self.read() if self.flights else []
        if self.scheduler.has_unfinished_requests:
            self.launch()
        return ended


# rule 7: as full as it gets
@mistake("engine.Engine.step_overlapped", "the device must not wait for the host")
def step_overlapped(self) -> list[Request]:
    with self._rolled_back_on_error():
        return [] if self.launch() else self.read()


# rule 7
@mistake(
    "engine.Engine.step_overlapped",
    "there is no step 3 to launch: is step 2 read all the same?",
)
def step_overlapped(self) -> list[Request]:
    with self._rolled_back_on_error():
        self.launch()
        return self.read() if len(self.flights) > 1 else []


# -- engine.Engine.run_overlapped --


# rule 6
@mistake(
    "engine.Engine.run_overlapped",
    "a step is still in flight: does the loop end without reading it?",
)
def run_overlapped(self) -> Iterator[Request]:
    while self.scheduler.has_unfinished_requests:
        yield from self.step_overlapped()


# rule 7
@mistake(
    "engine.Engine.run_overlapped",
    "the device must not wait for the host: is step 1 launched before step 0 is read?",
)
def run_overlapped(self) -> Iterator[Request]:
    while self.has_unfinished_requests:
        yield from self.step()


# -- engine.build_engine --


# rule 8
@mistake(
    "engine.build_engine",
    "the scheduler allocates in one memory and the engine looks at another",
)
def build_engine(config: EngineConfig, *, trace: bool = False, progress: bool = True) -> Engine:
    parts = load_parts(config, progress)
    path, config, model = parts.path, parts.config, parts.model
    seqs, tokens = known(config.max_num_seqs), known(config.max_num_batched_tokens)
    blocks = known(config.num_kv_blocks)
    return Engine(
        config=config,
        tokenizer=load_tokenizer(path),
        eos_token_ids=eos_token_ids_of(path, model.config.vocab_size),
        memory=build_memory(config),
        scheduler=Scheduler(build_memory(config), seqs, tokens),
        runner=build_runner(parts),
        generation_defaults=generation_defaults(path),
        trace=Trace(blocks, config.block_size) if trace else None,
    )


# rule 8
@mistake(
    "engine.build_engine", "is the config that you keep the one that `load_parts` has filled in?"
)
def build_engine(config: EngineConfig, *, trace: bool = False, progress: bool = True) -> Engine:
    parts = load_parts(config, progress)
    memory = build_memory(parts.config)
    seqs, tokens = parts.config.max_num_seqs, parts.config.max_num_batched_tokens
    return Engine(
        config=config,
        tokenizer=load_tokenizer(parts.path),
        eos_token_ids=eos_token_ids_of(parts.path, parts.model.config.vocab_size),
        memory=memory,
        scheduler=Scheduler(memory, known(seqs), known(tokens)),
        runner=build_runner(parts),
        generation_defaults=generation_defaults(parts.path),
        trace=Trace(memory.pool.num_blocks, memory.block_size) if trace else None,
    )


# rule 8
@mistake("engine.build_engine", "2 requests at once, 16 tokens a step")
def build_engine(config: EngineConfig, *, trace: bool = False, progress: bool = True) -> Engine:
    parts = load_parts(config, progress)
    path, config, model = parts.path, parts.config, parts.model
    memory = build_memory(config)
    seqs, tokens = known(config.max_num_seqs), known(config.max_num_batched_tokens)
    return Engine(
        config=config,
        tokenizer=load_tokenizer(path),
        eos_token_ids=eos_token_ids_of(path, model.config.vocab_size),
        memory=memory,
        scheduler=Scheduler(memory, tokens, seqs),
        runner=build_runner(parts),
        generation_defaults=generation_defaults(path),
        trace=Trace(memory.pool.num_blocks, memory.block_size) if trace else None,
    )


# rule 8: the config as it came in
@mistake("engine.build_engine", "this setting is filled in")
def build_engine(config: EngineConfig, *, trace: bool = False, progress: bool = True) -> Engine:
    parts = load_parts(config, progress)
    path, model = parts.path, parts.model
    memory = build_memory(config)
    seqs, tokens = known(config.max_num_seqs), known(config.max_num_batched_tokens)
    return Engine(
        config=parts.config,
        tokenizer=load_tokenizer(path),
        eos_token_ids=eos_token_ids_of(path, model.config.vocab_size),
        memory=memory,
        scheduler=Scheduler(memory, seqs, tokens),
        runner=build_runner(parts),
        generation_defaults=generation_defaults(path),
        trace=Trace(memory.pool.num_blocks, memory.block_size) if trace else None,
    )
