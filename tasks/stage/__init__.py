"""Common code of stages: cache key, store folder, attempts, uploads, tracking and notices."""
