"""The nouns of decoding: what is asked (`GenerationRequest`), how to sample, what came out (`GenerationResult`).

Each checks itself when it is made; what depends on the model (`check_request`) is one pure function. A request that
passes both can run: nothing about it is refused later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from model.config import BlockDiffusionConfig, DecodeConfig, check_sub_block
from model.decoding.policies import check_policy
from model.errors import UserError

GREEDY_BELOW = 1e-4  # a temperature under this is greedy: dividing by it would only overflow
SEED_BOUND = 2**63
TOP_LOGPROBS = 20  # the most likely tokens that may be asked for beside each chosen one
BIAS_BOUND = 100.0
PENALTY_BOUND = 2.0


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy; top_p in (0, 1]; top_k 0 is off; min_p in [0, 1]; seed any signed 64-bit number.

    The draw for a token depends on (seed, position, step) alone, never on what else is decoded.

    These act on the logits, so on greedy choices and on confidences too (see `model.decoding.penalties`):
    repetition_penalty above 0, 1 is off (CTRL); presence_penalty and frequency_penalty in [-2, 2], 0 is off (OpenAI);
    logit_bias: (token id, -100 to 100) pairs, no id twice.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        finite = 0.0 <= self.temperature < float("inf")
        _check(finite, f"temperature must be 0 or more and finite, not {self.temperature!r}.")
        _check(0.0 < self.top_p <= 1.0, f"top_p must be above 0 and at most 1, not {self.top_p!r}.")
        _check(self.top_k >= 0, f"top_k must be 0 (off) or more, not {self.top_k!r}.")
        _check(0.0 <= self.min_p <= 1.0, f"min_p must be 0 to 1, not {self.min_p!r}.")
        _check(-SEED_BOUND <= self.seed < SEED_BOUND, f"seed must be a signed 64-bit whole number, not {self.seed!r}.")
        self._check_edits()

    def _check_edits(self) -> None:
        penalty = self.repetition_penalty
        _check(0.0 < penalty < float("inf"), f"repetition_penalty must be above 0 and finite, not {penalty!r}.")
        both = (("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty))
        for name, value in both:
            _check(abs(value) <= PENALTY_BOUND, f"{name} must be -2 to 2, not {value!r}.")
        for token, bias in self.logit_bias:
            _check(abs(bias) <= BIAS_BOUND, f"logit_bias of token {token} must be -100 to 100, not {bias!r}.")
        ids = [token for token, _ in self.logit_bias]
        _check(len(set(ids)) == len(ids), "logit_bias must not name a token twice.")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def cuts(self) -> bool:
        """Whether a draw must leave out unlikely tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the text decided so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def edits(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return self.penalises or bool(self.logit_bias)


class TokenLogprob(NamedTuple):
    """Natural logarithm of a decided token's probability, at the step that decided it; `top`: (token id, the same) of
    the most likely tokens then, best first. Both of the distribution that confidences are taken from."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue by at most `max_tokens` tokens (exact).

    stop_token_ids end the answer and count as its last token; stop_strings end it before their first appearance.
    trace: also report every step's reveals (`Outcome.reveals`, the engine's `Canvas` events). follows: id of a request
    with the same prompt, which encodes it for both: several answers to one prompt share its pages.
    logprobs: report each token's log-probability, and those of so many most likely ones (0 to 20); None reports none.
    answered: the beginning of the answer, decided by an engine that is gone: whole blocks of it are encoded instead of
    decoded, the rest is decided again, to the same tokens. Not together with logprobs, which would lack.
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
    logprobs: int | None = None
    answered: tuple[int, ...] = ()

    @property
    def fused(self) -> str:
        """The commit form of a row that writes blocks: AR and lossless rows have nothing to fuse here, and penalties
        must know a block's first token."""
        return "off" if self.decode.mode in ("ar", "lossless") or self.sampling.penalises else self.decode.fused

    def __post_init__(self) -> None:
        inside = self.logprobs is None or 0 <= self.logprobs <= TOP_LOGPROBS
        _check(inside, f"logprobs must be 0 to {TOP_LOGPROBS}, not {self.logprobs!r}.")
        fresh = not self.answered or (self.logprobs is None and len(self.answered) <= self.max_tokens)
        _check(fresh, "answered must be within max_tokens, and without logprobs.")
        _check(self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens!r}.")
        _check(all(self.stop_strings), "stop must not hold an empty string.")


@dataclass(frozen=True)
class GenerationResult:
    """An answer. `token_ids` include the stop token, `text` shows neither it nor a stop string.

    forwards: forwards the row took part in, by phase ("prefill", "denoise", "commit"); an AR step counts as a commit,
    it is one of a block of one token, and a forward that fused a commit with a step counts as that step.
    steps_per_block: denoising steps of each block that needed any. cached_tokens: of the prompt, not encoded again.
    mode: "diffusion", "ar" or "lossless"; what "auto" chose where it was asked.
    drafted_tokens, accepted_tokens (lossless mode): tokens that were verified, and those of them that stood. There a
    forward that only drafts counts as "denoise", one that verifies as "commit".
    logprobs: one for each of token_ids, None where the request did not ask.
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
    logprobs: tuple[TokenLogprob, ...] | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0

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
    for token in (*request.prompt_ids, *request.answered):
        inside = 0 <= token < vocab_size
        _check(inside, f"the prompt holds the token id {token}, outside the vocabulary of {vocab_size}.")
    for token, _ in request.sampling.logit_bias:
        inside = 0 <= token < vocab_size
        _check(inside, f"logit_bias names the token id {token}, outside the vocabulary of {vocab_size}.")
    _check(room >= 1, f"the prompt's {length} tokens leave no room for an answer in {max_length}: shorten it.")
    _check(
        request.max_tokens <= room,
        f"max_tokens {request.max_tokens} and a prompt of {length} tokens exceed {max_length}: ask for at most {room}.",
    )
    if request.decode.mode in ("diffusion", "lossless") or (
        request.decode.mode == "auto" and block_diffusion is not None
    ):
        _check_diffusion(request.decode, block_diffusion)


def _check_diffusion(decode: DecodeConfig, block_diffusion: BlockDiffusionConfig | None) -> None:
    if block_diffusion is None:
        raise UserError(
            f'mode "{decode.mode}" needs a model adapted to write blocks, and this one is not '
            '(no "block_diffusion" in its config.json, nor a denoiser): use mode "ar", or adapt it first.'
        )
    check_policy(decode)
    check_for_towers(decode, block_diffusion)
    if decode.sub_block_size is not None:
        check_sub_block(decode.sub_block_size, block_diffusion.block_size)


def check_for_towers(decode: DecodeConfig, block_diffusion: BlockDiffusionConfig) -> None:
    """Raises UserError, the field first, for a choice that means nothing to a TwoTower model: its denoiser always runs
    the whole canvas."""
    if not block_diffusion.two_tower:
        return
    if decode.sub_block_size not in (None, block_diffusion.block_size):
        raise UserError(
            f"sub_block_size {decode.sub_block_size} has no effect on a TwoTower model, whose denoiser fills whole "
            f"blocks of {block_diffusion.block_size}: leave it out."
        )
    if decode.refresh != "always":
        raise UserError(
            f"refresh {decode.refresh} has no effect on a TwoTower model, whose denoiser runs every block as a whole: "
            "leave it out."
        )
