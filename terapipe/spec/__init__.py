"""A run, described: everything the ranks need, checked before any process starts."""

from terapipe.spec.imports import stage_path
from terapipe.spec.spec import RunSpec

__all__ = ["RunSpec", "stage_path"]
