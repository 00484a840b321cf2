"""Decoding on CPU in C++: paged attention, and a whole decoder forward in one call.

    build.py            compiles the sources beside it, once a machine, and loads them through ctypes
    paged_attention.py  attention over a paged cache, float32, float64 and bfloat16
    peaks.py            the most likely token of each row of logits, and its normaliser
    fused.py            FusedForward: ids to logits for Llama-shaped models, weights in float32, bfloat16 or int8

    simd.h -> peaks.h, tile.h -> gemm.h -> attention.h -> forward.h -> kernels.cpp; team.h holds the threads

Why: SmolLM2-135M's forward is some 1800 small operators. One token over 256 cached ones took, in turns on two cores
(AMD EPYC, 2 threads): PyTorch 44 ms in float32; here 19 ms in float32, 11 in bfloat16, 7 in int8. Sixteen tokens: 59
against 35, 21 and 15.
Everything here is optional: where no compiler is found the callers get None and stay on PyTorch.

A token's result is bit for bit the same whatever else is in the call and however many threads run it.
"""
