"""autopar3d: a PyTorch model in, a GraphModule that trains on a 3-D grid of devices out."""

__version__ = "0.1.0"
