"""Many rows at once are written as each would be alone."""

import pytest
import torch

from spechead.data.synthesis.batch_decode import Draw, continue_batch, pad_left, use_batch_attention
from spechead.decoding.generate import generate
from tests.helpers.targets import make_target

PROMPTS = [[5], [7, 8, 9, 10, 11], [20, 30, 40], [12] * 20, [50, 51]]
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "qwen3-wide-heads", "mistral-window", "gemma2", "phi3", "gpt_neox"])
def test_rows_equal_plain_decoding_whatever_their_neighbours(family: str) -> None:
    target = make_target(family)
    alone = [generate(target, prompt, max_new_tokens=24).tokens for prompt in PROMPTS]
    # Tokens that some rows write early and others late or never, so that rows leave the batch one by one.
    stops = {alone[1][2], alone[2][9], *target.eos_ids}
    use_batch_attention(target)
    written = continue_batch(target, PROMPTS, max_new_tokens=24, stop_ids=stops, draw=Draw())
    for tokens, row in zip(alone, written, strict=True):
        end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
        assert row.tokens == tokens[:end]
        assert row.finished == (end < len(tokens))
    assert any(row.finished for row in written)


def test_no_prompts_no_text() -> None:
    assert continue_batch(make_target(), [], max_new_tokens=4, stop_ids=(), draw=Draw()) == []


def test_a_seed_fixes_the_draw() -> None:
    target = make_target()
    texts = [
        continue_batch(target, PROMPTS, max_new_tokens=6, stop_ids=(), draw=Draw(1.0), seed=seed) for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_padding_stands_on_the_left() -> None:
    ids, mask = pad_left([[5], [7, 8, 9]], CPU)
    assert ids.tolist() == [[0, 0, 5], [7, 8, 9]]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]


def test_top_k_and_top_p_cut_where_they_say() -> None:
    shares = torch.tensor([0.1, 0.4, 0.3, 0.2])
    logits = shares.log().expand(4000, 4)

    def drawn(draw: Draw) -> torch.Tensor:
        tokens = draw(logits, torch.Generator().manual_seed(0))
        return torch.bincount(tokens, minlength=4) / len(logits)

    assert torch.allclose(drawn(Draw(1.0)), shares, atol=0.03)
    assert torch.allclose(drawn(Draw(1.0, top_k=2)), torch.tensor([0, 4 / 7, 3 / 7, 0]), atol=0.03)
    # The mass before token 3 is 0.7, which is not below 0.7: it is out.
    assert torch.allclose(drawn(Draw(1.0, top_p=0.69)), torch.tensor([0, 4 / 7, 3 / 7, 0]), atol=0.03)
    squared = shares**2 / (shares**2).sum()
    assert torch.allclose(drawn(Draw(0.5)), squared, atol=0.03)
    assert drawn(Draw(0.0)).tolist() == [0, 1, 0, 0]
