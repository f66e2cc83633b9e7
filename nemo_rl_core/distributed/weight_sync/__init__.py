"""The transfer of weights from a policy's workers to an engine's, never without a checksum.

| file | noun |
|---|---|
| `link.py` | `WeightLink`, which the controller holds; `SendsWeights` and `ReceivesWeights` |
| `messages.py` | frames that say what is sent and has arrived; tensors as checked bytes |
| `transport.py` | how bytes move: shared memory, gloo, CUDA IPC or NCCL |
"""

from nemo_rl_core.distributed.weight_sync.link import (
    Endpoint,
    ReceivesWeights,
    SendsWeights,
    WeightLink,
)
from nemo_rl_core.distributed.weight_sync.messages import (
    SENDER,
    LinkSpec,
    TransportName,
    WeightBucket,
    bucket_digest,
    combined_digest,
    compare_digests,
    make_buckets,
)

__all__ = [
    "SENDER",
    "Endpoint",
    "LinkSpec",
    "ReceivesWeights",
    "SendsWeights",
    "TransportName",
    "WeightBucket",
    "WeightLink",
    "bucket_digest",
    "combined_digest",
    "compare_digests",
    "make_buckets",
]
