"""`python -m course`: the course from a terminal."""

from course.commands import main
from minivllm.cli_options import write_any_character

write_any_character()
raise SystemExit(main())
