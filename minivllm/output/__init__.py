"""From prompts to requests, and from token ids to answers."""
