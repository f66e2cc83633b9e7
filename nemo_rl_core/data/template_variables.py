"""Chat template variables and the tool parser of a recipe, stored with the tokenizer."""

import json
import re
from typing import Any

from nemo_rl_core.config.model import ModelSource
from nemo_rl_core.errors import ConfigError


def set_template(tokenizer: Any, model: ModelSource) -> None:
    """Stores a recipe's date, tool parser and chat template variables in the tokenizer.

    The variables become defaults in the first lines of the template: a caller that passes none gets
    the recipe's values, and a caller may pass others.
    """
    tokenizer.init_kwargs = {**tokenizer.init_kwargs, "template_date": model.template_date}
    if model.tool_parser:
        tokenizer.init_kwargs["tool_parser"] = model.tool_parser
    variables = model.chat_template_kwargs
    if not variables:
        return
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise ConfigError(
            "model.chat_template_kwargs needs a chat template",
            got="several templates" if template else "a tokenizer without one",
            fix="use a chat model, or remove chat_template_kwargs",
        )
    unread = [name for name in variables if not re.search(rf"\b{re.escape(name)}\b", template)]
    if unread:
        raise ConfigError(
            "the chat template does not read a variable of model.chat_template_kwargs",
            got=", ".join(unread),
            fix="use the names in the template, or remove these variables",
        )
    # On separate lines, since the template may begin with white space that jinja strips.
    tokenizer.chat_template = "".join(map(_line, variables, variables.values())) + template


def _line(name: str, value: bool | float | str) -> str:
    test = f"{{%- if {name} is not defined %}}"
    return f"{test}{{%- set {name} = {json.dumps(value, ensure_ascii=False)} %}}{{%- endif %}}\n"
