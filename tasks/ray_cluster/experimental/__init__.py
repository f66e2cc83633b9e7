"""One Ray cluster for all stages of a run (`cluster.lifetime: run`), which has only run on fakes.

It moves back to its neighbors once it has run on a cluster with Flyte and KubeRay:

- `run_stage.py`: a stage that joins the cluster as a node and drives its workers.
- `run_cluster.py`, `ray_job_api.py`, `inherited.py`: the RayJob that the first stage creates.
- `joining.py`: two stages of a run that take turns on the same GPUs.
- `cluster_keeper.py`: the release of the GPUs after the last stage.
"""
