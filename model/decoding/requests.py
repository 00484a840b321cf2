"""The nouns of decoding: what is asked (`GenerationRequest`), how to sample, what came out (`GenerationResult`).

Each checks itself when it is made; what depends on the model (`check_request`) is one pure function. A request that
passes both can run: nothing about it is refused later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from model.config import BlockDiffusionConfig, DecodeConfig, check_sub_block, nearest_key
from model.decoding.policies import POLICIES
from model.errors import UserError

GREEDY_BELOW = 1e-4  # a temperature under this is greedy: dividing by it would only overflow
SEED_BOUND = 2**63


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy; top_p in (0, 1]; top_k 0 is off; seed any signed 64-bit number.

    The draw for a token depends on (seed, position, step) alone, never on what else is decoded.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        finite = 0.0 <= self.temperature < float("inf")
        _check(finite, f"temperature must be 0 or more and finite, not {self.temperature!r}.")
        _check(0.0 < self.top_p <= 1.0, f"top_p must be above 0 and at most 1, not {self.top_p!r}.")
        _check(self.top_k >= 0, f"top_k must be 0 (off) or more, not {self.top_k!r}.")
        _check(-SEED_BOUND <= self.seed < SEED_BOUND, f"seed must be a signed 64-bit whole number, not {self.seed!r}.")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue by at most `max_tokens` tokens (exact).

    stop_token_ids end the answer and count as its last token; stop_strings end it before their first appearance.
    trace: also report every step's reveals (`Outcome.reveals`, the engine's `Canvas` events). follows: id of a request
    with the same prompt, which encodes it for both: several answers to one prompt share its pages.
    """

    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    trace: bool = False
    follows: str | None = None

    @property
    def fused(self) -> str:
        """The commit form the row runs: AR rows have nothing to fuse."""
        return "off" if self.decode.mode == "ar" else self.decode.fused

    def __post_init__(self) -> None:
        _check(self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens!r}.")
        _check(all(self.stop_strings), "stop must not hold an empty string.")


@dataclass(frozen=True)
class GenerationResult:
    """An answer. `token_ids` include the stop token, `text` shows neither it nor a stop string.

    forwards: forwards the row took part in, by phase ("prefill", "denoise", "commit"); an AR step counts as a commit,
    it is one of a block of one token, and a forward that fused a commit with a step counts as that step.
    steps_per_block: denoising steps of each block that needed any. cached_tokens: of the prompt, not encoded again.
    mode: "diffusion" or "ar", which "auto" chose where it was asked.
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    prompt_tokens: int
    forwards: dict[str, int]
    steps_per_block: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    mode: str = "diffusion"

    def __post_init__(self) -> None:
        _check(self.finish_reason in ("stop", "length"), f"finish_reason {self.finish_reason!r} is not known.")

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_forward(self) -> float:
        """Completion tokens per denoise or commit forward; an answer that needed none counts as one forward."""
        return self.completion_tokens / max(1, self.forwards["denoise"] + self.forwards["commit"])


def check_request(
    request: GenerationRequest,
    *,
    block_diffusion: BlockDiffusionConfig | None,
    vocab_size: int,
    max_length: int,
    bos_token_id: int | None,
) -> None:
    """Raises UserError, one sentence, for a request that this model can never run. max_length: of a row, in tokens."""
    length, room = max(len(request.prompt_ids), 1), max_length - max(len(request.prompt_ids), 1)
    startable = bool(request.prompt_ids) or bos_token_id is not None
    _check(startable, "the prompt is empty and the model has no token to start from: send some text.")
    for token in request.prompt_ids:
        inside = 0 <= token < vocab_size
        _check(inside, f"the prompt holds the token id {token}, outside the vocabulary of {vocab_size}.")
    _check(room >= 1, f"the prompt's {length} tokens leave no room for an answer in {max_length}: shorten it.")
    _check(
        request.max_tokens <= room,
        f"max_tokens {request.max_tokens} and a prompt of {length} tokens exceed {max_length}: ask for at most {room}.",
    )
    if request.decode.mode == "diffusion":
        _check_diffusion(request.decode, block_diffusion)


def _check_diffusion(decode: DecodeConfig, block_diffusion: BlockDiffusionConfig | None) -> None:
    if block_diffusion is None:
        raise UserError(
            'mode "diffusion" needs a model adapted to write blocks, and this one is not '
            '(no "block_diffusion" in its config.json): use mode "ar", or adapt it first.'
        )
    _check(decode.policy in POLICIES, f"policy {decode.policy!r} is not known: {nearest_key(decode.policy, POLICIES)}")
    if decode.sub_block_size is not None:
        check_sub_block(decode.sub_block_size, block_diffusion.block_size)
