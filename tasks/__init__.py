"""Typed, cached Flyte tasks: each one connects, calls the core, and returns an artifact.

The modules here are the stages, and `artifacts`, which they exchange. Packages, from the bottom up:

- `recipes`: what users write, as plain pydantic models, and the fields that each stage reads
- `flyte`, `pods`: extensions of flytekit; images, shapes and resources of pods
- `ray_cluster`: Ray clusters of stages
- `stage`, `planning`: the common code of all stages; plans of GPU memory and hours
- `plan_tasks`: the tasks that split a recipe into the configs of stages, and record failures
- `local_run`, `reproduce`: runs on this machine; running an earlier artifact's stages again
- `cli`: the command `nemo-rl`

Importing this package loads only small modules (10 ms), so that `nemo-rl` starts quickly.
`tasks.stage.stage`, which every task needs, moves flytekit's files into the store.
"""

import nemo_rl_core  # noqa: F401  (makes the former modules of this package importable)
