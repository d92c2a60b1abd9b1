"""Text and its files: tokenizers of other kinds, chat templates, recommended settings."""
