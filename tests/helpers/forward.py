"""Runs a loaded model on token ids in any cut and returns the logits of every position; and transformers doing the same."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from pagemill.ids import BEHIND, pack_ids
from pagemill.kv_groups import first_live_block
from tests.helpers.plans import install, piece
from workers.inputs import build_inputs
from workers.loader import Loaded
from workers.rows import Row


def logits_in_chunks(loaded: Loaded, sequences: Sequence[Sequence[int]], chunk: int, *, first: int = 0, seed: int = 0) -> list[Tensor]:
    """Logits [tokens, vocabulary] of each sequence, all computed side by side: `first` tokens of each, then `chunk` per step.

    Of several ranks all must be asked at once; each returns the whole vocabulary's.
    Blocks are dealt out at random, so nothing works by lying in order; those behind a window are taken back and hold NaN.
    """
    ready = loaded.ready
    bounds = loaded.runner.rows.bounds
    free = list(range(ready.num_blocks))
    random.Random(seed).shuffle(free)
    tables: list[list[list[int]]] = [[[] for _ in ready.groups] for _ in sequences]
    parts: list[list[Tensor]] = [[] for _ in sequences]
    longest = max(map(len, sequences))
    borders = [0, *range(first or chunk, longest, chunk), longest]
    for start, end in pairwise(borders):
        live = [index for index, tokens in enumerate(sequences) if start < len(tokens)]
        slices = [piece(index, start, min(end, len(sequences[index])) - start, sample=end >= len(sequences[index])) for index in live]
        for index, group_index in product(live, range(len(ready.groups))):
            num_behind = first_live_block(ready.groups[group_index], start, ready.block_size)
            num_blocks = -(-min(end, len(sequences[index])) // ready.block_size)
            _move_on(loaded, tables[index][group_index], num_behind, num_blocks, free)
        rows = [Row(replace(install(index, sequences[index], []), block_tables=tuple(map(pack_ids, tables[index]))), bounds) for index in live]
        for row, each in zip(rows, slices, strict=True):
            row.apply(replace(each, new_block_ids=()), bounds)
            assert not row.error
        inputs = build_inputs(slices, rows, bounds, torch.device("cpu"))
        with torch.inference_mode():
            model = loaded.runner.model
            logits = model.head.gather(model.logits(model(inputs, loaded.runner.kv_cache)))
        for index, part in zip(live, logits.split([each.num_tokens for each in slices]), strict=True):
            parts[index].append(part)
    return [torch.cat(part) for part in parts]


def _move_on(loaded: Loaded, table: list[int], num_behind: int, num_blocks: int, free: list[int]) -> None:
    """Gives back the blocks behind the window, and takes as many as are needed."""
    for index in range(num_behind):
        if table[index] != BEHIND:
            loaded.runner.kv_cache.blocks[table[index]] = 0xFF
            free.insert(0, table[index])
            table[index] = BEHIND
    table += [free.pop() for _ in range(num_blocks - len(table))]


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
