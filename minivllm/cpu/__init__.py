"""The CPU's room: operations, packed products and kernels.

What runs when: the operations of a layer (`ops`) and the attention of decodes are numba's kernels,
in float32 and in bfloat16; without numba, and in other types, they are `minivllm.ops`. A prompt's
attention is torch's, in portions. Products (`packed`): float32 weights that the checkpoint brings
as codes are multiplied by numba's kernels up to 32 rows (an MLP in one call), by torch from there
on, unpacked; bfloat16 weights, on a CPU with units for them, by torch's int4 product up to 8 rows
where there are 4-bit codes and by oneDNN's prepacked one otherwise. Everything else is `F.linear`.
"""
