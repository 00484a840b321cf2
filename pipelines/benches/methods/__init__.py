"""`bench.py methods`: ways to write several tokens at a time, against the AR control, on the same held-out tasks.

config      its keys                                  run      who competes; the table and its ratios
cost        what a model's training took              memory   what a model needs, in a process of its own
"""
