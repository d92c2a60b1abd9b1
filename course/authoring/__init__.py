"""What only authors of the course run: builds, gates, scaffolds."""
