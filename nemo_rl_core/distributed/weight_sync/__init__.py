"""The transfer of weights from a policy's workers to an engine's, never without a checksum.

| file | noun |
|---|---|
| `link.py` | `WeightLink`: what the controller holds between a policy's and an engine's workers |
| `endpoint.py` | `SendsWeights.send_weights` and `ReceivesWeights.receive_weights`: the workers |
| `control.py` | the gloo group of both endpoints, which says what is sent and what has arrived |
| `transport.py` | how bytes move: shared memory, gloo, CUDA IPC or NCCL |
| `bucket.py` | named tensors as flat bytes, with a checksum |
"""

from nemo_rl_core.distributed.weight_sync.bucket import (
    WeightBucket,
    bucket_digest,
    combined_digest,
    compare_digests,
    make_buckets,
)
from nemo_rl_core.distributed.weight_sync.control import SENDER, LinkSpec, TransportName
from nemo_rl_core.distributed.weight_sync.endpoint import Endpoint, ReceivesWeights, SendsWeights
from nemo_rl_core.distributed.weight_sync.link import WeightLink

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
