"""Rows of a recipe as its stages read them: prompts, templates and masks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.config.data import DataConfig, FileData, HubData
from nemo_rl_core.config.model import ModelConfig, PretrainedModel, SmallModel
from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.frames import row_kind
from nemo_rl_core.data.pretrained import load_tokenizer, set_template
from nemo_rl_core.data.preview import preview, read_row, tools_line
from nemo_rl_core.data.tokenizer import build_tokenizer
from nemo_rl_core.data.tools import shown_tools
from nemo_rl_core.data.written import written_tools
from nemo_rl_core.environments.contents import located_model
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.rollouts.prompts import tools_by_task
from nemo_rl_core.store import remote
from tasks.cli.pipelines import Pipelines
from tasks.cli.recipe.recipe_pipeline import pipeline_of
from tasks.cli.recipe.run_settings import chosen_pipeline


def preview_recipe(
    recipe: str,
    settings: Sequence[str],
    number: int,
    *,
    pipelines: Pipelines,
    model: Path | None,
    color: bool,
) -> str:
    """Formats a training row of a recipe; for a sweep, that of its first point.

    Returns:
        The arguments of the chat template and the tools, if any. For a prompt, the text
        from which completions are sampled, and the answer. Then the row with its trained tokens,
        unless it is a prompt and the recipe has no supervised fine-tuning.
    """
    name = pipeline_of(recipe, pipelines)
    chosen = chosen_pipeline(name, [recipe, *settings], pipelines=pipelines)
    experiment = chosen.recipe.experiments[0]
    data = experiment.data
    row = read_row(data, number, data, seed=experiment.seed, name=_name_of_data(data))
    tokenizer = load_tokenizer(model) if model else _tokenizer_of(experiment.model)
    set_template(tokenizer, experiment.model)
    is_prompt = row_kind(row) == "prompts"
    arguments = experiment.model.chat_template_kwargs
    blocks = [f"template arguments: {json.dumps(arguments)}"] if arguments else []
    environment = getattr(experiment, "environment", None)
    if is_prompt:
        tools = shown_tools(written_tools(tools_by_task(environment), tokenizer), row)
        row = {**row, "tools": json.dumps(tools)}
    blocks += tools_line(row)
    if is_prompt:
        ids = prompt_token_ids(tokenizer, row["prompt"], tools=tools)
        blocks.append(f"prompt: {len(ids)} tokens\n{tokenizer.decode(ids)}")
        blocks.append(f"answer: {row['answer']}")
    if not is_prompt or (row["completion"] and experiment.sft is not None):
        blocks.append(preview(row, tokenizer, color=color))
    return "\n\n".join(blocks)


def _name_of_data(data: DataConfig) -> str:
    if isinstance(data, FileData):
        return data.train
    return data.name if isinstance(data, HubData) else f"the data of kind {data.kind}"


def _tokenizer_of(model: ModelConfig) -> Any:
    if isinstance(model, SmallModel):
        return build_tokenizer(model)
    located = located_model(model)
    if not isinstance(located, PretrainedModel) or remote.is_remote(located.name):
        raise ConfigError(
            "the tokenizer of the recipe's model is not on this machine",
            expected="a folder or a hub name in model.name, or --model",
            got=located.name,
            fix="name a folder with the tokenizer: --model FOLDER",
        )
    return load_tokenizer(Path(located.name).expanduser())
