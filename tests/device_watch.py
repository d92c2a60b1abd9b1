"""What stands in for a GPU in checks: numbers that nobody can read, and operations counted."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Tensors on it have a shape and no numbers: whoever asks for one gets an error, as an answer on a
# GPU would take until all work that was launched before has ended.
META = torch.device("meta")


def error_of(function, *args):
    """What the call raises, or None."""
    try:
        function(*args)
    except Exception as error:  # whatever it is, the assert shows it
        return error
    return None


class _Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations_of(function, *args):
    """How many tensor operations the call takes: on a GPU, launches and copies."""
    with _Counter() as counter:
        function(*args)
    return counter.count
