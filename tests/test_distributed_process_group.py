"""The collectives, as one rank sees them, and the leader's messages; the ranks are threads."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from course.props.ranks import on_ranks
from minivllm.distributed.process_group import MESSAGE_BYTES, GroupError, ProcessGroup


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sum_is_the_same_on_all_ranks(size, dtype):
    """In the memory of what came in, in every type that a model has."""

    def add(group):
        x = torch.tensor([[1.0, group.rank], [2.0, 0.5]], dtype=dtype)
        return group.all_reduce(x), x

    for total, x in on_ranks(size, add):
        assert total is x
        expected = [[size, sum(range(size))], [2 * size, 0.5 * size]]
        assert total.tolist() == expected


def test_gathered_parts_lie_in_the_order_of_the_ranks():
    """`[N, V / R]` of each becomes `[R, N, V / R]`, also of a view that is not contiguous."""

    def gather(group):
        part = torch.tensor([[10.0 * group.rank, 1.0], [10.0 * group.rank + 1, 2.0]]).t()
        return group.all_gather(part).tolist()

    expected = [[[0, 1], [1, 2]], [[10, 11], [1, 2]], [[20, 21], [1, 2]]]
    assert on_ranks(3, gather) == [expected] * 3


def test_ranks_gather_without_the_private_name_as_well():
    """A PyTorch without `_allgather_base` gathers the same with the public `allgather`."""

    class Public:
        def __init__(self, backend):
            self.allgather = backend.allgather

    def gather(group):
        part = torch.arange(6.0).view(2, 3) + 10 * group.rank
        expected = group.all_gather(part)
        group.data = Public(group.data)
        assert torch.equal(group.all_gather(part), expected)
        return expected.shape

    assert on_ranks(2, gather) == [(2, 2, 3)] * 2


def test_a_local_group_leaves_the_environment_as_it_was(monkeypatch):
    """It binds to the loopback interface, whatever interface the user has named for gloo."""
    for before in ("eth7", None):
        if before is None:
            monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        else:
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", before)
        ProcessGroup(dist.HashStore(), 0, 1, local=True).use(torch.device("cpu"), 5)
        assert os.environ.get("GLOO_SOCKET_IFNAME") == before


def test_the_leaders_tensor_arrives_everywhere():
    """Whatever stood there before."""
    given = on_ranks(3, lambda group: group.broadcast(torch.tensor([group.rank, 7])).tolist())
    assert given == [[0, 7]] * 3


def test_the_smallest_number_of_each_kind():
    """Number by number, not all from one rank."""
    numbers = [[5, 9], [7, 3], [6, 6]]
    assert on_ranks(3, lambda group: group.smallest(numbers[group.rank])) == [[5, 3]] * 3


@pytest.mark.parametrize(
    "length", [0, 1, MESSAGE_BYTES - 1, MESSAGE_BYTES, MESSAGE_BYTES + 1, 3 * MESSAGE_BYTES]
)
def test_a_message_of_any_length_arrives_whole(length):
    """The rest of a long one comes behind; the next message is not mixed up with it."""
    messages = [bytes(range(256)) * (length // 256 + 1), b"the next"]
    messages[0] = messages[0][:length]

    def talk(group):
        if group.rank == 0:
            for message in messages:
                group.send(message)
            return messages
        return [group.receive() for _ in messages]

    assert on_ranks(3, talk) == [messages] * 3


def test_a_worker_waits_for_its_next_message_as_long_as_it_takes():
    """Longer than any rank waits within a step: an engine may have nothing to do."""

    def talk(group):
        if group.rank == 0:
            time.sleep(1.2)
            group.send(b"good morning")
            return b"good morning"
        return group.receive()

    assert on_ranks(2, talk, timeout=0.3) == [b"good morning"] * 2


def test_a_rank_that_does_not_come_is_not_waited_for():
    """After the time limit it is an error, and so is every call after it."""

    def add(group):
        if group.rank == 1:
            time.sleep(1.5)
            return None
        started = time.monotonic()
        with pytest.raises(GroupError, match="another rank has ended, or did not answer in time"):
            group.all_reduce(torch.ones(2))
        assert time.monotonic() - started < 1.4
        with pytest.raises(GroupError, match="another rank"):
            group.send(b"hello?")
        with pytest.raises(GroupError, match="another rank"):
            group.check()
        return None

    on_ranks(2, add, timeout=0.3)


def test_a_group_that_is_closed_says_so():
    """And its workers have heard an empty message, the sign to end."""

    def end(group):
        heard = group.receive() if group.rank else b""
        group.close()
        with pytest.raises(GroupError, match="this group is closed"):
            group.all_reduce(torch.ones(1))
        return heard

    assert on_ranks(2, end) == [b"", b""]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:1", r"device='cuda:1' is a single GPU, but there are several ranks; use 'cuda'"),
        ("cuda", r"this host has 2 GPUs, none for its rank 2; use 2 or fewer, or device='cpu'"),
    ],
)
def test_each_rank_needs_a_gpu_of_its_own(device, message, monkeypatch):
    """Refused before anything is allocated there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    group = ProcessGroup(dist.HashStore(), 0, 1, local=True)
    with pytest.raises(ValueError, match=message):
        group.use(torch.device(device), 5)
