# SPDX-License-Identifier: MIT
import importlib.metadata
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from conftest import RunPyhobbit

import pyhobbit
from pyhobbit import convert
from pyhobbit.cli import chat, verbs
from pyhobbit.cli.help import COMMON
from pyhobbit.cli.main import main, with_options
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model import downloaded

VERBS = list(verbs._VERBS)


def _error_line(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("pyhobbit: error: ")
    return lines[0]


def test_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"pyhobbit {importlib.metadata.version('pyhobbit')}\n"


def _help(*arguments: str, capsys: pytest.CaptureFixture[str], option: str = "--help") -> str:
    with pytest.raises(SystemExit) as end:
        main([*arguments, option])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_names_every_command_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = _help(capsys=capsys)
    for verb in VERBS:
        assert f"    {verb} " in text
    assert re.findall(r"^(\w.*):$\n +(\w+)", text, re.MULTILINE) == [
        ("talk", "chat"), ("models", "pull"), ("tune, measure, others", "config")
    ]  # fmt: skip


@pytest.mark.parametrize("arguments", [[], ["help"]])
def test_without_a_command_the_help_is_shown(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = _help(capsys=capsys)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert (end.value.code, capsys.readouterr().out) == (0, text)


def test_help_names_the_values_of_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert "  --quality lossless|small-loss|fast\n" in _help("chat", capsys=capsys)
    policies = _help("chat", capsys=capsys, option="--help-all").partition("  --policy NAME")[2]
    assert {"echo,", "lru,"} <= set(policies.partition("(default")[0].split())


def _all_options(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    return _help(verb, capsys=capsys, option="--help-all" if verb in COMMON else "--help")


@pytest.mark.parametrize("arguments", [[], *([verb] for verb in VERBS)])
def test_all_lines_of_the_whole_help_fit_a_small_screen(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    option = "--help-all" if arguments and arguments[0] in COMMON else "--help"
    text = _help(*arguments, capsys=capsys, option=option)
    assert max(len(line) for line in text.splitlines()) <= 60


@pytest.mark.parametrize("arguments", [[], *([verb] for verb in VERBS)])
def test_the_help_fits_a_small_screen(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = _help(*arguments, capsys=capsys).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(" ".join(["usage: pyhobbit", *arguments]))
    assert lines[0].endswith("[options]")


@pytest.mark.parametrize("verb", COMMON)
def test_the_common_options_are_some_of_all(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    common, whole = _help(verb, capsys=capsys), _all_options(verb, capsys)
    assert f"pyhobbit {verb} --help-all" in common
    (n_all,) = re.findall(r"All (\d+) options", common)
    assert len(re.findall(r"^  (?:-|MODEL)", common, re.MULTILINE)) == len(COMMON[verb]) < int(n_all)
    for name in COMMON[verb]:
        assert f"  {name if name.startswith('-') else name.upper()}" in whole


@pytest.mark.parametrize("verb", ["bench", "chat", "config", "inspect", "serve"])
def test_the_whole_help_ends_with_the_keys_of_set(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    options, _, keys = _all_options(verb, capsys).partition("\nkeys of --set, for studies:\n")
    for name in ("--quality", "--policy", "--set"):
        assert f"  {name} " in options
    for name in ("low_share=F", "t1=F", "mode=gpu|cooperative|auto|twiddler", "strict=true|false"):
        assert re.search(rf"^  {re.escape(name)}\s", keys, re.MULTILINE), name
        assert f"--{name.partition('=')[0]}" not in options


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_says_what_it_does(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = _all_options(verb, capsys)
    options = re.findall(r"^  (-[^\n]*)\n(\s*)", text, re.MULTILINE)
    assert options
    for option, follows in options:
        # two spaces before the explanation, or a line of its own
        assert re.search(r"\S {2,}\S", option) or len(follows) > 10, option


def test_a_flag_with_a_number_or_size_says_its_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    for verb in ("chat", "config", "serve", "inspect", "calibrate", "convert"):
        text = _all_options(verb, capsys)
        for flag in ("--memory", "--threads", "--ctx", "low_share=F"):
            line = next((line for line in text.splitlines() if line.startswith(f"  {flag} ")), "default")
            assert "default" in line, (verb, line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "m.gguf", "--temp"], "--temp needs a value"),
        (["chat", "m.gguf", "--format"], "--format needs a value"),
        (
            ["chat", "m.gguf", "--memory", "-1G"],
            "--memory needs a value, with = before one that begins with -",
        ),
        (["chat", "m.gguf", "-n", "many"], "-n takes a number, not 'many'"),
    ],
)
def test_wrong_usage_is_one_sentence_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in _error_line(captured.err)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("hobbit.device_memory excludes hobbit.device", "--device-memory excludes --device"),
        ("hobbit.t1 (0.9) must not be above hobbit.t2", "t1 (0.9) must not be above t2"),
        ("device_memory is 0", "--device-memory is 0"),
        ("n_batch is 100000; n_batch", "--batch is 100000; n_batch"),
        ("my_model.hobbit.gguf is no file", "my_model.hobbit.gguf is no file"),
    ],
)
def test_errors_name_options(message: str, shown: str) -> None:
    assert with_options(message) == shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frob"], "there is no command 'frob'; there are chat, "),
        (["inspcet", "m.gguf"], "did you mean inspect?"),
        (["server", "m.gguf"], "did you mean serve?"),
        (["ru", "m.gguf"], "did you mean run?"),
        (["cal", "m.gguf"], "did you mean calibrate?"),
        (["quantize", "m.gguf"], "there is no command 'quantize'; there are chat, "),
        (["llama", "quantise"], "there is no program 'quantise' of llama.cpp; did you mean quantize?"),
        (["llama", "xyzzy"], "there is no program 'xyzzy' of llama.cpp; there are"),
        (
            ["user/name:Q4_0"],
            "a command is missing before 'user/name:Q4_0'; to talk to the model: pyhobbit chat user/",
        ),
        (["m.gguf"], "a command is missing before 'm.gguf'; to talk to the model: pyhobbit chat m.gguf"),
        (["chat"], "give a MODEL: a GGUF file, or USER/NAME[:QUANT] on Hugging Face"),
        (["chat", "m.gguf", "-hf", "a/b"], "give one"),
        (["chat", "-hf", "b"], "'b' is not a repository; write USER/NAME"),
        (["chat", "m.gguf", "--memmory", "1G"], "chat has no option --memmory; did you mean --memory?"),
        (["inspect", "m.gguf", "--foo"], "inspect has no option --foo; see: pyhobbit inspect --help"),
        (["serve", "m.gguf", "--foo"], "serve has no option --foo; see: pyhobbit serve --help"),
        (["inspect", "m.gguf", "--n-predict", "5"], "inspect has no option --n-predict; see"),
        (["chat", "https://example.com/m.gguf"], "is not an address on Hugging Face; download the file"),
        (["pull", "m.gguf"], "m.gguf is not on Hugging Face; write USER/NAME[:QUANT]"),
        (["rm", "m.gguf"], "m.gguf is no download, and rm deletes downloads only"),
        (["chat", "m.gguf", "--memory", "8"], "'8' is 8 bytes; for GiB write 8G"),
        (["chat", "m.gguf", "--format", "yaml"], "--format takes json, a JSON schema, or"),
        (["chat", "m.gguf", "--format", "{"], "the file of one: Expecting property name"),
        (["chat", "m.gguf", "-j", '{"type": "no"}'], "the file of one: Unrecognized schema"),
        (["chat", "m.gguf", "--memor", "1G"], "chat has no option --memor; did you mean --memory?"),
        (["chat", "m.gguf", "--xyzzy"], "chat has no option --xyzzy; see: pyhobbit chat --help"),
        (["chat", "m.gguf", "n.gguf"], "'n.gguf' is one argument too many; put a prompt between"),
        (["chat", "m.gguf", "why", "not"], "'not' is one argument too many; put a prompt between quotes"),
        (["run", "m.gguf", "--foo"], "run has no option --foo; see: pyhobbit run --help"),
        (["chat", "--temprature", "1"], "chat has no option --temprature; did you mean --temp?"),
        (["serve", "m.gguf", "n.gguf"], "'n.gguf' is one argument too many: give one model, or --models-dir"),
        (
            ["serve", "m.gguf", "--models-dir", "d"],
            "one model, or a folder by --models-dir: give one of them",
        ),
        (["inspect", "m.gguf", "n"], "'n' is one argument too many; see: pyhobbit inspect --help"),
    ],
)
def test_what_is_not_known_gets_the_nearest_that_is(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in _error_line(captured.err)


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        ("run m.gguf -c 5 -t 2 -s 3", "chat m.gguf --ctx 5 --threads 2 --seed 3"),
        ("chat --ctx-size=5 -m m.gguf --temperature 0.5", "chat m.gguf --ctx 5 --temp 0.5"),
        ("chat --model=m.gguf --n-predict 4 --max-tokens=5", "chat m.gguf -n 4 -n 5"),
        ("config -p x -m m.gguf --num-ctx 5", "config -p x m.gguf --ctx 5"),
        ("show m.gguf -c 5 -t 1", "inspect m.gguf --ctx 5 --threads 1"),
        (
            "calibrate -m m.gguf --text a.txt -c 128 -t 1",
            "calibrate m.gguf --text a.txt --ctx 128 --threads 1",
        ),
        ("bench -m m.gguf -t 1", "bench m.gguf --threads 1"),
        ("convert -m m.gguf -t 1", "convert m.gguf --threads 1"),
        ("ls", "list"),
        ("run m.gguf -f a.txt -b 512", "chat m.gguf --file a.txt --batch 512"),
        ("inspect m.gguf --cpu-moe", "inspect m.gguf --device=CPU"),
    ],
)
def test_the_words_of_other_programs_are_understood(
    arguments: str, same: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def parse_known_args(self: object, args: list[str]) -> NoReturn:
        seen.append(args)
        raise HobbitError("seen")

    monkeypatch.setattr(verbs.Parser, "parse_known_args", parse_known_args)
    for each in (arguments, same):
        assert main(each.split()) == 1
    capsys.readouterr()
    assert [sorted(each) for each in seen] == [sorted(same.split()[1:])] * 2


@pytest.mark.parametrize("arguments", [["help"], ["help", "chat"], ["help", "run"]])
def test_help_is_a_word_too(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    assert capsys.readouterr().out == _help(
        *{"run": ["chat"]}.get(arguments[-1], arguments[1:]), capsys=capsys
    )


@pytest.mark.parametrize(("typed", "status"), [("2", 0), ("0", 2), ("3", 2), ("", 2), ("a.gguf", 2)])
def test_a_terminal_is_asked_which_of_the_models_here_is_meant(
    typed: str,
    status: int,
    tiny_gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "below").mkdir()
    for name in ("a.gguf", "b.gguf", "below/c.gguf"):
        (tmp_path / name).symlink_to(tiny_gguf)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(downloaded, "downloaded_models", list)
    monkeypatch.setattr(downloaded, "models_of_programs", list)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{typed}\n"))
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    opened = []
    monkeypatch.setattr(chat, "chat", lambda model, *_: opened.append(model) or 0)
    assert main(["run", "-p", "x"]) == status
    assert opened == [Path("b.gguf")] * (status == 0)
    asked = capsys.readouterr().err
    assert re.search(r"^ +MODEL .*\n  1  a.gguf .*\n  2  b.gguf .*\nWhich number\? ", asked)
    assert ("none of the numbers" in asked) == (status == 2)


@pytest.mark.parametrize("terminals", [(), ("stdin",), ("stderr",)])
def test_nobody_is_asked_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_gguf: Path, terminals: tuple[str, ...]
) -> None:
    (tmp_path / "a.gguf").symlink_to(tiny_gguf)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n"))
    for name in ("stdin", "stderr"):
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda name=name: name in terminals)
    assert main(["run", "-p", "x"]) == 2
    assert sys.stdin.read() == "1\n"


@pytest.mark.parametrize("name", ["run", "show"])
def test_other_names_have_a_help_that_says_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = _help(name, capsys=capsys)
    assert text.startswith(f"usage: pyhobbit {name} [MODEL] ")
    assert f"Example: pyhobbit {name} m.gguf" in text


def test_the_package_says_its_version() -> None:
    assert pyhobbit.__version__ == importlib.metadata.version("pyhobbit")


def test_the_package_names_what_it_has() -> None:
    assert {*pyhobbit.__all__, "__version__"} <= {*dir(pyhobbit)}


def test_a_verb_may_read_its_arguments_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "parse", lambda parser, rest: (parser.prog, rest), raising=False)
    monkeypatch.setattr(convert, "run", lambda args: 7 if args == ("pyhobbit convert", ["-x", "4"]) else 1)
    assert main(["convert", "-x", "4"]) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "5x"], "'5x' is not a size"),
        (["--pools", ""], "'' is not a size"),
        (["--set", "t1=0.9", "--set", "t2=0.5"], "t1 (0.9) must not be above t2 (0.5)"),
        (["--set", "t1=2"], "between 0 and 1"),
        (["-n", "0"], "-n is 0"),
        (["--ctx", "-1"], "--ctx is -1"),
        (["--threads", "0"], "--threads is 0"),
        (["--threads", "513"], "at most 512 threads"),
        (["--device-memory", "1G", "--pools", "1G"], "--device-memory limits all that experts take on a GPU"),
        (["--temp", "-1"], "temp is -1.0"),
        (["--seed", "-2"], "seed is -2; it must lie between"),
        (["--stats-json", "/no/such/folder/s.json"], "does not exist; create it first"),
    ],
)
def test_a_wrong_value_is_found_before_the_model_is_touched(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "/no/such/model.gguf", "-p", "x", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in _error_line(captured.err)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (HobbitError("it is so"), 1, "pyhobbit: error: it is so\n"),
        (ConfigError("it is so"), 2, "pyhobbit: error: it is so\n"),
        (MemoryError(), 1, "pyhobbit: error: there is not enough memory; free some, or use a smaller "),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_each_kind_of_error_has_its_status(
    error: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _fail_with(error, monkeypatch)
    assert main(["chat", "m.gguf", "-p", "x"]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(said)
    assert len(captured.err.splitlines()) == (status != 130)


def test_ctrl_c_on_a_terminal_ends_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _fail_with(KeyboardInterrupt(), monkeypatch)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["chat", "m.gguf", "-p", "x"]) == 130
    assert capsys.readouterr().err == "\n"  # behind the terminal's ^C


def _fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> int:
        raise error

    monkeypatch.setattr(chat, "chat", fail)


def test_an_error_of_ours_is_no_traceback_but_a_bug_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_with(AssertionError(), monkeypatch)
    with pytest.raises(AssertionError):
        main(["chat", "m.gguf", "-p", "x"])


def test_a_reader_that_went_away_ends_the_program_quietly(tmp_path: Path) -> None:
    program = "import sys\nfrom pyhobbit.cli import chat, main\n"
    program += "def endless(*_):\n    while True:\n        print('text', flush=True)\n"
    program += "chat.chat = endless\nsys.exit(main.main(['chat', 'm.gguf', '-p', 'x']))\n"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_the_command_line_needs_no_native_library_for_its_help(tmp_path: Path) -> None:
    program = "import sys\nfrom pyhobbit.cli import main\n"
    program += "heavy = {'llama_cpp', 'torch', 'transformers', 'pyhobbit._hobbit_c'} & set(sys.modules)\n"
    program += "sys.exit(', '.join(heavy) or 0)\n"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def _streams(command: str, tmp_path: Path) -> "subprocess.CompletedProcess[str]":
    program = f'unset PYTHONUNBUFFERED; "{sys.executable}" -m pyhobbit {command}'
    return subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--version >/dev/full", "No space left on device"),
        ("chat m.gguf -p x >&-", "standard output is closed"),
        ("chat m.gguf <&-", "standard input is closed"),
    ],
)
def test_a_stream_that_cannot_be_used_is_one_sentence(command: str, message: str, tmp_path: Path) -> None:
    done = _streams(command, tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert message in _error_line(done.stderr)


@pytest.mark.parametrize("closed", ["2>/dev/full", "2>&-"])
def test_an_error_that_cannot_be_written_still_has_its_status(closed: str, tmp_path: Path) -> None:
    assert _streams(f"chat m.gguf -p x {closed}", tmp_path).returncode == 1
    assert _streams(f"frob {closed}", tmp_path).returncode == 2


def test_ctrl_c_while_the_program_starts_is_quiet(tmp_path: Path) -> None:
    program = "import os, signal, sys\nfrom pyhobbit.cli import main\n"
    program += "class Finder:\n    def find_spec(self, name, *_):\n"
    program += "        if name == 'argparse': os.kill(os.getpid(), signal.SIGINT)\n"
    program += "sys.meta_path.insert(0, Finder())\nsys.exit(main.main(['--version']))\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("name", ["quantize", "llama-quantize"])
def test_llama_becomes_the_program(name: str, run_pyhobbit: RunPyhobbit) -> None:
    done = run_pyhobbit("llama", name, "--help")
    assert (done.returncode, done.stderr) == (1, "")  # as of llama-quantize itself
    assert re.match(r"usage: \S+/llama-quantize \[--help\]", done.stdout)
