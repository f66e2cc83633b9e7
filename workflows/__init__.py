"""The DAGs: one a file, one screen each."""

from tasks.platform import starting

starting.begin_for_pyflyte()  # before anything else, which takes seconds to import

from tasks.platform import command_help, run  # noqa: E402

command_help.explain_recipes()
run.install_recording()
