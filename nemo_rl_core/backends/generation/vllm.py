"""Generation backend with vLLM's offline engine in the worker's process."""

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import torch

from nemo_rl_core.backends.decoding.requests import (
    Completed,
    DecodingRequest,
    as_batch,
    read_requests,
    refuse_stop_strings_without_text,
    samples_of_a_prompt,
)
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.generation.gpu_memory import used_gpu_gib
from nemo_rl_core.backends.generation.incoming import IncomingWeights
from nemo_rl_core.backends.generation.vllm_libraries import correct_speculation, load_libnuma
from nemo_rl_core.backends.generation.vllm_loader import load_format_of
from nemo_rl_core.backends.generation.vllm_ranks import (
    gpu_of_single_rank,
    join_engine,
    launcher,
    unlink_shared_memory,
)
from nemo_rl_core.checkpoints.model_code import code_options, runs_in_this_process
from nemo_rl_core.checkpoints.weights import rounded_weights
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.data.pretrained import read_model_json
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.weight_sync.link import ReceivesWeights
from nemo_rl_core.documented_names import documented
from nemo_rl_core.errors import ConfigError, ConsistencyError, ModelError, NemoRLError
from nemo_rl_core.model_files.loading import empty_model, name_in_errors
from nemo_rl_core.model_files.weights import check_folder
from nemo_rl_core.planning.vllm_heads import refuse_heads_on_cpu
from nemo_rl_core.telemetry.usage import peak_memory_gib

_MAX_BATCHED_TOKENS = 8192
_CPU_BLOCK = 32
_FP8_CAPABILITY = (8, 9)
SENT = "the trainer's weight transfer"
"""Source of weights that a trainer has sent, for errors."""
Tag = Literal["weights", "kv_cache"]
_ALL_TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
"""Parts that vLLM can wake separately; everything else wakes with the first of them."""


class VllmBackend(ReceivesWeights):
    """One rank of a vLLM engine (a `GenerationBackend`).

    If an engine has several ranks, each runs the same scheduler over the same rows, as with vLLM's
    external launcher, so that ranks only exchange activations.

    Attributes:
        peak_gpu_gib: Peak GPU memory of this process before it went to sleep, in GiB.
    """

    peak_gpu_gib = 0.0
    scheduling_policy = "fcfs"

    def setup(self, setup: GenerationSetup) -> None:
        """Starts the engine."""
        config = setup.config
        assert isinstance(config, VllmGenerationConfig), config
        self._setup, self._config = setup, config
        self._asleep: tuple[Tag, ...] = ()
        self._has_weights = True
        has_gpu = torch.cuda.is_available()
        if config.pipeline_parallel_size > 1 and not has_gpu:
            raise ConfigError(
                "vLLM does not pass activations between the stages of a pipeline on a CPU",
                expected="generation.pipeline_parallel_size: 1",
                got=str(config.pipeline_parallel_size),
                fix="use tensor_parallel_size, or GPUs",
            )
        _refuse_block_size(config, has_gpu=has_gpu)
        if config.quantization != "none":
            _refuse_quantization(config.quantization, dtype=setup.dtype, has_gpu=has_gpu)
        # vLLM itself ignores missing parts of fused matrices and surplus weights.
        self._expected = empty_model(setup.model_folder, "lm")
        check_folder(self._expected, setup.model_folder)
        if runs_in_this_process(setup.model_folder):
            _refuse_custom_attention(self._expected, setup.model_folder)
        if not has_gpu:
            refuse_heads_on_cpu(
                read_model_json(setup.model_folder), called=name_in_errors(setup.model_folder)
            )
        load_libnuma()
        if not has_gpu:
            # Even in eager mode, vLLM compiles a sampler function, which needs a C++ compiler on
            # CPUs.
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
            correct_speculation()
        try:
            self._start_engine(has_gpu=has_gpu)
        except (NemoRLError, MemoryError):
            raise
        # Broad on purpose: vLLM raises many types of errors for models that it cannot compute.
        except Exception as error:
            raise _failed("does not start with", setup, error) from error

    def _start_engine(self, *, has_gpu: bool) -> None:
        setup, config = self._setup, self._config
        from vllm import LLM, SamplingParams  # slow, so only after the folder was checked

        ranks = config.ranks_per_engine
        load_format = load_format_of(config, has_gpu=has_gpu)
        self._is_empty = load_format not in ("auto", "dummy")
        options = {
            # The rollouts of a group share the keys and values of their prompt, in full blocks;
            # the next turn shares those of earlier turns.
            "enable_prefix_caching": has_gpu or not _has_state(setup),
            "max_num_batched_tokens": max(setup.max_model_len, _MAX_BATCHED_TOKENS),
            **config.engine_options,
        }
        self._llm = LLM(
            str(setup.model_folder),
            **code_options(setup.model_folder),
            **options,
            skip_tokenizer_init=config.skip_tokenizer_init,
            enforce_eager=config.enforce_eager or not has_gpu,
            dtype=setup.dtype,
            max_model_len=setup.max_model_len,
            max_num_seqs=config.max_num_seqs,
            scheduling_policy=self.scheduling_policy,
            gpu_memory_utilization=config.gpu_memory_utilization,
            seed=setup.seed,
            load_format=load_format,
            quantization=None if config.quantization == "none" else config.quantization,
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
            distributed_executor_backend=launcher() if ranks > 1 else None,
            device_ids=join_engine(ranks) if ranks > 1 else gpu_of_single_rank(),
            # An engine on dedicated GPUs stays awake.
            enable_sleep_mode=has_gpu and not config.num_dedicated_bundles,
            # Chunked prefill samples a token and discards it, which vLLM cannot do with the seeded
            # generators of a CPU; so prompts are prefilled whole.
            enable_chunked_prefill=has_gpu,
            block_size=config.block_size,
            # Logprobs of the sampled distribution at its temperature; if that is truncated, of the
            # policy's full distribution at temperature 1.
            logprobs_mode=_logprobs_mode(config),
            disable_log_stats=True,
            hf_overrides=_overrides(read_model_json(setup.model_folder)),
        )
        if ranks > 1:
            unlink_shared_memory()
        if not has_gpu:  # CPU kernels reject some models only when they compute
            self._llm.generate(
                [{"prompt_token_ids": [0]}],
                SamplingParams(
                    temperature=0.0,
                    max_tokens=min(2, setup.max_model_len - 1),
                    ignore_eos=True,
                    detokenize=False,
                ),
                use_tqdm=False,
            )

    def generate(self, batch: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        """Completes each row of `input_ids [B, T]` up to `input_lengths [B]`, under `seeds [B]`."""
        self.wake()
        requests = read_requests(batch, self._config, max_model_len=self._setup.max_model_len)
        if self._config.skip_tokenizer_init:
            refuse_stop_strings_without_text(requests)
        if not requests:
            return as_batch([], [])
        is_greedy = greedy or self._config.temperature == 0
        # vLLM samples n completions of a request under its seed, seed + 1, ...
        groups = [[each] for each in requests] if is_greedy else samples_of_a_prompt(requests)
        outputs = self._llm.generate(
            [{"prompt_token_ids": group[0].prompt} for group in groups],
            [self._sampling(group[0], n=len(group), is_greedy=is_greedy) for group in groups],
            use_tqdm=False,
        )
        return as_batch(requests, [completed(each) for out in outputs for each in out.outputs])

    def _sampling(self, request: DecodingRequest, *, n: int, is_greedy: bool) -> Any:
        from vllm import SamplingParams

        config = self._config
        return SamplingParams(
            n=n,
            temperature=0.0 if is_greedy else config.temperature,
            seed=None if is_greedy else request.seed,
            top_p=1.0 if is_greedy else config.top_p,
            top_k=0 if is_greedy else config.top_k or 0,
            repetition_penalty=config.repetition_penalty,
            max_tokens=request.max_new_tokens,
            logprobs=0,
            flat_logprobs=True,
            stop_token_ids=list(self._setup.stop_token_ids),
            ignore_eos=True,  # stop_token_ids are all tokens that end a completion
            stop=list(request.stop_strings),
            detokenize=bool(request.stop_strings),
            skip_special_tokens=False,  # a stop string may be one
            spaces_between_special_tokens=False,
            skip_clone=True,  # nothing else references these parameters
        )

    def wake(self) -> None:
        """Restores the memory of weights, keys and values; no-op if awake."""
        if self._is_empty:  # no weights were sent yet
            VllmBackend.load_weights(self, self._setup.model_folder)
        if not self._has_weights:
            raise ConsistencyError(
                "the engine has discarded its weights and received no new ones",
                expected="update_weights(policy) before it generates again",
                got="finish_generation(discards_weights=True), then generate",
                fix="call update_weights, or finish_generation without discards_weights",
            )
        self._wake_up(_ALL_TAGS)

    def _wake_up(self, tags: tuple[Tag, ...]) -> None:
        if due := [tag for tag in tags if tag in self._asleep]:
            self._llm.wake_up(tags=due)
            self._asleep = tuple(tag for tag in self._asleep if tag not in due)

    def sleep(self, *, level: Literal[1, 2] = 1) -> None:
        """Releases the GPU's memory; no-op without a GPU, or if the weights are asleep.

        Level 2 also discards the weights, which the next update replaces.
        """
        can_sleep = self._llm.llm_engine.model_config.enable_sleep_mode
        if can_sleep and "weights" not in self._asleep:
            self.peak_gpu_gib = max(self.peak_gpu_gib, used_gpu_gib())
            self._llm.sleep(level=level)
            self._asleep, self._has_weights = _ALL_TAGS, level == 1
            self._is_empty &= self._has_weights

    def prefill_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """Returns `[B, T]` logprobs of complete sequences, each in one forward pass.

        They are in nats at temperature 1, and 0 at the first token and past a sequence's end. Each
        sequence is shorter than the engine's maximum.
        """
        from vllm import SamplingParams

        self.wake()
        self._llm.reset_prefix_cache()
        rows = [
            ids[:length].tolist()
            for ids, length in zip(batch["input_ids"], batch["input_lengths"].tolist(), strict=True)
        ]
        outputs = self._llm.generate(
            [{"prompt_token_ids": row} for row in rows],
            SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        logprobs = torch.zeros(batch["input_ids"].shape)
        for index, (row, output) in enumerate(zip(rows, outputs, strict=True)):
            steps = zip(row[1:], output.prompt_logprobs[1:], strict=True)
            logprobs[index, 1 : len(row)] = torch.tensor(
                [step[token].logprob for token, step in steps]
            )
        return logprobs

    def take_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replaces all weights as they arrive; the KV cache stays asleep, as memory peaks."""
        self._reload(named_tensors, source=SENT)

    def load_weights(self, model_folder: Path) -> None:
        """Replaces all weights with those of the safetensors files in `model_folder`.

        Tensors are read and converted one at a time, since every rank of every engine on a machine
        does so.
        """
        dtype = getattr(torch, self._setup.dtype)
        self._reload(
            rounded_weights(model_folder, dtype),
            source=f"the model folder {model_folder.name!r}",
        )

    def _reload(self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, source: str) -> None:
        tensors = iter(named_tensors)
        first = list(islice(tensors, 1))  # arrives once the trainer has left the GPU
        arriving = chain(first, tensors)
        self._wake_up(("weights",))  # sleeping weights have no memory to write to
        if not torch.cuda.is_available():
            _drop_expert_kernels(self._model())
        mapper: Any = getattr(self._model(), "hf_to_vllm_mapper", None)
        incoming = IncomingWeights(
            self._expected,
            dict(self._model().named_parameters()),
            is_tensor_parallel=self._config.tensor_parallel_size > 1,
            source=source,
            **({"rename": mapper.map_name} if mapper else {}),
        )
        weights = incoming.checked(arriving)
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        except NemoRLError:
            raise
        except Exception as error:
            incoming.refuse_wrong(arriving)  # its message is clearer than vLLM's
            raise _failed("does not take new weights of", self._setup, error) from error
        if not torch.cuda.is_available():
            _finish_on_cpu(self._model(), name_in_errors(self._setup.model_folder))
        self._has_weights, self._is_empty = True, False
        # Otherwise keys and values of the old weights would be reused.
        if not self._llm.reset_prefix_cache():
            raise ConsistencyError(
                "vLLM did not empty its prefix cache after new weights",
                fix="run the same command again; it resumes from the last save",
            )
        incoming.refuse_stale(dict(self._model().named_parameters()))

    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._runner().get_model()
        return model

    def _runner(self) -> Any:
        return self._llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def kernels(self) -> dict[str, str]:
        """Returns the kernels that vLLM has chosen, by operation."""
        groups = [group for groups in self._runner().attn_groups for group in groups]
        return {"attention": " ".join(sorted({group.backend.get_name() for group in groups}))}

    def peak_memory_gib(self) -> float:
        """Returns the peak memory of this process."""
        return peak_memory_gib()

    def shutdown(self) -> None:
        """Ends the engine."""
        self.__dict__.clear()


def _drop_expert_kernels(model: torch.nn.Module) -> None:
    """Drops the kernels of experts, so that the next reload packs their weights again.

    On a CPU, vLLM pads and packs experts' weights only when it builds their kernel
    (`UnquantizedFusedMoEMethod._setup_kernel`). A layer would keep its kernel during a reload and
    read unpacked weights as packed ones.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _finish_on_cpu(model: torch.nn.Module, source_name: str) -> None:
    """Repacks heads that are tied to the embedding; refuses experts that kept their old weights.

    On a CPU, vLLM computes with a packed copy. A reload refreshes it only if the head's name is
    sent, but a tied weight is sent under the embedding's name only. Experts without a kernel were
    not reloaded, see `_drop_expert_kernels`.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(module, ParallelLMHead):
            method.process_weights_after_loading(module)
        elif hasattr(method, "moe_kernel") and method.moe_kernel is None:
            raise ModelError(
                f"vLLM cannot load new weights into {source_name}",
                expected="a model whose experts vLLM reloads",
                got=f"old weights in {name}",
                fix="set generation.backend: hf",
            )


def completed(completion: Any) -> Completed:
    """Converts vLLM's output of one completion, or of its new tokens."""
    flat, tokens = completion.logprobs, list(completion.token_ids)
    assert flat.token_ids == tokens, "vLLM returned logprobs of tokens that it did not sample"
    return Completed(tokens, flat.logprobs, truncated=completion.finish_reason == "length")


def _overrides(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config values that vLLM interprets differently than transformers."""
    if str(config.get("model_type")) in ("cohere2", "cohere2_moe") and config.get("sliding_window"):
        return {"sliding_window": config["sliding_window"] - 1}
    return {}


def _failed(problem: str, setup: GenerationSetup, error: Exception) -> ModelError:
    return ModelError(
        f"vLLM {problem} {name_in_errors(setup.model_folder)}",
        expected="a model and settings that vLLM computes on this machine",
        got=f"{type(error).__name__}: {error}".partition("\n")[0],
        fix="if it ran out of memory, make the engine smaller (generation.max_num_seqs, "
        "kv_cache_gib, gpu_memory_utilization); otherwise set generation.backend: hf",
    )


def _refuse_custom_attention(model: Any, folder: Path) -> None:
    """Refuses a model with code whose attention vLLM cannot replace by its kernels."""
    kind = type(model)
    if not kind.is_backend_compatible():
        raise ModelError(
            f"vLLM cannot sample from {name_in_errors(folder)}",
            expected="a class with _supports_attention_backend, whose attention vLLM replaces",
            got=f"{kind.__name__}, which computes attention itself",
            fix="set generation.backend: hf",
        )


def _has_state(setup: GenerationSetup) -> bool:
    """Whether a model has recurrent state, such as Mamba's, in addition to keys and values.

    vLLM caches such state of prompts only with chunked prefill.
    """
    from vllm.engine.arg_utils import EngineArgs

    options = EngineArgs(
        str(setup.model_folder),
        dtype=setup.dtype,
        skip_tokenizer_init=True,
        **code_options(setup.model_folder),
    )
    return bool(options.create_model_config().has_inner_state)


def _refuse_block_size(config: VllmGenerationConfig, *, has_gpu: bool) -> None:
    """Raises `ConfigError` for a block size that vLLM would reject only after its start."""
    size = config.block_size
    if has_gpu or size is None or size % _CPU_BLOCK == 0:
        return
    raise ConfigError(
        "vLLM's attention on a CPU does not support this block size",
        expected=f"generation.block_size: a multiple of {_CPU_BLOCK}, or unset for vLLM's default",
        got=str(size),
        fix=f"set it to {-(-size // _CPU_BLOCK) * _CPU_BLOCK}",
    )


def _refuse_quantization(quantization: str, *, dtype: str, has_gpu: bool) -> None:
    """Raises `ConfigError` for FP8 without hardware support; vLLM may compute in 16 bits."""
    capability = torch.cuda.get_device_capability() if has_gpu else None
    if capability is not None and capability >= _FP8_CAPABILITY and dtype == "bfloat16":
        return
    device = f"compute capability {'.'.join(map(str, capability))}" if capability else "no GPU"
    raise ConfigError(
        f"generation.quantization: {quantization} cannot be computed here",
        expected="a GPU of compute capability 8.9 or later (L4, L40S, H100), and model.dtype: "
        "bfloat16",
        got=f"{device}, {dtype}",
        fix="leave generation.quantization out",
    )


def _logprobs_mode(config: VllmGenerationConfig) -> str:
    if config.temperature == 1 and not config.draws_from_all:
        return "raw_logprobs"
    return "processed_logprobs"


def __getattr__(name: str) -> Any:
    return documented(__name__, name)
