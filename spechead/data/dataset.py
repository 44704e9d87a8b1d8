"""Conversations to samples, and samples to packed batches.

Legend: B rows, T tokens.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spechead.data import chat
from spechead.errors import UserError, first_line
from spechead.files import read_jsonl

HUB_PREFIX = "hf:"
ROLES = ("system", "user", "assistant")
Conversation = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One conversation as the model sees it."""

    ids: Tensor  # int64 [T]
    supervised: Tensor  # bool [T]: written by the assistant
    row: int  # index of the conversation in the file(s)


@dataclass
class Samples:
    """Conversations tokenised for training."""

    items: list[Sample]
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> count
    truncated: int = 0  # samples among `items` that were cut at max_length


@dataclass
class Batch:
    """Rows of one or several samples, padded on the right."""

    ids: Tensor  # int64 [B, T], pad = 0
    supervised: Tensor  # bool [B, T]
    positions: Tensor  # int64 [B, T], restart at 0 in each document
    document: Tensor  # int64 [B, T], index of the document inside the row, -1 = padding
    rows: list[int]  # Sample.row of the documents, in the order given to `collate`

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(
            self.ids.to(device),
            self.supervised.to(device),
            self.positions.to(device),
            self.document.to(device),
            self.rows,
        )


# ------------------------------------------------------------------------------------------------ reading


def read_conversations(source: str | Sequence[str], limit: int = 0) -> list[Conversation]:
    """Conversations of JSONL files or a hub dataset `hf:NAME[:SPLIT]`; at most `limit` of them, 0 for all."""
    conversations: list[Conversation] = []
    for name in [source] if isinstance(source, str) else source:
        left = limit - len(conversations) if limit else 0
        conversations += read_hub(name, left) if name.startswith(HUB_PREFIX) else read_file(Path(name), left)
        if limit and len(conversations) >= limit:
            break
    if not conversations:
        names = source if isinstance(source, str) else ", ".join(source)
        raise UserError(f"{names}: contains no conversation")
    return conversations


def read_file(path: Path, limit: int = 0) -> list[Conversation]:
    """The conversations of a JSONL file; a UserError names the first line that is not one."""
    lines = islice(read_jsonl(path, "conversations"), limit or None)
    return [check_conversation(row, where) for where, row in lines]


def read_hub(source: str, limit: int = 0) -> list[Conversation]:
    """`hf:NAME[:SPLIT]` through `datasets`; the split is `train` unless named."""
    name, _, split = source.removeprefix(HUB_PREFIX).partition(":")
    split = split or "train"
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split=split)
    except Exception as error:  # its many error classes have no common base
        raise UserError(f"dataset {source} cannot be loaded: {first_line(error)}") from error
    count = min(limit, len(rows)) if limit else len(rows)
    return [check_conversation(rows[i], f"{source} row {i}") for i in range(count)]


def check_conversation(row: Any, where: str) -> Conversation:
    """The row, if it is a conversation; else a UserError with the reason."""
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list):
        raise UserError(f'{where}: no messages; expected {{"messages": [{{"role": "user", "content": "..."}}]}}')
    if not messages:
        raise UserError(f"{where}: the conversation is empty")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise UserError(f"{where}: a message needs a role and a string as content, not {str(message)[:60]}")
        if message.get("role") not in ROLES:
            raise UserError(f"{where}: unknown role {message.get('role')!r}, use {', '.join(ROLES)}")
    if not isinstance(row.get("meta") or {}, dict):
        raise UserError(f"{where}: meta must be an object, not {str(row['meta'])[:60]}")
    first = next((m["role"] for m in messages if m["role"] != "system"), "system")
    if first != "user":
        problem = "the assistant speaks first" if first == "assistant" else "only the system speaks"
        raise UserError(f"{where}: {problem}; a user's message must come first")
    return row


def count_by_model(conversations: Sequence[Conversation]) -> Counter[str]:
    """How many of the conversations each model wrote; the empty name counts those that name none."""
    return Counter(str((row.get("meta") or {}).get("target") or "") for row in conversations)


def answers_of_other_models(conversations: Sequence[Conversation], target: str) -> str:
    """A clause that counts the conversations not marked as written by `target`; empty if there are none."""
    others = len(conversations) - count_by_model(conversations)[target]
    return f"{others} of {len(conversations)} answers are not marked as written by {target}" if others else ""


# ------------------------------------------------------------------------------------------------ samples


def build_samples(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    max_length: int,
    template_kwargs: dict[str, Any] | None = None,
) -> Samples:
    """Tokenise and cut at `max_length`. Conversations without a supervised token are dropped and counted."""
    samples, refusals = Samples([]), []
    dropped: Counter[str] = Counter()
    for row, conversation in enumerate(conversations):
        answers = [m["content"] for m in conversation["messages"] if m["role"] == "assistant"]
        if not any(answer.strip() for answer in answers):
            dropped["empty answer" if answers else "no assistant turn"] += 1
            continue
        cut_answer = (conversation.get("meta") or {}).get("finish") == "length"
        try:
            encoded = chat.encode(tokenizer, conversation["messages"], template_kwargs, unfinished=cut_answer)
        except chat.TemplateError as error:
            refusals.append(str(error))
            dropped["refused by the chat template"] += 1
            continue
        if not any(encoded.supervised[:max_length]):
            dropped["too long"] += 1
            continue
        samples.truncated += len(encoded.ids) > max_length
        ids = torch.tensor(encoded.ids[:max_length], dtype=torch.long)
        samples.items.append(Sample(ids, torch.tensor(encoded.supervised[:max_length]), row))
    samples.dropped = dict(dropped.most_common())
    if not samples.items:
        why = ", ".join(f"{count} {name}" for name, count in samples.dropped.items())
        long = f"; raise data.max_length, which is {max_length}" if "too long" in samples.dropped else ""
        detail = f"; {refusals[0]}" if refusals else long
        raise UserError(f"none of {len(conversations)} conversations can be used: {why}{detail}")
    return samples


def digest(samples: Sequence[Sample]) -> str:
    """A short hash of the samples: ids and supervision, in their order."""
    sha = hashlib.sha256()
    for sample in samples:
        sha.update(len(sample.ids).to_bytes(8))
        sha.update(sample.ids.numpy().tobytes())
        sha.update(sample.supervised.numpy().tobytes())
    return sha.hexdigest()[:16]


def split_validation(samples: Sequence[Sample], share: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    """(training, validation), disjoint, each in the given order. Any share above 0 holds out at least one
    sample, and at least one is left for training."""
    if not 0 <= share < 1:
        raise UserError(f"option data.validation_share: must be at least 0 and below 1, got {share}")
    count = 0 if share == 0 else max(1, round(share * len(samples)))
    count = min(count, len(samples) - 1)
    held_out = set(np.random.default_rng(seed).permutation(len(samples))[: max(0, count)].tolist())
    training = [sample for i, sample in enumerate(samples) if i not in held_out]
    return training, [sample for i, sample in enumerate(samples) if i in held_out]


# ------------------------------------------------------------------------------------------------ batches


def collate(samples: Sequence[Sample], max_length: int) -> Batch:
    """Pack samples, in order, each into the first row that has room for it.

    max_length 8, samples a a a a a | b b b | c c c c:      a a a a a b b b     document 0 0 0 0 0 1 1 1
                                                            c c c c . . . .              0 0 0 0 - - - -
    """
    packed: list[list[Sample]] = []
    used: list[int] = []
    for sample in samples:
        length = len(sample.ids)
        if length > max_length:
            raise ValueError(f"sample of conversation {sample.row} has {length} tokens, more than {max_length}")
        row = next((i for i, tokens in enumerate(used) if tokens + length <= max_length), len(used))
        if row == len(used):
            packed.append([])
            used.append(0)
        packed[row].append(sample)
        used[row] += length
    shape = (len(packed), max(used, default=0))
    batch = Batch(
        ids=torch.zeros(shape, dtype=torch.long),
        supervised=torch.zeros(shape, dtype=torch.bool),
        positions=torch.zeros(shape, dtype=torch.long),
        document=torch.full(shape, -1, dtype=torch.long),
        rows=[sample.row for sample in samples],
    )
    for row, documents in enumerate(packed):
        start = 0
        for number, sample in enumerate(documents):
            span = slice(start, start + len(sample.ids))
            batch.ids[row, span] = sample.ids
            batch.supervised[row, span] = sample.supervised
            batch.positions[row, span] = torch.arange(len(sample.ids))
            batch.document[row, span] = number
            start = span.stop
    return batch


def plan_step(n_samples: int, per_step: int, seed: int, step: int) -> list[int]:
    """Sample indices of optimizer step `step` (from 0): a pure function, so that resuming needs no state.

    Epochs are seeded permutations laid end to end; a step takes the next `per_step` entries, also across the
    border of two epochs.
    """
    places = range(step * per_step, (step + 1) * per_step)
    return [permutation(n_samples, seed, place // n_samples)[place % n_samples] for place in places]


@lru_cache(maxsize=4)
def permutation(n_samples: int, seed: int, epoch: int) -> list[int]:
    """The order of one epoch."""
    order: list[int] = np.random.default_rng([seed, epoch]).permutation(n_samples).tolist()
    return order
