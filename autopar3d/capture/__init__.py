"""Getting a model's graph from torch: export, custom functions, regions, what is taken apart or replaced."""
