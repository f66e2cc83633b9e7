"""From rows to batches of tokens: readers, checks, chat templates, masks, packing."""
