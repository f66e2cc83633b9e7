"""A Flyte backend for tests with the real protocol and the real commands of containers.

flytekit's client registers and launches here as on any cluster, over gRPC on loopback. Graphs are
executed as Flyte does it, and each task runs the exact command of its container in a process with
a separate folder, home and environment. Kubernetes is left out: nothing is scheduled, and images
are not pulled (`docs/status.md` lists what that leaves untested).
"""

from tests.workflows.flyte_backend.admin import Backend
from tests.workflows.flyte_backend.records import Attempt, ExecutionRecord, NodeRecord

__all__ = ["Attempt", "Backend", "ExecutionRecord", "NodeRecord"]
