"""What the lessons bring to their experiments."""
