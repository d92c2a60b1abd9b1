"""`python -m minivllm` is the command `minivllm`; under `torchrun` the first process is, and the
others are its workers. Given (no notebook builds it)."""

import os
import sys

from minivllm.cli.main import main

if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] != "0":
        from minivllm.assembly.worker import work_under_torchrun

        sys.exit(work_under_torchrun())
    sys.exit(main())
