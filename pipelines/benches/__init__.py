"""The parts of pipelines/bench.py.

train      one training step: three structured streams against the published form    reference  that form, with SDPA
attention  its attention alone, by row length, with peak memory                      memory     peak of this process
decode     blocks against AR, and a round's time by query length                     timing     turns, medians, ratios
engine     the engine against AR, transformers, llama.cpp, lock-step batches, other schedulers: a folder
serve, soak  through HTTP against the engine directly; half an hour of load, memory watched: the folder serving
prepare    chats into rows: against datasets.map, by workers, memory by the size of the data: a folder
result     the JSON, the printed and the Markdown table
"""
