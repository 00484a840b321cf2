"""Decoding: requests in, tokens out, one packed forward a round.

requests  the nouns, and the check that a request can run      policies  which slots open (pure, registered)
row       one request's state machine over its positions       sampling  tokens and confidences from logits
text      stop strings and UTF-8 safe text                     plan      attention of a round over the cache
decoder   a round: assemble, forward, choose, apply
"""

from model.decoding.policies import POLICIES
from model.decoding.requests import GenerationRequest, GenerationResult, SamplingParams, check_request

__all__ = ["POLICIES", "GenerationRequest", "GenerationResult", "SamplingParams", "check_request"]
