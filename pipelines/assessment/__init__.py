"""The parts of pipelines/assess.py: who is compared, on which questions, how it is measured, what the report says.

contenders  a model and a way to decode it        questions  generated tasks or own prompts, with their checks
held_out    masked and next-token loss            measuring  answers and seconds, taken in turns
figures     numbers from raw answers (pure)       report     the table, the words and the plot
journal     what an interrupted run can keep
"""
