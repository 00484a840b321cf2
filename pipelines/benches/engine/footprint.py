"""Memory of decoding: the growth of the process against the cache's arithmetic and the weights; rows of logits."""

from __future__ import annotations

from typing import Any

from actors.engine.loop import Engine
from actors.engine.together import generate_all
from model.decoding import GenerationRequest
from model.errors import JobError
from pipelines.assessment.contenders import AR
from pipelines.benches.engine.closed import BLOCKS
from pipelines.benches.engine.contestants import AR_NAME
from pipelines.benches.engine.setting import PartResult, Setting
from pipelines.benches.memory import peak_bytes, process_peak_bytes
from pipelines.benches.result import device_name

MIB = 2**20


def cache_bytes(engine: Engine) -> int:
    """(pages and one for padding) x page size x layers x 2 x kv heads x head size x bytes of a number."""
    model, cache = engine.decoder.backbone.model, engine.decoder.cache
    config = model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = config.num_hidden_layers * 2 * config.num_key_value_heads * head
    return (cache.tokens + cache.page_size) * numbers * cache.dtype.itemsize


def measure_memory(setting: Setting) -> PartResult:
    """AR and blocks behind long prompts, one row and `batch` rows. Raises JobError for a cache of
    another size than by arithmetic.
    """
    lines: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for rows in sorted({1, setting.config.batch}):
        for name, decode in ((AR_NAME, AR), (BLOCKS, setting.blocks)):
            requests = setting.behind_text(setting.requests(decode, rows), [setting.config.long_prompt[0]] * rows)
            line = _measure(setting, rows, name, requests)
            lines.append(line)
            grown = max(line["peak growth MiB"], 1 / MIB)
            ratios[f"peak growth over the cache, {name}, batch {rows}"] = grown / line["cache MiB"]
    return PartResult(lines, ratios)


def _measure(setting: Setting, rows: int, name: str, requests: list[GenerationRequest]) -> dict[str, Any]:
    engine = setting.engine(requests, rows)
    expected = cache_bytes(engine)
    if engine.decoder.cache.nbytes != expected:
        raise JobError(f"memory: the cache has {engine.decoder.cache.nbytes} bytes, by arithmetic {expected}.")
    generate_all(engine, requests)  # what stays allocated (packed weights, buffers of libraries) is there now
    fresh = setting.engine(requests, rows)  # its pages have never been touched
    peak = peak_bytes(lambda: generate_all(fresh, requests), device_name())
    weights = sum(parameter.nbytes for parameter in setting.backbone.model.parameters())
    return {
        "part": "memory",
        "batch": rows,
        "decoder": name,
        "peak growth MiB": peak / MIB,
        "cache MiB": expected / MIB,
        "weights MiB": weights / MIB,
        "process MiB": process_peak_bytes() / MIB,
        "query tokens": engine.decoder.most_tokens,
        "logit rows": engine.decoder.most_logits,
    }
