"""What some chapters need and not every machine has: Triton, which there is for Linux alone.

Without it their cells and checks say so and fail nothing.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

NEEDS_LINUX = (
    "needs Linux: Triton, which is not installed here, is made for no other system. On Windows"
    " take WSL 2 (`wsl --install`, then the commands of the README), on macOS a Linux container"
    " (`docker run -it -v .:/course -w /course python:3.12 bash`), on Linux `pip install triton`"
)


def lacking(text: str) -> str | None:
    """What code with this text needs and this machine lacks, with the remedy; or None."""
    wants = re.search(r"^(import|from) triton\b", text, re.MULTILINE)
    return NEEDS_LINUX if wants and find_spec("triton") is None else None
