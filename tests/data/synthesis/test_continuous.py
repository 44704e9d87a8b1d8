"""Many rows side by side are written as each would be alone, whatever leaves or enters the batch around them."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from spechead.data.synthesis.continuous import (
    PREFILL_TOKENS,
    Continuation,
    ContinuousDecoder,
    Request,
)
from spechead.decoding.generate import generate
from spechead.errors import UserError
from spechead.target.model import Target
from tests.helpers.targets import FAMILIES, LONGROPE, make_target

LENGTHS = [1, 5, 3, 20, 2, 9, 40, 4, 14, 7]
CAPS = [24, 3, 17, 9, 1, 24, 12, 30, 2, 20]
PROMPTS = [[(7 * i + 5 * j) % 90 + 3 for j in range(length)] for i, length in enumerate(LENGTHS)]
NO_STOPS: frozenset[int] = frozenset()


def decode(
    target: Target, requests: Iterable[Request], batch_size: int, stops: frozenset[int] = NO_STOPS, **options: Any
) -> dict[Hashable, Continuation]:
    written: dict[Hashable, Continuation] = {}
    decoder = ContinuousDecoder(target, batch_size=batch_size, stop_ids=stops, **options)
    decoder.run(iter(requests), lambda request, text: written.update({request.key: text}) or ())
    return written


def greedy(caps: Sequence[int] = CAPS) -> list[Request]:
    return [Request(i, prompt, cap, 0.0, 0) for i, (prompt, cap) in enumerate(zip(PROMPTS, caps, strict=True))]


@pytest.mark.parametrize("family", FAMILIES | LONGROPE)
def test_rows_equal_plain_decoding_whatever_their_neighbours(family: str) -> None:
    target = make_target(family)
    alone = [generate(target, prompt, max_new_tokens=cap).tokens for prompt, cap in zip(PROMPTS, CAPS, strict=True)]
    stops = frozenset({alone[5][6], *target.eos_ids})  # ends that row and perhaps others early
    for batch_size in (1, 3, 8):
        written = decode(target, greedy(), batch_size, stops)
        assert set(written) == set(range(10))
        for i, tokens in enumerate(alone):
            end = next((j for j, token in enumerate(tokens) if token in stops), len(tokens))
            finished = end < len(tokens)
            assert written[i] == Continuation(tokens[:end], finished, tokens[end] if finished else None)


def test_places_are_filled_as_soon_as_they_are_free_and_requests_read_as_late(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[tuple[int, int]] = []
    forward = target.forward

    def counted(ids: torch.Tensor, **options: Any) -> Any:
        widths.append((ids.shape[0], ids.shape[1]))
        return forward(ids, **options)

    monkeypatch.setattr(target, "forward", counted)
    open_: set[Hashable] = set()
    most = []

    def requests() -> Iterator[Request]:
        for i in range(12):
            open_.add(i)
            most.append(len(open_))
            yield Request(i, [5 + i, 6], 2 + 3 * (i % 2), 0.0, 0)

    def done(request: Request, _: Continuation) -> tuple[()]:
        open_.remove(request.key)
        return ()

    ContinuousDecoder(target, batch_size=4, stop_ids=()).run(requests(), done)
    assert max(most) == 4 and not open_
    steps = [rows for rows, width in widths if width == 1]
    # 6 · 1 + 6 · 4 tokens follow the prefills' first: 30 in passes of four, which then lose their rows.
    assert sum(steps) <= 36 and len(steps) <= 10 and sorted(steps, reverse=True) == steps


def test_followers_come_next_and_may_be_many(target: Target) -> None:
    order: list[Hashable] = []

    def done(request: Request, text: Continuation) -> list[Request]:
        order.append(request.key)
        assert text.tokens == generate(target, request.prompt, max_new_tokens=3).tokens
        if not isinstance(request.key, str):
            return []
        longer = request.prompt + text.tokens
        return [Request(i, [*longer, i], 3, 0.0, 0) for i in (10, 11, 12)]

    first = [Request("a", [5, 6], 3, 0.0, 0), Request(1, [7], 3, 0.0, 0), Request(2, [8], 3, 0.0, 0)]
    ContinuousDecoder(target, batch_size=1, stop_ids=()).run(iter(first), done)
    assert order == ["a", 10, 11, 12, 1, 2]
    order.clear()
    ContinuousDecoder(target, batch_size=3, stop_ids=()).run(iter(first[:1]), done)
    assert order == ["a", 10, 11, 12], "one row becomes three"


def test_a_batch_that_has_shrunk_grows_again(target: Target) -> None:
    prompts = {"short": [5, 6], "long": [9] * 5, 1: [7] * 9, 2: [8], 3: [11, 12, 13]}
    written: dict[Hashable, list[int]] = {}

    def done(request: Request, text: Continuation) -> list[Request]:
        written[request.key] = text.tokens
        return [Request(i, prompts[i], 4, 0.0, 0) for i in (1, 2, 3)] if request.key == "middle" else []

    prompts["middle"] = [20, 21]
    start = [Request("short", prompts["short"], 2, 0.0, 0), Request("long", prompts["long"], 20, 0.0, 0)]
    start.insert(1, Request("middle", prompts["middle"], 9, 0.0, 0))
    ContinuousDecoder(target, batch_size=4, stop_ids=()).run(iter(start), done)
    assert set(written) == set(prompts)
    for key, tokens in written.items():
        assert tokens == generate(target, prompts[key], max_new_tokens=len(tokens)).tokens


def test_the_targets_positions_are_a_cap(target: Target) -> None:
    assert target.max_positions == 256
    lengths = [250, 256, 300, 0, 255, 3]
    requests = [Request(i, [7 + i] * length, 20, 0.0, 0) for i, length in enumerate(lengths)]
    written = decode(target, requests, 2)
    assert [len(written[i].tokens) for i in range(6)] == [6, 0, 0, 0, 1, 20]
    assert not any(text.finished for text in written.values())
    for i in (0, 5):
        assert written[i].tokens == generate(target, requests[i].prompt, max_new_tokens=20).tokens


def test_a_first_token_that_ends_leaves_no_row_behind(target: Target) -> None:
    first = [generate(target, prompt, max_new_tokens=1).tokens[0] for prompt in PROMPTS]
    written = decode(target, greedy(), 4, frozenset(first))
    assert [written[i] for i in range(10)] == [Continuation([], True, token) for token in first]
    assert decode(target, [], 4) == {}


def test_many_long_prompts_run_in_several_passes(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    forward = target.forward

    def counted(ids: torch.Tensor, **options: Any) -> Any:
        sizes.append(ids.numel())
        return forward(ids, **options)

    monkeypatch.setattr(target, "forward", counted)
    requests = [Request(i, [5] * (200 + i), 2, 0.0, 0) for i in range(40)]
    written = decode(target, requests, 40)
    assert len(written) == 40 and max(sizes) <= PREFILL_TOKENS < sum(map(len, (r.prompt for r in requests)))


# ------------------------------------------------------------------------------------------------ drawing


def sampled(seeds: Sequence[int], temperature: float = 1.0) -> list[Request]:
    rows = zip(PROMPTS, CAPS, seeds, strict=True)
    return [Request(i, prompt, cap, temperature, seed) for i, (prompt, cap, seed) in enumerate(rows)]


def test_a_row_depends_on_its_own_seed_alone(target: Target) -> None:
    requests = sampled(range(10))
    together = decode(target, requests, 3)
    assert together == decode(target, requests, 8) == decode(target, requests[::-1], 2)
    assert decode(target, requests[7:8], 1)[7] == together[7]
    other = decode(target, sampled([*range(9), 99]), 3)
    assert other[9] != together[9] and all(other[i] == together[i] for i in range(9))


def test_each_row_has_its_own_temperature(target: Target) -> None:
    mixed = [Request(r.key, r.prompt, r.max_new_tokens, 0.9 * (i % 2), i) for i, r in enumerate(greedy())]
    cold, hot, written = (
        decode(target, greedy(), 4),
        decode(target, sampled(range(10), 0.9), 4),
        decode(target, mixed, 4),
    )
    assert [written[i] for i in range(10)] == [(hot if i % 2 else cold)[i] for i in range(10)]
    assert hot[5] != cold[5]


def test_top_k_and_top_p_cut_where_they_say(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = torch.tensor([0.1, 0.4, 0.3, 0.2])
    monkeypatch.setattr(target, "logits", lambda hidden: shares.log().repeat(len(hidden), 1))

    def drawn(temperature: float, **options: Any) -> torch.Tensor:
        requests = [Request(i, [5], 40, temperature, i) for i in range(100)]
        tokens = [token for text in decode(target, requests, 100, **options).values() for token in text.tokens]
        return torch.bincount(torch.tensor(tokens), minlength=4) / 4000

    assert torch.allclose(drawn(1.0), shares, atol=0.03)
    assert torch.allclose(drawn(1.0, top_k=2), torch.tensor([0, 4 / 7, 3 / 7, 0]), atol=0.03)
    # The mass before token 3 is 0.7, which is not below 0.69: it is out.
    assert torch.allclose(drawn(1.0, top_p=0.69), torch.tensor([0, 4 / 7, 3 / 7, 0]), atol=0.03)
    assert torch.allclose(drawn(0.5), shares**2 / (shares**2).sum(), atol=0.03)
    assert drawn(0.0).tolist() == drawn(1e-320).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_name_the_target_and_its_dtype(bad: float) -> None:
    target = make_target()
    target.model.get_output_embeddings().weight[50] = bad
    with pytest.raises(UserError, match="target .tiny-llama. in float32 computes logits that are not finite"):
        decode(target, greedy(), 2)


def test_ids_without_an_embedding_are_refused(target: Target) -> None:
    with pytest.raises(UserError, match="token ids beyond the 97 embeddings of 'tiny-llama'"):
        decode(target, [Request(0, [3, 97], 4, 0.0, 0)], 2)
