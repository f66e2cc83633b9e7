"""The DAGs: one a file, one screen each."""

from tasks.platform import command_help, run

command_help.explain_recipes()
run.install()
