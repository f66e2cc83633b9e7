"""Caching, recording, display, retries and cluster placement of stages."""
