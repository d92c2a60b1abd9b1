"""What an engine did, drawn."""
