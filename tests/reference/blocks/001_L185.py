from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.algorithms.dpo import setup as dpo_setup, dpo_train

# Set up distributed environment
cluster = RayVirtualCluster(bundle_ct_per_node_list=[4], use_gpus=True, num_gpus_per_node=4)

# See examples/run_dpo.py for a complete training pipeline using Policy and dpo_train
