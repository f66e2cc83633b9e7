"""Weights from trainer to engine, bucket by bucket, never without a checksum.

Policies and engines hand over buckets in messages, through the shared memory of Ray's object store.
A `WeightSender` and a `WeightReceiver` stream instead: through shared memory, CUDA IPC or a
collective, whichever `carrier_between` finds. No trainer uses these two yet.
"""

from nemo_rl_core.distributed.weight_sync.buckets import (
    TensorSpec,
    WeightBucket,
    combined_digest,
    compare_digests,
    make_buckets,
    received_digest,
)
from nemo_rl_core.distributed.weight_sync.carriers import (
    Place,
    carrier_between,
    place_of_this_process,
)
from nemo_rl_core.distributed.weight_sync.channel import CarrierName, RouteHost, WeightRoute
from nemo_rl_core.distributed.weight_sync.transfer import WeightReceiver, WeightSender

__all__ = [
    "CarrierName",
    "Place",
    "RouteHost",
    "TensorSpec",
    "WeightBucket",
    "WeightReceiver",
    "WeightRoute",
    "WeightSender",
    "carrier_between",
    "combined_digest",
    "compare_digests",
    "make_buckets",
    "place_of_this_process",
    "received_digest",
]
