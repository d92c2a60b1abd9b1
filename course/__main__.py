"""`python -m course`: the course from a terminal."""

import sys
from contextlib import suppress

from course.commands import main

# A character that the terminal or the pipe does not know (a pipe on Windows has 256 of them) is
# written as "?", instead of being an error. Not imported: the learner may be at work on `minivllm`.
for stream in (sys.stdout, sys.stderr):
    with suppress(AttributeError):  # a replaced one may not have it
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
raise SystemExit(main())
