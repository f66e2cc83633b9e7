"""Imports of the ranks of most tests, for the server that forks them."""

import gc

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import nemo_rl_core.backends.training.dtensor.backend
import nemo_rl_core.backends.training.megatron.backend  # noqa: F401

gc.freeze()  # else the collector of each rank would copy all of this memory
