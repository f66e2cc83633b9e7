"""A sampler for a trainer that does not wait for its engine."""

from collections.abc import Callable
from typing import cast

from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.generation.streaming import StreamingGeneration
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.rollouts.stream import OnDraw, RolloutStream, no_more


class StreamingSampler(Sampler):
    """A `Sampler` whose engine samples between calls, by itself or in a thread."""

    _stream: RolloutStream | None = None

    @property
    def _engine_class(self) -> Callable[..., Generation]:
        is_vllm = isinstance(self._config, VllmGenerationConfig)
        return StreamingGeneration if is_vllm else Generation

    @property
    def streaming(self) -> StreamingGeneration | None:
        """The engine, if it takes requests at any time; None if it completes full batches."""
        engine = self.generation
        return cast("StreamingGeneration", engine) if hasattr(engine, "submit") else None

    def stream(
        self,
        *,
        seed: int,
        timeout_seconds: float | None = None,
        on_draw: OnDraw = no_more,
    ) -> RolloutStream:
        """Opens a `RolloutStream` of a streaming engine; there is one at a time."""
        assert self.streaming is not None
        self._close_stream()
        self._stream = RolloutStream(
            self.streaming,
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
