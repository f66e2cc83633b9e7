"""A Flyte that fits into a test: the real protocol in front, real containers' commands behind.

flytekit's client registers and launches here as it would anywhere, over gRPC on loopback. Graphs
are walked as Flyte walks them, and a task runs as the very command that its container would run,
in a process with a folder, a home and an environment of its own. What is left out is Kubernetes:
nobody schedules, and images are not pulled (`docs/clusters.md` says what that leaves untried).
"""

from tests.workflows.flyte_backend.admin import Backend
from tests.workflows.flyte_backend.records import Attempt, ExecutionRecord, NodeRecord

__all__ = ["Attempt", "Backend", "ExecutionRecord", "NodeRecord"]
