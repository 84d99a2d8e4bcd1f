"""Time: how long a node and a graph take, recorded steps, pictures and traces, measuring a machine."""
