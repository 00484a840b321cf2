"""The proof that a folder is an ordinary model: run alone, it imports transformers and nothing of this project.

    python -I fresh.py FOLDER PROBE.safetensors KIND

PROBE holds `ids` [1, T] and the `logits` [1, T, V] that they must give; KIND is `auto`, or the class of transformers to
load a folder with whose own class is remote code. Prints one JSON line: the class, what was missing, the differences.
"""

from __future__ import annotations

import json
import sys


def main(folder: str, probe: str, kind: str) -> None:
    """Load the folder, run the probe, print what was found."""
    import torch
    import transformers
    from safetensors.torch import load_file

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    loader = transformers.AutoModelForCausalLM if kind == "auto" else getattr(transformers, kind)
    asked = load_file(probe)
    model, info = loader.from_pretrained(
        folder, dtype="auto", attn_implementation="sdpa", use_safetensors=True, output_loading_info=True
    )
    with torch.no_grad():
        logits = model.eval()(input_ids=asked["ids"], use_cache=False).logits
    wrong = [str(name) for name in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[name]]
    same = logits.shape == asked["logits"].shape and logits.dtype == asked["logits"].dtype
    found = {
        "class": type(model).__name__,
        "dtype": str(logits.dtype).removeprefix("torch."),
        "wrong": wrong,
        "same_shape": same,
        "largest_difference": float((logits - asked["logits"]).abs().max()) if same else None,
        "finite": bool(logits.isfinite().all()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
