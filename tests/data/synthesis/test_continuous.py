"""Many rows side by side are written as each would be alone."""

import pytest

from spechead.data.synthesis.continuous import Continuation, ContinuousDecoder, Request, use_batch_attention
from spechead.decoding.generate import generate
from spechead.target.model import Target
from tests.helpers.targets import FAMILIES, make_target

LENGTHS = [1, 5, 3, 20, 2, 9, 40, 4, 14, 7]
CAPS = [24, 3, 17, 9, 1, 24, 12, 30, 2, 20]
PROMPTS = [[(7 * i + 5 * j) % 90 + 3 for j in range(length)] for i, length in enumerate(LENGTHS)]


def decode(target: Target, requests: list[Request], batch_size: int, stops: frozenset[int]) -> dict[int, Continuation]:
    written: dict[int, Continuation] = {}
    decoder = ContinuousDecoder(target, batch_size=batch_size, stop_ids=stops)
    decoder.run(iter(requests), lambda request, text: written.update({request.key: text}) or ())
    return written


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_plain_decoding_whatever_their_neighbours(family: str) -> None:
    target = make_target(family)
    alone = [generate(target, p, max_new_tokens=cap).tokens for p, cap in zip(PROMPTS, CAPS, strict=True)]
    stops = frozenset({alone[5][6], *target.eos_ids})  # ends that row and perhaps others early
    use_batch_attention(target)
    requests = [Request(i, p, cap, 0.0, 0) for i, (p, cap) in enumerate(zip(PROMPTS, CAPS, strict=True))]
    for batch_size in (1, 3, 8):
        written = decode(target, requests, batch_size, stops)
        assert sorted(written) == list(range(10))
        for i, tokens in enumerate(alone):
            end = next((j for j, token in enumerate(tokens) if token in stops), len(tokens))
            finished = end < len(tokens)
            assert written[i] == Continuation(tokens[:end], finished, tokens[end] if finished else None), (batch_size, i)
