"""The GPU's room: operations, attention over prompts, and kernels that no notebook builds."""
