"""A stand-in for a GPU in checks: questions to the device are refused, operations counted."""

import torch
from torch.overrides import TorchFunctionMode

# What needs a number on the host: on a GPU the answer takes until all work launched before is done.
QUESTIONS = {"item", "tolist", "numpy", "cpu", "nonzero", "unique", "equal", "allclose"}
QUESTIONS |= {"__int__", "__float__", "__bool__", "__index__", "__iter__", "__contains__"}
# What makes a tensor on the CPU unless it is told where.
MAKERS = {"arange", "tensor", "zeros", "ones", "empty", "full", "linspace"}


class QuestionAsked(Exception):
    """A function of a step asked the device for a number, or made a tensor elsewhere."""


class _Watch(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in QUESTIONS:
            raise QuestionAsked(name)
        if name in MAKERS and "device" not in kwargs:
            raise QuestionAsked(f"{name} without device=")
        _refuse_hidden_question(name, args, kwargs)
        return func(*args, **kwargs)


def _refuse_hidden_question(name, args, kwargs):
    """Sizes that depend on numbers in a tensor."""
    if name == "arange" and any(isinstance(arg, torch.Tensor) for arg in args):
        raise QuestionAsked("arange up to a tensor")
    repeats = kwargs.get("repeats", args[1] if len(args) > 1 else args[0] if args else None)
    is_sum = name == "repeat_interleave" and isinstance(repeats, torch.Tensor)
    if is_sum and kwargs.get("output_size") is None:
        raise QuestionAsked("repeat_interleave without output_size")
    if name == "__getitem__" and getattr(args[1], "dtype", None) is torch.bool:
        raise QuestionAsked("x[mask]")


def question_of(function, *args):
    """The question that the call asks the device, or None; other errors pass."""
    try:
        with _Watch():
            function(*args)
    except QuestionAsked as question:
        return str(question)
    return None


class _Counter(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") != "__get__"  # reading an attribute is not work
        return func(*args, **(kwargs or {}))


def operations_of(function, *args):
    """How many tensor operations the call takes: on a GPU, launches and copies."""
    with _Counter() as counter:
        function(*args)
    return counter.count
