"""llama.cpp at work for `bench.py engine`, in whatever interpreter can import `llama_cpp`; nothing else is needed.

Lines of JSON. The first says what to load:  {"gguf", "threads", "slots", "length"}  ->  {"version"} or {"error"}
Every further one is a job:  {"how": "generate" | "sequences", "slots", "prompts", "max_tokens", "stop"}
                         ->  {"answers": [[token ids], ...]} or {"error"}

prompts: lists of token ids; max_tokens: one number a prompt; stop: token ids that end an answer. `generate` is
`Llama.generate`, the loop that create_completion wraps, one prompt after another. `sequences` decodes `slots` prompts
at a time in one llama_batch, each that ends making room for the next. Both greedy; nothing is kept between prompts.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from dataclasses import dataclass, field
from importlib import import_module
from typing import IO, Any

ROOM = 256  # llama.cpp rounds a sequence's cache up to a multiple of this
EXPECTED = (ImportError, AttributeError, ValueError, OSError, RuntimeError)  # a binding that is absent, old or refuses


@dataclass
class Sequence:
    """A prompt at work: where its answer goes, its next position, the tokens to run next."""

    index: int
    feed: list[int]
    position: int = 0
    answer: list[int] = field(default_factory=list)


class Sequences:
    """Several sequences through the low-level API."""

    def __init__(self, gguf: str, threads: int, slots: int, length: int) -> None:
        self.api, self.numpy = import_module("llama_cpp"), import_module("numpy")
        llama_cpp = self.api
        each = -(-length // ROOM) * ROOM
        self.model = llama_cpp.llama_model_load_from_file(gguf.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = slots * each
        params.n_seq_max = slots
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp made no context of {slots} sequences of {each} tokens")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(slots * each, 0, 1)

    def run(self, prompts: list[list[int]], max_tokens: list[int], stop: set[int], slots: int) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in prompts]
        waiting = deque(enumerate(prompts))
        running: dict[int, Sequence] = {}
        self.api.llama_memory_clear(self.memory, True)
        while waiting or running:
            for slot in range(slots):
                if slot not in running and waiting:
                    running[slot] = Sequence(*waiting.popleft())
            for slot, token in self._step(running).items():
                one = running[slot]
                one.answer.append(token)
                one.feed = [token]
                if token in stop or len(one.answer) == max_tokens[one.index]:
                    answers[one.index] = one.answer
                    self.api.llama_memory_seq_rm(self.memory, slot, -1, -1)
                    del running[slot]
        return answers

    def _step(self, running: dict[int, Sequence]) -> dict[int, int]:
        """One llama_decode over what all sequences feed; their next tokens by slot."""
        batch, count, last = self.batch, 0, {}
        for slot, one in running.items():
            for token in one.feed:
                batch.token[count], batch.pos[count] = token, one.position
                batch.n_seq_id[count], batch.seq_id[count][0], batch.logits[count] = 1, slot, 0
                one.position += 1
                count += 1
            last[slot] = count - 1
            batch.logits[count - 1] = 1
        batch.n_tokens = count
        code = self.api.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code} for {len(running)} sequences")
        return {slot: self._best(index) for slot, index in last.items()}

    def _best(self, index: int) -> int:
        logits = self.api.llama_get_logits_ith(self.context, index)
        return int(self.numpy.ctypeslib.as_array(logits, shape=(self.vocabulary,)).argmax())


class Worker:
    """Both ways to decode one GGUF file."""

    def __init__(self, gguf: str, threads: int, slots: int, length: int) -> None:
        llama_cpp = import_module("llama_cpp")
        self.version = str(llama_cpp.__version__)
        self.llama = llama_cpp.Llama(
            gguf,
            n_ctx=length,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,  # as llama.cpp itself chooses; with it both ways give the same tokens
            verbose=False,
        )
        self.gguf, self.threads, self.slots, self.length = gguf, threads, slots, length
        self.sequences: Sequences | None = None

    def job(self, how: str, slots: int, prompts: list[list[int]], max_tokens: list[int], stop: list[int]) -> Any:
        ends = set(stop)
        if how == "generate":
            return [self._generate(ids, most, ends) for ids, most in zip(prompts, max_tokens, strict=True)]
        if self.sequences is None:
            self.sequences = Sequences(self.gguf, self.threads, self.slots, self.length)
        return self.sequences.run(prompts, max_tokens, ends, slots)

    def _generate(self, prompt: list[int], max_tokens: int, stop: set[int]) -> list[int]:
        self.llama.reset()  # or it would keep what two prompts begin with
        answer: list[int] = []
        for token in self.llama.generate(prompt, temp=0.0):
            answer.append(int(token))
            if token in stop or len(answer) == max_tokens:
                break
        return answer


def answers() -> IO[str]:
    """Standard output for the answers alone: whatever libraries print goes to standard error."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


def reply(out: IO[str], content: dict[str, Any]) -> None:
    print(json.dumps(content), file=out, flush=True)


def main() -> None:
    """Until standard input ends."""
    out = answers()
    try:
        worker = Worker(**json.loads(sys.stdin.readline()))
    except EXPECTED as error:
        reply(out, {"error": f"{type(error).__name__}: {error}"})
        return
    reply(out, {"version": worker.version})
    for text in sys.stdin:
        try:
            reply(out, {"answers": worker.job(**json.loads(text))})
        except EXPECTED as error:
            reply(out, {"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
