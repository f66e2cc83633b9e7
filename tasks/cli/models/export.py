"""`nemo-rl export`: a model as a GGUF file, or on the hub."""

from pathlib import Path
from typing import Literal

import click
import rich_click

from nemo_rl_core.errors import ConfigError
from tasks.cli.records.names import complete_artifacts, model_folder


@rich_click.command("export")
@click.argument("model", shell_complete=complete_artifacts)
@click.option("--gguf", "gguf_file", type=click.Path(path_type=Path, dir_okay=False),
              help="Write this file, for llama.cpp, Ollama and LM Studio.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default="float32",
              show_default=True, help="--gguf: type of the matrices.")  # fmt: skip
@click.option("--hub", metavar="OWNER/NAME",
              help="Push to this repository of the hub, or of HF_ENDPOINT.")  # fmt: skip
@click.option("--public", is_flag=True, help="--hub: visible to everyone; private by default.")
def export_command(
    model: str,
    gguf_file: Path | None,
    dtype: Literal["float32", "float16", "bfloat16"],
    hub: str | None,
    public: bool,
) -> None:
    """Export MODEL: a folder, or an artifact by its id or the beginning of its hash.

    Every exported model is already a transformers folder, which transformers and vLLM load.
    """
    from nemo_rl_core.converters.materialize import check_pretrained

    if gguf_file is None and hub is None:
        raise ConfigError(
            "nothing to export to", expected="--gguf FILE or --hub OWNER/NAME", got="neither"
        )
    folder = model_folder(model).resolve()
    check_pretrained(str(folder), trust_remote_code=True)  # its code is copied, and never run
    if gguf_file is not None:
        from nemo_rl_core.converters.gguf_file import described_file, write_gguf

        write_gguf(folder, gguf_file, dtype=dtype)
        click.echo(f"wrote {gguf_file}: {described_file(gguf_file)}")
    if hub is not None:
        from nemo_rl_core.converters.hub import push_to_hub

        click.echo(f"pushed to {push_to_hub(folder, hub, is_public=public)}")
