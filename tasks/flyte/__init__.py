"""Extensions of flytekit: local cache, retries, downloads, launch plans and readable errors."""
