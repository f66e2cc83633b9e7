"""`nemo-rl check-model`: compare the rollout engine's logprobs with the trainer's."""

import click
import rich_click
from rich.table import Table

from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.telemetry.console import console_on
from tasks.cli.records.names import complete_artifacts

NAMES = ("decode-against-prefill", "max-model-len", "trainer-against-engine")
"""Names of `nemo_rl_core.models.validation.checks`, whose import needs torch."""


@rich_click.command("check-model")
@click.argument("model", shell_complete=complete_artifacts)
@click.option("--only", type=click.Choice(NAMES), help="One check instead of all.")
def check_model(model: str, only: str | None) -> None:
    """Check that the rollout engine computes a model as the trainer does.

    MODEL is a folder in the transformers layout, or a hub name. The exit code is 1 if a check
    fails.
    """
    from nemo_rl_core.models.validation.checks import CHECKS
    from nemo_rl_core.models.validation.diagnostics import folder_to_check

    folder = folder_to_check(model)
    table, passed = Table("check", "result", "measured"), True
    for name in [only] if only else CHECKS:
        try:
            table.add_row(name, "passed", CHECKS[name](folder))
        except NemoRLError as error:
            table.add_row(name, "failed", str(error))
            passed = False
    console_on().print(table)
    if not passed:
        raise SystemExit(1)
