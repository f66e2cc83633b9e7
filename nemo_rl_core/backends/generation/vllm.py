"""The generation worker over vLLM's offline engine, which lives inside the worker's process."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.weight_sync import WeightBucket, combined_digest, received_digest
from nemo_rl_core.errors import ConsistencyError
from nemo_rl_core.infra.timer import peak_memory_gib

_MAX_BATCHED_TOKENS = 8192
_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"


class VllmBackend:
    """One vLLM engine (a `GenerationBackend`)."""

    def setup(self, setup: GenerationSetup) -> None:
        """Starts the engine; a no-op where one with the same set-up runs."""
        from vllm import LLM

        self._setup = setup
        self._llm = LLM(
            str(setup.model_folder),
            skip_tokenizer_init=True,
            enforce_eager=not torch.cuda.is_available(),
            dtype=setup.dtype,
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.config.max_num_seqs,
            gpu_memory_utilization=setup.config.gpu_memory_utilization,
            seed=setup.seed,
            # A prompt cut in two draws and takes back a token, which vLLM cannot do with the seeded
            # generators of a CPU; so prompts are taken whole.
            enable_chunked_prefill=torch.cuda.is_available(),
            # The rollouts of a group share the keys and values of their prompt, in whole blocks
            # (128 tokens on a CPU, 16 on a GPU); the next turn shares those of the turns before.
            enable_prefix_caching=True,
            max_num_batched_tokens=max(setup.max_model_len, _MAX_BATCHED_TOKENS),
            # Logprobs of the distribution that was sampled from, so under the temperature.
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
        )

    def generate(self, batch: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        """Completes each row of `input_ids [B, T]` up to `input_lengths [B]`, under `seeds [B]`."""
        from vllm import SamplingParams

        prompts = [
            ids[:length].tolist()
            for ids, length in zip(batch["input_ids"], batch["input_lengths"].tolist(), strict=True)
        ]
        config = self._setup.config
        params = [
            SamplingParams(
                temperature=0.0 if greedy else config.temperature,
                seed=None if greedy else seed,
                max_tokens=config.max_new_tokens,
                logprobs=0,
                stop_token_ids=list(self._setup.stop_token_ids),
                ignore_eos=True,  # stop_token_ids hold every token that ends a completion
                detokenize=False,
            )
            for seed in batch["seeds"].tolist()
        ]
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        completions = [output.outputs[0] for output in outputs]
        return _as_batch(prompts, completions)

    def update_weights(self, buckets: list[WeightBucket]) -> str:
        """Replaces all weights and empties the prefix cache; returns what arrived, digested."""
        digest = combined_digest(received_digest(bucket) for bucket in buckets)
        self._reload([pair for bucket in buckets for pair in bucket.named_tensors()])
        return digest

    def load_weights(self, model_folder: Path) -> None:
        """Replaces all weights by those of the safetensors files in `model_folder`."""
        from safetensors.torch import load_file

        dtype = getattr(torch, self._setup.dtype)
        files = sorted(model_folder.glob("*.safetensors"))
        self._reload(
            [(name, w.to(dtype)) for file in files for name, w in sorted(load_file(file).items())]
        )

    def _reload(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        weights = _with_tied_head(named_tensors, self._setup.model_folder)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        # Keys and values that the old weights computed would otherwise be reused for the new ones.
        if not self._llm.reset_prefix_cache():
            raise ConsistencyError(
                "vLLM did not empty its prefix cache after new weights",
                fix="run the same command again: it resumes from the last save",
            )
        self._refuse_stale(named_tensors)

    def _refuse_stale(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Compares what the engine now holds with what was sent, where its layout allows.

        vLLM fuses and re-packs most matrices, but keeps embeddings, norms and some biases under
        their own names; a reload that did not happen shows in these.
        """
        runner = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        held = dict(runner.get_model().named_parameters())
        compared = 0
        for name, sent in named_tensors:
            parameter = held.get(name)
            if parameter is None or parameter.shape[1:] != sent.shape[1:] or not parameter.numel():
                continue
            compared += 1
            if not torch.equal(parameter[: sent.shape[0]].cpu(), sent):
                raise ConsistencyError(
                    f"vLLM still holds old weights in {name!r} after an update",
                    fix="run the same command again: it resumes from the last save",
                )
        if not compared:
            raise ConsistencyError("no weight that was sent could be found in vLLM's model")

    def peak_memory_gib(self) -> float:
        """The most memory this process has held."""
        return peak_memory_gib()

    def shutdown(self) -> None:
        """Ends the engine."""
        self.__dict__.clear()


def _with_tied_head(
    named_tensors: list[tuple[str, torch.Tensor]], model_folder: Path
) -> list[tuple[str, torch.Tensor]]:
    """Names the embedding a second time where the head shares it.

    Checkpoints hold a shared matrix once. vLLM loads that well the first time, but on a CPU it
    re-packs the head into a copy, which a later reload refreshes only if the head is named: the
    engine would go on with the head of its first weights.
    """
    config = json.loads((model_folder / "config.json").read_text())
    names = {name for name, _ in named_tensors}
    if not config.get("tie_word_embeddings", True) or _HEAD in names:
        return named_tensors
    embeddings = [tensor for name, tensor in named_tensors if name.endswith(_EMBEDDING)]
    if len(embeddings) != 1:
        raise ConsistencyError(
            "the head of the model shares its weights, but no embedding was sent with them",
            expected=f"one tensor whose name ends with {_EMBEDDING!r}",
            got=f"{len(embeddings)}",
        )
    return [*named_tensors, (_HEAD, embeddings[0])]


def _as_batch(prompts: list[list[int]], completions: list[Any]) -> BatchedDataDict:
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    generation_lengths = torch.tensor([len(c.token_ids) for c in completions])
    width = int((prompt_lengths + generation_lengths).max())
    output_ids = torch.zeros(len(prompts), width, dtype=torch.long)
    logprobs = torch.zeros(len(prompts), width)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens = list(completion.token_ids)
        end = len(prompt) + len(tokens)
        output_ids[row, :end] = torch.tensor(prompt + tokens)
        logprobs[row, len(prompt) : end] = torch.tensor(
            [step[token].logprob for token, step in zip(tokens, completion.logprobs, strict=True)]
        )
    return BatchedDataDict(
        {
            "output_ids": output_ids,
            "generation_lengths": generation_lengths,
            "unpadded_sequence_lengths": prompt_lengths + generation_lengths,
            "logprobs": logprobs,
            "truncated": torch.tensor([c.finish_reason == "length" for c in completions]),
        }
    )
