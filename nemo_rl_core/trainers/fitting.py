"""From what a user has at hand to the folders that a trainer runs on.

The model, the data and the run become artifacts in the store, each with its manifest: a checkpoint
made by five lines of Python has the same lineage as one made by a pipeline.
"""

import logging
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
