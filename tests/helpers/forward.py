"""Runs a loaded model on token ids in any cut and returns the logits of every position; and transformers doing the same."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers.plans import install, piece
from workers.inputs import build_inputs
from workers.loader import Loaded
from workers.rows import Row


def logits_in_chunks(loaded: Loaded, sequences: Sequence[Sequence[int]], chunk: int, *, first: int = 0, seed: int = 0) -> list[Tensor]:
    """Logits [tokens, vocabulary] of each sequence, all computed side by side: `first` tokens of each, then `chunk` per step.

    Blocks are dealt out at random, so nothing works by lying in order.
    """
    ready = loaded.ready
    bounds = loaded.runner.rows.bounds
    free = list(range(ready.num_blocks))
    random.Random(seed).shuffle(free)
    rows = []
    for index, tokens in enumerate(sequences):
        blocks = [free.pop() for _ in range(-(-len(tokens) // ready.block_size))]
        rows.append(Row(install(index, tokens, blocks), bounds))
    parts: list[list[Tensor]] = [[] for _ in sequences]
    longest = max(map(len, sequences))
    borders = [0, *range(first or chunk, longest, chunk), longest]
    for start, end in pairwise(borders):
        live = [index for index, tokens in enumerate(sequences) if start < len(tokens)]
        slices = [piece(index, start, min(end, len(sequences[index])) - start) for index in live]
        inputs = build_inputs(slices, [rows[index] for index in live], ready.block_size, torch.device("cpu"))
        with torch.inference_mode():
            logits = loaded.runner.model.logits(loaded.runner.model(inputs, loaded.runner.kv_cache))
        for index, part in zip(live, logits.split([each.num_tokens for each in slices]), strict=True):
            parts[index].append(part)
    return [torch.cat(part) for part in parts]


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint in transformers. Typed loosely, for transformers is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own deprecations are not ours to mend
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def reference_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """[tokens, vocabulary] float32"""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits.float()
