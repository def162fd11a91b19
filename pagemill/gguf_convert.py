"""Turns a GGUF file into a folder in Hugging Face layout: `python -m pagemill.gguf_convert SOURCE.gguf FOLDER`.

Runs in a process of its own: it keeps a core busy for seconds, and needs numpy and tokenizers, which the launcher does
without. Weights become bfloat16 safetensors, one tensor at a time, at most
4 GiB to a file. The folder appears under its name only when it is complete and checked. Progress goes to standard
output as lines `FRACTION what happens`; an error is one line on standard error. Must not know the model store.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pagemill.gguf_file import GgufError, GgufFile
from pagemill.gguf_tokenizer import check, end_token_ids, write_tokenizer

MAX_SHARD_BYTES = 4 * 1024**3
_ROWS_AT_ONCE = 16384


def convert(source: Path, target: Path) -> None:
    """Writes `target`, which must not exist, from `source`."""
    _say(0.0, "reading the GGUF file")
    file = GgufFile(source)
    building = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        building.chmod(0o755)
        _write_config(file, building)
        _say(0.1, "converting the tokenizer")
        write_tokenizer(file, building)
        _write_weights(file, building)
        _say(0.8, "checking the result")
        check(file, building)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    _say(1.0, "converted")


def _write_config(file: GgufFile, folder: Path) -> None:
    config = {key: value for key, value in file.config().items() if value is not None} | {"dtype": "bfloat16"}
    if config["vocab_size"] < len(file.metadata["tokenizer.ggml.tokens"]):
        raise GgufError(f"the model has {config['vocab_size']} rows for {len(file.metadata['tokenizer.ggml.tokens'])} tokens")
    ends = end_token_ids(file)
    generation = {"bos_token_id": config.get("bos_token_id"), "eos_token_id": ends[0] if len(ends) == 1 else ends, "pad_token_id": config.get("pad_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {key: value for key, value in generation.items() if value not in (None, [])})


def _write_weights(file: GgufFile, folder: Path) -> None:
    shapes = file.shapes()
    shards = plan_shards(shapes, MAX_SHARD_BYTES)
    names = ["model.safetensors"] if len(shards) == 1 else [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    tensors = file.tensors()
    done = 0
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as output:
            output.write(safetensors_header({tensor: shapes[tensor] for tensor in shard}))
            for _, values in itertools.islice(tensors, len(shard)):
                for start in range(0, len(values), _ROWS_AT_ONCE):  # an embedding may be most of a model
                    output.write(to_bfloat16(values[start : start + _ROWS_AT_ONCE]).tobytes())
                done += 1
                if done % 16 == 0:
                    _say(0.1 + 0.7 * done / len(shapes), "converting weights to bfloat16")
    if len(shards) > 1:
        total_bytes = sum(2 * math.prod(shape) for shape in shapes.values())
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def safetensors_header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """What stands before the bytes of these bfloat16 tensors: a length and a JSON object, padded to 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def plan_shards(shapes: dict[str, tuple[int, ...]], max_bytes: int) -> list[list[str]]:
    """Consecutive names, as many to a file as fit."""
    shards: list[list[str]] = [[]]
    room = max_bytes
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        if size > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of the float32 words, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _say(fraction: float, what: str) -> None:
    print(f"{fraction:.2f} {what}", flush=True)


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m pagemill.gguf_convert SOURCE.gguf FOLDER", file=sys.stderr)
        return 2
    try:
        convert(Path(argv[0]).absolute(), Path(argv[1]).absolute())
    except GgufError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
