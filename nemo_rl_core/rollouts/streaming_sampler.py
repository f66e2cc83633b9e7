"""A sampler for a trainer that does not wait for its engine."""

from nemo_rl_core.models.generation.streaming import StreamingGeneration
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.rollouts.stream import OnDraw, RolloutStream, no_more


class StreamingSampler(Sampler):
    """A `Sampler` whose engine keeps generating between calls."""

    _engine_class = StreamingGeneration
    generation: StreamingGeneration
    _stream: RolloutStream | None = None

    def stream(
        self,
        *,
        seed: int,
        timeout_seconds: float | None = None,
        on_draw: OnDraw = no_more,
    ) -> RolloutStream:
        """Opens a `RolloutStream`; there is one at a time."""
        self._close_stream()
        self._stream = RolloutStream(
            self.generation,
            self.engine.episode,
            self.environment,
            seed=seed,
            timeout_seconds=timeout_seconds,
            on_draw=on_draw,
        )
        return self._stream

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def __exit__(self, *exception: object) -> None:
        self._close_stream()
        super().__exit__(*exception)
