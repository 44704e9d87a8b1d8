"""Filters for generated prompts and answers; each refusal has a reason, which is counted."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

MIN_WORDS = 3
MIN_CHARACTERS = 12
MIN_ASCII = 0.9  # share of characters that are printable ASCII; leaves room for the accents of a quoted translation
MIN_LETTERS = 0.5
NGRAM = 4
MIN_DISTINCT = 0.5  # share of the n-grams that must be distinct
TAIL = 48  # tokens at the end that are checked separately: a loop begins late
MIN_DISTINCT_TAIL = 0.35
NEAR_OVERLAP = 0.6  # prompts that share this part of their word trigrams are near-duplicates

# Only at the beginning of a line, as in a transcript of turns.
ROLE_MARKER = re.compile(r"^\s*#*\s*(user|assistant|system|human|ai|bot|q|a)\s*:", re.IGNORECASE | re.MULTILINE)
SPECIAL_MARKER = re.compile(r"<\|\w*\|?>?|\[/?INST\]|</?s>|<<SYS>>|<(start|end)_of_turn>")
BROKEN = "\ufffd"


def refuse_prompt(text: str, english: bool = True) -> str:
    """The reason why `text` is not a usable prompt; empty if it is one. `english`: it must be in that language; in
    others, which may have no spaces, words are not counted and repeats are those of characters."""
    words = text.lower().split()
    if len(text) < MIN_CHARACTERS or (english and len(words) < MIN_WORDS):
        return "prompt too short"
    if ROLE_MARKER.search(text) or SPECIAL_MARKER.search(text):
        return "prompt holds role markers"
    if BROKEN in text:
        return "prompt holds broken characters"
    if english and not mostly_english(text):
        return "prompt in another script"
    if repetitive(words if english else text.lower()):
        return "prompt repeats itself"
    return ""


def refuse_answer(text: str, tokens: Sequence[int], keep_loops: bool = False) -> str:
    """The reason why `text`, generated as `tokens`, is not a usable answer; empty if it is one. `keep_loops`: it may
    repeat itself."""
    if not text.strip():
        return "answer empty"
    if SPECIAL_MARKER.search(text):
        return "answer holds role markers"
    if BROKEN in text:
        return "answer holds broken characters"
    if not keep_loops and (repetitive(tokens) or distinct_share(tokens[-TAIL:]) < MIN_DISTINCT_TAIL):
        return "answer repeats itself"
    return ""


def mostly_english(text: str) -> bool:
    """Whether nearly all visible characters are printable ASCII, and at least half of them letters."""
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
    """The prompts so far, to detect duplicates and near-duplicates (most of their word trigrams in common)."""

    def __init__(self) -> None:
        self._exact: set[str] = set()
        self._sizes: list[int] = []
        self._containing: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)  # trigram -> prompts

    def add(self, text: str) -> str:
        """Remember `text`, or return the reason why it is too similar to an earlier prompt."""
        words = re.findall(r"\w+", text.lower())
        reason = self._similarity(words)
        if not reason:
            self._exact.add(" ".join(words))
            for gram in trigrams(words):
                self._containing[gram].append(len(self._sizes))
            self._sizes.append(len(trigrams(words)))
        return reason

    def contains(self, text: str) -> bool:
        """Whether `text` duplicates or nearly duplicates an earlier prompt; it is not remembered."""
        return bool(self._similarity(re.findall(r"\w+", text.lower())))

    def _similarity(self, words: list[str]) -> str:
        if " ".join(words) in self._exact:
            return "prompt is a duplicate"
        grams = trigrams(words)
        shared: Counter[int] = Counter(prompt for gram in grams for prompt in self._containing.get(gram, ()))
        for prompt, count in shared.items():
            # Jaccard index: common trigrams over all trigrams of the two.
            if count >= NEAR_OVERLAP * (len(grams) + self._sizes[prompt] - count):
                return "prompt is a near-duplicate"
        return ""


def trigrams(words: Sequence[str]) -> set[tuple[str, ...]]:
    """Word trigrams; a shorter text counts as one."""
    return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}
