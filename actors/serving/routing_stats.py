"""What a replica tells the routers of its engine: the blocks in its page cache, its backlog, what a request costs."""

from __future__ import annotations

import time

from actors.engine.loop import Engine
from actors.serving.ranking import SHORT, PrefixReport

MOST_KEYS = 4096  # of the page cache that are reported, 32 KiB; the latest used are preferred


def prefix_report(engine: Engine) -> PrefixReport:
    """A moment of the engine; callable from any thread."""
    cache, backlog = engine.decoder.cache, engine.backlog()
    return PrefixReport(
        at=time.time(),
        page_size=cache.page_size,
        salts=engine.decoder.salts(),
        keys=frozenset(key[:SHORT] for key in cache.pool.known(MOST_KEYS)),
        backlog=backlog.tokens,
        answer_length=backlog.answer_length,
        token_cost=backlog.token_cost,
    )
