"""What is refused as a prompt or an answer, by hand-made cases."""

import pytest

from spechead.data.synthesis.filters import SeenPrompts, refuse_answer, refuse_prompt


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("How do I bake bread without yeast?", ""),
        ("Write a function:\n\n```python\ndef f(x):\n    return x\n```", ""),
        ("Translate into German: Wir können später über Bücher reden.", ""),
        ("Elaborate.", "prompt too short"),
        ("Please elaborateitall", "prompt too short"),
        ("How do I bake bread?\nAssistant: You need flour.", "prompt holds role markers"),
        ("How do I bake bread?<|im_start|>assistant", "prompt holds role markers"),
        ("[INST] How do I bake bread? [/INST]", "prompt holds role markers"),
        ("我想 知道怎样 烤面包 不用酵母", "prompt in another script"),
        ("1999-01-03 2705 660334.99 $$$", "prompt in another script"),
        ("How do I bake br\ufffdad without yeast?", "prompt holds broken characters"),
        ("I am a mermaid of sea. I am a mermaid of sea. I am a mermaid of sea.", "prompt repeats itself"),
    ],
)
def test_prompts(text: str, reason: str) -> None:
    assert refuse_prompt(text) == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("我想知道怎样烤面包不用酵母", ""),
        ("Wie backe ich Brot?", ""),
        ("我想", "prompt too short"),
        ("面包面包面包面包面包面包面包面包", "prompt repeats itself"),
        ("我想知道怎样烤面包<|im_start|>不用酵母", "prompt holds role markers"),
    ],
)
def test_prompts_in_another_language(text: str, reason: str) -> None:
    assert refuse_prompt(text, english=False) == reason


@pytest.mark.parametrize(
    ("text", "tokens", "reason"),
    [
        ("Flour, water and salt.", range(7), ""),
        ("No.", [1], ""),
        ("  \n", [1, 2], "answer empty"),
        ("Flour<|im_start|>user", range(4), "answer holds role markers"),
        ("Fl\ufffd", range(4), "answer holds broken characters"),
        ("again", [1, 2, 3, 4, 5] * 12, "answer repeats itself"),
        # Sound for long, then a loop: the whole is varied enough, the end is not.
        ("late loop", [*range(200), *[7, 8, 9] * 20], "answer repeats itself"),
    ],
)
def test_answers(text: str, tokens: list[int], reason: str) -> None:
    assert refuse_answer(text, list(tokens)) == reason


def test_repeats_and_near_repeats_of_earlier_prompts() -> None:
    seen = SeenPrompts()
    assert seen.add("What is the best way to prepare for a job interview in the tech industry?") == ""
    assert seen.add("what is the best way to prepare, for a job interview in the tech industry") == (
        "prompt is a duplicate"
    )
    near = "What is the best way to prepare for a job interview in the film industry?"
    assert seen.add(near) == "prompt is a near-duplicate"
    assert seen.contains(near)
    other = "What is the best way to prepare a duck?"
    assert not seen.contains(other)
    assert seen.add(other) == ""
    assert seen.contains(other)


def test_short_prompts_are_compared_whole() -> None:
    seen = SeenPrompts()
    assert seen.add("Elephants") == "" == seen.add("Elephants swim")
    assert seen.add("elephants swim!") == "prompt is a duplicate"
