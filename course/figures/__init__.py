"""The pictures of the lessons: `common` for all, and a module of its own for each chapter."""
