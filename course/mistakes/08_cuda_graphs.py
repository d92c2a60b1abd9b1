"""Wrong answers that people really give, each with the words that its check must say.

Read as text, never imported: the names in the bodies are those of `minivllm/cuda_graphs.py`.
Above each stands the rule of the lesson that the answer breaks.
"""

# -- bucket_sizes --


# rule 1 (nano-vllm, PR 216)
@mistake("cuda_graphs.bucket_sizes", "does the list end with max_num_seqs, whatever it is?")
def bucket_sizes(max_num_seqs: int) -> list[int]:
    sizes = [*SMALL_BUCKETS, *range(BUCKET_STEP, max_num_seqs + 1, BUCKET_STEP)]
    return [size for size in sizes if size <= max_num_seqs]


# rule 1
@mistake("cuda_graphs.bucket_sizes", "is 16 captured twice: as a multiple and as the end?")
def bucket_sizes(max_num_seqs: int) -> list[int]:
    sizes = [*SMALL_BUCKETS, *range(BUCKET_STEP, max_num_seqs + 1, BUCKET_STEP)]
    return [size for size in sizes if size <= max_num_seqs] + [max_num_seqs]


# rule 1
@mistake("cuda_graphs.bucket_sizes", "one request at a time needs one graph")
def bucket_sizes(max_num_seqs: int) -> list[int]:
    return sorted({*SMALL_BUCKETS, *range(BUCKET_STEP, max_num_seqs, BUCKET_STEP), max_num_seqs})


# -- fill --


# rule 2
@mistake("cuda_graphs.fill", "do you put new ones in their place, or write into them?")
def fill(static: StepPlan, plan: StepPlan, padding_row: int) -> None:
    missing = len(static.row_ids) - plan.num_decodes
    padding = plan.row_ids.new_full((missing,), padding_row)
    static.row_ids = torch.cat([plan.row_ids, padding])
    static.starts = torch.cat([plan.starts, torch.zeros_like(padding)])


# rule 3
@mistake("cuda_graphs.fill", "what is in the third place after the smaller batch?")
def fill(static: StepPlan, plan: StepPlan, padding_row: int) -> None:
    static.row_ids[: plan.num_decodes].copy_(plan.row_ids)
    static.starts[: plan.num_decodes].copy_(plan.starts)


# rule 3
@mistake("cuda_graphs.fill", "what start is in the third place after the smaller batch?")
def fill(static: StepPlan, plan: StepPlan, padding_row: int) -> None:
    static.row_ids.fill_(padding_row)
    static.row_ids[: plan.num_decodes] = plan.row_ids
    static.starts[: plan.num_decodes] = plan.starts


# rule 3
@mistake("cuda_graphs.fill", "two places are left over: do they name the padding row?")
def fill(static: StepPlan, plan: StepPlan, padding_row: int) -> None:
    static.row_ids.zero_()
    static.starts.zero_()
    static.row_ids[: plan.num_decodes] = plan.row_ids
    static.starts[: plan.num_decodes] = plan.starts


# -- Tape.record --


# rule 4
@mistake("cuda_graphs.Tape.record", "reading a number waits for the device, in every replay")
def record(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = operation(*args, **kwargs)
    self.calls.append(Call(operation, args, kwargs, tensors_in(out)))
    return out


# rule 4
@mistake("cuda_graphs.Tape.record", "do you ask before you record?")
def record(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = operation(*args, **kwargs)
    self.calls.append(Call(operation, args, kwargs, tensors_in(out)))
    if asks_the_host(operation, args):
        raise refusal(operation)
    return out


# rule 2
@mistake("cuda_graphs.Tape.record", "later calls read this very tensor: do you keep a copy of it?")
def record(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if asks_the_host(operation, args):
        raise refusal(operation)
    out = operation(*args, **kwargs)
    results = [tensor.clone() for tensor in tensors_in(out)]
    self.calls.append(Call(operation, args, kwargs, results))
    return out


# rule 5
@mistake("cuda_graphs.Tape.record", "the next operation needs the result: do you return it?")
def record(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if asks_the_host(operation, args):
        raise refusal(operation)
    out = operation(*args, **kwargs)
    self.calls.append(Call(operation, args, kwargs, tensors_in(out)))


# -- Tape.replay --


# rule 2
@mistake("cuda_graphs.Tape.replay", "do the new results go into the tensor that the caller holds?")
def replay(self) -> None:
    for call in self.calls:
        out = call.operation(*call.args, **call.kwargs)
        call.results = tensors_in(out)


# rule 2
@mistake("cuda_graphs.Tape.replay", "are all of them put in their places, in every replay?")
def replay(self) -> None:
    outs = [call.operation(*call.args, **call.kwargs) for call in self.calls]
    for call, out in zip(self.calls, outs):
        for old, new in zip(call.results, tensors_in(out)):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


# rule 5
@mistake("cuda_graphs.Tape.replay", "topk gives values and places: are both copied")
def replay(self) -> None:
    for call in self.calls:
        out = call.operation(*call.args, **call.kwargs)
        if call.results:
            call.results[0].copy_(tensors_in(out)[0])


# -- GraphedFunction.capture --


# rule 6
@mistake("cuda_graphs.GraphedFunction.capture", "do you call the function once before the capture?")
def capture(self, bucket: int) -> None:
    plan = self.graphs.plans[bucket]

    def function() -> Tensor:
        result = self.function(plan)
        if self.result is None:
            self.result = result.new_empty((self.graphs.buckets[-1], *result.shape[1:]))
        return self.result[:bucket].copy_(result)

    self.captured[bucket], _ = capture(function, self.graphs.pool)


# rule 7
@mistake("cuda_graphs.GraphedFunction.capture", "do you make another one each time?")
def capture(self, bucket: int) -> None:
    plan = self.graphs.plans[bucket]
    result = self.function(plan)
    self.result = result.new_empty((self.graphs.buckets[-1], *result.shape[1:]))
    target = self.result[:bucket]
    self.captured[bucket], _ = capture(lambda: target.copy_(self.function(plan)), self.graphs.pool)


# rule 7
@mistake(
    "cuda_graphs.GraphedFunction.capture", "does the graph itself copy its result into self.result?"
)
def capture(self, bucket: int) -> None:
    plan = self.graphs.plans[bucket]
    result = self.function(plan)
    if self.result is None:
        self.result = result.new_empty((self.graphs.buckets[-1], *result.shape[1:]))
    self.captured[bucket], out = capture(lambda: self.function(plan), self.graphs.pool)
    self.result[:bucket].copy_(out)


# -- GraphedFunction.__call__ --


# rule 7
@mistake("cuda_graphs.GraphedFunction.__call__", "do you return the padding as well?")
def __call__(self, plan: StepPlan) -> Tensor:
    bucket = self.graphs.load(plan)
    if bucket not in self.captured:
        return self.function(plan)
    self.captured[bucket].replay()
    return self.result[:bucket]


# rule 5
@mistake(
    "cuda_graphs.GraphedFunction.__call__",
    "there is a graph for two rows: do you call the function?",
)
def __call__(self, plan: StepPlan) -> Tensor:
    bucket = self.graphs.load(plan)
    if bucket in self.captured:
        self.captured[bucket].replay()
    return self.function(plan)


# rule 1
@mistake("cuda_graphs.GraphedFunction.__call__", "does the function get the step's own plan?")
def __call__(self, plan: StepPlan) -> Tensor:
    bucket = self.graphs.load(plan)
    if bucket not in self.captured:
        return self.function(self.graphs.plans[bucket_for(len(plan.row_ids), self.graphs.buckets)])
    self.captured[bucket].replay()
    return self.result[: plan.num_decodes]
