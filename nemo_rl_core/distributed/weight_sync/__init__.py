"""Weights from trainer to engine, bucket by bucket, never without a checksum.

A `WeightSender` and a `WeightReceiver` stream through shared memory, CUDA IPC or a collective,
whichever `carrier_between` finds. Backends have them as `SendsWeights` and `ReceivesWeights`.
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
    Location,
    carrier_between,
    location_of_this_process,
    machine_of_this_process,
)
from nemo_rl_core.distributed.weight_sync.channel import CarrierName, RouteHost, WeightRoute
from nemo_rl_core.distributed.weight_sync.ends import ReceivesWeights, SendsWeights
from nemo_rl_core.distributed.weight_sync.transfer import WeightReceiver, WeightSender

__all__ = [
    "CarrierName",
    "Location",
    "ReceivesWeights",
    "RouteHost",
    "SendsWeights",
    "TensorSpec",
    "WeightBucket",
    "WeightReceiver",
    "WeightRoute",
    "WeightSender",
    "carrier_between",
    "combined_digest",
    "compare_digests",
    "location_of_this_process",
    "machine_of_this_process",
    "make_buckets",
    "received_digest",
]
