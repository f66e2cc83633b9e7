"""Completions of the backend `dtensor`, under the weights being trained."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_rl_core.backends.decoding.draws import Decoding
from nemo_rl_core.backends.decoding.requests import as_batch, read_requests, row_seeds
from nemo_rl_core.backends.decoding.transformers_loop import check_padding, complete
from nemo_rl_core.backends.training.dtensor.model import LogprobModel
from nemo_rl_core.config.generation import SamplingConfig
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.data.pretrained import stop_token_ids as model_stop_token_ids
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.process_group import world_size
from nemo_rl_core.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl_core.backends.training.base import TrainingSetup
    from nemo_rl_core.backends.training.dtensor.mesh import RankMesh
    from nemo_rl_core.backends.training.dtensor.packed import PackedModel
    from nemo_rl_core.backends.training.offload import OffloadedState


class DTensorGeneration:
    """Generation with transformers' loop; a part of `DTensorBackend`."""

    _setup: "TrainingSetup"
    _memory: "OffloadedState"
    _mesh: "RankMesh | None"
    _policy: "PackedModel"
    _pads: bool | None

    def generate(
        self,
        batch: BatchedDataDict,
        *,
        greedy: bool,
        max_new_tokens: int,
        temperature: float | None = None,
        seed: int = 0,
        stop_token_ids: Sequence[int] = (),
        **sampling: Any,
    ) -> BatchedDataDict:
        """Completes prompts under the weights being trained, with transformers' loop.

        Args:
            batch: `input_ids [B, T]` padded on the right, `input_lengths [B]`, optionally `seeds
                [B]`.
            greedy: Whether to take the most likely token each time.
            max_new_tokens: Limit of a completion.
            temperature: Sampling temperature; the setup's by default.
            seed: Sampling seed, if rows have none.
            stop_token_ids: End a completion besides the model's own.
            **sampling: The other fields of `SamplingConfig`, such as `top_p`.

        Raises:
            ConfigError: If the weights are sharded over several ranks.
        """
        self._memory.restore("weights")
        model = self._with_lm_head().model
        if self._mesh is not None:
            raise ConfigError(
                "transformers' generation loop runs on one rank with whole weights",
                expected="one rank without cpu_offload",
                got=f"{world_size()} ranks",
                fix="generate with vLLM (generation.backend: vllm), or train on one rank",
            )
        folder = self._setup.model_folder
        config = SamplingConfig(
            max_new_tokens=max_new_tokens,
            temperature=self._setup.temperature if temperature is None else temperature,
            **sampling,
        )
        seeded = BatchedDataDict({"seeds": row_seeds(seed, batch.size), **batch})
        longest = batch["input_ids"].shape[1] + max_new_tokens
        requests = read_requests(seeded, config, max_model_len=longest)
        tokenizer = load_tokenizer(folder)
        stops = {*model_stop_token_ids(folder, tokenizer), *stop_token_ids}
        if self._pads is None:
            self._pads = check_padding(model)
        decoding_of = partial(
            Decoding, config=config, greedy=greedy, stop_token_ids=stops, tokenizer=tokenizer
        )
        completed = complete(
            model, requests, decoding_of, stop_token_ids=sorted(stops), pads=self._pads
        )
        return as_batch(requests, completed)

    def _with_lm_head(self) -> LogprobModel:
        if not isinstance(self._policy, LogprobModel):
            raise wrong_head("logprobs", expected="lm", got="scalar")
        return self._policy


def wrong_head(what: str, *, expected: str, got: str) -> ConfigError:
    """The refusal of outputs that the head does not have."""
    return ConfigError(
        f"this model has no {what}",
        expected=f"a backend set up with head={expected!r}",
        got=f"head={got!r}",
        fix=f"set TrainingSetup.head to {expected!r}, or use another model",
    )
