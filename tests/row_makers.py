"""Requests, plans and rows for tests of what the runner reads and writes."""

import torch

from minivllm.request import Request, SamplingParams
from minivllm.rows import StepPlan


def make_request(request_id, token_ids, block_table, **params):
    """A request with these tokens and blocks."""
    return Request(
        request_id=request_id,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling_params=SamplingParams(**params),
        max_num_tokens=100,
        seed=params.get("seed", 5),
        block_table=list(block_table),
    )


def make_plan(row_ids, starts, lengths, sampling, params=()):
    """A plan of chunks, none of them said to decode."""
    return StepPlan(
        row_ids=torch.tensor(row_ids),
        starts=torch.tensor(starts),
        lengths=torch.tensor(lengths),
        sampling=torch.tensor(sampling, dtype=torch.int64),
        params=list(params),
        rows=[row_ids[i] for i in sampling],
        ends=[starts[i] + lengths[i] for i in sampling],
        num_tokens=sum(lengths),
        num_decodes=0,
        max_query_len=max(lengths),
        max_seq_len=max(s + n for s, n in zip(starts, lengths)),
    )


def write(rows, request):
    """Give the request a row with its tokens and blocks."""
    return rows.update([request])[0]
