"""`bench.py engine`: the engine against its alternatives, each part in turns in one run. One file a part:

single    one request at a time: blocks, AR, transformers `generate`, the control      rivals     llama.cpp, 1 and 8
closed    N requests at a time: AR, blocks, auto                                       lockstep   batches that wait
open      Poisson arrivals: mixed rounds against other schedulers                      host       outside the model
memory    peak against the cache's arithmetic, rows of logits                          forward    by query length
floor     a token's round against reading its weights from memory

setting: the model and what it is asked; contestants: who answers, and the comparison; transformers_rival, llama_worker,
lockstep_decoder, lockstep_rows, schedulers: the rivals themselves.
"""
