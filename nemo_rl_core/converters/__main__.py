"""Models from one form into another: `python -m nemo_rl_core.converters KIND SOURCE TARGET`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.converters.folders import require_folder
from nemo_rl_core.errors import ConfigError, NemoRLError


def _hf_to_megatron(given: argparse.Namespace) -> str:
    from nemo_rl_core.converters.megatron import hf_to_megatron

    hf_to_megatron(given.source, given.target, training=_training(given), dtype=given.dtype)
    return _proven(given, given.source)


def _megatron_to_hf(given: argparse.Namespace) -> str:
    from nemo_rl_core.converters.megatron import megatron_to_hf

    megatron_to_hf(
        given.source,
        given.target,
        max_shard_bytes=given.max_shard_mib * 2**20,
        training=_training(given),
    )
    return _proven(given, given.target)


def _proven(given: argparse.Namespace, model_folder: Path) -> str:
    """The proof's figures; what was written is set aside where it fails."""
    from nemo_rl_core.converters.proof import prove
    from nemo_rl_core.converters.rows import token_rows
    from nemo_rl_core.infra.files import discard

    try:
        rows = token_rows(given.data, model_folder, num_rows=given.num_rows)
        report = prove(given.source, given.target, rows, tolerance=given.tolerance)
    except NemoRLError:
        discard(given.target)
        raise
    return (
        f"{report.num_equal} of {report.num_tensors} tensors equal to the bit; logprobs of "
        f"{report.num_tokens} tokens in {report.num_rows} rows differ by at most "
        f"{report.max_absolute_difference:.2e} (relative {report.max_relative_difference:.2e}, "
        f"tolerance {report.tolerance:g})"
    )


def _dcp(given: argparse.Namespace) -> str:
    from nemo_rl_core.converters.dcp import dcp_to_hf

    num_tensors = dcp_to_hf(
        given.source,
        _model(given),
        given.target,
        prefix=given.prefix,
        max_shard_bytes=given.max_shard_mib * 2**20,
    )
    return f"{num_tensors} tensors"


def _lora(given: argparse.Namespace) -> str:
    from nemo_rl_core.converters.lora import merge_lora

    num_merged = merge_lora(
        given.source, _model(given), given.target, max_shard_bytes=given.max_shard_mib * 2**20
    )
    return f"{num_merged} weights with their adapters merged in"


def _vllm(given: argparse.Namespace) -> str:
    from nemo_rl_core.converters.vllm_ready import vllm_ready

    num_tensors = vllm_ready(
        given.source,
        given.target,
        dtype=given.dtype,
        max_shard_bytes=given.max_shard_mib * 2**20,
    )
    return f"{num_tensors} tensors in {given.dtype}"


_KINDS: dict[str, Callable[[argparse.Namespace], str]] = {
    "hf-to-megatron": _hf_to_megatron,
    "megatron-to-hf": _megatron_to_hf,
    "dcp-to-hf": _dcp,
    "lora": _lora,
    "vllm": _vllm,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts one folder.

    Returns:
        The exit code: 0, or 1 after an error that has been explained; 2 is argparse's own.
    """
    given = _parser().parse_args(arguments)
    try:
        told = _KINDS[given.kind](given)
    except NemoRLError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"wrote {given.target}: {told}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nemo_rl_core.converters",
        description="Convert a model; between transformers and Megatron, with a proof.",
    )
    parser.add_argument("kind", choices=sorted(_KINDS))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--model", type=Path, help="dcp-to-hf: config and tokenizer; lora: base")
    parser.add_argument("--prefix", help="dcp-to-hf: before transformers' names; else it is found")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--max-shard-mib", type=int, default=4096)
    parser.add_argument("--data", default="arithmetic", help="whose rows the proof reads")
    parser.add_argument("--num-rows", type=int, default=8)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of logprobs, in nats")
    return parser


def _training(given: argparse.Namespace) -> MegatronTraining:
    return MegatronTraining(
        tensor_parallel_size=given.tensor_parallel_size,
        pipeline_parallel_size=given.pipeline_parallel_size,
    )


def _model(given: argparse.Namespace) -> Path:
    if given.model is None:
        raise ConfigError(
            f"{given.kind} needs a second folder",
            expected="--model FOLDER",
            got="none",
            fix="name the base of the adapter, or the config and tokenizer of the model",
        )
    require_folder(given.model, "config.json")
    folder: Path = given.model
    return folder


if __name__ == "__main__":
    sys.exit(main())
