"""The transfer of weights from a policy's workers to an engine's, never without a checksum.

| file | noun |
|---|---|
| `link.py` | `WeightLink`, which the controller holds; `SendsWeights` and `ReceivesWeights` |
| `messages.py` | frames that say what is sent and has arrived; tensors as checked bytes |
| `places.py` | where a process runs, from which `planning/routes.py` chooses who sends to whom |
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
    WeightBucket,
    bucket_digest,
    combined_digest,
    compare_digests,
    make_buckets,
)
from nemo_rl_core.planning.routes import TransportName

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
