"""`python -m course`: the course from a terminal."""

from course.commands import main

raise SystemExit(main())
