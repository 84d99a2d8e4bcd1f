"""A plan as one self-contained HTML page, and as a table for notebooks."""

from .notebook import table
from .whole import page

__all__ = ["page", "table"]
