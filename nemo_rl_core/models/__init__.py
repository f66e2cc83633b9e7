"""The controller's side of policies and generation: they drive worker groups."""
