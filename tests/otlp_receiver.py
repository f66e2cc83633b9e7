"""An OTLP server on loopback that receives a run's metrics."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer


class OtlpReceiver:
    """An OTLP server over HTTP that stores its requests as the protocol's messages.

    Args:
        run: Id of the run whose metrics are expected.

    Attributes:
        address: Value for the tracker's `endpoint`.
        requests: Path, headers and body of each request.
    """

    def __init__(self, run: str = "run-1") -> None:
        self.run = run
        requests: list[tuple[str, dict[str, str], bytes]] = []
        self.requests = requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/x-protobuf"
                requests.append((self.path, dict(self.headers), body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/v1/metrics"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stops the server."""
        self._server.shutdown()
        self._server.server_close()

    def points(self, request: int = -1) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Returns the gauges of a request: values by name and labels."""
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2

        body = self.requests[request][2]
        message = metrics_service_pb2.ExportMetricsServiceRequest.FromString(body)
        values = {}
        for of_resource in message.resource_metrics:
            named = {each.key: each.value.string_value for each in of_resource.resource.attributes}
            assert named["service.name"] == "nemo-rl"
            assert named["service.instance.id"] == self.run
            for metric in of_resource.scope_metrics[0].metrics:
                for point in metric.gauge.data_points:
                    labels = frozenset((e.key, e.value.string_value) for e in point.attributes)
                    value = point.as_int if point.HasField("as_int") else point.as_double
                    values[metric.name, labels] = value
        return values
