"""Right answers in other styles, for `test_course_alternatives`; read as text, never imported."""


@answer("cuda_graphs.bucket_sizes")
def bucket_sizes(max_num_seqs: int) -> list[int]:
    candidates = {1, 2, 4} | set(range(8, max_num_seqs, 8)) | {max_num_seqs}
    return sorted(size for size in candidates if size <= max_num_seqs)


@answer("cuda_graphs.fill")
def fill(static: StepPlan, plan: StepPlan, padding_row: int) -> None:
    count = len(plan.row_ids)
    for column, values, padding in (
        (static.row_ids, plan.row_ids, padding_row),
        (static.starts, plan.starts, 0),
    ):
        column[:] = padding
        column[:count] = values


@answer("cuda_graphs.Tape.record")
def record(self, operation, args, kwargs):
    if not asks_the_host(operation, args):
        result = operation(*args, **kwargs)
        self.calls += [Call(operation, args, kwargs, list(tensors_in(result)))]
        return result
    raise refusal(operation)


@answer("cuda_graphs.Tape.replay")
def replay(self) -> None:
    for call in self.calls:
        fresh = tensors_in(call.operation(*call.args, **call.kwargs))
        for index, place in enumerate(call.results):
            if fresh[index].data_ptr() == place.data_ptr():
                continue
            place[...] = fresh[index]


@answer("cuda_graphs.GraphedFunction.capture")
def capture(self, bucket):
    graphs = self.graphs
    plan = graphs.plans[bucket]
    first = self.function(plan)
    if self.result is None:
        shape = [graphs.max_rows] + list(first.shape)[1:]
        self.result = torch.empty(shape, dtype=first.dtype, device=first.device)
    place = self.result.narrow(0, 0, first.shape[0])

    def step():
        return place.copy_(self.function(plan))

    graph, _ = globals()["capture"](step, graphs.pool)
    self.captured[bucket] = graph


@answer("cuda_graphs.GraphedFunction.__call__")
def __call__(self, plan):
    graph = self.captured.get(self.graphs.load(plan))
    if graph is not None:
        graph.replay()
        return self.result.narrow(0, 0, plan.row_ids.shape[0])
    return self.function(plan)
