"""The CPU's room: operations, packed products and kernels."""
