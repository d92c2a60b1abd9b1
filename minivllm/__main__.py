"""`python -m minivllm` is the command `minivllm`. Given (no notebook builds it)."""

import sys

from minivllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
