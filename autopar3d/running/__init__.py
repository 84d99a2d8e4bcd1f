"""A compiled module at work: a step on a rank or on all ranks in one process, its tensors, state and initialisation."""
