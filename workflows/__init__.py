"""The DAGs: one a file, one screen each."""

from tasks import recorder

recorder.install()
