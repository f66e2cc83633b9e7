"""`nemo-rl convert`: convert a model into another format."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import rich_click

from nemo_rl_core.errors import ConfigError, NemoRLError


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The arguments of one call, as documented by the command's options."""

    kind: str
    source: Path
    target: Path
    model: Path | None
    prefix: str | None
    dtype: Literal["float32", "bfloat16"]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    max_shard_mib: int
    data: str
    num_rows: int
    tolerance: float

    @property
    def max_shard_bytes(self) -> int:
        """The maximum size of a file of weights."""
        return self.max_shard_mib * 2**20


def _hf_to_megatron(call: Conversion) -> str:
    from nemo_rl_core.converters.megatron import hf_to_megatron

    hf_to_megatron(call.source, call.target, training=_training(call), dtype=call.dtype)
    return _proven(call, call.source)


def _megatron_to_hf(call: Conversion) -> str:
    from nemo_rl_core.converters.megatron import megatron_to_hf

    megatron_to_hf(
        call.source, call.target, max_shard_bytes=call.max_shard_bytes, training=_training(call)
    )
    return _proven(call, call.target)


def _proven(call: Conversion, model_folder: Path) -> str:
    """Proves the conversion and returns a summary; removes the target on failure."""
    from nemo_rl_core.converters.proof import prove
    from nemo_rl_core.converters.rows import token_rows
    from nemo_rl_core.store.files import discard

    try:
        rows = token_rows(call.data, model_folder, num_rows=call.num_rows)
        report = prove(call.source, call.target, rows, tolerance=call.tolerance)
    except NemoRLError:
        discard(call.target)
        raise
    return (
        f"{report.num_equal} of {report.num_tensors} tensors bitwise identical; logprobs of "
        f"{report.num_tokens} tokens in {report.num_rows} rows differ by at most "
        f"{report.max_absolute_difference:.2e} (relative {report.max_relative_difference:.2e}, "
        f"tolerance {report.tolerance:g})"
    )


def _dcp(call: Conversion) -> str:
    from nemo_rl_core.converters.dcp import dcp_to_hf

    num_tensors = dcp_to_hf(
        call.source,
        _model(call),
        call.target,
        prefix=call.prefix,
        max_shard_bytes=call.max_shard_bytes,
    )
    return f"{num_tensors} tensors"


def _lora(call: Conversion) -> str:
    from nemo_rl_core.converters.lora import merge_lora

    num_merged = merge_lora(
        call.source, _model(call), call.target, max_shard_bytes=call.max_shard_bytes
    )
    return f"{num_merged} weights with their adapters merged in"


def _vllm(call: Conversion) -> str:
    from nemo_rl_core.converters.vllm_ready import vllm_ready

    num_tensors = vllm_ready(
        call.source, call.target, dtype=call.dtype, max_shard_bytes=call.max_shard_bytes
    )
    return f"{num_tensors} tensors in {call.dtype}"


def _training(call: Conversion) -> Any:
    from nemo_rl_core.config.training import MegatronTraining

    return MegatronTraining(
        tensor_parallel_size=call.tensor_parallel_size,
        pipeline_parallel_size=call.pipeline_parallel_size,
    )


def _model(call: Conversion) -> Path:
    from nemo_rl_core.converters.folders import require_folder

    if call.model is None:
        raise ConfigError(
            f"{call.kind} needs a second folder",
            expected="--model FOLDER",
            got="none",
            fix="pass the base of the adapter, or the folder of the model's config and tokenizer",
        )
    require_folder(call.model, "config.json")
    return call.model


_KINDS: dict[str, Callable[[Conversion], str]] = {
    "hf-to-megatron": _hf_to_megatron,
    "megatron-to-hf": _megatron_to_hf,
    "dcp-to-hf": _dcp,
    "lora": _lora,
    "vllm": _vllm,
}
_AT_LEAST_1 = click.IntRange(min=1)


@rich_click.command()
@click.argument("kind", type=click.Choice(sorted(_KINDS)), metavar="KIND")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path),
              help="dcp-to-hf: the folder of config and tokenizer; lora: the base.")  # fmt: skip
@click.option("--prefix", help="dcp-to-hf: prefix of transformers' names; detected by default.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32",
              show_default=True, help="hf-to-megatron, vllm: dtype of the weights.")  # fmt: skip
@click.option("--tensor-parallel-size", type=_AT_LEAST_1, default=1, show_default=True,
              help="Tensor parallel size of the Megatron processes.")  # fmt: skip
@click.option("--pipeline-parallel-size", type=_AT_LEAST_1, default=1, show_default=True,
              help="Pipeline parallel size of the Megatron processes.")  # fmt: skip
@click.option("--max-shard-mib", type=_AT_LEAST_1, default=4096, show_default=True,
              help="Largest file of weights; not for hf-to-megatron.")  # fmt: skip
@click.option("--data", default="arithmetic", show_default=True, help="Data for the proof.")
@click.option(
    "--num-rows", type=_AT_LEAST_1, default=8, show_default=True, help="Rows of the proof."
)
@click.option("--tolerance", type=float, default=1e-4, show_default=True,
              help="Largest difference of logprobs in the proof, in nats.")  # fmt: skip
def convert(**given: Any) -> None:
    """Convert the model in SOURCE into TARGET, a folder that does not exist yet.

    KIND is hf-to-megatron, megatron-to-hf, dcp-to-hf (a PyTorch distributed checkpoint), lora (an
    adapter, merged into its base) or vllm (full weights of one type, in safetensors).

    Conversions between transformers and Megatron are proven: equal tensors, and equal logprobs
    within the tolerance. A target that fails its proof is removed.
    """
    call = Conversion(**given)
    result = _KINDS[call.kind](call)
    click.echo(f"wrote {call.target}: {result}")
