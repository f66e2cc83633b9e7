# Single GPU
cluster = RayVirtualCluster([1])  # 1 GPU

# Multi-GPU
cluster = RayVirtualCluster([8, 8])  # 2 nodes, 8 GPUs each

# Same code works at any scale
worker_group = RayWorkerGroup(cluster, policy_class)
