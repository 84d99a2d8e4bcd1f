"""Choosing: strategies and factors, prices, the solver, storage and padding, grids, bounds on memory, constraints."""
