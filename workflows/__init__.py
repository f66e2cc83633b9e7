"""The pipelines: one workflow per file, each on one screen."""

import sys

from tasks.local_run import starting

starting.begin_for_pyflyte()  # before anything else, which takes seconds to import

if "flytekit" in sys.modules:  # not for `nemo-rl`, which imports this package to start quickly
    from tasks.local_run import command_help, run

    command_help.patch_recipe_options()
    run.install_recording()
