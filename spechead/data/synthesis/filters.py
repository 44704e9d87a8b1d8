"""Decide which written prompts and answers are worth keeping; every refusal has a name, to be counted.

Works on text and token ids alone. Knows nothing of models, templates or files.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

MIN_WORDS = 3
MIN_CHARACTERS = 12
MIN_ASCII = 0.9  # share of characters that are printable ASCII; accents of a quoted translation stay below the rest
MIN_LETTERS = 0.5
NGRAM = 4
MIN_DISTINCT = 0.5  # share of the n-grams that must be distinct
TAIL = 48  # tokens at the end that are looked at on their own: a loop begins late
MIN_DISTINCT_TAIL = 0.35
NEAR_OVERLAP = 0.6  # prompts that share this part of their word trigrams are near-duplicates

# Only at the beginning of a line, where a transcript of turns would have them.
ROLE_MARKER = re.compile(r"^\s*#*\s*(user|assistant|system|human|ai|bot|q|a)\s*:", re.IGNORECASE | re.MULTILINE)
SPECIAL_MARKER = re.compile(r"<\|\w*\|?>?|\[/?INST\]|</?s>|<<SYS>>|<(start|end)_of_turn>")


def refuse_prompt(text: str) -> str:
    """Why `text` is not a usable prompt; empty when it is."""
    if len(text) < MIN_CHARACTERS or len(text.split()) < MIN_WORDS:
        return "prompt too short"
    if ROLE_MARKER.search(text) or SPECIAL_MARKER.search(text):
        return "prompt holds role markers"
    if not mostly_english(text):
        return "prompt in another script"
    if repetitive(text.lower().split()):
        return "prompt repeats itself"
    return ""


def refuse_answer(text: str, tokens: Sequence[int], keep_loops: bool = False) -> str:
    """Why `text`, written as `tokens`, is not a usable answer; empty when it is. `keep_loops` lets it repeat itself."""
    if not text.strip():
        return "answer empty"
    if SPECIAL_MARKER.search(text):
        return "answer holds role markers"
    if "\ufffd" in text:
        return "answer holds broken characters"
    if not keep_loops and (repetitive(tokens) or distinct_share(tokens[-TAIL:]) < MIN_DISTINCT_TAIL):
        return "answer repeats itself"
    return ""


def mostly_english(text: str) -> bool:
    """Mostly printable ASCII, and at least half of what is not space is letters."""
    visible = [c for c in text if not c.isspace()]
    plain = sum(c.isascii() and c.isprintable() for c in visible)
    letters = sum(c.isalpha() for c in visible)
    return bool(visible) and plain >= MIN_ASCII * len(visible) and letters >= MIN_LETTERS * len(visible)


def distinct_share(items: Sequence[object]) -> float:
    """Share of the n-grams that are distinct; 1.0 for sequences too short to have two."""
    grams = [tuple(items[i : i + NGRAM]) for i in range(len(items) - NGRAM + 1)]
    return len(set(grams)) / len(grams) if len(grams) > 1 else 1.0


def repetitive(items: Sequence[object]) -> bool:
    return distinct_share(items) < MIN_DISTINCT


class SeenPrompts:
    """The prompts so far, to tell repeats and near-repeats (most of their word trigrams in common)."""

    def __init__(self) -> None:
        self._exact: set[str] = set()
        self._sizes: list[int] = []
        self._holders: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)  # trigram -> prompts with it

    def refuse(self, text: str) -> str:
        """Why `text` is too close to an earlier prompt; empty when it is not, and then it is remembered."""
        words = re.findall(r"\w+", text.lower())
        reason = self._closeness(words)
        if not reason:
            self._exact.add(" ".join(words))
            for gram in trigrams(words):
                self._holders[gram].append(len(self._sizes))
            self._sizes.append(len(trigrams(words)))
        return reason

    def knows(self, text: str) -> bool:
        """Whether `text` is an earlier prompt, or nearly; it is not remembered."""
        return bool(self._closeness(re.findall(r"\w+", text.lower())))

    def _closeness(self, words: list[str]) -> str:
        if " ".join(words) in self._exact:
            return "prompt is a duplicate"
        grams = trigrams(words)
        shared: Counter[int] = Counter(holder for gram in grams for holder in self._holders.get(gram, ()))
        for holder, count in shared.items():
            # Jaccard index: common trigrams over all trigrams of the two.
            if count >= NEAR_OVERLAP * (len(grams) + self._sizes[holder] - count):
                return "prompt is a near-duplicate"
        return ""


def trigrams(words: Sequence[str]) -> set[tuple[str, ...]]:
    """Word trigrams; a shorter text counts as one piece."""
    return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}
