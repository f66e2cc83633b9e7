"""How a stage is cached, recorded, drawn, retried and placed on a cluster."""
