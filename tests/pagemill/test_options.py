"""The command line and the TOML file, as an operator meets them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagemill.cli import main
from pagemill.config import ServeOptions
from pagemill.errors import UsageError
from pagemill.foreign_flags import _ADVICE, advice_on
from pagemill.options import OneLineParser, add_serve_arguments, parse_number, refuse_unknown, resolve_options, serve_options

FLAGS = [
    "--config",
    "--served-model-name",
    "--device",
    "--dtype",
    "--max-model-len",
    "--tensor-parallel-size",
    "--deterministic",
    "--host",
    "--port",
    "--api-key-file",
    "--admin-key-file",
    "--strict-request",
    "--frontends",
    "--max-connections",
    "--max-queue-time",
    "--drain-timeout",
    "--restart-limit",
    "--step-timeout",
    "--block-size",
    "--num-blocks",
    "--kv-cache-memory",
    "--prefix-caching",
    "--shared-prefix-cache",
    "--swap-memory",
    "--preemption",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--scheduling-policy",
    "--max-plans-in-flight",
    "--metrics-compat",
    "--log-format",
    "--log-level",
    "--log-requests",
    "--event-log",
    "--check-invariants",
    "--inject",
]


def parse(*argv: str) -> ServeOptions:
    parser = OneLineParser(prog="pagemill serve", allow_abbrev=False)
    add_serve_arguments(parser)
    arguments, unknown = parser.parse_known_args(argv)
    refuse_unknown(unknown)
    return resolve_options(vars(arguments))


def test_every_published_flag_exists_and_no_other() -> None:
    assert {"--config", *(option.flag for option in serve_options() if option.name != "model")} == set(FLAGS)


def test_nothing_given_means_the_defaults() -> None:
    assert parse() == ServeOptions()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("25.6k", 25_600),
        ("1m", 10**6),
        ("512MiB", 2**29),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("7Ti", 7 * 2**40),
    ],
)
def test_numbers_are_read_with_their_units(text: str, number: int) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "-1", "12q", "1e3", "0x10", "1 2", "٣", "½"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    assert parse_number(text) is None


def test_large_sizes_lose_no_byte() -> None:
    assert parse_number("9007199254740993") == 9007199254740993


def test_spellings_of_vllm_mean_the_same() -> None:
    theirs = parse("--kv-cache-memory-bytes", "1GiB", "--num-gpu-blocks-override", "7", "--no-enable-prefix-caching", "-tp", "4")
    assert theirs == parse("--kv-cache-memory", "1GiB", "--num-blocks", "7", "--no-prefix-caching", "--tensor-parallel-size", "4")
    assert not theirs.prefix_caching


def test_auto_is_zero_where_zero_is_automatic() -> None:
    assert parse("--max-model-len", "auto").max_model_len == 0
    with pytest.raises(UsageError, match="--max-num-seqs accepts a number, from 1 to 4096; not 'auto'"):
        parse("--max-num-seqs", "auto")


def test_where_zero_has_a_meaning_auto_is_another() -> None:
    assert [parse(*argv).swap_memory for argv in ([], ["--swap-memory", "auto"], ["--swap-memory", "0"], ["--swap-memory", "2GiB"])] == [None, None, 0, 2**31]


def test_deterministic_has_three_states() -> None:
    assert [parse().deterministic, parse("--deterministic").deterministic, parse("--no-deterministic").deterministic] == [None, True, False]


def test_served_names_are_collected() -> None:
    assert parse("--served-model-name", "a", "b").served_model_name == ("a", "b")
    assert parse("--served-model-name", "a", "b", "--served-model-name", "c").served_model_name == ("a", "b", "c")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--port", "70000"], "--port accepts a number, from 0 to 65535; not '70000'"),
        (["--port", "-1"], "--port accepts a number, from 0 to 65535; not '-1'"),
        (["--dtype", "int4"], "--dtype accepts one of auto, float32, bfloat16, float16; not 'int4'"),
        (["--kv-cache-memory", "lots"], "--kv-cache-memory accepts auto or a size such as 512MiB, at least 1; not 'lots'"),
        (["--swap-memory", "lots"], "--swap-memory accepts auto or a size such as 512MiB, at least 0; not 'lots'"),
        (["--swap-memory", "-1"], "--swap-memory accepts auto or a size such as 512MiB, at least 0; not '-1'"),
        (["--preemption", "never"], "--preemption accepts one of auto, swap, recompute; not 'never'"),
        (["--max-plans-in-flight", "3"], "--max-plans-in-flight accepts a number, from 1 to 2; not '3'"),
        (["--cpu-offload", "1GiB"], "no --cpu-offload"),
        (["--prot", "8000"], "there is no --prot in this version; did you mean --port? (see pagemill serve --help)"),
        (["--max-num", "3"], "no --max-num in this version (see"),
        (["--bogus"], "there is no --bogus in this version (see pagemill serve --help)"),
        (["--no-prefix-cachin"], "did you mean --no-prefix-caching?"),
        (["--max_num_seqs", "4"], "did you mean --max-num-seqs?"),
        (["--model", "m"], "there is no --model: the model is given as an argument: pagemill serve MODEL\n"),
        (["--gpu_memory_utilization=0.9", "m"], "there is no --gpu_memory_utilization: size the KV pool with --kv-cache-memory or --num-blocks\n"),
        (["--speculative-model", "m"], "there is no --speculative-model: speculative decoding is not in this version\n"),
        (["m", "n", "--port", "1"], "pagemill serve takes one MODEL; 'n' is one argument too many"),
        (["--port"], "expected one argument"),
        (["--block-size", "0"], "--block-size accepts auto or a number, from 1 to 256; not '0'"),
        (["--kv-cache-memory", "0"], "--kv-cache-memory accepts auto or a size such as 512MiB, at least 1; not '0'"),
        (["--api-key-file", ""], "--api-key-file accepts a text that is not empty; not ''"),
        (["--served-model-name", "a", ""], "--served-model-name accepts one or more names"),
        (["--config", ""], "--config: cannot read"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *argv]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_no_flag_of_ours_is_taken_for_one_of_another_server() -> None:
    flags = [flag for option in serve_options() if option.name != "model" for flag in (option.flag, *option.aliases)]
    assert [flag for flag in flags if advice_on(flag)] == []


def test_advice_names_flags_that_exist() -> None:
    named = {flag for advice in _ADVICE for flag in re.findall(r"--[a-z-]+", advice)}
    assert {"--max-model-len", "--no-prefix-caching"} <= named <= {*FLAGS, "--no-prefix-caching"}


def test_the_version_has_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--port"]) == 2
    assert capsys.readouterr().err == "pagemill: pagemill version takes no arguments; not --port\n"


def test_command_line_wins_over_file_and_file_over_default(tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text(
        'model = "m"\nport = 9000\nkv_cache_memory = "512MiB"\nmax_num_seqs = 8\nprefix_caching = false\nserved_model_name = ["a"]\n'
        'swap_memory = "auto"\npreemption = "swap"\n'
    )
    options = parse("--config", str(config), "--port", "9001", "--prefix-caching")
    assert (options.model, options.port, options.kv_cache_memory, options.max_num_seqs) == ("m", 9001, 2**29, 8)
    assert options.prefix_caching
    assert options.served_model_name == ("a",)
    assert (options.swap_memory, options.preemption) == (None, "swap")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("prot = 1", "unknown key 'prot'; did you mean port?"),
        ("port = 70000", "--port accepts a number, from 0 to 65535; not 70000"),
        ('prefix_caching = "yes"', "--prefix-caching accepts true or false; not 'yes'"),
        ("port = true", "--port accepts"),
        ("num_blocks = 0", "--num-blocks accepts auto or a number, from 1 to"),
        ('admin_key_file = ""', "--admin-key-file accepts a text that is not empty; not ''"),
        ("swap_memory = -1", "--swap-memory accepts auto or a size such as 512MiB, at least 0; not -1"),
        ("[server]\nport = 1", "unknown key 'server'"),
        ("port = ", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, content: str, says: str) -> None:
    config = tmp_path / "serve.toml"
    config.write_text(content)
    with pytest.raises(UsageError, match=says.replace("?", r"\?")):
        parse("--config", str(config))


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--config: cannot read"):
        parse("--config", str(tmp_path / "none.toml"))


def test_help_lists_flags_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert [text.index(f"{group}:\n") for group in ("Model", "Server", "KV memory", "Scheduling", "Observation")] == sorted(
        text.index(f"{group}:\n") for group in ("Model", "Server", "KV memory", "Scheduling", "Observation")
    )
    assert all(flag in text for flag in FLAGS)
