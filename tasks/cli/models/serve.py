"""`nemo-rl serve`: vLLM's OpenAI-compatible server on a model of this project."""

import os
import sys
from pathlib import Path

import click
import rich_click

from tasks.cli.records.names import complete_artifacts, model_folder


@rich_click.command(context_settings={"ignore_unknown_options": True})
@click.argument("model", shell_complete=complete_artifacts)
@click.argument("vllm_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535),
              help="Port to listen on.")  # fmt: skip
@click.option("--name", help="The model's name in requests; by default that of its folder.")
def serve(
    model: str, vllm_options: tuple[str, ...], host: str, port: int, name: str | None
) -> None:
    """Serve MODEL to clients of OpenAI's API: a folder, or an artifact by its id or hash.

    All other options are those of `vllm serve`, such as --api-key or --max-model-len. Ctrl-C ends
    the server. Without --api-key, anyone who can reach the address can use the model.
    """
    from nemo_rl_core.converters.materialize import check_pretrained
    from nemo_rl_core.errors import ModelError
    from tasks.cli.records.ui import listen

    folder = model_folder(model).resolve()
    if not folder.is_dir():
        raise ModelError(
            f"there is no model {model!r}",
            expected="a folder with config.json, *.safetensors and tokenizer.json, or an artifact",
            got="neither a folder nor an artifact of the store",
            fix="name the folder that the run printed after `model:`",
        )
    check_pretrained(str(folder), trust_remote_code="--trust-remote-code" in vllm_options)
    # The port is checked before the engine is loaded, which takes a while.
    listen(host, port, what="model", fix="give another one, as in --port 8001").close()
    name = name or (folder.parent.name if folder.name == "model" else folder.name)
    click.echo(f"The model {name!r} at http://{host}:{port}/v1 once it is loaded  (Ctrl-C ends it)")
    _run(["--model", str(folder), "--host", host, "--port", str(port),
          "--served-model-name", name, *_defaults(), *vllm_options])  # fmt: skip


def _defaults() -> list[str]:
    """Returns options that training engines have, too (see `backends/generation/vllm.py`)."""
    import torch

    if torch.cuda.is_available():
        return ["--gpu-memory-utilization", "0.5"]
    # Prompts in one piece, since chunks would draw from the seeded generators of requests.
    return ["--gpu-memory-utilization", "0.5", "--dtype", "float32", "--enforce-eager",
            "--no-enable-chunked-prefill"]  # fmt: skip


def _run(arguments: list[str]) -> None:
    _prepare_environment()
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="nemo-rl serve MODEL"))
    parsed = parser.parse_args(arguments)
    validate_parsed_serve_args(parsed)
    uvloop.run(run_server(parsed))


def _prepare_environment() -> None:
    import torch

    from nemo_rl_core.backends.generation.vllm_libraries import load_libnuma

    load_libnuma()
    libraries = [str(Path(sys.prefix) / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # The model is a folder here: nothing has to be looked up.
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not torch.cuda.is_available():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its kernels would need a C++ compiler
