"""autopar3d: a PyTorch model in, a GraphModule that trains on a 3-D grid of devices out."""

from .collectives import Collective, collectives
from .compiler import compile, plan, simulate
from .errors import AutoPar3DError
from .grid import Grid
from .hardware import Hardware
from .launch import launch
from .layout import Layout
from .module import ParallelModule

__version__ = "0.1.0"

__all__ = [
    "AutoPar3DError",
    "Collective",
    "Grid",
    "Hardware",
    "Layout",
    "ParallelModule",
    "collectives",
    "compile",
    "launch",
    "plan",
    "simulate",
]
