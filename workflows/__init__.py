"""The DAGs: one a file, one screen each."""

from tasks.platform import command_help, recorder

command_help.show_recipes_by_name()
recorder.install()
