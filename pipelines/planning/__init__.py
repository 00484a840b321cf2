"""What a training run will need, from a config and a table of hardware: shapes, memory, traffic, time."""
