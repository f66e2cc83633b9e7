"""Code that has only run against fakes of the libraries that it drives.

It moves back to its neighbors once it has run on the hardware it is for:

- `flash_attention.py`, `flash_attention_4.py`: `pytest tests/gpu/test_1_attention.py` with
  flash-attn-3 or flash-attn-4 on a Hopper or Blackwell GPU.
- `megatron_bridge.py`, `megatron_bridge_check.py`: a training step with the package
  megatron-bridge on a GPU, of a model whose type is not in `families.FAMILIES`.
"""
