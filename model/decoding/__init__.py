"""Decoding: requests in, tokens out, one packed forward a round.

requests  the nouns, and the check that a request can run      policies  which slots open (pure, registered)
row       one request's state machine over its positions       sampling  tokens and confidences from logits
text      stop strings and UTF-8 safe text                     plan      attention of a round over the cache
packing   turns to one forward's tensors                       penalties logits that the text so far changes
choices   what a round decides                               tower_rows  rows of a TwoTower model
decoder   the round: pack, forward, choose, move rows on
"""

from model.decoding.decoder import Decoder, Outcome
from model.decoding.packing import Turn
from model.decoding.policies import POLICIES
from model.decoding.requests import (
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    TokenLogprob,
    check_request,
)
from model.decoding.row import Phase, Reveal, Row

__all__ = [
    "POLICIES",
    "Decoder",
    "GenerationRequest",
    "GenerationResult",
    "Outcome",
    "Phase",
    "Reveal",
    "Row",
    "SamplingParams",
    "TokenLogprob",
    "Turn",
    "check_request",
]
