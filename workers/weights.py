"""Reading checkpoints: one tensor at a time, or a part of it, by its Hugging Face name, from safetensors files.

Files are mapped, not loaded: what is read is this rank's copy after conversion, and the pages behind it may
be dropped by the kernel. Names in the index are data and never leave the folder. Which tensors
a model needs, and in which shape, is the model's business.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, cast

import msgspec
import safetensors
from torch import Tensor

from workers.model_config import ModelRefused

#: A part of a tensor: one slice for each of its leading dimensions; () is all of it.
Part = tuple[slice, ...]


class Checkpoint(Protocol):
    """Tensors by their Hugging Face names."""

    @property
    def size_bytes(self) -> int:
        """Of all tensors as they are read, roughly; for progress."""
        ...

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor. The name must be one of `names`."""
        ...

    def read(self, name: str, part: Part = ()) -> Tensor:
        """On the CPU, in the file's own type; no more of the file than it must. The name must be one of `names`."""
        ...

    def close(self) -> None:
        """Unmaps the files; tensors that were read remain valid only if they have been copied."""
        ...


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...


class _OpenFile(Protocol):
    """What `safe_open` gives; the package types it as a stub."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...
    def get_slice(self, name: str) -> _Slice: ...


class SafetensorsCheckpoint:
    """`model.safetensors`, or the files that `model.safetensors.index.json` names."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._files: dict[str, _OpenFile] = {}  #: tensor name -> the open file that holds it
        paths = _files(folder)
        self.size_bytes = sum(path.stat().st_size for path in paths)
        for path in paths:
            opened = self._open(path)
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str, part: Part = ()) -> Tensor:
        return self._files[name].get_tensor(name)[part]  # a view of the mapping: only what is copied from it is read

    def close(self) -> None:
        self._files.clear()
        self._stack.close()

    def _open(self, path: Path) -> _OpenFile:
        try:
            return cast(_OpenFile, self._stack.enter_context(safetensors.safe_open(path, framework="pt")))
        except (OSError, safetensors.SafetensorError) as error:
            raise ModelRefused(f"{path} is not a readable safetensors file: {error}") from error


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise ModelRefused(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")
        return [single]
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except msgspec.MsgspecError as error:
        raise ModelRefused(f"{index} is not understood: {error}") from error
    files = sorted(set(weight_map.values()))
    for file in files:
        if Path(file).name != file:
            raise ModelRefused(f"{index} names the file {file!r} outside its folder")
        if not (folder / file).exists():
            raise ModelRefused(f"{folder} lacks the file {file}, which its index names")
    return [folder / file for file in files]
