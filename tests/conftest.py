"""Tiny random targets of many families, a toy tokenizer, scripted drafters, a clock. CPU, float32, milliseconds."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from spechead.target.model import Target
from tests.helpers.clock import Clock
from tests.helpers.targets import make_target, make_toy_tokenizer

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def prepared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Data sets are prepared once in each session, in a folder that goes with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECHEAD_PREPARED", str(tmp_path_factory.mktemp("prepared")))
        yield


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(scope="session")
def target() -> Target:
    return make_target()


@pytest.fixture
def toy_tokenizer() -> PreTrainedTokenizerFast:
    return make_toy_tokenizer()
